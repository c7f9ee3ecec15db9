"""Distances of generated texts from private ones: exact copies, nearest neighbours.

These numbers describe; they attack nothing and guarantee nothing. A set without a copy
may still tell who was in the data, and a copy need be no leak: short queries recur, and
a public document may say the same. Attacks are in `auditing`.

A distance comes with a control: how near *held-out* private texts, which no model has
seen, come to the same private ones. Texts generated for the private texts' own
documents are nearer to them than held-out texts on other documents, also when the
generator has never seen a private text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import scipy.stats

from tfdpsq.evaluation.diversity import describe
from tfdpsq.validation import InputError
from tfdpsq.words import text_hashes


def exact_copies(texts: Iterable[str], private: Iterable[str]) -> dict[str, Any]:
    """Counts the texts that have the words of a private one, in the same order.

    Texts are compared by 63 bits of a hash: of a million and ten million, any two
    share one by accident in 1 of a million cases.

    Args:
      texts: generated texts, or the held-out ones of the control; at least one.
      private: the texts they may be copies of; both are streamed.

    Returns:
      "count" of copies, their "share" of the texts, and how many "distinct" private
      texts were met.
    """
    known = set(text_hashes(private))
    met = [key if key in known else None for key in text_hashes(texts)]
    if not met:
        raise InputError("texts is empty; give at least one text.")
    count = len(met) - met.count(None)
    distinct = len(set(met) - {None})
    return {"count": count, "share": count / len(met), "distinct": distinct}


def closeness(synthetic: np.ndarray, held_out: np.ndarray) -> dict[str, Any]:
    """Compares distances to the closest private text with those of the control.

    Args:
      synthetic: [n] distances of generated texts, by `nearest_by_cosine` or any other
        measure, to the texts that the generator was trained on.
      held_out: [m] distances of held-out private texts to the same texts, by the same
        measure.

    Returns:
      "synthetic" and "held_out", by `describe`; the "ratio" of their medians, `None`
      where the control's is 0; and "closer", the chance that a generated text is closer
      than a held-out one, ties counting half: 0.5 where they are no closer.
    """
    one, other = describe(synthetic), describe(held_out)
    median = other["quantiles"]["0.5"]
    # Mann and Whitney's U counts the pairs in which a held-out text is farther.
    farther = scipy.stats.mannwhitneyu(held_out, synthetic).statistic
    return {
        "synthetic": one,
        "held_out": other,
        "ratio": one["quantiles"]["0.5"] / median if median > 0 else None,
        "closer": float(farther / (one["count"] * other["count"])),
    }


def gram_vectors(texts: Sequence[str]) -> Any:
    """Returns which runs of five characters each text has, as a sparse [n, 2^20].

    In lower case, with blanks, and with signs of its beginning and end. Their cosine is
    about .8 where one word of eight was changed.
    """
    from sklearn.feature_extraction.text import HashingVectorizer  # takes a second

    return HashingVectorizer(
        analyzer="char",
        ngram_range=(5, 5),
        preprocessor=lambda text: f"\2\2{' '.join(text.casefold().split())}\3\3\3",
        binary=True,
        alternate_sign=False,
    ).transform(texts)


def nearest_by_cosine(vectors: Any, private: Any) -> np.ndarray:
    """1 - cosine to the nearest private vector, in memory that does not grow.

    Args:
      vectors: [n, d] floating point, of any length but 0; `gram_vectors` or features.
      private: [m, d] of the same kind.

    Returns:
      [n] float64 in [0, 2].
    """
    from sklearn.metrics import pairwise_distances_argmin_min

    if vectors.shape[1] != private.shape[1]:
        raise InputError(
            f"vectors have width {vectors.shape[1]}, private {private.shape[1]}; make "
            "both by the same model."
        )
    _, found = pairwise_distances_argmin_min(
        vectors.astype(np.float64), private.astype(np.float64), metric="cosine"
    )
    return found

"""Diversity of texts: distinct n-grams, lengths, vocabulary.

Words are those of `normalization.words_of`. Everything here is deterministic. Most of
it depends on how many texts there are: more texts repeat more n-grams, and hold more
words. So two sets are compared at one size.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import scipy.special

from tfdpsq.evaluation.text.distribution import (
    Distribution,
    describe,
    shares,
    total_variation,
)
from tfdpsq.evaluation.text.normalization import words_of
from tfdpsq.validation import InputError, positive_integer


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The words of a set of texts.

    Attributes:
      tokens: words, with their repetitions.
      types: different words.
      entropy: of a word drawn from them, in bits; as counted, which is below the
        entropy of what the texts were drawn from.
    """

    tokens: int
    types: int
    entropy: float


@dataclasses.dataclass(frozen=True)
class VocabularyDifference:
    """Two sets' words, compared.

    Attributes:
      jensen_shannon: distance of the two distributions of words, the square root of
        their Jensen-Shannon divergence in bits: 0 for equal ones, 1 for sets without a
        common word. Two samples of one distribution are above 0.
      types_seen: share of the first set's different words that the second has.
      tokens_seen: the same of its words with their repetitions.
    """

    jensen_shannon: float
    types_seen: float
    tokens_seen: float


def distinct_n(texts: Sequence[str], most: int = 4) -> dict[int, float | None]:
    """Different n-grams as a share of all, over the whole set (Li et al. 2016).

    Args:
      texts: the set; an n-gram is within one text.
      most: the largest n.

    Returns:
      For n from 1 to `most` the share, in (0, 1], or `None` where no text has n words.

    Raises:
      InputError: one text instead of several, none at all, or `most` below 1.
    """
    positive_integer("most", most)
    words = _words("texts", texts)
    found: dict[int, float | None] = {}
    for n in range(1, most + 1):
        grams = Counter(
            gram for text in words for gram in zip(*(text[i:] for i in range(n)))
        )
        total = sum(grams.values())
        found[n] = len(grams) / total if total else None
    return found


def text_lengths(texts: Sequence[str]) -> Distribution:
    """Describes the numbers of words of the texts.

    Raises:
      InputError: one text instead of several, or none at all.
    """
    return describe([len(text) for text in _words("texts", texts)])


def length_difference(first: Sequence[str], second: Sequence[str]) -> float:
    """Total variation distance of two sets' lengths in words; see `total_variation`.

    Raises:
      InputError: one text instead of several, or none at all.
    """
    return total_variation(
        [len(text) for text in _words("first", first)],
        [len(text) for text in _words("second", second)],
    )


def vocabulary(texts: Sequence[str]) -> Vocabulary:
    """The words of a set of texts.

    Raises:
      InputError: one text instead of several, or none at all.
    """
    counts = Counter(word for text in _words("texts", texts) for word in text)
    of_each = shares(counts, list(counts))
    entropy = float(scipy.special.entr(of_each).sum() / np.log(2))
    return Vocabulary(sum(counts.values()), len(counts), entropy)


def vocabulary_difference(
    first: Sequence[str], second: Sequence[str]
) -> VocabularyDifference:
    """Compares the words of two sets of texts.

    Args:
      first: the set whose words are looked for in the other.
      second: the other set.

    Raises:
      InputError: one text instead of several, none at all, or none with a word.
    """
    one, other = _counts("first", first), _counts("second", second)
    keys = sorted(one.keys() | other.keys())
    p, q = shares(one, keys), shares(other, keys)
    middle = (p + q) / 2
    to_middle = (scipy.special.rel_entr(a, middle).sum() for a in (p, q))
    divergence = sum(to_middle) / 2 / np.log(2)
    seen = [word for word in one if word in other]
    return VocabularyDifference(
        jensen_shannon=float(np.sqrt(min(max(divergence, 0.0), 1.0))),
        types_seen=len(seen) / len(one),
        tokens_seen=sum(one[word] for word in seen) / sum(one.values()),
    )


def _counts(name: str, texts: Sequence[str]) -> Counter[str]:
    counts = Counter(word for text in _words(name, texts) for word in text)
    if not counts:
        raise InputError(f"none of the {len(texts)} texts of {name} holds a word.")
    return counts


def _words(name: str, texts: Iterable[str]) -> list[list[str]]:
    if isinstance(texts, str):
        raise InputError(f"{name} is one text; give a list of texts.")
    words = [words_of(text) for text in texts]
    if not words:
        raise InputError(f"{name} is empty; give at least one text.")
    return words

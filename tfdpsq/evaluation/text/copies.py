"""Distances of generated texts from private ones: exact copies, nearest neighbours.

**What these numbers are**: a description, by reading the private texts themselves. They
attack nothing and guarantee nothing. A set without a single copy may still tell who was
in the data, and a copy need be no leak: short queries recur, and what a public document
says in so many words can be written without having seen any query. Guarantees are the
certificate's; attacks are `auditing`'s.

A distance alone says nothing, as texts on one subject are close to each
other. So it comes with a control: how near *held-out* private texts, which no model has
seen, come to the same private ones. Mind what else the two differ in: texts generated
for the private texts' own documents are nearer to them than held-out texts on other
documents, also when the generator has never seen a private text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import scipy.sparse

from tfdpsq.evaluation.text.distribution import Distribution, describe
from tfdpsq.evaluation.text.normalization import normalized
from tfdpsq.validation import InputError, positive_integer

# Pairs of texts that are compared at once by their runs; those that share one take
# twelve bytes.
_CELLS = 1 << 23


@dataclasses.dataclass(frozen=True)
class ExactCopies:
    """Texts that are equal to a private one, by `normalization.TEXT_NORMALIZATION`.

    Attributes:
      count: how many of the texts.
      share: of all texts, in [0, 1].
      distinct: how many different private texts were met.
    """

    count: int
    share: float
    distinct: int


@dataclasses.dataclass(frozen=True)
class Closeness:
    """Distances to the closest private text, with their control.

    Attributes:
      synthetic: of the generated texts.
      held_out: of the held-out private texts, the control.
      ratio: median of the first over that of the control; `None` where the latter is 0.
      closer: the chance that a generated text is closer than a held-out one, ties
        counting half: 0.5 where generated texts are no closer than held-out ones.
    """

    synthetic: Distribution
    held_out: Distribution
    ratio: float | None
    closer: float


def exact_copies(texts: Iterable[str], private: Sequence[str]) -> ExactCopies:
    """Counts the texts that are equal to a private one.

    Texts are compared by 64 bits of a hash: of a million and ten million texts, any
    two share one by accident in 1 of 2 million cases.

    Args:
      texts: generated texts, or the held-out ones of the control; streamed.
      private: the texts they may be copies of; 8 bytes of each are kept.

    Raises:
      InputError: one text instead of several, or none at all.
    """
    _require_texts(private=private)
    if isinstance(texts, str):
        _require_texts(texts=texts)
    known = np.fromiter(map(_hash, private), np.uint64, len(private))
    known.sort()
    count = met = 0
    distinct = set()
    for text in texts:
        count += 1
        key = _hash(text)
        if known[min(np.searchsorted(known, key), len(known) - 1)] == key:
            met += 1
            distinct.add(key)
    if not count:
        _require_texts(texts=())
    return ExactCopies(met, met / count, len(distinct))


def _hash(text: str) -> np.uint64:
    data = normalized(text).encode("utf-8", "surrogatepass")
    return np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint64)[0]


def closeness(synthetic: np.ndarray, held_out: np.ndarray) -> Closeness:
    """Compares distances to the closest private text with those of the control.

    Args:
      synthetic: [n] distances of generated texts, by `nearest_by_cosine`, by
        `GramIndex.nearest`, or any other, to the texts that the generator was trained
        on.
      held_out: [m] distances of held-out private texts to the same texts, by the same
        measure.

    Raises:
      InputError: no distances on a side, or one that is not finite.
    """
    one, other = describe(synthetic), describe(held_out)
    control = np.sort(held_out)
    below = np.searchsorted(control, synthetic, "left")
    above = len(control) - np.searchsorted(control, synthetic, "right")
    median = other.quantiles["0.5"]
    return Closeness(
        synthetic=one,
        held_out=other,
        ratio=one.quantiles["0.5"] / median if median > 0 else None,
        closer=float(0.5 + (above - below).mean() / (2 * len(control))),
    )


def nearest_by_cosine(
    vectors: np.ndarray, private: np.ndarray, block: int = 1024
) -> np.ndarray:
    """1 - cosine to the nearest private vector, in memory that does not grow.

    Args:
      vectors: [n, d] floating point, of any length but 0.
      private: [m, d] of the same model.
      block: rows of both that are compared at a time.

    Returns:
      [n] float64 in [0, 2], right to about 1e-6.

    Raises:
      InputError: no matrices, of different widths, or a row that is 0 or not finite.
    """
    positive_integer("block", block)
    ours, theirs = _unit("vectors", vectors), _unit("private", private)
    if ours.shape[1] != theirs.shape[1]:
        raise InputError(
            f"vectors have width {ours.shape[1]}, private {theirs.shape[1]}; make both "
            "by the same model."
        )
    found = np.empty(len(ours), np.float64)
    for start in range(0, len(ours), block):
        rows = ours[start : start + block]
        best = np.full(len(rows), -np.inf, np.float32)
        where = np.zeros(len(rows), np.int64)
        for other in range(0, len(theirs), block):
            cosines = rows @ theirs[other : other + block].T
            nearest = cosines.argmax(axis=1)
            values = cosines[np.arange(len(rows)), nearest]
            better = values > best
            best[better] = values[better]
            where[better] = nearest[better] + other
        # 1 - cosine of unit vectors, without the digits that the difference from 1
        # would lose.
        apart = rows.astype(np.float64) - theirs[where]
        found[start : start + block] = (apart**2).sum(axis=1) / 2
    return found


class GramIndex:
    """Private texts, by the runs of characters in them: an inverted index.

    A text is the set of the runs of `size` characters in its normalised form, blanks
    included; a shorter text is one run. One changed word in a query of eight leaves
    about four fifths of the runs.
    """

    def __init__(self, private: Sequence[str], size: int = 5):
        """Indexes the texts.

        Args:
          private: m texts.
          size: characters in a run.

        Raises:
          InputError: one text instead of several, none at all, or a size below 1.
        """
        _require_texts(private=private)
        self._size = positive_integer("size", size)
        self._numbers: dict[str, int] = {}
        rows = [
            [self._numbers.setdefault(gram, len(self._numbers)) for gram in grams]
            for grams in (_grams(text, size) for text in private)
        ]
        self._lengths = np.array([len(row) for row in rows])
        self._postings = _incidence(rows, len(self._numbers)).T.tocsr()

    def nearest(self, texts: Sequence[str]) -> np.ndarray:
        """1 - Jaccard similarity to the nearest private text.

        Args:
          texts: n texts; memory does not grow with n.

        Returns:
          [n] float64 in [0, 1]; 0 for texts of the same runs, 1 where none is shared.

        Raises:
          InputError: one text instead of several, or none at all.
        """
        _require_texts(texts=texts)
        found = np.ones(len(texts), np.float64)
        at_once = max(1, _CELLS // len(self._lengths))
        for start in range(0, len(texts), at_once):
            sets = [_grams(text, self._size) for text in texts[start : start + at_once]]
            known = [[self._numbers.get(gram, -1) for gram in grams] for grams in sets]
            rows = [[number for number in row if number >= 0] for row in known]
            shared = _incidence(rows, len(self._numbers)) @ self._postings
            met = np.diff(shared.indptr)
            own = np.repeat([len(grams) for grams in sets], met)
            either = own + self._lengths[shared.indices] - shared.data
            some = np.flatnonzero(met)
            if len(some):
                found[start + some] = 1 - np.maximum.reduceat(
                    shared.data / either, shared.indptr[some]
                )
        return found


def _incidence(rows: list[list[int]], columns: int) -> scipy.sparse.csr_matrix:
    """[len(rows), columns]: 1 where a text has a run."""
    ends = np.cumsum([0, *map(len, rows)])
    places = np.fromiter(itertools.chain.from_iterable(rows), np.int32, ends[-1])
    ones = np.ones(len(places), np.int32)
    return scipy.sparse.csr_matrix((ones, places, ends), shape=(len(rows), columns))


def _grams(text: str, size: int) -> set[str]:
    text = normalized(text)
    return {text[i : i + size] for i in range(max(len(text) - size, 0) + 1)}


def _unit(name: str, values: np.ndarray) -> np.ndarray:
    matrix = np.asarray(values, np.float32)
    if matrix.ndim != 2 or not matrix.size:
        raise InputError(
            f"{name} has shape {matrix.shape}; it must be [texts, features], with at "
            "least one of each."
        )
    norms = np.linalg.norm(matrix, axis=1, keepdims=True)
    usable = np.isfinite(norms[:, 0]) & (norms[:, 0] > 0)
    if not usable.all():
        raise InputError(
            f"{name}[{int(np.argmin(usable))}] has norm {norms[np.argmin(usable), 0]}; "
            "a direction needs one that is finite and above 0."
        )
    return matrix / norms


def _require_texts(**of: Sequence[str]) -> None:
    for name, texts in of.items():
        if isinstance(texts, str) or not len(texts):
            raise InputError(
                f"{name} is {'one text' if isinstance(texts, str) else 'empty'}; give "
                "a list of at least one text."
            )

"""Overlap of a sample of texts with a corpus that a model was pretrained on.

A model may give back what it read before any private training. The paper (§5.2.3)
counts exact matches in samples of 10,000 queries and of 10,000 documents against C4.
Here, for each text, on the words of `tfdpsq.words`:

| | |
|---|---|
| equal     | a record of the corpus has the same words, and no others |
| contained | a record has all of its words in a row                   |

Words are compared by 63 bits of a hash each: taken as random, two different words share
one with a chance of 1.1e-19. Equal implies contained; a text without a word matches
nothing.

The sample is held in memory; the corpus is streamed once. A text is looked for at its
first words, up to eight: every run of as many words of the corpus is hashed and looked
up, and where it is found, the words behind it are compared.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

from tfdpsq import words
from tfdpsq.validation import InputError, in_range, positive_integer

_RECORDS = 1024
_LEAD = 8  # first words of a text that are looked up together
# Odd, and 5 modulo 8, so that no power below 2^62 is 1.
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Matches of each text; arrays have one entry per text."""

    equal: np.ndarray  # [texts] bool, a record has the same words and no others
    contained: np.ndarray  # [texts] bool, a record has all its words in a row
    # [texts, 2] int64, the first equal record, else the first that contains it: number
    # of the `scan` and of the record in it, from 0; -1 where there is none
    place: np.ndarray
    records: int  # of the corpus
    corpus_bytes: int  # of all records, in UTF-8


class OverlapScan:
    """Looks for a sample of texts in a corpus, part by part.

    Attributes:
      records: records looked at, `corpus_bytes` in UTF-8.
      scans: complete calls of `scan`.
    """

    def __init__(self, texts: Sequence[str]):
        """Hashes the sample."""
        hashes, ends = words.word_hashes(texts)
        self._texts = np.split(hashes, ends[1:-1])
        by_lead: dict[int, dict[int, list[int]]] = {}
        for number, own in enumerate(self._texts):
            if size := min(len(own), _LEAD):
                *_, (lead,) = _runs(own[:size], size)
                by_lead.setdefault(size, {}).setdefault(int(lead), []).append(number)
        if not by_lead:
            raise InputError(
                f"none of the {len(texts)} texts of the sample holds a word; there is "
                "nothing to look for."
            )
        # Size of a lead -> its sorted hashes, and the texts that begin with each.
        self._leads = {
            size: (np.array(sorted(found), np.uint64), found)
            for size, found in by_lead.items()
        }
        # Of contained and of equal texts: number of the scan, of the record in it.
        self._places = np.full([2, len(texts), 2], -1)
        self.records = self.corpus_bytes = self.scans = 0

    def scan(self, records: Iterable[str]) -> None:
        """Looks at the records of a part of the corpus, a file for instance."""
        stream = iter(records)
        first = 0
        while batch := list(itertools.islice(stream, _RECORDS)):
            self._look_at(batch, first)
            first += len(batch)
            self.corpus_bytes += sum(len(t.encode("utf-8", "replace")) for t in batch)
        self.records += first
        self.scans += 1

    def _look_at(self, batch: list[str], first: int) -> None:
        hashes, ends = words.word_hashes(batch)
        record = np.repeat(np.arange(len(batch)), np.diff(ends))
        left = ends[record + 1] - np.arange(len(record))  # words from here to the end
        for size, runs in enumerate(_runs(hashes, max(self._leads)), 1):
            if size not in self._leads or not len(runs):
                continue
            leads, texts = self._leads[size]
            rank = np.minimum(np.searchsorted(leads, runs), len(leads) - 1)
            met = (leads[rank] == runs) & (left[: len(runs)] >= size)
            for start in np.flatnonzero(met):
                row = record[start]
                for number in texts[int(runs[start])]:
                    own = self._texts[number]
                    whole = ends[row + 1] - ends[row] == len(own)
                    places = self._places[: 1 + whole, number]
                    new = places[:, 0] < 0
                    if new.any() and np.array_equal(
                        own, hashes[start : start + min(left[start], len(own))]
                    ):
                        places[new] = self.scans, first + row

    def result(self) -> Overlap:
        """Returns the matches in all parts so far."""
        contained, equal = self._places
        return Overlap(
            equal=equal[:, 0] >= 0,
            contained=contained[:, 0] >= 0,
            place=np.where(equal >= 0, equal, contained),
            records=self.records,
            corpus_bytes=self.corpus_bytes,
        )

    def state(self) -> dict[str, np.ndarray]:
        """Returns the state of all complete `scan` calls, for `merge`."""
        return {
            "places": self._places.copy(),
            "counts": np.array([self.scans, self.records, self.corpus_bytes]),
        }

    def merge(self, state: Mapping[str, np.ndarray]) -> None:
        """Adds the state of another scan, of the same sample in the next parts."""
        theirs = state["places"]
        theirs = np.where(theirs >= 0, theirs + [self.scans, 0], theirs)
        self._places = np.where(self._places[..., :1] >= 0, self._places, theirs)
        scans, records, corpus_bytes = state["counts"].tolist()
        self.scans += scans
        self.records += records
        self.corpus_bytes += corpus_bytes


def _runs(hashes: np.ndarray, most: int) -> Iterable[np.ndarray]:
    """Yields hashes of all runs of 1, 2, … words: polynomials modulo 2^64."""
    own = hashes.astype(np.uint64)
    runs = own
    yield runs
    for size in range(2, most + 1):
        runs = runs[:-1] * _BASE + own[size - 1 :]
        yield runs


def draw_samples(population: int, size: int, draws: int, seed: int) -> list[np.ndarray]:
    """Draws `size` numbers below `population` without replacement, several times.

    Draw d comes from numpy's PCG64 seeded with (seed, d). A population that is no
    larger than `size` is taken whole, once.

    Returns:
      The draws, each [size] int64, ascending.
    """
    for name, value in (("population", population), ("size", size), ("draws", draws)):
        positive_integer(name, value)
    if size >= population:
        return [np.arange(population)]
    generators = (np.random.default_rng([seed, number]) for number in range(draws))
    return [np.sort(g.choice(population, size, replace=False)) for g in generators]


def share_in_draws(
    flags: Sequence[np.ndarray], confidence: float = 0.95
) -> dict[str, Any]:
    """The share of texts that something is true of.

    The interval is Clopper and Pearson's for the pooled count, as of draws with
    replacement; those without vary less, so it is wide enough.

    Args:
      flags: of each draw [size] bool.
      confidence: coverage, in (0, 1).

    Returns:
      The "share" of all draws together, its interval's "low" and "high" ends, its
      "confidence", the shares "by_draw" and their standard "deviation" (n - 1), `None`
      of a single draw.
    """
    in_range("confidence", confidence, 0, 1, low_open=True, high_open=True)
    if not flags or not all(len(each) for each in flags):
        raise InputError("a draw is missing or empty; draw at least one text.")
    count, total = sum(int(np.sum(f)) for f in flags), sum(len(f) for f in flags)
    interval = scipy.stats.binomtest(count, total).proportion_ci(confidence, "exact")
    by_draw = [float(np.mean(each)) for each in flags]
    return {
        "share": count / total,
        "low": float(interval.low),
        "high": float(interval.high),
        "confidence": confidence,
        "by_draw": by_draw,
        "deviation": float(np.std(by_draw, ddof=1)) if len(by_draw) > 1 else None,
    }

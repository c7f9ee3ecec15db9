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

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import scipy.stats

from tfdpsq import words
from tfdpsq.validation import InputError, in_range, positive_integer

_RECORDS = 1024
_LEAD = 8  # first words of a text that are looked up together
# Odd, and 5 modulo 8, so that no power below 2^62 is 1.
_BASE = np.uint64(0x9E3779B97F4A7C15)


class OverlapScan:
    """Looks for a sample of texts in a corpus, part by part.

    Attributes:
      equal: [texts] bool, a record has the same words and no others.
      contained: [texts] bool, a record has all its words in a row.
      records: looked at so far.
      corpus_bytes: of all records, in UTF-8.
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
        self.equal, self.contained = np.zeros([2, len(texts)], bool)
        self.records = self.corpus_bytes = 0

    def scan(self, records: Iterable[str]) -> None:
        """Looks at the records of a part of the corpus, a file for instance."""
        stream = iter(records)
        while batch := list(itertools.islice(stream, _RECORDS)):
            self._look_at(batch)
            self.records += len(batch)
            self.corpus_bytes += sum(len(t.encode("utf-8", "replace")) for t in batch)

    def _look_at(self, batch: list[str]) -> None:
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
                    found = self.equal if whole else self.contained
                    if not found[number] and np.array_equal(
                        own, hashes[start : start + min(left[start], len(own))]
                    ):
                        found[number] = self.contained[number] = True


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

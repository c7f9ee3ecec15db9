"""Overlap of a sample of texts with a corpus that a model was pretrained on.

A model that read a document, or even a query, before any private training may give it
back without having learned it from the private data; what it gives back then says less
about either. The paper (§5.2.3) counts exact matches in samples of 10,000 queries and
of 10,000 documents against C4. Here, for each text, on the words of `tfdpsq.words`:

| | |
|---|---|
| equal     | a record of the corpus has the same words, and no others |
| contained | a record has all of its words in a row                   |

Words are compared by 63 bits of a hash each: taken as random, two different words share
one with a chance of 1.1e-19. Equal implies contained. A text without a word matches
nothing. In scripts without spaces a text is contained where its characters are, unless
it is a single one: that is a word only where it stands alone.

The sample is held in memory; the corpus is streamed once. A text is looked for at its
first words: every run of up to eight words of the corpus is hashed once more and looked
up, and where it is found, the words behind it are compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

from tfdpsq import words
from tfdpsq.validation import InputError, in_range, positive_integer

_RECORDS = 1024
# First words of a text that are looked up together.
_LEAD = 8
# Any odd number does; it is 5 modulo 8, so that no power below 2^62 is 1.
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Matches of each text; arrays have one entry per text."""

    equal: np.ndarray  # [texts] bool, a record has the same words and no others
    contained: np.ndarray  # [texts] bool, a record has all its words in a row
    # [texts, 2] int64, where it is contained first: number of the `scan` and of the
    # record in it, both from 0; of an equal record where there is one, and -1 where
    # there is none at all
    place: np.ndarray
    records: int  # how many records the corpus had
    corpus_bytes: int  # how long they were together, in UTF-8


class OverlapScan:
    """Looks for a sample of texts in a corpus, part by part.

    Attributes:
      records: how many records were looked at.
      corpus_bytes: how long they were together, in UTF-8.
      scans: how many calls of `scan` are complete.
    """

    def __init__(self, texts: Sequence[str]):
        """Hashes the sample.

        Args:
          texts: the sample; texts with the same words are looked for once.
        """
        hashes, ends = words.word_hashes(texts)
        numbers: dict[bytes, int] = {}
        self._texts: list[np.ndarray] = []
        self._number = np.full(len(texts), -1)
        for at, (start, end) in enumerate(zip(ends, ends[1:])):
            own = hashes[start:end]
            if len(own):
                number = numbers.setdefault(own.tobytes(), len(numbers))
                self._texts += [own] if number == len(self._texts) else []
                self._number[at] = number
        if not numbers:
            raise InputError(
                f"none of the {len(texts)} texts of the sample holds a word; there is "
                "nothing to look for."
            )
        # Size of a lead -> its sorted hashes, and numbers of the texts that begin so.
        self._leads: dict[int, tuple[np.ndarray, list[list[int]]]] = {}
        by_lead: dict[int, dict[int, list[int]]] = {}
        for number, own in enumerate(self._texts):
            size = min(len(own), _LEAD)
            *_, (lead,) = _runs(own[:size], size)
            by_lead.setdefault(size, {}).setdefault(int(lead), []).append(number)
        for size, found in by_lead.items():
            leads = sorted(found)
            numbered = [found[lead] for lead in leads]
            self._leads[size] = np.array(leads, np.uint64), numbered
        digest = hashlib.sha256(b"\0".join(numbers))
        self._sample = np.frombuffer(digest.digest(), np.uint8)
        # Of contained and of equal texts: number of the scan, of the record in it.
        self._places = np.full([2, len(numbers), 2], -1)
        self.records = self.corpus_bytes = self.scans = 0

    def scan(self, records: Iterable[str]) -> None:
        """Looks at a part of the corpus, a file for instance.

        Args:
          records: its texts, streamed; no match reaches from one into the next. What
            they raise comes through, and the scan is then of no further use.
        """
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
                for number in texts[rank[start]]:
                    own = self._texts[number]
                    whole = ends[row + 1] - ends[row] == len(own)
                    new = self._places[: 1 + whole, number, 0] < 0
                    end = start + len(own)
                    if not new.any() or left[start] < len(own):
                        continue
                    if np.array_equal(own, hashes[start:end]):
                        place = self.scans, first + row
                        self._places[: 1 + whole, number][new] = place

    def result(self) -> Overlap:
        """Returns the matches in all parts so far."""
        if not self.records:
            raise InputError(
                "the corpus holds no record; against nothing, nothing overlaps. Give "
                "the files that hold its texts."
            )
        there = self._number >= 0
        contained, equal = np.where(there[:, None], self._places[:, self._number], -1)
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
            "sample": self._sample,
            "places": self._places.copy(),
            "counts": np.array([self.scans, self.records, self.corpus_bytes]),
        }

    def merge(self, state: Mapping[str, np.ndarray]) -> None:
        """Adds what another scan of the same sample found in the next parts.

        Whoever scans the parts of a corpus in several processes, and merges their
        states in the order of the parts, has what a single scan has.

        Args:
          state: of the other scan, which began without any.
        """
        if not np.array_equal(state["sample"], self._sample):
            raise InputError("the state is of another sample. Start again without it.")
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
    """Draws numbers below `population`, each draw without replacement.

    Draws are independent of each other, so they may share numbers. Draw d comes from
    numpy's PCG64 seeded with (seed, d).

    Args:
      population: how many there are.
      size: how many to draw; of fewer, all are taken, and in one draw only.
      draws: how many draws.
      seed: at least 0.

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

    The interval is Clopper and Pearson's for the pooled count, as if each text had
    been drawn with replacement. Draws without replacement vary less, so it is at least
    as wide as it has to be for the share in the population that was drawn from.

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

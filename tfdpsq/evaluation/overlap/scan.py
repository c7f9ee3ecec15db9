"""Overlap of a sample of texts with a corpus that a model was pretrained on.

A model that read a document, or even a query, before any private training may give it
back without having learned it from the private data; what it gives back then says less
about either. The paper (§5.2.3) counts exact matches in samples of 10,000 queries and
of 10,000 documents against C4. Here, for each text, on words (`OVERLAP_NORMALIZATION`):

| | |
|---|---|
| equal       | a record of the corpus has the same words, and no others             |
| contained   | a record has all of its words in a row                               |
| containment | the share of its n-grams found anywhere in the corpus                |
| coverage    | the share of its words inside one of these n-grams                   |
| near        | coverage of at least a threshold (0.8)                               |

Equal implies contained, and contained implies near. A text of fewer than n words is a
single n-gram. Whoever changes one word in 20 leaves 95 % coverage at n = 8, but only
60 % of the n-grams, which is why near goes by coverage. The n-grams of a near match
need not be in one record. A text without a word matches nothing.

Equal and contained are exact. An n-gram is found by its 64-bit hash: if hashes are
taken as random, w words of corpus and g n-grams yield w·g/2^64 false ones, 0.04 for
the 1.6e11 words of C4 and 4 million n-grams.

The sample is held in memory; the corpus is streamed once, and memory does not grow
with it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import scipy.stats

from tfdpsq.evaluation.overlap.sample_index import Match, SampleIndex
from tfdpsq.evaluation.overlap.word_stream import word_stream, words_of
from tfdpsq.validation import InputError, in_range, positive_integer

# Small enough that what is computed of it stays in the processor's cache.
_BLOCK = 1 << 18


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Matches of each text; arrays have one entry per text.

    Attributes:
      equal: [texts] bool, a record has the same words and no others.
      contained: [texts] bool, a record has all its words in a row.
      containment: [texts] float64 in [0, 1], share of its n-grams found.
      coverage: [texts] float64 in [0, 1], share of its words in these.
      place: [texts, 2] int64, where it is contained first: number of the `scan` and
        of the record in it, both from 0; of an equal record where there is one, and
        -1 where there is none at all.
      records: how many records the corpus had.
      corpus_bytes: how long they were together, in UTF-8.
    """

    equal: np.ndarray
    contained: np.ndarray
    containment: np.ndarray
    coverage: np.ndarray
    place: np.ndarray
    records: int
    corpus_bytes: int

    def near(self, threshold: float = 0.8) -> np.ndarray:
        """[texts] bool, whose coverage is at least the threshold.

        Raises:
          InputError: a threshold outside (0, 1].
        """
        in_range("threshold", threshold, 0, 1, low_open=True)
        return self.coverage >= threshold


class OverlapScan:
    """Looks for a sample of texts in a corpus, part by part.

    Attributes:
      records: how many records were looked at.
      corpus_bytes: how long they were together, in UTF-8.
      scans: how many calls of `scan` are complete.
    """

    def __init__(
        self, texts: Sequence[str], n: int = 8, threads: int = 1, block: int = _BLOCK
    ):
        """Hashes the sample.

        Args:
          texts: the sample; texts with the same words are looked for once.
          n: words in an n-gram.
          threads: blocks that are looked at at once; the result does not depend on
            it.
          block: characters of a corpus that are taken together, more or less; the
            result does not depend on it.

        Raises:
          InputError: no text, none with a word in it, or a setting below 1.
        """
        positive_integer("n", n)
        positive_integer("block", block)
        self._threads = positive_integer("threads", threads)
        self._block = block
        if isinstance(texts, str):
            raise InputError("texts is a list of texts, not one text.")
        numbers: dict[bytes, int] = {}
        self._number = np.full(len(texts), -1)
        for at, text in enumerate(_in_batches(texts, block)):
            if text:
                self._number[at] = numbers.setdefault(text, len(numbers))
        if not numbers:
            raise InputError(
                f"none of the {len(texts)} texts of the sample holds a word; there is "
                "nothing to look for."
            )
        self._index = SampleIndex(list(numbers), n, block)
        digest = hashlib.sha256(str(n).encode())
        for text in numbers:
            digest.update(b"\0" + text)
        self._sample = np.frombuffer(digest.digest(), np.uint8)
        self._found = np.zeros(self._index.grams, bool)
        # Of contained and of equal texts: number of the scan, of the record in it.
        self._places = np.full([2, len(numbers), 2], -1)
        self.records = 0
        self.corpus_bytes = 0
        self.scans = 0

    def scan(self, records: Iterable[str]) -> None:
        """Looks at a part of the corpus, a file for instance.

        Args:
          records: its texts, streamed; no match reaches from one into the next. What
            they raise comes through, and the scan is then of no further use.
        """
        total, count = self.corpus_bytes, self.records
        waiting: collections.deque = collections.deque()
        with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
            first = 0
            for batch in _batches(records, self._block):
                waiting.append((first, pool.submit(self._look_at, batch)))
                first += len(batch)
                # One more than there are threads, so that none has to wait.
                if len(waiting) > self._threads:
                    total += self._take(*waiting.popleft())
            while waiting:
                total += self._take(*waiting.popleft())
        self.corpus_bytes, self.records = total, count + first
        self.scans += 1

    def result(self) -> Overlap:
        """Returns the matches in all parts so far.

        Raises:
          InputError: they held no record.
        """
        if not self.records:
            raise InputError(
                "the corpus holds no record; against nothing, nothing overlaps. Give "
                "the files that hold its texts."
            )
        shares, coverage = self._index.containment(self._found)
        at = self._number
        there = at >= 0
        contained, equal = self._places[0][at], self._places[1][at]
        place = np.where(equal >= 0, equal, contained)
        return Overlap(
            equal=there & (equal[:, 0] >= 0),
            contained=there & (contained[:, 0] >= 0),
            containment=np.where(there, shares[at], 0.0),
            coverage=np.where(there, coverage[at], 0.0),
            place=np.where(there[:, None], place, -1),
            records=self.records,
            corpus_bytes=self.corpus_bytes,
        )

    def state(self) -> dict[str, np.ndarray]:
        """Returns the state of all complete `scan` calls, for `restore` and `merge`."""
        return {
            "sample": self._sample,
            "found": np.packbits(self._found),
            "places": self._places.copy(),
            "counts": np.array([self.scans, self.records, self.corpus_bytes]),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes up what a scan with the same sample and n had found.

        Raises:
          InputError: it is of another sample or n.
        """
        self._found = self._found_in(state)
        self._places = state["places"].copy()
        self.scans, self.records, self.corpus_bytes = state["counts"].tolist()

    def merge(self, state: Mapping[str, np.ndarray]) -> None:
        """Adds what another scan with the same sample and n found in the next parts.

        Whoever scans the parts of a corpus in several processes, and merges their
        states in the order of the parts, has what a single scan has.

        Args:
          state: of the other scan, which began without any.

        Raises:
          InputError: it is of another sample or n.
        """
        self._found |= self._found_in(state)
        theirs = state["places"]
        theirs = np.where(theirs >= 0, theirs + [self.scans, 0], theirs)
        self._places = np.where(self._places[..., :1] >= 0, self._places, theirs)
        scans, records, corpus_bytes = state["counts"].tolist()
        self.scans += scans
        self.records += records
        self.corpus_bytes += corpus_bytes

    def _found_in(self, state: Mapping[str, np.ndarray]) -> np.ndarray:
        if not np.array_equal(state["sample"], self._sample):
            raise InputError(
                "the state is of another sample or another n. Start again without it."
            )
        return np.unpackbits(state["found"], count=self._index.grams).astype(bool)

    def _look_at(self, batch: list[str]) -> tuple[np.ndarray, list[Match], int]:
        """Runs in a thread; changes nothing, and may see old findings."""
        size = sum(
            len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
            for text in batch
        )
        grams, matches = self._index.scan(word_stream(batch), self._found, self._wanted)
        return grams, matches, size

    def _wanted(self, texts: np.ndarray, whole: np.ndarray) -> np.ndarray:
        contained, equal = self._places[:, texts, 0] >= 0
        return ~contained | (whole & ~equal)

    def _take(self, first: int, done: concurrent.futures.Future) -> int:
        """Adds what was found in a batch; batches come in their order."""
        grams, matches, size = done.result()
        self._found[grams] = True
        for match in matches:
            for kind in (0, 1) if match.whole else (0,):
                if self._places[kind, match.text, 0] < 0:
                    place = (self.scans, first + match.record)
                    self._places[kind, match.text] = place
        return size


@dataclasses.dataclass(frozen=True)
class DrawnShare:
    """A share of a population, from several draws of it.

    Attributes:
      share: of all draws together.
      low: lower end of its interval.
      high: upper end of it.
      confidence: coverage of the interval, at least.
      by_draw: the share in each draw.
      deviation: standard deviation of these (n - 1); `None` of a single draw.
    """

    share: float
    low: float
    high: float
    confidence: float
    by_draw: tuple[float, ...]
    deviation: float | None


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

    Raises:
      InputError: a number below 1.
    """
    for name, value in (("population", population), ("size", size), ("draws", draws)):
        positive_integer(name, value)
    if size >= population:
        return [np.arange(population)]
    return [
        np.sort(
            np.random.default_rng([seed, number]).choice(
                population, size, replace=False
            )
        )
        for number in range(draws)
    ]


def share_in_draws(flags: Sequence[np.ndarray], confidence: float = 0.95) -> DrawnShare:
    """The share of texts that something is true of.

    The interval is Clopper and Pearson's for the pooled count, as if each text had
    been drawn with replacement. Draws without replacement vary less, so it is at least
    as wide as it has to be for the share in the population that was drawn from.

    Args:
      flags: of each draw [size] bool.
      confidence: coverage, in (0, 1).

    Returns:
      The share.

    Raises:
      InputError: no draw, an empty one, or a confidence out of range.
    """
    in_range("confidence", confidence, 0, 1, low_open=True, high_open=True)
    if not flags or not all(len(each) for each in flags):
        raise InputError("a draw is missing or empty; draw at least one text.")
    count, total = sum(int(np.sum(f)) for f in flags), sum(len(f) for f in flags)
    interval = scipy.stats.binomtest(count, total).proportion_ci(confidence, "exact")
    by_draw = tuple(float(np.mean(each)) for each in flags)
    return DrawnShare(
        count / total,
        float(interval.low),
        float(interval.high),
        confidence,
        by_draw,
        float(np.std(by_draw, ddof=1)) if len(by_draw) > 1 else None,
    )


def _batches(records: Iterable[str], size: int) -> Iterator[list[str]]:
    """Lists of records, each closed once it holds that many characters."""
    batch: list[str] = []
    held = 0
    for record in records:
        batch.append(record)
        held += len(record) + 1
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _in_batches(texts: Iterable[str], size: int) -> Iterator[bytes]:
    for batch in _batches(texts, size):
        yield from words_of(batch)

"""An index of a sample's texts by which a corpus is scanned for them.

The sample is in memory as sorted hashes. A corpus is looked at in blocks, each in a
few passes over whole arrays: every run of 1, 2, 4, … words is hashed and held against
a filter; what passes, a few per cent, is looked up exactly. A text of fewer than n
words is one n-gram, itself, of a length that need not be a power of two: its first
words pass the filter for it.

A whole text is looked for where its rarest n-gram is found. Its hash must be there,
and then its words, byte by byte: what is called equal or contained is so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfdpsq.evaluation.overlap.span_hashes import HashedWords, HashFilter, Powers
from tfdpsq.evaluation.overlap.word_stream import BOUNDARY

_BOUNDARY = BOUNDARY.encode()


@dataclasses.dataclass(frozen=True)
class Match:
    """A place where all words of a text occur in a row.

    Attributes:
      text: number of the text.
      record: number of the record, among those of the block.
      whole: whether the record holds nothing else.
    """

    text: int
    record: int
    whole: bool


class _Grams:
    """All n-grams of one length.

    Attributes:
      size: words in each.
      first: number of the first of them among the n-grams of all lengths.
    """

    def __init__(self, size: int, first: int, hashes: np.ndarray):
        """Sorts them into as many buckets, by their high bits.

        Args:
          size: words in each.
          first: as the attribute.
          hashes: [n] uint64, sorted, distinct.
        """
        self.size, self.first = size, first
        self._hashes = hashes
        bits = len(hashes).bit_length()
        self._shift = np.uint64(64 - bits)
        edges = np.arange(1 << bits, dtype=np.uint64) << self._shift
        self._buckets: np.ndarray = np.searchsorted(hashes, edges).astype(np.int32)
        fullest = np.diff(self._buckets, append=len(hashes)).max()
        self._steps = np.arange(fullest, dtype=np.int32)

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the hashes that are there, and the n-grams' numbers.

        A search by halves would wait for memory ten times as often.
        """
        bucket = (hashes >> self._shift).view(np.int64)
        rank = self._buckets.take(bucket)[:, None] + self._steps
        rank = np.minimum(rank, len(self._hashes) - 1)
        row, step = np.nonzero(self._hashes.take(rank) == hashes[:, None])
        return row, self.first + rank[row, step].astype(np.int64)


class SampleIndex:
    """The texts of a sample, to be found in blocks of a corpus.

    Attributes:
      texts: the texts' words, distinct.
      grams: how many distinct n-grams they have.
    """

    def __init__(self, texts: Sequence[bytes], n: int, block: int):
        """Hashes the sample.

        Args:
          texts: distinct, each with at least one word, one space between two.
          n: words in an n-gram; a shorter text is one n-gram.
          block: most bytes of a corpus that are looked at in one go, if the longest
            text is shorter.
        """
        self.texts = list(texts)
        self._words = np.array([text.count(b" ") + 1 for text in texts])
        self._sizes = np.minimum(n, self._words)
        # With the boundaries that may surround it. A block reaches as far beyond
        # the next one's beginning.
        self._longest = max(map(len, texts)) + 2 * (len(_BOUNDARY) + 1)
        self._most = block + self._longest
        self._powers = Powers(self._most)
        hashes, starts, self._whole = self._hash_texts()
        counts = self._words - self._sizes + 1
        self._offsets = np.concatenate([[0], np.cumsum(counts)])
        sizes = np.repeat(self._sizes, counts)
        self._gram_of = np.empty(len(hashes), np.int32)
        of_probe: dict[int, list[_Grams]] = {}
        likely: dict[int, list[np.ndarray]] = {}
        seen: list[np.ndarray] = []  # each n-gram's count in the sample
        self.grams = 0
        for size in np.unique(self._sizes).tolist():
            here = sizes == size
            distinct, which, times = np.unique(
                hashes[here], return_inverse=True, return_counts=True
            )
            self._gram_of[here] = which + self.grams
            probe = int(_probe_of(size))
            of_probe.setdefault(probe, []).append(_Grams(size, self.grams, distinct))
            likely.setdefault(probe, []).append(np.unique(starts[here]))
            seen.append(times)
            self.grams += len(distinct)
        self._choose_anchors(np.concatenate(seen))
        self._probes = [
            (probe, HashFilter(np.concatenate(likely[probe])), of_probe[probe])
            for probe in of_probe
        ]

    def scan(
        self,
        stream: bytes,
        found: np.ndarray,
        wanted: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> tuple[np.ndarray, list[Match]]:
        """Looks for the sample in a block of a corpus.

        Args:
          stream: of `word_stream`; of any length, as it is cut.
          found: [grams] bool; those found before, which are not reported again.
          wanted: takes [k] numbers of texts and whether the text would be all of a
            record, [k] bool, says which are worth a closer look.

        Returns:
          The numbers of n-grams found, possibly repeated; and where whole texts occur,
          at most one place of each kind for each text.
        """
        grams: list[np.ndarray] = []
        matches: dict[tuple[int, bool], Match] = {}
        before = counted = 0
        for start, end in self._cuts(stream):
            words = HashedWords(stream[start:end], self._powers)
            numbers, places = self._grams_in(words)
            before += stream.count(_BOUNDARY, counted, start)
            counted = start
            if len(numbers):
                for match in self._texts_at(words, numbers, places, wanted, before):
                    matches.setdefault((match.text, match.whole), match)
                grams.append(numbers[~found[numbers]])
        none = np.empty(0, np.int64)
        return np.concatenate([none, *grams]), list(matches.values())

    def containment(self, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the share of each text that was found.

        Args:
          found: [grams] bool.

        Returns:
          Two [texts] float64 in [0, 1]: the share of each text's n-grams that were
          found (repeated ones count as often), and the share of its words that occur
          in one of these.
        """
        here = found[self._gram_of]
        counts = np.diff(self._offsets)
        shares = np.add.reduceat(here.astype(np.int64), self._offsets[:-1]) / counts
        # The n-gram that begins at a word covers it and those after it.
        word_offsets = np.concatenate([[0], np.cumsum(self._words)])
        first = np.arange(len(here)) + np.repeat(
            word_offsets[:-1] - self._offsets[:-1], counts
        )
        last = first + np.repeat(self._sizes, counts)
        length = int(word_offsets[-1]) + 1
        opened = np.bincount(first[here], minlength=length)
        opened -= np.bincount(last[here], minlength=length)
        covered = (np.cumsum(opened[:-1]) > 0).astype(np.int64)
        return shares, np.add.reduceat(covered, word_offsets[:-1]) / self._words

    def _hash_texts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Hashes of all n-grams in turn, of what filters see of them, of texts."""
        hashes, starts, wholes = [], [], []
        first = 0
        while first < len(self.texts):
            last, size = first, 0
            while last < len(self.texts) and size + len(self.texts[last]) < self._most:
                size += len(self.texts[last]) + 1
                last += 1
            last = max(last, first + 1)
            words = HashedWords(b" ".join(self.texts[first:last]), self._powers)
            lengths, sizes = self._words[first:last], self._sizes[first:last]
            begin = np.cumsum(lengths) - lengths
            wholes.append(words.hashes(begin, lengths))
            counts = lengths - sizes + 1
            skipped = np.cumsum(counts) - counts
            place = np.arange(counts.sum()) + np.repeat(begin - skipped, counts)
            each = np.repeat(sizes, counts)
            hashes.append(words.hashes(place, each))
            starts.append(words.hashes(place, _probe_of(each)))
            first = last
        return np.concatenate(hashes), np.concatenate(starts), np.concatenate(wholes)

    def _choose_anchors(self, times: np.ndarray) -> None:
        """Selects each text's rarest n-gram in the sample; the first one on ties."""
        rarity = times[self._gram_of]
        least = np.minimum.reduceat(rarity, self._offsets[:-1])
        counts = np.diff(self._offsets)
        rarest = np.flatnonzero(rarity == np.repeat(least, counts))
        text = np.repeat(np.arange(len(counts)), counts)[rarest]
        anchor = rarest[np.unique(text, return_index=True)[1]]
        self._anchor_place = anchor - self._offsets[:-1]
        gram = self._gram_of[anchor]
        # The texts whose anchor is n-gram g: _anchored[_anchors[g] : _anchors[g + 1]].
        self._anchored = np.argsort(gram, kind="stable")
        per_gram = np.bincount(gram, minlength=self.grams)
        self._anchors = np.concatenate([[0], np.cumsum(per_gram)]).astype(np.int32)

    def _grams_in(self, words: HashedWords) -> tuple[np.ndarray, np.ndarray]:
        """Returns the n-grams found there, and their word positions."""
        numbers = [np.empty(0, np.int64)]
        places = [np.empty(0, np.int64)]
        for probe, likely, of_size in self._probes:
            passing = likely.passing(words.all_hashes(probe))
            for grams in of_size:
                place = passing[passing <= len(words) - grams.size]
                there, found = grams.find(words.hashes(place, grams.size))
                numbers.append(found)
                places.append(place[there])
        return np.concatenate(numbers), np.concatenate(places)

    def _texts_at(
        self,
        words: HashedWords,
        numbers: np.ndarray,
        places: np.ndarray,
        wanted: Callable[[np.ndarray, np.ndarray], np.ndarray],
        before: int,
    ) -> Iterator[Match]:
        """Yields the texts that occur where their anchors were found.

        Args:
          words: the block.
          numbers: [g] of n-grams.
          places: [g] the words at which they begin.
          wanted: as in `scan`.
          before: records' boundaries in the stream before this block.
        """
        first = self._anchors[numbers]
        counts = self._anchors[numbers + 1] - first
        skipped = np.cumsum(counts) - counts
        text = self._anchored[
            np.arange(counts.sum()) + np.repeat(first - skipped, counts)
        ]
        begin = np.repeat(places, counts) - self._anchor_place[text]
        kept = (begin >= 0) & (begin + self._words[text] <= len(words))
        text, begin = text[kept], begin[kept]
        kept = words.hashes(begin, self._words[text]) == self._whole[text]
        text, begin = text[kept], begin[kept]
        if not len(text):
            return
        # A boundary is one byte, and a space separates it from the text. Where
        # the block ends instead, what is looked at is a byte of the text.
        codes = np.frombuffer(words.stream, np.uint8)
        start, end = words.starts[begin], words.ends[begin + self._words[text] - 1]
        whole = (codes.take(start - 2, mode="clip") == _BOUNDARY[0]) & (
            codes.take(end + 1, mode="clip") == _BOUNDARY[0]
        )
        order = np.flatnonzero(wanted(text, whole))
        order = order[np.argsort(begin[order], kind="stable")]
        done: set[tuple[int, bool]] = set()
        for row in order.tolist():
            key = (int(text[row]), bool(whole[row]))
            here = words.stream[start[row] : end[row]]
            if key not in done and here == self.texts[key[0]]:
                done.add(key)
                boundaries = before + words.stream.count(_BOUNDARY, 0, start[row])
                yield Match(key[0], boundaries - 1, key[1])

    def _cuts(self, stream: bytes) -> Iterator[tuple[int, int]]:
        """Parts of a stream such that each run of words as long as a text is in one."""
        start, end = 0, len(stream)
        while end - start > self._most:
            stop = start + self._most
            # Back to the last whole word. A word that is not in here whole is longer
            # than any text.
            last = stream.rfind(b" ", start, stop + 1)
            if last > start:
                yield start, last
            # On to the last word that begins before what every text fits behind.
            following = stream.rfind(b" ", start, stop - self._longest)
            if following < 0:
                following = stream.find(b" ", start)
            if following < 0:
                return
            start = following + 1
        if end > start:
            yield start, end


def _probe_of(size: int | np.ndarray) -> np.ndarray:
    """Returns how many words of an n-gram the filter checks: a power of two."""
    return 1 << np.log2(size).astype(np.int64)

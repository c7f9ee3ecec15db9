"""64-bit hashes of any run of words of a stream, by prefix sums.

With codes b₀, b₁, … of the stream's bytes and R an odd number, all modulo 2^64, let
S(i) = Σ_{k<i} b_k·R^k. The bytes from i up to j then have the hash

    (S(j) - S(i)) · R^(-i) · M  =  M · Σ_k b_{i+k}·R^k

which depends on them alone, not on their position, and costs a subtraction and a
multiplication whatever its length. M spreads short runs over the high bits.

Different runs can have one hash. Taken as random numbers, two do with probability
2^-64; nothing here proves that, and nobody should rely on it against an adversary.
"""

from __future__ import annotations

import numpy as np

from tfdpsq.evaluation.overlap.word_stream import SPACE

# Any odd numbers do; of those that are 5 modulo 8, no power below 2^62 is 1.
_BASE = 0x9E3779B97F4A7C15
_SPREAD = 0xBF58476D1CE4E5B9
# Of a filter's tables; the first takes the hashes as they are, which is fastest.
_FACTORS = (1, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)


class Powers:
    """R^k and M·R^(-k), for streams up to some length.

    Attributes:
      up: [length] uint64, R^k.
      down: [length] uint64, M·R^(-k).
    """

    def __init__(self, length: int):
        """Computes them.

        Args:
          length: the most bytes of a stream.
        """
        self.up = _powers(_BASE, 1, length)
        self.down = _powers(pow(_BASE, -1, 1 << 64), _SPREAD, length)


class HashedWords:
    """The words of a stream, and the hash of any run of them.

    Attributes:
      stream: the bytes, words with one space between two.
      starts: [words] int64, where each word begins.
      ends: [words] int64, where it ends, exclusive.
    """

    def __init__(self, stream: bytes, powers: Powers):
        """Finds the words and sums up.

        Args:
          stream: as `word_stream` makes it, or a part of it that begins and ends with
            a whole word.
          powers: for at least its length.
        """
        self.stream = stream
        codes = np.frombuffer(stream, np.uint8)
        gaps = np.flatnonzero(codes == SPACE)
        self.starts = np.concatenate([[0], gaps + 1])
        self.ends = np.concatenate([gaps, [len(codes)]])
        sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum(codes * powers.up[: len(codes)], out=sums[1:])
        self._before = sums.take(self.starts)
        self._after = sums.take(self.ends)
        self._scale = powers.down.take(self.starts)

    def __len__(self) -> int:
        """The number of words."""
        return len(self.starts)

    def hashes(self, first: np.ndarray, words: np.ndarray | int) -> np.ndarray:
        """[n] uint64, of the runs of `words` words from word `first` on."""
        found = self._after.take(first + words - 1) - self._before.take(first)
        found *= self._scale.take(first)
        return found

    def all_hashes(self, words: int) -> np.ndarray:
        """[len - words + 1] uint64, of every run of so many words; may be empty."""
        runs = max(0, len(self) - words + 1)
        found = self._after[words - 1 :] - self._before[:runs]
        found *= self._scale[:runs]
        return found


class HashFilter:
    """A filter of hashes without false negatives."""

    def __init__(self, hashes: np.ndarray):
        """Marks the hashes in tables, by the high bits of a product each.

        Args:
          hashes: [n] uint64.
        """
        # At 4 to 8 places a hash, at most 22 % of others pass a table, and 1.1 % all
        # three. One table as good as three would not fit into the processor's cache.
        bits = min(max((4 * len(hashes)).bit_length(), 16), 26)
        self._shift = np.uint64(64 - bits)
        self._tables = [np.zeros(1 << bits, bool) for _ in _FACTORS]
        for table, factor in zip(self._tables, _FACTORS):
            table[self._places(hashes, factor)] = True

    def passing(self, hashes: np.ndarray) -> np.ndarray:
        """[k] int64, the indices of the hashes that may be among the marked."""
        # `take` is much faster than an index in brackets.
        likely = np.flatnonzero(self._tables[0].take(self._places(hashes, 1)))
        for table, factor in zip(self._tables[1:], _FACTORS[1:]):
            there = table.take(self._places(hashes.take(likely), factor))
            likely = likely[there]
        return likely

    def _places(self, hashes: np.ndarray, factor: int) -> np.ndarray:
        if factor != 1:
            hashes = hashes * np.uint64(factor)
        return (hashes >> self._shift).view(np.int64)


def _powers(base: int, first: int, length: int) -> np.ndarray:
    factors = np.full(length, base, np.uint64)
    factors[:1] = first
    return np.multiply.accumulate(factors)

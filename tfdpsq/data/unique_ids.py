"""Sets of ids in a few bytes per id.

A Python set of the ids of a million documents takes more than 100 MB. Here hashes of
them are in sorted arrays; each is merged into the one before it once it is as long, so
there are few, and adding n ids takes O(n log n) in all.

| class | keeps of an id | answers |
|---|---|---|
| `UniqueIds` | 64 bits | which ids to look for again, to be exact |
| `SeenTexts` | 128 bits | at once; 2^32 texts share one in 1 of 2^65 cases |
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

# Ids that are looked at together, while they are Python objects.
BATCH = 65_536


class UniqueIds:
    """Finds ids that come twice among more than fit into memory; 8 bytes an id.

    An id whose 64-bit hash was there before comes twice, or shares it with another:
    reading all ids again and looking for this one tells which.
    That is seldom in vain: of 10 million different ids, some share a hash in one
    corpus of 369,000.
    """

    def __init__(self) -> None:
        """Starts without ids."""
        self._runs: list[np.ndarray] = []

    def add(self, identifiers: Sequence[str]) -> set[str]:
        """Adds ids.

        Args:
          identifiers: as many as fit into memory; the more, the faster.

        Returns:
          Those that may have come before, or twice now. All others have not.
        """
        if not len(identifiers):
            return set()
        hashes = _hashes(identifiers)
        order = np.argsort(hashes, kind="stable")
        ascending = hashes[order]
        known = np.zeros(len(ascending), bool)
        known[1:] = ascending[1:] == ascending[:-1]
        for run in self._runs:
            places = np.searchsorted(run, ascending)
            known |= run[np.minimum(places, len(run) - 1)] == ascending
        self._runs.append(ascending)
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            both = np.concatenate([self._runs.pop(), self._runs.pop()])
            both.sort(kind="stable")  # which merges runs
            self._runs.append(both)
        return {identifiers[place] for place in order[known]}


class SeenTexts:
    """A set of texts that tells at once whether one is in it; 16 bytes a text."""

    def __init__(self, recent: int = BATCH):
        """Starts empty.

        Args:
          recent: texts whose hashes are kept as Python objects before they are
            sorted together.
        """
        self._most = recent
        self._recent: set[int] = set()
        # Sorted by the upper half; (upper, lower) halves, and views of them, whose
        # entries are read faster than an array's.
        self._runs: list[_Run] = []

    def __len__(self) -> int:
        """Returns the number of texts."""
        return len(self._recent) + sum(len(run.upper) for run in self._runs)

    def __contains__(self, text: str) -> bool:
        """Returns whether a text was added."""
        key = _key(text)
        return key in self._recent or any(key in run for run in self._runs)

    def add(self, text: str) -> bool:
        """Adds a text; says whether it is new."""
        key = _key(text)
        if key in self._recent or any(key in run for run in self._runs):
            return False
        self._recent.add(key)
        if len(self._recent) >= self._most:
            self._runs.append(_Run.of(self._recent))
            self._recent = set()
            while len(self._runs) > 1 and len(self._runs[-2].upper) <= 2 * len(
                self._runs[-1].upper
            ):
                self._runs.append(_Run.merged(self._runs.pop(), self._runs.pop()))
        return True

    def update(self, texts: Iterable[str]) -> None:
        """Adds texts."""
        for text in texts:
            self.add(text)


class _Run:
    """128-bit numbers, sorted by their upper halves."""

    def __init__(self, upper: np.ndarray, lower: np.ndarray):
        order = np.argsort(upper, kind="stable")
        self.upper, self.lower = upper[order], lower[order]
        self._upper, self._lower = memoryview(self.upper), memoryview(self.lower)

    @classmethod
    def of(cls, keys: set[int]) -> _Run:
        """Makes a run of a set of numbers."""
        both = np.frombuffer(b"".join(key.to_bytes(16, "big") for key in keys), ">u8")
        return cls(both[::2].astype(np.uint64), both[1::2].astype(np.uint64))

    @classmethod
    def merged(cls, one: _Run, other: _Run) -> _Run:
        """Merges two runs."""
        return cls(
            np.concatenate([one.upper, other.upper]),
            np.concatenate([one.lower, other.lower]),
        )

    def __contains__(self, key: int) -> bool:
        """Returns whether a number is in it."""
        upper, lower = key >> 64, key & 0xFFFF_FFFF_FFFF_FFFF
        place = bisect.bisect_left(self._upper, upper)
        while place < len(self._upper) and self._upper[place] == upper:
            if self._lower[place] == lower:
                return True
            place += 1
        return False


def _hashes(names: Sequence[str]) -> np.ndarray:
    digests = (hashlib.blake2b(_bytes(name), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), np.uint64)


def _key(text: str) -> int:
    digest = hashlib.blake2b(_bytes(text), digest_size=16).digest()
    return int.from_bytes(digest, "big")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")

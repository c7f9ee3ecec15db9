"""Documents that answer a query besides its own row's, for many rows.

Rows of one query tell of each other's documents, which are no negatives then. Queries
and documents are known by hashes here (`content_key`), and only queries of several
documents are kept: of a set where each query has one, nothing.
"""

from __future__ import annotations

import numpy as np


class KnownAnswers:
    """Contents known to answer queries of several documents, in sorted arrays.

    Two of n different queries share a 63-bit hash with a chance of n^2 / 2^64: of 10
    million, once in 184,000 sets. Their documents are then left out as each other's
    negatives; nothing else comes of it.

    Attributes:
      most: P, the most *other* answers that a row can have; at least 1.
    """

    def __init__(self, queries: np.ndarray, keys: np.ndarray):
        """Groups answers by query.

        Args:
          queries: [m] int64 hashes.
          keys: [m] int64 hashes of contents, each an answer to the query at its index;
            a pair of them may repeat.
        """
        ascending = np.sort(queries)
        again = np.unique(ascending[1:][ascending[1:] == ascending[:-1]])
        del ascending
        kept = _among(queries, again)[1]
        queries, keys = queries[kept], keys[kept]
        order = np.lexsort((keys, queries))
        queries, keys = queries[order], keys[order]
        new = np.ones(len(keys), bool)
        new[1:] = (queries[1:] != queries[:-1]) | (keys[1:] != keys[:-1])
        heads, sizes = np.unique(queries[new], return_counts=True)
        several = sizes > 1
        self._keys = keys[new][np.repeat(several, sizes)]
        self._queries, self._sizes = heads[several], sizes[several]
        self._starts = np.cumsum(self._sizes) - self._sizes
        self.most = max(1, int(self._sizes.max(initial=0)) - 1)

    def others(self, queries: np.ndarray, own: np.ndarray) -> np.ndarray:
        """The other answers of some rows.

        Args:
          queries: [n] int64 hashes, of queries that were given.
          own: [n] int64 hashes of the rows' own contents.

        Returns:
          [n, P] int64 in ascending order, padded with -1.
        """
        found = np.full([len(own), self.most], -1, np.int64)
        at, rows = _among(queries, self._queries)
        column = np.arange(self.most + 1)
        inside = column < self._sizes[at][:, np.newaxis]
        place = self._starts[at][:, np.newaxis] + np.where(inside, column, 0)
        keys = np.where(inside, self._keys[place], -1)
        wanted = inside & (keys != own[rows][:, np.newaxis])
        # Those that are wanted first, in their order.
        order = np.argsort(~wanted, axis=1, kind="stable")[:, : self.most]
        keys = np.where(wanted, keys, -1)
        found[rows] = np.take_along_axis(keys, order, axis=1)
        return found


def _among(numbers: np.ndarray, ascending: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in `ascending` of the numbers that are in it, and which numbers these are.

    Args:
      numbers: [n].
      ascending: [m] distinct.

    Returns:
      [r] and [r] integers.
    """
    if not len(ascending):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    places = np.minimum(np.searchsorted(ascending, numbers), len(ascending) - 1)
    rows = np.flatnonzero(ascending[places] == numbers)
    return places[rows], rows

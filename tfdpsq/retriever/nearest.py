"""The nearest documents of every query, found while the documents stream by.

Of each chunk of documents the k best are found as `index.search` finds them, and the
best of all chunks so far are kept: memory is that of a chunk, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpsq.retriever import index
from tfdpsq.validation import InputError, one_of, positive_integer

EXACT = "exact"
# ScaNN's tree has to see all documents before it can be built.
KINDS = (EXACT, *(kind for kind in index.KINDS if kind != "scann"))
# Queries and documents that are scored at a time: 64 MiB of scores.
_QUERIES = 1024
ROWS = 16_384


class KBest:
    """The k best documents of each query of all that were looked at so far.

    Of equal scores the earlier document's comes first.

    Attributes:
      size: documents so far.
      scores: [Q, at most k] float32, best first.
      places: [Q, at most k] int64, the documents' numbers in their order, from 0.
      ids: [Q, at most k] object array of str.
    """

    def __init__(self, queries: int, k: int):
        """Starts without documents.

        Args:
          queries: Q.
          k: documents to keep of each.

        Raises:
          InputError: k below 1.
        """
        self._k = positive_integer("k", k)
        self.size = 0
        self.scores = np.zeros([queries, 0], np.float32)
        self.places = np.zeros([queries, 0], np.int64)
        self.ids = np.zeros([queries, 0], object)

    def merge(
        self, scores: np.ndarray, rows: np.ndarray, ids: np.ndarray, count: int
    ) -> None:
        """Takes up what was found among the next documents.

        Args:
          scores: [Q, any number] float32 of their best, k unless there are fewer.
          rows: the same shape, their numbers among these documents, from 0.
          ids: the same shape.
          count: how many documents there were.
        """
        scores = np.concatenate([self.scores, scores], axis=1)
        places = np.concatenate([self.places, rows + self.size], axis=1)
        ids = np.concatenate([self.ids, ids], axis=1)
        order = np.lexsort((places, -scores), axis=1)[:, : self._k]
        self.scores = np.take_along_axis(scores, order, axis=1)
        self.places = np.take_along_axis(places, order, axis=1)
        self.ids = np.take_along_axis(ids, order, axis=1)
        self.size += count


class BestDocuments(KBest):
    """The k best of each query by inner product, from embeddings.

    However the documents are cut into chunks, the result is the same; only ScaNN may
    choose otherwise among equal scores of one chunk.
    """

    def __init__(self, queries: np.ndarray, k: int, kind: str = EXACT):
        """Starts without documents.

        Args:
          queries: [Q, D] float32.
          k: documents to keep of each.
          kind: "exact", a matrix product, or one of `index.KINDS` but "scann".

        Raises:
          InputError: unknown kind, no queries, or numbers that are none; k below 1.
        """
        self._kind = one_of("kind", kind, KINDS)
        self._queries = index.checked("queries", queries)
        super().__init__(len(self._queries), k)

    def add(self, embeddings: np.ndarray, ids: Sequence[str] | None = None) -> None:
        """Looks at the next documents.

        Args:
          embeddings: [n, D] float32.
          ids: n of them; `None` keeps "" of each.

        Raises:
          InputError: shapes that do not fit, no document, or numbers that are none.
        """
        documents = index.checked("embeddings", embeddings)
        names = np.full(len(documents), "", object)
        if ids is not None:
            if len(ids) != len(documents):
                raise InputError(
                    f"embeddings have shape {documents.shape} for {len(ids)} ids; give "
                    "one id per document."
                )
            names[:] = ids
        if documents.shape[1] != self._queries.shape[1]:
            raise InputError(
                f"embeddings have shape {documents.shape}; they must be "
                f"[n, {self._queries.shape[1]}], as those of the queries."
            )
        for start in range(0, len(documents), ROWS):
            part = documents[start : start + ROWS]
            scores, rows = self._best(part)
            self.merge(scores, rows, names[start : start + ROWS][rows], len(part))

    def _best(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[Q, k] scores and rows of a chunk."""
        k = min(self._k, len(documents))
        if self._kind != EXACT:
            return index.nearest(self._queries, documents, k, self._kind, _QUERIES)
        matrix = tf.constant(documents)
        found = [
            tf.math.top_k(
                tf.matmul(
                    self._queries[start : start + _QUERIES], matrix, transpose_b=True
                ),
                k,
            )
            for start in range(0, len(self._queries), _QUERIES)
        ]
        return (
            np.concatenate([part.values.numpy() for part in found]),
            np.concatenate([part.indices.numpy() for part in found]),
        )

"""Nearest documents by inner product, through TFRS's `TopK` layers.

TFRS's own `ScaNN` layer always partitions and quantises. The paper searches with
ScaNN's brute force, which `ScannBruteForce` gives as a layer of the same kind. A corpus
streams by in chunks: the best of all chunks so far are kept, and memory is that of one.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

from tfdpsq.validation import InputError, one_of, positive_integer

# ScaNN's tree has to see all documents before it can be built.
TREE = "scann"
EXACT = ("scann_brute_force", "brute_force")
KINDS = (*EXACT, TREE)
# A tree's codes have 16 centres: of fewer vectors ScaNN fails, or ends the process.
LEAST_OF_TREE = 16
# Queries that are scored at a time, and documents of a chunk.
_QUERIES = 1024
ROWS = 65_536


class ScannBruteForce(tfrs.layers.factorized_top_k.TopK):
    """Exact top k by inner product through ScaNN, without quantisation.

    Example:
      >>> layer = ScannBruteForce(k=1).index(tf.eye(3), tf.constant(["a", "b", "c"]))
      >>> scores, ids = layer(tf.constant([[0.0, 1.0, 0.0]]))
      >>> ids.numpy()
      array([[b'b']], dtype=object)
    """

    def __init__(
        self,
        query_model: tf.keras.Model | None = None,
        k: int = 10,
        name: str | None = None,
    ):
        """Makes an empty index.

        Args:
          query_model: turns what `call` is given into query embeddings, such as
            `TwoTower.query_model`; `None` if that is embeddings already.
          k: documents returned unless `call` says otherwise, at least 1.
          name: of the layer.
        """
        super().__init__(k=positive_integer("k", k), name=name)
        _scann_ops()  # Fail here, not at the first search.
        self.query_model = query_model
        self._searcher_state = self._identifiers = None
        self._searcher: Any = None
        self._size = 0

    def index(
        self, candidates: tf.Tensor, identifiers: tf.Tensor | None = None
    ) -> ScannBruteForce:
        """Builds the index, in place of an earlier one; returns the layer itself.

        Args:
          candidates: [N, D] float32 document embeddings.
          identifiers: [N] of any dtype, or `None` for row numbers.

        Raises:
          InputError: candidates of another shape, none, or not finite.
        """
        candidates = tf.constant(checked("candidates", candidates))
        size = len(candidates)
        if identifiers is None:
            identifiers = tf.range(size)
        self.release()
        builder = _scann_ops().builder(candidates, min(self._k, size), "dot_product")
        # A name of its own, or two indexes would share one searcher.
        searcher = builder.score_brute_force(quantize=False).build(
            shared_name=f"{self.name}/{uuid.uuid4()}"
        )
        self._searcher_state = searcher.serialize_to_module()
        # In this saved form it is assembled at every search, in some milliseconds.
        self._searcher = lambda: searcher  # Keras must not look into it
        self._identifiers = tf.Variable(identifiers, trainable=False)
        self._size = size
        self._reset_tf_function_cache()
        return self

    def call(
        self, queries: tf.Tensor, k: int | tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Finds the k best candidates of each query.

        Args:
          queries: [Q, D] float32 embeddings, or what `query_model` takes.
          k: candidates to return; if above N, all N come back.

        Returns:
          scores: [Q, k] float32 inner products, descending.
          identifiers: [Q, k]. Which of equal scores comes first is not defined.
        """
        if self._searcher_state is None:
            raise InputError("the index is empty; call index(candidates) first.")
        k = tf.minimum(self._k if k is None else k, self._size)
        if self.query_model is not None:
            queries = self.query_model(queries)
        searcher = (
            self._searcher()
            if tf.executing_eagerly()
            else _scann_ops().searcher_from_module(self._searcher_state)
        )
        found = searcher.search_batched_parallel(queries, final_num_neighbors=k)
        return found.distances, tf.gather(self._identifiers, found.indices)

    def release(self) -> None:
        """Gives up the index and its memory, which TensorFlow would keep for good."""
        if self._searcher is not None:
            tf.raw_ops.DestroyResourceOp(
                resource=self._searcher().searcher_handle, ignore_lookup_error=True
            )
        self._searcher_state = self._searcher = self._identifiers = None

    def is_exact(self) -> bool:
        """True: every candidate is scored, in float32."""
        return True


def top_k_layer(
    kind: str, documents: int, k: int, query_model: tf.keras.Model | None = None
) -> tfrs.layers.factorized_top_k.TopK:
    """Returns an empty index: a TFRS layer.

    Args:
      kind: "scann_brute_force" (exact), "brute_force" (exact, TFRS's, without ScaNN)
        or "scann" (approximate, TFRS's `ScaNN`: of 2√N leaves a twentieth is searched,
        at least 16, and 20·k documents, at least 200, are scored exactly).
      documents: N, that will be indexed; of "scann" at least `LEAST_OF_TREE`.
      k: documents a query.
      query_model: as for `ScannBruteForce`.
    """
    one_of("kind", kind, KINDS)
    k = min(positive_integer("k", k), documents)
    if kind == "brute_force":
        return tfrs.layers.factorized_top_k.BruteForce(query_model, k)
    if kind != TREE:
        return ScannBruteForce(query_model, k)
    require_tree("kind", documents)
    _scann_ops()
    leaves = 2 * math.isqrt(documents)
    return tfrs.layers.factorized_top_k.ScaNN(
        query_model,
        k,
        num_leaves=leaves,
        num_leaves_to_search=min(leaves, max(16, leaves // 20)),
        num_reordering_candidates=min(documents, max(20 * k, 200)),
    )


def require_tree(setting: str, documents: int) -> None:
    """Refuses too few documents for ScaNN's tree, chosen by `setting`."""
    if documents < LEAST_OF_TREE:
        raise InputError(
            f"{setting} is 'scann', but {documents} documents are too few for ScaNN's "
            f"tree, which needs {LEAST_OF_TREE}. Set it to 'scann_brute_force', which "
            "is exact."
        )


class KBest:
    """The k best documents of each query so far; of equal scores the earlier chunk's.

    Attributes:
      size: documents so far.
      scores: [Q, at most k] float32, best first.
      places: [Q, at most k] int64, the documents' numbers in their order, from 0.
      ids: [Q, at most k] object array of str; "" (with score -inf) where ScaNN's tree
        found too few.
    """

    def __init__(self, queries: int, k: int):
        """Starts without documents, for Q queries."""
        self._k = positive_integer("k", k)
        self.size = 0
        self.scores = np.zeros([queries, 0], np.float32)
        self.places = np.zeros([queries, 0], np.int64)
        self.ids = np.zeros([queries, 0], object)

    def merge(
        self, scores: np.ndarray, rows: np.ndarray, ids: np.ndarray, count: int
    ) -> None:
        """Takes up the best of the next `count` documents, numbers `rows` of them."""
        scores = np.concatenate([self.scores, scores], axis=1)
        places = np.concatenate([self.places, rows + self.size], axis=1)
        ids = np.concatenate([self.ids, ids], axis=1)
        order = np.lexsort((places, -scores), axis=1)[:, : self._k]
        self.scores = np.take_along_axis(scores, order, axis=1)
        self.places = np.take_along_axis(places, order, axis=1)
        self.ids = np.take_along_axis(ids, order, axis=1)
        self.size += count


def search_chunks(
    queries: Mapping[str, np.ndarray],
    chunks: Iterable[tuple[Sequence[str], np.ndarray]],
    k: int,
    kind: str = "scann_brute_force",
) -> dict[str, KBest]:
    """The k best documents of each query, while the documents stream by.

    A chunk is indexed once, for all sets of queries. "scann" holds all documents.

    Args:
      queries: name of a set -> [Q, D] float32.
      chunks: n ids and embeddings [n, D] float32.
      k: documents a query; if there are fewer, all come back.
      kind: one of `KINDS`; see `top_k_layer`.

    Raises:
      InputError: shapes that do not fit, embeddings that are not finite, or too few of
        them for "scann".
    """
    one_of("kind", kind, KINDS)
    sets = {name: checked("queries", values) for name, values in queries.items()}
    best = {name: KBest(len(values), k) for name, values in sets.items()}
    if kind == TREE:
        parts = list(chunks)
        ids = [name for names, _ in parts for name in names]
        chunks = [(ids, np.concatenate([vectors for _, vectors in parts]))]
    for names, embeddings in chunks:
        vectors = checked("embeddings", embeddings)
        widths = {vectors.shape[1], *(values.shape[1] for values in sets.values())}
        if len(names) != len(vectors) or len(widths) > 1:
            raise InputError(
                f"embeddings have shape {vectors.shape} for {len(names)} ids, and "
                f"queries and documents {sorted(widths)} dimensions; give one id per "
                "document, and one number of dimensions."
            )
        layer = top_k_layer(kind, len(vectors), k).index(tf.constant(vectors))
        named = np.array(names, object)
        for name, values in sets.items():
            found = [
                layer(tf.constant(values[start : start + _QUERIES]))
                for start in range(0, len(values), _QUERIES)
            ]
            scores = np.concatenate([part[0].numpy() for part in found])
            rows = np.concatenate([part[1].numpy() for part in found])
            # ScaNN marks a place it could not fill by NaN.
            empty = np.isnan(scores)
            scores[empty], rows[empty] = -np.inf, 0
            best[name].merge(
                scores, rows, np.where(empty, "", named[rows]), len(vectors)
            )
        if isinstance(layer, ScannBruteForce):
            layer.release()
    return best


def as_run(
    query_ids: Sequence[str], scores: np.ndarray, ids: np.ndarray
) -> dict[str, dict[str, float]]:
    """Converts results of an index to a run: query id -> {document id: score}.

    Args:
      query_ids: Q ids, in the order of the rows.
      scores: [Q, k].
      ids: [Q, k] str, bytes or integers; "" is left out.
    """
    as_text = tf.compat.as_str_any
    return {
        as_text(query_id): {
            as_text(n): float(score) for n, score in zip(row, of_row) if as_text(n)
        }
        for query_id, row, of_row in zip(query_ids, np.asarray(ids), np.asarray(scores))
    }


def _scann_ops() -> Any:
    try:
        from scann import scann_ops
    except ImportError as error:
        raise ImportError(
            "Searching with ScaNN needs scann: pip install scann==1.3.0 (Linux, built "
            "for TensorFlow 2.15). Or search with kind='brute_force', equally exact."
        ) from error
    return scann_ops


def checked(name: str, embeddings: np.ndarray) -> np.ndarray:
    """Returns embeddings as [rows, D] float32, C-contiguous; refuses other shapes.

    Raises:
      InputError: another shape, no row, or numbers that are not finite.
    """
    array = np.ascontiguousarray(embeddings, dtype=np.float32)
    if array.ndim != 2 or not len(array):
        raise InputError(f"{name} has shape {array.shape}; it must be [rows, D].")
    if not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(array).all(axis=1))[0])
        raise InputError(f"{name}[{row}] is not finite; its ranks would mean nothing.")
    return array

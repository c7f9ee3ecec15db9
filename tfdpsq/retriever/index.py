"""Nearest documents by inner product, exact by default.

TFRS's own `ScaNN` layer always partitions and quantises. The paper searches with
ScaNN's brute force, which `ScannBruteForce` gives as a layer of the same kind;
`ScannTree` is ScaNN's partitioned, quantised search at settings that keep recall.
TFRS's `BruteForce` and `Streaming` work on the same embeddings.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
from absl import logging

from tfdpsq.validation import InputError, one_of, positive_integer

KINDS = ("scann_brute_force", "brute_force", "streaming", "scann")
# A tree's codes have 16 centres: of fewer vectors ScaNN fails, or ends the process.
LEAST_OF_TREE = 16


class _Untracked:
    """Holds what Keras must not look into: a resource of this process."""

    def __init__(self, value: Any):
        """Takes it."""
        self.value = value


class _Scann(tfrs.layers.factorized_top_k.TopK):
    """Top k by inner product through ScaNN; how is for the subclasses to say."""

    def __init__(
        self,
        query_model: tf.keras.Model | None = None,
        k: int = 10,
        name: str | None = None,
    ):
        """Makes an empty index.

        Args:
          query_model: turns what `call` is given into query embeddings; `None` if
            that is embeddings already.
          k: documents returned unless `call` says otherwise.
          name: of the layer.

        Raises:
          ImportError: scann is not installed.
          InputError: k below 1.
        """
        super().__init__(k=positive_integer("k", k), name=name)
        _scann_ops()  # Fail here, not at the first search.
        self.query_model = query_model
        self._searcher_state = None
        self._searcher: Any = None
        self._identifiers = None
        self._size = 0

    def index(
        self, candidates: tf.Tensor, identifiers: tf.Tensor | None = None
    ) -> ScannBruteForce:
        """Builds the index, in place of an earlier one.

        Args:
          candidates: [N, D] float32 document embeddings.
          identifiers: [N] of any dtype, or `None` for row numbers.

        Returns:
          The layer itself.

        Raises:
          InputError: shapes that do not fit, no candidate, or too few for a tree.
        """
        candidates = tf.cast(tf.convert_to_tensor(candidates), tf.float32)
        if candidates.shape.rank != 2 or not candidates.shape[0]:
            raise InputError(
                f"candidates have shape {candidates.shape}; they must be [N, D] with N "
                "of at least 1."
            )
        size = int(candidates.shape[0])
        if identifiers is None:
            identifiers = tf.range(size)
        identifiers = tf.convert_to_tensor(identifiers)
        if identifiers.shape != [size]:
            raise InputError(
                f"identifiers have shape {identifiers.shape}; they must be [{size}], "
                "one per candidate."
            )
        builder = _scann_ops().builder(candidates, min(self._k, size), "dot_product")
        # A name of its own, or two indexes would share one searcher.
        searcher = self._configured(builder, size).build(
            shared_name=f"{self.name}/{uuid.uuid4()}"
        )
        self._searcher_state = searcher.serialize_to_module()
        # In this saved form it is assembled at every search, in some milliseconds.
        self._searcher = _Untracked(searcher)
        self._identifiers = tf.Variable(identifiers, trainable=False)
        self._size = size
        self._reset_tf_function_cache()
        return self

    def call(
        self, queries: tf.Tensor, k: int | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Finds the k best candidates of each query.

        Args:
          queries: [Q, D] float32 embeddings, or what `query_model` takes.
          k: candidates to return; if above N, all N come back and a warning is
            logged.

        Returns:
          scores: [Q, k] float32 inner products, descending.
          identifiers: [Q, k]. Which of equal scores comes first is not defined.
            `ScannTree` may find fewer than k: such places have score NaN, and what
            identifier they have means nothing.

        Raises:
          InputError: `index` was not called, or k below 1.
        """
        if self._searcher_state is None:
            raise InputError("the index is empty; call index(candidates) first.")
        k = _at_most(positive_integer("k", self._k if k is None else k), self._size)
        if self.query_model is not None:
            queries = self.query_model(queries)
        scores, rows = self.nearest(queries, k)
        shape = [queries.shape[0], k]
        rows = tf.ensure_shape(rows, shape)
        return tf.ensure_shape(scores, shape), tf.gather(self._identifiers, rows)

    def nearest(self, queries: tf.Tensor, k: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Searches as `call`, for a dynamic number of embeddings and k; returns rows.

        Args:
          queries: [Q, D] float32.
          k: [] int32, at most N.

        Returns:
          [Q, k] float32 inner products, descending, and [Q, k] int32 row numbers.
        """
        searcher = (
            self._searcher.value
            if tf.executing_eagerly()
            else _scann_ops().searcher_from_module(self._searcher_state)
        )
        found = searcher.search_batched_parallel(queries, final_num_neighbors=k)
        # Where the leaves that are searched hold fewer than k, it has fewer columns.
        missing = [[0, 0], [0, k - tf.shape(found.indices)[1]]]
        scores = tf.pad(found.distances, missing, constant_values=np.nan)
        return scores, tf.pad(found.indices, missing)

    def release(self) -> None:
        """Gives up the index and its memory, which TensorFlow would keep for good."""
        if self._searcher is not None:
            tf.raw_ops.DestroyResourceOp(
                resource=self._searcher.value.searcher_handle, ignore_lookup_error=True
            )
        self._searcher_state = self._searcher = self._identifiers = None
        self._size = 0

    def _configured(self, builder: Any, size: int) -> Any:
        raise NotImplementedError  # each class below has its own


class ScannBruteForce(_Scann):
    """Exact top k by inner product through ScaNN, without quantisation.

    Example:
      >>> layer = ScannBruteForce(k=1).index(tf.eye(3), tf.constant(["a", "b", "c"]))
      >>> scores, ids = layer(tf.constant([[0.0, 1.0, 0.0]]))
      >>> ids.numpy()
      array([[b'b']], dtype=object)
    """

    def _configured(self, builder: Any, size: int) -> Any:
        return builder.score_brute_force(quantize=False)

    def is_exact(self) -> bool:
        """True: every candidate is scored, in float32."""
        return True


class ScannTree(_Scann):
    """Approximate top k: ScaNN's partitions and 4-bit codes, the best rescored.

    N documents, at least `LEAST_OF_TREE`, make 2√N leaves, of which a twentieth is
    searched (at least 16). Codes are of two dimensions each, by anisotropic
    quantisation (Guo et al. 2020, arXiv:1908.10396), and 20 times as many documents as
    asked for, at least 200, are scored exactly. `tests/benchmarks/search.py` measures
    the recall.

    Example:
      >>> layer = ScannTree(k=1).index(tf.eye(32))
      >>> scores, rows = layer(tf.eye(32)[5:6])
      >>> rows.numpy()
      array([[5]], dtype=int32)
    """

    def _configured(self, builder: Any, size: int) -> Any:
        require_tree("kind", size)
        leaves = max(1, min(size, 2 * math.isqrt(size)))
        searched = min(leaves, max(16, leaves // 20))
        again = min(size, max(20 * self._k, 200))
        return (
            builder.tree(
                num_leaves=leaves,
                num_leaves_to_search=searched,
                training_sample_size=min(size, 100_000),
                min_partition_size=1,
            )
            .score_ah(2, anisotropic_quantization_threshold=0.2)
            .reorder(again)
        )

    def is_exact(self) -> bool:
        """False: documents in leaves that are not searched are missed."""
        return False


def require_tree(setting: str, documents: int) -> None:
    """Refuses a number of documents that ScaNN cannot build its tree of.

    `setting` is where "scann" was chosen, for the error.

    Raises:
      InputError: fewer than `LEAST_OF_TREE`.
    """
    if documents < LEAST_OF_TREE:
        raise InputError(
            f"{setting} is 'scann', but {documents} documents are too few for ScaNN's "
            f"tree, which needs {LEAST_OF_TREE}. Set it to 'scann_brute_force', which "
            "is exact."
        )


def search(
    query_embeddings: np.ndarray,
    document_embeddings: np.ndarray,
    ids: Sequence[str],
    k: int,
    kind: str = "scann_brute_force",
    batch_size: int = 1024,
) -> tuple[np.ndarray, np.ndarray]:
    """The k best documents of each query.

    Args:
      query_embeddings: [Q, D] float32.
      document_embeddings: [N, D] float32; of "scann", N is at least `LEAST_OF_TREE`.
      ids: N document ids, in the order of the embeddings.
      k: documents per query; if above N, all N come back and a warning is logged.
      kind: "scann_brute_force" (exact), "brute_force" and "streaming" (exact,
        TFRS's), or "scann" (approximate: `ScannTree`).
      batch_size: queries at a time, or documents at a time for "streaming".

    Returns:
      scores: [Q, k] float32 inner products, best first. "scann" alone may find
        fewer than k: such places hold the id "" and the score -inf.
      ids: [Q, k] object array of str.

    Raises:
      InputError: unknown kind, shapes that do not fit, embeddings that are not
        finite, too few of them for "scann", k or batch_size below 1.
      ImportError: scann is needed and not installed.
    """
    one_of("kind", kind, KINDS)
    positive_integer("batch_size", batch_size)
    queries = checked("query_embeddings", query_embeddings)
    documents = checked("document_embeddings", document_embeddings)
    if queries.shape[1] != documents.shape[1] or len(ids) != len(documents):
        raise InputError(
            f"query_embeddings {queries.shape}, document_embeddings {documents.shape} "
            f"and {len(ids)} ids do not fit: they must be [Q, D], [N, D] and N."
        )
    k = _at_most(positive_integer("k", k), len(documents))
    scores, rows = nearest(queries, documents, k, kind, batch_size)
    # ScaNN marks a place it could not fill by NaN.
    empty = np.isnan(scores)
    names = np.array(list(ids), dtype=object)[np.where(empty, 0, rows)]
    names[empty] = ""
    return np.where(empty, -np.inf, scores).astype(np.float32), names


def nearest(
    queries: np.ndarray, documents: np.ndarray, k: int, kind: str, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """[Q, k] scores and row numbers, as `search` says, of arguments that are sound."""
    layer = _built(kind, documents, k, batch_size)
    found = [
        layer(tf.constant(queries[start : start + batch_size]), k=k)
        for start in range(0, len(queries), batch_size)
    ]
    if isinstance(layer, _Scann):
        layer.release()
    return (
        np.concatenate([part[0].numpy() for part in found]),
        np.concatenate([part[1].numpy() for part in found]),
    )


def as_run(
    query_ids: Sequence[str], scores: np.ndarray, ids: np.ndarray
) -> dict[str, dict[str, float]]:
    """Converts results of `search` to a run: query id -> {document id: score}.

    Args:
      query_ids: Q ids, in the order of the rows.
      scores: [Q, k].
      ids: [Q, k]; "" is left out.

    Raises:
      InputError: not as many rows as ids.
    """
    if not len(query_ids) == len(scores) == len(ids):
        raise InputError(
            f"{len(query_ids)} query ids, {len(scores)} rows of scores and {len(ids)} "
            "of ids; give one row per query."
        )
    return {
        query_id: {
            str(document_id): float(score)
            for document_id, score in zip(ids[row], scores[row])
            if document_id != ""
        }
        for row, query_id in enumerate(query_ids)
    }


def _built(
    kind: str, documents: np.ndarray, k: int, batch_size: int
) -> tfrs.layers.factorized_top_k.TopK:
    layers = tfrs.layers.factorized_top_k
    if kind == "streaming":
        data = tf.data.Dataset.from_tensor_slices(documents).batch(batch_size)
        return layers.Streaming(k=k).index_from_dataset(data)
    if kind == "brute_force":
        return layers.BruteForce(k=k).index(tf.constant(documents))
    if kind == "scann":
        return ScannTree(k=k).index(documents)
    return ScannBruteForce(k=k).index(documents)


def _scann_ops() -> Any:
    try:
        from scann import scann_ops
    except ImportError as error:
        raise ImportError(
            "Searching with ScaNN needs scann: pip install scann==1.3.0 (Linux, built "
            "for TensorFlow 2.15). Or search with kind='brute_force', equally exact."
        ) from error
    return scann_ops


def _at_most(k: int, size: int) -> int:
    if k > size:
        logging.warning("k is %d but there are %d documents; returning all.", k, size)
    return min(k, size)


def checked(name: str, embeddings: np.ndarray) -> np.ndarray:
    """The embeddings as [rows, D] float32, C-contiguous.

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

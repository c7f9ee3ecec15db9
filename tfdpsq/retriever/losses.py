"""Softmax losses: among a batch's documents by TFRS, a group's, or public ones.

Every other document is a negative, with exceptions: a batch may hold the row's own
document twice, another document known to answer its query, or padding. Those columns
are left out of the softmax. `false_negatives` keeps the first two kinds in, as
equation (1) of Carranza et al. 2024 has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_recommenders as tfrs

from tfdpsq.layers.softmax import log_sum_exp

# Far below any score (|score| ≤ scale), and finite: with -inf a gradient through
# the softmax could be inf * 0.
NEVER = -1e30
_LOWER = 0xFFFFFFFF  # half of an int64

Scaled = Callable[[tf.Tensor], tf.Tensor]


class Embeddings(NamedTuple):
    """Embeddings of a batch's texts.

    Attributes:
      queries: [B, D] float32.
      documents: [B, D] float32.
      negatives: [B, H, D] float32, each row's hard negatives, or `None`.
    """

    queries: tf.Tensor
    documents: tf.Tensor
    negatives: tf.Tensor | None = None


class RowSoftmax(tf.keras.losses.Loss):
    """Cross-entropy of row i's score i, for `tfrs.tasks.Retrieval`.

    Losses stay by row, and TensorFlow's cross-entropy is slow on processors.
    """

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """[B] losses in nats, of scores [B, K ≥ B]; weight 0 is padding, of loss 0."""
        del y_true
        losses = log_sum_exp(y_pred) - tf.linalg.diag_part(y_pred)
        return tf.where(sample_weight > 0, losses, tf.zeros_like(losses))


TASK = tfrs.tasks.Retrieval(loss=RowSoftmax())


@tf.function  # the task needs autograph, which the models here turn off
def _task_losses(
    queries: tf.Tensor, candidates: tf.Tensor, weights: tf.Tensor, mask: tf.Tensor
) -> tf.Tensor:
    given = {"sample_weight": weights, "score_mask": mask, "compute_metrics": False}
    return TASK(queries, candidates, **given)


def batch_losses(
    embeddings: Embeddings,
    batch: Mapping[str, tf.Tensor],
    scaled: Scaled,
    bidirectional: bool = False,
    false_negatives: bool = False,
) -> tf.Tensor:
    """Cross-entropy of each query's own document, by TFRS's `Retrieval` task.

    With s_ij = scale · <q_i, d_j>, row i loses

      ℓ_i = log Σ_{j ∈ N(i)} exp(s_ij) − s_ii   (nats),

    where N(i) holds i itself and every j that is a real row, whose document is not
    row i's own by content, and is not a known positive of row i's query. Hard negatives
    of all rows are further candidates (Karpukhin et al. 2020, arXiv:2004.04906, section
    3.2), as are the documents of all replicas of a `tf.distribute.Strategy`. Gradients
    go back to where an embedding came from: the sum of the replicas' losses is that of
    one replica with all rows.

    An ℓ_i depends on all rows of the batch: see `direct_dp` for what that costs under
    differential privacy.

    Args:
      embeddings: of the B rows of this replica.
      batch: "document_key" [B] int64 ≥ 0, equal for equal documents; "positive_keys"
        [B, P] int64, documents known to answer the row's query, padded with -1;
        "weights" [B], 0 for padding; and with hard negatives "negative_keys" [B, H]
        int64, -1 for none.
      scaled: multiplies queries by the inverse of the softmax's temperature.
      bidirectional: average with document i's loss among the queries, without those
        that it is known to answer; hard negatives look for no query.
      false_negatives: keep equal documents and known positives as negatives.

    Returns:
      [B] float32 losses in nats; 0 for padding.
    """
    keys, known, weights = (
        batch[name] for name in ("document_key", "positive_keys", "weights")
    )
    candidates, all_keys = everywhere(embeddings.documents), everywhere(keys)
    real = everywhere(weights) > 0
    columns, column_keys = real, all_keys
    if embeddings.negatives is not None:
        hard = everywhere(embeddings.negatives)
        theirs = everywhere(batch["negative_keys"])
        some = (theirs >= 0) & real[:, tf.newaxis]
        width = embeddings.negatives.shape[-1]
        candidates = tf.concat([candidates, tf.reshape(hard, [-1, width])], axis=0)
        columns = tf.concat([columns, tf.reshape(some, [-1])], axis=0)
        column_keys = tf.concat([column_keys, tf.reshape(theirs, [-1])], axis=0)

    def losses(rows: tf.Tensor, found: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
        own = tf.eye(tf.shape(rows)[0], tf.shape(found)[0], dtype=tf.bool)
        return _task_losses(scaled(rows), found, weights, kept | own)

    kept = columns[tf.newaxis, :]
    if not false_negatives:
        kept &= ~_answers(keys, known, column_keys[tf.newaxis, :])
    forwards = losses(embeddings.queries, candidates, kept)
    if not bidirectional:
        return forwards
    kept = real[tf.newaxis, :]
    if not false_negatives:
        answered = everywhere(known)[tf.newaxis] == keys[:, tf.newaxis, tf.newaxis]
        same = keys[:, tf.newaxis] == all_keys[tf.newaxis, :]
        kept &= ~(same | tf.reduce_any(answered, axis=-1))
    backwards = losses(embeddings.documents, everywhere(embeddings.queries), kept)
    return (forwards + backwards) / 2


def group_losses(
    scores: tf.Tensor,
    batch: Mapping[str, tf.Tensor],
    bidirectional: bool = False,
    false_negatives: bool = False,
) -> tf.Tensor:
    """`batch_losses` of many batches that do not see each other, from scores.

    Row i's query has score j with document j: `scores` are [..., B, B]. `batch` has
    "document_key" [..., B], "positive_keys" [..., B, P] and "weights" [..., B].
    """
    keys, real = batch["document_key"], batch["weights"] > 0
    own = tf.eye(tf.shape(scores)[-1], dtype=tf.bool)
    dropped = tf.zeros_like(scores, tf.bool)
    if not false_negatives:
        answers = _answers(keys, batch["positive_keys"], keys[..., tf.newaxis, :])
        dropped = answers & ~own

    def losses(scores: tf.Tensor, dropped: tf.Tensor) -> tf.Tensor:
        out = dropped | (~real[..., tf.newaxis, :] & ~own)
        return _cross_entropies(scores, tf.linalg.diag_part(scores), out, real)

    forwards = losses(scores, dropped)
    if not bidirectional:
        return forwards
    transpose = tf.linalg.matrix_transpose
    return (forwards + losses(transpose(scores), transpose(dropped))) / 2


def public_losses(
    embeddings: Embeddings,
    batch: Mapping[str, tf.Tensor],
    scaled: Scaled,
    public: tf.Tensor,
    public_keys: tf.Tensor,
) -> tf.Tensor:
    """Cross-entropy of each query's own document among public documents.

    ℓ_i = log(exp(s_ii) + Σ_{m ∈ N(i)} exp(s_im)) − s_ii, where N(i)
    leaves out negatives whose content is the row's own document or a known positive
    of its query. What N(i) leaves out depends on row i alone, and so does ℓ_i: the
    other rows occur nowhere. The public documents are constants to the gradient; a
    row's own hard negatives, which only that row looks at, are not.

    Args:
      embeddings: of the B rows; see `batch_losses` for what is not described here.
      batch: as in `batch_losses`.
      scaled: as in `batch_losses`.
      public: [K, D] float32, embeddings of documents, for all rows.
      public_keys: [K] int64, their contents.
    """
    queries = scaled(embeddings.queries)
    keys, known = batch["document_key"], batch["positive_keys"]
    own = tf.reduce_sum(queries * embeddings.documents, -1, keepdims=True)
    others = tf.matmul(queries, tf.stop_gradient(public), transpose_b=True)
    scores = [own, others]
    answers = _answers(keys, known, public_keys[tf.newaxis, :])
    dropped = [tf.zeros_like(own, tf.bool), answers]
    if embeddings.negatives is not None:
        theirs = batch["negative_keys"]
        scores.append(tf.einsum("id,ihd->ih", queries, embeddings.negatives))
        dropped.append((theirs < 0) | _answers(keys, known, theirs))
    real = batch["weights"] > 0
    return _cross_entropies(
        tf.concat(scores, axis=1), own[:, 0], tf.concat(dropped, axis=1), real
    )


def _answers(keys: tf.Tensor, known: tf.Tensor, candidates: tf.Tensor) -> tf.Tensor:
    """[..., B, K]: whether candidate k is row i's document, or answers its query."""
    same = keys[..., :, tf.newaxis] == candidates
    listed = known[..., :, :, tf.newaxis] == candidates[..., tf.newaxis, :]
    return same | tf.reduce_any(listed, axis=-2)


def _cross_entropies(
    scores: tf.Tensor, own_scores: tf.Tensor, dropped: tf.Tensor, real: tf.Tensor
) -> tf.Tensor:
    """[..., B]: −log softmax of `own_scores` [..., B], over the scores that stay.

    `dropped` [..., B, K] never holds a row's own score; rows that are not real have 0.
    """
    kept = tf.where(dropped, tf.constant(NEVER, scores.dtype), scores)
    losses = log_sum_exp(kept) - own_scores
    return tf.where(real, losses, tf.zeros_like(losses))


def everywhere(values: tf.Tensor) -> tf.Tensor:
    """The values of all replicas, this one's first; gradients go back to each.

    `values` [B, ...] are not boolean, and of one shape on all replicas.
    """
    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return values
    # A function's arguments are on no device, where several workers want to know one.
    given = _words(values) if values.dtype == tf.int64 else tf.identity(values)
    gathered = replica.all_gather(given, axis=0)
    first = replica.replica_id_in_sync_group * tf.shape(values)[0]
    gathered = tf.roll(gathered, -first, axis=0)
    return _joined(gathered) if values.dtype == tf.int64 else gathered


def _words(values: tf.Tensor) -> tf.Tensor:
    """[..., 2] int32 from int64, which TPUs do not gather; the upper half first."""
    upper = tf.bitwise.right_shift(values, tf.constant(32, tf.int64))
    halves = tf.stack([upper, values], axis=-1) & _LOWER
    return tf.bitcast(tf.cast(halves, tf.uint32), tf.int32)


def _joined(words: tf.Tensor) -> tf.Tensor:
    # Workers of several machines gather without a static shape.
    upper, lower = tf.unstack(tf.cast(words, tf.int64), num=2, axis=-1)
    return tf.bitwise.left_shift(upper, tf.constant(32, tf.int64)) | (lower & _LOWER)

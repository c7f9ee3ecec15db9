"""Softmax losses: among a batch's documents, a group's, or public ones.

Every other document is a negative, except where it is none: a batch may hold the
row's own document twice, or another document known to answer its query, or padding.
Those columns leave the softmax.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

# Far below any score (|score| ≤ scale), and finite: with -inf a gradient through
# the softmax could be inf * 0.
NEVER = -1e30


def in_batch_losses(
    query_embeddings: tf.Tensor,
    document_embeddings: tf.Tensor,
    document_key: tf.Tensor,
    positive_keys: tf.Tensor,
    weights: tf.Tensor,
    scale: float,
) -> tf.Tensor:
    """Cross-entropy of each query's own document among the batch's documents.

    With s_ij = scale · <q_i, d_j>, row i loses

      ℓ_i = log Σ_{j ∈ N(i)} exp(s_ij) − s_ii   (nats),

    where N(i) holds i itself and every j that is a real row, whose document is not
    row i's own by content, and is no known positive of row i's query. An ℓ_i
    depends on all rows of the batch: see `tfdpsq.retriever.direct_dp` for what that
    costs under differential privacy.

    All arguments may have the same leading dimensions: then each is a batch of its
    own, and its rows depend on no other.

    Args:
      query_embeddings: [..., B, D] float32, unit length for scores that are cosines.
      document_embeddings: [..., B, D] float32.
      document_key: [..., B] int64 ≥ 0, equal for equal document contents.
      positive_keys: [..., B, P] int64, contents known to answer the row's query,
        padded with -1.
      weights: [..., B] float32, 0 for padding rows, whose loss is 0 and which are no
        one's negative; rows above 0 all count alike.
      scale: what the inner product is multiplied by, the inverse of a temperature.

    Returns:
      [..., B] float32 losses in nats, not averaged.
    """
    scores = scale * tf.matmul(query_embeddings, document_embeddings, transpose_b=True)
    return losses_of_scores(scores, document_key, positive_keys, weights)


def losses_of_scores(
    scores: tf.Tensor,
    document_key: tf.Tensor,
    positive_keys: tf.Tensor,
    weights: tf.Tensor,
    bidirectional: bool = False,
) -> tf.Tensor:
    """`in_batch_losses` from scores, [..., B, B]: row i's query with document j.

    Bidirectional: the mean of that and of document i's loss among the queries, those
    left out that are known to be answered by it.
    """
    real = weights > 0
    same = document_key[..., :, tf.newaxis] == document_key[..., tf.newaxis, :]
    known = _known(positive_keys, document_key[..., tf.newaxis, :])
    own = tf.eye(tf.shape(scores)[-1], dtype=tf.bool)
    dropped = (same | known) & ~own
    losses = _softmax_losses(scores, dropped, real)
    if bidirectional:
        backwards = _softmax_losses(
            tf.linalg.matrix_transpose(scores),
            tf.linalg.matrix_transpose(dropped),
            real,
        )
        losses = (losses + backwards) / 2
    return losses


def _softmax_losses(
    scores: tf.Tensor, dropped: tf.Tensor, real: tf.Tensor
) -> tf.Tensor:
    """[..., B]: −log softmax of the diagonal, over real columns that stay."""
    own = tf.eye(tf.shape(scores)[-1], dtype=tf.bool)
    out = dropped | (~real[..., tf.newaxis, :] & ~own)
    kept = tf.where(out, tf.constant(NEVER, scores.dtype), scores)
    losses = tf.reduce_logsumexp(kept, axis=-1) - tf.linalg.diag_part(scores)
    return tf.where(real, losses, tf.zeros_like(losses))


def losses_among(
    query_embeddings: tf.Tensor,
    document_embeddings: tf.Tensor,
    document_key: tf.Tensor,
    positive_keys: tf.Tensor,
    weights: tf.Tensor,
    negatives: tf.Tensor,
    negative_keys: tf.Tensor,
    scaled: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Cross-entropy of each query's own document among negatives shared by all.

    ℓ_i = log(exp(s_ii) + Σ_{m ∈ N(i)} exp(s_im)) − s_ii, where N(i)
    leaves out negatives whose content is the row's own document or a known positive
    of its query. What N(i) leaves out depends on row i alone, and so does ℓ_i: the
    other rows occur nowhere. The negatives are constants to the gradient.

    Args:
      query_embeddings: [B, D] float32.
      document_embeddings: [B, D] float32.
      document_key: [B] int64.
      positive_keys: [B, P] int64, padded with -1.
      weights: [B] float32, 0 for padding.
      negatives: [K, D] float32, embeddings of documents.
      negative_keys: [K] int64, what is in them.
      scaled: inner products [B, K + 1] to scores.

    Returns:
      [B] float32 losses in nats; 0 for padding.
    """
    own = tf.reduce_sum(query_embeddings * document_embeddings, -1, keepdims=True)
    others = tf.matmul(query_embeddings, tf.stop_gradient(negatives), transpose_b=True)
    scores = scaled(tf.concat([own, others], axis=1))
    keys = negative_keys[tf.newaxis, :]
    dropped = (document_key[:, tf.newaxis] == keys) | _known(positive_keys, keys)
    never = tf.constant(NEVER, scores.dtype)
    kept = tf.where(tf.pad(dropped, [[0, 0], [1, 0]]), never, scores)
    losses = tf.reduce_logsumexp(kept, axis=1) - scores[:, 0]
    return tf.where(weights > 0, losses, tf.zeros_like(losses))


def _known(positive_keys: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """[..., B, K]: whether column k's content is a known positive of row i."""
    return tf.reduce_any(
        positive_keys[..., :, :, tf.newaxis] == keys[..., tf.newaxis, :], axis=-2
    )

"""The in-batch softmax: every other document of the batch is a negative.

Except where it is none: a batch may hold the row's own document twice, or another
document known to answer its query, or padding. Those columns leave the softmax.
"""

from __future__ import annotations

import tensorflow as tf

# Far below any score (|score| ≤ scale), and finite: with -inf a gradient through
# the softmax could be inf * 0.
_NEVER = -1e30


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

    Args:
      query_embeddings: [B, D] float32, unit length for scores that are cosines.
      document_embeddings: [B, D] float32.
      document_key: [B] int64 ≥ 0, equal for equal document contents.
      positive_keys: [B, P] int64, contents known to answer the row's query, padded
        with -1.
      weights: [B] float32, 0 for padding rows, whose loss is 0 and which are no
        one's negative; rows above 0 all count alike.
      scale: what the inner product is multiplied by, the inverse of a temperature.

    Returns:
      [B] float32 losses in nats, not averaged.
    """
    scores = scale * tf.matmul(query_embeddings, document_embeddings, transpose_b=True)
    real = weights > 0
    same = document_key[:, tf.newaxis] == document_key[tf.newaxis, :]
    known = tf.reduce_any(
        positive_keys[:, :, tf.newaxis] == document_key[tf.newaxis, tf.newaxis, :],
        axis=1,
    )
    own = tf.eye(tf.shape(scores)[0], dtype=tf.bool)
    dropped = (same | known | ~real[tf.newaxis, :]) & ~own
    kept = tf.where(dropped, tf.constant(_NEVER, scores.dtype), scores)
    losses = tf.reduce_logsumexp(kept, axis=1) - tf.linalg.diag_part(scores)
    return tf.where(real, losses, tf.zeros_like(losses))

"""Fast softmax losses over many scores on processors.

`tf.reduce_logsumexp` takes three times, and
`tf.nn.sparse_softmax_cross_entropy_with_logits` eight times as long as `tf.nn.softmax`,
which here gives the loss, and is kept for the gradient.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpsq.layers.tracing import without_autograph


@without_autograph
def log_sum_exp(scores: tf.Tensor) -> tf.Tensor:
    """Computes log Σ exp over the last dimension of [..., V] floats; -Inf adds nothing.

    Returns:
      [...], of the same type; not finite where a score is NaN or +Inf.
    """

    @tf.custom_gradient
    def total(scores: Any) -> Any:
        best, more, probabilities = _best(scores)
        return best + more, lambda upstream: probabilities * upstream[..., tf.newaxis]

    return total(scores)


@without_autograph
def cross_entropy(ids: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    """Computes -log softmax of one score of each row, in nats.

    Args:
      ids: [...] integers, which score.
      scores: [..., V] floats.

    Returns:
      [...], of the scores' type; not finite where a score is NaN or +Inf.
    """
    ids = tf.convert_to_tensor(ids)

    @tf.custom_gradient
    def losses(scores: Any) -> Any:
        best, more, probabilities = _best(scores)
        own = tf.gather(scores, ids, batch_dims=ids.shape.rank)

        def gradient(upstream: Any) -> Any:
            ones = tf.one_hot(ids, scores.shape[-1], dtype=scores.dtype)
            return (probabilities - ones) * upstream[..., tf.newaxis]

        # The difference first: large scores leave a sum few digits.
        return (best - own) + more, gradient

    return losses(scores)


def _best(scores: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns each row's best score, minus its log probability, and the softmax.

    That probability is 1/V at least: its logarithm loses nothing.
    """
    probabilities = tf.nn.softmax(scores)
    # Maxima, not values at the best place: XLA fuses them, and writes no probabilities.
    highest = tf.reduce_max(probabilities, axis=-1)
    return tf.reduce_max(scores, axis=-1), -tf.math.log(highest), probabilities

"""A linear map of query embeddings, to be trained while the documents' stay.

Any encoder's embeddings can be adapted, one behind a web service included: the encoder
does not run, and an index of its document embeddings stays valid. Few weights suffer
little from DP-SGD's noise, and a step over all rows costs one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq.keras_choice import keras
from tfdpsq.validation import InputError, positive

# Cosines above it are of equal documents: rounding in float32 is some 1e-7.
_SAME = 1 - 1e-5
# Far below any score, and finite: with -inf a gradient could be inf * 0.
_NEVER = -1e30


@keras.utils.register_keras_serializable("tfdpsq")
class QueryAdapter(keras.layers.Layer):
    """Multiplies query embeddings by a square matrix; results have unit length.

    It starts as the identity, which leaves every ranking as it is.

    Example:
      >>> QueryAdapter()(tf.constant([[3.0, 4.0]])).numpy()
      array([[0.6, 0.8]], dtype=float32)

    Attributes:
      projection: the Dense layer, without bias, that holds the matrix [D, D]; `None`
        before the layer is built.
    """

    def __init__(self, **kwargs):
        """Makes the layer; arguments are those of `keras.layers.Layer`."""
        kwargs.setdefault("dtype", "float32")
        super().__init__(**kwargs)
        self.projection: Any = None

    def build(self, input_shape) -> None:
        """Makes the matrix for embeddings [..., D].

        Raises:
          InputError: D is not known.
        """
        width = input_shape[-1]
        if width is None:
            raise InputError(
                f"embeddings have shape {tuple(input_shape)}, without a static width. "
                "Give the model's input the shape (D,)."
            )
        self.projection = keras.layers.Dense(
            width,
            use_bias=False,
            kernel_initializer=keras.initializers.Identity(),
            dtype=self.dtype_policy,
            name="projection",
        )
        self.projection.build(input_shape)
        self.built = True

    def call(self, queries: tf.Tensor) -> tf.Tensor:
        """Maps embeddings [..., D] of any length to [..., D] of unit length."""
        return tf.math.l2_normalize(self.projection(queries), axis=-1)

    def compute_output_shape(self, input_shape):
        """Returns the shape of the input."""
        return input_shape


def sampled_softmax(
    negatives: np.ndarray, scale: float = 20.0
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns a loss of queries among public documents, by row.

    Row i, with query q_i and its own document d_i, loses

      ℓ_i = log(exp(s·<q_i, d_i>) + Σ_{m ∈ N(i)} exp(s·<q_i, n_m>)) − s·<q_i, d_i>,

    where N(i) holds the negatives n_m that are not d_i again. ℓ_i reads pair i, the
    weights and the negatives, and no other pair, so one pair more or less moves the sum
    of clipped gradients by the clip norm at most, whatever the batch and the number of
    negatives: ordinary DP-SGD, sensitivity C. It holds if negatives are drawn from all
    public documents, without looking at the pairs: never from those that occur in them.
    What is protected are queries and which document each has; documents are public.

    Args:
      negatives: [K, D] embeddings of public documents, of any length but 0.
      scale: s, the inverse of a temperature.

    Returns:
      A function of (documents [B, D], queries [B, D] of unit length) to [B] float32
      losses in nats, as `PrivateModel.compile(loss=)` and Keras take one. Documents are
      scaled to unit length; one of length 0 counts as such, with cosines of 0.

    Raises:
      InputError: negatives that are no [K, D] of finite numbers with a length above 0,
        or a scale that is not above 0.
    """
    positive("scale", scale)
    vectors = np.asarray(negatives)
    lengths = np.zeros(0)
    if vectors.ndim == 2 and vectors.size and np.issubdtype(vectors.dtype, np.floating):
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    if not lengths.size or not (np.isfinite(lengths) & (lengths > 0)).all():
        raise InputError(
            f"negatives are {vectors.dtype} of shape {vectors.shape}; they must be "
            "[K, D] floating-point numbers, finite, and no row all zeros. Give "
            "embeddings of public documents."
        )
    # An eager constant is an input of the compiled step, not a part of its program.
    others = tf.constant((vectors / lengths).astype(np.float32))

    def losses(documents: tf.Tensor, queries: tf.Tensor) -> tf.Tensor:
        documents = tf.math.l2_normalize(tf.cast(documents, tf.float32), axis=-1)
        queries = tf.cast(queries, tf.float32)
        own = scale * tf.reduce_sum(queries * documents, axis=-1)
        scores = scale * tf.matmul(queries, others, transpose_b=True)
        again = tf.matmul(documents, others, transpose_b=True) > _SAME
        scores = tf.where(again, tf.constant(_NEVER), scores)
        every = tf.concat([own[:, tf.newaxis], scores], axis=1)
        return tf.reduce_logsumexp(every, axis=1) - own

    return losses

"""A linear map of query embeddings, to be trained while the documents' stay.

The encoder does not run, and an index of its document embeddings stays valid. Few
weights suffer little from DP-SGD's noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq.keras_choice import keras
from tfdpsq.layers.softmax import log_sum_exp
from tfdpsq.validation import InputError, in_range

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

    def __init__(self, **kwargs: Any) -> None:
        """Makes the layer; arguments are those of `keras.layers.Layer`."""
        kwargs.setdefault("dtype", "float32")
        super().__init__(**kwargs)
        self.projection: Any = None

    def build(self, input_shape: Any) -> None:
        """Makes the matrix for embeddings [..., D]."""
        if not input_shape[-1]:
            raise InputError(
                f"embeddings have shape {tuple(input_shape)}; give a static width D."
            )
        self.projection = keras.layers.Dense(
            input_shape[-1],
            use_bias=False,
            kernel_initializer=keras.initializers.Identity(),
            dtype=self.dtype_policy,
            name="projection",
        )
        self.projection.build(input_shape)
        self.built = True

    def call(self, queries: tf.Tensor) -> tf.Tensor:
        """Maps embeddings [..., D] to [..., D] of unit length; zeros stay zeros."""
        return _unit(self.projection(queries))

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the input."""
        return input_shape


def sampled_softmax(
    negatives: np.ndarray, scale: float = 20.0
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns a loss of queries among public documents, by row.

    Row i, with query q_i and its own document d_i, loses

      ℓ_i = log(exp(s·<q_i, d_i>) + Σ_{m ∈ N(i)} exp(s·<q_i, n_m>)) − s·<q_i, d_i>,

    where N(i) holds the negatives n_m, and hard negatives of the row's own, that are
    not d_i again. ℓ_i reads pair i, the weights and the negatives, and no other pair,
    so one pair more or less moves the sum of clipped gradients by the clip norm at
    most, whatever the batch and the number of negatives: ordinary DP-SGD, sensitivity
    C. It holds if `negatives` are drawn from all public documents, without looking at
    the pairs (never from those that occur in them), and if a row's own ones follow from
    its own query and public data. What is protected are queries and which document each
    has; documents are public. A hard negative that is among `negatives`, too, counts
    twice.

    Args:
      negatives: [K, D] embeddings of public documents, of any length but 0.
      scale: s, the inverse of a temperature, from 0.001 to 10,000.

    Returns:
      A function of (documents, queries [B, D] of unit length) to [B] float32 losses in
      nats, as `PrivateModel.compile(loss=)` and Keras take one (a model that Keras
      compiled with it loads with `compile=False`). Documents are [B, D], or
      [B, 1 + H, D]: the row's own, then its hard negatives, zeros for none. They are
      scaled to unit length; an own document of zeros has cosines of 0.
    """
    scale = float(in_range("scale", scale, 1e-3, 1e4))
    vectors = np.asarray(negatives, np.float64)
    if vectors.ndim != 2 or not vectors.size:
        raise InputError(f"negatives have shape {vectors.shape}; give [K, D] numbers.")
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    for row in np.flatnonzero(~(np.isfinite(largest) & (largest > 0))):
        raise InputError(f"row {row} of negatives is zero or not finite. Leave it out.")
    # An eager constant is an input of the compiled step, not a part of its program.
    others = _unit(tf.constant(vectors / largest, tf.float32))
    width = others.shape[1]

    def losses(documents: tf.Tensor, queries: tf.Tensor) -> tf.Tensor:
        documents, queries = (tf.cast(v, tf.float32) for v in (documents, queries))
        if documents.shape.rank == 2:
            documents = documents[:, tf.newaxis]
        if documents.shape[::2] != queries.shape or queries.shape[-1] != width:
            raise InputError(
                f"documents have shape {documents.shape} and queries {queries.shape}; "
                f"give static shapes [B, {width}] or [B, 1 + H, {width}] of documents, "
                f"and [B, {width}] of queries, as negatives have."
            )
        none = tf.reduce_all(documents == 0, axis=-1)
        documents = _unit(documents)
        # [B, 1 + H + K], the own document first.
        cosines = _with(queries, documents, others)
        again = _with(documents[:, 0], documents, others) > _SAME
        out = again | tf.pad(none, [[0, 0], [0, others.shape[0]]])
        first = tf.one_hot(0, cosines.shape[1], True, False, dtype=tf.bool)
        scores = tf.where(out & ~first, tf.constant(_NEVER), scale * cosines)
        return log_sum_exp(scores) - scores[:, 0]

    return losses


def _with(vectors: tf.Tensor, own: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
    """Inner products of [B, D] with each row's own [B, H, D], then with all [K, D]."""
    by_row = tf.reduce_sum(vectors[:, tf.newaxis] * own, axis=-1)
    return tf.concat([by_row, tf.matmul(vectors, others, transpose_b=True)], axis=1)


def _unit(vectors: tf.Tensor) -> tf.Tensor:
    """Scales to unit length, also where squares would overflow or vanish."""
    largest = tf.reduce_max(tf.abs(vectors), axis=-1, keepdims=True)
    # Lengths do not change the result, so no gradient goes through this factor.
    vectors = tf.math.divide_no_nan(vectors, tf.stop_gradient(largest))
    return tf.math.l2_normalize(vectors, axis=-1)

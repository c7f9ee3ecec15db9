"""Pools hidden states, one vector per token, into one vector per text."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpsq.keras_choice import keras
from tfdpsq.validation import InputError


class _Pooling(keras.layers.Layer):
    """Base of the pooling layers: hidden states [B, L, D], mask [B, L] to [B, D].

    A row of padding alone raises `InputError` if run eagerly; a graph, which cannot
    raise under XLA, gives zeros with zero gradients.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Makes the layer; arguments are those of `keras.layers.Layer`."""
        kwargs.setdefault("dtype", "float32")
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, hidden: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        """Pools along the second axis.

        Args:
          hidden: [B, L, D] floating point.
          mask: [B, L] bool or number, non-zero where a token is real.

        Returns:
          [B, D] in the layer's compute dtype.
        """
        mask = tf.convert_to_tensor(mask)
        fits = hidden.shape.rank == 3 and mask.shape.rank == 2
        if not fits or not hidden.shape[:2].is_compatible_with(mask.shape):
            raise InputError(
                f"hidden has shape {hidden.shape} and mask {mask.shape}; they must be "
                "[B, L, D] and [B, L]."
            )
        real = tf.not_equal(mask, tf.zeros_like(mask))
        if tf.executing_eagerly():
            empty = tf.where(~tf.reduce_any(real, axis=1))
            if len(empty):
                raise InputError(
                    f"row {int(empty[0, 0])} of the mask holds padding only; every "
                    "text needs at least one token (an empty one has its EOS)."
                )
        return self._pooled(hidden, real)

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        """Returns no mask: the output has no token axis."""
        return None

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, int | None]:
        """Returns [B, D] for [B, L, D]."""
        return input_shape[0], input_shape[2]


@keras.utils.register_keras_serializable("tfdpsq")
class MaskedMeanPooling(_Pooling):
    """Mean of the hidden states of real tokens; padding is ignored.

    It is computed in float32 under any global policy, unless `dtype` is given.

    Example:
      >>> hidden = tf.constant([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]]])
      >>> MaskedMeanPooling()(hidden, mask=tf.constant([[1, 1, 0]])).numpy()
      array([[2., 3.]], dtype=float32)
    """

    def _pooled(self, hidden: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
        # `where`, not a product: a NaN or Inf at padding would survive times 0.
        kept = tf.where(real[:, :, tf.newaxis], hidden, tf.zeros_like(hidden))
        count = tf.reduce_sum(tf.cast(real, hidden.dtype), axis=1, keepdims=True)
        return tf.reduce_sum(kept, axis=1) / tf.maximum(count, 1)


@keras.utils.register_keras_serializable("tfdpsq")
class FirstTokenPooling(_Pooling):
    """Hidden state of the first token.

    Example:
      >>> hidden = tf.constant([[[1.0, 2.0], [3.0, 4.0]]])
      >>> FirstTokenPooling()(hidden, mask=tf.constant([[1, 1]])).numpy()
      array([[1., 2.]], dtype=float32)
    """

    def _pooled(self, hidden: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
        there = tf.reduce_any(real, axis=1, keepdims=True)
        return tf.where(there, hidden[:, 0], tf.zeros_like(hidden[:, 0]))

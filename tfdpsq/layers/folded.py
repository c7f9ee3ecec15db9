"""Runs a layer on several texts of one example at a time."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpsq.keras_choice import keras
from tfdpsq.validation import InputError


@keras.utils.register_keras_serializable("tfdpsq")
class Folded(keras.layers.Wrapper):
    """Runs a layer on [B, K, ...] as on [B · K, ...].

    Like Keras's TimeDistributed, but for any layer, and always in one call. It tells an
    engine that clips by example that all K rows belong to one example.

    Example:
      >>> layer = Folded(keras.layers.Dense(3))
      >>> layer(tf.zeros([2, 5, 4])).shape
      TensorShape([2, 5, 3])

    Attributes:
      layer: maps [B · K, ...], or a structure of such, to one tensor [B · K, ...].
    """

    def build(self, input_shape: Any = None) -> None:
        """Leaves the inner layer to be built by its first call."""
        self.built = True

    def call(self, inputs: Any, **kwargs: Any) -> tf.Tensor:
        """Maps a structure of [B, K, ...], with one static K, to [B, K, ...]."""
        parts = tf.nest.flatten(inputs)
        counts = {part.shape[1] if part.shape.rank > 1 else None for part in parts}
        if len(counts) != 1 or None in counts:
            raise InputError(
                f"inputs have shapes {[tuple(part.shape) for part in parts]}; they "
                "must be [B, K, ...] with one and the same static K."
            )
        output = self.layer(tf.nest.map_structure(_fold, inputs), **kwargs)
        return tf.reshape(output, [-1, *counts, *output.shape[1:]])


def _fold(values: tf.Tensor) -> tf.Tensor:
    rows, count, *rest = values.shape.as_list()
    first = -1 if rows is None else rows * count
    return tf.reshape(values, [first, *(-1 if size is None else size for size in rest)])

"""Runs a layer on several texts of one example at a time."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpsq.keras_choice import keras
from tfdpsq.validation import InputError


@keras.utils.register_keras_serializable("tfdpsq")
class Folded(keras.layers.Layer):
    """Runs a layer on [B, K, ...] as on [B · K, ...], example by example.

    Like Keras's TimeDistributed, but for any layer, including a model with several
    inputs, and always in one call. It tells an engine that clips by example that all
    K rows belong to one example (`privacy.fast`).

    Example:
      >>> layer = Folded(keras.layers.Dense(3))
      >>> layer(tf.zeros([2, 5, 4])).shape
      TensorShape([2, 5, 3])

    Attributes:
      layer: the wrapped layer.
    """

    def __init__(self, layer: keras.layers.Layer, **kwargs: Any) -> None:
        """Wraps a layer.

        Args:
          layer: maps [B · K, ...], or a structure of such, to one tensor [B · K, ...].
          **kwargs: those of `keras.layers.Layer`.
        """
        super().__init__(**kwargs)
        self.layer = layer

    def call(self, inputs: Any, **kwargs: Any) -> tf.Tensor:
        """Folds, runs the layer, unfolds.

        Args:
          inputs: a structure of tensors [B, K, ...], K static and equal in all.
          **kwargs: passed on, such as `training`.

        Returns:
          [B, K, ...].

        Raises:
          InputError: K is not static, or not the same in all.
        """
        parts = tf.nest.flatten(inputs)
        positions = {part.shape[1] if part.shape.rank > 1 else None for part in parts}
        if len(positions) != 1 or None in positions:
            raise InputError(
                f"inputs have shapes {[tuple(part.shape) for part in parts]}; they "
                "must be [B, K, ...] with one and the same static K."
            )
        (count,) = positions
        output = self.layer(tf.nest.map_structure(_fold, inputs), **kwargs)
        return tf.reshape(output, [-1, count, *output.shape[1:]])

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        inner = keras.layers.serialize(self.layer)
        return {**super().get_config(), "layer": inner}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Folded:
        """Makes the layer that `get_config` described."""
        inner = keras.layers.deserialize(config["layer"])
        return cls(inner, **{k: v for k, v in config.items() if k != "layer"})


def _fold(values: tf.Tensor) -> tf.Tensor:
    rows, count, *rest = values.shape.as_list()
    first = -1 if rows is None else rows * count
    return tf.reshape(values, [first, *(-1 if size is None else size for size in rest)])

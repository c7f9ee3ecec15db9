"""A stable order of a model's weights."""

from __future__ import annotations

import tensorflow as tf


def ordered_weights(layer: tf.keras.layers.Layer) -> list[tf.Variable]:
    """Lists all weights layer by layer, by name in each, also if some are frozen.

    Keras's own `weights` lists the frozen ones last.
    """
    found: dict[int, tf.Variable] = {}
    for part in layer._flatten_layers():
        own = part._trainable_weights + part._non_trainable_weights
        for weight in sorted(own, key=lambda weight: weight.name.split("/")[-1]):
            found.setdefault(id(weight), weight)
    return list(found.values())

"""Rules for normalisations: within an example run, across examples refused.

The layer's own code makes the unit: what it returns without scale and offset,
fused where it can be. Scale and offset follow here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast.factored import sum_to
from tfdpsq.privacy.fast.keras_rules import require_tensor
from tfdpsq.privacy.fast.recorder import Recorder, replaced


def layer_normalization(
    record: Recorder, layer: keras.layers.Layer, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs `LayerNormalization`."""
    require_tensor(layer, inputs)
    axes = list(layer.axis)
    if 0 in axes or axes != sorted(axes):
        raise validation.InputError(
            f"layer {layer.name!r} normalises over axes {axes}; its rule needs "
            "ascending axes without the first, which is that of the examples."
        )
    with replaced(layer, gamma=None, beta=None):
        unit = type(layer).call(layer, inputs)
    shape = [
        size if axis in axes else 1 for axis, size in enumerate(inputs.shape) if axis
    ]
    return _scaled(record, layer, unit, shape)


def group_normalization(
    record: Recorder, layer: keras.layers.Layer, inputs: tf.Tensor, **options: Any
) -> tf.Tensor:
    """Runs `GroupNormalization`: within groups of channels of each example."""
    require_tensor(layer, inputs)
    axis = layer.axis % inputs.shape.rank
    if axis == 0:
        raise validation.InputError(
            f"layer {layer.name!r} takes the first axis for channels; it is that of "
            "the examples. Choose another axis."
        )
    with replaced(layer, scale=False, center=False):
        unit = type(layer).call(layer, inputs, **options)
    shape = [1] * (inputs.shape.rank - 1)
    shape[axis - 1] = inputs.shape[axis]
    return _scaled(record, layer, unit, shape)


def batch_normalization(
    record: Recorder,
    layer: keras.layers.Layer,
    inputs: tf.Tensor,
    training: Any = None,
    **_: Any,
) -> tf.Tensor:
    """Runs `BatchNormalization` as in inference, and refuses it in training.

    Raises:
      InputError: it normalises over the batch.
    """
    training = layer._get_training_value(training)
    if tf.is_tensor(training) or training:
        raise validation.InputError(
            f"layer {layer.name!r} normalises over the batch, so every example's "
            "loss depends on all others and no gradient is one example's own. Use "
            "LayerNormalization, or freeze it (trainable = False)."
        )
    return type(layer).call(layer, inputs, training=False)


def _scaled(
    record: Recorder,
    layer: keras.layers.Layer,
    unit: tf.Tensor,
    shape: Sequence[int],
) -> tf.Tensor:
    """`unit` · gamma + beta, both of `shape` against the last axes of the unit."""
    output = unit

    def as_unit(weight):
        return tf.cast(tf.reshape(record.read(weight), shape), unit.dtype)

    if layer.scale:
        output *= as_unit(layer.gamma)
    if layer.center:
        output += as_unit(layer.beta)
        record.direct(layer.beta, output, lambda g: sum_to(g, shape))
    if layer.scale:
        record.direct(
            layer.gamma, output, lambda g: sum_to(g * tf.cast(unit, g.dtype), shape)
        )
    return output

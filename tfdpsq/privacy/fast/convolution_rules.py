"""Rules for convolutions: products of patches with the kernel.

The layer's own convolution makes the output; the patches, [B, ..., window ·
channels] in the kernel's order, are made with it as the left factor.
"""

from __future__ import annotations

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast import products
from tfdpsq.privacy.fast.factored import sum_to
from tfdpsq.privacy.fast.keras_rules import require_tensor
from tfdpsq.privacy.fast.recorder import Recorder


def convolution(
    record: Recorder, layer: keras.layers.Layer, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs `Conv1D` and `Conv2D`."""
    _require_plain(layer, inputs)
    if layer.padding == "causal":
        inputs = tf.pad(inputs, layer._compute_causal_padding(inputs))
    output = layer.convolution_op(inputs, record.read(layer.kernel))
    output = _with_bias(record, layer, output)
    if record.wants(layer.kernel):
        record.outer(layer.kernel, _patches(record, layer, inputs), output)
    return output if layer.activation is None else layer.activation(output)


def depthwise_convolution(
    record: Recorder, layer: keras.layers.Layer, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs `DepthwiseConv2D`, which has a small kernel for every channel.

    Of channel c and its multiple k, that kernel's gradient is the sum over
    positions of the window around each, in channel c, times the gradient there.
    """
    _require_plain(layer, inputs)
    output = tf.nn.depthwise_conv2d(
        inputs,
        record.read(layer.depthwise_kernel),
        strides=[1, *layer.strides, 1],
        padding=layer.padding.upper(),
        dilations=layer.dilation_rate,
    )
    output = _with_bias(record, layer, output)
    if record.wants(layer.depthwise_kernel):
        rows, channels = inputs.shape[0], inputs.shape[-1]
        window = layer.kernel_size[0] * layer.kernel_size[1]
        patches = _patches(record, layer, inputs)

        def per_example(gradient):
            apart = [rows, -1, channels, layer.depth_multiplier]
            return products.einsum(
                "btwc,btck->bwck",
                tf.reshape(
                    tf.cast(patches, gradient.dtype), [rows, -1, window, channels]
                ),
                tf.reshape(gradient, apart),
            )

        record.direct(layer.depthwise_kernel, output, per_example)
    return output if layer.activation is None else layer.activation(output)


def _with_bias(
    record: Recorder, layer: keras.layers.Layer, output: tf.Tensor
) -> tf.Tensor:
    if layer.use_bias:
        output = tf.nn.bias_add(output, record.read(layer.bias))
        record.direct(layer.bias, output, lambda g: sum_to(g, layer.bias.shape))
    return output


def _patches(
    record: Recorder, layer: keras.layers.Layer, inputs: tf.Tensor
) -> tf.Tensor:
    """Returns the window's input at each position, [B, ..., window · channels]."""
    line = layer.rank == 1  # an image of one row
    ones = [1, 1] if line else [1]
    with record.off_tape():
        patches = tf.image.extract_patches(
            inputs[:, tf.newaxis] if line else inputs,
            sizes=[*ones, *layer.kernel_size, 1],
            strides=[*ones, *layer.strides, 1],
            rates=[*ones, *layer.dilation_rate, 1],
            padding="SAME" if layer.padding == "same" else "VALID",
        )
        return tf.squeeze(patches, 1) if line else patches


def _require_plain(layer: keras.layers.Layer, inputs: tf.Tensor) -> None:
    require_tensor(layer, inputs)
    if layer.groups != 1 or layer.data_format != "channels_last":
        raise validation.InputError(
            f"layer {layer.name!r} has groups={layer.groups} and data_format="
            f"{layer.data_format!r}; only one group and channels_last have a rule. "
            "Register a rule of your own."
        )
    if inputs.shape.rank != layer.rank + 2:
        raise validation.InputError(
            f"layer {layer.name!r} got inputs of shape {inputs.shape}; its rule "
            f"needs one batch dimension, {layer.rank + 2} dimensions in all."
        )

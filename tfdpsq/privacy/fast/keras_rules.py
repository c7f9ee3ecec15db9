"""Rules for Keras's own layers, and for two small ones of this package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast import products
from tfdpsq.privacy.fast.factored import sum_to
from tfdpsq.privacy.fast.recorder import Recorder, replaced


def dense(record: Recorder, layer: keras.layers.Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Runs `Dense`: a product with the kernel along the last axis."""
    require_tensor(layer, inputs)
    inputs = tf.cast(inputs, layer.compute_dtype)
    kernel = record.read(layer.kernel)
    if inputs.shape.rank == 2:
        output = tf.matmul(inputs, kernel)
    else:
        output = tf.tensordot(inputs, kernel, [[inputs.shape.rank - 1], [0]])
        output.set_shape([*inputs.shape[:-1], kernel.shape[-1]])
    output = _with_bias(record, layer, output)
    record.outer(layer.kernel, inputs, output)
    return output if layer.activation is None else layer.activation(output)


def einsum_dense(
    record: Recorder, layer: keras.layers.Layer, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs `EinsumDense`, of which Keras's MultiHeadAttention is made."""
    require_tensor(layer, inputs)
    output = tf.einsum(layer.equation, inputs, record.read(layer.kernel))
    if layer.bias is not None:
        output += record.read(layer.bias)
        record.direct(layer.bias, output, lambda g: sum_to(g, layer.bias.shape))
    source, weight, target = _subscripts(layer.equation, inputs.shape.rank)
    if source[0] != target[0] or source[0] in weight:
        raise validation.InputError(
            f"layer {layer.name!r} has the equation {layer.equation!r}, in which the "
            "first dimension is not that of the examples throughout. Register a "
            "rule of your own for it."
        )
    into = "".join(letter for letter in weight if letter not in target)
    out = "".join(letter for letter in weight if letter not in source)
    along = "".join(letter for letter in target if letter not in out)
    if (into + out, along + into, along + out) == (weight, source, target):
        # A product [.., m] · [m, n], which nearly every equation amounts to.
        record.outer(
            layer.kernel, inputs, output, input_axes=len(into), output_axes=len(out)
        )
    else:
        equation = f"{source},{target}->{target[0]}{weight}"
        record.direct(
            layer.kernel,
            output,
            lambda g: products.einsum(equation, tf.cast(inputs, g.dtype), g),
        )
    return output if layer.activation is None else layer.activation(output)


def _subscripts(equation: str, rank: int) -> tuple[str, str, str]:
    """The letters of input, weight and output, an ellipsis spelled out."""
    source, weight, target = re.split(",|->", equation.replace(" ", ""))
    unused = (chr(code) for code in range(ord("A"), ord("z")) if chr(code).isalpha())
    free = [letter for letter in unused if letter not in equation]
    elided = "".join(free[: rank - len(source.replace("...", ""))])
    return source.replace("...", elided), weight, target.replace("...", elided)


def embedding(
    record: Recorder, layer: keras.layers.Layer, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs `Embedding`: ids [B, ...] to vectors [B, ..., n]."""
    if layer.sparse or not isinstance(inputs, tf.Tensor):
        raise validation.InputError(
            f"layer {layer.name!r} works on sparse or ragged ids. Pad them to a "
            "dense tensor, or choose another engine."
        )
    if inputs.dtype not in (tf.int32, tf.int64):
        inputs = tf.cast(inputs, tf.int32)
    output = tf.cast(
        tf.nn.embedding_lookup(record.read(layer.embeddings), inputs),
        layer.compute_dtype,
    )
    record.lookup(layer.embeddings, inputs, output)
    return output


def prelu(record: Recorder, layer: keras.layers.Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Runs `PReLU`: max(x, 0) - alpha · max(-x, 0), alpha shared along some axes."""
    require_tensor(layer, inputs)
    below = tf.nn.relu(-inputs)
    output = tf.nn.relu(inputs) - record.read(layer.alpha) * below

    def per_example(gradient: Any) -> Any:
        return sum_to(-gradient * tf.cast(below, gradient.dtype), layer.alpha.shape)

    record.direct(layer.alpha, output, per_example)
    return output


# -- Convolutions: products of patches with the kernel ---------------------------
#
# The layer's own convolution makes the output; the patches, [B, ..., window ·
# channels] in the kernel's order, are made with it as the left factor.


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

        def per_example(gradient: Any) -> Any:
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


# -- Normalisations: within an example run, across examples refused --------------
#
# The layer's own code makes the unit: what it returns without scale and offset,
# fused where it can be. Scale and offset follow here.


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

    def as_unit(weight: Any) -> Any:
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


# -- Layers around others, and a scale -------------------------------------------


def time_distributed(
    record: Recorder, layer: keras.layers.Layer, inputs: Any, **options: Any
) -> Any:
    """Runs `TimeDistributed`, which folds time into the examples' dimension.

    Keras does so where it knows the layer inside to be one of its own. Others it
    calls in a loop over time, which the rules of the layers inside run in, or
    refuse.
    """
    call = type(layer).call
    if not layer._always_use_reshape:
        return call(layer, inputs, **options)
    for part in tf.nest.flatten(inputs):
        require_tensor(layer, part)
    steps = tf.nest.flatten(inputs)[0].shape[1]
    if steps is None:
        raise validation.InputError(
            f"layer {layer.name!r} got inputs without a static number of time "
            "steps, so its rows cannot be split by example. Pad them to a "
            "fixed length."
        )
    with record.folding(steps):
        return call(layer, inputs, **options)


def folded(
    record: Recorder, layer: keras.layers.Layer, inputs: Any, **options: Any
) -> Any:
    """Runs tfdpsq's `Folded`: [B, K, ...] through a layer as [B · K, ...]."""
    with record.folding(tf.nest.flatten(inputs)[0].shape[1]):
        return type(layer).call(layer, inputs, **options)


def scale(record: Recorder, layer: keras.layers.Layer, scores: tf.Tensor) -> tf.Tensor:
    """Runs tfdpsq's `Scale`: exp(w) · scores, whose gradient by w is itself · g."""
    output = tf.exp(record.read(layer.log_scale)) * scores

    def per_example(gradient: Any) -> Any:
        return sum_to(gradient * tf.cast(output, gradient.dtype), [])

    record.direct(layer.log_scale, output, per_example)
    return output


def require_tensor(layer: keras.layers.Layer, inputs: Any) -> None:
    """Checks that a layer got a dense tensor.

    Raises:
      InputError: it got something else, such as a ragged or sparse one.
    """
    if not isinstance(inputs, tf.Tensor):
        raise validation.InputError(
            f"layer {layer.name!r} got a {type(inputs).__name__}; its rule needs a "
            "dense tensor. Pad ragged rows and make sparse ones dense."
        )


def _with_bias(
    record: Recorder, layer: keras.layers.Layer, output: tf.Tensor
) -> tf.Tensor:
    if layer.use_bias:
        output = tf.nn.bias_add(output, record.read(layer.bias))
        record.direct(layer.bias, output, lambda g: sum_to(g, layer.bias.shape))
    return output

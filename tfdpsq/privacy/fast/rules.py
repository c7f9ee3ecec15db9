"""Which layers the engine can run, and how: one rule per layer class.

A rule computes the output of its layer's `call` and tells the recorder, for every
trainable weight, how each example's gradient follows from the gradient by that
output. `register_rule` adds rules for other layers:

    def scale(record, layer, inputs):
        output = inputs * record.read(layer.factor)           # [B, ..., n]
        record.direct(
            layer.factor, output, lambda g: sum_to(g * inputs, layer.factor.shape)
        )
        return output

    register_rule(Scale, scale)

Rules hold for exactly the class they are registered for: a subclass may compute
anything. Layers made of other layers (Keras's MultiHeadAttention, any model) need
none: the layers inside are run by their own rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy.fast import keras_nlp_rules
from tfdpsq.privacy.fast.factored import sum_to
from tfdpsq.privacy.fast.recorder import Recorder, replaced

# (recorder, layer, *what call gets) to what call returns.
Rule = Callable[..., Any]


def register_rule(layer_class: type[tf.keras.layers.Layer], rule: Rule) -> None:
    """Makes the engine run layers of exactly this class by `rule`.

    Args:
      layer_class: a Keras layer class; a rule it already has is replaced.
      rule: called as rule(recorder, layer, *args, **kwargs) with the arguments of
        the layer's `call`, in its place; returns what `call` would. See `Recorder`
        for what it must record; `check` tells whether it is right.

    Raises:
      InputError: not a layer class, or a rule that cannot be called.
    """
    if not (
        isinstance(layer_class, type) and issubclass(layer_class, tf.keras.layers.Layer)
    ):
        raise validation.InputError(
            f"layer_class is {layer_class!r}; give a class of Keras layers."
        )
    if not callable(rule):
        raise validation.InputError(
            f"rule is {rule!r}; give a function of (recorder, layer, *call's own)."
        )
    _RULES[layer_class] = rule


def rule_for(layer: tf.keras.layers.Layer) -> Rule | None:
    """The rule for a layer's exact class, or `None`."""
    kind = type(layer)
    rule = _RULES.get(kind) or _NAMED.get(f"{kind.__module__}.{kind.__qualname__}")
    if rule is None and isinstance(layer, _BATCH_NORMALIZATION):
        return _batch_normalization
    return rule


def _dense(record: Recorder, layer, inputs):
    _require_tensor(layer, inputs)
    inputs = tf.cast(inputs, layer.compute_dtype)
    kernel = record.read(layer.kernel)
    if inputs.shape.rank == 2:
        output = tf.matmul(inputs, kernel)
    else:
        output = tf.tensordot(inputs, kernel, [[inputs.shape.rank - 1], [0]])
        output.set_shape([*inputs.shape[:-1], kernel.shape[-1]])
    if layer.use_bias:
        output = tf.nn.bias_add(output, record.read(layer.bias))
        record.direct(layer.bias, output, lambda g: sum_to(g, layer.bias.shape))
    record.outer(layer.kernel, inputs, output)
    return output if layer.activation is None else layer.activation(output)


def _einsum_dense(record: Recorder, layer, inputs):
    _require_tensor(layer, inputs)
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
            layer.kernel,
            inputs,
            output,
            input_axes=len(into),
            output_axes=len(out),
        )
    else:
        equation = f"{source},{target}->{target[0]}{weight}"
        record.direct(
            layer.kernel,
            output,
            lambda g: tf.einsum(equation, tf.cast(inputs, g.dtype), g),
        )
    return output if layer.activation is None else layer.activation(output)


def _subscripts(equation: str, rank: int) -> tuple[str, str, str]:
    """The letters of input, weight and output, an ellipsis spelled out."""
    source, weight, target = re.split(",|->", equation.replace(" ", ""))
    unused = (chr(code) for code in range(ord("A"), ord("z")) if chr(code).isalpha())
    free = [letter for letter in unused if letter not in equation]
    elided = "".join(free[: rank - len(source.replace("...", ""))])
    return source.replace("...", elided), weight, target.replace("...", elided)


def _convolution(record: Recorder, layer, inputs):
    """Runs Conv1D and Conv2D: a product of patches with the kernel.

    The layer's own convolution makes the output; the patches, [B, ..., window ·
    channels] in the kernel's order, are made beside it as the left factor.
    """
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
    if layer.padding == "causal":
        inputs = tf.pad(inputs, layer._compute_causal_padding(inputs))
    output = layer.convolution_op(inputs, record.read(layer.kernel))
    if layer.use_bias:
        output = tf.nn.bias_add(output, record.read(layer.bias))
        record.direct(layer.bias, output, lambda g: sum_to(g, layer.bias.shape))
    if record.wants(layer.kernel):
        # A line is an image of one row.
        line = layer.rank == 1
        ones = [1, 1] if line else [1]
        with record.off_tape():
            patches = tf.image.extract_patches(
                inputs[:, tf.newaxis] if line else inputs,
                sizes=[*ones, *layer.kernel_size, 1],
                strides=[*ones, *layer.strides, 1],
                rates=[*ones, *layer.dilation_rate, 1],
                padding="SAME" if layer.padding == "same" else "VALID",
            )
            patches = tf.squeeze(patches, 1) if line else patches
        record.outer(layer.kernel, patches, output)
    return output if layer.activation is None else layer.activation(output)


def _layer_normalization(record: Recorder, layer, inputs):
    _require_tensor(layer, inputs)
    axes = list(layer.axis)
    if 0 in axes or axes != sorted(axes):
        raise validation.InputError(
            f"layer {layer.name!r} normalises over axes {axes}; its rule needs "
            "ascending axes without the first, which is that of the examples."
        )
    # The layer's own code without scale and offset, fused where it can be.
    with replaced(layer, gamma=None, beta=None):
        unit = type(layer).call(layer, inputs)
    shape = [
        size if axis in axes else 1 for axis, size in enumerate(inputs.shape) if axis
    ]
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


def _batch_normalization(record: Recorder, layer, inputs, training=None):
    training = layer._get_training_value(training)
    if tf.is_tensor(training) or training:
        raise validation.InputError(
            f"layer {layer.name!r} normalises over the batch, so every example's "
            "loss depends on all others and no gradient is one example's own. Use "
            "LayerNormalization, or freeze it (trainable = False)."
        )
    return type(layer).call(layer, inputs, training=False)


def _require_tensor(layer, inputs) -> None:
    if not isinstance(inputs, tf.Tensor):
        raise validation.InputError(
            f"layer {layer.name!r} got a {type(inputs).__name__}; its rule needs a "
            "dense tensor. Pad ragged rows and make sparse ones dense."
        )


# The class that all of Keras's batch normalisations share.
_BATCH_NORMALIZATION = tf.keras.layers.BatchNormalization.__mro__[1]

_RULES: dict[type, Rule] = {
    tf.keras.layers.Conv1D: _convolution,
    tf.keras.layers.Conv2D: _convolution,
    tf.keras.layers.Dense: _dense,
    tf.keras.layers.EinsumDense: _einsum_dense,
    tf.keras.layers.Embedding: keras_nlp_rules.embedding,
    tf.keras.layers.LayerNormalization: _layer_normalization,
}

_NLP = "keras_nlp.src"
_NAMED: dict[str, Rule] = {
    f"{_NLP}.layers.modeling.reversible_embedding.ReversibleEmbedding": (
        keras_nlp_rules.reversible_embedding
    ),
    f"{_NLP}.models.t5.t5_layer_norm.T5LayerNorm": keras_nlp_rules.t5_layer_norm,
    f"{_NLP}.models.t5.t5_multi_head_attention.T5MultiHeadAttention": (
        keras_nlp_rules.t5_attention
    ),
}

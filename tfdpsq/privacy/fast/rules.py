"""Layers that the engine can run, one rule per class.

A rule computes the output of its layer's `call` and tells the recorder, for every
trainable weight, how each example's gradient follows from the gradient by the output.
`register_rule` adds rules for other layers:

    def scale(record, layer, inputs):
        output = inputs * record.read(layer.factor)           # [B, ..., n]
        record.direct(
            layer.factor, output, lambda g: sum_to(g * inputs, layer.factor.shape)
        )
        return output

    register_rule(Scale, scale)

A rule holds for exactly its class: a subclass may compute anything. It runs where the
layer has a weight whose gradient is wanted. Layers made of other layers need none.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast.factored import sum_to
from tfdpsq.privacy.fast.recorder import Recorder, UncoveredError, replaced

Layer = Any  # of the Keras class that the rule is for
Rule = Callable[..., Any]  # (recorder, layer, *what call gets) to what call returns


def register_rule(layer_class: type[keras.layers.Layer], rule: Rule) -> None:
    """Makes the engine run layers of exactly this class by `rule`, in place of `call`.

    It gets the recorder, the layer and the arguments of `call`. See `Recorder` for what
    it must record; `check` tells whether it is right.
    """
    _RULES[layer_class] = rule


def rule_for(layer: keras.layers.Layer) -> Rule | None:
    """Returns the rule for a layer's exact class, or `None`."""
    kind = type(layer)
    rule = _RULES.get(kind) or _NAMED.get(f"{kind.__module__}.{kind.__qualname__}")
    return batch_normalization if rule is None and couples_examples(layer) else rule


def couples_examples(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer may make examples depend on each other."""
    shared_by_all = keras.layers.BatchNormalization.__mro__[1]
    return isinstance(layer, shared_by_all)


def dense(record: Recorder, layer: Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Runs `Dense`: a product with the kernel along the last axis."""
    inputs = tf.cast(inputs, layer.compute_dtype)
    kernel = record.read(layer.kernel)
    output = tf.tensordot(inputs, kernel, 1)
    output.set_shape([*inputs.shape[:-1], kernel.shape[-1]])
    output = _with_bias(record, layer, output)
    record.outer(layer.kernel, inputs, output)
    return layer.activation(output) if layer.activation else output


def einsum_dense(record: Recorder, layer: Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Runs `EinsumDense`, of which Keras's MultiHeadAttention is made."""
    output = tf.einsum(layer.equation, inputs, record.read(layer.kernel))
    if layer.bias is not None:
        output += record.read(layer.bias)
        record.direct(layer.bias, output, lambda g: sum_to(g, layer.bias.shape))
    source, weight, target = _subscripts(layer.equation, inputs.shape.rank)
    if source[0] != target[0] or source[0] in weight:
        raise _uncovered(layer, f"equation {layer.equation!r}")
    into = "".join(letter for letter in weight if letter not in target)
    out = "".join(letter for letter in weight if letter not in source)
    along = "".join(letter for letter in target if letter not in out)
    if (into + out, along + into, along + out) == (weight, source, target):
        # A product [.., m] · [m, n], which nearly every equation amounts to.
        width = math.prod(layer.kernel.shape[: len(into)])
        record.outer(layer.kernel, inputs, output, width)
    else:
        equation = f"{source},{target}->{target[0]}{weight}"

        def per_example(gradient: Any) -> Any:
            return tf.einsum(equation, tf.cast(inputs, gradient.dtype), gradient)

        record.direct(layer.kernel, output, per_example)
    return output if layer.activation is None else layer.activation(output)


def _subscripts(equation: str, rank: int) -> tuple[str, str, str]:
    """The letters of input, weight and output, an ellipsis spelled out."""
    source, weight, target = re.split(",|->", equation.replace(" ", ""))
    free = [letter for letter in string.ascii_letters if letter not in equation]
    elided = "".join(free[: rank - len(source.replace("...", ""))])
    return source.replace("...", elided), weight, target.replace("...", elided)


def embedding(record: Recorder, layer: Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Runs `Embedding`: ids [B, ...] to vectors [B, ..., n]."""
    ids = tf.cast(inputs, tf.int64)
    output = tf.cast(record.read(layer.embeddings, ids), layer.compute_dtype)
    record.lookup(layer.embeddings, ids, output)
    return output


def prelu(record: Recorder, layer: Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Runs `PReLU`: max(x, 0) - alpha · max(-x, 0), alpha shared along some axes."""
    return tf.nn.relu(inputs) - _times(record, layer.alpha, tf.nn.relu(-inputs))


def convolution(record: Recorder, layer: Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Runs `Conv1D` and `Conv2D`: products of patches with the kernel."""
    _require_plain(layer, inputs)
    if layer.padding == "causal":
        inputs = tf.pad(inputs, layer._compute_causal_padding(inputs))
    output = layer.convolution_op(inputs, record.read(layer.kernel))
    output = _with_bias(record, layer, output)
    if record.wants(layer.kernel):
        record.outer(layer.kernel, _patches(layer, inputs), output)
    return output if layer.activation is None else layer.activation(output)


def depthwise(record: Recorder, layer: Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Runs `DepthwiseConv2D`, which has a small kernel for every channel."""
    _require_plain(layer, inputs)
    kernel = layer.depthwise_kernel
    output = tf.nn.depthwise_conv2d(
        inputs,
        record.read(kernel),
        strides=[1, *layer.strides, 1],
        padding=layer.padding.upper(),
        dilations=layer.dilation_rate,
    )
    output = _with_bias(record, layer, output)
    if record.wants(kernel):
        patches = _patches(layer, inputs)

        def per_example(gradient: Any) -> Any:
            rows, channels = gradient.shape[0], inputs.shape[-1]
            sizes = [rows, -1, math.prod(layer.kernel_size), channels]
            window = tf.cast(tf.reshape(patches, sizes), gradient.dtype)
            apart = tf.reshape(gradient, [rows, -1, channels, layer.depth_multiplier])
            return tf.einsum("btwc,btck->bwck", window, apart)

        record.direct(kernel, output, per_example)
    return output if layer.activation is None else layer.activation(output)


def _patches(layer: Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Returns the window's input at each position, [B, ..., window · channels]."""
    ones = [1] * (3 - layer.rank)  # a line is an image of one row
    patches = tf.image.extract_patches(
        inputs[:, tf.newaxis] if layer.rank == 1 else inputs,
        sizes=[*ones, *layer.kernel_size, 1],
        strides=[*ones, *layer.strides, 1],
        rates=[*ones, *layer.dilation_rate, 1],
        padding="SAME" if layer.padding == "same" else "VALID",
    )
    return tf.squeeze(patches, 1) if layer.rank == 1 else patches


def _require_plain(layer: Layer, inputs: tf.Tensor) -> None:
    if layer.groups != 1 or layer.data_format != "channels_last":
        raise _uncovered(layer, f"groups={layer.groups} or {layer.data_format}")
    if inputs.shape.rank != layer.rank + 2:
        raise _uncovered(layer, "more than one batch dimension")


def layer_normalization(record: Recorder, layer: Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Runs `LayerNormalization`; scale and offset follow its own code."""
    axes = list(layer.axis)
    if 0 in axes or axes != sorted(axes):
        raise _uncovered(layer, f"axis={axes}, the examples' or not in ascending order")
    with replaced(layer, gamma=None, beta=None):
        unit = type(layer).call(layer, inputs)
    sizes = list(enumerate(inputs.shape))[1:]
    shape = [size if axis in axes else 1 for axis, size in sizes]
    return _scaled(record, layer, unit, shape)


def group_normalization(record: Recorder, layer: Layer, inputs: Any, **kw: Any) -> Any:
    """Runs `GroupNormalization`; scale and offset follow its own code."""
    axis = layer.axis % inputs.shape.rank
    if axis == 0:
        raise _uncovered(layer, "axis=0, the examples'")
    with replaced(layer, scale=False, center=False):
        unit = type(layer).call(layer, inputs, **kw)
    shape = [1] * (inputs.shape.rank - 1)
    shape[axis - 1] = inputs.shape[axis]
    return _scaled(record, layer, unit, shape)


def batch_normalization(
    record: Recorder, layer: Layer, inputs: tf.Tensor, training: Any = None, **_: Any
) -> tf.Tensor:
    """Runs `BatchNormalization` as in inference, and refuses it in training."""
    training = layer._get_training_value(training)
    if tf.is_tensor(training) or training:
        raise validation.InputError(
            f"layer {layer.name!r} normalises over the batch. Freeze it "
            "(trainable = False), or use LayerNormalization."
        )
    return type(layer).call(layer, inputs, training=False)


def t5_layer_norm(record: Recorder, layer: Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Runs keras-nlp's `T5LayerNorm`: x / rms(x) · weight."""
    variance = tf.reduce_mean(tf.square(inputs), axis=-1, keepdims=True)
    unit = inputs * tf.math.rsqrt(variance + layer.epsilon)
    return _times(record, layer.weight, unit)


def _scaled(record: Recorder, layer: Layer, unit: Any, shape: Sequence[int]) -> Any:
    """`unit` · gamma + beta, both of `shape` against the last axes of the unit."""
    output = _times(record, layer.gamma, unit, shape) if layer.scale else unit
    if layer.center:
        output += tf.cast(tf.reshape(record.read(layer.beta), shape), unit.dtype)
        record.direct(layer.beta, output, lambda g: sum_to(g, shape))
    return output


def time_distributed(record: Recorder, layer: Layer, inputs: Any, **rest: Any) -> Any:
    """Runs `TimeDistributed`, which folds time into the examples' dimension."""
    if not layer._always_use_reshape:  # a loop over time, where the rules inside run
        return type(layer).call(layer, inputs, **rest)
    if tf.nest.flatten(inputs)[0].shape[1] is None:
        raise _uncovered(layer, "inputs without a static number of time steps")
    return folded(record, layer, inputs, **rest)


def folded(record: Recorder, layer: Layer, inputs: Any, **options: Any) -> Any:
    """Runs tfdpsq's `Folded`: [B, K, ...] through a layer as [B · K, ...]."""
    positions = tf.nest.flatten(inputs)[0].shape[1]
    with replaced(record, folded=record.folded * positions):
        return type(layer).call(layer, inputs, **options)


def scale(record: Recorder, layer: Layer, scores: tf.Tensor) -> tf.Tensor:
    """Runs tfdpsq's `Scale`: exp(w) · scores, whose gradient by w is itself · g."""
    output = tf.exp(record.read(layer.log_scale)) * scores

    def per_example(gradient: Any) -> Any:
        return sum_to(gradient * tf.cast(output, gradient.dtype), [])

    record.direct(layer.log_scale, output, per_example)
    return output


def reversible_embedding(
    record: Recorder, layer: Layer, inputs: tf.Tensor, reverse: bool = False
) -> tf.Tensor:
    """Runs keras-nlp's `ReversibleEmbedding`: ids to vectors, or vectors to logits.

    Tied, logits = hidden · Eᵀ, and E's gradient is dlogitsᵀ · hidden.
    """
    if not reverse:
        return embedding(record, layer, inputs)
    weight = layer.embeddings if layer.tie_weights else layer.reverse_embeddings
    kernel = record.read(weight)
    # Under mixed precision, too, keras-nlp multiplies in the weights' own dtype.
    dtype = layer.reverse_dtype or layer.variable_dtype
    inputs, kernel = tf.cast(inputs, dtype), tf.cast(kernel, dtype)
    flat = tf.reshape(inputs, [-1, inputs.shape[-1]])  # faster than a batched product
    flat = tf.matmul(flat, kernel, transpose_b=layer.tie_weights)
    shape = tf.concat([tf.shape(inputs)[:-1], flat.shape[-1:]], axis=0)
    output = tf.reshape(flat, shape)
    record.outer(weight, inputs, output, transposed=layer.tie_weights)
    return output


def position_embedding(
    record: Recorder, layer: Layer, inputs: tf.Tensor, start_index: tf.Tensor | int = 0
) -> tf.Tensor:
    """Runs keras-nlp's `PositionEmbedding`, which looks up each row's positions."""
    ids = start_index + tf.range(tf.shape(inputs)[-2])
    ids = tf.broadcast_to(ids, tf.shape(inputs)[:-1])
    output = tf.gather(record.read(layer.position_embeddings), ids)
    output.set_shape(inputs.shape)
    record.lookup(layer.position_embeddings, ids, output)
    return output


def t5_attention(
    record: Recorder, layer: Layer, hidden_states: tf.Tensor, *args: Any, **kwargs: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Runs keras-nlp's `T5MultiHeadAttention`, whose projections have rules.

    What is left is the relative position bias, a table [buckets, heads] from which
    the layer makes one [1, heads, q, k] bias for all examples. Here each example gets
    a copy of its own, so that its gradient stays apart.
    """
    call = type(layer).call
    table = getattr(layer, "relative_attention_bias", None)
    if table is None or not record.wants(table):
        return call(layer, hidden_states, *args, **kwargs)
    buckets = table.shape[0]

    def compute_bias(*lengths: Any) -> Any:
        # The layer's own code picks from a table of numbers: the bucket of each (q, k).
        numbers = tf.range(buckets)[:, tf.newaxis]
        with replaced(layer, relative_attention_bias=numbers):
            ids = type(layer).compute_bias(layer, *lengths)[0, 0]
        values = tf.transpose(tf.gather(record.read(table), ids), [2, 0, 1])
        rows = hidden_states.shape[0] or tf.shape(hidden_states)[0]
        output = tf.tile(values[tf.newaxis], [rows, 1, 1, 1])

        def per_example(gradient: Any) -> Any:
            which = tf.one_hot(ids, buckets, dtype=gradient.dtype)
            return tf.einsum("bhqk,qkn->bnh", gradient, which)

        record.direct(table, output, per_example)
        return output

    with replaced(layer, compute_bias=compute_bias):
        return call(layer, hidden_states, *args, **kwargs)


def _with_bias(record: Recorder, layer: Layer, output: tf.Tensor) -> tf.Tensor:
    if layer.use_bias:
        output = tf.nn.bias_add(output, record.read(layer.bias))
        record.direct(layer.bias, output, lambda g: sum_to(g, layer.bias.shape))
    return output


def _times(record: Recorder, weight: Any, other: Any, shape: Any = None) -> Any:
    """Runs the elementwise product of a weight, of this shape if given, and `other`."""
    shape = weight.shape.as_list() if shape is None else shape
    output = tf.cast(tf.reshape(record.read(weight), shape), other.dtype) * other
    record.direct(weight, output, lambda g: sum_to(g * tf.cast(other, g.dtype), shape))
    return output


def _uncovered(layer: Layer, what: str) -> UncoveredError:
    return UncoveredError(
        f"layer {layer.name!r} has {what}, which no rule covers. Change it, register "
        "a rule, or choose another engine."
    )


_RULES: dict[type, Rule] = {
    keras.layers.Conv1D: convolution,
    keras.layers.Conv2D: convolution,
    keras.layers.Dense: dense,
    keras.layers.DepthwiseConv2D: depthwise,
    keras.layers.EinsumDense: einsum_dense,
    keras.layers.Embedding: embedding,
    keras.layers.GroupNormalization: group_normalization,
    keras.layers.LayerNormalization: layer_normalization,
    keras.layers.PReLU: prelu,
    keras.layers.TimeDistributed: time_distributed,
}
_NLP = "keras_nlp.src.layers.modeling"
_T5 = "keras_nlp.src.models.t5"
_NAMED: dict[str, Rule] = {
    f"{_NLP}.position_embedding.PositionEmbedding": position_embedding,
    f"{_NLP}.reversible_embedding.ReversibleEmbedding": reversible_embedding,
    f"{_T5}.t5_layer_norm.T5LayerNorm": t5_layer_norm,
    f"{_T5}.t5_multi_head_attention.T5MultiHeadAttention": t5_attention,
    "tfdpsq.layers.folded.Folded": folded,
    "tfdpsq.layers.scale.Scale": scale,
    "tfdpsq.layers.t5.T5MultiHeadAttention": t5_attention,
    "tfdpsq.layers.t5.TokenEmbedding": reversible_embedding,
}

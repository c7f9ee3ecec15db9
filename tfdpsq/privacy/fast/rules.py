"""Layers that the engine can run, one rule per class.

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
anything. They run where a layer has a weight whose gradient is wanted. Layers made of
other layers (Keras's MultiHeadAttention, any model) need none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast import factored
from tfdpsq.privacy.fast.factored import sum_to
from tfdpsq.privacy.fast.recorder import Recorder, UncoveredError, replaced

Layer = Any  # of the Keras class that the rule is for
# (recorder, layer, *what call gets) to what call returns.
Rule = Callable[..., Any]


def register_rule(layer_class: type[keras.layers.Layer], rule: Rule) -> None:
    """Makes the engine run layers of exactly this class by `rule`.

    Args:
      layer_class: a Keras layer class; a rule it already has is replaced.
      rule: called as rule(recorder, layer, *args, **kwargs) with the arguments of
        the layer's `call`, in its place; returns what `call` would. See `Recorder`
        for what it must record; `check` tells whether it is right.
    """
    _RULES[layer_class] = rule


def rule_for(layer: keras.layers.Layer) -> Rule | None:
    """The rule for a layer's exact class, or `None`."""
    kind = type(layer)
    rule = _RULES.get(kind) or _NAMED.get(f"{kind.__module__}.{kind.__qualname__}")
    return batch_normalization if rule is None and couples_examples(layer) else rule


def couples_examples(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer may make examples depend on each other."""
    # The class that all of Keras's batch normalisations share.
    return isinstance(layer, keras.layers.BatchNormalization.__mro__[1])


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
        record.outer(
            layer.kernel, inputs, output, input_axes=len(into), output_axes=len(out)
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


def embedding(record: Recorder, layer: Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Runs `Embedding`: ids [B, ...] to vectors [B, ..., n]."""
    if inputs.dtype not in (tf.int32, tf.int64):
        inputs = tf.cast(inputs, tf.int32)
    output = tf.cast(
        tf.nn.embedding_lookup(record.read(layer.embeddings), inputs),
        layer.compute_dtype,
    )
    record.lookup(layer.embeddings, inputs, output)
    return output


def prelu(record: Recorder, layer: Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Runs `PReLU`: max(x, 0) - alpha · max(-x, 0), alpha shared along some axes."""
    below = tf.nn.relu(-inputs)
    output = tf.nn.relu(inputs) - record.read(layer.alpha) * below
    _direct_product(record, layer.alpha, output, -below)
    return output


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


def depthwise_convolution(
    record: Recorder, layer: Layer, inputs: tf.Tensor
) -> tf.Tensor:
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
            window = tf.reshape(
                patches, [rows, -1, math.prod(layer.kernel_size), channels]
            )
            apart = tf.reshape(gradient, [rows, -1, channels, layer.depth_multiplier])
            return tf.einsum("btwc,btck->bwck", tf.cast(window, apart.dtype), apart)

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
    if layer.groups != 1:
        raise _uncovered(layer, f"groups={layer.groups}")
    if layer.data_format != "channels_last":
        raise _uncovered(layer, f"data_format={layer.data_format!r}")
    if inputs.shape.rank != layer.rank + 2:
        raise _uncovered(layer, "more than one batch dimension")


def layer_normalization(record: Recorder, layer: Layer, inputs: tf.Tensor) -> tf.Tensor:
    """Runs `LayerNormalization`; scale and offset follow its own code."""
    axes = list(layer.axis)
    if 0 in axes or axes != sorted(axes):
        raise _uncovered(layer, f"axis={axes}, the examples' or not in ascending order")
    with replaced(layer, gamma=None, beta=None):
        unit = type(layer).call(layer, inputs)
    shape = [
        size if axis in axes else 1 for axis, size in enumerate(inputs.shape) if axis
    ]
    return _scaled(record, layer, unit, shape)


def group_normalization(
    record: Recorder, layer: Layer, inputs: tf.Tensor, **options: Any
) -> tf.Tensor:
    """Runs `GroupNormalization`; scale and offset follow its own code."""
    axis = layer.axis % inputs.shape.rank
    if axis == 0:
        raise _uncovered(layer, "axis=0, the examples'")
    with replaced(layer, scale=False, center=False):
        unit = type(layer).call(layer, inputs, **options)
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
            f"layer {layer.name!r} normalises over the batch. Use LayerNormalization, "
            "or freeze the layer (trainable = False)."
        )
    return type(layer).call(layer, inputs, training=False)


def t5_layer_norm(
    record: Recorder, layer: Layer, hidden_states: tf.Tensor
) -> tf.Tensor:
    """Runs keras-nlp's `T5LayerNorm`: x / rms(x) · weight."""
    variance = tf.reduce_mean(tf.square(hidden_states), axis=-1, keepdims=True)
    unit = hidden_states * tf.math.rsqrt(variance + layer.epsilon)
    output = record.read(layer.weight) * unit
    _direct_product(record, layer.weight, output, unit)
    return output


def _scaled(
    record: Recorder, layer: Layer, unit: tf.Tensor, shape: Sequence[int]
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
        _direct_product(record, layer.gamma, output, unit, shape)
    return output


def time_distributed(
    record: Recorder, layer: Layer, inputs: Any, **options: Any
) -> Any:
    """Runs `TimeDistributed`, which folds time into the examples' dimension."""
    call = type(layer).call
    if not layer._always_use_reshape:  # a loop over time, where the rules inside run
        return call(layer, inputs, **options)
    steps = tf.nest.flatten(inputs)[0].shape[1]
    if steps is None:
        raise _uncovered(layer, "inputs without a static number of time steps")
    with replaced(record, folded=record.folded * steps):
        return call(layer, inputs, **options)


def folded(record: Recorder, layer: Layer, inputs: Any, **options: Any) -> Any:
    """Runs tfdpsq's `Folded`: [B, K, ...] through a layer as [B · K, ...]."""
    positions = tf.nest.flatten(inputs)[0].shape[1]
    with replaced(record, folded=record.folded * positions):
        return type(layer).call(layer, inputs, **options)


def scale(record: Recorder, layer: Layer, scores: tf.Tensor) -> tf.Tensor:
    """Runs tfdpsq's `Scale`: exp(w) · scores, whose gradient by w is itself · g."""
    output = tf.exp(record.read(layer.log_scale)) * scores
    _direct_product(record, layer.log_scale, output, output)
    return output


def reversible_embedding(
    record: Recorder, layer: Layer, inputs: tf.Tensor, reverse: bool = False
) -> tf.Tensor:
    """Runs keras-nlp's `ReversibleEmbedding`: ids to vectors, or vectors to logits.

    Tied, logits = hidden · Eᵀ, so that E's gradient is dlogitsᵀ · hidden: the
    gradient that comes back is the *left* factor.
    """
    if not reverse:
        return embedding(record, layer, inputs)
    weight = layer.embeddings if layer.tie_weights else layer.reverse_embeddings
    kernel = record.read(weight)
    # Under mixed precision keras-nlp still multiplies in the weights' own dtype, though
    # Keras has rounded a `reverse_embeddings` that is read.
    dtype = layer.reverse_dtype or layer.variable_dtype
    inputs, kernel = tf.cast(inputs, dtype), tf.cast(kernel, dtype)
    output = tf.matmul(inputs, kernel, transpose_b=layer.tie_weights)
    record.outer(weight, inputs, output, transposed=layer.tie_weights)
    return output


def position_embedding(
    record: Recorder, layer: Layer, inputs: tf.Tensor, start_index: tf.Tensor | int = 0
) -> tf.Tensor:
    """Runs keras-nlp's `PositionEmbedding`: one vector per position, for all rows."""
    table = layer.position_embeddings
    length = tf.shape(inputs)[-2]
    values = tf.slice(record.read(table), [start_index, 0], [length, inputs.shape[-1]])
    output = tf.broadcast_to(values, tf.shape(inputs))
    output.set_shape(inputs.shape)

    def per_example(gradient: Any) -> Any:
        sums = sum_to(gradient, gradient.shape[-2:])
        after = table.shape[0] - start_index - length
        return tf.pad(sums, [[0, 0], [start_index, after], [0, 0]])

    record.direct(table, output, per_example)
    return output


def t5_attention(
    record: Recorder, layer: Layer, hidden_states: tf.Tensor, *args: Any, **kwargs: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Runs keras-nlp's `T5MultiHeadAttention`, whose projections have rules.

    What is left is the relative position bias, a table [buckets, heads] from which
    the layer makes one [1, heads, q, k] bias for all examples. Here every example
    gets a copy of its own, so that its gradient G_i stays apart, and the table's is

        Σ_{q,k} [bucket(q, k) = b] · G_i[head, q, k].
    """
    call = type(layer).call
    table = getattr(layer, "relative_attention_bias", None)
    if table is None or not record.wants(table):
        return call(layer, hidden_states, *args, **kwargs)
    buckets, heads = table.shape

    def compute_bias(query_length: Any, key_length: Any) -> Any:
        position = tf.range(key_length)[None, :] - tf.range(query_length)[:, None]
        ids = layer._relative_position_bucket(
            position,
            bidirectional=not layer.is_decoder,
            num_buckets=layer.relative_attention_buckets,
            max_distance=layer.relative_attention_max_distance,
        )
        values = tf.transpose(tf.gather(record.read(table), ids), [2, 0, 1])
        rows = hidden_states.shape[0] or tf.shape(hidden_states)[0]
        output = tf.tile(values[tf.newaxis], [rows, 1, 1, 1])

        def per_example(gradient: Any) -> Any:
            which = tf.one_hot(tf.reshape(ids, [-1]), buckets, dtype=gradient.dtype)
            # A product, not a segment sum: it is small, and quick on every device.
            flat = tf.reshape(gradient, [gradient.shape[0] * heads, -1])
            sums = tf.reshape(factored.product(flat, which), [-1, heads, buckets])
            return tf.transpose(sums, [0, 2, 1])

        record.direct(table, output, per_example)
        return output

    with replaced(layer, compute_bias=compute_bias):
        return call(layer, hidden_states, *args, **kwargs)


def _with_bias(record: Recorder, layer: Layer, output: tf.Tensor) -> tf.Tensor:
    if layer.use_bias:
        output = tf.nn.bias_add(output, record.read(layer.bias))
        record.direct(layer.bias, output, lambda g: sum_to(g, layer.bias.shape))
    return output


def _direct_product(
    record: Recorder,
    weight: tf.Variable,
    output: tf.Tensor,
    other: tf.Tensor,
    shape: Sequence[int] | None = None,
) -> None:
    """Records output = weight · other (+ anything), elementwise."""
    shape = weight.shape.as_list() if shape is None else shape
    record.direct(weight, output, lambda g: sum_to(g * tf.cast(other, g.dtype), shape))


def _uncovered(layer: Layer, what: str) -> UncoveredError:
    return UncoveredError(
        f"layer {layer.name!r} has {what}, which no rule covers. Change it, register a "
        "rule, or choose another engine."
    )


_RULES: dict[type, Rule] = {
    keras.layers.Conv1D: convolution,
    keras.layers.Conv2D: convolution,
    keras.layers.Dense: dense,
    keras.layers.DepthwiseConv2D: depthwise_convolution,
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
    "tfdpsq.layers.t5_layers.T5MultiHeadAttention": t5_attention,
    "tfdpsq.layers.t5_layers.TokenEmbedding": reversible_embedding,
}

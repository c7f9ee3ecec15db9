"""Rules for Keras's own layers: products, lookups, slopes, and one wrapper."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast import products
from tfdpsq.privacy.fast.factored import sum_to
from tfdpsq.privacy.fast.recorder import Recorder


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
    if layer.use_bias:
        output = tf.nn.bias_add(output, record.read(layer.bias))
        record.direct(layer.bias, output, lambda g: sum_to(g, layer.bias.shape))
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

    def per_example(gradient):
        return sum_to(-gradient * tf.cast(below, gradient.dtype), layer.alpha.shape)

    record.direct(layer.alpha, output, per_example)
    return output


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

    def per_example(gradient):
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

"""Rules for keras-nlp's layers, which are named here so as not to import them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast import products
from tfdpsq.privacy.fast.factored import sum_to
from tfdpsq.privacy.fast.keras_rules import embedding, require_tensor
from tfdpsq.privacy.fast.recorder import Recorder, replaced


def reversible_embedding(
    record: Recorder,
    layer: keras.layers.Layer,
    inputs: tf.Tensor,
    reverse: bool = False,
) -> tf.Tensor:
    """Runs keras-nlp's `ReversibleEmbedding`: ids to vectors, or vectors to logits.

    Tied, logits = hidden · Eᵀ, so that E's gradient is dlogitsᵀ · hidden: the
    gradient that comes back is the *left* factor. Both uses go by the same
    variable, and their cross terms count.
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
    record: Recorder,
    layer: keras.layers.Layer,
    inputs: tf.Tensor,
    start_index: tf.Tensor | int = 0,
) -> tf.Tensor:
    """Runs keras-nlp's `PositionEmbedding`: one vector per position, for all rows."""
    require_tensor(layer, inputs)
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


def t5_layer_norm(
    record: Recorder, layer: keras.layers.Layer, hidden_states: tf.Tensor
) -> tf.Tensor:
    """Runs keras-nlp's `T5LayerNorm`: x / rms(x) · weight."""
    variance = tf.reduce_mean(tf.square(hidden_states), axis=-1, keepdims=True)
    unit = hidden_states * tf.math.rsqrt(variance + layer.epsilon)
    output = record.read(layer.weight) * unit

    def per_example(gradient: Any) -> Any:
        return sum_to(gradient * tf.cast(unit, gradient.dtype), layer.weight.shape)

    record.direct(layer.weight, output, per_example)
    return output


def t5_attention(
    record: Recorder,
    layer: keras.layers.Layer,
    hidden_states: tf.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Runs keras-nlp's `T5MultiHeadAttention`, whose projections have rules.

    What is left is the relative position bias, a table [buckets, heads] from which
    the layer makes one [1, heads, q, k] bias for all examples. Here every example
    gets a copy of its own, so that its gradient G_i stays apart, and the table's is

        Σ_{q,k} [bucket(q, k) = b] · G_i[head, q, k].
    """
    call = type(layer).call
    wanted = layer.use_relative_attention_bias and record.wants(
        layer.relative_attention_bias
    )
    if not wanted:
        return call(layer, hidden_states, *args, **kwargs)
    rows = hidden_states.shape[0]
    table = layer.relative_attention_bias
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
        output = tf.tile(values[tf.newaxis], [rows, 1, 1, 1])

        def per_example(gradient: Any) -> Any:
            which = tf.one_hot(tf.reshape(ids, [-1]), buckets, dtype=gradient.dtype)
            # A product, not a segment sum: it is small, and quick on every device.
            sums = products.product(tf.reshape(gradient, [rows * heads, -1]), which)
            return tf.transpose(tf.reshape(sums, [rows, heads, buckets]), [0, 2, 1])

        record.direct(table, output, per_example)
        return output

    with replaced(layer, compute_bias=compute_bias):
        return call(layer, hidden_states, *args, **kwargs)

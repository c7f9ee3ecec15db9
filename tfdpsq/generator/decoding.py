"""T5's decoder with cached keys and values, and the loop that writes queries with it.

The decoder is computed from its weights, without its layers: the same mathematics, one
position at a time, in the layout that makes a step cheap. A document's keys and values
are made once for all of its queries. A test compares it with the uncached model.

All shapes are static, so that the loop compiles under XLA, also for a TPU. A batch
whose queries end one after the other would cost as much as its longest query. Once half
of the documents have all their queries, the others therefore continue alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.python.ops import control_flow_util

from tfdpsq.generator.samplers import Sampler

# Special ids, the same in every T5.
PAD, EOS, UNKNOWN = 0, 1, 2
_MASKED = -1e9
# A step of fewer rows takes hardly less time.
_FEWEST_ROWS = 16


class _Layer(NamedTuple):
    """A decoder layer's kernels, in the dtype that the model computes in."""

    self_inputs: tf.Tensor  # queries, keys and values, concatenated
    self_output: tf.Tensor
    cross_query: tf.Tensor
    cross_output: tf.Tensor
    hidden: tf.Tensor  # in a gated layer followed by the gate's
    output: tf.Tensor


class Documents(NamedTuple):
    """A decoder's inputs from D documents of L tokens; keys and values by layer."""

    keys: list[tf.Tensor]  # [D, heads, key_value_dim, L]
    values: list[tf.Tensor]  # [D, heads, L, key_value_dim]
    bias: tf.Tensor  # [D, 1, 1, L], 0 for real and -1e9 for padding tokens


class CachedDecoder:
    """Runs a generator's decoder one position at a time.

    Rows belong to documents: B = D·k rows are k queries for each document in turn,
    which share its keys and values. A cache is [B, heads, T, key_value_dim]; a step
    writes its own position into it in place.
    """

    def __init__(self, model: tf.keras.Model, length: int):
        """Prepares the kernels of a `T5QueryGenerator` for queries of T tokens.

        LoRA's updates are added. Made within a `tf.function`, it reads the weights
        whenever the function runs; made outside, it copies them.
        """
        self.model, self.length = model, length
        config, backbone = model.config, model.backbone
        self.heads = (config.num_heads, config.key_value_dim)
        self._inner = config.num_heads * config.key_value_dim
        self._sublayers = backbone.decoder_transformer_layers
        self.dtype = tf.as_dtype(self._sublayers[0].compute_dtype)
        self._exact = tf.as_dtype(self._sublayers[0].variable_dtype)
        self._layers = [self._kernels(layer) for layer in self._sublayers]
        embedding = backbone.token_embedding
        if config.tied:
            # A product with the transposed copy takes a third of the time of one
            # that transposes.
            self._head = tf.transpose(embedding.embeddings)
            self._scale = config.hidden_dim**-0.5
        else:
            self._head = tf.convert_to_tensor(embedding.reverse_embeddings)
            self._scale = 1.0

    def _kernels(self, layer: Any) -> _Layer:
        def kernel(*dense: Any) -> Any:
            kernels = [tf.cast(_kernel_of(one), self.dtype) for one in dense]
            return tf.concat(kernels, axis=1)

        own, cross = layer.self_attention, layer.cross_attention
        gate = (layer.gate_projector,) if layer.use_gated_activation else ()
        return _Layer(
            kernel(own.query_projector, own.key_projector, own.value_projector),
            kernel(own.output_projector),
            kernel(cross.query_projector),
            kernel(cross.output_projector),
            kernel(layer.input_projector, *gate),
            kernel(layer.output_projector),
        )

    def documents(self, states: tf.Tensor, mask: tf.Tensor) -> Documents:
        """Computes every layer's keys and values.

        `states` [D, P + L, hidden_dim] are the result of the model's `encode`, with P
        the length of the soft prompt; `mask` [D, L] int32 is 1 for real tokens.
        """
        if self.model.backbone.soft_prompt is not None:
            mask = self.model.backbone.soft_prompt.extend_mask(mask)
        found = Documents([], [], (1.0 - tf.cast(mask, self._exact)) * _MASKED)
        heads, width = self.heads
        count, length = mask.shape[0], tf.shape(states)[1]
        # Else one row would be broadcast to a number that is not static.
        states = tf.ensure_shape(states, [count, None, None])
        for layer in self._sublayers:
            cross = layer.cross_attention
            key = tf.cast(_kernel_of(cross.key_projector), states.dtype)
            value = tf.cast(_kernel_of(cross.value_projector), states.dtype)
            # Products in the final layout: no transposition afterwards.
            projected = tf.matmul(key[None], states, transpose_a=True, transpose_b=True)
            found.keys.append(tf.reshape(projected, [count, heads, width, length]))
            by_head = tf.transpose(tf.reshape(value, [-1, heads, width]), [1, 0, 2])
            found.values.append(tf.matmul(states[:, None], by_head[None]))
        return found._replace(bias=found.bias[:, None, None, :])

    def empty_cache(self, rows: int) -> list[tf.Tensor]:
        """Makes zeroed self-attention caches: keys and values for every layer."""
        shape = [rows, self.heads[0], self.length, self.heads[1]]
        return [tf.zeros(shape, self.dtype) for _ in range(2 * len(self._layers))]

    def position_bias(self) -> tf.Tensor:
        """Returns the relative position bias with the causal mask, [T, heads, 1, T]."""
        attention = self._sublayers[0].self_attention
        bias = attention.compute_bias(self.length, self.length)[0]
        causal = tf.linalg.band_part(tf.ones([self.length] * 2, self._exact), -1, 0)
        bias = tf.cast(bias, self._exact) + (1 - causal) * _MASKED
        return tf.transpose(bias, [1, 0, 2])[:, :, None, :]

    def step(
        self,
        position: tf.Tensor,
        tokens: tf.Tensor,
        cache: list[tf.Tensor],
        documents: Documents,
        position_bias: tf.Tensor,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Computes the logits at one position, t, a scalar int32.

        `tokens` [B] int32 are the decoder's input at t, `cache` is from `empty_cache`
        or the step before, the others from the methods of their names.

        Returns:
          ([B, V] float32 logits, the cache with position t filled in).
        """
        bias = position_bias[position]
        x = self.model.backbone.token_embedding(tokens)
        cache = list(cache)
        for number, (layer, kernels) in enumerate(zip(self._sublayers, self._layers)):
            normed = self._norm(layer.self_attention_layer_norm, x)
            queries, *new = (
                tf.reshape(one, [-1, self.heads[0], 1, self.heads[1]])
                for one in tf.split(tf.matmul(normed, kernels.self_inputs), 3, axis=1)
            )
            own = slice(2 * number, 2 * number + 2)
            cache[own] = [_written(*one, position) for one in zip(cache[own], new)]
            keys, values = cache[own]
            mixed = self._attend(queries, keys, values, bias, True)
            x += tf.matmul(tf.reshape(mixed, [-1, self._inner]), kernels.self_output)
            x += self._cross(number, layer, kernels, x, documents)
            x += self._feed_forward(layer, kernels, x)
        hidden = self.model.backbone.decoder_layer_norm(x)
        hidden = tf.cast(hidden, self._head.dtype) * self._scale
        return tf.cast(tf.matmul(hidden, self._head), tf.float32), cache

    def _cross(
        self, number: Any, layer: Any, kernels: Any, x: Any, documents: Any
    ) -> Any:
        """Attends from all rows of a document to its keys, which are read once."""
        normed = self._norm(layer.cross_attention_layer_norm, x)
        queries = tf.matmul(normed, kernels.cross_query)
        queries = tf.reshape(queries, [documents.bias.shape[0], -1, *self.heads])
        keys, values = documents.keys[number], documents.values[number]
        queries = tf.transpose(queries, [0, 2, 1, 3])
        mixed = self._attend(queries, keys, values, documents.bias, False)
        mixed = tf.transpose(mixed, [0, 2, 1, 3])
        return tf.matmul(tf.reshape(mixed, [-1, self._inner]), kernels.cross_output)

    def _attend(
        self, queries: Any, keys: Any, values: Any, bias: Any, transpose: bool
    ) -> Any:
        # T5 folds 1/√d into its initialisation: no scaling here.
        scores = tf.matmul(queries, keys, transpose_b=transpose)
        weights = tf.nn.softmax(tf.cast(scores, self._exact) + bias)
        return tf.matmul(tf.cast(weights, self.dtype), values)

    def _feed_forward(self, layer: Any, kernels: Any, x: Any) -> Any:
        hidden = tf.matmul(self._norm(layer.layer_norm, x), kernels.hidden)
        dense = layer.input_projector
        activation = getattr(dense, "dense", dense).activation
        hidden, *gate = tf.split(hidden, 1 + layer.use_gated_activation, axis=1)
        hidden = activation(hidden) * gate[0] if gate else activation(hidden)
        return tf.matmul(hidden, kernels.output)

    def _norm(self, norm: Any, x: Any) -> Any:
        return tf.cast(norm(x), self.dtype)


def _kernel_of(dense: Any) -> Any:
    """Returns the kernel that a Dense or LoRA layer multiplies by."""
    return dense.merge() if hasattr(dense, "merge") else dense.kernel


def _written(cache: tf.Tensor, new: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
    """Writes `new` [B, heads, 1, width] into one position of [B, heads, T, width].

    No single op does this in place both in a graph and under XLA. (In TensorFlow 2.15
    `tensor_scatter_nd_update` copies the whole cache in a graph, at every step.)
    """
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return xla.dynamic_update_slice(cache, new, tf.stack([0, 0, position, 0]))
    length, width = cache.shape[2:]
    # The op takes less than half the time on a matrix.
    matrix = tf.reshape(cache, [-1, length * width])
    start = tf.stack([0, position * width])
    end = tf.stack([tf.shape(matrix)[0], (position + 1) * width])
    new = tf.reshape(new, [-1, width])
    matrix = tf.raw_ops.TensorStridedSliceUpdate(
        input=matrix, begin=start, end=end, strides=[1, 1], value=new
    )
    return tf.reshape(matrix, tf.shape(cache))


class _State(NamedTuple):
    position: tf.Tensor  # scalar int32, the next position to fill
    tokens: tf.Tensor  # [B] int32, the last tokens drawn
    finished: tf.Tensor  # [B] bool
    ids: tf.Tensor  # [T, B] int32
    cache: list[tf.Tensor]


def text_mask(
    vocabulary_size: int, decodable: int, sentinels: tuple[int, ...] = ()
) -> tf.Tensor:
    """Returns the mask to add to logits so that only text is drawn.

    It is [V] float32: 0 for ids of text, -inf for padding, unknown, sentinels, and ids
    from `decodable` on, that the tokenizer lacks (T5 has 32,128 logits for 32,000
    pieces).
    """
    kept = np.arange(vocabulary_size) < decodable
    kept[[PAD, UNKNOWN, *sentinels]] = False
    return tf.where(kept, 0.0, float("-inf"))


@tf.autograph.experimental.do_not_convert
def decode(
    model: tf.keras.Model,
    document_ids: tf.Tensor,
    document_lengths: tf.Tensor,
    uniforms: tf.Tensor,
    sampler: Sampler,
    logits_mask: tf.Tensor,
) -> tf.Tensor:
    """Writes k queries for each document; the encoder runs once for all of them.

    A query depends on its own document and its own `uniforms` alone, up to rounding.

    Args:
      model: a `T5QueryGenerator`.
      document_ids: [D, L] int32; D static.
      document_lengths: [D] int32.
      uniforms: [D·k, T] float32 in [0, 1), static shape: one number for each query and
        position, k rows for each document in turn; T is a query's most tokens.
      sampler: draws tokens.
      logits_mask: [V] float32, from `text_mask`. EOS is never drawn first, as data
        sets have no empty queries.

    Returns:
      [D·k, T] int32, 0 after the end.
    """
    rows, length = uniforms.shape
    mask = tf.sequence_mask(document_lengths, tf.shape(document_ids)[1], tf.int32)
    decoder = CachedDecoder(model, length)
    documents = decoder.documents(model.encode(document_ids, mask), mask)
    position_bias = decoder.position_bias()
    not_first = tf.one_hot(EOS, logits_mask.shape[0], on_value=_MASKED)
    # Added to the logits at the first position, and at all others.
    additions = tf.stack([logits_mask + not_first, logits_mask])

    def step(state: _State, documents: Documents, uniforms: tf.Tensor) -> _State:
        logits, cache = decoder.step(
            state.position, state.tokens, state.cache, documents, position_bias
        )
        logits += additions[tf.minimum(state.position, 1)]
        drawn = sampler(logits, uniforms[state.position])
        drawn = tf.where(state.finished, 0, drawn)
        place = state.position[None, None]
        ids = tf.tensor_scatter_nd_update(state.ids, place, drawn[None])
        finished = state.finished | (drawn == EOS)
        return _State(state.position + 1, drawn, finished, ids, cache)

    state = _State(
        tf.constant(0),
        tf.zeros([rows], tf.int32),
        tf.zeros([rows], tf.bool),
        tf.zeros([length, rows], tf.int32),
        decoder.empty_cache(rows),
    )
    return _run(step, state, documents, uniforms)


def _run(step: Any, state: Any, documents: Any, uniforms: Any) -> Any:
    """Runs `state` to the end; returns ids [B, T] int32. `uniforms` is [B, T]."""
    rows, length = uniforms.shape
    count = documents.bias.shape[0]
    fewer = count // 2
    if fewer * (rows // count) < _FEWEST_ROWS:
        fewer = 0
    by_position = tf.transpose(uniforms)

    def unfinished(state: Any) -> Any:
        return ~tf.reduce_all(tf.reshape(state.finished, [count, -1]), axis=1)

    def more(*state: Any) -> Any:
        state = _State(*state)
        left = tf.reduce_sum(tf.cast(unfinished(state), tf.int32))
        return (state.position < length) & (left > fewer)

    def body(*state: Any) -> Any:
        return step(_State(*state), documents, by_position)

    state = _State(*tf.while_loop(more, body, state, maximum_iterations=length))
    ids = tf.transpose(state.ids)
    if not fewer:
        return ids

    def go_on() -> Any:
        # Unfinished documents first; some finished ones may fill up the rest.
        order = tf.argsort(tf.cast(~unfinished(state), tf.int32), stable=True)
        chosen = order[:fewer]
        own = chosen[:, None] * (rows // count) + tf.range(rows // count)
        own = tf.reshape(own, [fewer * (rows // count)])
        tokens, finished, *cache = (
            tf.gather(one, own) for one in (state.tokens, state.finished, *state.cache)
        )
        left = tf.gather(state.ids, own, axis=1)
        part = _State(state.position, tokens, finished, left, cache)
        kept = tf.nest.map_structure(lambda t: tf.gather(t, chosen), documents)
        found = _run(step, part, kept, tf.gather(uniforms, own))
        return tf.tensor_scatter_nd_update(ids, own[:, None], found)

    over = (state.position == length) | tf.reduce_all(state.finished)
    return tf.cond(over, lambda: ids, go_on)

"""T5's decoder with cached keys and values, and the loop that writes queries with it.

The decoder is computed from its weights, without its layers: the same mathematics, one
position at a time, in the layout that makes a step cheap. A document's keys and values
are made once, however many queries are written for it. A test compares it with the
uncached model.

All shapes are static, so that the loop compiles under XLA, also for a TPU. A batch
whose queries end one after the other would cost as much as its longest query. Once half
of the documents have all their queries, the others therefore continue alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
    """A decoder's inputs from D documents of L tokens.

    Attributes:
      keys: per layer [D, heads, key_value_dim, L].
      values: per layer [D, heads, L, key_value_dim].
      bias: [D, 1, 1, L], 0 for real and -1e9 for padding tokens.
    """

    keys: list[tf.Tensor]
    values: list[tf.Tensor]
    bias: tf.Tensor


class CachedDecoder:
    """Runs a generator's decoder one position at a time.

    Rows belong to documents: B = D·k rows are k queries for each document in turn,
    which share its keys and values. A cache is [B, heads, T, key_value_dim]; a step
    writes its own position into it in place.
    """

    def __init__(self, model: tf.keras.Model, length: int):
        """Prepares the kernels; LoRA's updates are added to theirs.

        Made within a `tf.function`, it reads the weights whenever the function runs;
        made outside, it copies them.

        Args:
          model: a `T5QueryGenerator`.
          length: most tokens of a query, T.
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
            found = [tf.cast(_kernel_of(one), self.dtype) for one in dense]
            return found[0] if len(found) == 1 else tf.concat(found, axis=1)

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
        """Computes keys and values from the encoder's states, in every layer.

        Args:
          states: result of the model's `encode`, [D, P + L, hidden_dim] with P the
            length of the soft prompt.
          mask: [D, L] int32, 1 for real tokens of the document.
        """
        prompt = self.model.backbone.soft_prompt
        if prompt is not None:
            mask = prompt.extend_mask(mask)
        keys: list[tf.Tensor] = []
        values: list[tf.Tensor] = []
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
            keys.append(tf.reshape(projected, [count, heads, width, length]))
            by_head = tf.transpose(tf.reshape(value, [-1, heads, width]), [1, 0, 2])
            values.append(tf.matmul(states[:, None], by_head[None]))
        bias = (1.0 - tf.cast(mask, self._exact)) * _MASKED
        return Documents(keys, values, bias[:, None, None, :])

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
        """Computes the logits at one position.

        Args:
          position: scalar int32, t.
          tokens: [B] int32, the decoder's input at t.
          cache: from `empty_cache` or the previous step.
          documents: from the method of this name.
          position_bias: from the method of this name.

        Returns:
          ([B, V] float32 logits, the cache with position t filled in).
        """
        bias = position_bias[position]
        x = self.model.backbone.token_embedding(tokens)
        cache = list(cache)
        for number, (layer, kernels) in enumerate(zip(self._sublayers, self._layers)):
            keys, values = 2 * number, 2 * number + 1
            projected = tf.matmul(
                self._norm(layer.self_attention_layer_norm, x), kernels.self_inputs
            )
            queries, *new = (
                tf.reshape(one, [-1, self.heads[0], 1, self.heads[1]])
                for one in tf.split(projected, 3, axis=1)
            )
            for slot, one in zip((keys, values), new):
                cache[slot] = _written(cache[slot], position, one)
            mixed = self._attend(
                queries, cache[keys], cache[values], bias, transposed=False
            )
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
        count = documents.bias.shape[0]
        # With one row a document, no transposition is needed.
        alone = x.shape[0] == count
        if alone:
            queries = tf.reshape(queries, [count, self.heads[0], 1, self.heads[1]])
        else:
            queries = tf.reshape(queries, [count, -1, *self.heads])
            queries = tf.transpose(queries, [0, 2, 1, 3])
        mixed = self._attend(
            queries,
            documents.keys[number],
            documents.values[number],
            documents.bias,
            transposed=True,
        )
        if not alone:
            mixed = tf.transpose(mixed, [0, 2, 1, 3])
        return tf.matmul(tf.reshape(mixed, [-1, self._inner]), kernels.cross_output)

    def _attend(
        self, queries: Any, keys: Any, values: Any, bias: Any, transposed: Any
    ) -> Any:
        # T5 folds 1/√d into its initialisation: no scaling here.
        scores = tf.matmul(queries, keys, transpose_b=not transposed)
        weights = tf.nn.softmax(tf.cast(scores, self._exact) + bias)
        return tf.matmul(tf.cast(weights, self.dtype), values)

    def _feed_forward(self, layer: Any, kernels: Any, x: Any) -> Any:
        hidden = tf.matmul(self._norm(layer.layer_norm, x), kernels.hidden)
        dense = layer.input_projector
        activation = getattr(dense, "dense", dense).activation
        if layer.use_gated_activation:
            hidden, gate = tf.split(hidden, 2, axis=1)
            hidden = activation(hidden) * gate
        else:
            hidden = activation(hidden)
        return tf.matmul(hidden, kernels.output)

    def _norm(self, norm: Any, x: Any) -> Any:
        return tf.cast(norm(x), self.dtype)


def _kernel_of(dense: Any) -> Any:
    """Returns the kernel that a Dense or LoRA layer multiplies by."""
    return dense.merge() if hasattr(dense, "merge") else dense.kernel


def _written(cache: tf.Tensor, position: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    """Writes `new` [B, heads, 1, width] into one position of [B, heads, T, width].

    No single op does this in place both in a graph and under XLA. (In TensorFlow 2.15
    `tensor_scatter_nd_update` copies the whole cache in a graph, at every step.)
    """
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return xla.dynamic_update_slice(cache, new, tf.stack([0, 0, position, 0]))
    length, width = cache.shape[2:]
    # The op takes less than half the time on a matrix.
    matrix = tf.reshape(cache, [-1, length * width])
    matrix = tf.raw_ops.TensorStridedSliceUpdate(
        input=matrix,
        begin=tf.stack([0, position * width]),
        end=tf.stack([tf.shape(matrix)[0], (position + 1) * width]),
        strides=[1, 1],
        value=tf.reshape(new, [-1, width]),
    )
    return tf.reshape(matrix, tf.shape(cache))


class _State(NamedTuple):
    position: tf.Tensor  # scalar int32, the next position to fill
    tokens: tf.Tensor  # [B] int32, the last tokens drawn
    finished: tf.Tensor  # [B] bool
    ids: tf.Tensor  # [T, B] int32
    cache: list[tf.Tensor]


def text_mask(
    vocabulary_size: int, decodable: int, never: Sequence[int] = (PAD, UNKNOWN)
) -> tf.Tensor:
    """Makes the mask to add to logits so that only text is drawn.

    Args:
      vocabulary_size: width of the logits, V. T5's 32128 exceed its 32000 pieces.
      decodable: number of leading ids that the tokenizer can decode.
      never: further ids that are not text.

    Returns:
      [V] float32: 0 where an id may be drawn, -inf elsewhere.
    """
    ids = tf.range(vocabulary_size)
    bad = (ids >= decodable) | tf.reduce_any(ids[:, None] == list(never), axis=1)
    return tf.where(bad, float("-inf"), 0.0)


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
      uniforms: [D·k, T] float32 in [0, 1), static shape: one number per query and
        position, k rows for each document in turn; T is the most tokens a query may
        have.
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
        ids = tf.tensor_scatter_nd_update(
            state.ids, state.position[None, None], drawn[None]
        )
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
        part = _State(
            state.position,
            tf.gather(state.tokens, own),
            tf.gather(state.finished, own),
            tf.gather(state.ids, own, axis=1),
            [tf.gather(one, own) for one in state.cache],
        )
        kept = tf.nest.map_structure(lambda t: tf.gather(t, chosen), documents)
        found = _run(step, part, kept, tf.gather(uniforms, own))
        return tf.tensor_scatter_nd_update(ids, own[:, None], found)

    over = (state.position == length) | tf.reduce_all(state.finished)
    return tf.cond(over, lambda: ids, go_on)

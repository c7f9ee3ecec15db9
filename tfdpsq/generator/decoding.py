"""Autoregressive decoding with cached keys and values, in one XLA-ready loop.

keras-nlp's T5 attention has no usable cache on this stack, so the decoder is run
here layer by layer on the backbone's own sublayers: same weights, same maths,
one position at a time. A test holds it against the uncached model.
"""

from __future__ import annotations

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.generator.model import T5QueryGenerator
from tfdpsq.generator.sampling import SamplingConfig, sample

_MASKED = -1e9


def decodable_logits_mask(
    vocabulary_size: int, decodable: int, never: tuple[int, ...]
) -> tf.Tensor:
    """What to add to logits so that only text comes out.

    Args:
      vocabulary_size: width of the logits, V. T5's 32128 exceed its 32000 pieces.
      decodable: how many leading ids the tokenizer can decode.
      never: further ids that stand for no text (padding, unknown).

    Returns:
      [V] float32: 0 where an id may be drawn, -inf elsewhere.

    Raises:
      InputError: the tokenizer has more pieces than the model has logits.
    """
    if decodable > vocabulary_size:
        raise validation.InputError(
            f"the tokenizer has {decodable} pieces but the model only "
            f"{vocabulary_size} logits. Use the vocabulary the model was made with."
        )
    ids = tf.range(vocabulary_size)
    bad = ids >= decodable
    for one in never:
        bad |= ids == one
    return tf.where(bad, float("-inf"), 0.0)


class CachedDecoder:
    """Runs a generator's decoder one position at a time.

    The caches are laid out [T, B, heads, key_value_dim], position first, so that
    a step writes one contiguous slice.
    """

    def __init__(self, model: T5QueryGenerator, length: int):
        """Prepares decoding of up to `length` tokens.

        Args:
          model: the generator whose decoder is run.
          length: most tokens a query can have, T.
        """
        self.model = model
        self.length = validation.positive_integer("length", length)
        self._layers = model.backbone.decoder_transformer_layers
        self._heads = (model.config.num_heads, model.config.key_value_dim)

    def cross_attention(self, states: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Keys and values of the encoder's states, once per layer.

        Args:
          states: [B, L, hidden_dim].

        Returns:
          Per layer (keys, values), each [B, L, heads, key_value_dim].
        """
        return [
            (
                self._split(layer.cross_attention.key_projector(states)),
                self._split(layer.cross_attention.value_projector(states)),
            )
            for layer in self._layers
        ]

    def empty_cache(self, rows: int, dtype: tf.DType) -> list[tf.Tensor]:
        """Zeroed self-attention caches: keys and values for every layer."""
        shape = (self.length, rows, *self._heads)
        return [tf.zeros(shape, dtype) for _ in range(2 * len(self._layers))]

    def position_bias(self) -> tf.Tensor:
        """Relative position bias with the causal mask, [T, heads, T] float32."""
        attention = self._layers[0].self_attention
        bias = tf.cast(attention.compute_bias(self.length, self.length)[0], tf.float32)
        causal = tf.linalg.band_part(tf.ones([self.length] * 2), -1, 0)
        return tf.transpose(bias, [1, 0, 2]) + (1 - causal[:, None, :]) * _MASKED

    def step(
        self,
        position: tf.Tensor,
        tokens: tf.Tensor,
        cache: list[tf.Tensor],
        cross: list[tuple[tf.Tensor, tf.Tensor]],
        cross_bias: tf.Tensor,
        position_bias: tf.Tensor,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Logits at one position.

        Args:
          position: scalar int32, t.
          tokens: [B] int32, the decoder's input at t.
          cache: from `empty_cache` or the step before.
          cross: from `cross_attention`.
          cross_bias: [B, 1, L] float32, 0 for real and -1e9 for padding tokens.
          position_bias: from `position_bias`.

        Returns:
          ([B, V] float32 logits, the cache with position t filled in).
        """
        backbone = self.model.backbone
        x = backbone.token_embedding(tokens)
        cache = list(cache)
        for number, layer in enumerate(self._layers):
            attention = layer.self_attention
            normed = layer.self_attention_layer_norm(x)
            for offset, projector in enumerate(
                (attention.key_projector, attention.value_projector)
            ):
                slot = 2 * number + offset
                cache[slot] = tf.tensor_scatter_nd_update(
                    cache[slot],
                    position[None, None],
                    self._split(projector(normed))[None],
                )
            x += self._attend(
                attention,
                normed,
                cache[2 * number],
                cache[2 * number + 1],
                position_bias[position][None],
                "tbhd",
            )
            normed = layer.cross_attention_layer_norm(x)
            x += self._attend(
                layer.cross_attention, normed, *cross[number], cross_bias, "bthd"
            )
            x += _feed_forward(layer, layer.layer_norm(x))
        return self.model.head(backbone.decoder_layer_norm(x)), cache

    def _attend(self, attention, x, keys, values, bias, layout):
        queries = self._split(attention.query_projector(x))
        # T5 folds 1/√d into its initialisation: no scaling here.
        scores = tf.einsum(f"bhd,{layout}->bht", queries, keys)
        weights = tf.nn.softmax(tf.cast(scores, tf.float32) + bias, axis=-1)
        mixed = tf.einsum(f"bht,{layout}->bhd", tf.cast(weights, values.dtype), values)
        flat = tf.reshape(mixed, [-1, self._heads[0] * self._heads[1]])
        return attention.output_projector(flat)

    def _split(self, x: tf.Tensor) -> tf.Tensor:
        """[..., heads · key_value_dim] to [..., heads, key_value_dim]."""
        shape = [-1 if s is None else s for s in x.shape[:-1]]
        return tf.reshape(x, [*shape, *self._heads])


def _feed_forward(layer, x: tf.Tensor) -> tf.Tensor:
    hidden = layer.input_projector(x)
    if layer.use_gated_activation:
        hidden *= layer.gate_projector(x)
    return layer.output_projector(hidden)


def generate(
    model: T5QueryGenerator,
    document_ids: tf.Tensor,
    document_lengths: tf.Tensor,
    uniforms: tf.Tensor,
    config: SamplingConfig,
    logits_mask: tf.Tensor,
    eos_id: int,
    early_stop: bool = True,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Writes one query per row.

    Row i's query depends on its own document and its own `uniforms` alone.

    Args:
      model: the generator.
      document_ids: [B, L] int32, static shape.
      document_lengths: [B] int32.
      uniforms: [B, T] float32 in [0, 1): one number per row and position; T is
        the most tokens a query may have. Ignored by greedy decoding.
      config: how tokens are chosen.
      logits_mask: [V] float32, from `decodable_logits_mask`.
      eos_id: the token that ends a query. It is never the first, as no data set
        holds empty queries.
      early_stop: stop once every row has ended.

    Returns:
      ids [B, T] int32, 0 after the end; lengths [B] int32, EOS included.
    """
    rows, length = uniforms.shape
    mask = tf.sequence_mask(document_lengths, document_ids.shape[1], tf.int32)
    states = model.encode(document_ids, mask)
    decoder = CachedDecoder(model, length)
    cross = decoder.cross_attention(states)
    cross_bias = (1.0 - tf.cast(mask, tf.float32))[:, None, :] * _MASKED
    position_bias = decoder.position_bias()
    not_first = tf.one_hot(eos_id, logits_mask.shape[0], on_value=_MASKED)
    uniforms_by_position = tf.transpose(uniforms)

    def unfinished(position, tokens, finished, ids, *cache):
        del tokens, ids, cache
        more = position < length
        return more & ~tf.reduce_all(finished) if early_stop else more

    def body(position, tokens, finished, ids, *cache):
        logits, filled = decoder.step(
            position, tokens, list(cache), cross, cross_bias, position_bias
        )
        logits += logits_mask + tf.where(position == 0, not_first, 0.0)
        drawn = sample(logits, uniforms_by_position[position], config)
        drawn = tf.where(finished, 0, drawn)
        ids = tf.tensor_scatter_nd_update(ids, position[None, None], drawn[None])
        return (position + 1, drawn, finished | (drawn == eos_id), ids, *filled)

    start = (
        tf.constant(0),
        tf.zeros([rows], tf.int32),
        tf.zeros([rows], tf.bool),
        tf.zeros([length, rows], tf.int32),
        *decoder.empty_cache(rows, states.dtype),
    )
    ids = tf.transpose(
        tf.while_loop(unfinished, body, start, maximum_iterations=length)[3]
    )
    # Padding is never drawn (the mask forbids it), so it marks the end exactly.
    return ids, tf.reduce_sum(tf.cast(ids != 0, tf.int32), axis=1)

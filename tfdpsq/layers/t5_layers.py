"""The layers of T5: keras-nlp's weights, with float32 where bfloat16 would hurt.

`T5MultiHeadAttention`, `T5TransformerLayer` and `TokenEmbedding` are keras-nlp's: same
weights, same names, same mathematics (Raffel et al. 2020, section 2.1). They add what
larger models need:

- under `mixed_bfloat16`, softmax, norms and logits are computed in float32, of the
  position bias and the head as they are, not rounded;
- a layer can be rematerialised (see `tfdpsq.rematerialization`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras_nlp.src.layers.modeling import reversible_embedding
from keras_nlp.src.models.t5 import t5_multi_head_attention as keras_nlp_attention
from keras_nlp.src.models.t5 import t5_transformer_layer as keras_nlp_layer
from keras_nlp.src.models.t5.t5_layer_norm import T5LayerNorm

from tfdpsq.layers.seeded_dropout import (
    current_kinds,
    dropped,
    kinds_of_rows,
    next_dropout_seed,
)
from tfdpsq.layers.tracing import without_autograph
from tfdpsq.rematerialization import rematerialized

_MASKED = -1e9
# Dropouts in one layer; each has a seed of its own where the layer is rematerialised.
_DROPOUTS = 6


class _ExactWeights(tf.keras.layers.Layer):
    """A layer that reads its own weights, not those of layers in it, unrounded.

    Under mixed precision Keras rounds a weight wherever its layer reads it, which no
    cast back to float32 undoes.
    """

    def add_weight(self, *args: Any, **options: Any) -> tf.Variable:
        """See `tf.keras.layers.Layer.add_weight`."""
        return super().add_weight(*args, **{"experimental_autocast": False, **options})


@tf.keras.utils.register_keras_serializable("tfdpsq")
class TokenEmbedding(_ExactWeights, reversible_embedding.ReversibleEmbedding):
    """Token ids to vectors, and hidden states to logits, by a head of its own or not.

    Example:
      >>> layer = TokenEmbedding(100, 16, tie_weights=False)
      >>> layer(layer(tf.zeros([2, 5], tf.int32)), reverse=True).shape
      TensorShape([2, 5, 100])
    """


@tf.keras.utils.register_keras_serializable("tfdpsq")
class T5MultiHeadAttention(_ExactWeights, keras_nlp_attention.T5MultiHeadAttention):
    """Multi-head attention with T5's relative position bias; no 1/√d anywhere."""

    def call(
        self,
        hidden_states: Any,
        mask: Any = None,
        key_value_states: Any = None,
        position_bias: Any = None,
        dropout_seed: Any = None,
        training: Any = False,
        key_value_rows: Any = None,
    ) -> Any:
        """Attends.

        Args:
          hidden_states: [B, q, hidden_dim].
          mask: [B or 1, q or 1, k], 0 where a key must not be seen; ignored if a
            `position_bias` is given, which includes it.
          key_value_states: [B, k, hidden_dim]; `None` attends to `hidden_states`.
            With `key_value_rows`, [D, k, hidden_dim].
          position_bias: the bias that another layer returned; `None` computes it.
          dropout_seed: as `_dropped` takes it; `None` lets the dropout layer draw.
          training: whether dropout is on.
          key_value_rows: [B] integers: which of D states each row attends to, so that
            states of several rows are projected once. `None` if each has its own.

        Returns:
          ([B, q, hidden_dim], the bias [B or 1, heads or 1, q, k], float32 at least).
        """
        source = hidden_states if key_value_states is None else key_value_states
        queries = self._heads(self.query_projector(hidden_states))
        keys = self._heads(self.key_projector(source))
        values = self._heads(self.value_projector(source))
        if key_value_rows is not None:
            keys, values = (tf.gather(x, key_value_rows) for x in (keys, values))
        exact = self.dtype_policy.variable_dtype
        if position_bias is None:
            lengths = _length(hidden_states), _length(source)
            position_bias = self._bias(*lengths, mask, exact)
        # On processors, products of batches are faster than `tf.einsum`.
        scores = tf.matmul(queries, keys, transpose_b=True)
        weights = tf.nn.softmax(tf.cast(scores, exact) + position_bias)
        weights = tf.cast(weights, self.compute_dtype)
        weights = _dropped(self.dropout_layer, weights, dropout_seed, training)
        mixed = tf.transpose(tf.matmul(weights, values), [0, 2, 1, 3])
        flat = tf.reshape(mixed, [-1, _length(hidden_states), self.inner_dim])
        return self.output_projector(flat), position_bias

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        _require_dense(self)
        return {
            **super().get_config(),
            "is_decoder": self.is_decoder,
            "hidden_dim": self.hidden_dim,
            "key_value_dim": self.key_value_dim,
            "num_heads": self.num_heads,
            "dropout": self.dropout_layer.rate,
            "use_relative_attention_bias": self.use_relative_attention_bias,
        }

    def _bias(self, query_length: Any, key_length: Any, mask: Any, dtype: Any) -> Any:
        if self.use_relative_attention_bias:
            bias = self.compute_bias(query_length, key_length)
            bias = tf.cast(bias, dtype)
        else:
            bias = tf.zeros([], dtype)
        if mask is not None:
            bias += (1.0 - tf.cast(mask, dtype))[:, tf.newaxis] * _MASKED
        return bias

    def _heads(self, x: tf.Tensor) -> tf.Tensor:
        """[B, L, heads · key_value_dim] to [B, heads, L, key_value_dim]."""
        parts = tf.reshape(x, [-1, _length(x), self.num_heads, self.key_value_dim])
        return tf.transpose(parts, [0, 2, 1, 3])


@tf.keras.utils.register_keras_serializable("tfdpsq")
class T5TransformerLayer(keras_nlp_layer.T5TransformerLayer):
    """One transformer layer of T5's encoder or decoder.

    Example:
      >>> layer = T5TransformerLayer(
      ...     is_decoder=False,
      ...     hidden_dim=16,
      ...     intermediate_dim=24,
      ...     key_value_dim=8,
      ...     dropout=0.1,
      ...     activation="relu",
      ...     num_heads=2,
      ...     use_gated_activation=False,
      ...     use_relative_attention_bias=True,
      ... )
      >>> states, position_bias = layer(tf.zeros([3, 5, 16]), tf.ones([3, 1, 5]))
      >>> states.shape, position_bias.shape
      (TensorShape([3, 5, 16]), TensorShape([3, 2, 5, 5]))

    Attributes:
      rematerialize: whether the backward pass runs the layer again instead of keeping
        its intermediate results.
    """

    def __init__(
        self,
        is_decoder: bool,
        hidden_dim: int,
        intermediate_dim: int,
        key_value_dim: int,
        dropout: float,
        activation: Any,
        num_heads: int,
        use_gated_activation: bool,
        use_relative_attention_bias: bool = False,
        rematerialize: bool = False,
        layer_norm_epsilon: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        """Makes the layer.

        Args:
          is_decoder: whether it attends to an encoder's states, too.
          hidden_dim: width of the residual stream.
          intermediate_dim: width of the feed-forward layer.
          key_value_dim: width of one attention head.
          dropout: dropout rate.
          activation: activation of the feed-forward layer.
          num_heads: attention heads.
          use_gated_activation: whether the feed-forward layer is gated.
          use_relative_attention_bias: whether this layer computes the position bias,
            as the first of a stack does.
          rematerialize: whether to recompute the layer in the backward pass.
          layer_norm_epsilon: added to the mean square in the norms.
          **kwargs: those of `tf.keras.layers.Layer`.
        """
        super().__init__(
            is_decoder,
            hidden_dim,
            intermediate_dim,
            key_value_dim,
            dropout,
            activation,
            layer_norm_epsilon,
            num_heads,
            use_gated_activation,
            use_relative_attention_bias,
            **kwargs,
        )
        self.rematerialize = rematerialize
        # Replaces keras-nlp's layers before any of them is built.
        for name in self._attentions():
            own = T5MultiHeadAttention(
                is_decoder,
                hidden_dim,
                key_value_dim,
                num_heads,
                dropout,
                use_relative_attention_bias and name == "self_attention",
                dtype=self.dtype_policy,
                name=name,
            )
            setattr(self, name, own)
        for name in (*(f"{n}_layer_norm" for n in self._attentions()), "layer_norm"):
            exact = self.dtype_policy.variable_dtype
            setattr(self, name, T5LayerNorm(layer_norm_epsilon, dtype=exact))

    @without_autograph
    def call(
        self,
        hidden_states: Any,
        attention_mask: Any = None,
        position_bias: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        use_causal_mask: Any = False,
        training: Any = False,
        encoder_rows: Any = None,
    ) -> Any:
        """Runs the layer.

        Args:
          hidden_states: [B, L, hidden_dim].
          attention_mask: [B, 1, L], 0 for padding; ignored if a `position_bias` is
            given, which includes it.
          position_bias: the bias that the first layer of the stack returned.
          encoder_hidden_states: [B, S, hidden_dim]; for a decoder. With
            `encoder_rows`, [D, S, hidden_dim].
          encoder_attention_mask: [B, 1, S].
          use_causal_mask: whether a position sees those before it only.
          training: whether dropout is on.
          encoder_rows: [B] integers, see `key_value_rows` of the attention.

        Returns:
          ([B, L, hidden_dim], the position bias).
        """
        function, tensors = self.pieces(
            hidden_states,
            attention_mask,
            position_bias,
            encoder_hidden_states,
            encoder_attention_mask,
            use_causal_mask,
            training,
            encoder_rows,
        )
        # Without training there is no backward pass to save memory for.
        if self.rematerialize and training:
            return rematerialized(function, tensors)
        return function(*tensors)

    @without_autograph
    def pieces(
        self,
        hidden_states: tf.Tensor,
        attention_mask: tf.Tensor | None = None,
        position_bias: tf.Tensor | None = None,
        encoder_hidden_states: tf.Tensor | None = None,
        encoder_attention_mask: tf.Tensor | None = None,
        use_causal_mask: bool = False,
        training: bool = False,
        encoder_rows: tf.Tensor | None = None,
    ) -> tuple[Callable[..., tuple[tf.Tensor, tf.Tensor]], list[tf.Tensor]]:
        """Splits `call` into a function and its tensors; see `rematerialization`.

        The arguments are those of `call`.

        Returns:
          (function, tensors): `function(*tensors)` is the result of `call`.
        """
        if position_bias is not None:
            attention_mask = None
        elif use_causal_mask:
            attention_mask = _causal(attention_mask, _length(hidden_states))
        given = {
            "position_bias": position_bias,
            "mask": attention_mask,
            "encoder_states": encoder_hidden_states,
            "encoder_mask": encoder_attention_mask,
            "encoder_rows": encoder_rows,
            "seeds": self._seeds() if self.rematerialize and training else None,
        }
        given = {name: value for name, value in given.items() if value is not None}

        kinds = current_kinds()

        @without_autograph
        def function(x: Any, *tensors: Any) -> Any:
            with kinds_of_rows(kinds):  # also when it is run again, afterwards
                return self._run(x, training=training, **dict(zip(given, tensors)))

        return function, [hidden_states, *given.values()]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments.

        Raises:
          NotImplementedError: a Dense layer was replaced (`apply_lora`): no argument
            of the constructor would bring it back.
        """
        _require_dense(self)
        attention = self.self_attention.get_config()
        same = ("hidden_dim", "key_value_dim", "num_heads", "dropout")
        return {
            **super().get_config(),
            **{name: attention[name] for name in ("is_decoder", *same)},
            "intermediate_dim": self.input_projector.units,
            "activation": tf.keras.activations.serialize(
                self.input_projector.activation
            ),
            "use_gated_activation": self.use_gated_activation,
            "use_relative_attention_bias": attention["use_relative_attention_bias"],
            "rematerialize": self.rematerialize,
            "layer_norm_epsilon": self.layer_norm.epsilon,
        }

    def _run(
        self,
        x: Any,
        position_bias: Any = None,
        mask: Any = None,
        encoder_states: Any = None,
        encoder_mask: Any = None,
        encoder_rows: Any = None,
        seeds: Any = None,
        training: Any = False,
    ) -> Any:
        seed = iter([None] * _DROPOUTS if seeds is None else tf.unstack(seeds))
        attended, position_bias = self.self_attention(
            self.self_attention_layer_norm(x),
            mask=mask,
            position_bias=position_bias,
            dropout_seed=next(seed),
            training=training,
        )
        x += _dropped(self.self_attention_dropout, attended, next(seed), training)
        if self.is_decoder:
            attended, _ = self.cross_attention(
                self.cross_attention_layer_norm(x),
                mask=encoder_mask,
                key_value_states=encoder_states,
                key_value_rows=encoder_rows,
                dropout_seed=next(seed),
                training=training,
            )
            x += _dropped(self.cross_attention_dropout, attended, next(seed), training)
        normed = self.layer_norm(x)
        hidden = self.input_projector(normed)
        if self.use_gated_activation:
            hidden *= self.gate_projector(normed)
        hidden = _dropped(self.dropout_layer, hidden, next(seed), training)
        hidden = self.output_projector(hidden)
        x += _dropped(self.dropout_layer, hidden, next(seed), training)
        return x, position_bias

    def _attentions(self) -> tuple[str, ...]:
        both = ("self_attention", "cross_attention")
        return both if self.is_decoder else both[:1]

    def _seeds(self) -> tf.Tensor | None:
        """Draws one seed per dropout from the source that the dropout layers use."""
        if not self.dropout_layer.rate:
            return None
        seeds = [next_dropout_seed() for _ in range(_DROPOUTS)]
        if seeds[0] is not None:
            return tf.stack(seeds)
        generator = self.dropout_layer._random_generator
        if hasattr(generator, "dropout_seed"):  # private training's; see `privacy`
            return tf.stack([generator.dropout_seed() for _ in range(_DROPOUTS)])
        seed = generator.make_seed_for_stateless_op()
        if seed is None:  # Keras draws from TensorFlow's global generator.
            seed = tf.random.uniform([2], maxval=tf.int64.max, dtype=tf.int64)
        shape = [_DROPOUTS, 2]
        return tf.random.stateless_uniform(shape, seed, None, None, tf.int64)


def _require_dense(layer: tf.keras.layers.Layer) -> None:
    """Refuses the configuration of a layer that is not as its constructor made it."""
    for name, part in vars(layer).items():
        if name.endswith("_projector") and type(part) is not tf.keras.layers.Dense:
            # The error that Keras expects of a layer without a configuration.
            raise NotImplementedError(
                f"layer {layer.name}: {name} is a {type(part).__name__}, which the "
                "layer's configuration cannot hold. Save a generator with LoRA by "
                "T5QueryGenerator.save_to_preset, which adds LoRA's updates to the "
                "kernels, or keep its weights in a tf.train.Checkpoint."
            )


def _dropped(
    layer: tf.keras.layers.Dropout, x: tf.Tensor, seed: tf.Tensor | None, training: bool
) -> tf.Tensor:
    """Applies a layer's dropout, from a seed if there is one.

    A seed has 2 integers, or the 3 that `dropped` takes.
    """
    if seed is None and training and layer.rate:
        seed = next_dropout_seed()
    if seed is None:
        return layer(x, training=training)
    if seed.shape[0] == 3:
        return dropped(x, layer.rate, seed)
    return tf.nn.experimental.stateless_dropout(x, rate=layer.rate, seed=seed)


def _causal(mask: tf.Tensor, length: tf.Tensor | int) -> tf.Tensor:
    """Combines a padding mask [B, 1, L] with the causal mask, [B, L, L]."""
    earlier = tf.linalg.band_part(tf.ones([length, length], mask.dtype), -1, 0)
    return mask * earlier


def _length(x: tf.Tensor) -> tf.Tensor | int:
    """Returns the size of the second dimension, an int if it is static."""
    return tf.shape(x)[1] if x.shape[1] is None else x.shape[1]

"""T5 on keras-nlp's layers: the shape, the layers, the encoder and the decoder.

`T5Backbone` is keras-nlp's, weight for weight and name for name (its weight files
load), with the mathematics of Raffel et al. 2020, section 2.1. It adds:

- `T5Config` binds the activation, its gating and the tied head to a published version;
- under `mixed_bfloat16`, softmax, norms and logits are computed in float32, from a
  position bias and a head that are not rounded;
- layers can be rematerialized (see `tfdpsq.rematerialization`);
- dropout is seeded (see `seeded_dropout`), and the encoder may have a soft prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

try:
    from keras_nlp.src.layers.modeling import reversible_embedding
    from keras_nlp.src.models.t5 import t5_multi_head_attention as keras_nlp_attention
    from keras_nlp.src.models.t5 import t5_transformer_layer as keras_nlp_layer
    from keras_nlp.src.models.t5.t5_layer_norm import T5LayerNorm
    from keras_nlp.src.utils.keras_utils import gelu_approximate
except Exception as error:  # on another stack it fails in several ways
    raise ImportError(
        "T5 needs keras-nlp 0.12, which does not import here "
        f"({type(error).__name__}: {error}). Install the pinned stack from a clone: "
        "python3.11 -m pip install -c constraints.txt '.[stack]'."
    ) from error

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.layers.seeded_dropout import (
    SeededDropout,
    current_kinds,
    given_seeds,
    kinds_of_rows,
    next_dropout_seed,
)
from tfdpsq.layers.soft_prompt import SoftPrompt
from tfdpsq.layers.tracing import without_autograph
from tfdpsq.rematerialization import rematerialized

_VERSIONS = ("1.0", "1.1")
_DTYPES = (None, "float32", "float64", "mixed_bfloat16")
_EPSILON = 1e-6  # of the norms
_MASKED = -1e9
# Dropouts in one layer; each has a seed of its own where the layer is rematerialized.
_DROPOUTS = 6


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Shape of a T5 encoder–decoder.

    Example:
      >>> T5Config(32128, 6, 8, 512, 2048, 64).tied  # T5 1.0 small
      True

    Attributes:
      vocabulary_size: rows of the embedding, and logits (32128 in T5).
      num_layers: transformer layers in the encoder, and again in the decoder.
      num_heads: attention heads.
      hidden_dim: width of the residual stream.
      intermediate_dim: width of the feed-forward layer.
      key_value_dim: width of one head; T5 1.1 small has heads × width ≠ hidden.
      version: "1.0" (relu, ungated, head tied to the embedding and scaled by
        hidden_dim^-0.5) or "1.1" (tanh-gelu, gated, head of its own; FLAN too).
      dropout: dropout rate while training, in [0, 1).
    """

    vocabulary_size: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    intermediate_dim: int
    key_value_dim: int
    version: str = "1.0"
    dropout: float = 0.1

    def __post_init__(self) -> None:
        """Checks every value."""
        for field in dataclasses.fields(self)[:6]:
            validation.positive_integer(field.name, getattr(self, field.name))
        validation.one_of("version", self.version, _VERSIONS)
        validation.in_range("dropout", self.dropout, 0.0, 1.0, high_open=True)

    @property
    def tied(self) -> bool:
        """True if the language-model head is the embedding, transposed."""
        return self.version == "1.0"


class _ExactWeights(keras.layers.Layer):
    """A layer that reads its own weights, not those of layers in it, unrounded.

    Under mixed precision Keras rounds a weight wherever its layer reads it.
    """

    def add_weight(self, *args: Any, **options: Any) -> tf.Variable:
        """See `tf.keras.layers.Layer.add_weight`."""
        return super().add_weight(*args, **{"experimental_autocast": False, **options})


@keras.utils.register_keras_serializable("tfdpsq")
class TokenEmbedding(_ExactWeights, reversible_embedding.ReversibleEmbedding):
    """Token ids to vectors, and states to logits, by a head of its own or not."""


@keras.utils.register_keras_serializable("tfdpsq")
class T5MultiHeadAttention(_ExactWeights, keras_nlp_attention.T5MultiHeadAttention):
    """Multi-head attention with T5's relative position bias; no 1/√d anywhere."""

    def call(
        self,
        hidden_states: Any,
        mask: Any = None,
        key_value_states: Any = None,
        position_bias: Any = None,
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
            position_bias = tf.zeros([], exact)
            if self.use_relative_attention_bias:
                lengths = _length(hidden_states), _length(source)
                position_bias = tf.cast(self.compute_bias(*lengths), exact)
            if mask is not None:
                hidden = 1.0 - tf.cast(mask, exact)
                position_bias += hidden[:, tf.newaxis] * _MASKED
        # On processors, products of batches are faster than `tf.einsum`.
        scores = tf.matmul(queries, keys, transpose_b=True)
        weights = tf.nn.softmax(tf.cast(scores, exact) + position_bias)
        weights = tf.cast(weights, self.compute_dtype)
        weights = self.dropout_layer(weights, training=training)
        mixed = tf.transpose(tf.matmul(weights, values), [0, 2, 1, 3])
        flat = tf.reshape(mixed, [-1, _length(hidden_states), self.inner_dim])
        return self.output_projector(flat), position_bias

    def _heads(self, x: tf.Tensor) -> tf.Tensor:
        """[B, L, heads · key_value_dim] to [B, heads, L, key_value_dim]."""
        parts = tf.reshape(x, [-1, _length(x), self.num_heads, self.key_value_dim])
        return tf.transpose(parts, [0, 2, 1, 3])


@keras.utils.register_keras_serializable("tfdpsq")
class T5TransformerLayer(keras_nlp_layer.T5TransformerLayer):
    """One transformer layer of T5's encoder or decoder."""

    def __init__(
        self,
        config: T5Config,
        is_decoder: bool = False,
        use_relative_attention_bias: bool = False,
        rematerialize: bool = False,
        **kwargs: Any,
    ) -> None:
        """Makes the layer.

        Args:
          config: the shape.
          is_decoder: whether it attends to an encoder's states, too.
          use_relative_attention_bias: whether it computes the position bias, as the
            first layer of a stack does for all.
          rematerialize: whether the backward pass runs the layer again instead of
            keeping its intermediate results.
          **kwargs: those of `keras.layers.Layer`.
        """
        attention = {
            "is_decoder": is_decoder,
            "hidden_dim": config.hidden_dim,
            "key_value_dim": config.key_value_dim,
            "num_heads": config.num_heads,
            "dropout": config.dropout,
        }
        super().__init__(
            intermediate_dim=config.intermediate_dim,
            activation="relu" if config.version == "1.0" else gelu_approximate,
            layer_norm_epsilon=_EPSILON,
            use_gated_activation=config.version != "1.0",
            **attention,
            **kwargs,
        )
        self.config = config
        self.use_relative_attention_bias = use_relative_attention_bias
        self.rematerialize = rematerialize
        exact = self.dtype_policy.variable_dtype
        # Replaces keras-nlp's layers before any of them is built.
        for name in ("self_attention", "cross_attention")[: 1 + is_decoder]:
            own = T5MultiHeadAttention(
                use_relative_attention_bias=use_relative_attention_bias
                and name == "self_attention",
                dtype=self.dtype_policy,
                name=name,
                **attention,
            )
            own.dropout_layer = self._dropout()
            setattr(self, name, own)
            setattr(self, f"{name}_layer_norm", T5LayerNorm(_EPSILON, dtype=exact))
            setattr(self, f"{name}_dropout", self._dropout())
        self.layer_norm = T5LayerNorm(_EPSILON, dtype=exact)
        self.dropout_layer = self._dropout()

    def _dropout(self) -> SeededDropout:
        return SeededDropout(self.config.dropout, dtype=self.dtype_policy)

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
            use_causal_mask=use_causal_mask,
            training=training,
            attention_mask=attention_mask,
            position_bias=position_bias,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            encoder_rows=encoder_rows,
        )
        # Without training there is no backward pass to save memory for.
        if self.rematerialize and training:
            return rematerialized(function, tensors)
        return function(*tensors)

    @without_autograph
    def pieces(
        self,
        hidden_states: tf.Tensor,
        *,
        use_causal_mask: bool = False,
        training: bool = False,
        **others: tf.Tensor | None,
    ) -> tuple[Callable[..., tuple[tf.Tensor, tf.Tensor]], list[tf.Tensor]]:
        """Splits `call` into (function, tensors); see `rematerialization`."""
        given = {name: value for name, value in others.items() if value is not None}
        if "position_bias" in given:
            given.pop("attention_mask", None)
        elif use_causal_mask:
            length, mask = _length(hidden_states), given["attention_mask"]
            ones = tf.ones([length, length], mask.dtype)
            given["attention_mask"] = mask * tf.linalg.band_part(ones, -1, 0)
        if self.rematerialize and training and self.dropout_layer.rate:
            given["seeds"] = self._seeds()
        kinds = current_kinds()

        @without_autograph
        def function(x: Any, *tensors: Any) -> Any:
            named = dict(zip(given, tensors))
            # Also when it is run again, afterwards.
            with kinds_of_rows(kinds), given_seeds(named.pop("seeds", None)):
                return self._run(x, training, **named)

        return function, [hidden_states, *given.values()]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments.

        Raises:
          NotImplementedError: a Dense layer was replaced (`apply_lora`): no argument
            of the constructor would bring it back.
        """
        for layer in self._flatten_layers(include_self=False):
            if layer.name.endswith("_projector") and not isinstance(
                layer, keras.layers.Dense
            ):
                # The error that Keras expects of a layer without a configuration.
                raise NotImplementedError(
                    f"layer {self.name}: no configuration holds {layer.name}, a "
                    f"{type(layer).__name__}. Save the generator by save_to_preset."
                )
        return {
            **super().get_config(),
            "config": dataclasses.asdict(self.config),
            "is_decoder": self.is_decoder,
            "use_relative_attention_bias": self.use_relative_attention_bias,
            "rematerialize": self.rematerialize,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> T5TransformerLayer:
        """Makes the layer that `get_config` described."""
        return cls(**{**config, "config": T5Config(**config["config"])})

    def _run(
        self,
        x: Any,
        training: Any,
        attention_mask: Any = None,
        position_bias: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        encoder_rows: Any = None,
    ) -> Any:
        attended, position_bias = self.self_attention(
            self.self_attention_layer_norm(x),
            mask=attention_mask,
            position_bias=position_bias,
            training=training,
        )
        x += self.self_attention_dropout(attended, training=training)
        if self.is_decoder:
            attended, _ = self.cross_attention(
                self.cross_attention_layer_norm(x),
                mask=encoder_attention_mask,
                key_value_states=encoder_hidden_states,
                key_value_rows=encoder_rows,
                training=training,
            )
            x += self.cross_attention_dropout(attended, training=training)
        normed = self.layer_norm(x)
        hidden = self.input_projector(normed)
        if self.use_gated_activation:
            hidden *= self.gate_projector(normed)
        hidden = self.output_projector(self.dropout_layer(hidden, training=training))
        return x + self.dropout_layer(hidden, training=training), position_bias

    def _seeds(self) -> tf.Tensor:
        """Draws one seed per dropout from the source that the dropout layers use."""
        seeds = [next_dropout_seed() for _ in range(_DROPOUTS)]
        generator = self.dropout_layer._random_generator
        if seeds[0] is None and hasattr(generator, "dropout_seed"):  # `privacy` put it
            seeds = [generator.dropout_seed() for _ in range(_DROPOUTS)]
        if seeds[0] is not None:
            return tf.stack(seeds)
        seed = generator.make_seed_for_stateless_op()
        if seed is None:  # Keras draws from TensorFlow's global generator.
            seed = tf.random.uniform([2], maxval=tf.int64.max, dtype=tf.int64)
        shape = [_DROPOUTS, 2]
        return tf.random.stateless_uniform(shape, seed, None, None, tf.int64)


@keras.utils.register_keras_serializable("tfdpsq")
class T5Backbone(keras.Model):
    """T5's encoder and decoder, without a language-model head.

    A functional model from `encoder_token_ids` [B, L], `encoder_padding_mask` [B, L],
    `decoder_token_ids` [B, T] and `decoder_padding_mask` [B, T], all int32, to
    `encoder_sequence_output` [B, P + L, hidden_dim] and `decoder_sequence_output`
    [B, T, hidden_dim]. P is the length of the soft prompt, 0 without one.

    Example:
      >>> backbone = T5Backbone(T5Config(60, 1, 2, 16, 24, 8))
      >>> outputs = backbone(
      ...     {
      ...         "encoder_token_ids": tf.constant([[7, 8, 9, 1]]),
      ...         "encoder_padding_mask": tf.constant([[1, 1, 1, 1]]),
      ...         "decoder_token_ids": tf.constant([[0, 5]]),
      ...         "decoder_padding_mask": tf.constant([[1, 1]]),
      ...     }
      ... )
      >>> outputs["decoder_sequence_output"].shape
      TensorShape([1, 2, 16])

    Attributes:
      config: the shape.
      token_embedding: the embedding shared by encoder and decoder; in T5 1.1 it holds
        the head's weights, too.
      soft_prompt: the `SoftPrompt` before the encoder's texts, or `None`.
      encoder_transformer_layers, encoder_layer_norm: the encoder's layers, and the norm
        after them.
      decoder_transformer_layers, decoder_layer_norm: the decoder's.
    """

    @without_autograph
    def __init__(
        self,
        config: T5Config,
        dtype: str | None = None,
        rematerialize: bool = False,
        soft_prompt: int = 0,
        name: str = "t5_backbone",
        trainable: bool = True,
    ):
        """Builds the model with random weights.

        Args:
          config: the shape to build.
          dtype: "float32", "float64", or "mixed_bfloat16": weights in float32,
            products in bfloat16, softmax and norms in float32. `None` follows Keras's
            global policy.
          rematerialize: run each layer twice in training: less memory for about a
            third more time.
          soft_prompt: length P of the soft prompt (see `SoftPrompt`), 0 for none.
          name: of the model.
          trainable: whether it trains.
        """
        policy = _policy(dtype)
        embedding = _embedding(config, policy, tied=config.tied)
        ids, mask = _inputs("encoder")
        prompt = None
        embedded, seen = embedding(ids), mask
        if soft_prompt:
            prompt = SoftPrompt(soft_prompt, dtype=policy, name="soft_prompt")
            embedded, seen = prompt(embedded, seen)
        shape = config, policy, rematerialize
        states, *encoder = _stack(*shape, "encoder", embedded, seen)
        decoder_ids, decoder_mask = _inputs("decoder")
        output, *decoder = _stack(
            *shape,
            "decoder",
            embedding(decoder_ids),
            decoder_mask,
            encoder_hidden_states=states,
            encoder_attention_mask=seen[:, tf.newaxis],
            use_causal_mask=True,
        )
        super().__init__(
            {tensor.name: tensor for tensor in (ids, mask, decoder_ids, decoder_mask)},
            {"encoder_sequence_output": states, "decoder_sequence_output": output},
            name=name,
            trainable=trainable,
        )
        self.config = config
        self.rematerialize = rematerialize
        self._policy = policy
        self.token_embedding = embedding
        self.soft_prompt = prompt
        self.encoder_transformer_layers, self.encoder_layer_norm = encoder
        self.decoder_transformer_layers, self.decoder_layer_norm = decoder

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, JSON values only.

        Raises:
          NotImplementedError: the model has LoRA layers, see `T5TransformerLayer`.
        """
        for layer in self.encoder_transformer_layers + self.decoder_transformer_layers:
            layer.get_config()
        return {
            "config": dataclasses.asdict(self.config),
            "dtype": self._policy.name,
            "rematerialize": self.rematerialize,
            "soft_prompt": 0 if self.soft_prompt is None else self.soft_prompt.length,
            "name": self.name,
            "trainable": self.trainable,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> T5Backbone:
        """Makes the model that `get_config` described."""
        del custom_objects  # all layers are built from the shape
        return cls(**{**config, "config": T5Config(**config["config"])})


def encoder_of(backbone: T5Backbone) -> keras.Model:
    """Returns the encoder half of a backbone, sharing its weights.

    It is a functional model from {"encoder_token_ids", "encoder_padding_mask"}, both
    [B, L] int32, to hidden states [B, P + L, hidden_dim].
    """
    names = ("encoder_token_ids", "encoder_padding_mask")
    return keras.Model(
        {name: backbone.input[name] for name in names},
        backbone.output["encoder_sequence_output"],
        name="t5_encoder",
    )


@without_autograph
def build_encoder(
    config: T5Config, dtype: str | None = None, rematerialize: bool = False
) -> keras.Model:
    """Builds a T5 encoder alone, with random weights.

    Arguments are those of `T5Backbone`; returns a model as `encoder_of` does.
    """
    ids, mask = _inputs("encoder")
    policy = _policy(dtype)
    embedded = _embedding(config, policy, tied=True)(ids)
    states, *_ = _stack(config, policy, rematerialize, "encoder", embedded, mask)
    inputs = {tensor.name: tensor for tensor in (ids, mask)}
    return keras.Model(inputs, states, name="t5_encoder")


def _stack(
    config: T5Config,
    policy: Any,
    rematerialize: bool,
    name: str,
    x: tf.Tensor,
    mask: tf.Tensor,
    **options: Any,
) -> tuple[tf.Tensor, list[T5TransformerLayer], T5LayerNorm]:
    """Runs a new "encoder" or "decoder"; returns its states, layers and final norm."""
    layers = [
        T5TransformerLayer(
            config,
            is_decoder=name == "decoder",
            use_relative_attention_bias=number == 0,
            rematerialize=rematerialize,
            dtype=policy,
            name=f"transformer_{name}_layer_{number}",
        )
        for number in range(config.num_layers)
    ]
    exact = policy.variable_dtype
    norm = T5LayerNorm(dtype=exact, name=f"{name}_output_layer_norm")
    # The head's input stays as exact as the norm made it.
    last, rate = policy if name == "encoder" else exact, config.dropout
    after = SeededDropout(rate, dtype=last, name=f"{name}_output_dropout")
    x = SeededDropout(rate, dtype=policy, name=f"{name}_embedding_dropout")(x)
    mask, bias = mask[:, tf.newaxis], None
    for layer in layers:
        x, bias = layer(x, attention_mask=mask, position_bias=bias, **options)
    return after(norm(x)), layers, norm


def _policy(dtype: str | None) -> Any:
    validation.one_of("dtype", dtype, _DTYPES)
    global_policy = keras.mixed_precision.global_policy()
    return keras.mixed_precision.Policy(dtype or global_policy.name)


def _inputs(name: str) -> tuple[tf.Tensor, tf.Tensor]:
    return tuple(
        keras.Input([None], dtype="int32", name=f"{name}_{what}")
        for what in ("token_ids", "padding_mask")
    )


def _embedding(config: T5Config, policy: Any, tied: bool) -> TokenEmbedding:
    # As T5's embedding starts (Mesh TensorFlow). In keras-nlp 0.12 1.0 is the *mean*:
    # every token is then nearly the same vector, and so is every text.
    def random(shape: Any, dtype: Any = None) -> tf.Tensor:
        return keras.initializers.TruncatedNormal(0.0, 1.0)(shape, dtype)

    embedding = TokenEmbedding(
        config.vocabulary_size,
        config.hidden_dim,
        tie_weights=tied,
        embeddings_initializer=random,
        dtype=policy,
        name="token_embedding",
    )
    with tf.name_scope(embedding.name):
        embedding.build(None)
    if not tied:  # a head of its own starts by fan-in (T5X)
        head = embedding.reverse_embeddings
        head.assign(random(head.shape, head.dtype) * config.hidden_dim**-0.5)
    return embedding


def _length(x: tf.Tensor) -> tf.Tensor | int:
    """Returns the size of the second dimension, an int if it is static."""
    return tf.shape(x)[1] if x.shape[1] is None else x.shape[1]

"""T5's encoder and decoder, built from a `T5Config`.

`T5Backbone` is keras-nlp's, weight for weight and name for name (its weight files
load), made of the layers of `t5_layers`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
from keras_nlp.src.models.t5.t5_layer_norm import T5LayerNorm
from keras_nlp.src.utils.keras_utils import gelu_approximate

from tfdpsq import validation
from tfdpsq.layers.seeded_dropout import SeededDropout
from tfdpsq.layers.soft_prompt import SoftPrompt
from tfdpsq.layers.t5 import T5Config
from tfdpsq.layers.t5_layers import T5TransformerLayer, TokenEmbedding
from tfdpsq.layers.tracing import without_autograph

_DTYPES = (None, "float32", "float64", "mixed_bfloat16")


@tf.keras.utils.register_keras_serializable("tfdpsq")
class T5Backbone(tf.keras.Model):
    """T5's encoder and decoder, without a language-model head.

    A functional model from `encoder_token_ids` [B, L], `encoder_padding_mask` [B, L],
    `decoder_token_ids` [B, T] and `decoder_padding_mask` [B, T], all int32, to
    `encoder_sequence_output` [B, P + L, hidden_dim] and `decoder_sequence_output`
    [B, T, hidden_dim]. P is the length of the soft prompt, 0 without one.

    Example:
      >>> config = T5Config(
      ...     vocabulary_size=60,
      ...     num_layers=1,
      ...     num_heads=2,
      ...     hidden_dim=16,
      ...     intermediate_dim=24,
      ...     key_value_dim=8,
      ... )
      >>> backbone = T5Backbone(config)
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
      rematerialize: whether the layers are rematerialized in training.
      token_embedding: the embedding shared by encoder and decoder; in T5 1.1 it holds
        the head's weights, too.
      soft_prompt: the `SoftPrompt` before the encoder's texts, or `None`.
      encoder_transformer_layers: the encoder's layers.
      encoder_layer_norm: the norm after them.
      decoder_transformer_layers: the decoder's layers.
      decoder_layer_norm: the norm after them.
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
          rematerialize: keep only each layer's inputs for the backward pass of
            training, and run the layer twice: less memory for about a third more time.
          soft_prompt: length P of the soft prompt (see `SoftPrompt`), 0 for none. The
            decoder attends to it, too.
          name: name of the model.
          trainable: whether the model trains.

        Raises:
          InputError: unknown dtype, or a negative length of the soft prompt.
        """
        validation.one_of("dtype", dtype, _DTYPES)
        embedding = _embedding(config, dtype, tied=config.tied)
        encoder = _Stack(config, "encoder", dtype, rematerialize)
        decoder = _Stack(config, "decoder", dtype, rematerialize)
        ids, mask = _inputs("encoder")
        prompt = None
        embedded, seen = embedding(ids), mask
        if soft_prompt:
            prompt = SoftPrompt(
                soft_prompt, dtype=embedding.dtype_policy, name="soft_prompt"
            )
            embedded, seen = prompt(embedded, seen)
        states = encoder(embedded, seen)
        decoder_ids, decoder_mask = _inputs("decoder")
        output = decoder(
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
        self._policy = encoder.policy
        self.token_embedding = embedding
        self.soft_prompt = prompt
        self.encoder_transformer_layers = encoder.layers
        self.encoder_layer_norm = encoder.norm
        self.decoder_transformer_layers = decoder.layers
        self.decoder_layer_norm = decoder.norm

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


class _Stack:
    """Layers of an encoder or of a decoder, dropout and final norm included."""

    def __init__(
        self, config: T5Config, name: str, dtype: str | None, rematerialize: bool
    ):
        policy = tf.keras.mixed_precision.Policy(
            dtype or tf.keras.mixed_precision.global_policy().name
        )
        self.policy = policy
        self.before = SeededDropout(
            config.dropout, dtype=policy, name=f"{name}_embedding_dropout"
        )
        self.layers = [
            T5TransformerLayer(
                is_decoder=name == "decoder",
                hidden_dim=config.hidden_dim,
                intermediate_dim=config.intermediate_dim,
                key_value_dim=config.key_value_dim,
                dropout=config.dropout,
                activation="relu" if config.version == "1.0" else gelu_approximate,
                num_heads=config.num_heads,
                use_gated_activation=config.version != "1.0",
                use_relative_attention_bias=number == 0,
                rematerialize=rematerialize,
                dtype=policy,
                name=f"transformer_{name}_layer_{number}",
            )
            for number in range(config.num_layers)
        ]
        self.norm = T5LayerNorm(
            dtype=policy.variable_dtype, name=f"{name}_output_layer_norm"
        )
        # The head's input stays as exact as the norm made it.
        self.after = SeededDropout(
            config.dropout,
            dtype=policy if name == "encoder" else policy.variable_dtype,
            name=f"{name}_output_dropout",
        )

    def __call__(self, x: tf.Tensor, mask: tf.Tensor, **options: Any) -> tf.Tensor:
        x = self.before(x)
        bias = None
        for layer in self.layers:
            x, bias = layer(
                x, attention_mask=mask[:, tf.newaxis], position_bias=bias, **options
            )
        return self.after(self.norm(x))


def _inputs(name: str) -> tuple[tf.Tensor, tf.Tensor]:
    return tuple(
        tf.keras.Input([None], dtype="int32", name=f"{name}_{what}")
        for what in ("token_ids", "padding_mask")
    )


def _embedding(config: T5Config, dtype: str | None, tied: bool) -> TokenEmbedding:
    embedding = TokenEmbedding(
        config.vocabulary_size,
        config.hidden_dim,
        tie_weights=tied,
        embeddings_initializer=_deviation_one,
        dtype=dtype,
        name="token_embedding",
    )
    with tf.name_scope(embedding.name):
        embedding.build(None)
    if not tied:  # a head of its own starts by fan-in (T5X)
        head = embedding.reverse_embeddings
        head.assign(_deviation_one(head.shape, head.dtype) * config.hidden_dim**-0.5)
    return embedding


def _deviation_one(shape: Any, dtype: Any = None) -> tf.Tensor:
    # As T5's embedding starts (Mesh TensorFlow). keras-nlp 0.12 uses
    # TruncatedNormal(1.0), whose first argument is the *mean*: every token is then
    # nearly the same vector of ones, and so is every text.
    return tf.keras.initializers.TruncatedNormal(0.0, 1.0)(shape, dtype)


def encoder_of(backbone: T5Backbone) -> tf.keras.Model:
    """Returns the encoder half of a backbone, sharing its weights.

    Args:
      backbone: the whole model.

    Returns:
      A functional model from {"encoder_token_ids", "encoder_padding_mask"},
      both [B, L] int32, to hidden states [B, P + L, hidden_dim].
    """
    names = ("encoder_token_ids", "encoder_padding_mask")
    return tf.keras.Model(
        {name: backbone.input[name] for name in names},
        backbone.output["encoder_sequence_output"],
        name="t5_encoder",
    )


@without_autograph
def build_encoder(
    config: T5Config, dtype: str | None = None, rematerialize: bool = False
) -> tf.keras.Model:
    """Builds a T5 encoder alone, with random weights.

    It has no language-model head: an encoder never uses one, and a trainable weight
    without a gradient would distort every count of parameters.

    Args:
      config: the shape to build.
      dtype: see `T5Backbone`.
      rematerialize: see `T5Backbone`.

    Returns:
      A functional model as `encoder_of` returns.

    Raises:
      InputError: unknown dtype.
    """
    validation.one_of("dtype", dtype, _DTYPES)
    ids, mask = _inputs("encoder")
    stack = _Stack(config, "encoder", dtype, rematerialize)
    return tf.keras.Model(
        {tensor.name: tensor for tensor in (ids, mask)},
        stack(_embedding(config, dtype, tied=True)(ids), mask),
        name="t5_encoder",
    )

"""`T5QueryGenerator`: keras-nlp's T5 backbone with the language-model head."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import files
from tfdpsq.layers import t5

CONFIG_FILE = "t5_config.json"
WEIGHTS_FILE = "generator.weights.h5"


class T5QueryGenerator(tf.keras.Model):
    """Document in, query out: a T5 encoder–decoder with its head.

    The backbone is keras-nlp's; it has no head, and leaves out the factor
    hidden_dim^-0.5 that T5 1.0 puts before its tied head (Raffel et al. 2020,
    and the Mesh TensorFlow code). T5 1.1 has a head of its own and no factor.
    """

    def __init__(self, config: t5.T5Config, **kwargs):
        """Builds the model with random weights.

        Args:
          config: the T5 shape.
          **kwargs: passed on to `tf.keras.Model`.
        """
        super().__init__(**kwargs)
        self.config = config
        self.backbone = t5.build_backbone(config)
        self.encoder = t5.encoder_of(self.backbone)

    def head(self, hidden: tf.Tensor) -> tf.Tensor:
        """Decoder states to logits.

        Args:
          hidden: [..., hidden_dim].

        Returns:
          [..., vocabulary_size] float32.
        """
        if self.config.tied:
            hidden *= tf.cast(self.config.hidden_dim**-0.5, hidden.dtype)
        logits = self.backbone.token_embedding(hidden, reverse=True)
        return tf.cast(logits, tf.float32)

    def call(self, inputs: Mapping[str, tf.Tensor], training: bool = False):
        """Teacher-forced logits.

        Args:
          inputs: "document_ids" [B, L] int32 padded with 0, "document_lengths"
            [B] int32, "query_ids" [B, T] int32 padded with 0 and ending in EOS,
            "query_lengths" [B] int32.
          training: whether dropout is on.

        Returns:
          [B, T, vocabulary_size] float32; position t predicts query token t.
        """
        targets = inputs["query_ids"]
        # The decoder starts with the padding id, as T5 does.
        shifted = tf.pad(targets[:, :-1], [[0, 0], [1, 0]])
        states = self.backbone(
            {
                "encoder_token_ids": inputs["document_ids"],
                "encoder_padding_mask": _mask(
                    inputs["document_ids"], inputs["document_lengths"]
                ),
                "decoder_token_ids": shifted,
                # By length, not by id: the first decoder token has the padding id.
                "decoder_padding_mask": _mask(shifted, inputs["query_lengths"]),
            },
            training=training,
        )
        return self.head(states["decoder_sequence_output"])

    def row_losses(
        self, inputs: Mapping[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        """Each row's cross-entropy, averaged over its real query tokens.

        The average is per row, not over the batch, so that one row's loss and
        gradient depend on that row alone.

        Args:
          inputs: as for `call`.
          training: whether dropout is on.

        Returns:
          [B] float32, nats per token.
        """
        logits = self(inputs, training=training)
        token_losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=inputs["query_ids"], logits=logits
        )
        mask = tf.cast(_mask(inputs["query_ids"], inputs["query_lengths"]), tf.float32)
        tokens = tf.maximum(tf.reduce_sum(mask, axis=1), 1.0)
        return tf.reduce_sum(token_losses * mask, axis=1) / tokens

    def encode(self, document_ids: tf.Tensor, document_mask: tf.Tensor) -> tf.Tensor:
        """Encoder states, without dropout.

        Args:
          document_ids: [B, L] int32.
          document_mask: [B, L] int32, 1 for real tokens.

        Returns:
          [B, L, hidden_dim].
        """
        return self.encoder(
            {
                "encoder_token_ids": document_ids,
                "encoder_padding_mask": document_mask,
            },
            training=False,
        )

    def save(self, directory: str | os.PathLike) -> None:
        """Writes config and weights into an existing directory."""
        directory = pathlib.Path(directory)
        files.atomic_write(directory / CONFIG_FILE, self.config.to_json())
        self.backbone.save_weights(directory / WEIGHTS_FILE)

    @classmethod
    def load(cls, directory: str | os.PathLike) -> T5QueryGenerator:
        """Reads what `save` wrote.

        Raises:
          InputError: the directory holds no saved generator.
        """
        directory = pathlib.Path(directory)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (directory / name).is_file():
                raise validation.InputError(
                    f"{directory} has no {name}: it holds no saved generator. "
                    "Give the directory that finetune wrote."
                )
        model = cls(t5.T5Config.from_json((directory / CONFIG_FILE).read_text()))
        model.backbone.load_weights(directory / WEIGHTS_FILE)
        return model


def _mask(ids: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    return tf.sequence_mask(lengths, ids.shape[1] or tf.shape(ids)[1], tf.int32)

"""`T5QueryGenerator`: keras-nlp's T5 backbone with the language-model head."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.generator import checkpoints
from tfdpsq.generator.checkpoints import huggingface
from tfdpsq.layers import T5Backbone, T5Config, encoder_of


class T5QueryGenerator(tf.keras.Model):
    """Document in, query out: a T5 encoder–decoder with its head.

    The backbone is keras-nlp's; it has no head, and leaves out the factor
    hidden_dim^-0.5 that T5 1.0 puts before its tied head (Raffel et al. 2020,
    and the Mesh TensorFlow code). T5 1.1 has a head of its own and no factor.

    Attributes:
      config: the T5 shape.
      backbone: encoder and decoder; see `layers.T5Backbone`.
      encoder: the encoder alone, sharing its weights; what it returns begins with the
        states of the soft prompt, if there is one.
    """

    def __init__(
        self,
        config: T5Config,
        dtype: str | None = None,
        rematerialize: bool = False,
        soft_prompt: int = 0,
    ):
        """Builds the model with random weights, float32 whatever it computes in.

        Args:
          config: the T5 shape.
          dtype: "float32" or "mixed_bfloat16"; see `layers.T5Backbone`.
          rematerialize: train in less memory and more time; see there.
          soft_prompt: how many trained vectors stand before every document, P; see
            there. They start at random; see `start_soft_prompt`.

        Raises:
          InputError: another dtype, or a soft prompt of a length that is none.
        """
        super().__init__()
        self.config = config
        self.backbone = T5Backbone(config, dtype, rematerialize, soft_prompt)
        self.encoder = encoder_of(self.backbone)

    def start_soft_prompt(self, token_ids: Sequence[int]) -> None:
        """Makes the soft prompt the embeddings of words of the vocabulary.

        Args:
          token_ids: P ids.

        Raises:
          InputError: there is no soft prompt, or it is not of that length; or an id
            has no embedding.
        """
        prompt = self.backbone.soft_prompt
        length = 0 if prompt is None else prompt.length
        if prompt is None or len(token_ids) != length:
            raise validation.InputError(
                f"{len(token_ids)} token ids were given for a soft prompt of {length} "
                "vectors. Give one for each, to a generator that was made with one."
            )
        for token in token_ids:
            validation.in_range("token id", token, 0, self.config.vocabulary_size - 1)
        embeddings = self.backbone.token_embedding.embeddings
        prompt.vectors.assign(tf.gather(embeddings, list(token_ids)))

    def head(self, hidden: tf.Tensor) -> tf.Tensor:
        """Decoder states to logits.

        Args:
          hidden: [..., hidden_dim].

        Returns:
          [..., vocabulary_size] float32.
        """
        # In the weights' own precision also under mixed precision: differences of
        # logits decide, and the largest are tens.
        hidden = tf.cast(hidden, self.backbone.token_embedding.variable_dtype)
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
        return self.head(self.states(inputs, training)["decoder_sequence_output"])

    def states(
        self, inputs: Mapping[str, tf.Tensor], training: bool = False
    ) -> dict[str, tf.Tensor]:
        """What encoder and decoder end in, teacher-forced.

        Args:
          inputs: as for `call`.
          training: whether dropout is on.

        Returns:
          "encoder_sequence_output" [B, L, hidden_dim], of the document's own tokens,
          and "decoder_sequence_output" [B, T, hidden_dim].
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
        prompt = self.backbone.soft_prompt
        if prompt is not None:
            encoded = states["encoder_sequence_output"][:, prompt.length :]
            states = {**states, "encoder_sequence_output": encoded}
        return states

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
        return row_losses_of(self(inputs, training=training), inputs)

    def encode(self, document_ids: tf.Tensor, document_mask: tf.Tensor) -> tf.Tensor:
        """Encoder states, without dropout.

        Args:
          document_ids: [B, L] int32.
          document_mask: [B, L] int32, 1 for real tokens.

        Returns:
          [B, P + L, hidden_dim], the soft prompt's states first.
        """
        return self.encoder(
            {
                "encoder_token_ids": document_ids,
                "encoder_padding_mask": document_mask,
            },
            training=False,
        )

    def save(
        self,
        directory: str | os.PathLike,
        vocabulary: str | os.PathLike | None = None,
    ) -> None:
        """Writes the model in Hugging Face's layout, which `transformers` loads too.

        Args:
          directory: an existing directory, for `config.json`, `model.safetensors`,
            and `soft_prompt.safetensors`, which `transformers` knows nothing of.
          vocabulary: its SentencePiece model, to lie there as `spiece.model`.

        Raises:
          InputError: a weight is NaN or infinite, or the vocabulary does not fit.
        """
        huggingface.save(directory, self.config, self.backbone, vocabulary=vocabulary)

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike,
        dtype: str | None = None,
        rematerialize: bool = False,
        soft_prompt: int | None = None,
    ) -> T5QueryGenerator:
        """Loads what `save` wrote, or any other T5 checkpoint.

        Args:
          directory: see `checkpoints.open_checkpoint`.
          dtype: see `__init__`.
          rematerialize: see `__init__`.
          soft_prompt: how many vectors its soft prompt is to have, by default as many
            as the checkpoint's. One that the checkpoint lacks starts at random.

        Raises:
          InputError: no T5 checkpoint is there, or it is not complete; or it holds a
            soft prompt of another length.
        """
        checkpoint = checkpoints.open_checkpoint(directory)
        length = checkpoint.soft_prompt_length(soft_prompt)
        model = cls(checkpoint.config, dtype, rematerialize, length)
        checkpoint.load_into(model.backbone)
        return model


def row_losses_of(logits: tf.Tensor, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Each row's cross-entropy from logits; see `T5QueryGenerator.row_losses`."""
    token_losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=inputs["query_ids"], logits=logits
    )
    mask = tf.cast(_mask(inputs["query_ids"], inputs["query_lengths"]), tf.float32)
    tokens = tf.maximum(tf.reduce_sum(mask, axis=1), 1.0)
    return tf.reduce_sum(token_losses * mask, axis=1) / tokens


def _mask(ids: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    return tf.sequence_mask(lengths, ids.shape[1] or tf.shape(ids)[1], tf.int32)

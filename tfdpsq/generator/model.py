"""`T5QueryGenerator`: keras-nlp's T5 backbone with the language-model head."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data.texts import Document
from tfdpsq.data.tokenization import PROMPT, Tokenizer
from tfdpsq.generator import checkpoints, decoding
from tfdpsq.generator.checkpoints import huggingface
from tfdpsq.generator.decoding import decodable_logits_mask
from tfdpsq.generator.sampling import SamplingConfig
from tfdpsq.generator.synthesis import SynthesisConfig, row_uniforms, synthesize
from tfdpsq.layers import T5Backbone, T5Config, encoder_of
from tfdpsq.layers.softmax import cross_entropy
from tfdpsq.layers.tracing import without_autograph

# Special ids, the same in every T5.
_PAD, _EOS, _UNKNOWN = 0, 1, 2


@tf.keras.utils.register_keras_serializable("tfdpsq")
class T5QueryGenerator(tf.keras.Model):
    """A T5 encoder–decoder with its head: document in, query out.

    The backbone is keras-nlp's; it has no head, and omits the factor hidden_dim^-0.5
    that T5 1.0 applies before its tied head (Raffel et al. 2020, and the Mesh
    TensorFlow code). T5 1.1 has a head of its own and no factor.

    Example:
      >>> config = T5Config(
      ...     vocabulary_size=60,
      ...     num_layers=1,
      ...     num_heads=2,
      ...     hidden_dim=16,
      ...     intermediate_dim=24,
      ...     key_value_dim=8,
      ... )
      >>> model = T5QueryGenerator(config)
      >>> batch = {
      ...     "document_ids": tf.constant([[7, 8, 9, 1]]),
      ...     "document_lengths": tf.constant([4]),
      ...     "query_ids": tf.constant([[5, 6, 1]]),
      ...     "query_lengths": tf.constant([3]),
      ... }
      >>> model(batch).shape
      TensorShape([1, 3, 60])
      >>> model.per_example_losses(batch).shape
      TensorShape([1])
      >>> model.generate(batch["document_ids"], max_new_tokens=5).shape
      TensorShape([1, 5])

    Attributes:
      config: the T5 shape.
      backbone: encoder and decoder; see `layers.T5Backbone`.
      encoder: the encoder alone, sharing its weights; its output begins with the
        states of the soft prompt, if there is one.
    """

    def __init__(
        self,
        config: T5Config,
        dtype: str | None = None,
        rematerialize: bool = False,
        soft_prompt: int = 0,
        **kwargs: Any,
    ) -> None:
        """Builds the model with random float32 weights.

        Args:
          config: the T5 shape.
          dtype: "float32" or "mixed_bfloat16"; see `layers.T5Backbone`.
          rematerialize: train in less memory and more time; see there.
          soft_prompt: length P of the soft prompt before every document, 0 for none;
            see there. It starts at random; see `start_soft_prompt`.
          **kwargs: `name` and `trainable`, as for `tf.keras.Model`.

        Raises:
          InputError: unknown dtype, or a negative length of the soft prompt.
        """
        super().__init__(**kwargs)
        self.config = config
        self.backbone = T5Backbone(config, dtype, rematerialize, soft_prompt)
        self.encoder = encoder_of(self.backbone)
        self.built = True

    def start_soft_prompt(self, token_ids: Sequence[int]) -> None:
        """Sets the soft prompt to the embeddings of words of the vocabulary.

        Args:
          token_ids: P ids.

        Raises:
          InputError: there is no soft prompt, or it has another length; or an id has
            no embedding.
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
        """Computes logits from decoder states.

        Args:
          hidden: [..., hidden_dim].

        Returns:
          [..., vocabulary_size] float32.
        """
        # In float32 also under mixed precision: small differences between logits
        # decide, and logits reach tens.
        hidden = tf.cast(hidden, self.backbone.token_embedding.variable_dtype)
        if self.config.tied:
            hidden *= tf.cast(self.config.hidden_dim**-0.5, hidden.dtype)
        logits = self.backbone.token_embedding(hidden, reverse=True)
        return tf.cast(logits, tf.float32)

    @without_autograph
    def call(self, inputs: Mapping[str, tf.Tensor], training: bool = False) -> Any:
        """Computes teacher-forced logits.

        Args:
          inputs: "document_ids" [B, L] int32 padded with 0, "document_lengths"
            [B] int32, "query_ids" [B, T] int32 padded with 0 and ending in EOS,
            "query_lengths" [B] int32.
          training: whether dropout is on.

        Returns:
          [B, T, vocabulary_size] float32; position t predicts query token t.
        """
        return self.head(self.states(inputs, training)["decoder_sequence_output"])

    @without_autograph
    def states(
        self, inputs: Mapping[str, tf.Tensor], training: bool = False
    ) -> dict[str, tf.Tensor]:
        """Computes the final states of encoder and decoder, teacher-forced.

        Args:
          inputs: as for `call`.
          training: whether dropout is on.

        Returns:
          "encoder_sequence_output" [B, L, hidden_dim], without the soft prompt's
          states, and "decoder_sequence_output" [B, T, hidden_dim].
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

    @without_autograph
    def per_example_losses(
        self, inputs: Mapping[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        """Computes each example's cross-entropy, averaged over its real query tokens.

        The average is per example, not over the batch, so that one example's loss and
        gradient depend on that example alone.

        Args:
          inputs: as for `call`.
          training: whether dropout is on.

        Returns:
          [B] float32, nats per token.
        """
        return losses_from_logits(self(inputs, training=training), inputs)

    @without_autograph
    def encode(self, document_ids: tf.Tensor, document_mask: tf.Tensor) -> tf.Tensor:
        """Computes encoder states, without dropout.

        Args:
          document_ids: [B, L] int32.
          document_mask: [B, L] int32, 1 for real tokens.

        Returns:
          [B, P + L, hidden_dim], the soft prompt's states first.
        """
        return self.encoder(
            {"encoder_token_ids": document_ids, "encoder_padding_mask": document_mask},
            training=False,
        )

    def generate(
        self,
        documents: Sequence[str] | tf.Tensor,
        max_new_tokens: int = 32,
        *,
        tokenizer: Tokenizer | None = None,
        num_return_sequences: int = 1,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
        document_length: int = 384,
        prompt: str = PROMPT,
    ) -> list[str] | tf.Tensor:
        """Writes queries for documents, by the cached decoder.

        Every call traces a graph, which takes seconds. Use `synthesize` for a corpus:
        it writes the same queries for texts, as a stream. Post-processing costs no
        privacy, so the seed need not be secret.

        Args:
          documents: D texts, or [D, L] integer token ids padded with 0, prompt
            included.
          max_new_tokens: most tokens of a query, T, EOS included.
          tokenizer: the model's tokenizer; required for texts.
          num_return_sequences: queries per document, k.
          sampling: sampling of tokens; `None` is `SamplingConfig()`.
          seed: seed of the draws.
          document_length: tokens kept of prompt and document; for texts only.
          prompt: text before every document; for texts only.

        Returns:
          k queries for each document in turn: D·k texts for texts, and [D·k, T] int32
          token ids, 0 after the end, for token ids.

        Raises:
          InputError: texts without a tokenizer, a tokenizer that does not fit the
            model, token ids of another shape or with padding before a token, or a
            number below 1.
        """
        config = SynthesisConfig(
            samples_per_document=num_return_sequences,
            document_length=document_length,
            query_length=max_new_tokens,
            seed=seed,
            sampling=sampling or SamplingConfig(),
            prompt=prompt,
        )
        if isinstance(documents, str):
            documents = [documents]
        if len(documents) and all(isinstance(text, str) for text in documents):
            if tokenizer is None:
                raise validation.InputError(
                    "tokenizer is None, but the documents are texts. Pass the model's "
                    "Tokenizer, or token ids."
                )
            numbered = (Document(str(i), "", text) for i, text in enumerate(documents))
            return [row.query for row in synthesize(self, tokenizer, numbered, config)]
        return self._generate_ids(np.asarray(documents), config, tokenizer)

    def _generate_ids(
        self, ids: np.ndarray, config: SynthesisConfig, tokenizer: Tokenizer | None
    ) -> tf.Tensor:
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
            raise validation.InputError(
                f"documents has shape {list(ids.shape)} and dtype {ids.dtype}; give a "
                "list of texts, or token ids [D, L]."
            )
        lengths = (ids != _PAD).sum(axis=1)
        if (ids[np.arange(ids.shape[1]) < lengths[:, np.newaxis]] == _PAD).any():
            raise validation.InputError(
                "documents has padding (0) before a token; pad on the right."
            )
        size = self.config.vocabulary_size
        if tokenizer is None:
            mask, end = decodable_logits_mask(size, size, (_PAD, _UNKNOWN)), _EOS
        else:
            pad, end = tokenizer.pad_id, tokenizer.eos_id
            mask = decodable_logits_mask(
                size, tokenizer.vocabulary_size, (pad, tokenizer.unk_id)
            )
        uniforms = [
            row_uniforms(config.seed, str(document), sample, config.query_length)
            for document in range(len(ids))
            for sample in range(config.samples_per_document)
        ]
        run = tf.function(
            lambda: decoding.generate(
                self,
                tf.constant(ids, tf.int32),
                tf.constant(lengths, tf.int32),
                tf.constant(np.stack(uniforms)),
                config.sampling,
                mask,
                end,
            )[0],
            autograph=False,
        )
        return run()

    def save_to_preset(
        self, directory: str | os.PathLike, vocabulary: str | os.PathLike | None = None
    ) -> None:
        """Writes the weights in Hugging Face's layout, for `from_preset`.

        `transformers` reads it, too. LoRA's updates are added to the kernels. For one
        file with everything that Keras knows of the model, use `save("x.keras")`.

        Args:
          directory: an existing directory, for `config.json`, `model.safetensors`,
            and `soft_prompt.safetensors`, which `transformers` ignores.
          vocabulary: the SentencePiece model, to be copied as `spiece.model`.

        Raises:
          InputError: a weight is NaN or infinite, or the vocabulary does not fit.
        """
        huggingface.save(directory, self.config, self.backbone, vocabulary=vocabulary)

    @classmethod
    def from_preset(
        cls,
        preset: str | os.PathLike,
        dtype: str | None = None,
        rematerialize: bool = False,
        soft_prompt: int | None = None,
    ) -> T5QueryGenerator:
        """Makes a generator from a preset's name or any T5 checkpoint.

        Args:
          preset: a directory that `save_to_preset` wrote, a Hugging Face, keras-nlp or
            T5X checkpoint, or a name; see `checkpoints.open_checkpoint`.
          dtype: see `__init__`.
          rematerialize: see `__init__`.
          soft_prompt: length of the soft prompt; `None` is the checkpoint's. A prompt
            that the checkpoint lacks starts at random.

        Raises:
          InputError: no complete T5 checkpoint is there, or its soft prompt has
            another length.
        """
        checkpoint = checkpoints.open_checkpoint(preset)
        length = checkpoint.soft_prompt_length(soft_prompt)
        model = cls(checkpoint.config, dtype, rematerialize, length)
        checkpoint.load_into(model.backbone)
        return model

    def build(self, input_shape: Any = None) -> None:
        """Does nothing: the constructor creates all weights."""
        self.built = True

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, JSON values only.

        Raises:
          NotImplementedError: the model has LoRA layers, see `T5TransformerLayer`.
        """
        config = self.backbone.get_config()
        return {**config, "name": self.name, "trainable": self.trainable}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> T5QueryGenerator:
        """Makes the model that `get_config` described."""
        del custom_objects  # all layers are built from the shape
        return cls(**{**config, "config": T5Config(**config["config"])})


def losses_from_logits(logits: tf.Tensor, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Computes the losses of `T5QueryGenerator.per_example_losses` from logits."""
    losses = cross_entropy(inputs["query_ids"], logits)
    mask = tf.cast(_mask(inputs["query_ids"], inputs["query_lengths"]), tf.float32)
    tokens = tf.maximum(tf.reduce_sum(mask, axis=1), 1.0)
    return tf.reduce_sum(losses * mask, axis=1) / tokens


def _mask(ids: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    return tf.sequence_mask(lengths, ids.shape[1] or tf.shape(ids)[1], tf.int32)

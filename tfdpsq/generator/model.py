"""`T5QueryGenerator`: T5 as a Keras model that is fine-tuned and writes queries."""

from __future__ import annotations

import functools
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.data.sets import SyntheticQuery
from tfdpsq.data.texts import Document
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator import checkpoints, decoding, generation
from tfdpsq.generator.checkpoints import huggingface, keras_preset
from tfdpsq.generator.preprocessing import QUERY_LENGTH, Preprocessor
from tfdpsq.generator.samplers import Sampler, TopP
from tfdpsq.layers import T5Backbone, T5Config, dropout_seed, encoder_of
from tfdpsq.layers.seeded_dropout import seed_of_step
from tfdpsq.layers.softmax import cross_entropy
from tfdpsq.layers.tracing import without_autograph

PREPROCESSOR_FILE = "query_generator.json"


@tf.keras.utils.register_keras_serializable("tfdpsq")
class QueryLoss(tf.keras.losses.Loss):
    """Cross-entropy of each query, averaged over its tokens, in nats per token.

    The average is per example, not over the batch, so that one example's loss and
    gradient depend on that example alone. Targets are token ids [B, T], 0 for padding;
    predictions are logits [B, T, V] float32.
    """

    @without_autograph
    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns [B] float32."""
        losses = cross_entropy(y_true, y_pred)
        mask = tf.cast(tf.not_equal(y_true, decoding.PAD), losses.dtype)
        tokens = tf.maximum(tf.reduce_sum(mask, axis=1), 1.0)
        return tf.reduce_sum(losses * mask, axis=1) / tokens


@tf.keras.utils.register_keras_serializable("tfdpsq")
class T5QueryGenerator(tf.keras.Model):
    """A T5 encoder–decoder with its head: document in, query out.

    The backbone is keras-nlp's; it has no head, and omits the factor hidden_dim^-0.5
    that T5 1.0 applies before its tied head (Raffel et al. 2020, and the Mesh
    TensorFlow code). T5 1.1 has a head of its own and no factor.

    Example:
      >>> from tfdpsq.data import Pair
      >>> model = T5QueryGenerator.from_preset("t5_tiny_pydocs")
      >>> pairs = [Pair("q", "sort a list", "d", "Return a new sorted list.")]
      >>> model.compile(tf.keras.optimizers.Adam(1e-3))
      >>> history = model.fit(model.preprocessor(pairs).batch(1), verbose=0)
      >>> len(model.generate(["Return the largest item."], max_length=8, seed=1))
      1

    Attributes:
      config: the T5 shape.
      preprocessor: prompt, vocabulary and lengths; `None` for a model of token ids.
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
        preprocessor: Preprocessor | None = None,
        **kwargs: Any,
    ) -> None:
        """Builds the model with random float32 weights.

        Args:
          config: the T5 shape.
          dtype: "float32" or "mixed_bfloat16"; see `layers.T5Backbone`.
          rematerialize: train in less memory and more time; see there.
          soft_prompt: length P of the soft prompt before every document, 0 for none;
            see there. It starts at random.
          preprocessor: see the class.
          **kwargs: `name` and `trainable`, as for `tf.keras.Model`.

        Raises:
          InputError: unknown dtype, or a negative length of the soft prompt.
        """
        super().__init__(**kwargs)
        self.config = config
        self.preprocessor = preprocessor
        self.backbone = T5Backbone(config, dtype, rematerialize, soft_prompt)
        self.encoder = encoder_of(self.backbone)
        self.built = True
        self._seed = 0
        self._writer = functools.lru_cache(4)(self._new_writer)

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
        """Computes the `QueryLoss` of each example.

        Args:
          inputs: as for `call`.
          training: whether dropout is on.

        Returns:
          [B] float32, nats per token.
        """
        return QueryLoss().call(inputs["query_ids"], self(inputs, training=training))

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

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Sets what `fit` trains with; see `tf.keras.Model.compile`.

        Args:
          optimizer: any of Keras.
          loss: `None` is `QueryLoss`.
          seed: of dropout, which depends on it, the step and the row's place in the
            batch alone: a `fit` that goes on from a backup drops the same units.
          **options: see `tf.keras.Model.compile`.
        """
        self._seed = seed
        super().compile(optimizer, QueryLoss() if loss is None else loss, **options)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded model as it was when it was saved."""
        self.compile(**tf.keras.saving.deserialize_keras_object(config))
        self.optimizer.build(self.trainable_variables)

    @without_autograph
    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Takes one step on (inputs, labels), or with sample weights besides."""
        x, y, weights = tf.keras.utils.unpack_x_y_sample_weight(data)
        seed = seed_of_step(self._seed, self.optimizer.iterations)
        with tf.GradientTape() as tape, dropout_seed(seed):
            logits = self(x, training=True)
            loss = self.compute_loss(x, y, logits, weights)
        descend(self.optimizer, tape, loss, self.trainable_variables)
        return self.compute_metrics(x, y, logits, weights)

    def generate(
        self,
        documents: Sequence[str] | np.ndarray | tf.Tensor,
        sampler: Sampler | None = None,
        max_length: int | None = None,
        seed: int = 0,
        *,
        samples: int = 1,
        batch_size: int = 64,
        jit_compile: bool = False,
    ) -> list[str] | np.ndarray:
        """Writes queries for documents, in batches, by the cached decoder.

        It reads the weights when it is called, and compiles once for the same sampler,
        lengths and sizes. Post-processing costs no privacy, so the seed need not be
        secret.

        Args:
          documents: D texts, or [D, L] integer token ids padded with 0, prompt
            included.
          sampler: draws tokens: `TopP`, `TopK` or `Greedy`; `None` is `TopP(0.8)`.
          max_length: most tokens of a query, T, EOS included; `None` is the
            preprocessor's `query_length`.
          seed: any integer.
          samples: queries per document, k.
          batch_size: queries decoded at a time, approximately.
          jit_compile: compile with XLA, once for each of a few lengths of document.

        Returns:
          k queries for each document in turn: D·k texts for texts, and [D·k, T] int32
          token ids, 0 after the end, for token ids.

        Raises:
          InputError: texts without a preprocessor, token ids of another shape or with
            padding before a token, or a number below 1.
        """
        if isinstance(documents, str):
            documents = [documents]
        options: dict[str, Any] = {
            "samples": validation.positive_integer("samples", samples),
            "batch_size": min(batch_size, max(1, len(documents)) * samples),
            "jit_compile": jit_compile,
        }
        if len(documents) and all(isinstance(one, str) for one in documents):
            numbered = (Document(str(i), "", text) for i, text in enumerate(documents))
            rows = self.write_queries(numbered, sampler, max_length, seed, **options)
            return [row.query for row in rows]
        ids, lengths = _checked_ids(np.asarray(documents))
        writer = self._writer_of(sampler, max_length, **options)
        requests = (
            request
            for i, (row, length) in enumerate(zip(ids, lengths))
            for request in generation.requests_of(
                Document(str(i), "", ""), row[:length], samples, writer.samples
            )
        )
        return np.stack([row for _, rows in writer(requests, seed) for row in rows])

    def write_queries(
        self,
        documents: Iterable[Document] | Iterable[tuple[Document, int]],
        sampler: Sampler | None = None,
        max_length: int | None = None,
        seed: int = 0,
        *,
        first: int = 0,
        on_batch: Callable[[int, int], None] | None = None,
        samples: int = 1,
        **options: Any,
    ) -> Iterator[SyntheticQuery]:
        """Writes synthetic queries for a corpus; the other arguments as in `generate`.

        Args:
          documents: public documents, read as a stream; each by itself, or with the
            number of its queries instead of `samples`.
          sampler: see `generate`.
          max_length: see `generate`.
          seed: see `generate`.
          first: number of documents of the corpus before these.
          on_batch: called after every batch with its number of queries and of tokens;
            the queries are yielded later, in order.
          samples: see `generate`.
          **options: see `generate`.

        Returns:
          One `SyntheticQuery` for each document and sample, in order, numbered `genQ0`,
          `genQ1`, … as in the whole corpus. Its text may be empty; `write_synthetic`
          skips and counts such rows.

        Raises:
          InputError: the model has no preprocessor that fits it, or a number below 1.
        """
        if self.preprocessor is None:
            raise validation.InputError(
                "the model has no preprocessor. Set model.preprocessor to a "
                "Preprocessor with its vocabulary, or give token ids."
            )
        writer = self._writer_of(sampler, max_length, samples, **options)
        counted = (d if isinstance(d, tuple) else (d, samples) for d in documents)
        requests = generation.tokenized(counted, self.preprocessor, writer.samples)
        written = writer(requests, seed, self.preprocessor.decode, on_batch)
        return generation.numbered(written, first * samples)

    def _writer_of(
        self,
        sampler: Sampler | None,
        max_length: int | None,
        samples: int,
        batch_size: int = 64,
        jit_compile: bool = False,
    ) -> generation.Writer:
        pieces, most = self.config.vocabulary_size, QUERY_LENGTH
        if self.preprocessor is not None:
            self.preprocessor.tokenizer.require_embeddings(pieces)
            pieces = self.preprocessor.tokenizer.vocabulary_size
            most = self.preprocessor.query_length
        length = most if max_length is None else max_length
        sizes = {"max_length": length, "samples": samples, "batch_size": batch_size}
        for name, value in sizes.items():
            validation.positive_integer(name, value)
        # LoRA replaces layers: what was compiled before would have the old ones.
        weights = tuple(map(id, self.weights))
        place = (tf.distribute.get_strategy(), weights)
        return self._writer(
            place, sampler or TopP(), *sizes.values(), pieces, jit_compile
        )

    def _new_writer(self, place: Any, *arguments: Any) -> generation.Writer:
        del place  # only tells writers apart
        return generation.Writer(self, *arguments)

    def save_to_preset(
        self, directory: str | os.PathLike, vocabulary: str | os.PathLike | None = None
    ) -> None:
        """Writes weights, vocabulary, prompt and lengths, for `from_preset`.

        The layout is a keras-nlp preset's: it loads as `keras_nlp.models.Backbone`,
        too, without a soft prompt. LoRA's updates are added to the kernels. For one
        file with everything that Keras knows of the model, use `save("x.keras")`.

        Args:
          directory: an existing directory.
          vocabulary: the SentencePiece model; `None` is the preprocessor's.

        Raises:
          InputError: a weight is NaN or infinite, or the vocabulary does not fit.
        """
        self._save(keras_preset, directory, vocabulary)

    def save_to_huggingface(
        self, directory: str | os.PathLike, vocabulary: str | os.PathLike | None = None
    ) -> None:
        """Writes the model for `transformers` and `from_preset`.

        See `save_to_preset`; the two need a directory each.
        """
        self._save(huggingface, directory, vocabulary)

    def _save(
        self,
        form: Any,
        directory: str | os.PathLike,
        vocabulary: str | os.PathLike | None,
    ) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            if vocabulary is None and self.preprocessor is not None:
                vocabulary = pathlib.Path(scratch, VOCABULARY_FILE)
                vocabulary.write_bytes(self.preprocessor.tokenizer.model)
            form.save(directory, self.config, self.backbone, vocabulary=vocabulary)
        if self.preprocessor is not None:
            path = pathlib.Path(directory, PREPROCESSOR_FILE)
            io.write_json(path, self.preprocessor.get_config())

    @classmethod
    def from_preset(
        cls,
        preset: str | os.PathLike,
        dtype: str | None = None,
        rematerialize: bool = False,
        soft_prompt: int | None = None,
        **preprocessing: Any,
    ) -> T5QueryGenerator:
        """Makes a generator from a preset's name or any T5 checkpoint.

        Args:
          preset: a directory that `save_to_preset` wrote, a Hugging Face, keras-nlp or
            T5X checkpoint, or a name; see `checkpoints.open_checkpoint`.
          dtype: see `__init__`.
          rematerialize: see `__init__`.
          soft_prompt: length of the soft prompt; `None` is the checkpoint's. A prompt
            that the checkpoint lacks starts at random.
          **preprocessing: arguments of `Preprocessor` to use instead of the preset's.
            Without a vocabulary in the preset or here, the model has no preprocessor.

        Raises:
          InputError: no complete T5 checkpoint is there, or its soft prompt has
            another length.
        """
        directory = checkpoints.locate(preset)
        checkpoint = checkpoints.open_checkpoint(directory)
        length = checkpoint.soft_prompt_length(soft_prompt)
        options: dict[str, Any] = {"tokenizer": checkpoints.vocabulary_in(directory)}
        stored = directory / PREPROCESSOR_FILE
        if stored.is_file():
            found = validation.parse_json(stored.read_text("utf-8"))
            options.update({name: found[name] for name in Preprocessor.CONFIG})
        options.update(preprocessing)
        preprocessor = Preprocessor(**options) if options["tokenizer"] else None
        model = cls(checkpoint.config, dtype, rematerialize, length, preprocessor)
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
        if self.preprocessor is not None:
            config["preprocessor"] = self.preprocessor.get_config()
        return {**config, "name": self.name, "trainable": self.trainable}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> T5QueryGenerator:
        """Makes the model that `get_config` described.

        It has no preprocessor, for want of a vocabulary; `load_model` adds it.
        """
        del custom_objects  # all layers are built from the shape
        preprocessing = config.get("preprocessor")
        config = {**config, "config": T5Config(**config["config"])}
        model = cls(**{**config, "preprocessor": None})
        model._preprocessing = preprocessing
        return model

    def save_assets(self, directory: str) -> None:
        """Writes the vocabulary into a `.keras` file; called by Keras."""
        if self.preprocessor is not None:
            path = pathlib.Path(directory, VOCABULARY_FILE)
            path.write_bytes(self.preprocessor.tokenizer.model)

    def load_assets(self, directory: str) -> None:
        """Reads what `save_assets` wrote; called by Keras."""
        vocabulary = pathlib.Path(directory, VOCABULARY_FILE)
        if vocabulary.is_file():
            self.preprocessor = Preprocessor(vocabulary, **self._preprocessing)


def descend(
    optimizer: Any, tape: tf.GradientTape, loss: tf.Tensor, variables: Sequence[Any]
) -> None:
    """Applies the gradient of a loss; compiles under XLA.

    An embedding's gradient is sparse, and Keras sums equal rows by an operation that
    XLA lacks: it is made dense.
    """
    gradients = map(tf.convert_to_tensor, tape.gradient(loss, variables))
    optimizer.apply_gradients(zip(gradients, variables))


def _mask(ids: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    return tf.sequence_mask(lengths, ids.shape[1] or tf.shape(ids)[1], tf.int32)


def _checked_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids [D, L] and their lengths [D].

    Raises:
      InputError: another shape or type, or padding before a token.
    """
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
        raise validation.InputError(
            f"documents has shape {list(ids.shape)} and dtype {ids.dtype}; give a "
            "list of texts, or token ids [D, L]."
        )
    lengths = (ids != decoding.PAD).sum(axis=1)
    if (ids[np.arange(ids.shape[1]) < lengths[:, np.newaxis]] == decoding.PAD).any():
        raise validation.InputError(
            "documents has padding (0) before a token; pad on the right."
        )
    return ids, lengths

"""`T5QueryGenerator`: T5 as a Keras model that is fine-tuned and writes queries."""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Union

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.data.sets import SyntheticQuery
from tfdpsq.data.texts import Document
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator import checkpoints, decoding, generation
from tfdpsq.generator.preprocessing import QUERY_LENGTH, Preprocessor
from tfdpsq.generator.samplers import Sampler, TopP
from tfdpsq.layers import T5Backbone, T5Config, dropout_seed, encoder_of
from tfdpsq.layers.seeded_dropout import seed_of_step
from tfdpsq.layers.softmax import cross_entropy
from tfdpsq.layers.tracing import without_autograph

PREPROCESSOR_FILE = "query_generator.json"
PathLike = Union[str, os.PathLike]


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

        The first four arguments are those of `layers.T5Backbone`, `preprocessor` is the
        attribute, and the others are `name` and `trainable` of `tf.keras.Model`.
        """
        super().__init__(**kwargs)
        self.config = config
        self.preprocessor = preprocessor
        self.backbone = T5Backbone(config, dtype, rematerialize, soft_prompt)
        self.encoder = encoder_of(self.backbone)
        self.built = True
        self._seed = 0
        self._writer = functools.lru_cache(4)(
            lambda place, *arguments: generation.Writer(self, *arguments)
        )

    def head(self, hidden: tf.Tensor) -> tf.Tensor:
        """Returns float32 logits [..., V] of decoder states [..., hidden_dim]."""
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
        """Computes the backbone's outputs; arguments as of `call`."""
        targets = inputs["query_ids"]
        # The decoder starts with the padding id, as T5 does.
        shifted = tf.pad(targets[:, :-1], [[0, 0], [1, 0]])
        documents = inputs["document_ids"]
        return self.backbone(
            {
                "encoder_token_ids": documents,
                "encoder_padding_mask": _mask(documents, inputs["document_lengths"]),
                "decoder_token_ids": shifted,
                # By length, not by id: the first decoder token has the padding id.
                "decoder_padding_mask": _mask(shifted, inputs["query_lengths"]),
            },
            training=training,
        )

    @without_autograph
    def per_example_losses(
        self, inputs: Mapping[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        """Returns each example's `QueryLoss`, [B] float32; arguments as of `call`."""
        return QueryLoss().call(inputs["query_ids"], self(inputs, training=training))

    @without_autograph
    def encode(self, document_ids: tf.Tensor, document_mask: tf.Tensor) -> tf.Tensor:
        """Computes encoder states without dropout, the soft prompt's P states first.

        Ids and mask (1 for real tokens) are [B, L] int32, states [B, P + L, D].
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

        The loss `None` is `QueryLoss`. Dropout depends on the seed, the step and the
        row's place in the batch alone: a `fit` that goes on from a backup drops the
        same units.
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
        lengths and sizes. Post-processing costs no privacy, however many queries are
        written, and the seed need not be secret.

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
          InputError: texts without a preprocessor, documents that are neither texts nor
            token ids, or a number below 1.
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
        ids = np.asarray(documents)
        if ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise validation.InputError(
                f"documents has shape {list(ids.shape)} and dtype {ids.dtype}; give a "
                "list of texts, or token ids [D, L]."
            )
        writer = self._writer_of(sampler, max_length, **options)
        requests = generation.requests_of(
            ((Document(str(i), "", ""), samples) for i in range(len(ids))),
            (np.trim_zeros(row, "b") for row in ids),
            writer.samples,
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
        """Writes synthetic queries for a corpus; see also `generate`.

        `documents` are read as a stream: each by itself, or with the number of its
        queries instead of `samples`. `first` is the number of the corpus's documents
        before them. `on_batch` is called after every batch with its number of queries
        and of tokens; the queries are yielded later, in order.

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
        ours, theirs = itertools.tee(counted)
        tokens = self.preprocessor.stream(document.content for document, _ in theirs)
        requests = generation.requests_of(ours, tokens, writer.samples)
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
        pieces: Any = self.config.vocabulary_size, ()
        most = QUERY_LENGTH
        if self.preprocessor is not None:
            tokenizer, most = (
                self.preprocessor.tokenizer,
                self.preprocessor.query_length,
            )
            tokenizer.require_embeddings(pieces[0])
            pieces = tokenizer.vocabulary_size, tokenizer.sentinels
        length = most if max_length is None else max_length
        sizes = {"max_length": length, "samples": samples, "batch_size": batch_size}
        for name, value in sizes.items():
            validation.positive_integer(name, value)
        # LoRA replaces layers: what was compiled before would have the old ones.
        place = tf.distribute.get_strategy(), tuple(map(id, self.weights))
        given = sampler or TopP(), *sizes.values(), pieces, jit_compile
        return self._writer(place, *given)

    def save_to_preset(
        self, directory: PathLike, vocabulary: PathLike | None = None
    ) -> None:
        """Writes weights, vocabulary, prompt and lengths, for `from_preset`.

        The layout is a keras-nlp preset's: it loads as `keras_nlp.models.Backbone`,
        too, without a soft prompt. LoRA's updates are added to the kernels. For one
        file with everything that Keras knows of the model, use `save("x.keras")`.

        The directory must exist. `vocabulary` is a SentencePiece model to write instead
        of the preprocessor's; see also `checkpoints.save`.
        """
        self._save("keras", directory, vocabulary)

    def save_to_huggingface(
        self, directory: PathLike, vocabulary: PathLike | None = None
    ) -> None:
        """Does as `save_to_preset` for `transformers`, in a directory of its own."""
        self._save("huggingface", directory, vocabulary)

    def _save(self, form: str, directory: PathLike, vocabulary: Any) -> None:
        own, model = self.preprocessor, (self.config, self.backbone)
        if vocabulary is None and own is not None:
            vocabulary = own.tokenizer
        checkpoints.save(directory, *model, form, vocabulary=vocabulary)
        if own is not None:
            path = pathlib.Path(directory, PREPROCESSOR_FILE)
            io.write_json(path, own.get_config())

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
          dtype: see `layers.T5Backbone`.
          rematerialize: see there.
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
        length = checkpoint.soft_prompt if soft_prompt is None else soft_prompt
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
        """Returns the constructor's arguments; refuses LoRA, see `T5Backbone`."""
        config = self.backbone.get_config()
        if self.preprocessor is not None:
            config["preprocessor"] = self.preprocessor.get_config()
        return {**config, "name": self.name, "trainable": self.trainable}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> T5QueryGenerator:
        """Makes the model that `get_config` described.

        Without a vocabulary it has no preprocessor; `load_model` adds it.
        """
        del custom_objects  # all layers are built from the shape
        config = {**config, "config": T5Config(**config["config"])}
        preprocessing = config.pop("preprocessor", None)
        model = cls(**config)
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
    """Applies the gradient of a loss; compiles under XLA."""
    # An embedding's is sparse, and XLA lacks the operation that sums its equal rows.
    gradients = map(tf.convert_to_tensor, tape.gradient(loss, variables))
    optimizer.apply_gradients(zip(gradients, variables))


def _mask(ids: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    return tf.sequence_mask(lengths, ids.shape[1] or tf.shape(ids)[1], tf.int32)

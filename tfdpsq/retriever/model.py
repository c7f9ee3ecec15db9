"""The two-tower retriever: one T5 encoder for queries, one for documents.

A tower is T5 encoder → masked mean (or first token) → bias-free projection → unit
length. By default the towers share their weights. A score is an explicit scale, fixed
or learned, times the cosine: a softmax over bare cosines cannot fall below
log(1 + (B − 1)·e^-2), 4.94 nats at batch 1024, however good the model.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

from tfdpsq import validation
from tfdpsq.data.io import atomic_directory
from tfdpsq.data.texts import Pair
from tfdpsq.data.tokenization import VOCABULARY_FILE, Tokenizer
from tfdpsq.generator import checkpoints
from tfdpsq.layers import (
    FirstTokenPooling,
    MaskedMeanPooling,
    Scale,
    T5Config,
    build_encoder,
    dropout_seed,
)
from tfdpsq.layers.seeded_dropout import seed_of_step
from tfdpsq.layers.tracing import without_autograph
from tfdpsq.retriever.caching import cached_gradients
from tfdpsq.retriever.losses import Embeddings, batch_losses, everywhere
from tfdpsq.retriever.pairs import encode_pairs

_CONFIG = "config.json"
_WEIGHTS = "weights"
_REMEDY = "Give a directory that retriever.save wrote, unchanged."
# Tokens of a text, or numbers of an embedding: more are of a damaged file.
_MOST = 10**6

Batch = Mapping[str, tf.Tensor]

_POOLINGS: dict[str, Any] = {"mean": MaskedMeanPooling, "first": FirstTokenPooling}


@dataclasses.dataclass(frozen=True)
class RetrieverConfig:
    """Configuration of a two-tower retriever.

    Attributes:
      t5: shape of the encoder.
      embedding_dim: width D of an embedding.
      scale: factor of the cosine, 1/temperature; t5x_retrieval uses 100,
        sentence-transformers 20, the paper none (1). A learned scale starts with it.
      query_length: tokens of a query, EOS included.
      document_length: tokens of a document, EOS included.
      shared: one encoder and projection for both towers, or one each.
      pooling: "mean" over real tokens, or the "first" token.
      learned_scale: whether the scale is trained.
      bidirectional: whether training also scores queries for each document.
      false_negatives: whether training counts equal documents, and other known answers
        of a query, as negatives: equation (1) of the paper.

    Raises:
      InputError: a value out of range.
    """

    t5: T5Config
    embedding_dim: int
    scale: float = 20.0
    query_length: int = 128
    document_length: int = 384
    shared: bool = True
    pooling: str = "mean"
    learned_scale: bool = False
    bidirectional: bool = False
    false_negatives: bool = False

    def __post_init__(self) -> None:
        """Checks every value."""
        for field in ("embedding_dim", "query_length", "document_length"):
            validation.positive_integer(field, getattr(self, field))
            validation.in_range(field, getattr(self, field), 1, _MOST)
        validation.positive("scale", self.scale)
        for field in ("shared", "learned_scale", "bidirectional", "false_negatives"):
            validation.one_of(field, getattr(self, field), (True, False))
        validation.one_of("pooling", self.pooling, tuple(_POOLINGS))

    def to_json(self) -> str:
        """Returns the config as a JSON object."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, indent=2)

    @classmethod
    def from_json(cls, text: str) -> RetrieverConfig:
        """Makes the config that `to_json` wrote."""
        fields = dict(validation.parse_json(text))
        # Tells `privacy.read_certificate` that there is a certificate to check.
        fields.pop("certificate_digest", None)
        return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RetrieverConfig:
        """Makes the config that `dataclasses.asdict` described."""
        return cls(**{**fields, "t5": T5Config(**fields["t5"])})


@tf.keras.utils.register_keras_serializable("tfdpsq")
class TwoTower(tfrs.models.Model):
    """A two-tower retriever, trained by `fit` or through `per_example_losses`.

    The loss is that of `tfrs.tasks.Retrieval` at temperature 1/scale, averaged instead
    of summed; see `losses.batch_losses` for its candidates. `retriever.save` keeps
    weights and vocabulary; a `.keras` file has no vocabulary and need not restore the
    optimizer, for which there is Keras's `BackupAndRestore`.

    Example:
      >>> from tfdpsq.retriever import TwoTower
      >>> model = TwoTower.from_preset("t5_tiny_pydocs", query_length=24)
      >>> model.query_model(["how to sort a list"]).shape
      TensorShape([1, 192])

    Attributes:
      config: the configuration.
      tokenizer: turns texts into ids, or `None`.
      query_tower: functional model from "encoder_token_ids" and
        "encoder_padding_mask", both [B, L] int32, to [B, D] before normalisation.
      document_tower: the same for documents; the same object when shared.
      scaled: the layer that multiplies queries by the scale.
    """

    def __init__(
        self,
        config: RetrieverConfig,
        tokenizer: Tokenizer | None = None,
        dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Builds both towers with random weights.

        `tokenizer` is needed to take texts, and saved by `save`; `dtype` is that of the
        encoders, see `layers.T5Backbone`. Weights, pooling, projection, normalisation
        and scores are float32 under "mixed_bfloat16", too.
        """
        super().__init__(**{"name": "two_tower", **kwargs})
        self.config = config
        self.tokenizer = tokenizer
        self._encoder_dtype = dtype
        self.query_tower = _tower(
            config, "tower" if config.shared else "query_tower", dtype
        )
        self.document_tower = (
            self.query_tower
            if config.shared
            else _tower(config, "document_tower", dtype)
        )
        self.scaled = Scale(config.scale, config.learned_scale, name="scale")
        self.built = True

    @property
    def towers(self) -> tuple[tf.keras.Model, tf.keras.Model]:
        """The query tower and the document tower."""
        return self.query_tower, self.document_tower

    @property
    def documents_frozen(self) -> bool:
        """True if training does not change the documents' embeddings."""
        return not self.document_tower.trainable_weights

    @property
    def queries_pooled(self) -> bool:
        """True if training changes no text's states, but a projection of queries."""
        tower = self.query_tower
        trained = {id(weight) for weight in tower.trainable_weights}
        alone = trained <= {id(tower.get_layer("projection").kernel)}
        return alone and self.documents_frozen and not self.config.t5.dropout

    @property
    def query_model(self) -> TextEncoder:
        """The query tower from texts, for an index."""
        return TextEncoder(self, "query")

    @property
    def document_model(self) -> TextEncoder:
        """The document tower from texts."""
        return TextEncoder(self, "document")

    def preprocessor(self, pairs: Sequence[Pair]) -> tf.data.Dataset:
        """Tokenises pairs into rows for `fit`, to be shuffled and batched."""
        assert self.tokenizer is not None
        arrays = encode_pairs(
            pairs,
            self.tokenizer,
            query_length=self.config.query_length,
            document_length=self.config.document_length,
        )
        weights = np.ones(len(pairs), np.float32)
        return tf.data.Dataset.from_tensor_slices({**arrays, "weights": weights})

    @without_autograph
    def encode_queries(
        self, token_ids: tf.Tensor, lengths: tf.Tensor, training: bool = False
    ) -> tf.Tensor:
        """Embeds queries.

        Args:
          token_ids: [B, L] int32, any L; ids beyond a row's length are ignored.
          lengths: [B] int32, number of real tokens, each at least 1. (0 raises in eager
            mode, and gives a zero vector in a graph.)
          training: whether dropout is on.

        Returns:
          [B, D] float32 of unit length.
        """
        return embed(self.query_tower, token_ids, lengths, training)

    @without_autograph
    def encode_documents(
        self, token_ids: tf.Tensor, lengths: tf.Tensor, training: bool = False
    ) -> tf.Tensor:
        """Embeds documents; see `encode_queries`. A frozen tower drops nothing."""
        training = training and not self.documents_frozen
        return embed(self.document_tower, token_ids, lengths, training)

    @without_autograph
    def per_example_losses(self, batch: Batch, training: bool = False) -> tf.Tensor:
        """Computes the in-batch softmax loss of each row; see `batch_losses`.

        Args:
          batch: "query_ids" [B, Lq] int32, "query_lengths" [B] int32,
            "document_ids" [B, Ld] int32, "document_lengths" [B] int32,
            "document_key" [B] int64, "positive_keys" [B, P] int64 padded with -1,
            "weights" [B] float32, 0 for padding rows; and, with hard negatives,
            "negative_ids" [B, H, Ld] int32, "negative_lengths" [B, H] int32 and
            "negative_keys" [B, H] int64, -1 for none.
          training: whether dropout is on.

        Returns:
          [B] float32 in nats; 0 for padding rows. Rows depend on each other.
        """
        return self.losses_from_embeddings(self.encode(batch, training), batch)

    @without_autograph
    def embed_queries(self, batch: Batch, training: bool = False) -> tf.Tensor:
        """Embeds the queries of a batch, or those that `frozen_rows` has pooled."""
        if "query_states" in batch:
            projection = self.query_tower.get_layer("projection")
            return tf.math.l2_normalize(projection(batch["query_states"]), axis=-1)
        return self.encode_queries(batch["query_ids"], batch["query_lengths"], training)

    def encode(self, batch: Batch, training: bool = False) -> Embeddings:
        """Embeds all texts of a batch; see `per_example_losses` for the batch."""
        queries = self.embed_queries(batch, training)
        if "document_vectors" in batch:
            return Embeddings(
                queries, batch["document_vectors"], batch.get("negative_vectors")
            )
        negatives = None
        if "negative_ids" in batch:
            ids, lengths = batch["negative_ids"], batch["negative_lengths"]
            rows, count, length = ids.shape
            negatives = tf.reshape(
                self.encode_documents(
                    tf.reshape(ids, [-1, length]), tf.reshape(lengths, [-1]), training
                ),
                [-1 if rows is None else rows, count, self.config.embedding_dim],
            )
        documents = self.encode_documents(
            batch["document_ids"], batch["document_lengths"], training
        )
        return Embeddings(queries, documents, negatives)

    @without_autograph
    def losses_from_embeddings(self, embeddings: Embeddings, batch: Batch) -> tf.Tensor:
        """Computes [B] losses from the result of `encode`; see `batch_losses`."""
        return batch_losses(
            embeddings,
            batch,
            self.scaled,
            self.config.bidirectional,
            self.config.false_negatives,
        )

    def call(self, inputs: Batch, training: bool = False) -> dict[str, tf.Tensor]:
        """Embeds a batch for `predict`, as the fields of `Embeddings` that it has."""
        found = self.encode(inputs, training)._asdict()
        return {name: values for name, values in found.items() if values is not None}

    def compute_loss(self, inputs: Batch, training: bool = False) -> tf.Tensor:
        """Returns the mean of `per_example_losses` over real rows, a scalar in nats.

        In a replica, its share: those of all replicas add up to the mean over all rows.
        """
        losses = self.per_example_losses(inputs, training)
        return tf.reduce_sum(losses) / _real_rows(inputs)

    def compile(
        self, *args: Any, rows_at_a_time: int = 0, seed: int = 0, **kwargs: Any
    ) -> None:
        """Configures `fit`; other arguments are those of `tf.keras.Model.compile`.

        `rows_at_a_time` rows of a replica are embedded at a time where a batch exceeds
        memory (`cached_gradients`); 0 for all. Dropout follows from `seed`, the
        optimizer's step and a row's place in the batch alone, on any devices.
        """
        super().compile(*args, **kwargs)
        self._rows_at_a_time, self._seed = rows_at_a_time, seed
        # Each replica reports the loss of all; Keras would add these up.
        self.distribute_reduction_method = "first"

    def train_step(self, inputs: Batch) -> dict[str, tf.Tensor]:
        """Takes one optimizer step; reports the mean loss of all replicas' rows."""
        variables = self.trainable_variables
        seed = seed_of_step(self._seed, self.optimizer.iterations)
        if self._rows_at_a_time:
            loss, gradients = cached_gradients(
                self, inputs, variables, self._rows_at_a_time, seed
            )
            count = _real_rows(inputs)
            loss, gradients = loss / count, [g / count for g in gradients]
        else:
            with tf.GradientTape() as tape, dropout_seed(seed):
                loss = self.compute_loss(inputs, training=True)
            # Dense: XLA cannot sum the equal rows of a sparse one.
            gradients = [*map(tf.convert_to_tensor, tape.gradient(loss, variables))]
        # Keras sums over replicas, then clips: the step is that of the whole batch.
        self.optimizer.apply_gradients(zip(gradients, variables))
        return {"loss": tf.reduce_sum(everywhere(loss[tf.newaxis]))}

    @classmethod
    def from_preset(
        cls,
        preset: str | os.PathLike,
        tokenizer: Tokenizer | None = None,
        dtype: str | None = None,
        **settings: Any,
    ) -> TwoTower:
        """Makes a retriever from a saved one, a sentence encoder or a T5's encoder.

        Args:
          preset: a directory that `save` wrote; a Hugging Face, keras-nlp, T5X or
            sentence-T5 checkpoint; or a name; see `checkpoints.open_checkpoint`.
          tokenizer: `None` takes the vocabulary next to the weights, if any.
          dtype: see `__init__`.
          **settings: fields of `RetrieverConfig` in place of a saved retriever's, or
            of its defaults; `embedding_dim` is by default that of the weights.

        Raises:
          InputError: nothing there, or a setting that the weights contradict.
          DataError: the weights are incomplete, damaged or not those of a tower.
        """
        directory = checkpoints.locate(preset)
        trained = projection = None
        if (directory / f"{_WEIGHTS}.index").is_file():
            trained = load(directory, dtype)
            tokenizer = trained.tokenizer = tokenizer or trained.tokenizer
            if not settings:
                return trained
            own: dict[str, Any] = vars(trained.config)
            fixed = ["t5", "embedding_dim", "pooling", "shared"]
        else:
            t5, encoder = checkpoints.load_encoder(directory)
            vocabulary = checkpoints.vocabulary_in(directory)
            tokenizer = tokenizer or (Tokenizer(vocabulary) if vocabulary else None)
            own, fixed = {"t5": t5, "embedding_dim": t5.hidden_dim}, ["t5"]
            if found := checkpoints.read_sentence_encoder(directory):
                projection = found.projection
                if projection is None:  # its embeddings are the pooled states
                    projection = np.eye(t5.hidden_dim, dtype=np.float32)
                own.update(pooling=found.pooling, embedding_dim=projection.shape[1])
                fixed = list(own)
        for field in fixed:
            if settings.setdefault(field, own[field]) != own[field]:
                raise validation.InputError(
                    f"{field} is {settings[field]!r}, but {preset} has {own[field]!r}. "
                    f"Set {field} to that, or start from a T5's encoder."
                )
        model = cls(RetrieverConfig(**{**own, **settings}), tokenizer, dtype)
        query = document = model.query_tower
        if trained is not None:
            query, document = trained.towers
        else:
            _copy(encoder, query.get_layer("t5_encoder"))
            if projection is not None:
                query.get_layer("projection").kernel.assign(projection)
        # A T5's towers share a projection, or cosines between them would be noise.
        _copy(query, model.query_tower)
        _copy(document, model.document_tower)
        return model

    def build(self, input_shape: Any = None) -> None:
        """Does nothing: the constructor creates all weights."""
        self.built = True

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments except the tokenizer, as JSON values."""
        return {
            "config": dataclasses.asdict(self.config),
            "dtype": self._encoder_dtype,
            "name": self.name,
            "trainable": self.trainable,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> TwoTower:
        """Makes the model that `get_config` described, layers from the shape alone."""
        return cls(**{**config, "config": RetrieverConfig.from_dict(config["config"])})


class TextEncoder(tf.keras.Model):
    """One tower of a retriever, from texts: the `query_model` of a TFRS index."""

    def __init__(self, model: TwoTower, kind: str):
        """Takes the "query" or "document" tower, whose weights are read when called.

        Raises:
          InputError: the retriever has no tokenizer.
        """
        super().__init__(name=f"{kind}_model")
        if model.tokenizer is None:
            raise validation.InputError(
                "the retriever has no tokenizer. Give one when you make or load it."
            )
        self._tokenizer = model.tokenizer
        self._length = getattr(model.config, f"{kind}_length")
        self._tower = getattr(model, f"{kind}_tower")

    @without_autograph
    def call(self, texts: tf.Tensor) -> tf.Tensor:
        """Texts [B] string to embeddings [B, D] float32 of unit length."""
        ids, lengths = self._tokenizer.encode(texts, self._length)
        return embed(self._tower, ids, lengths)


def save(model: TwoTower, path: str | os.PathLike) -> None:
    """Writes config, weights and vocabulary to a new directory, whole or not at all.

    Raises:
      InputError: `path` is taken or cannot be written.
    """
    with atomic_directory(path) as directory:
        (directory / _CONFIG).write_text(model.config.to_json(), encoding="utf-8")
        if model.tokenizer is not None:
            (directory / VOCABULARY_FILE).write_bytes(model.tokenizer.model)
        _checkpoint(model).write(os.fspath(directory / _WEIGHTS))


def load(path: str | os.PathLike, dtype: str | None = None) -> TwoTower:
    """Loads a retriever that `save` wrote, tokenizer included.

    `dtype` is that of the encoders, see `TwoTower`; it is not saved with the weights.

    Raises:
      InputError: unknown dtype.
      DataError: a file is missing or has unexpected content.
    """
    file = Path(path) / _CONFIG
    try:
        config = RetrieverConfig.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise validation.DataError(
            file, f"no retriever's config ({error})", _REMEDY
        ) from error
    vocabulary = Path(path) / VOCABULARY_FILE
    tokenizer = Tokenizer(vocabulary) if vocabulary.is_file() else None
    model = TwoTower(config, tokenizer, dtype)
    try:
        _checkpoint(model).read(os.fspath(Path(path) / _WEIGHTS)).assert_consumed()
    except (tf.errors.OpError, ValueError, AssertionError, IndexError) as error:
        raise validation.DataError(
            Path(path) / _WEIGHTS,
            f"weights missing, truncated or of another config ({type(error).__name__})",
            _REMEDY,
        ) from error
    return model


def _checkpoint(model: TwoTower) -> tf.train.Checkpoint:
    parts = {"query": model.query_tower, "document": model.document_tower}
    if model.config.learned_scale:
        parts["scale"] = model.scaled
    return tf.train.Checkpoint(**parts)


def _real_rows(batch: Batch) -> tf.Tensor:
    """Returns the number of rows of all replicas that are not padding, at least 1."""
    real = tf.cast(everywhere(batch["weights"]) > 0, tf.float32)
    return tf.maximum(tf.reduce_sum(real), 1)


@without_autograph
def _tower(config: RetrieverConfig, name: str, dtype: str | None) -> tf.keras.Model:
    encoder = build_encoder(config.t5, dtype)
    inputs = dict(encoder.input)
    pooled = _POOLINGS[config.pooling](name="pooling")(
        encoder(inputs), mask=inputs["encoder_padding_mask"]
    )
    projected = tf.keras.layers.Dense(
        config.embedding_dim,
        use_bias=False,
        # If it is as wide as the encoder, it starts as a rotation, which keeps every
        # cosine and so the value of a pretrained encoder.
        kernel_initializer="orthogonal",
        dtype=tf.keras.mixed_precision.global_policy().variable_dtype,
        name="projection",
    )(pooled)
    return tf.keras.Model(inputs, projected, name=name)


def embed(
    tower: tf.keras.layers.Layer,
    token_ids: tf.Tensor,
    lengths: tf.Tensor,
    training: bool = False,
    unit: bool = True,
) -> tf.Tensor:
    """Embeds texts [..., L] as vectors; see `TwoTower.encode_queries`.

    `tower` is one of the model's, a part of it, or `layers.Folded` around one.
    """
    token_ids = tf.cast(token_ids, tf.int32)
    positions = tf.range(tf.shape(token_ids)[-1])
    real = positions < tf.cast(lengths, tf.int32)[..., tf.newaxis]
    vectors = tower(
        {
            "encoder_token_ids": token_ids,
            "encoder_padding_mask": tf.cast(real, tf.int32),
        },
        training=training,
    )
    vectors = tf.cast(vectors, tf.float32)  # bfloat16 has 3 digits
    return tf.math.l2_normalize(vectors, axis=-1) if unit else vectors


def _copy(source: tf.keras.layers.Layer, target: tf.keras.layers.Layer) -> None:
    for value, weight in zip(ordered_weights(source), ordered_weights(target)):
        weight.assign(value)


def ordered_weights(layer: tf.keras.layers.Layer) -> list[tf.Variable]:
    """Lists all weights layer by layer, by name in each, also if some are frozen.

    Keras's own `weights` lists the frozen ones last.
    """
    found: dict[int, tf.Variable] = {}
    for part in layer._flatten_layers():
        own = part._trainable_weights + part._non_trainable_weights
        for weight in sorted(own, key=lambda weight: weight.name.split("/")[-1]):
            found.setdefault(id(weight), weight)
    return list(found.values())

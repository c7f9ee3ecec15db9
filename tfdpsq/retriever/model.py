"""The two-tower retriever: one T5 encoder for queries, one for documents.

A tower is T5 encoder → masked mean (or first token) → bias-free projection → unit
length. By default the towers share their weights. A score is an explicit scale, fixed
or learned, times the cosine: a softmax over bare cosines cannot fall below
log(1 + (B − 1)·e^-2), 4.94 nats at batch 1024, however good the model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

from tfdpsq import validation
from tfdpsq.data.files import atomic_directory
from tfdpsq.layers import FirstTokenPooling, MaskedMeanPooling, Scale, build_encoder
from tfdpsq.layers.tracing import without_autograph
from tfdpsq.retriever.config import RetrieverConfig
from tfdpsq.retriever.losses import Embeddings, batch_losses, everywhere

_CONFIG = "config.json"
_WEIGHTS = "weights"

Batch = Mapping[str, tf.Tensor]

_POOLINGS: dict[str, Any] = {"mean": MaskedMeanPooling, "first": FirstTokenPooling}


@tf.keras.utils.register_keras_serializable("tfdpsq")
class TwoTower(tfrs.models.Model):
    """A two-tower retriever, trained by `fit` or through `per_example_losses`.

    In TFRS's terms the loss is that of `tfrs.tasks.Retrieval` at `config.temperature`,
    averaged instead of summed. Beyond that task it leaves known positives and equal
    documents out of the negatives, adds hard negatives, and takes negatives from all
    replicas.

    Example:
      >>> from tfdpsq.layers import T5Config
      >>> from tfdpsq.retriever import RetrieverConfig, TwoTower
      >>> config = RetrieverConfig(
      ...     T5Config(60, 1, 2, 16, 24, 8),
      ...     embedding_dim=12,
      ...     scale=20.0,
      ...     query_length=3,
      ...     document_length=4,
      ... )
      >>> model = TwoTower(config)
      >>> batch = {
      ...     "query_ids": tf.constant([[5, 6, 1], [7, 1, 0]]),
      ...     "query_lengths": tf.constant([3, 2]),
      ...     "document_ids": tf.constant([[5, 8, 9, 1], [7, 4, 1, 0]]),
      ...     "document_lengths": tf.constant([4, 3]),
      ...     "document_key": tf.constant([11, 12], tf.int64),
      ...     "positive_keys": tf.constant([[-1], [-1]], tf.int64),
      ...     "weights": tf.ones([2]),
      ... }
      >>> model.compile(tf.keras.optimizers.Adam(1e-3))
      >>> history = model.fit(tf.data.Dataset.from_tensors(batch), verbose=0)
      >>> model.encode_queries(batch["query_ids"], batch["query_lengths"]).shape
      TensorShape([2, 12])

    Attributes:
      config: the configuration.
      query_tower: functional model from "encoder_token_ids" and
        "encoder_padding_mask", both [B, L] int32, to [B, D] before normalisation.
      document_tower: the same for documents; the same object when shared.
      scaled: the layer that turns cosines into scores.
      factorized_metrics: metrics over a corpus, updated by `evaluate`.
    """

    def __init__(
        self,
        config: RetrieverConfig,
        metrics: Sequence[tfrs.metrics.Factorized] = (),
        dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Builds both towers with random weights.

        Args:
          config: shape, scale, lengths.
          metrics: TFRS's metrics over a corpus, such as `tfrs.metrics.FactorizedTopK`
            (a hit rate, not Recall@k), for `evaluate` and validation in `fit`. Their
            candidates are batches of (document_key, embedding), keys as made by
            `encode_documents`. Training does not change them: to follow the weights,
            assign new `factorized_metrics`. They are not saved.
          dtype: that of the encoders, see `layers.T5Backbone`. Weights, pooling,
            projection, normalisation and scores are float32 under "mixed_bfloat16",
            too.
          **kwargs: `name` and `trainable`, as for `tf.keras.Model`.
        """
        super().__init__(**{"name": "two_tower", **kwargs})
        self.config = config
        self._encoder_dtype = dtype
        self.factorized_metrics = list(metrics)
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
    def documents_frozen(self) -> bool:
        """True if training does not change the documents' embeddings."""
        return not self.document_tower.trainable_weights

    @property
    def queries_pooled(self) -> bool:
        """True if training does not change the pooled states of queries.

        This needs a T5 without dropout, a frozen document tower, and a query tower of
        which at most the projection is trained.
        """
        projection = self.query_tower.get_layer("projection").trainable_weights
        trained = {id(weight) for weight in self.query_tower.trainable_weights}
        return (
            self.documents_frozen
            and not self.config.t5.dropout
            and trained <= {id(weight) for weight in projection}
        )

    def pool_queries(self, token_ids: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
        """Computes the query tower's pooled states, [B, hidden_dim] float32.

        Arguments are those of `encode_queries`. Training can take the states instead of
        the ids where they stay as they are (`queries_pooled`).
        """
        tower = self.query_tower
        pooling = tf.keras.Model(tower.inputs, tower.get_layer("pooling").output)
        states = _vectors(pooling, token_ids, lengths, training=False)
        return tf.cast(states, tf.float32)

    @without_autograph
    def embed_queries(self, batch: Batch, training: bool = False) -> tf.Tensor:
        """Embeds the queries of a batch, [B, D]; see `per_example_losses`."""
        if "query_states" in batch:
            projection = self.query_tower.get_layer("projection")
            return _unit(projection(batch["query_states"]))
        return self.encode_queries(batch["query_ids"], batch["query_lengths"], training)

    @without_autograph
    def encode_queries(
        self, token_ids: tf.Tensor, lengths: tf.Tensor, training: bool = False
    ) -> tf.Tensor:
        """Embeds queries.

        Args:
          token_ids: [B, L] int32, any L; ids beyond a row's length are ignored.
          lengths: [B] int32, number of real tokens, each at least 1.
          training: whether dropout is on.

        Returns:
          [B, D] float32 of unit length.

        Raises:
          InputError: a length is 0, in eager mode. (In a graph: a zero vector.)
        """
        return embed(self.query_tower, token_ids, lengths, training)

    @without_autograph
    def encode_documents(
        self, token_ids: tf.Tensor, lengths: tf.Tensor, training: bool = False
    ) -> tf.Tensor:
        """Embeds documents; see `encode_queries`."""
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
            "negative_keys" [B, H] int64, -1 for none. If the document tower is frozen,
            embeddings made by `with_vectors` can replace the ids and lengths of
            documents and negatives; and if `queries_pooled`, "query_states"
            [B, hidden_dim] float32 by `pool_queries` those of queries.
          training: whether dropout is on.

        Returns:
          [B] float32 in nats; 0 for padding rows. Rows depend on each other.
        """
        return self.losses_from_embeddings(self.encode(batch, training), batch)

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
        return Embeddings(
            queries,
            self.encode_documents(
                batch["document_ids"], batch["document_lengths"], training
            ),
            negatives,
        )

    @without_autograph
    def losses_from_embeddings(self, embeddings: Embeddings, batch: Batch) -> tf.Tensor:
        """Computes [B] losses from the result of `encode`; see `batch_losses`."""
        return batch_losses(embeddings, batch, self.scaled, self.config.bidirectional)

    def call(self, inputs: Batch, training: bool = False) -> dict[str, tf.Tensor]:
        """Embeds a batch for `predict`; see `per_example_losses` for the batch.

        Args:
          inputs: a batch of B rows.
          training: whether dropout is on.

        Returns:
          "queries" [B, D], "documents" [B, D] and, if the batch has hard negatives,
          "negatives" [B, H, D], all float32.
        """
        found = self.encode(inputs, training)._asdict()
        return {name: values for name, values in found.items() if values is not None}

    def compute_loss(self, inputs: Batch, training: bool = False) -> tf.Tensor:
        """Computes the loss for TFRS's `fit` and `evaluate`, and updates the metrics.

        Args:
          inputs: a batch; see `per_example_losses`.
          training: whether dropout is on; the factorized metrics are updated only if
            it is not, as they are slow.

        Returns:
          Scalar mean of `per_example_losses` over real rows, in nats. In a replica, its
          share: the shares of all replicas add up to the mean over all their rows.
        """
        embeddings = self.encode(inputs, training)
        losses = self.losses_from_embeddings(embeddings, inputs)
        if not training:
            for metric in self.factorized_metrics:
                metric.update_state(
                    embeddings.queries,
                    embeddings.documents,
                    # Without ids TFRS compares scores, which rounding can reorder.
                    true_candidate_ids=inputs["document_key"],
                    sample_weight=inputs["weights"],
                )
        real = tf.cast(everywhere(inputs["weights"]) > 0, tf.float32)
        return tf.reduce_sum(losses) / tf.maximum(tf.reduce_sum(real), 1)

    def load_encoder_weights_from(
        self, encoder: tf.keras.Model, projection: np.ndarray | None = None
    ) -> None:
        """Copies an encoder's weights into both towers, which get one projection.

        With two projections, cosines between the towers would start as noise.

        Args:
          encoder: a model made by `layers.build_encoder`, of the same shape.
          projection: [hidden_dim, embedding_dim], if it has one of its own.

        Raises:
          InputError: the encoder or the projection has another shape.
        """
        given_weights = ordered_weights(encoder)
        towers = {id(t): t for t in (self.query_tower, self.document_tower)}
        for tower in towers.values():
            own_weights = ordered_weights(tower.get_layer("t5_encoder"))
            shapes = [tuple(v.shape) for v in own_weights]
            given = [tuple(v.shape) for v in given_weights]
            if shapes != given:
                raise validation.InputError(
                    f"the encoder's weights have shapes {given}, the tower's {shapes}. "
                    "Build the retriever with the encoder's own T5Config."
                )
            for mine, theirs in zip(own_weights, given_weights):
                mine.assign(theirs)
        first, second = (
            tower.get_layer("projection").kernel
            for tower in (self.query_tower, self.document_tower)
        )
        if projection is not None:
            if projection.shape != tuple(first.shape):
                raise validation.InputError(
                    f"the encoder's projection has shape {list(projection.shape)}, the "
                    f"towers' {list(first.shape)}. Set embedding_dim to "
                    f"{projection.shape[1]}."
                )
            first.assign(projection)
        second.assign(first)

    def load_weights_from(self, trained: TwoTower) -> None:
        """Copies another retriever's weights: both towers, projections included.

        Scale, lengths and direction may differ; a learned scale keeps its own value.

        Args:
          trained: a retriever with the same T5, embedding_dim, pooling and towers.

        Raises:
          InputError: the two have different shapes.
        """
        for field in ("t5", "embedding_dim", "pooling", "shared"):
            mine, theirs = (getattr(m.config, field) for m in (self, trained))
            if mine != theirs:
                raise validation.InputError(
                    f"{field} is {mine}, but the retriever to start from has {theirs}. "
                    f"Set {field} to that, or start from an encoder."
                )
        for mine, theirs in (
            (self.query_tower, trained.query_tower),
            (self.document_tower, trained.document_tower),
        ):
            for one, other in zip(ordered_weights(mine), ordered_weights(theirs)):
                one.assign(other)

    def build(self, input_shape: Any = None) -> None:
        """Does nothing: the constructor creates all weights."""
        self.built = True

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments except the metrics, JSON values only."""
        config = dataclasses.asdict(self.config)
        return {
            "config": config,
            "dtype": self._encoder_dtype,
            "name": self.name,
            "trainable": self.trainable,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> TwoTower:
        """Makes the model that `get_config` described."""
        del custom_objects  # all layers are built from the shape
        return cls(**{**config, "config": RetrieverConfig.from_dict(config["config"])})


def save(model: TwoTower, path: str | os.PathLike) -> None:
    """Writes config and weights to a new directory, whole or not at all.

    Args:
      model: the retriever; its optimizer's state and its metrics are not saved.
      path: the directory; it must not exist, or be empty.

    Raises:
      InputError: `path` is taken or cannot be written.
    """
    with atomic_directory(path) as directory:
        (directory / _CONFIG).write_text(model.config.to_json(), encoding="utf-8")
        _checkpoint(model).write(os.fspath(directory / _WEIGHTS))


def load(path: str | os.PathLike, dtype: str | None = None) -> TwoTower:
    """Loads a retriever that `save` wrote.

    Args:
      path: the directory.
      dtype: that of the encoders, see `TwoTower`; it is not saved with the weights.

    Returns:
      A model with the same config and weights.

    Raises:
      InputError: unknown dtype.
      DataError: a file is missing or has unexpected content.
    """
    file = Path(path) / _CONFIG
    try:
        config = RetrieverConfig.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise validation.DataError(
            file,
            f"no retriever's config ({error})",
            "Give a directory that retriever.save wrote, unchanged.",
        ) from error
    try:
        model = TwoTower(config, dtype=dtype)
    except (tf.errors.OpError, OverflowError, MemoryError) as error:
        raise validation.DataError(
            file,
            f"a retriever too large to make ({type(error).__name__})",
            "Give a directory that retriever.save wrote, unchanged.",
        ) from error
    try:
        _checkpoint(model).read(os.fspath(Path(path) / _WEIGHTS)).assert_consumed()
    except IndexError as error:  # "Read less bytes than requested"
        raise validation.DataError(
            Path(path) / f"{_WEIGHTS}.data-00000-of-00001",
            "it is shorter than the weights, so truncated",
            "Give a directory that retriever.save wrote, unchanged.",
        ) from error
    except (tf.errors.OpError, ValueError, AssertionError) as error:
        raise validation.DataError(
            Path(path) / _WEIGHTS,
            f"weights missing or not of this config ({type(error).__name__})",
            "Give a directory that retriever.save wrote, unchanged.",
        ) from error
    return model


def _checkpoint(model: TwoTower) -> tf.train.Checkpoint:
    parts = {"query": model.query_tower, "document": model.document_tower}
    if model.config.learned_scale:
        parts["scale"] = model.scaled
    return tf.train.Checkpoint(**parts)


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
    training: bool,
) -> tf.Tensor:
    """Embeds texts as unit vectors; see `TwoTower.encode_queries`.

    Args:
      tower: one of the model's towers, or `layers.Folded` around one.
      token_ids: [..., L] integers, with the dimensions that the tower takes.
      lengths: [...] integers.
      training: whether dropout is on.

    Returns:
      [..., D] float32.
    """
    return _unit(_vectors(tower, token_ids, lengths, training))


def _vectors(
    tower: tf.keras.layers.Layer,
    token_ids: tf.Tensor,
    lengths: tf.Tensor,
    training: bool,
) -> tf.Tensor:
    """Runs a tower; see `embed`."""
    token_ids = tf.cast(token_ids, tf.int32)
    positions = tf.range(tf.shape(token_ids)[-1])
    real = positions < tf.cast(lengths, tf.int32)[..., tf.newaxis]
    return tower(
        {
            "encoder_token_ids": token_ids,
            "encoder_padding_mask": tf.cast(real, tf.int32),
        },
        training=training,
    )


def _unit(vectors: tf.Tensor) -> tf.Tensor:
    """Scales to unit length; in float32, as bfloat16 has 3 digits."""
    return tf.math.l2_normalize(tf.cast(vectors, tf.float32), axis=-1)


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

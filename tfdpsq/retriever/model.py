"""The two-tower retriever: one T5 encoder for queries, one for documents.

A tower is T5 encoder → masked mean (or first token) → bias-free projection → unit
length. The towers share their weights unless told otherwise, and a score is an
explicit scale, fixed or learned, times the cosine: a softmax over bare cosines cannot
fall below log(1 + (B − 1)·e^-2), 4.94 nats at batch 1024, however good the model.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
import tensorflow_recommenders as tfrs

from tfdpsq import validation
from tfdpsq.data.files import atomic_directory
from tfdpsq.layers import (
    FirstTokenPooling,
    MaskedMeanPooling,
    Scale,
    T5Config,
    build_encoder,
)
from tfdpsq.retriever.losses import Embeddings, batch_losses

_CONFIG = "config.json"
_WEIGHTS = "weights"

Batch = Mapping[str, tf.Tensor]

_POOLINGS: dict[str, Any] = {"mean": MaskedMeanPooling, "first": FirstTokenPooling}


@dataclasses.dataclass(frozen=True)
class RetrieverConfig:
    """What a two-tower retriever is built from.

    Attributes:
      t5: shape of the encoder.
      embedding_dim: width D of an embedding.
      scale: multiplies the cosine; t5x_retrieval uses 100, sentence-transformers
        20, the paper none (1). Where it is learned, what it begins with.
      query_length: tokens of a query, EOS included.
      document_length: tokens of a document, EOS included.
      shared: one encoder and projection for both towers, or one each.
      pooling: "mean" over real tokens, or the "first" token.
      learned_scale: whether the scale is trained.
      bidirectional: whether documents look for their query, too, in training.

    Raises:
      InputError: a size below one, a scale that is not above zero, or an unknown
        pooling.
    """

    t5: T5Config
    embedding_dim: int
    scale: float
    query_length: int
    document_length: int
    shared: bool = True
    pooling: str = "mean"
    learned_scale: bool = False
    bidirectional: bool = False

    def __post_init__(self):
        """Checks every value."""
        for field in ("embedding_dim", "query_length", "document_length"):
            validation.positive_integer(field, getattr(self, field))
        validation.positive("scale", self.scale)
        for field in ("shared", "learned_scale", "bidirectional"):
            validation.one_of(field, getattr(self, field), (True, False))
        validation.one_of("pooling", self.pooling, tuple(_POOLINGS))

    def to_json(self) -> str:
        """The config as a JSON object."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, indent=2)

    @classmethod
    def from_json(cls, text: str) -> RetrieverConfig:
        """The config that `to_json` wrote."""
        fields = validation.parse_json(text)
        # By which `privacy.read_certificate` knows that one belongs beside it.
        fields.pop("certificate_digest", None)
        return cls(**{**fields, "t5": T5Config(**fields["t5"])})


class TwoTower(tfrs.models.Model):
    """Two-tower retriever, trainable by `fit` or through `row_losses`.

    Attributes:
      config: what it was built from.
      query_tower: functional model from "encoder_token_ids" and
        "encoder_padding_mask", both [B, L] int32, to [B, D] before normalisation.
      document_tower: the same for documents; the same object when shared.
      scaled: the layer that makes scores of cosines.
    """

    def __init__(self, config: RetrieverConfig):
        """Builds both towers, randomly initialised.

        Args:
          config: shape, scale, lengths.
        """
        super().__init__(name="two_tower")
        self.config = config
        self.query_tower = _tower(config, "tower" if config.shared else "query_tower")
        self.document_tower = (
            self.query_tower if config.shared else _tower(config, "document_tower")
        )
        self.scaled = Scale(config.scale, config.learned_scale, name="scale")

    @property
    def documents_stay(self) -> bool:
        """Whether training leaves the documents' embeddings as they are."""
        return not self.document_tower.trainable_weights

    def encode_queries(
        self, token_ids: tf.Tensor, lengths: tf.Tensor, training: bool = False
    ) -> tf.Tensor:
        """Embeds queries.

        Args:
          token_ids: [B, L] int32, any L; what lies beyond a row's length is ignored.
          lengths: [B] int32, real tokens, each at least 1.
          training: whether dropout is on.

        Returns:
          [B, D] float32 of unit length.

        Raises:
          InputError: run eagerly, a length of 0. (In a graph: a zero vector.)
        """
        return embed(self.query_tower, token_ids, lengths, training)

    def encode_documents(
        self, token_ids: tf.Tensor, lengths: tf.Tensor, training: bool = False
    ) -> tf.Tensor:
        """Embeds documents; see `encode_queries`."""
        return embed(self.document_tower, token_ids, lengths, training)

    def row_losses(self, batch: Batch, training: bool = False) -> tf.Tensor:
        """In-batch softmax loss of each row; see `batch_losses`.

        Args:
          batch: "query_ids" [B, Lq] int32, "query_lengths" [B] int32,
            "document_ids" [B, Ld] int32, "document_lengths" [B] int32,
            "document_key" [B] int64, "positive_keys" [B, P] int64 padded with -1,
            "weights" [B] float32, 0 for padding rows; and, where there are hard
            negatives, "negative_ids" [B, H, Ld] int32, "negative_lengths" [B, H]
            int32 and "negative_keys" [B, H] int64, -1 for none. Instead of the ids and
            lengths of documents and negatives their embeddings, as `with_vectors`
            makes them, where the document tower trains nothing.
          training: whether dropout is on.

        Returns:
          [B] float32 in nats; 0 for padding rows. Rows depend on each other.
        """
        return self.losses_of(self.encode(batch, training), batch)

    def encode(self, batch: Batch, training: bool = False) -> Embeddings:
        """All texts of a batch, as `row_losses` takes, embedded."""
        queries = self.encode_queries(
            batch["query_ids"], batch["query_lengths"], training
        )
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

    def losses_of(self, embeddings: Embeddings, batch: Batch) -> tf.Tensor:
        """[B] losses of what `encode` made of a batch; see `batch_losses`."""
        return batch_losses(embeddings, batch, self.scaled, self.config.bidirectional)

    def compute_loss(self, inputs: Batch, training: bool = False) -> tf.Tensor:
        """Mean of `row_losses` over real rows, a scalar in nats, for TFRS's `fit`."""
        real = tf.cast(inputs["weights"] > 0, tf.float32)
        total = tf.reduce_sum(self.row_losses(inputs, training))
        return total / tf.maximum(tf.reduce_sum(real), 1)


def start_from(model: TwoTower, encoder: tf.keras.Model) -> None:
    """Gives both towers an encoder's weights, and one projection to begin with.

    With a projection each they would begin as two rotations that have nothing to do
    with each other, and a cosine across them would be noise.

    Args:
      model: of the encoder's shape.
      encoder: as `layers.build_encoder` makes it.

    Raises:
      InputError: the encoder is of another shape.
    """
    given_weights = ordered_weights(encoder)
    for tower in {id(t): t for t in (model.query_tower, model.document_tower)}.values():
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
        for tower in (model.query_tower, model.document_tower)
    )
    second.assign(first)


def go_on_from(model: TwoTower, trained: TwoTower) -> None:
    """Gives a retriever another one's weights: both towers, projections included.

    Scale, lengths and direction are of training and may differ; a learned scale begins
    with the model's own.

    Args:
      model: takes the weights.
      trained: has them; of the same T5, embedding_dim, pooling and towers.

    Raises:
      InputError: the two are not of one shape.
    """
    for field in ("t5", "embedding_dim", "pooling", "shared"):
        mine, theirs = (getattr(m.config, field) for m in (model, trained))
        if mine != theirs:
            raise validation.InputError(
                f"{field} is {mine}, but the retriever to start from has {theirs}. "
                f"Set {field} to that, or start from an encoder."
            )
    for mine, theirs in (
        (model.query_tower, trained.query_tower),
        (model.document_tower, trained.document_tower),
    ):
        for one, other in zip(ordered_weights(mine), ordered_weights(theirs)):
            one.assign(other)


def ordered_weights(layer: tf.keras.layers.Layer) -> list[tf.Variable]:
    """All weights, layer by layer and by name in each: whatever is frozen.

    Keras's own `weights` has the frozen ones last.
    """
    found: dict[int, tf.Variable] = {}
    for part in layer._flatten_layers():
        own = part._trainable_weights + part._non_trainable_weights
        for weight in sorted(own, key=lambda weight: weight.name.split("/")[-1]):
            found.setdefault(id(weight), weight)
    return list(found.values())


def save(model: TwoTower, path: str | os.PathLike) -> None:
    """Writes config and weights to a new directory, whole or not at all.

    Args:
      model: what to save; optimizer state is not kept.
      path: the directory; it must not exist, or be empty.

    Raises:
      InputError: `path` is taken or cannot be written.
    """
    with atomic_directory(path) as directory:
        (directory / _CONFIG).write_text(model.config.to_json(), encoding="utf-8")
        _checkpoint(model).write(os.fspath(directory / _WEIGHTS))


def load(path: str | os.PathLike) -> TwoTower:
    """Reads what `save` wrote.

    Args:
      path: the directory.

    Returns:
      A model with the same config and weights.

    Raises:
      DataError: a file is missing or does not hold what it should.
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
    model = TwoTower(config)
    try:
        _checkpoint(model).read(os.fspath(Path(path) / _WEIGHTS)).assert_consumed()
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


def _tower(config: RetrieverConfig, name: str) -> tf.keras.Model:
    encoder = build_encoder(config.t5)
    inputs = dict(encoder.input)
    pooled = _POOLINGS[config.pooling](name="pooling")(
        encoder(inputs), mask=inputs["encoder_padding_mask"]
    )
    projected = tf.keras.layers.Dense(
        config.embedding_dim,
        use_bias=False,
        # As wide as the encoder it begins as a rotation, which keeps every cosine: a
        # pretrained encoder is then worth as much behind it.
        kernel_initializer="orthogonal",
        name="projection",
    )(pooled)
    return tf.keras.Model(inputs, projected, name=name)


def embed(
    tower: tf.keras.layers.Layer,
    token_ids: tf.Tensor,
    lengths: tf.Tensor,
    training: bool,
) -> tf.Tensor:
    """Unit vectors of texts; see `TwoTower.encode_queries`.

    Args:
      tower: one of the model's, or `layers.Folded` of one.
      token_ids: [..., L] integers, with the dimensions that the tower takes.
      lengths: [...] integers.
      training: whether dropout is on.

    Returns:
      [..., D] float32.
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
    # Unit length in float32 also under mixed precision: bfloat16 has 3 digits.
    return tf.math.l2_normalize(tf.cast(vectors, tf.float32), axis=-1)

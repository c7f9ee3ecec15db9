"""Configuration of a two-tower retriever."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tfdpsq import validation
from tfdpsq.layers import T5Config

POOLINGS = ("mean", "first")
# Tokens of a text, or numbers of an embedding: more are of a damaged file.
_MOST = 10**6


@dataclasses.dataclass(frozen=True)
class RetrieverConfig:
    """Configuration of a two-tower retriever.

    Example:
      >>> t5 = T5Config(60, 1, 2, 16, 24, 8)
      >>> config = RetrieverConfig(
      ...     t5, embedding_dim=12, scale=20.0, query_length=8, document_length=32
      ... )
      >>> config.temperature
      0.05

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

    Raises:
      InputError: a size below one or beyond any model, a scale that is not above
        zero, or an unknown pooling.
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

    def __post_init__(self) -> None:
        """Checks every value."""
        for field in ("embedding_dim", "query_length", "document_length"):
            validation.positive_integer(field, getattr(self, field))
            validation.in_range(field, getattr(self, field), 1, _MOST)
        validation.positive("scale", self.scale)
        for field in ("shared", "learned_scale", "bidirectional"):
            validation.one_of(field, getattr(self, field), (True, False))
        validation.one_of("pooling", self.pooling, POOLINGS)

    @property
    def temperature(self) -> float:
        """The softmax temperature, 1/scale, as `tfrs.tasks.Retrieval` takes it."""
        return 1.0 / self.scale

    def to_json(self) -> str:
        """Returns the config as a JSON object."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, indent=2)

    @classmethod
    def from_json(cls, text: str) -> RetrieverConfig:
        """Makes the config that `to_json` wrote.

        Raises:
          ValueError, TypeError, KeyError: the text is not one.
        """
        fields = validation.parse_json(text)
        if not isinstance(fields, dict):
            raise ValueError("it is not an object")
        # Tells `privacy.read_certificate` that there is a certificate to check.
        fields.pop("certificate_digest", None)
        return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RetrieverConfig:
        """Makes the config that `dataclasses.asdict` described."""
        return cls(**{**fields, "t5": T5Config(**fields["t5"])})

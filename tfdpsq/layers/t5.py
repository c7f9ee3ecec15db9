"""The shape of a T5.

keras-nlp's `T5Backbone` leaves two choices open that decide whether a model *is* T5:
the activation with its gating, and whether the language-model head is tied to the
embedding. `T5Config` binds them to the published versions, so that no mixture of the
two can be built by accident.
"""

from __future__ import annotations

import dataclasses

from tfdpsq import validation

# (hidden, intermediate, layers, heads, key/value size), from the published
# checkpoints of Raffel et al. 2020 and the "T5 1.1" release that FLAN-T5 shares.
_SHAPES = {
    ("small", "1.0"): (512, 2048, 6, 8, 64),
    ("small", "1.1"): (512, 1024, 8, 6, 64),
    ("base", "1.0"): (768, 3072, 12, 12, 64),
    ("base", "1.1"): (768, 2048, 12, 12, 64),
    ("large", "1.0"): (1024, 4096, 24, 16, 64),
    ("large", "1.1"): (1024, 2816, 24, 16, 64),
    ("xl", "1.1"): (2048, 5120, 24, 32, 64),
}
# More are of a damaged file; no machine has room for them.
_MOST, _MOST_LAYERS = 10**7, 10_000
SIZES = ("small", "base", "large", "xl")
_VERSIONS = ("1.0", "1.1")


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Shape of a T5 encoder–decoder.

    Example:
      >>> T5Config.from_size("small", "1.0").hidden_dim
      512

    Attributes:
      vocabulary_size: rows of the embedding, and logits (32128 in T5).
      num_layers: transformer layers in the encoder, and again in the decoder.
      num_heads: attention heads.
      hidden_dim: width of the residual stream.
      intermediate_dim: width of the feed-forward layer.
      key_value_dim: width of one head; T5 1.1 small has heads × width ≠ hidden.
      version: "1.0" (relu, ungated, head tied to the embedding and scaled by
        hidden_dim^-0.5) or "1.1" (tanh-gelu, gated, head of its own; FLAN too).
      dropout: dropout rate while training.

    Raises:
      InputError: a size below one or beyond any model, an unknown version, a rate
        outside [0, 1).
    """

    vocabulary_size: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    intermediate_dim: int
    key_value_dim: int
    version: str = "1.0"
    dropout: float = 0.1

    def __post_init__(self) -> None:
        """Checks every value."""
        for field in (
            "vocabulary_size",
            "num_layers",
            "num_heads",
            "hidden_dim",
            "intermediate_dim",
            "key_value_dim",
        ):
            validation.positive_integer(field, getattr(self, field))
            most = _MOST_LAYERS if field == "num_layers" else _MOST
            validation.in_range(field, getattr(self, field), 1, most)
        validation.one_of("version", self.version, _VERSIONS)
        validation.in_range("dropout", self.dropout, 0.0, 1.0, high_open=True)

    @property
    def tied(self) -> bool:
        """True if the language-model head is the embedding, transposed."""
        return self.version == "1.0"

    @classmethod
    def from_size(
        cls, size: str, version: str = "1.1", vocabulary_size: int = 32128
    ) -> T5Config:
        """Returns the config of a published size.

        Args:
          size: "small", "base", "large" or "xl".
          version: "1.0" or "1.1".
          vocabulary_size: rows of the embedding.

        Raises:
          InputError: unknown size or version, or a pair never published here
            (XL exists in 1.1 shape only).
        """
        validation.one_of("size", size, SIZES)
        validation.one_of("version", version, _VERSIONS)
        if (size, version) not in _SHAPES:
            raise validation.InputError(
                f"T5 {size} of version {version} is not offered; use version 1.1."
            )
        hidden, intermediate, layers, heads, key_value = _SHAPES[size, version]
        return cls(
            vocabulary_size=vocabulary_size,
            num_layers=layers,
            num_heads=heads,
            hidden_dim=hidden,
            intermediate_dim=intermediate,
            key_value_dim=key_value,
            version=version,
        )

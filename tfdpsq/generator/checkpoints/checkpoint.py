"""`Checkpoint`: one that was found complete by its headers, ready to be loaded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.generator.checkpoints import weights
from tfdpsq.generator.checkpoints.slots import Slot
from tfdpsq.layers import T5Config

NOT_T5 = "Only T5 1.0, T5 1.1, FLAN-T5 and mT5 can be loaded."


def unlike_t5(path: str | os.PathLike, key: str, value: Any, wanted: str) -> Exception:
    """The error to raise for a setting in a config that no T5 has.

    Args:
      path: the config.
      key: the setting.
      value: what it is.
      wanted: what it may be, in words.
    """
    return validation.DataError(path, f"{key} is {value!r}, not {wanted}", NOT_T5)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A T5 on disk, of any format: its config and where its weights are.

    Making one compares all headers with the config, and reads no values.

    Attributes:
      format: "huggingface", "keras" or "t5x".
      config: the model's shape.
      source: reads the values.
      slots: the weights to load; without the decoder's if only the encoder is wanted.
      copies: see `weights.check`.
      ignored: see `weights.check`.

    Raises:
      DataError: see `weights.check`.
    """

    format: str
    config: T5Config
    source: weights.Source
    slots: Sequence[Slot]
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: Sequence[str] = ()

    def __post_init__(self):
        """Checks the headers."""
        weights.check(self.slots, self.source, self.copies, self.ignored)

    def load_into(self, model: tf.keras.Model) -> None:
        """Assigns all values to a backbone (or an encoder) of `config`.

        Raises:
          DataError: see `weights.load_into`. The model must then not be used.
        """
        weights.load_into(model, self.slots, self.source, self.copies, self.ignored)

    def read_value(self, slot: Slot) -> np.ndarray:
        """Reads one weight, wherever this checkpoint has it.

        Args:
          slot: of any format: only the name counts.

        Returns:
          [*slot.shape] float32, in the model's layout.

        Raises:
          DataError: see `weights.read_value`.
        """
        own = {slot.name: slot for slot in self.slots}
        return weights.read_value(self.source, own[slot.name])

    def check_copies(self) -> None:
        """Compares second copies of weights with the first, as `load_into` does.

        Raises:
          DataError: one differs.
        """
        weights.check_copies(self.source, self.copies)

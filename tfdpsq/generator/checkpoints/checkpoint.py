"""`Checkpoint`: one that was found complete by its headers, ready to be loaded."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.generator.checkpoints import prompt_file, weights
from tfdpsq.generator.checkpoints.slots import Slot
from tfdpsq.layers import SoftPrompt, T5Config

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


def config_has(path: pathlib.Path, key: str) -> bool:
    """Returns whether a file is a JSON object with a key, for telling formats apart."""
    try:
        found = validation.parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and key in found


def read_json(
    path: pathlib.Path,
    kind: type = dict,
    name: str = "object",
    whole: str = "checkpoint",
) -> Any:
    """Reads a JSON value of a type, which errors call `name`, from a file of a `whole`.

    Raises:
      DataError: the file cannot be read, is not JSON, or holds another type.
    """
    try:
        found = validation.parse_json(path.read_text("utf-8"))
    except OSError as error:
        raise validation.DataError(
            path, f"cannot be read ({error.strerror})", f"Give all of the {whole}"
        ) from error
    except ValueError as error:
        raise validation.DataError(
            path, f"it is not valid JSON ({error})", "Copy it again"
        ) from error
    if not isinstance(found, kind):
        raise validation.DataError(path, f"it holds no JSON {name}", "Copy it again")
    return found


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
      soft_prompt: the soft prompt stored with the weights, or `None`.

    Raises:
      DataError: see `weights.check`.
    """

    format: str
    config: T5Config
    source: weights.Source
    slots: Sequence[Slot]
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: Sequence[str] = ()
    soft_prompt: prompt_file.StoredPrompt | None = None

    def __post_init__(self) -> None:
        """Checks the headers."""
        weights.check(self.slots, self.source, self.copies, self.ignored)

    def load_into(self, model: tf.keras.Model) -> None:
        """Assigns all values to a backbone (or an encoder) of `config`.

        A soft prompt of the model's that the checkpoint lacks stays as it is.

        Raises:
          InputError: the checkpoint has a soft prompt, the model none of its length.
          DataError: see `weights.load_into`. The model must then not be used.
        """
        prompt = prompt_file.of(model)
        self.soft_prompt_length(0 if prompt is None else prompt.length)
        weights.load_into(model, self.slots, self.source, self.copies)
        if self.soft_prompt is not None and isinstance(prompt, SoftPrompt):
            prompt.vectors.assign(self.soft_prompt.vectors)

    def soft_prompt_length(self, wanted: int | None = None) -> int:
        """Returns the length of the soft prompt of a model to load this into.

        Args:
          wanted: the length, 0 for no soft prompt; `None` is the checkpoint's own.

        Raises:
          DataError: the checkpoint has a soft prompt of another length.
        """
        found = 0 if self.soft_prompt is None else self.soft_prompt.length
        if wanted is None:
            return found
        if self.soft_prompt is not None and wanted != found:
            raise validation.DataError(
                self.soft_prompt.path,
                f"it is a soft prompt of {found} vectors, where one of {wanted} is "
                "wanted",
                f"Set the soft prompt's length to {found} to go on with this one, or "
                "start from the model it was tuned for, which is a copy of this "
                "directory without the file",
            )
        return wanted

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

"""A soft prompt on disk: `soft_prompt.safetensors` next to a checkpoint's weights.

No T5 format knows of soft prompts, so that the vectors have a file of their own; a
stack that does not read it runs the T5 that the prompt was tuned for, as it was.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np
import safetensors.numpy

from tfdpsq import validation
from tfdpsq.data import files
from tfdpsq.generator.checkpoints.weights import read_tensors
from tfdpsq.layers import SoftPrompt, T5Config

FILE_NAME = "soft_prompt.safetensors"
TENSOR = "soft_prompt"
# Not to be deleted: it may have cost budget.
_REMEDY = "Copy it again, or move it away to use the model without its soft prompt"


@dataclasses.dataclass(frozen=True)
class StoredPrompt:
    """A soft prompt whose file was found right.

    Attributes:
      path: the file.
      vectors: [length, hidden_dim] float32.
    """

    path: pathlib.Path
    vectors: np.ndarray

    @property
    def length(self) -> int:
        """The number of vectors."""
        return len(self.vectors)


def read(directory: str | os.PathLike, config: T5Config) -> StoredPrompt | None:
    """The soft prompt in a checkpoint's directory; `None` without one.

    Args:
      directory: the checkpoint's.
      config: the model's shape.

    Raises:
      DataError: the file is damaged, or does not hold one float32 tensor of a shape
        that fits the model; or a value is NaN or infinite.
    """
    path = pathlib.Path(directory, FILE_NAME)
    if not path.exists():
        return None
    found = read_tensors(path, _REMEDY)
    if list(found) != [TENSOR]:
        names = ", ".join(sorted(found)[:5]) or "none"
        raise validation.DataError(
            path, f"it holds the tensors {names}, not {TENSOR} alone", _REMEDY
        )
    vectors = found[TENSOR]
    if vectors.dtype != np.float32:
        raise validation.DataError(
            path, f"tensor {TENSOR} holds {vectors.dtype}, not float32", _REMEDY
        )
    if vectors.ndim != 2 or not len(vectors) or vectors.shape[1] != config.hidden_dim:
        raise validation.DataError(
            path,
            f"tensor {TENSOR} has shape {list(vectors.shape)}, the model's config "
            f"makes it [length, {config.hidden_dim}]",
            "Use the soft prompt that was tuned for this model, or move it away",
        )
    if not np.isfinite(vectors).all():
        row = int(np.argmin(np.isfinite(vectors).all(axis=1)))
        raise validation.DataError(
            path,
            f"tensor {TENSOR} holds NaN or infinity in row {row}",
            "Use one from before training diverged, or move it away",
        )
    return StoredPrompt(path, vectors)


def of(model: Any) -> SoftPrompt | StoredPrompt | None:
    """The soft prompt of a model, or of a `Checkpoint`, if it has one."""
    if hasattr(model, "soft_prompt"):
        return model.soft_prompt
    # An encoder is a functional model that has its layers by name only.
    return next((one for one in model.layers if isinstance(one, SoftPrompt)), None)


def write(directory: str | os.PathLike, model: Any) -> None:
    """Writes a model's soft prompt, or removes the file of an earlier one.

    Args:
      directory: the checkpoint's.
      model: a backbone, or a `Checkpoint` to copy. Values are written as they are,
        whatever the other weights are rounded to.

    Raises:
      InputError: a value is NaN or infinite.
    """
    path = pathlib.Path(directory, FILE_NAME)
    prompt = of(model)
    if prompt is None:
        path.unlink(missing_ok=True)
        return
    vectors = np.asarray(prompt.vectors, np.float32)
    if not np.isfinite(vectors).all():
        raise validation.InputError(
            "the soft prompt holds values that are not finite. Use one from before "
            "training diverged."
        )
    files.atomic_write(path, safetensors.numpy.save({TENSOR: vectors}))


def refuse(model: Any, what: str) -> None:
    """Keeps a soft prompt from being left out silently.

    Args:
      model: a backbone, an encoder or a `Checkpoint`.
      what: what has no place for one, in words.

    Raises:
      InputError: it has one.
    """
    prompt = of(model)
    if prompt is not None:
        raise validation.InputError(
            f"the model has a soft prompt of {prompt.length} vectors, which {what} has "
            f"no place for. Keep the model whole in the format huggingface; without "
            f"{FILE_NAME} it is the T5 that the prompt was tuned for."
        )

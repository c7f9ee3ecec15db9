"""Tensors in files, and the error that names a file which cannot be read."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from tfdpsq import validation
from tfdpsq.data import io


class Tensor(NamedTuple):
    """A tensor in a checkpoint: its header, and `read`, which reads its value.

    `dtype` is NumPy's name for it, such as "float32" or "bfloat16".
    """

    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


def finite_value(tensor: Tensor, name: str) -> np.ndarray:
    """Reads a tensor as float32.

    Raises:
      DataError: a value is NaN or infinite, or the file is damaged.
    """
    with reading(tensor.file):
        value = np.asarray(tensor.read(), np.float32)
    if not np.isfinite(value).all():
        raise validation.DataError(
            tensor.file,
            f"tensor {name} holds NaN or infinity",
            "Use a checkpoint from before training diverged",
        )
    return value


def write_tensors(path: pathlib.Path, values: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file as `transformers` does, atomically.

    Raises:
      InputError: it cannot be written, or the disk is full.
    """
    with io.atomic_file(path) as partial:
        try:
            safetensors.numpy.save_file(dict(values), partial, {"format": "pt"})
        except safetensors.SafetensorError as error:
            raise validation.InputError(
                f"{path}: cannot be written ({error}). Free space there, or choose "
                "another disk."
            ) from error


def not_t5(path: pathlib.Path, problem: str) -> validation.DataError:
    """Returns the error for a config of another model."""
    remedy = "Only T5 1.0, T5 1.1, FLAN-T5 and mT5 can be loaded"
    return validation.DataError(path, problem, remedy)


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file of a checkpoint.

    Raises:
      DataError: it is missing or damaged.
    """
    with reading(path):
        return validation.parse_json(path.read_text("utf-8"))


def has_key(path: pathlib.Path, key: str) -> bool:
    """Returns whether a file is a JSON object with a key, to tell formats apart."""
    try:
        found = read_json(path)
    except validation.DataError:
        return False
    return isinstance(found, dict) and key in found


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
    """Names the file in whatever error a library raises while it reads one.

    Raises:
      DataError: the file is missing or damaged.
    """
    try:
        yield
    except (validation.InputError, MemoryError):
        raise
    except Exception as error:  # each library has errors of its own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise validation.DataError(
            path,
            f"it is missing, truncated or damaged ({reason[:200]})",
            "Copy the whole checkpoint again",
        ) from error

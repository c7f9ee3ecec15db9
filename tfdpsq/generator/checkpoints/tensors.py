"""Tensors in files, and the errors of a file that cannot be read or is of no T5."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from tfdpsq import validation
from tfdpsq.data import io


class Tensor(NamedTuple):
    """A tensor in a checkpoint's file: its shape, and `read`, which reads its value."""

    file: pathlib.Path
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def value(self, name: str) -> np.ndarray:
        """Reads float32 values; raises DataError if one is NaN or infinite."""
        with reading(self.file):
            value = np.asarray(self.read(), np.float32)
        if not np.isfinite(value).all():
            raise validation.DataError(
                self.file,
                f"tensor {name} holds NaN or infinity",
                "Use a checkpoint from before training diverged",
            )
        return value


def write_tensors(path: pathlib.Path, values: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file as `transformers` does, atomically."""
    content = safetensors.numpy.save(dict(values), {"format": "pt"})
    io.atomic_write(path, content)


def not_t5(path: pathlib.Path, problem: str) -> validation.DataError:
    """Returns the error for a file of another model."""
    remedy = "Only T5 1.0, T5 1.1, FLAN-T5, mT5 and sentence-T5 can be loaded"
    return validation.DataError(path, problem, remedy)


def require(
    path: pathlib.Path, values: Mapping[str, Any], wanted: Mapping[str, Collection]
) -> None:
    """Raises DataError if a config value is not one of those wanted for its key."""
    for key, choices in wanted.items():
        if values.get(key) not in choices:
            listed = " or ".join(map(repr, choices))
            raise not_t5(path, f"{key} is {values.get(key)!r}; expected {listed}")


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file; raises DataError if it is missing or damaged."""
    with reading(path):
        return validation.parse_json(path.read_text("utf-8"))


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
    """Turns whatever a library raises while it reads a file into a DataError."""
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

"""Tensors in PyTorch's pickles, `pytorch_model.bin`, read without running their code.

A pickle is a program. It is read by `torch.load(weights_only=True)` alone, whose
unpickler builds tensors and plain containers and refuses everything else. Before torch
2.6 that unpickler could be made to run code (CVE-2025-32434), so older ones are refused
as well. torch is optional; nothing else here needs it.
"""

from __future__ import annotations

import pathlib
import pickle
import re
import zipfile
from typing import Any

import numpy as np

from tfdpsq import validation
from tfdpsq.generator.checkpoints.weights import Entry, require_readable

WEIGHTS_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"
_FIRST_SAFE = (2, 6)
_INSTALL = (
    "pip install 'tfdpsq[torch]', or save it as safetensors (save_pretrained of "
    "transformers does)"
)


def library(path: pathlib.Path) -> Any:
    """Returns the module torch.

    Args:
      path: the file to read, for the errors.

    Raises:
      InputError: it is not installed, or older than its restricted unpickler is safe.
    """
    torch = validation.library(
        "torch",
        f"{path} is a pickle, which only torch can read safely, and torch is not "
        f"installed. Run {_INSTALL}.",
    )
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is None or tuple(map(int, version.groups())) < _FIRST_SAFE:
        raise validation.InputError(
            f"{path} is a pickle, and torch {torch.__version__} can be made to run "
            f"code by one: 2.6 is the first that cannot. Run {_INSTALL}."
        )
    return torch


def tensors_of(path: pathlib.Path) -> dict[str, Any]:
    """Opens a file of tensors; their values stay on disk where its format allows.

    Returns:
      {name: torch.Tensor}.

    Raises:
      InputError: torch is not installed, or too old.
      DataError: it may not be read, holds anything but tensors, or is damaged.
    """
    torch = library(path)
    if path.is_file():
        require_readable(path)
    only = f"Give a {WEIGHTS_FILE} that maps names to tensors, as transformers writes"
    try:
        found = torch.load(
            path,
            map_location="cpu",
            weights_only=True,
            mmap=zipfile.is_zipfile(path),  # older files are read whole
        )
    except pickle.UnpicklingError as error:
        raise validation.DataError(
            path,
            "it holds more than tensors, or is damaged, and is not unpickled",
            only,
        ) from error
    except (RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise validation.DataError(
            path, f"it is truncated or damaged ({reason})", "Copy it again"
        ) from error
    values = found.items() if isinstance(found, dict) else [("its content", found)]
    for name, value in values:
        plain = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if not plain or not isinstance(name, str):
            raise validation.DataError(
                path, f"{name} is a {type(value).__name__}, not a tensor", only
            )
    return dict(values)


def entry(tensor: Any, path: pathlib.Path) -> Entry:
    """Returns the header of a tensor of a file."""
    dtype = str(tensor.dtype).partition(".")[2]
    return Entry(tuple(tensor.shape), dtype, path)


def rows(tensor: Any, start: int, stop: int) -> np.ndarray:
    """Returns rows [start, stop) of a tensor's first axis as float32, exactly."""
    return tensor[start:stop].detach().float().numpy()

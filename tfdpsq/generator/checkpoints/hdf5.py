"""Weights in HDF5 files: Keras's own, and `tf_model.h5` of transformers' TF models.

HDF5 holds arrays, no code. In `tf_model.h5` a weight has the name that Keras gave it
below its layers, in a group of its top-level layer; the part in the middle, the
model's name, differs by version and by process:

    decoder/NAME/decoder/block_._0/layer_._0/SelfAttention/q/kernel:0
    shared/shared/shared/embeddings:0     (older: weight:0), again in each stack
    lm_head/NAME/lm_head/kernel:0         [hidden, vocabulary], of T5 1.1
"""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.generator.checkpoints import weights

TF_WEIGHTS_FILE = "tf_model.h5"
TF_INDEX_FILE = "tf_model.h5.index.json"

_OF_A_STACK = re.compile(
    r"(?:.*/)?((?:encoder|decoder)/(?:"
    r"block_\._\d+/layer_\._\d+/(?:"
    r"(?:SelfAttention|EncDecAttention|DenseReluDense)/\w+|layer_norm)"
    r"|final_layer_norm))/(?:kernel|embeddings|weight):0"
)
_EMBEDDING = re.compile(r"(shared|encoder|decoder)/(?:.*/)?(?:embeddings|weight):0")
_HEAD = re.compile(r"(?:.*/)?lm_head/kernel:0")


class Datasets:
    """The datasets of a file; a `weights.Source`."""

    def __init__(self, path: pathlib.Path, named: Callable[[str], str] = str):
        """Reads the headers.

        Args:
          path: the file.
          named: takes a dataset's name; returns that of its tensor.

        Raises:
          DataError: the file is missing or damaged, keeps values in other files, or has
            two datasets for a tensor.
        """
        self.path = path
        self.tensors: dict[str, weights.Entry] = {}
        self._places: dict[str, str] = {}
        self._named = named
        with _opened(path) as file:
            file.visititems(self._add)

    def _add(self, place: str, item: Any) -> None:
        if not isinstance(item, h5py.Dataset):
            return
        if item.is_virtual or item.external:
            raise validation.DataError(
                self.path,
                f"dataset {place} keeps its values in another file",
                "Give a file that holds its weights itself",
            )
        name = self._named(place)
        if name in self._places:
            raise validation.DataError(
                self.path,
                f"datasets {self._places[name]} and {place} are both {name}",
                "Give a file with the weights of one model",
            )
        # HDF5 has no bfloat16: Keras 3 writes its bytes, and says so.
        dtype = str(item.attrs.get("dtype", item.dtype.name))
        self.tensors[name] = weights.Entry(item.shape, dtype, self.path)
        self._places[name] = place

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """See `weights.Source`."""
        with _opened(self.path) as file:
            rows = file[self._places[name]][start:stop]
        if self.tensors[name].dtype == "bfloat16":
            return rows.view(tf.bfloat16.as_numpy_dtype)
        return rows


def torch_name(place: str) -> str:
    """Returns Hugging Face's name of a dataset of `tf_model.h5`.

    A dataset that is not a weight of a T5 keeps its own name, by which it is refused.
    """
    if found := _OF_A_STACK.fullmatch(place):
        return found[1].replace("_._", ".").replace("/", ".") + ".weight"
    if _HEAD.fullmatch(place):
        return "lm_head.weight"
    found = _EMBEDDING.fullmatch(place)
    if found and "shared" in place.split("/"):
        owner = found[1]
        return (
            f"{owner}.weight" if owner == "shared" else f"{owner}.embed_tokens.weight"
        )
    return place


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[h5py.File]:
    copy = "Copy the whole checkpoint again"
    if path.is_file():
        weights.require_readable(path)
    try:
        with h5py.File(path, "r") as file:
            yield file
    except FileNotFoundError as error:
        raise validation.DataError(path, "the file is missing", copy) from error
    except (OSError, RuntimeError, KeyError) as error:
        raise validation.DataError(
            path, f"it is truncated or damaged ({error})", copy
        ) from error

"""T5X checkpoints, read: a msgpack file and zarr directories.

T5X keeps a train state as flax does, in a msgpack file `checkpoint` of nested maps:
small arrays are inside it (an extension type: shape, dtype, bytes), and in place of
each other array is a TensorStore spec, or orbax's placeholder, that names a zarr
directory next to it. Weights are under `target`; the rest is passed over.

A checkpoint holds no config: sizes follow from the shapes, the version from whether
the feed-forward layer is gated. Its activation is recorded nowhere; it is taken to be
that of the version (relu, or tanh-gelu), as in every T5 that was published so.

Source: github.com/google-research/t5x, checkpoints.py and examples/t5.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.generator.checkpoints.tensors import Tensor, not_t5, reading
from tfdpsq.layers import T5Config

CHECKPOINT_FILE = "checkpoint"
_PLACEHOLDER = "PLACEHOLDER://"


def open_checkpoint(
    path: pathlib.Path, encoder_only: bool
) -> tuple[T5Config, dict[str, Tensor]]:
    """Reads a checkpoint's headers; see `huggingface.open_checkpoint`."""
    msgpack = _library("msgpack")
    file = path / CHECKPOINT_FILE

    def extension(code: int, data: bytes) -> Any:
        if code != 1:  # flax's type for arrays
            return None
        shape, dtype, values = msgpack.unpackb(data)
        kind = tf.as_dtype(dtype).as_numpy_dtype
        return np.frombuffer(values, kind).reshape(shape)

    with reading(file):
        content = file.read_bytes()
        tree = msgpack.unpackb(content, strict_map_key=False, ext_hook=extension)
        # T5X has all under `optimizer`, orbax has not.
        target = tree.get("optimizer", tree)["target"]
        tensors = dict(_tensors(target, "target", path))
        return _config(file, tensors), tensors


def _library(name: str) -> Any:
    remedy = f"T5X checkpoints need {name}. Run pip install 'tfdpsq[t5x]'."
    return validation.library(name, remedy)


def _tensors(node: Any, name: str, path: pathlib.Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the arrays below a node of the tree, by their path in it."""
    if isinstance(node, np.ndarray):
        yield name, Tensor(path / CHECKPOINT_FILE, node.shape, lambda: node)
    elif isinstance(node, str) and node.startswith(_PLACEHOLDER):
        yield name, _zarr(path / node.removeprefix(_PLACEHOLDER))
    elif isinstance(node, Mapping) and isinstance(node.get("driver"), str):
        # TensorStore before 0.1.14 had the path one level up.
        place = node.get("kvstore", {}).get("path", node.get("path"))
        yield name, _zarr(path / str(place))
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _tensors(child, f"{name}/{key}", path)


def _zarr(directory: pathlib.Path) -> Tensor:
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": os.path.abspath(directory)},
        "fill_missing_data_reads": False,  # a missing chunk does not mean zeros
    }
    with reading(directory):
        store = _library("tensorstore").open(spec, open=True).result()
    return Tensor(directory, tuple(store.shape), lambda: store.read().result())


def _config(file: pathlib.Path, tensors: Mapping[str, Tensor]) -> T5Config:
    """Returns the sizes that the shapes of the weights make it."""

    def shape(name: str) -> tuple[int, ...]:
        if f"target/{name}" not in tensors:
            raise not_t5(file, f"it lacks the weight target/{name}")
        return tensors[f"target/{name}"].shape

    gated = "target/encoder/layers_0/mlp/wi_0/kernel" in tensors
    vocabulary, hidden = shape("token_embedder/embedding")
    layers = sum("encoder/layers_" in name and "/query/" in name for name in tensors)
    heads, _ = shape("encoder/relpos_bias/rel_embedding")
    _, inner = shape("encoder/layers_0/attention/query/kernel")
    _, wide = shape(f"encoder/layers_0/mlp/{'wi_0' if gated else 'wi'}/kernel")
    sizes = vocabulary, layers, heads, hidden, wide, inner // heads
    return T5Config(*sizes, "1.1" if gated else "1.0")

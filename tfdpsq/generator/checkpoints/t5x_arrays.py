"""The arrays of a T5X checkpoint: a msgpack file, and zarr directories next to it.

The file `checkpoint` is flax's: nested maps whose leaves are arrays (an extension
type: shape, dtype and bytes) or, for those kept in a zarr (version 2) directory, a
TensorStore spec or orbax's placeholder, both of which name the directory.

Needs msgpack, of the extra `t5x`.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import files
from tfdpsq.generator.checkpoints import zarr
from tfdpsq.generator.checkpoints.weights import Entry

CHECKPOINT_FILE = "checkpoint"

_COPY = "Copy the whole checkpoint directory again"
_VERSION = 3  # of the file; 2 differed in having bfloat16 as uint16
_ARRAY = 1  # flax's msgpack extension type for arrays
_PLACEHOLDER = "PLACEHOLDER://"


class _Inline(NamedTuple):
    """An array inside the msgpack file, in row-major order."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes


class Arrays:
    """All arrays under `target` in a T5X checkpoint; a `weights.Source`.

    Attributes:
      path: the checkpoint's directory.
      tensors: the arrays, by their path in the tree: "target/encoder/...".
    """

    def __init__(self, path: pathlib.Path):
        """Reads the headers, and the values that are inside the file `checkpoint`.

        Args:
          path: the directory that holds the file `checkpoint`.

        Raises:
          InputError: msgpack is not installed.
          DataError: the file or a directory is missing, damaged, or of another kind.
        """
        self.path = path
        self._arrays: dict[str, np.ndarray] = {}  # inside the msgpack file
        self._zarrs: dict[str, zarr.Array] = {}  # all others
        leaves = _leaves(path / CHECKPOINT_FILE)
        self.tensors: Mapping[str, Entry] = dict(self._entries(leaves))

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of an array; see `weights.Source`."""
        if name in self._zarrs:
            return self._zarrs[name].read(start, stop)
        return self._arrays[name][start:stop]

    def _entries(self, leaves: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
        file = self.path / CHECKPOINT_FILE
        specs = {
            name[: -len("/driver")]: value
            for name, value in leaves.items()
            if name.endswith("/driver") and not name.endswith("/kvstore/driver")
        }
        for name, leaf in leaves.items():
            if isinstance(leaf, _Inline):
                self._arrays[name] = _inline_array(leaf, name, file)
                yield name, Entry(leaf.shape, leaf.dtype, file)
            elif isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER):
                directory = self.path / leaf[len(_PLACEHOLDER) :]
                yield name, self._zarr_entry(name, directory, None)
            elif not any(name.startswith(f"{spec}/") for spec in specs):
                raise validation.DataError(file, f"{name} is {leaf!r}, no array", _COPY)
        for name, driver in specs.items():
            # TensorStore before 0.1.14 had the path one level up.
            place = leaves.get(f"{name}/kvstore/path", leaves.get(f"{name}/path"))
            if driver != "zarr" or not isinstance(place, str):
                raise validation.DataError(
                    file,
                    f"weight {name} is kept by TensorStore's driver {driver!r} at "
                    f"{place!r}",
                    "Only directories of zarr version 2 can be read",
                )
            shape = leaves.get(f"{name}/metadata/shape")
            yield name, self._zarr_entry(name, self.path / place, shape)

    def _zarr_entry(self, name: str, directory: pathlib.Path, shape: Any) -> Entry:
        """The entry of an array in a directory, which should have that `shape`."""
        array = self._zarrs[name] = zarr.Array(directory, name)
        if shape is not None and list(shape) != list(array.shape):
            raise validation.DataError(
                directory / ".zarray",
                f"weight {name} has shape {list(array.shape)}, the file "
                f"{CHECKPOINT_FILE} says {list(shape)}",
                _COPY,
            )
        return Entry(array.shape, array.dtype, directory)


def library() -> Any:
    """The module msgpack.

    Raises:
      InputError: it is not installed.
    """
    return validation.library(
        "msgpack",
        "T5X checkpoints need msgpack, which is not installed. Run "
        "pip install 'tfdpsq[t5x]'.",
    )


def save(
    directory: pathlib.Path,
    arrays: Iterable[tuple[str, tuple[int, ...], bool, Iterable[np.ndarray]]],
    dtype: str,
) -> None:
    """Writes arrays as a T5X checkpoint; the file `checkpoint` last.

    To flush the arrays to the device is the caller's (`files.atomic_directory` does).

    Args:
      directory: an existing directory.
      arrays: each one's path in the tree ("target/..."), its shape, whether it goes
        into the msgpack file, and its values as consecutive blocks of rows.
      dtype: of the values.
    """
    msgpack = library()

    def inline(shape: Sequence[int], kind: str, data: bytes) -> Any:
        return msgpack.ExtType(_ARRAY, msgpack.packb((list(shape), kind, data)))

    step = inline((), "int32", np.int32(0).tobytes())
    tree: dict[str, Any] = {"state": {"param_states": {}, "step": step}}
    for name, shape, small, blocks in arrays:
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        if small:
            data = b"".join(block.tobytes() for block in blocks)
            node[last] = inline(shape, dtype, data)
        else:
            place = name.replace("/", ".")
            metadata = zarr.write(directory / place, shape, dtype, blocks)
            # Where the directory is, seen from the checkpoint, as T5X has it.
            store = {"driver": "file", "path": place}
            node[last] = {"driver": "zarr", "kvstore": store, "metadata": metadata}
    content = msgpack.packb({"version": _VERSION, "optimizer": tree})
    files.atomic_write(directory / CHECKPOINT_FILE, content)


# -- The msgpack file -------------------------------------------------------------


def _leaves(file: pathlib.Path) -> dict[str, Any]:
    """Every leaf under `target`, by its path; arrays as `_Inline`."""
    msgpack = library()
    with open(file, "rb") as stream:
        size = os.path.getsize(file)
        unpacker = msgpack.Unpacker(
            stream,
            raw=False,
            strict_map_key=False,
            max_buffer_size=size + (1 << 20),
            ext_hook=_extension,
        )
        try:
            found = dict(_walk(unpacker, stream, ()))
        except validation.InputError:
            raise
        except msgpack.OutOfData as error:
            raise validation.DataError(
                file, f"it is truncated: its {size} bytes end inside a value", _COPY
            ) from error
        except (
            ValueError,
            TypeError,
            RecursionError,
            msgpack.UnpackException,
        ) as error:
            reason = str(error) or type(error).__name__
            raise validation.DataError(
                file, f"it is damaged, or no msgpack file of flax ({reason})", _COPY
            ) from error
    if not found:
        raise validation.DataError(
            file,
            "it has no weights under 'target'",
            "Give a checkpoint of T5X, not of another flax program",
        )
    return found


def _walk(
    unpacker: Any, stream: BinaryIO, path: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    """The leaves of the value that comes next, or nothing if it is not `target`."""
    if path and path[0] != "target":
        unpacker.skip()
        return
    start = unpacker.tell()
    kind = os.pread(stream.fileno(), 1, start)[:1]
    if kind in (b"\xde", b"\xdf") or b"\x80" <= kind <= b"\x8f":
        for _ in range(unpacker.read_map_header()):
            key = str(unpacker.unpack())
            # T5X has all under `optimizer`, orbax does not.
            below = () if not path and key == "optimizer" else (*path, key)
            yield from _walk(unpacker, stream, below)
    else:
        yield "/".join(path), unpacker.unpack()


def _extension(code: int, data: bytes) -> Any:
    """Reads an array of flax; values of other extensions stay as they are."""
    if code != _ARRAY:
        return library().ExtType(code, data)
    shape, dtype, values = library().unpackb(data, raw=False)
    return _Inline(tuple(map(int, shape)), str(dtype), values)


def _inline_array(leaf: _Inline, name: str, file: pathlib.Path) -> np.ndarray:
    try:
        kind = np.dtype(tf.as_dtype(leaf.dtype).as_numpy_dtype)
    except TypeError:
        return np.empty(0)  # `weights.check` refuses such a dtype
    wanted = kind.itemsize * math.prod(leaf.shape)
    if len(leaf.data) != wanted:
        raise validation.DataError(
            file,
            f"weight {name} has shape {list(leaf.shape)} of {leaf.dtype}, {wanted} "
            f"bytes, and {len(leaf.data)} are there",
            _COPY,
        )
    return np.frombuffer(leaf.data, kind).reshape(leaf.shape)

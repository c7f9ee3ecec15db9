"""The arrays of a T5X checkpoint: a msgpack file, and zarr directories beside it.

The file `checkpoint` is flax's: nested maps whose leaves are arrays (an extension
type: shape, dtype and bytes) or, for those kept in a zarr (version 2) directory, a
TensorStore spec or orbax's placeholder, both of which name the directory. The file
may be large, so of arrays in it only the place is noted at first.

Needs msgpack and tensorstore, the extra `t5x`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import files
from tfdpsq.generator.checkpoints.weights import Entry

CHECKPOINT_FILE = "checkpoint"

_COPY = "Copy the whole checkpoint directory again"
_VERSION = 3  # of the file; 2 differed in having bfloat16 as uint16
_ARRAY = 1  # flax's msgpack extension type for arrays
_PLACEHOLDER = "PLACEHOLDER://"
# The sizes that msgpack's headers of extensions and of byte strings have.
_EXTENSION_HEADERS = {0xC7: 3, 0xC8: 4, 0xC9: 6, **dict.fromkeys(range(0xD4, 0xD9), 2)}
_BYTES_HEADERS = {0xC4: 2, 0xC5: 3, 0xC6: 5}
# zarr's names of dtypes that are not NumPy's own.
_ZARR_DTYPES = {"<f4": "float32", "<f2": "float16", "bfloat16": "bfloat16"}
# Bytes of decoded chunks kept, so that reading by rows need not decode them again:
# T5X's chunks have up to as many.
_CACHE = 64 << 20


class Arrays:
    """All arrays under `target` in a T5X checkpoint; a `weights.Source`.

    Attributes:
      path: the checkpoint's directory.
      tensors: the arrays, by their path in the tree: "target/encoder/...".
    """

    def __init__(self, path: pathlib.Path):
        """Reads the headers.

        Args:
          path: the directory that holds the file `checkpoint`.

        Raises:
          InputError: tensorstore or msgpack is not installed.
          DataError: the file or a directory is missing, damaged, or of another kind.
        """
        self.path = path
        self._offsets: dict[str, int] = {}  # of arrays inside the msgpack file
        self._opened: tuple[str, Any] = ("", None)
        libraries()
        leaves = _leaves(path / CHECKPOINT_FILE)
        self.tensors: Mapping[str, Entry] = dict(self._entries(leaves))

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of an array; see `weights.Source`."""
        entry = self.tensors[name]
        if name not in self._offsets:
            return self._read_zarr(name, start, stop)
        shape = (stop - start, *entry.shape[1:])
        kind = np.dtype(tf.as_dtype(entry.dtype).as_numpy_dtype)
        row = kind.itemsize * math.prod(shape[1:])
        with open(entry.file, "rb") as file:
            file.seek(self._offsets[name] + start * row)
            return np.frombuffer(file.read(shape[0] * row), kind).reshape(shape)

    def _read_zarr(self, name: str, start: int, stop: int) -> np.ndarray:
        entry = self.tensors[name]
        directory = os.fspath(entry.file)
        try:
            if stop - start == entry.shape[0]:
                return _open_zarr(directory, 0).read().result()
            if self._opened[0] != name:
                self._opened = ("", None)  # first frees what it has cached
                self._opened = (name, _open_zarr(directory, _CACHE))
            return self._opened[1][start:stop].read().result()
        except (ValueError, OSError) as error:
            reason = str(error).partition(" [source")[0]
            raise validation.DataError(
                directory, f"weight {name} is damaged ({reason})", _COPY
            ) from error

    def _entries(self, leaves: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
        file = self.path / CHECKPOINT_FILE
        specs = {
            name[: -len("/driver")]: value
            for name, value in leaves.items()
            if name.endswith("/driver") and not name.endswith("/kvstore/driver")
        }
        for name, leaf in leaves.items():
            if isinstance(leaf, tuple):
                offset, shape, dtype = leaf
                self._offsets[name] = offset
                yield name, Entry(shape, dtype, file)
            elif isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER):
                directory = self.path / leaf[len(_PLACEHOLDER) :]
                yield name, _zarr_entry(name, directory, None)
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
            yield name, _zarr_entry(name, self.path / place, shape)


def libraries() -> tuple[Any, Any]:
    """The modules msgpack and tensorstore.

    Raises:
      InputError: one is not installed.
    """
    try:
        import msgpack
        import tensorstore
    except ImportError as error:
        raise validation.InputError(
            f"T5X checkpoints need {error.name}, which is not installed. Run "
            "pip install 'tfdpsq[t5x]'."
        ) from error
    return msgpack, tensorstore


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
    msgpack, _ = libraries()

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
            metadata = _write_zarr(directory / place, shape, dtype, blocks)
            # Where the directory is, seen from the checkpoint, as T5X has it.
            store = {"driver": "file", "path": place}
            node[last] = {"driver": "zarr", "kvstore": store, "metadata": metadata}
    content = msgpack.packb({"version": _VERSION, "optimizer": tree})
    files.atomic_write(directory / CHECKPOINT_FILE, content)


# -- The msgpack file -------------------------------------------------------------


def _leaves(file: pathlib.Path) -> dict[str, Any]:
    """Every leaf under `target`, by its path.

    Returns:
      Arrays as (place of their values in the file, shape, dtype); else what is there.
    """
    msgpack, _ = libraries()
    with open(file, "rb") as stream:
        size = os.path.getsize(file)
        unpacker = msgpack.Unpacker(
            stream, raw=False, strict_map_key=False, max_buffer_size=size + (1 << 20)
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
    elif kind and kind[0] in _EXTENSION_HEADERS:
        unpacker.skip()
        name = "/".join(path)
        yield name, _array_header(stream, start, unpacker.tell(), name)
    else:
        yield "/".join(path), unpacker.unpack()


def _array_header(
    stream: BinaryIO, start: int, end: int, name: str
) -> tuple[int, tuple[int, ...], str]:
    """Where an array's values are in the file, its shape and its dtype."""
    msgpack, _ = libraries()
    head = os.pread(stream.fileno(), min(end - start, 512), start)
    begin = _EXTENSION_HEADERS[head[0]]
    if head[begin - 1] != _ARRAY:
        raise validation.DataError(stream.name, f"weight {name} is no array", _COPY)
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(head[begin:])
    unpacker.read_array_header()
    shape, dtype = tuple(map(int, unpacker.unpack())), str(unpacker.unpack())
    begin += unpacker.tell()
    offset = start + begin + _BYTES_HEADERS.get(head[begin], 0)
    try:
        wanted = tf.as_dtype(dtype).size * math.prod(shape)
    except TypeError:
        wanted = end - offset  # `weights.check` says that it is no dtype of weights
    if end - offset != wanted:
        raise validation.DataError(
            stream.name,
            f"weight {name} has shape {list(shape)} of {dtype}, {wanted} bytes, and "
            f"{end - offset} are there",
            _COPY,
        )
    return offset, shape, dtype


# -- zarr directories -------------------------------------------------------------


def _zarr_entry(name: str, directory: pathlib.Path, shape: Any) -> Entry:
    """A directory's header, after comparing it with the `shape` it should have."""
    header = directory / ".zarray"
    try:
        values = json.loads(header.read_text("utf-8"))
        found = tuple(map(int, values["shape"]))
        chunks = tuple(map(int, values["chunks"]))
        grid = [range(math.ceil(n / chunks[i])) for i, n in enumerate(found)]
        dtype = str(values["dtype"])
    except OSError as error:
        raise validation.DataError(
            header, f"weight {name} cannot be read ({error.strerror})", _COPY
        ) from error
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise validation.DataError(
            header, f"weight {name} has a damaged header ({error!r})", _COPY
        ) from error
    if shape is not None and list(shape) != list(found):
        raise validation.DataError(
            header,
            f"weight {name} has shape {list(found)}, the file {CHECKPOINT_FILE} says "
            f"{list(shape)}",
            _COPY,
        )
    # TensorStore would take a missing chunk for zeros.
    separator = values.get("dimension_separator", ".")
    for place in itertools.product(*grid):
        chunk = directory / separator.join(map(str, place))
        if not chunk.is_file():
            raise validation.DataError(
                chunk, f"this part of weight {name} is missing", _COPY
            )
    return Entry(found, _ZARR_DTYPES.get(dtype, dtype), directory)


def _open_zarr(directory: str, cached_bytes: int) -> Any:
    _, tensorstore = libraries()
    context = {
        "cache_pool": {"total_bytes_limit": cached_bytes},
        # One chunk at a time, since each may be a good part of the memory.
        "data_copy_concurrency": {"limit": 1},
        "file_io_concurrency": {"limit": 1},
    }
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": directory},
        "context": context,
    }
    return tensorstore.open(spec, open=True).result()


def _write_zarr(
    directory: pathlib.Path,
    shape: tuple[int, ...],
    dtype: str,
    blocks: Iterable[np.ndarray],
) -> dict[str, Any]:
    """Writes an array, each block a chunk of rows.

    Returns:
      What the msgpack file says of it.
    """
    _, tensorstore = libraries()
    codes = {name: code for code, name in _ZARR_DTYPES.items()}
    store, start = None, 0
    metadata: dict[str, Any] = {
        "compressor": {"id": "gzip", "level": 1},
        "dtype": codes[dtype],
        "shape": list(shape),
    }
    for block in blocks:
        if store is None:
            metadata["chunks"] = list(block.shape)
            spec = {
                "driver": "zarr",
                "kvstore": {"driver": "file", "path": os.fspath(directory)},
                "metadata": metadata,
                # Every chunk flushed by itself takes seconds for a tiny model.
                "context": {"file_io_sync": False},
            }
            store = tensorstore.open(spec, create=True).result()
        store[start : start + len(block)].write(block).result()
        start += len(block)
    return metadata

"""Arrays in zarr (version 2) directories: read by rows, written a block at a time.

A directory holds the header `.zarray` and a file per chunk, which is a box of the
array, in T5X gzipped. Those are unpacked here, one at a time, as memory matters;
compressors that Python lacks are left to tensorstore.

Source: zarr-specs.readthedocs.io, version 2.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from tfdpsq import validation

_COPY = "Copy the whole checkpoint directory again"
_UNPACKED_HERE = ("gzip", "zlib")
# Bytes of unpacked chunks kept, so that reading by rows unpacks most only once.
_CACHE = 64 << 20
_PIECE = 1 << 18


class Array:
    """One array on disk.

    Attributes:
      name: what it is called in messages.
      directory: where it is.
      shape: its shape.
      dtype: NumPy's name of its dtype, such as "float32".
    """

    def __init__(self, directory: pathlib.Path, name: str):
        """Reads the header and looks whether all chunks are there.

        Raises:
          DataError: the header is missing or damaged, or a chunk is missing.
        """
        header = directory / ".zarray"
        try:
            values = validation.parse_json(header.read_text("utf-8"))
            self.shape = tuple(map(int, values["shape"]))
            self._chunks = tuple(map(int, values["chunks"]))
            grid = [range(-(-n // self._chunks[i])) for i, n in enumerate(self.shape)]
            self._separator = str(values.get("dimension_separator", "."))
            self._order = str(values.get("order", "C"))
            compressor = values.get("compressor") or {}
            self._compressor = compressor.get("id")
            self._filtered = bool(values.get("filters"))
            self._numpy_dtype = _numpy_dtype(str(values["dtype"]))
        except OSError as error:
            raise validation.DataError(
                header, f"weight {name} cannot be read ({error.strerror})", _COPY
            ) from error
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise validation.DataError(
                header, f"weight {name} has a damaged header ({error!r})", _COPY
            ) from error
        self.dtype = self._numpy_dtype.name
        self.name, self.directory = name, directory
        self._kept: dict[pathlib.Path, np.ndarray] = {}
        # To zarr, a chunk that is not there holds zeros; to T5X it is never so.
        for place in itertools.product(*grid):
            if not self._file(place).is_file():
                raise validation.DataError(
                    self._file(place), f"this part of weight {name} is missing", _COPY
                )

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the first axis.

        Raises:
          DataError: a chunk is damaged.
          InputError: tensorstore is needed and not installed.
        """
        if self._filtered or self._compressor not in (None, *_UNPACKED_HERE):
            return self._read_by_tensorstore(start, stop)
        rows = np.empty((stop - start, *self.shape[1:]), self._numpy_dtype)
        ends = (stop, *self.shape[1:])
        grid = [range(-(-end // size)) for end, size in zip(ends, self._chunks)]
        grid[0] = grid[0][start // self._chunks[0] :]
        for place in itertools.product(*grid):
            chunk = self._chunk(self._file(place))
            target, part = [], []
            for axis, (index, size) in enumerate(zip(place, self._chunks)):
                low = index * size
                begin = max(low, start) if axis == 0 else low
                end = min(low + size, ends[axis])
                offset = start if axis == 0 else 0
                target.append(slice(begin - offset, end - offset))
                part.append(slice(begin - low, end - low))
            rows[tuple(target)] = chunk[tuple(part)]
        if stop == self.shape[0]:
            self._kept.clear()
        return rows

    def _file(self, place: Iterable[int]) -> pathlib.Path:
        return self.directory / self._separator.join(map(str, place))

    def _chunk(self, path: pathlib.Path) -> np.ndarray:
        if path in self._kept:
            return self._kept[path]
        size = math.prod(self._chunks) * self._numpy_dtype.itemsize
        while self._kept and (len(self._kept) + 1) * size > _CACHE:
            del self._kept[next(iter(self._kept))]
        data, filled = bytearray(size), 0
        try:
            with open(path, "rb") as file:
                for piece in _unpacked(file, self._compressor is not None):
                    data[filled : filled + len(piece)] = piece
                    filled += len(piece)
        except (OSError, zlib.error) as error:
            raise self._damaged(path, str(error)) from error
        if filled != size:
            raise self._damaged(path, f"{filled} bytes and not {size}")
        chunk = np.frombuffer(data, self._numpy_dtype)
        self._kept[path] = chunk.reshape(self._chunks, order=self._order)
        return self._kept[path]

    def _read_by_tensorstore(self, start: int, stop: int) -> np.ndarray:
        try:
            import tensorstore
        except ImportError as error:
            raise validation.InputError(
                f"{self.directory} is compressed by {self._compressor}, which needs "
                "tensorstore. Run pip install 'tfdpsq[t5x]'."
            ) from error
        place = {"driver": "file", "path": os.fspath(self.directory)}
        try:
            store = tensorstore.open({"driver": "zarr", "kvstore": place}, open=True)
            return store.result()[start:stop].read().result()
        except (ValueError, OSError) as error:
            reason = str(error).partition(" [source")[0]
            raise self._damaged(self.directory, reason) from error

    def _damaged(self, path: pathlib.Path, reason: str) -> Exception:
        return validation.DataError(
            path, f"weight {self.name} is truncated or damaged ({reason})", _COPY
        )


def write(
    directory: pathlib.Path,
    shape: tuple[int, ...],
    dtype: str,
    blocks: Iterable[np.ndarray],
) -> dict[str, Any]:
    """Writes an array; the same values give the same bytes.

    Args:
      directory: where to; must not exist.
      shape: of the whole array.
      dtype: "float32", "float16" or "bfloat16".
      blocks: its rows, the same number in each but the last; each makes a chunk.

    Returns:
      What TensorStore says of it: chunks, compressor, dtype and shape.
    """
    directory.mkdir()
    code = "bfloat16" if dtype == "bfloat16" else np.dtype(dtype).str
    metadata: dict[str, Any] = {
        "compressor": {"id": "gzip", "level": 1},
        "dtype": code,
        "shape": list(shape),
    }
    for index, block in enumerate(blocks):
        chunks = metadata.setdefault("chunks", list(block.shape))
        data = block.tobytes()
        data += bytes(math.prod(chunks) * block.dtype.itemsize - len(data))
        name = ".".join(map(str, (index, *[0] * (len(shape) - 1))))
        (directory / name).write_bytes(gzip.compress(data, 1, mtime=0))
    header = {
        **metadata,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "zarr_format": 2,
    }
    (directory / ".zarray").write_text(json.dumps(header, sort_keys=True))
    return metadata


def _unpacked(file: BinaryIO, compressed: bool) -> Iterator[bytes]:
    """A file's content in small pieces, unpacked if it is zlib's or gzip's."""
    unpacker = zlib.decompressobj(wbits=47) if compressed else None
    while piece := file.read(_PIECE):
        yield unpacker.decompress(piece) if unpacker else piece
    if unpacker and not unpacker.eof:
        raise zlib.error("it ends too early")


def _numpy_dtype(code: str) -> np.dtype:
    """NumPy's dtype of zarr's code, and of the one that TensorStore adds."""
    return np.dtype(tf.bfloat16.as_numpy_dtype if code == "bfloat16" else code)

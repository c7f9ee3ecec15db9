"""Arrays in zarr (version 2) directories: read by rows, written a block at a time.

A directory holds the header `.zarray` and a file per chunk, which is a box of the
array. TensorStore reads all of them. Written chunks are gzipped as T5X has them, here,
where the same values give the same bytes whatever the version of TensorStore.

Needs tensorstore, of the extra `t5x`, to read.
Source: zarr-specs.readthedocs.io, version 2.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tfdpsq import validation

_COPY = "Copy the whole checkpoint directory again"
# Bytes of unpacked chunks kept of all arrays together, so that reading by rows unpacks
# most only once.
_CACHE = 4 << 20
# Seconds to wait for an answer, and how often. TensorStore ends threads without work;
# on a machine whose memory was full one read was seen to wait for ever, with none left.
_PATIENCE, _TRIES = 120.0, 5


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
          InputError: tensorstore is not installed.
        """
        tensorstore = validation.library(
            "tensorstore",
            f"{directory} is a zarr directory, which needs tensorstore to be read. "
            "Run pip install 'tfdpsq[t5x]'.",
        )
        self.name, self.directory, self._store = name, directory, None
        header = directory / ".zarray"
        place = {"driver": "file", "path": os.path.abspath(directory)}
        spec = {"driver": "zarr", "kvstore": place}
        self._open = lambda: tensorstore.open(
            spec, open=True, context=_context(tensorstore)
        ).result(timeout=_PATIENCE)
        try:
            validation.parse_json(header.read_text("utf-8"))
            self._store = self._answer(lambda store: store)
        except validation.DataError:
            raise
        except OSError as error:
            raise validation.DataError(
                header,
                f"weight {name} cannot be read ({error.strerror or error})",
                _COPY,
            ) from error
        except ValueError as error:
            raise validation.DataError(
                header, f"weight {name} has a damaged header ({_reason(error)})", _COPY
            ) from error
        self.shape = tuple(map(int, self._store.shape))
        self.dtype = np.dtype(self._store.dtype.numpy_dtype).name
        # To zarr, a chunk that is not there holds zeros; to T5X it is never so.
        sizes = self._store.chunk_layout.read_chunk.shape
        separator = self._store.spec().to_json()["metadata"]["dimension_separator"]
        grid = [range(-(-n // size)) for n, size in zip(self.shape, sizes)]
        for index in itertools.product(*grid):
            file = directory / separator.join(map(str, index))
            if not file.is_file():
                raise validation.DataError(
                    file, f"this part of weight {name} is missing", _COPY
                )

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the first axis.

        Raises:
          DataError: a chunk is damaged, or no answer comes.
        """
        try:
            return self._answer(
                lambda store: store[start:stop].read().result(timeout=_PATIENCE)
            )
        except validation.DataError:
            raise
        except (ValueError, OSError) as error:
            chunk = re.search(r'local file "([^"]+)"', str(error))
            raise validation.DataError(
                chunk[1] if chunk else self.directory,
                f"weight {self.name} is truncated or damaged ({_reason(error)})",
                _COPY,
            ) from error

    def _answer(self, ask: Callable[[Any], Any]) -> Any:
        """Asks the open array; reopens it and asks again if no answer comes.

        Raises:
          DataError: no answer comes.
        """
        for _ in range(_TRIES):
            try:
                if self._store is None:
                    self._store = self._open()
                return ask(self._store)
            except TimeoutError:
                self._store = None
                _context.cache_clear()  # what waits holds the limits of its context
        raise validation.DataError(
            self.directory,
            f"TensorStore gave no answer about weight {self.name} in "
            f"{_TRIES * _PATIENCE:.0f} s",
            "Run the same command again, with more free memory",
        )


@functools.cache
def _context(tensorstore: Any) -> Any:
    """Returns what arrays share: a cache for each would in the end hold all of them."""
    one = {"limit": 1}  # chunks unpacked at a time: each is in memory next to the cache
    return tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": _CACHE},
            "data_copy_concurrency": one,
            "file_io_concurrency": one,
        }
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


def _reason(error: Exception) -> str:
    """Returns TensorStore's message without the places in its source."""
    return str(error).partition(" [")[0]

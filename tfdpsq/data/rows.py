"""Rows of fixed width on disk, read by number: what DP training samples from.

Poisson sampling draws rows from the whole data set at every step, which a stream of
shards with a shuffle buffer cannot do and memory may not hold. So tokenised pairs are
written once, as one array of records (`rows.npy`, next to a manifest), which is mapped
into memory. Tokenised private queries are private queries: a store of them, and its
fingerprint, on which guesses at them could be tested, are not for release.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tfdpsq.data import io
from tfdpsq.validation import DataError, InputError

ROWS = "rows.npy"
_REMEDY = "Move the directory away and make it again"


class RowStore:
    """A directory of rows that `write_rows` made. `len()` is their number.

    `path` is the directory, `fingerprint` the SHA-256 of fields and rows in order.
    """

    def __init__(self, path: str | os.PathLike):
        """Maps the rows; raises DataError if a file is missing or truncated."""
        self.path = Path(path)
        self._manifest = io.read_json(self.path / io.MANIFEST, _REMEDY)
        try:
            self.fingerprint: str = self._manifest["files"][ROWS]
            self._rows = np.load(self.path / ROWS, mmap_mode="r")
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"it cannot be read ({str(error)[:200]})"
            raise DataError(self.path / ROWS, problem, _REMEDY) from error

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._rows)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Reads rows by number.

        Args:
          indices: [R] integers from 0 to below `len(self)`, in any order.

        Returns:
          Field -> [R, ...], of the types that were written, in the order asked.
        """
        found = np.take(self._rows, np.asarray(indices, np.int64), axis=0)
        return {name: found[name].copy() for name in found.dtype.names or ()}

    def verify(self) -> None:
        """Reads everything; raises DataError if it is damaged."""
        io.verify_manifest(self.path, self._manifest, _REMEDY)


def write_rows(
    path: str | os.PathLike, chunks: Iterable[Mapping[str, np.ndarray]]
) -> RowStore:
    """Writes rows in the order given, all of them or nothing, and opens the store.

    Args:
      path: the directory to make; it must not exist, or be empty.
      chunks: the rows, streamed; field -> [rows of this chunk, ...], of integers,
        floats or booleans, all with the same fields, types and shapes; at least one.
    """
    row: np.dtype | None = None
    count = 0
    with io.atomic_directory(path) as partial:
        with open(partial / ROWS, "wb") as file:
            for chunk in chunks:
                if row is None:
                    row = _row_type(chunk)
                    _write_header(file, row, 0)
                packed = np.empty(len(next(iter(chunk.values()))), row)
                for name in row.names or ():
                    packed[name] = chunk[name]
                file.write(packed.tobytes())
                count += len(packed)
            if row is None:
                raise InputError("no rows were given; give at least one.")
            file.seek(0)
            _write_header(file, row, count)
        io.write_manifest(partial, {})
    return RowStore(path)


def _row_type(chunk: Mapping[str, Any]) -> np.dtype:
    """Returns the type of a row: all fields packed, sorted by name, little-endian."""
    return np.dtype(
        [
            (name, np.asarray(values).dtype.newbyteorder("<"), np.shape(values)[1:])
            for name, values in sorted(chunk.items())
        ]
    )


def _write_header(file: BinaryIO, row: np.dtype, count: int) -> None:
    """Writes the header of an `.npy` file, which NumPy pads to fit any count."""
    descr = np.lib.format.dtype_to_descr(row)
    header = {"descr": descr, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)

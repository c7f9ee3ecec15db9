"""Rows of fixed width on disk, read by number: what DP training samples from.

Poisson sampling draws rows from the whole data set at every step, which a stream of
shards with a shuffle buffer cannot do and memory may not hold. So tokenised pairs are
written once, as one array of records (`rows.npy`, next to a manifest), which is mapped
into memory. Tokenised private queries are private queries: a store of them, and its
fingerprint, on which guesses at them could be tested, are not for release.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdpsq.data import io
from tfdpsq.validation import DataError, InputError

ROWS = "rows.npy"
# Of the array's header, which is written again once the number of rows is known.
_HEADER = 1024
_REMEDY = "Move the directory away and make it again"


class RowStore:
    """A directory of rows that `write_rows` made. `len()` is their number.

    Attributes:
      path: the directory.
      fingerprint: SHA-256, in hex, of fields and rows in their order.
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
        return {
            name: np.ascontiguousarray(found[name]) for name in found.dtype.names or ()
        }

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
        floats or booleans, all with the same fields, types and shapes.

    Raises:
      InputError: a chunk unlike the first, or none.
    """
    row: np.dtype | None = None
    count = 0
    with io.atomic_directory(path) as partial:
        with open(partial / ROWS, "wb") as file:
            file.write(bytes(_HEADER))
            for number, chunk in enumerate(chunks):
                described = _row_type(chunk)
                if row not in (None, described):
                    raise InputError(
                        f"chunk {number} has the fields {described}, and the first "
                        f"{row}; give all chunks the same."
                    )
                row = described
                packed = np.empty(len(next(iter(chunk.values()))), row)
                for name, values in chunk.items():
                    packed[name] = values
                file.write(packed.tobytes())
                count += len(packed)
            if row is None:
                raise InputError("no rows were given; give at least one.")
            file.seek(0)
            file.write(_header(row, count))
        io.write_manifest(partial, {})
    return RowStore(path)


def _row_type(chunk: Mapping[str, Any]) -> np.dtype:
    """Returns the type of a row: all fields packed, sorted by name, little-endian."""
    fields = {name: np.asarray(values) for name, values in chunk.items()}
    return np.dtype(
        [
            (name, fields[name].dtype.newbyteorder("<"), fields[name].shape[1:])
            for name in sorted(fields)
        ]
    )


def _header(row: np.dtype, count: int) -> bytes:
    """Returns the header of an `.npy` file, version 1.0, padded to `_HEADER` bytes."""
    magic = np.lib.format.magic(1, 0)
    described = {
        "descr": np.lib.format.dtype_to_descr(row),
        "fortran_order": False,
        "shape": (count,),
    }
    size = _HEADER - len(magic) - 2
    return magic + struct.pack("<H", size) + f"{described!r:<{size - 1}}\n".encode()

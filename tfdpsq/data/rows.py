"""Rows of fixed width on disk, read by number: what DP training samples from.

Poisson sampling draws rows from the whole data set at every step, which a stream
of shards with a shuffle buffer cannot do and memory may not hold. So tokenised pairs
are written once, each as the same number of bytes, and a batch is read by offset:

    manifest.json     fields with types and shapes, counts, checksums, fingerprint
    rows-00000.bin    rows, one behind the other; each its fields in the manifest's
    rows-00001.bin    order, little-endian, row-major

Memory does not grow with the number of rows, neither in writing nor in reading.
Tokenised private queries are private queries: a store of them, and its fingerprint,
on which guesses at them could be tested, are not for release.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tfdpsq.data.files import atomic_directory, write_json
from tfdpsq.validation import DataError, InputError, parse_json, positive_integer

FORMAT = "tfdpsq-rows/1"

_MANIFEST = "manifest.json"
_REWRITE = (
    "Copy the directory again from where it was made, or move it away and make it again"
)


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A file of rows.

    Attributes:
      file: its name.
      count: rows in it.
      sha256: of its bytes, in hex.
    """

    file: str
    count: int
    sha256: str


class RowStore:
    """A directory of rows that `write_rows` made. `len()` is their number.

    Keeps no file open, so it may be used from several threads and processes.

    Attributes:
      path: the directory.
      fingerprint: SHA-256, in hex, of fields and rows in their order, however they
        are cut into files.
    """

    def __init__(self, path: str | os.PathLike):
        """Reads the manifest, and checks that every file has its size.

        Args:
          path: the directory.

        Raises:
          DataError: the manifest is missing or was edited, a file is missing or
            truncated; names it.
        """
        self.path = Path(path)
        manifest = _read_manifest(self.path / _MANIFEST)
        self.fingerprint: str = manifest["fingerprint"]
        self._fields = manifest["fields"]
        self._row = _row_type(self._fields)
        self._shards = [_Shard(**shard) for shard in manifest["shards"]]
        # Number of the first row of each shard, and of the row after the last.
        self._starts: list[int] = np.cumsum(
            [0] + [shard.count for shard in self._shards]
        ).tolist()
        for shard in self._shards:
            self._check_size(shard)

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self._starts[-1]

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Reads rows by number, those alone, each once.

        Args:
          indices: [R] integers from 0 to below `len(self)`; in any order, and
            repeated where a row is wanted more than once.

        Returns:
          Field -> [R, ...], of the types and shapes that were written; row i is row
          `indices[i]` of the store.

        Raises:
          InputError: an index is out of range or no integer.
          DataError: a file is missing or truncated; names it.
        """
        wanted, places = np.unique(self._checked(indices), return_inverse=True)
        rows = np.empty(len(wanted), self._row)
        # Sorted, so each shard's rows are neighbours here.
        cuts = wanted.searchsorted(np.array(self._starts)).tolist()
        for shard, start, first, last in zip(
            self._shards, self._starts, cuts, cuts[1:]
        ):
            if first < last:
                self._read(shard, wanted[first:last] - start, rows[first:last])
        return {
            name: rows[name][places].astype(
                self._row[name].base.newbyteorder("="), copy=False
            )
            for name in self._row.names or ()
        }

    def verify(self) -> None:
        """Reads everything and compares it with the checksums of the manifest.

        Raises:
          DataError: a file is missing, truncated or altered; names it.
        """
        total = _begin_fingerprint(self._fields)
        for shard in self._shards:
            self._check_size(shard)
            digest = hashlib.sha256()
            with open(self.path / shard.file, "rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
                    total.update(piece)
            if digest.hexdigest() != shard.sha256:
                raise DataError(
                    self.path / shard.file,
                    f"SHA-256 is {digest.hexdigest()[:12]}..., the manifest says "
                    f"{shard.sha256[:12]}...: the file was altered or damaged",
                    _REWRITE,
                )
        if total.hexdigest() != self.fingerprint:
            raise DataError(
                self.path / _MANIFEST,
                "its fingerprint is not that of the rows",
                _REWRITE,
            )

    def _checked(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        given = np.asarray(indices)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise InputError(
                f"indices have shape {given.shape} and type {given.dtype}; give a "
                "one-dimensional list of integers."
            )
        outside = given[(given < 0) | (given >= len(self))]
        if outside.size:
            raise InputError(
                f"index {outside[0]} is out of range: {self.path} has {len(self)} "
                f"rows, 0 to {len(self) - 1}."
            )
        return given.astype(np.int64)

    def _read(self, shard: _Shard, numbers: np.ndarray, out: np.ndarray) -> None:
        """Fills `out` with the shard's rows of the given numbers, counted in it."""
        size = self._row.itemsize
        target = memoryview(out.view(np.uint8))
        with self._open(shard) as file:
            for place, number in enumerate(numbers.tolist()):
                piece = target[place * size : (place + 1) * size]
                if os.preadv(file.fileno(), [piece], number * size) != size:
                    raise self._truncated(shard)

    def _check_size(self, shard: _Shard) -> None:
        with self._open(shard) as file:
            found = os.fstat(file.fileno()).st_size
        if found != shard.count * self._row.itemsize:
            raise self._truncated(shard)

    def _open(self, shard: _Shard) -> BinaryIO:
        try:
            return open(self.path / shard.file, "rb", buffering=0)
        except OSError as error:
            raise DataError(
                self.path / shard.file, f"cannot be read ({error.strerror})", _REWRITE
            ) from error

    def _truncated(self, shard: _Shard) -> DataError:
        path = self.path / shard.file
        return DataError(
            path,
            f"has {path.stat().st_size} bytes, and the manifest counts {shard.count} "
            f"rows of {self._row.itemsize} bytes",
            _REWRITE,
        )


def write_rows(
    path: str | os.PathLike,
    chunks: Iterable[Mapping[str, np.ndarray]],
    rows_per_shard: int = 65536,
) -> RowStore:
    """Writes rows in the order given, all of them or nothing.

    Args:
      path: the directory to make; it must not exist, or be empty.
      chunks: the rows, streamed; field -> [rows of this chunk, ...], of integers,
        floats or booleans. All chunks have the same fields, types and shapes, but
        for the number of rows, which may be 0.
      rows_per_shard: rows in each file but the last.

    Returns:
      The store, open for reading.

    Raises:
      InputError: a chunk unlike the first, a field that is not an array of numbers, no
        row at all, the place is taken or cannot be written, or the disk is full.
    """
    positive_integer("rows_per_shard", rows_per_shard)
    with atomic_directory(path) as partial:
        with contextlib.closing(_Writer(partial, rows_per_shard)) as writer:
            for number, chunk in enumerate(chunks):
                writer.add(number, chunk)
            manifest = writer.finish()
        write_json(partial / _MANIFEST, manifest)
    return RowStore(path)


class _Writer:
    """Cuts chunks into shards and keeps their checksums."""

    def __init__(self, directory: Path, rows_per_shard: int):
        self._directory = directory
        self._rows_per_shard = rows_per_shard
        self._fields: list[dict[str, Any]] = []
        self._shards: list[_Shard] = []
        self._room = 0  # Rows that still fit into the open shard.
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._total = hashlib.sha256()

    def add(self, number: int, chunk: Mapping[str, np.ndarray]) -> None:
        """Writes the rows of a chunk; `number` is what errors call it."""
        fields, rows = _described(number, chunk)
        if not self._fields:
            self._fields = fields
            self._total = _begin_fingerprint(fields)
        if fields != self._fields:
            raise InputError(
                f"chunk {number} has the fields {_listed(fields)}, and the first "
                f"{_listed(self._fields)}; give all chunks the same."
            )
        packed = np.empty(rows, _row_type(fields))
        for name, values in chunk.items():
            packed[name] = values
        start = 0
        while start < rows:
            if self._file is None or not self._room:
                self._file = self._begin_shard()
            part = packed[start : start + self._room]
            data = part.tobytes()
            self._file.write(data)
            self._digest.update(data)
            self._total.update(data)
            self._room -= len(part)
            start += len(part)

    def finish(self) -> dict[str, Any]:
        """Ends the last shard and returns the manifest."""
        if not self._shards:
            raise InputError("no rows were given; give at least one.")
        self._end_shard()
        manifest = {
            "format": FORMAT,
            "fields": self._fields,
            "count": sum(shard.count for shard in self._shards),
            "shards": [dataclasses.asdict(shard) for shard in self._shards],
            "fingerprint": self._total.hexdigest(),
        }
        return {**manifest, "digest": _digest(manifest)}

    def close(self) -> None:
        """Closes the open shard, if any."""
        if self._file is not None:
            self._file.close()

    def _begin_shard(self) -> BinaryIO:
        if self._shards:
            self._end_shard()
        name = f"rows-{len(self._shards):05d}.bin"
        self._digest = hashlib.sha256()
        self._shards.append(_Shard(name, 0, ""))
        self._room = self._rows_per_shard
        return open(self._directory / name, "xb")

    def _end_shard(self) -> None:
        self.close()
        self._shards[-1] = dataclasses.replace(
            self._shards[-1],
            count=self._rows_per_shard - self._room,
            sha256=self._digest.hexdigest(),
        )


def _described(
    number: int, chunk: Mapping[str, np.ndarray]
) -> tuple[list[dict[str, Any]], int]:
    """Returns a chunk's fields, as a manifest has them, and its number of rows."""
    fields, counts = [], {}
    for name in sorted(chunk):
        values = np.asarray(chunk[name])
        if values.ndim < 1 or 0 in values.shape[1:] or values.dtype.kind not in "biuf":
            raise InputError(
                f"field {name!r} of chunk {number} has shape {values.shape} and type "
                f"{values.dtype}; give [rows, ...] of integers, floats or booleans."
            )
        counts[name] = len(values)
        fields.append(
            {
                "name": name,
                "dtype": values.dtype.newbyteorder("<").str,
                "shape": list(values.shape[1:]),
            }
        )
    if len(set(counts.values())) != 1:
        raise InputError(
            f"the fields of chunk {number} have these numbers of rows: {counts}; give "
            "every field one entry a row."
        )
    return fields, counts[name]


def _listed(fields: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{f['name']} {f['dtype']}{f['shape']}" for f in fields)


def _row_type(fields: Sequence[Mapping[str, Any]]) -> np.dtype:
    """Returns the type of a row: all fields packed, without gaps."""
    return np.dtype([(f["name"], f["dtype"], tuple(f["shape"])) for f in fields])


def _begin_fingerprint(fields: Sequence[Mapping[str, Any]]) -> Any:
    """Returns a hash to be continued with the bytes of all rows."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode() + b"\n")


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = parse_json(path.read_bytes())
        found, digest = manifest["format"], manifest.pop("digest")
    except OSError as error:
        raise DataError(
            path,
            f"cannot be read ({error.strerror})",
            "If a run left the directory, move it away: the same command makes it "
            "again. Otherwise give one that write_rows made",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(path, "is not a manifest of rows", _REWRITE) from error
    if found != FORMAT:
        raise DataError(path, f"format is {found!r}", f"This tfdpsq reads {FORMAT!r}")
    if digest != _digest(manifest):
        raise DataError(path, "was edited or damaged", _REWRITE)
    return manifest

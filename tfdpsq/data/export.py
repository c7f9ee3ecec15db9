"""Synthetic sets for others: Parquet, and Hugging Face `datasets` on disk.

Columns are those of `SCHEMA`, one row a query; `READ` says how each is read. Rows pass
in batches, so memory does not grow with the set, and the same set gives the same bytes.
As in the set itself, `manifest.json` has the checksums and the certificate, and a mark
says that the rows are not private pairs; each file's schema has it, too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tfdpsq.data import tables
from tfdpsq.data.files import sha256_of_file, write_json
from tfdpsq.data.records import (
    PART_FILE,
    SCHEMA,
    SyntheticQuery,
    read_manifest,
    read_synthetic,
)
from tfdpsq.validation import one_of

PARQUET, DATASETS = "parquet", "datasets"
FORMATS = (PARQUET, DATASETS)
READ = {
    PARQUET: (
        "import glob, pandas\n"
        "rows = pandas.concat(map(pandas.read_parquet, sorted(glob.glob('*.parquet'))))"
    ),
    DATASETS: "import datasets\nrows = datasets.load_from_disk('.')",
}
_BATCH = 4096
# Rows of one file.
_ROWS = 1 << 20


def export_set(
    source: str | os.PathLike,
    directory: str | os.PathLike,
    form: str,
    rows_per_file: int = _ROWS,
) -> dict[str, Any]:
    """Writes a set in another format.

    Args:
      source: the set, whose checksums are verified first.
      directory: an existing, empty directory.
      form: one of `FORMATS`.
      rows_per_file: most rows of a file.

    Returns:
      The manifest that is written: the set's own, with this format as its version, and
      the checksums of these files.

    Raises:
      InputError: an unknown format, or pyarrow is not installed.
      DataError: a file of the set is missing or altered.
    """
    one_of("format", form, FORMATS)
    directory = Path(directory)
    manifest = read_manifest(source)
    files = max(1, -(-manifest["count"] // rows_per_file))
    rows = read_synthetic(source)
    write, pattern = {
        PARQUET: (_parquet, "train-{:05d}-of-{:05d}.parquet"),
        DATASETS: (_stream, "data-{:05d}-of-{:05d}.arrow"),
    }[form]
    names = [pattern.format(number, files) for number in range(files)]
    for name in names:
        with write(directory / name) as add:
            for batch in _batches(itertools.islice(rows, rows_per_file)):
                add(batch)
    if form == DATASETS:
        write_json(directory / "dataset_info.json", _dataset_info())
        write_json(directory / "state.json", _state(names, manifest["fingerprint"]))
        names += ["dataset_info.json", "state.json"]
    write_json(directory / PART_FILE, {"part_of": tables.MARK})
    written = {name: value for name, value in manifest.items() if name != "shards"}
    written["version"] = form  # no reader of sets takes it for one
    written["files"] = {name: sha256_of_file(directory / name) for name in names}
    write_json(directory / "manifest.json", written)
    return written


def _batches(rows: Iterable[SyntheticQuery]) -> Iterator[Any]:
    arrow = tables.library("pyarrow")
    rows, schema = iter(rows), _schema()
    while chunk := list(itertools.islice(rows, _BATCH)):
        columns = [[getattr(row, name) for row in chunk] for name in SCHEMA]
        yield arrow.record_batch(columns, schema=schema)


def _schema() -> Any:
    arrow = tables.library("pyarrow")
    return arrow.schema(
        [(name, getattr(arrow, kind)()) for name, kind in SCHEMA.items()],
        {tables.MARKED: tables.MARK},  # of a file that is copied alone
    )


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Callable[[Any], None]]:
    parquet = tables.library("pyarrow.parquet")
    # Documents repeat for each of their queries, which zstd finds.
    with parquet.ParquetWriter(path, _schema(), compression="zstd") as writer:
        yield writer.write_batch


@contextlib.contextmanager
def _stream(path: Path) -> Iterator[Callable[[Any], None]]:
    with tables.library("pyarrow.ipc").new_stream(os.fspath(path), _schema()) as writer:
        yield writer.write_batch


def _dataset_info() -> dict[str, Any]:
    features = {
        name: {"dtype": kind, "_type": "Value"} for name, kind in SCHEMA.items()
    }
    return {"citation": "", "description": "", "features": features, "homepage": ""}


def _state(names: list[str], fingerprint: str) -> dict[str, Any]:
    return {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }

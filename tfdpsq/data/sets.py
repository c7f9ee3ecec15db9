"""Synthetic queries on disk: TFRecords or Parquet, a manifest and a BEIR directory.

A set is one directory that appears whole:

    records/synthetic-00000-of-00004.tfrecord   tf.train.Example, see `SCHEMA`; or
    records/synthetic-00000-of-00004.parquet    the same columns
    beir/                                       the same set, split "train"
    manifest.json                               counts, provenance, SHA-256 of each file
    certificate.json                            the guarantee, where there is one
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from absl import logging

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.data.beir import BeirWriter
from tfdpsq.data.texts import Document
from tfdpsq.validation import DataError, InputError

VERSION = 2
TFRECORD, PARQUET = FORMATS = ("tfrecord", "parquet")
BEIR = "beir"
CERTIFICATE = "certificate.json"
# Next to records and BEIR files: says that they are no raw pairs, also in a copy.
PART_FILE = "_part_of_a_set.json"  # readers of Parquet pass over "_"
# In the schema of a Parquet file, for the same reason.
MARK = "tfdpsq.part_of"
# Feature -> type, as tf.io.parse_example names them.
SCHEMA = {
    "query_id": "string",
    "query": "string",
    "document_id": "string",
    "document": "string",
    "sample": "int64",
}
_PART = {"part_of": "a set of queries"}
_BATCH = 4096
_REMEDY = "Restore it from where it was made, or move the set away and make it again"


@dataclasses.dataclass(frozen=True)
class SyntheticQuery:
    """One generated query and the public document it was generated from."""

    query_id: str  # "genQ<n>", unique in its set
    query: str
    document_id: str
    document: str  # its content, title and text
    sample: int  # which of the document's samples this is, from 0


def write_synthetic(
    path: str | os.PathLike,
    rows: Iterable[SyntheticQuery],
    provenance: dict,
    certificate: dict | None,
    shards: int = 1,
    guarantee: str | None = None,
    form: str = TFRECORD,
) -> dict[str, Any]:
    """Writes a set of synthetic queries, all of it or nothing; returns the manifest.

    A model that trains under much noise may generate nothing at all for a document.
    Such empty queries are left out, counted in the manifest and logged.

    Args:
      path: the directory to make; it must not exist, or be empty.
      rows: the queries, streamed. Row i goes to file i modulo `shards`.
      provenance: how they came about (model, settings, fingerprints); JSON.
      certificate: the privacy certificate; None without a guarantee.
      shards: number of files.
      guarantee: entry of the manifest that says where the set may go; None for none.
      form: one of `FORMATS`.

    Raises InputError if an id is not genQ<n> or repeated, or all queries are empty.
    """
    entries: dict[str, Any] = {"provenance": provenance, "certificate": certificate}
    if guarantee is not None:
        entries["guarantee"] = guarantee
    with io.atomic_directory(path) as partial:
        entries.update(_write(partial, rows, shards, form))
        if certificate is not None:
            io.write_json(partial / CERTIFICATE, certificate)
        manifest = io.write_manifest(partial, entries)
    if left_out := manifest["empty_queries_left_out"]:
        logging.warning("%s: left out %d empty queries", path, left_out)
    return manifest


def read_manifest(path: str | os.PathLike) -> dict[str, Any]:
    """Returns the manifest of a set; `verify` reads the queries, too.

    Raises:
      DataError: it is missing or of another version, or the certificate is not the
        one that the set was written with.
    """
    file = Path(path) / io.MANIFEST
    manifest = io.read_json(file, "Give a set that tfdpsq wrote")
    if (manifest.get("version"), manifest.get("schema")) != (VERSION, SCHEMA):
        raise DataError(file, f"not a set of version {VERSION}", "Make it again")
    file = Path(path) / CERTIFICATE
    certificate = io.read_json(file, _REMEDY) if file.exists() else None
    if certificate != manifest["certificate"]:
        problem = "is not the certificate the manifest holds"
        raise DataError(file, problem, f"Do not release this set. {_REMEDY}")
    return manifest


def verify(path: str | os.PathLike) -> dict[str, Any]:
    """Returns the manifest; raises DataError if a file is missing or damaged."""
    manifest = read_manifest(path)
    io.verify_manifest(Path(path), manifest, _REMEDY)
    return manifest


def read_synthetic(path: str | os.PathLike) -> Iterator[SyntheticQuery]:
    """Streams the queries in the order they were written, verified first."""
    manifest = verify(path)
    read = _read_parquet if manifest["format"] == PARQUET else _read_tfrecord
    streams = [read(os.path.join(path, name)) for name in manifest["records"]]
    return (next(streams[row % len(streams)]) for row in range(manifest["count"]))


def is_marked(path: str) -> bool:
    """Returns whether a Parquet file says that it is of a set."""
    return MARK.encode() in (parquet_file(path).schema_arrow.metadata or {})


def parquet_file(path: str) -> Any:
    """Opens a `pyarrow.parquet.ParquetFile`; raises DataError if it is damaged."""
    arrow = _pyarrow()
    try:
        return arrow.parquet.ParquetFile(io.open_binary(path), pre_buffer=False)
    except (arrow.ArrowException, OSError) as error:
        problem = f"it cannot be read: {str(error)[:200]}"
        raise DataError(path, problem, "Restore the file") from error


def _pyarrow() -> Any:
    remedy = "Parquet needs pyarrow: pip install pyarrow."
    validation.library("pyarrow.parquet", remedy)
    return validation.library("pyarrow", remedy)


def encode_query(row: SyntheticQuery) -> bytes:
    """A query as a serialised `tf.train.Example`, see `SCHEMA`; always the same."""
    import tensorflow as tf

    example = tf.train.Example()
    for name, kind in SCHEMA.items():
        value, feature = getattr(row, name), example.features.feature[name]
        if kind == "string":
            feature.bytes_list.value.append(value.encode("utf-8"))
        else:
            feature.int64_list.value.append(value)
    # Maps of a message have no order of their own, and checksums need one.
    return example.SerializeToString(deterministic=True)


def decode_query(data: bytes) -> SyntheticQuery:
    """The query that `encode_query` was given."""
    import tensorflow as tf

    feature = tf.train.Example.FromString(data).features.feature
    return SyntheticQuery(
        **{
            name: feature[name].bytes_list.value[0].decode("utf-8")
            if kind == "string"
            else feature[name].int64_list.value[0]
            for name, kind in SCHEMA.items()
        }
    )


def _write(
    directory: Path, rows: Iterable[SyntheticQuery], shards: int, form: str
) -> dict[str, Any]:
    for folder in ("records", BEIR):
        (directory / folder).mkdir()
        io.write_json(directory / folder / PART_FILE, _PART)
    names = [f"records/synthetic-{i:05d}-of-{shards:05d}.{form}" for i in range(shards)]
    total = documents = written = empty = 0
    open_writer = _parquet_writer if form == PARQUET else _tfrecord_writer
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(open_writer(directory / name)) for name in names]
        beir = stack.enter_context(BeirWriter(directory / BEIR))
        for row in rows:
            if not re.fullmatch(r"genQ\d+", row.query_id):
                raise InputError(f"query_id is {row.query_id!r}; expected genQ0, ...")
            if not row.query.strip():
                empty += 1
                continue
            if not beir.has("document", row.document_id):
                beir.add_document(Document(row.document_id, "", row.document))
                documents += 1
            beir.add_query(row.query_id, row.query)
            beir.add_judgement("train", row.query_id, row.document_id, 1)
            digest = hashlib.sha256(json.dumps(dataclasses.astuple(row)).encode())
            total += int.from_bytes(digest.digest(), "big")
            writers[written % shards](row)
            written += 1
        if not written:
            raise InputError(
                f"all {empty} queries are empty; train longer, or with less noise."
            )
    return {
        "version": VERSION,
        "format": form,
        "schema": SCHEMA,
        "count": written,
        "documents": documents,
        "empty_queries_left_out": empty,
        "fingerprint": f"{total % (1 << 256):064x}",
        "records": names,
    }


@contextlib.contextmanager
def _tfrecord_writer(path: Path) -> Iterator[Callable[[SyntheticQuery], None]]:
    import tensorflow as tf

    with tf.io.TFRecordWriter(os.fspath(path)) as writer:
        yield lambda row: writer.write(encode_query(row))


def _read_tfrecord(path: str) -> Iterator[SyntheticQuery]:
    import tensorflow as tf

    return map(decode_query, tf.data.TFRecordDataset(path).as_numpy_iterator())


@contextlib.contextmanager
def _parquet_writer(path: Path) -> Iterator[Callable[[SyntheticQuery], None]]:
    arrow = _pyarrow()
    columns = [(name, getattr(arrow, kind)()) for name, kind in SCHEMA.items()]
    schema = arrow.schema(columns, {MARK: _PART["part_of"]})
    waiting: list[dict[str, Any]] = []
    # Documents repeat for each of their queries, which zstd finds.
    with arrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:

        def write(row: SyntheticQuery | None) -> None:
            if row is not None:
                waiting.append(vars(row))
            if row is None or len(waiting) == _BATCH:
                writer.write_table(arrow.Table.from_pylist(waiting, schema))
                waiting.clear()

        yield write
        write(None)


def _read_parquet(path: str) -> Iterator[SyntheticQuery]:
    batches = parquet_file(path).iter_batches(_BATCH)
    rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    return (SyntheticQuery(**row) for row in rows)

"""Synthetic queries on disk: sharded TFRecords, a manifest, and a BEIR directory.

A set is one directory that appears whole:

    records/synthetic-00000-of-00004.tfrecord   tf.train.Example, see `SCHEMA`
    beir/                                       the same set, split "train"
    manifest.json                               counts, checksums, fingerprint
    certificate.json                            the guarantee, where there is one
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import tensorflow as tf
from absl import logging

from tfdpsq.data.beir_writer import BeirWriter
from tfdpsq.data.files import atomic_directory, sha256_of_file, write_json
from tfdpsq.data.texts import Document
from tfdpsq.data.unique_ids import SeenTexts
from tfdpsq.validation import (
    DataError,
    InputError,
    parse_json,
    positive_integer,
    shown,
)

VERSION = 1
# The folder of a set that holds it as other programs read it.
BEIR = "beir"
# In `beir/`, whose rows are a set's, also where it was copied without the set.
PART_FILE = "part_of_a_set.json"

# Feature -> type, as tf.io.parse_example names them.
SCHEMA = {
    "query_id": "string",
    "query": "string",
    "document_id": "string",
    "document": "string",
    "sample": "int64",
}

# Nothing is to be deleted that may be somebody else's, or have cost budget.
_REWRITE = (
    "Restore it from where it was made, or move the set away and make it again; if "
    "manifest.json is another program's, move that file away"
)


@dataclasses.dataclass(frozen=True)
class SyntheticQuery:
    """One generated query and the public document it was generated from.

    Attributes:
      query_id: "genQ<n>", unique in its set.
      query: the generated text.
      document_id: id of the document.
      document: its content (title and text).
      sample: which of the document's samples this is, from 0.
    """

    query_id: str
    query: str
    document_id: str
    document: str
    sample: int


def write_synthetic(
    path: str | os.PathLike,
    rows: Iterable[SyntheticQuery],
    provenance: dict,
    certificate: dict | None,
    shards: int = 1,
    guarantee: str | None = None,
) -> dict:
    """Writes a set of synthetic queries, all of it or nothing, in flat memory.

    A model that trains under much noise may generate nothing at all for a
    document. Such empty queries are of no use to a retriever and not allowed in a
    BEIR directory; they are left out, counted in the manifest and logged.

    Args:
      path: the directory to make; it must not exist, or be empty.
      rows: the queries, streamed. Row i goes to shard i modulo `shards`.
      provenance: how they came about (model, settings, fingerprints); JSON.
      certificate: the privacy certificate; None without a guarantee.
      shards: number of TFRecord files.
      guarantee: entry of the manifest that says where the set may go; None for none.

    Returns:
      The manifest.

    Raises:
      InputError: a row is unsound (id other than genQ<n>, repeated id, one
        document id with two contents), all queries are empty, `provenance` or
        `certificate` are not JSON, or the disk is full.
    """
    positive_integer("shards", shards)
    for name, value in (("provenance", provenance), ("certificate", certificate)):
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(f"{name} cannot be written as JSON: {error}.") from error
    with atomic_directory(path) as partial:
        manifest = _write(partial, rows, shards)
        manifest["provenance"] = provenance
        manifest["certificate"] = certificate
        if guarantee is not None:
            manifest["guarantee"] = guarantee
        if certificate is not None:
            write_json(partial / "certificate.json", certificate)
        write_json(partial / "manifest.json", manifest)
    if manifest["empty_queries_left_out"]:
        logging.warning(
            "%s: %d of %d generated queries are empty and were left out",
            path,
            manifest["empty_queries_left_out"],
            manifest["empty_queries_left_out"] + manifest["count"],
        )
    return manifest


def read_manifest(path: str | os.PathLike) -> dict:
    """Returns the manifest of a set, after checking its form and certificate.

    Cheap: does not read the queries. `verify` does.

    Raises:
      DataError: the manifest is missing, malformed or of another version, or
        ``certificate.json`` is not the certificate it was written with.
    """
    file = Path(path) / "manifest.json"
    manifest = _read_json(file)
    found = manifest.get("version")
    if found != VERSION:
        raise DataError(
            file, f"version is {found!r}", f"This tfdpsq reads version {VERSION}"
        )
    if manifest.get("schema") != SCHEMA:
        raise DataError(file, f"schema is {manifest.get('schema')!r}", _REWRITE)
    for key in ("count", "documents", "empty_queries_left_out"):
        if type(manifest.get(key)) is not int or not 0 <= manifest[key] < 1 << 63:
            raise DataError(file, f"{key} is {shown(manifest.get(key))}", _REWRITE)
    for key, kind in (
        ("fingerprint", str),
        ("files", dict),
        ("shards", list),
        ("provenance", dict),
    ):
        if not isinstance(manifest.get(key), kind):
            raise DataError(file, f"{key} is {shown(manifest.get(key))}", _REWRITE)
    _check_provenance(file, manifest["provenance"])
    for key, value in manifest["files"].items():
        if not isinstance(value, str):
            raise DataError(file, f"files[{key!r}] is {shown(value)}", _REWRITE)
    for number, shard in enumerate(manifest["shards"]):
        sound = (
            isinstance(shard, dict)
            and isinstance(shard.get("file"), str)
            and type(shard.get("count")) is int
            and shard["file"] in manifest["files"]
        )
        if not sound:
            raise DataError(file, f"shards[{number}] is {shown(shard)}", _REWRITE)
    counted = sum(shard["count"] for shard in manifest["shards"])
    if counted != manifest["count"]:
        raise DataError(
            file,
            f"count is {shown(manifest['count'])}, its shards hold {shown(counted)}",
            _REWRITE,
        )
    certificate_file = Path(path) / "certificate.json"
    held = manifest.get("certificate")
    if (held is None) == certificate_file.exists() or (
        held is not None and _read_json(certificate_file) != held
    ):
        raise DataError(
            certificate_file,
            "is not the certificate the manifest holds",
            "The guarantee of this set is unclear: do not release it. " + _REWRITE,
        )
    return manifest


def _check_provenance(file: Path, provenance: dict) -> None:
    """Refuses a provenance whose form is not that of the stages that make sets."""
    where, found = "provenance", provenance
    while True:
        for key in ("config", "inputs", "of"):
            if not isinstance(found.get(key, {}), dict):
                raise DataError(file, f"{where}.{key} is {shown(found[key])}", _REWRITE)
        reads = found.get("private_reads", [])
        if not isinstance(reads, list) or not all(isinstance(r, dict) for r in reads):
            raise DataError(file, f"{where}.private_reads is {shown(reads)}", _REWRITE)
        if "of" not in found:
            return
        where, found = f"{where}.of", found["of"]


def verify(path: str | os.PathLike) -> dict:
    """Checks every file of a set against its manifest, and returns the manifest.

    Raises:
      DataError: a file is missing, altered, or one too many; names it.
    """
    root = Path(path)
    manifest = read_manifest(root)
    listed = manifest["files"]
    for name, expected in listed.items():
        if not (root / name).is_file():
            raise DataError(root / name, "missing", _REWRITE)
        found = sha256_of_file(root / name)
        if found != expected:
            raise DataError(
                root / name,
                f"SHA-256 is {found[:12]}..., the manifest says {expected[:12]}...: "
                "the file was altered or damaged",
                _REWRITE,
            )
    extra = set(_data_files(root)) - set(listed)
    if extra:
        raise DataError(
            root / min(extra), "is not in the manifest", "Move it out of the set"
        )
    return manifest


def read_synthetic(path: str | os.PathLike) -> Iterator[SyntheticQuery]:
    """Streams the queries in the order they were written.

    All checksums are verified before the first query is given out.

    Raises:
      DataError: a file is missing or altered; names it.
    """
    root = Path(path)
    manifest = verify(root)
    return _rows(root, manifest)


def _write(directory: Path, rows: Iterable[SyntheticQuery], shards: int) -> dict:
    (directory / "records").mkdir()
    (directory / BEIR).mkdir()
    write_json(directory / BEIR / PART_FILE, {"part_of": "a set of queries"})
    names = [
        f"records/synthetic-{shard:05d}-of-{shards:05d}.tfrecord"
        for shard in range(shards)
    ]
    counts = [0] * shards
    documents = SeenTexts()
    total = written = empty = 0
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(tf.io.TFRecordWriter(str(directory / name)))
            for name in names
        ]
        beir = stack.enter_context(BeirWriter(directory / BEIR))
        for row in rows:
            number = row.query_id[4:]
            if not (row.query_id.startswith("genQ") and number.isdecimal()):
                raise InputError(
                    f"query_id is {row.query_id!r}; synthetic queries are named "
                    "genQ0, genQ1, ..."
                )
            if not row.query.strip():
                empty += 1
                continue
            _once(documents, row, beir)
            beir.add_query(row.query_id, row.query)
            beir.add_judgement("train", row.query_id, row.document_id, 1)
            data = encode_query(row)
            total += int.from_bytes(hashlib.sha256(data).digest(), "big")
            writers[written % shards].write(data)
            counts[written % shards] += 1
            written += 1
        if empty and not written:
            raise InputError(
                f"all {empty} generated queries are empty; train the generator "
                "longer, or with less noise."
            )
    return {
        "version": VERSION,
        "schema": SCHEMA,
        "count": written,
        "documents": len(documents),
        "empty_queries_left_out": empty,
        "fingerprint": f"{total % (1 << 256):064x}",
        "shards": [
            {"file": name, "count": count} for name, count in zip(names, counts)
        ],
        "files": {
            name: sha256_of_file(directory / name) for name in _data_files(directory)
        },
    }


def _once(documents: SeenTexts, row: SyntheticQuery, beir: BeirWriter) -> None:
    """Adds a row's document where it is new; keeps hashes alone in memory."""
    whole = f"{len(row.document_id)} {row.document_id}{row.document}"
    if not beir.has_document(row.document_id):
        beir.add_document(Document(row.document_id, "", row.document))
        documents.add(whole)
    elif whole not in documents:
        raise InputError(
            f"document {row.document_id!r} (query {row.query_id!r}) comes with "
            "another content than before; ids of documents are unique."
        )


def encode_query(row: SyntheticQuery) -> bytes:
    """A query as a serialised `tf.train.Example`, see `SCHEMA`; always the same."""

    def text(value: str) -> tf.train.Feature:
        return tf.train.Feature(
            bytes_list=tf.train.BytesList(value=[value.encode("utf-8")])
        )

    sample = tf.train.Feature(int64_list=tf.train.Int64List(value=[row.sample]))
    feature = {
        "query_id": text(row.query_id),
        "query": text(row.query),
        "document_id": text(row.document_id),
        "document": text(row.document),
        "sample": sample,
    }
    example = tf.train.Example(features=tf.train.Features(feature=feature))
    # Maps of a message have no order of their own, and checksums need one.
    return example.SerializeToString(deterministic=True)


def decode_query(data: bytes) -> SyntheticQuery:
    """The query that `encode_query` was given."""
    feature = tf.train.Example.FromString(data).features.feature
    query_id, query, document_id, document = (
        feature[name].bytes_list.value[0].decode("utf-8")
        for name in ("query_id", "query", "document_id", "document")
    )
    sample = feature["sample"].int64_list.value[0]
    return SyntheticQuery(query_id, query, document_id, document, sample)


def _rows(root: Path, manifest: dict) -> Iterator[SyntheticQuery]:
    files = [root / shard["file"] for shard in manifest["shards"]]
    streams = [tf.data.TFRecordDataset(str(file)).as_numpy_iterator() for file in files]
    for index in range(manifest["count"]):
        shard = index % len(files)
        try:
            yield decode_query(next(streams[shard]))
        except (StopIteration, IndexError, ValueError, tf.errors.OpError) as error:
            # Checksums were right, so the set was written wrongly.
            raise DataError(
                files[shard],
                f"record {index // len(files)} is not a synthetic query ({error})",
                _REWRITE,
            ) from error


def _data_files(root: Path) -> list[str]:
    """Returns what a set holds besides manifest and certificate, sorted."""
    return sorted(
        file.relative_to(root).as_posix()
        for folder in ("records", "beir")
        for file in (root / folder).rglob("*")
        if file.is_file()
    )


def _read_json(file: Path) -> dict:
    try:
        value = parse_json(file.read_bytes())
    except OSError as error:
        raise DataError(
            file,
            f"cannot be read ({error.strerror})",
            "Give the directory that synthesis wrote",
        ) from error
    except ValueError as error:
        raise DataError(file, f"not JSON ({error})", _REWRITE) from error
    if not isinstance(value, dict):
        raise DataError(file, "not a JSON object", _REWRITE)
    return value

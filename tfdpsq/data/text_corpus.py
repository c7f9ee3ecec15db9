"""Large collections of text by others: any format, streamed, file by file.

What a reference corpus comes as:

| format   | files named                       | a record is                          |
|----------|-----------------------------------|--------------------------------------|
| lines    | .txt, .text                       | a line that is not blank             |
| whole    | by request only                   | a file                               |
| jsonl    | .jsonl, .json, .ndjson            | a field of the JSON object of a line |
| tfrecord | .tfrecord, .tfrecord-00000-of-… | a feature of a tf.train.Example      |
| tfds     | tfds:NAME, as tfds.load names it  | a feature of an example              |

each file also with `.gz`. Memory does not grow with a file, but with its largest
record.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from google.protobuf.message import DecodeError

from tfdpsq.data.beir_lines import parse_line, read_lines
from tfdpsq.validation import DataError, InputError, one_of

FORMATS = ("lines", "whole", "jsonl", "tfrecord")
TFDS = "tfds:"

_NAMES = {
    "lines": re.compile(r"\.(txt|text)(\.gz)?$"),
    "jsonl": re.compile(r"\.(jsonl|json|ndjson)(\.gz)?$"),
    "tfrecord": re.compile(r"\.tfrecords?(-\d+-of-\d+)?(\.gz)?$"),
}
# Records that TensorFlow hands over at once, and bytes it reads at once.
_AT_ONCE = 64
_BUFFER = 1 << 20


@dataclasses.dataclass(frozen=True)
class CorpusPart:
    """A part of a corpus that is read in one go.

    Attributes:
      name: a file, or a shard of a TFDS split.
      identity: changes with its content, as far as one can see without reading it.
      records: streams its texts; raises DataError at the first that is malformed.
      place: the file, or the directory of the data set.
    """

    name: str
    identity: str
    records: Callable[[], Iterator[str]]
    place: str


def corpus_parts(
    paths: str | Sequence[str],
    format: str = "",
    field: str = "text",
    split: str = "train",
    data_dir: str = "",
) -> list[CorpusPart]:
    """Finds the parts of a corpus; reads none.

    Args:
      paths: one or several, each a file, a directory (all files of a known name in
        it, however deep), a glob pattern ("**" reaches into directories), or
        "tfds:NAME".
      format: one of `FORMATS`; "" goes by the files' names.
      field: of JSON objects and examples: what holds the text.
      split: of TFDS, with its slices; a plain one is read shard by shard.
      data_dir: where TFDS keeps its data; "" is where it does by default.

    Returns:
      The parts in the order of `paths`, and by name within each; a file that two
      paths lead to comes once.

    Raises:
      InputError: no path, one that is not there or holds no file of a known name, a
        format that is none, or a TFDS data set that is not there.
    """
    if format:
        one_of("format", format, FORMATS)
    given = [paths] if isinstance(paths, str) else list(paths)
    if not any(given):
        raise InputError(
            "no corpus was given. Name the files that hold its texts: a path, a "
            f"directory, a glob pattern or {TFDS}NAME."
        )
    parts: dict[str, CorpusPart] = {}
    for path in given:
        found = (
            _of_tfds(path.removeprefix(TFDS), field, split, data_dir)
            if path.startswith(TFDS)
            else [_of_file(file, format, field) for file in _files(path, format)]
        )
        for part in found:
            parts.setdefault(os.path.realpath(part.name), part)
    return list(parts.values())


def parts_fingerprint(parts: Sequence[CorpusPart]) -> str:
    """SHA-256 over what identifies parts without reading them: see `identity`."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps([part.name, part.identity]).encode())
    return digest.hexdigest()


def _files(path: str, format: str) -> list[Path]:
    known = _NAMES.get(format) or re.compile(
        "|".join(pattern.pattern for pattern in _NAMES.values())
    )
    if os.path.isdir(path):
        inside = sorted(p for p in Path(path).rglob("[!.]*") if p.is_file())
        found = [p for p in inside if format == "whole" or known.search(p.name)]
        if not inside:
            raise InputError(f"{path} holds no file. Give the path of the corpus.")
        if not found:
            raise InputError(
                f"{path} holds no file of a known name among its {len(inside)}, such "
                f"as {inside[0].name}. Name the files by a pattern, and their format: "
                f"{', '.join(FORMATS)}."
            )
        formats = {_format_of(file.name) for file in found}
        if not format and len(formats) > 1:
            raise InputError(
                f"{path} holds files of several formats, {', '.join(sorted(formats))}. "
                "Say which is meant by format, or by a pattern."
            )
        return found
    if os.path.isfile(path):
        return [Path(path)]
    found = [Path(p) for p in sorted(glob.glob(path, recursive=True))]
    found = [file for file in found if file.is_file()]
    if not found:
        raise InputError(
            f"{path}: no such file or directory, and no file matches it as a pattern. "
            "Give the path of the corpus."
        )
    return found


def _format_of(name: str) -> str:
    return next((f for f, pattern in _NAMES.items() if pattern.search(name)), "")


def _of_file(path: Path, format: str, field: str) -> CorpusPart:
    format = format or _format_of(path.name)
    if not format:
        raise InputError(
            f"{path}: its name does not tell its format. Set format to one of "
            f"{', '.join(FORMATS)}."
        )
    readers: dict[str, Callable[[], Iterator[str]]] = {
        "lines": functools.partial(_lines, path),
        "whole": functools.partial(_whole, path),
        "jsonl": functools.partial(_objects, path, field),
        "tfrecord": functools.partial(_examples, path, field),
    }
    about = path.stat()
    return CorpusPart(
        str(path),
        f"{format} {field} {about.st_size} {about.st_mtime_ns}",
        readers[format],
        str(path),
    )


def _lines(path: Path) -> Iterator[str]:
    return (text for _, text in read_lines(path))


def _whole(path: Path) -> Iterator[str]:
    text = "\n".join(_lines(path))
    if text:
        yield text


def _objects(path: Path, field: str) -> Iterator[str]:
    for line, text in read_lines(path):
        remedy = "Write one JSON object a line, or name another format"
        record = parse_line(path, line, text, remedy, f": {text[:60]!r}")
        value = record.get(field) if isinstance(record, dict) else None
        if not isinstance(value, str):
            raise DataError(
                path,
                f"no text under {field!r}: {text[:60]!r}",
                "Set field to what holds the text",
                line,
            )
        yield value


def _examples(path: Path, field: str) -> Iterator[str]:
    packed = "GZIP" if path.suffix == ".gz" else ""
    # With a batch at a time the cost of a record is in its bytes.
    batches = tf.data.TFRecordDataset(str(path), packed, _BUFFER).batch(_AT_ONCE)
    number = 0
    try:
        for batch in batches.as_numpy_iterator():
            for raw in batch:
                number += 1
                yield _text_of(path, number, raw, field)
    except tf.errors.OpError as error:
        raise DataError(
            path,
            f"broken after record {number} or at most {_AT_ONCE} later "
            f"({error.message})",
            "Copy or write it again",
        ) from error


def _text_of(path: Path, number: int, raw: bytes, field: str) -> str:
    try:
        features = tf.train.Example.FromString(raw).features.feature
    except DecodeError as error:
        raise DataError(
            path,
            f"record {number} is not a tf.train.Example",
            "Give a file of such, or name another format",
        ) from error
    values = features[field].bytes_list.value if field in features else []
    if len(values) != 1:
        raise DataError(
            path,
            f"record {number} has {len(values)} texts under {field!r}; its features "
            f"are {', '.join(sorted(features))}",
            "Set field to the one that holds the text",
        )
    return _decoded(path, number, values[0])


def _decoded(where: str | os.PathLike, number: int, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            where,
            f"record {number} is not UTF-8 (byte {error.start + 1} is "
            f"0x{value[error.start]:02x})",
            "Write it again in UTF-8",
        ) from error


def _of_tfds(name: str, field: str, split: str, data_dir: str) -> list[CorpusPart]:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError(
            f"{TFDS}{name} needs TensorFlow Datasets. Run: pip install "
            "tensorflow-datasets==4.9.10 'tensorflow-metadata<1.17'"
        ) from error
    try:
        builder = tfds.builder(name, data_dir=data_dir or None)
    except (ValueError, AssertionError) as error:
        why = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{TFDS}{name}: {why} Correct the name, or set data_dir to its directory."
        ) from error
    # Nothing is downloaded: C4 would take days, and needs Beam.
    if not builder.info.splits:
        raise InputError(
            f"{TFDS}{name} is not prepared in {builder.data_dir}. Prepare it (tfds "
            f"build {name}), or set data_dir to where it is."
        )
    if field not in builder.info.features:
        raise InputError(
            f"{TFDS}{name} has no feature {field!r}; it has "
            f"{', '.join(builder.info.features)}. Set field to what holds the text."
        )
    try:
        builder.info.splits[split]
    except (ValueError, KeyError) as error:
        raise InputError(f"{TFDS}{name}: {error} Set split to one of them.") from error
    splits = [split]
    if split in builder.info.splits:
        shards = builder.info.splits[split].num_shards
        splits = [f"{split}[{n}shard:{n + 1}shard]" for n in range(shards)]
    return [
        CorpusPart(
            f"{TFDS}{builder.info.full_name} {each}",
            field,
            functools.partial(_of_split, builder, each, field),
            os.fspath(builder.data_path),
        )
        for each in splits
    ]


def _of_split(builder: Any, split: str, field: str) -> Iterator[str]:
    rows = builder.as_dataset(split=split, shuffle_files=False)
    texts = rows.map(lambda row: row[field]).batch(_AT_ONCE)
    number = 0
    for batch in texts.as_numpy_iterator():
        for raw in batch:
            number += 1
            yield _decoded(f"{builder.info.full_name} {split}", number, raw)

"""Tables and texts of others: query logs to import, corpora to search for copies."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

from tfdpsq.data import io, sets, tables
from tfdpsq.run.frame import artefacts, records
from tfdpsq.run.frame.artefacts import Artefact
from tfdpsq.run.frame.places import Privacy
from tfdpsq.validation import DataError

_LINES = (".txt", ".text")


class Table(Artefact):
    """Rows that `tables.read_rows` reads.

    The fact "made" names a file that a stage made from private queries, or wrote as
    part of a set; raw pairs, imported ones included, are none.
    """

    wanted = (
        "a file, a directory or a pattern of files, tfds:NAME#SPLIT or ir_datasets:NAME"
    )
    ends: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def open(cls, path: str, setting: str) -> Artefact:
        """See `Artefact.open`; whatever a private file is part of, it is private."""
        if path.startswith(tables.IR_DATASETS):
            return cls(path, Privacy.PUBLIC, facts={"made": ""})
        files = tables.files_of(path, cls.ends)
        made = next(filter(_is_made, files), "")
        private = made or any(map(_is_private, files))
        privacy = Privacy.PRIVATE if private else Privacy.PUBLIC
        return cls(path, privacy, facts={"made": made})

    def fingerprint(self, private: pathlib.Path) -> str:
        """Returns a keyed digest of the files; the name of an `ir_datasets` set."""
        if self.path.startswith(tables.IR_DATASETS):
            return self.path
        files = map(io.sha256_of_file, tables.files_of(self.path))
        return records.keyed_fingerprint(records.digest(list(files)), private)


class Texts(Table):
    """A corpus of any size, streamed: lines of `.txt` files, or a column of a table."""

    ends = _LINES

    def fingerprint(self, private: pathlib.Path) -> str:
        """Returns a digest of names, sizes and times: reading it would take hours."""
        return records.digest([vars(part) for part in corpus_parts([self.path])])


def _is_private(file: str) -> bool:
    """Returns whether a file holds private queries, or lies among private outputs."""
    path = pathlib.PurePath(file)
    of_pairs = path.name.startswith("queries.jsonl") or path.parent.name == "qrels"
    return of_pairs or artefacts.class_stated(file) > Privacy.PUBLIC


def _is_made(file: str) -> bool:
    """Returns whether a stage made a file from private queries, or as part of a set."""
    # `tfds_builder` keeps no record of what the directory was.
    if "/beir_directory/" in file:
        return True
    if not io.is_local(file):
        return False
    folder = pathlib.Path(os.path.abspath(file))
    for above in folder.parents:
        if (above / sets.PART_FILE).is_file() or (
            above / artefacts.MARK_FILE
        ).is_file():
            return True
        if (stage := records.read_stage(above)) is not None:
            raw = stage["facts"].get("raw") and not stage["facts"].get("canaries")
            return stage["guarantee"] != Privacy.PUBLIC.word and not raw
    return tables.format_of(file) == ".parquet" and sets.is_marked(file)


@dataclasses.dataclass(frozen=True)
class CorpusPart:
    """A part of a corpus that is read in one go.

    Attributes:
      name: a file, or `tfds:NAME#SPLIT` of a shard of a TFDS split.
      identity: changes with its content, as far as one can see without reading it.
    """

    name: str
    identity: str

    def records(self, field: str) -> Iterator[str]:
        """Streams its texts; of a table, those of a column.

        Raises:
          DataError: at the first record that is malformed.
        """
        if self.name.removesuffix(".gz").endswith(_LINES):
            yield from (text for _, _, text in io.read_lines(self.name))
            return
        for path, number, (text,) in tables.read_rows(self.name, [field]):
            if not isinstance(text, str):
                problem, remedy = f"no text under {field!r}", "Set field to its column"
                raise DataError(path, problem, remedy, number)
            yield text


def corpus_parts(paths: Sequence[str]) -> list[CorpusPart]:
    """Finds the parts of a corpus; reads none.

    Args:
      paths: each a file, a directory, a glob pattern ("**" reaches into directories),
        or `tfds:NAME#SPLIT`, a split that is read shard by shard.

    Returns:
      The parts in the order of `paths`, and by name within each; a file that two paths
      lead to comes once.

    Raises:
      InputError: a path is not there.
    """
    parts: dict[str, CorpusPart] = {}
    for path in paths:
        if path.startswith(tables.TFDS):
            found = _of_tfds(path)
        else:
            found = [_of_file(file) for file in tables.files_of(path, _LINES)]
        for part in found:
            parts.setdefault(os.path.realpath(part.name), part)
    return list(parts.values())


def _of_file(path: str) -> CorpusPart:
    about = os.stat(path)
    return CorpusPart(path, f"{about.st_size} {about.st_mtime_ns}")


def _of_tfds(name: str) -> list[CorpusPart]:
    builder, split = tables.tfds_split(name)
    splits, place = [split], os.fspath(builder.data_path)
    if split in builder.info.splits:
        shards = builder.info.splits[split].num_shards
        splits = [f"{split}[{n}shard:{n + 1}shard]" for n in range(shards)]
    return [CorpusPart(f"{tables.TFDS}{place}#{each}", "") for each in splits]

"""Tables and texts of others: query logs to import, corpora to search for copies."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import ClassVar

from tfdpsq.data import io, sets, tables
from tfdpsq.run.frame import artefacts, records
from tfdpsq.run.frame.artefacts import Artefact
from tfdpsq.run.frame.places import Privacy

_LINES = (".txt", ".text")


class Table(Artefact):
    """A table; the fact "made" is a file in it that tfdpsq made, or ""."""

    wanted = (
        "a file, a directory or a pattern of files, tfds:NAME#SPLIT or ir_datasets:NAME"
    )
    ends: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def open(cls, path: str, setting: str) -> Artefact:
        """See `Artefact.open`."""
        made = next(filter(_is_made, cls._files(path)), "")
        return cls(path, Privacy.PRIVATE, facts={"made": made})

    @classmethod
    def _files(cls, path: str) -> list[str]:
        named = path.startswith(tables.IR_DATASETS)
        return [] if named else tables.files_of(path, cls.ends)

    def fingerprint(self, private: pathlib.Path) -> str:
        """Returns a keyed digest of the files; the name of an `ir_datasets` set."""
        files = list(map(io.sha256_of_file, self._files(self.path)))
        return records.keyed_fingerprint(records.digest(files or self.path), private)


class Texts(Table):
    """A corpus of any size: lines of `.txt` files, or a column of a table."""

    ends = _LINES

    def parts(self) -> list[str]:
        """Returns what is read in one go: files, or shards of a TFDS split by name."""
        if not self.path.startswith(tables.TFDS):
            return tables.files_of(self.path, self.ends)
        builder, split = tables.tfds_split(self.path)
        splits, place = [split], os.fspath(builder.data_path)
        if split in builder.info.splits:
            shards = builder.info.splits[split].num_shards
            splits = [f"{split}[{n}shard:{n + 1}shard]" for n in range(shards)]
        return [f"{tables.TFDS}{place}#{each}" for each in splits]

    def fingerprint(self, private: pathlib.Path) -> str:
        """Returns a digest of names, sizes and times: reading it would take hours."""
        about = [(each, os.stat(each)) for each in self._files(self.path)]
        seen = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in about]
        return records.digest([self.path, seen])


def read_texts(part: str, field: str) -> Iterator[str]:
    """Streams the texts of one of `Texts.parts`; of a table, those of a column.

    Raises:
      DataError: at the first record that is malformed.
    """
    if part.removesuffix(".gz").endswith(_LINES):
        yield from (text for *_, text in io.read_lines(part))
        return
    for *_, row in tables.Table(part, {"document": field}).rows():
        yield row["document"]


def _is_made(file: str) -> bool:
    """Returns whether a stage made a file, or it is part of a set or of canaries."""
    marks = (sets.PART_FILE, artefacts.MARK_FILE, records.STAGE_FILE)
    folders = pathlib.Path(os.path.abspath(file)).parents
    return (
        "/beir_directory/" in file  # `tfds_builder` keeps no record of what it read
        or any((each / mark).is_file() for each in folders for mark in marks)
        or (tables.format_of(file) == ".parquet" and sets.is_marked(file))
    )

"""Large collections of public text, streamed file by file.

A record is a line of `.txt` files, or a column of a table (`tables.Table`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence

from tfdpsq.data import tables
from tfdpsq.data.io import read_lines
from tfdpsq.validation import DataError, InputError

_LINES = (".txt", ".text")


@dataclasses.dataclass(frozen=True)
class CorpusPart:
    """A part of a corpus that is read in one go.

    Attributes:
      name: a file, or `tfds:NAME#SPLIT` of a shard of a TFDS split.
      field: the column that holds the text.
      identity: changes with its content, as far as one can see without reading it.
      place: the file, or the directory of the data set.
    """

    name: str
    field: str
    identity: str
    place: str

    def records(self) -> Iterator[str]:
        """Streams its texts.

        Raises:
          DataError: at the first record that is malformed.
        """
        if self.name.removesuffix(".gz").endswith(_LINES):
            yield from (text for *_, text in read_lines(self.name))
            return
        for path, number, row in tables.Table(self.name, {"text": self.field}).rows():
            if not isinstance(row["text"], str):
                problem, remedy = (
                    f"no text under {self.field!r}",
                    "Set field to its name",
                )
                raise DataError(path, problem, remedy, number)
            yield row["text"]


def corpus_parts(paths: str | Sequence[str], field: str = "text") -> list[CorpusPart]:
    """Finds the parts of a corpus; reads none.

    Args:
      paths: one or several, each a file, a directory, a glob pattern ("**" reaches
        into directories), or `tfds:NAME#SPLIT`, a split that is read shard by shard.
      field: of tables, the column that holds the text.

    Returns:
      The parts in the order of `paths`, and by name within each; a file that two
      paths lead to comes once.

    Raises:
      InputError: no path, or one that is not there.
    """
    given = [paths] if isinstance(paths, str) else list(paths)
    if not any(given):
        raise InputError("no corpus was given. Name the files that hold its texts.")
    parts: dict[str, CorpusPart] = {}
    for path in given:
        if path.startswith(tables.TFDS):
            found = _of_tfds(path, field)
        else:
            found = [_of_file(file, field) for file in tables.files_of(path, _LINES)]
        for part in found:
            parts.setdefault(os.path.realpath(part.name), part)
    return list(parts.values())


def parts_fingerprint(parts: Sequence[CorpusPart]) -> str:
    """SHA-256 over what identifies parts without reading them: see `identity`."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps([part.name, part.identity]).encode())
    return digest.hexdigest()


def _of_file(path: str, field: str) -> CorpusPart:
    about = os.stat(path)
    identity = f"{field} {about.st_size} {about.st_mtime_ns}"
    return CorpusPart(path, field, identity, path)


def _of_tfds(name: str, field: str) -> list[CorpusPart]:
    builder, split = tables.tfds_split(name)
    if field not in builder.info.features:
        raise InputError(
            f"{name} has no feature {field!r}; it has "
            f"{', '.join(builder.info.features)}. Set field to what holds the text."
        )
    splits = [split]
    if split in builder.info.splits:
        shards = builder.info.splits[split].num_shards
        splits = [f"{split}[{n}shard:{n + 1}shard]" for n in range(shards)]
    place = os.fspath(builder.data_path)
    return [
        CorpusPart(f"{tables.TFDS}{place}#{each}", field, field, place)
        for each in splits
    ]

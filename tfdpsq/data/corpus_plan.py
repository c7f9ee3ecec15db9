"""Offsets of the parts of a corpus, for workers that start in the middle of it.

A plan is made in two readings of the corpus: one counts, one notes for each part the
bytes and lines before it and the SHA-256 of its lines. Whoever reads a part by it seeks
to its first byte (a compressed corpus is read up to there), names lines by their number
in the whole file, and notices a corpus that changed since it was planned.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfdpsq.data import any_files
from tfdpsq.data.beir_lines import (
    raw_lines,
    read_documents,
    whole_corpus,
)
from tfdpsq.data.texts import Document, documents_fingerprint
from tfdpsq.validation import DataError, InputError


@dataclasses.dataclass(frozen=True)
class CorpusRange:
    """A part of a corpus: consecutive lines of its file.

    Attributes:
      start: number of its first document, from 0.
      stop: number of the first document after it.
      lines: how many lines precede it.
      offset: how many bytes precede it, uncompressed.
      size: its own bytes, uncompressed.
      sha256: of its bytes, in hex.
    """

    start: int
    stop: int
    lines: int
    offset: int
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class CorpusPlan:
    """Positions of the parts of a corpus in its file.

    Attributes:
      file: the file's name.
      size: its bytes on disk, compressed if it is.
      documents: how many it holds.
      fingerprint: of its documents, see `texts.documents_fingerprint`.
      ranges: they make up the whole, in order.
    """

    file: str
    size: int
    documents: int
    fingerprint: str
    ranges: tuple[CorpusRange, ...]

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return dataclasses.asdict(self) | {
            "ranges": [dataclasses.asdict(one) for one in self.ranges]
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CorpusPlan:
        """Reads what `to_json` returned."""
        ranges = tuple(CorpusRange(**one) for one in value["ranges"])
        return cls(**{**value, "ranges": ranges})

    def describes(self, file: str, bounds: Sequence[int]) -> bool:
        """Returns whether it describes this corpus, by its size, in these parts.

        Args:
          file: the corpus; `read_range` compares its bytes.
          bounds: as `plan_corpus` has them of `self.documents`.
        """
        return (
            (self.file, self.size) == (_name(file), any_files.size(file))
            and [one.start for one in self.ranges] == list(bounds[:-1])
            and self.documents == bounds[-1]
        )


def plan_corpus(file: str, bounds: Callable[[int], Sequence[int]]) -> CorpusPlan:
    """Plans a corpus, reading it twice, in flat memory.

    Args:
      file: the corpus, `.jsonl` or `.jsonl.gz`.
      bounds: number of documents n -> numbers of documents that parts begin with:
        0 first, then not falling, and n behind the last part.

    Raises:
      DataError: a malformed line, an id that occurs twice, or no document.
      InputError: the corpus changed meanwhile.
    """
    size = any_files.size(file)
    count = _count(file)
    cutter = _Cutter(file, list(bounds(count)))
    fingerprint = documents_fingerprint(whole_corpus(file, cutter.documents()))
    if cutter.number != count or any_files.size(file) != size:
        raise InputError(
            f"{file}: held {count} documents, then {cutter.number}: it was changed "
            "while it was read. Run the command again once nothing writes to it."
        )
    return CorpusPlan(_name(file), size, count, fingerprint, tuple(cutter.ranges))


def read_range(file: str, part: CorpusRange, remedy: str) -> Iterator[Document]:
    """Streams a part's documents.

    Args:
      file: the corpus that was planned.
      part: of its plan.
      remedy: what to do if it changed.

    Raises:
      DataError: a malformed line, or, at the end, bytes other than those planned.
    """

    def raw() -> Iterator[tuple[int, bytes]]:
        digest, left = hashlib.sha256(), part.size
        lines = raw_lines(file, part.offset, part.lines)
        while left > 0:
            line, data = next(lines, (0, b""))
            if not data:
                break
            left -= len(data)
            digest.update(data)
            yield line, data
        if digest.hexdigest() != part.sha256:
            raise DataError(
                file,
                f"documents {part.start} to {part.stop - 1} are no longer those that "
                "were planned: the file was changed",
                remedy,
                part.lines + 1,
            )

    return read_documents(file, raw())


class _Cutter:
    """Notes where the parts begin and end while the documents are read."""

    def __init__(self, file: str, bounds: list[int]):
        self.number = 0  # of documents read
        self.ranges: list[CorpusRange] = []
        self._file, self._bounds = file, bounds
        self._waiting: list[bytes] = []  # lines since the last document
        self._lines = self._offset = 0  # before this part
        self._open()

    def documents(self) -> Iterator[Document]:
        for document in read_documents(self._file, self._raw()):
            while len(self.ranges) + 2 < len(self._bounds) and self._ends(self.number):
                self._close()
            self._take()
            self.number += 1
            yield document
        self._take()  # blank lines at the end
        while len(self.ranges) + 1 < len(self._bounds):
            self._close()

    def _raw(self) -> Iterator[tuple[int, bytes]]:
        for line, data in raw_lines(self._file):
            self._waiting.append(data)
            yield line, data

    def _ends(self, number: int) -> bool:
        return self._bounds[len(self.ranges) + 1] <= number

    def _take(self) -> None:
        for data in self._waiting:
            self._digest.update(data)
            self._size += len(data)
            self._read += 1
        self._waiting.clear()

    def _open(self) -> None:
        self._digest, self._size, self._read = hashlib.sha256(), 0, 0

    def _close(self) -> None:
        start, stop = self._bounds[len(self.ranges) :][:2]
        digest = self._digest.hexdigest()
        self.ranges.append(
            CorpusRange(start, stop, self._lines, self._offset, self._size, digest)
        )
        self._lines += self._read
        self._offset += self._size
        self._open()


def _name(file: str) -> str:
    return file.rpartition("/")[2]


def _count(file: str) -> int:
    """Counts the lines that `read_lines` would parse: those that are not blank."""
    count = 0
    for line, data in raw_lines(file):
        if line == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        # What is white space beyond ASCII shows only in the decoded text.
        count += data[:1] == b"{" or bool(data.decode("utf-8", "replace").strip())
    return count

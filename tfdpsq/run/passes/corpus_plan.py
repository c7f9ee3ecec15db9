"""Offsets of the parts of a corpus, for work that starts in the middle of it."""

from __future__ import annotations

import array
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdpsq.data import io
from tfdpsq.data.beir import locate_documents
from tfdpsq.data.texts import Document, documents_fingerprint


@dataclasses.dataclass(frozen=True)
class CorpusRange:
    """A part of a corpus: consecutive lines of its file.

    Attributes:
      start: number of its first document, from 0.
      stop: number of the first document after it.
      lines: how many lines precede it.
      offset: how many bytes precede it, uncompressed.
    """

    start: int
    stop: int
    lines: int
    offset: int


@dataclasses.dataclass(frozen=True)
class CorpusPlan:
    """Positions of the parts of a corpus in its file.

    Attributes:
      file: the file's name.
      size: its bytes on disk, compressed if it is.
      modified: when it was, in nanoseconds since 1970.
      documents: how many it holds.
      fingerprint: of its documents, see `texts.documents_fingerprint`.
      ranges: they make up the whole, in order.
    """

    file: str
    size: int
    modified: int
    documents: int
    fingerprint: str
    ranges: tuple[CorpusRange, ...]

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        ranges = [dataclasses.asdict(one) for one in self.ranges]
        return {**dataclasses.asdict(self), "ranges": ranges}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CorpusPlan:
        """Reads what `to_json` returned."""
        ranges = tuple(CorpusRange(**one) for one in value["ranges"])
        return cls(**{**value, "ranges": ranges})

    def describes(self, file: str, bounds: Sequence[int]) -> bool:
        """Returns whether it is of this file, unchanged, cut at these bounds."""
        return (self.file, self.size, self.modified) == _identity(file) and [
            *(one.start for one in self.ranges),
            self.documents,
        ] == list(bounds)


def plan_corpus(file: str, bounds: Callable[[int], Sequence[int]]) -> CorpusPlan:
    """Plans a corpus in one reading; 16 bytes of memory a document, besides its id.

    Args:
      file: the corpus, `.jsonl` or `.jsonl.gz`.
      bounds: number of documents n -> numbers of documents that parts begin with:
        0 first, then not falling, and n behind the last part.

    Raises:
      DataError: a malformed line, an id that occurs twice, or no document.
    """
    lines, offsets = array.array("q"), array.array("q")

    def documents() -> Iterator[Document]:
        for line, offset, document in locate_documents(file):
            lines.append(line - 1)
            offsets.append(offset)
            yield document

    fingerprint = documents_fingerprint(documents())
    count = len(lines)
    cuts = list(bounds(count))
    places = [min(start, count - 1) for start in cuts]  # an empty part may be the last
    ranges = tuple(
        CorpusRange(start, stop, lines[place], offsets[place])
        for start, stop, place in zip(cuts, cuts[1:], places)
    )
    return CorpusPlan(*_identity(file), count, fingerprint, ranges)


def read_range(file: str, part: CorpusRange) -> Iterator[Document]:
    """Streams a part's documents; raises DataError at a malformed line."""
    found = locate_documents(file, offset=part.offset, line=part.lines)
    documents = (document for *_, document in found)
    return itertools.islice(documents, part.stop - part.start)


def _identity(file: str) -> tuple[str, int, int]:
    name = file.rpartition("/")[2]
    if io.is_local(file):  # of which TensorFlow tells seconds only
        local = os.stat(file)
        return name, local.st_size, local.st_mtime_ns
    found = tf.io.gfile.stat(file)
    return name, found.length, found.mtime_nsec

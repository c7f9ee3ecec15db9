"""A corpus in parts: one reading finds its fingerprint and where documents begin."""

from __future__ import annotations

import array
import dataclasses
import functools
import math
import os
from collections.abc import Iterator

from tfdpsq.data.beir import locate_documents
from tfdpsq.data.texts import Document, documents_fingerprint

FILES = ("corpus.jsonl", "corpus.jsonl.gz")


@dataclasses.dataclass(frozen=True)
class Scan:
    """Result of reading a corpus once; 16 bytes of memory a document."""

    file: str
    fingerprint: str  # of its documents, see `documents_fingerprint`
    lines: array.array  # numbers of lines before each document
    offsets: array.array  # numbers of bytes before each, uncompressed

    @property
    def count(self) -> int:
        """Number of documents."""
        return len(self.lines) - 1

    def cut(
        self, size: int, most: int = 0, only: frozenset[str] | None = None
    ) -> Parts:
        """Cuts the corpus into parts of `size` documents.

        Args:
          size: documents in a part.
          most: documents taken, evenly spread over the corpus; 0 takes all.
          only: ids of the documents that parts keep; `None` keeps all.
        """
        taken = min(most or self.count, self.count)
        parts = max(1, math.ceil(taken / size))
        # The first n documents give n · taken // count: find the least n for each.
        firsts = [taken * index // parts for index in range(parts + 1)]
        cuts = [-(-first * self.count // taken) for first in firsts]
        starts = [(at, self.lines[at], self.offsets[at]) for at in cuts]
        return Parts(self.file, self.count, taken, tuple(starts), only)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a corpus, or of an evenly spread share of it; can be pickled."""

    file: str
    total: int  # documents in the corpus
    taken: int  # documents in all parts
    # document, line and byte at which each part begins, and the last ends
    starts: tuple[tuple[int, int, int], ...]
    only: frozenset[str] | None = None  # ids of the documents kept; `None` for all

    def __len__(self) -> int:
        """Returns the number of parts."""
        return len(self.starts) - 1

    def first(self, index: int) -> int:
        """Returns the number of documents in the parts before this one."""
        return self.taken * index // len(self)

    def size(self, index: int) -> int:
        """Returns the number of documents in a part."""
        return self.first(index + 1) - self.first(index)

    def read(self, index: int) -> Iterator[Document]:
        """Streams a part's documents; raises DataError at a malformed line."""
        start, line, offset = self.starts[index]
        stop = self.starts[index + 1][0]
        found = locate_documents(self.file, offset=offset, line=line)
        for number, (_, _, document) in zip(range(start, stop), found):
            due = (number + 1) * self.taken // self.total
            if due > number * self.taken // self.total:
                if self.only is None or document.id in self.only:
                    yield document


def scan(file: str | os.PathLike) -> Scan:
    """Reads a corpus, `.jsonl` or `.jsonl.gz`, once while the file does not change.

    Raises:
      DataError: a malformed line, an id that occurs twice, or no document.
    """
    found = os.stat(file)
    return _scanned(os.fspath(file), found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _scanned(file: str, size: int, modified: int) -> Scan:
    lines, offsets = array.array("q"), array.array("q")

    def documents() -> Iterator[Document]:
        for line, offset, document in locate_documents(file):
            lines.append(line - 1)
            offsets.append(offset)
            yield document

    fingerprint = documents_fingerprint(documents())
    lines.append(lines[-1])  # where a part after the last would begin
    offsets.append(offsets[-1])
    return Scan(file, fingerprint, lines, offsets)

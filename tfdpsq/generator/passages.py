"""Documents cut into passages that a small model reads whole."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tfdpsq.data import Document

_PASSAGE = "#"


def passages(document: Document, words: int) -> Iterator[Document]:
    """Cuts a document at line ends into passages of about so many words.

    A line of more words than that is cut too, behind a sentence where one ends soon.

    Args:
      document: any.
      words: a passage ends with the line in which it comes to so many; a last one of
        less than half as many stays with the one before.

    Yields:
      Documents whose ids end in "#0", "#1", ...; the first has the title.
    """
    lines = [
        piece
        for line in document.text.splitlines(keepends=True)
        for piece in _pieces(line, words)
    ]
    parts: list[list[str]] = [[]]
    count = 0
    left = sum(len(line.split()) for line in lines)
    for line in lines:
        if count >= words and left >= words / 2:
            parts.append([])
            count = 0
        parts[-1].append(line)
        count += len(line.split())
        left -= len(line.split())
    for number, part in enumerate(parts):
        yield Document(
            f"{document.id}{_PASSAGE}{number}",
            "" if number else document.title,
            "".join(part),
        )


def _pieces(line: str, words: int) -> Iterator[str]:
    """A line in pieces of at least so many words, and less than twice as many."""
    start = count = 0
    for word in re.finditer(r"\S+\s*", line):
        count += 1
        ended = word.group().rstrip().endswith((".", "!", "?"))
        if count >= 2 * words - 1 or (count >= words and ended):
            yield line[start : word.end()]
            start, count = word.end(), 0
    if start < len(line) or not line:
        yield line[start:]


def document_of(passage_id: str) -> str:
    """The id of the document that a passage is from."""
    return passage_id.rpartition(_PASSAGE)[0]

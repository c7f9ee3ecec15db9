"""Documents cut into passages that a small model reads whole."""

from __future__ import annotations

from collections.abc import Iterator

from tfdpsq.data import Document

_PASSAGE = "#"


def passages(document: Document, words: int) -> Iterator[Document]:
    """Cuts a document at line ends into passages of about so many words.

    Args:
      document: any.
      words: a passage ends with the line in which it comes to so many; a last one of
        less than half as many stays with the one before.

    Yields:
      Documents whose ids end in "#0", "#1", ...; the first has the title.
    """
    lines = document.text.splitlines(keepends=True)
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


def document_of(passage_id: str) -> str:
    """The id of the document that a passage is from."""
    return passage_id.rpartition(_PASSAGE)[0]

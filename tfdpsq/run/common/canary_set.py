"""Canaries of an audit: their fields, and the file that lists them."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable

from tfdpsq.data.io import atomic_write, read_objects, write_json
from tfdpsq.run.frame.artefacts import MARK_FILE
from tfdpsq.run.frame.places import Privacy

DATA, LEFT_OUT = "data", "left_out"  # a folder, and a split
CANARIES_FILE = "canaries.jsonl"
# Prefix of the ids of canaries' queries and documents, and of their users.
ID_PREFIX = "canary-"
OUR_FORMS = ("secret", "own_document", "random_document")
IN_DOCUMENT = ("paper_own_document", "paper_random_document")  # which hold the secret
PAPER_FORMS = ("own_document", *IN_DOCUMENT)
FORMS = (*OUR_FORMS, *IN_DOCUMENT)


@dataclasses.dataclass(frozen=True)
class Canary:
    """A secret, its place in the data, and its candidates."""

    form: str  # one of FORMS
    repetitions: int  # training queries that hold the secret; of a coin 0 or 1
    coin: bool  # whether a coin decided its presence
    prefix: str  # words before the secret, or the whole query of a form IN_DOCUMENT
    secret: str  # digits
    candidates: tuple[str, ...]  # drawn likewise, in no text; none with a coin
    document_id: str  # of the document that it is paired with, or appended to
    document_characters: int = 0  # kept of that document before the secret; 0 for all

    @property
    def in_document(self) -> bool:
        """True if the secret is in the document, and not in the query."""
        return self.form in IN_DOCUMENT

    def query(self, secret: str | None = None) -> str:
        """Returns the query, with a candidate in the place of its secret if given."""
        if self.in_document:
            return self.prefix
        return f"{self.prefix} {secret or self.secret}".strip()

    def document(self, content: str, secret: str | None = None) -> str:
        """Returns the query's document; `content` is that of `document_id`."""
        if not self.in_document:
            return content
        kept = content[: self.document_characters or None].rstrip()
        return f"{kept} {secret or self.secret}"


def write_canaries(directory: pathlib.Path, made: Iterable[Canary]) -> None:
    """Lists canaries, and marks the pairs next to the list, wherever copied."""
    lines = (json.dumps(dataclasses.asdict(canary)) + "\n" for canary in made)
    atomic_write(directory / CANARIES_FILE, "".join(lines))
    mark = {"guarantee": Privacy.PRIVATE.word, "holds": "canaries"}
    write_json(directory / DATA / MARK_FILE, mark)


def read_canaries(directory: str | os.PathLike) -> list[Canary]:
    """Reads what the stage `canaries` wrote; raises DataError for a damaged line."""
    lines = read_objects(pathlib.Path(directory) / CANARIES_FILE)
    return [Canary(**{**x, "candidates": tuple(x["candidates"])}) for *_, x in lines]

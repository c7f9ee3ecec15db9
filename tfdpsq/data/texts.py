"""The records that every stage passes on: a document, and a query with one."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable

from tfdpsq.validation import shown

# In some languages a whole query has no white space, so that is not looked for.
_NEARLY_A_NUMBER = re.compile(r"[-+0-9.,e]{1,20}|[-+]?(nan|inf|infinity)", re.I)
_LIKE_AN_ID = re.compile(r"[!-~]{1,40}")


@dataclasses.dataclass(frozen=True)
class Document:
    """A public document.

    Attributes:
      id: unique in its corpus, without white space.
      title: may be empty.
      text: the body; may be empty where there is a title.
    """

    id: str
    title: str
    text: str

    @property
    def content(self) -> str:
        """Title, space, text: what models and BM25 read (BEIR's convention)."""
        return f"{self.title} {self.text}".strip()


@dataclasses.dataclass(frozen=True)
class Pair:
    """One query and one document that answers it.

    Attributes:
      query_id: id of the query.
      query: its text; private unless stated otherwise.
      document_id: id of the document.
      document: its content (see `Document.content`); public.
    """

    query_id: str
    query: str
    document_id: str
    document: str


def documents_fingerprint(documents: Iterable[Document]) -> str:
    """SHA-256 of documents in their order."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.id, document.title, document.text):
            digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def number_shown(value: object) -> str:
    """Returns what should be a number, for an error; not if it may be a query."""
    if isinstance(value, str) and _NEARLY_A_NUMBER.fullmatch(value):
        return repr(value)
    return "not a number"


def id_shown(value: str) -> str:
    """Returns what should be an id, for an error; not if it may be a query."""
    if _LIKE_AN_ID.fullmatch(value):
        return shown(value)
    return "whose id is not shown, as it may be a text,"


def text_problem(field: str, value: object, identifier: bool = False) -> str | None:
    """Says what is wrong with a text, for the errors of readers and writers.

    The text itself is not repeated, as it may be a private query; and so may an id with
    white space. Other ids are repeated.

    Args:
      field: what the text is called.
      value: what should be a text.
      identifier: whether it is an id, which must not be empty nor hold white
        space (it would break qrels and TREC run files) or NUL (pytrec-eval's C code
        would end the process).

    Returns:
      The problem in words, or None.
    """
    if not isinstance(value, str):
        return f"{field} is of type {type(value).__name__}, not a string"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        place = f"character {error.start + 1}"
        return f"{field} holds half a surrogate pair ({place}), which is not text"
    if identifier and not value:
        return f"{field} is ''; ids are not empty"
    if identifier and value.split() != [value]:
        return f"{field} holds white space, which breaks qrels and TREC files"
    if identifier and "\0" in value:
        return f"{field} is {shown(value)}; ids hold no NUL character"
    return None

"""The records that every stage passes on: a document, and a query with one."""

from __future__ import annotations

import dataclasses
import decimal
import hashlib
import re
import unicodedata
import uuid
from collections.abc import Iterable
from typing import Any

from tfdpsq.validation import shown

# In some languages a whole query has no white space, so that is not looked for.
_NEARLY_A_NUMBER = re.compile(r"[-+0-9.,e]{1,20}|[-+]?(nan|inf|infinity)", re.I)
_LIKE_AN_ID = re.compile(r"[!-~]{1,40}")
# Below it, a float has the digits of the whole number that it was made from.
_LARGEST = 2**53
_WHOLE = re.compile(r"([+-]?)(\d+)(\.0*)?", re.ASCII)
# A large number as pandas, Spark, Excel and databases round it. Others with an
# exponent, such as 49018e16, are hexadecimal digits.
_ROUNDED = re.compile(r"[+-]?\d(\.\d+e[+-]?|e\+)\d+", re.ASCII | re.IGNORECASE)
# What pandas, NumPy and databases write for a value that is missing.
_MISSING = frozenset("nan NaN NaT None <NA> NULL null".split()) | {"\\N"}


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

    Args:
      field: what the text is called.
      value: what should be a text; it is not repeated, as it may be a private query.
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
        return f"{field} holds a NUL character"
    return None


def text_of(value: Any) -> str:
    """Returns a value of a table as text; neither `None` nor NaN is text.

    Raises:
      ValueError: it is several values, or bytes that are not UTF-8.
    """
    if isinstance(value, (list, dict)):
        raise ValueError
    if value is None or value != value:
        return ""
    return value.decode() if isinstance(value, bytes) else str(value)


def id_of(value: Any, of_user: bool = False) -> str:
    """Returns one text for all spellings of an id; "" where there is none.

    | value                          | id                                              |
    |--------------------------------|-------------------------------------------------|
    | 7, 7.0, "7", "7.0", "7.", "+7" | "7": pandas makes floats next to a missing one  |
    | "007", "007.0"                 | "007": leading zeros are of an id of its own    |
    | "49018e16", "7.5", other text  | itself                                          |
    | "1.2345678901234568e+18"       | ValueError: digits may have been rounded off    |
    | "9007199254740993.0", 2.0**53  | ValueError, for the same reason                 |
    | of a user: " Zoë", "nan"       | "Zoë" in NFC, "": nobody, not one busy person   |

    Raises:
      ValueError: also for a value that is neither text nor a whole number.
    """
    text = text_of(value)
    if not text or isinstance(value, (str, bytes, uuid.UUID)):
        if of_user:
            text = unicodedata.normalize("NFC", text.strip())
            text = "" if text in _MISSING else text
        return _one_spelling(text)
    if isinstance(value, bool) or not isinstance(value, (int, float, decimal.Decimal)):
        raise ValueError
    if value != int(value) or (isinstance(value, float) and abs(value) >= _LARGEST):
        raise ValueError
    return str(int(value))


def _one_spelling(text: str) -> str:
    if _ROUNDED.fullmatch(text):
        raise ValueError
    whole = _WHOLE.fullmatch(text)
    if whole is None:
        return text
    sign, digits, fraction = whole.groups()
    if fraction and int(digits) >= _LARGEST:
        raise ValueError
    return f"-{digits}" if sign == "-" and digits.strip("0") else digits

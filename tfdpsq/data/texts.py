"""Documents, query-document pairs, and what counts as a text or an id."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import hashlib
import re
import unicodedata
import uuid
from collections.abc import Iterable
from typing import Any

# From here on, floats lose digits of whole numbers.
_LARGEST = 2**53
_WHOLE = re.compile(r"([+-]?)(\d+)(\.0*)?", re.ASCII)
# A large number as pandas, Spark, Excel and databases round it. Others with an
# exponent, such as 49018e16, are hexadecimal digits.
_ROUNDED = re.compile(r"[+-]?\d(\.\d+e[+-]?|e\+)\d+", re.ASCII | re.IGNORECASE)
_DATE = re.compile(r"(19|20)\d\d[01]\d[0-3]\d(\d{6})?(\.0*)?", re.ASCII)
_EPOCH = re.compile(r"\d+(\.\d*)?(e\+?\d\d?)?", re.ASCII)
# What pandas, NumPy and databases write for a value that is missing.
_MISSING = frozenset("nan NaN NaT None <NA> NULL null".split()) | {"\\N"}


@dataclasses.dataclass(frozen=True)
class Document:
    """A public document, with a title, a text or both."""

    id: str  # unique in its corpus, without white space
    title: str
    text: str

    @property
    def content(self) -> str:
        """Title, space, text: what models and BM25 read (BEIR's convention)."""
        return f"{self.title} {self.text}".strip()


@dataclasses.dataclass(frozen=True)
class Pair:
    """One query and one document that answers it."""

    query_id: str
    query: str  # private unless stated otherwise
    document_id: str
    document: str  # its `Document.content`, public


def day_of(value: Any) -> str:
    """Returns the day of a time, as 2026-01-31; "" of anything else.

    | value                                 | read as                                 |
    |---------------------------------------|-----------------------------------------|
    | a date, 2026-01-31T23:30:00+01:00     | the day as it is written                |
    | 20260131, "20260131233000"            | the same                                |
    | 1769902200, 1769902200000.0, ...      | s, ms, µs or ns since 1970, by size     |
    """
    text = str(value).strip()
    if _DATE.fullmatch(text):
        text = f"{text[:4]}-{text[4:6]}-{text[6:8]}"
    elif _EPOCH.fullmatch(text):
        seconds = float(text)
        while seconds >= 1e11:
            seconds /= 1000
        text = str(datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc))
    try:
        day = datetime.date.fromisoformat(text[:10]).isoformat()
    except ValueError:
        return ""
    return day if "1990" < day < "2100" else ""  # else it was another kind of number


def documents_fingerprint(documents: Iterable[Document]) -> str:
    """SHA-256 of documents in their order."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.id, document.title, document.text):
            digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def text_problem(field: str, value: object, identifier: bool = False) -> str | None:
    """Says what is wrong with a text called `field`, or returns `None`.

    The value is not repeated, as it may be a private query. An `identifier` must not be
    empty, nor hold white space (which breaks qrels and TREC run files) or NUL (at which
    pytrec-eval crashes).
    """
    if not isinstance(value, str):
        return f"{field} is of type {type(value).__name__}, not a string"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return f"{field} holds half a surrogate pair, which is not text"
    if identifier and (value.split() != [value] or "\0" in value):
        return f"{field} is empty or holds white space or NUL; ids must not"
    return None


def text_of(value: Any) -> str:
    """Returns a value of a table as text, "" for `None` and NaN.

    Raises ValueError for several values and for bytes that are not UTF-8.
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

    Raises ValueError or OverflowError also for what is neither text nor whole.
    """
    text = text_of(value)
    if text and not isinstance(value, (str, bytes, uuid.UUID)):
        number = isinstance(value, (int, float, decimal.Decimal))
        rounded = isinstance(value, float) and abs(value) >= _LARGEST
        if not number or isinstance(value, bool) or rounded or value != int(value):
            raise ValueError
        return str(int(value))
    if of_user:
        text = unicodedata.normalize("NFC", text.strip())
        text = "" if text in _MISSING else text
    if _ROUNDED.fullmatch(text):
        raise ValueError
    whole = _WHOLE.fullmatch(text)
    if whole is None:
        return text
    sign, digits, fraction = whole.groups()
    if fraction and int(digits) >= _LARGEST:
        raise ValueError
    return f"-{digits}" if sign == "-" and digits.strip("0") else digits

"""Reads the files of a BEIR directory line by line; every error names its line.

It never repeats the line: that may be a private query, and errors end up in logs. Ids
are repeated, cut to about 80 characters.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import gzip
import json
import os
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tfdpsq.data import any_files
from tfdpsq.data.texts import Document, id_of, id_shown, number_shown, text_problem
from tfdpsq.data.unique_ids import BATCH, UniqueIds
from tfdpsq.validation import MOST_RELEVANT, DataError, parse_json, shown

_Item = TypeVar("_Item")
_HEADER = ["query-id", "corpus-id", "score"]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A line of a qrels file.

    Attributes:
      line: its number, from 1.
      query_id: id of the query.
      document_id: id of the document.
      score: above 0 is relevant.
    """

    line: int
    query_id: str
    document_id: str
    score: int


def raw_lines(
    path: str | os.PathLike, offset: int = 0, line: int = 0
) -> Iterator[tuple[int, bytes]]:
    """Yields (line number, bytes with their line end) of all lines from a place on.

    Args:
      path: the file, local or of another file system; ".gz" is read uncompressed.
      offset: bytes before the first line wanted, uncompressed.
      line: lines before it.

    Raises:
      DataError: a broken gzip file.
    """
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(any_files.open_binary(path))
            packed = os.fspath(path).endswith(".gz")
            lines = stack.enter_context(gzip.open(file)) if packed else file
            lines.seek(offset)  # of a compressed file, by reading all before it
            for raw in lines:
                line += 1
                yield line, raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            path, f"broken gzip file ({error})", "Copy or write it again", line + 1
        ) from error


def read_lines(
    path: str | os.PathLike, raw: Iterable[tuple[int, bytes]] | None = None
) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, text) of the lines that are not blank.

    A byte order mark at the beginning, which some editors write, is not part of it.

    Args:
      path: the file.
      raw: what `raw_lines` gives of it, or a part of that; `None` for all.

    Raises:
      DataError: bytes that are not UTF-8, or a broken gzip file.
    """
    for line, data in raw_lines(path) if raw is None else raw:
        text = decoded(path, line, data, "e.g. with iconv").rstrip("\r\n")
        if text.strip():
            yield line, text


def decoded(path: str | os.PathLike, line: int, data: bytes, tool: str) -> str:
    """Returns the text of a line; a byte order mark in the first is not part of it.

    Raises:
      DataError: it is not UTF-8; `tool` says how the file becomes so.
    """
    if line == 1:
        data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            path,
            f"byte {error.start + 1} of the line is "
            f"0x{data[error.start]:02x}, which is not UTF-8",
            f"Convert the file to UTF-8, {tool}",
            line,
        ) from error


def read_records(
    path: str | os.PathLike, raw: Iterable[tuple[int, bytes]] | None = None
) -> Iterator[tuple[int, dict]]:
    """Yields (line number, object) of a JSON-lines file, with a sound ``_id``.

    Args:
      path: the file.
      raw: as in `read_lines`.

    Raises:
      DataError: a line that is not a JSON object, or whose ``_id`` is not an id.
    """
    for line, text in read_lines(path, raw):
        record = parse_line(path, line, text, "Write one JSON object a line")
        key = record.get("_id") if isinstance(record, dict) else None
        if not isinstance(key, str):
            raise DataError(
                path,
                "no text under '_id'",
                'Write one JSON object a line, its id a string: {"_id": "7", ...}',
                line,
            )
        problem = text_problem("_id", key, identifier=True)
        if problem:
            raise DataError(path, problem, "Give it another id", line)
        yield line, record


def parse_line(
    path: str | os.PathLike, line: int, text: str, remedy: str, excerpt: str = ""
) -> Any:
    """Returns the JSON value of a line.

    Raises:
      DataError: it is not JSON; it says `remedy`, and `excerpt` where that is public.
    """
    try:
        return parse_json(text)
    except ValueError as error:
        where = str(error)
        if isinstance(error, json.JSONDecodeError):
            where = f"{error.msg}, column {error.colno}"
        raise DataError(path, f"not JSON ({where}){excerpt}", remedy, line) from error


def text_field(path: str | os.PathLike, line: int, record: dict, field: str) -> str:
    """Returns a field of a record; one that is absent or null is empty.

    Raises:
      DataError: it is not text.
    """
    value = record.get(field)
    value = "" if value is None else value
    problem = text_problem(field, value)
    if problem:
        raise DataError(path, problem, "Write a string of valid Unicode", line)
    return value


def read_documents(
    path: str | os.PathLike,
    raw: Iterable[tuple[int, bytes]] | None = None,
    may_be_empty: bool = False,
) -> Iterator[Document]:
    """Yields the documents of a corpus.

    Args:
      path: one object a line with "_id", "text" and perhaps "title".
      raw: as in `read_lines`.
      may_be_empty: whether documents may have neither title nor text.

    Raises:
      DataError: a malformed line; names file and line.
    """
    for line, record in read_records(path, raw):
        title = text_field(path, line, record, "title")
        text = text_field(path, line, record, "text")
        document = Document(record["_id"], title, text)
        if not document.content and not may_be_empty:
            raise DataError(
                path,
                f"document {shown(document.id)} is empty (no title, no text)",
                "Remove it, or give it a text",
                line,
            )
        yield document


def user_of(path: Path, line: int, record: dict, field: str) -> str:
    """Returns a query's user: text or a number in its metadata, or next to it.

    Spelled as `texts.id_of` spells it: one person is one unit of privacy.

    Raises:
      DataError: it is nobody's, or two different people's, or may have been rounded.
    """
    found = set()
    for value in _user_values(record, field):
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            try:
                found.add(id_of(value, of_user=True))
            except ValueError:
                raise DataError(
                    path,
                    f"query {shown(record['_id'])} has the user {shown(value)}, a "
                    "number whose last digits may have been rounded off",
                    "Write it with all its digits, or as a text without an exponent",
                    line,
                ) from None
    found.discard("")
    if len(found) == 1:
        return found.pop()
    raise DataError(
        path,
        f"query {shown(record['_id'])} has "
        + (
            f"two users, {shown(sorted(found))}"
            if found
            else f"no user under {field!r}"
        ),
        f'Write "metadata": {{"{field}": ...}}, a text or an integer, into every '
        "query's line, or protect single queries instead of users",
        line,
    )


def names_user(record: dict, field: str) -> bool:
    """Says whether a query's line has a value where `user_of` looks, sound or not."""
    return any(value not in (None, "") for value in _user_values(record, field))


def _user_values(record: dict, field: str) -> tuple[object, object]:
    metadata = record.get("metadata")
    inside = metadata.get(field) if isinstance(metadata, dict) else None
    return inside, record.get(field)


def other_fields(record: dict) -> dict:
    """Returns what a query's line holds besides id and text, empty values left out."""
    return {
        key: value
        for key, value in record.items()
        if key not in ("_id", "text") and value not in (None, "", {}, [])
    }


def duplicate(path: str | os.PathLike, key: str, line: int) -> DataError:
    """Returns the error for an id that occurs twice."""
    return DataError(
        path,
        f"id {shown(key)} occurs on an earlier line",
        "Ids are unique; rename or remove one of the two",
        line,
    )


def unique(
    path: str | os.PathLike,
    items: Iterator[_Item],
    key: Callable[[Any], str] = lambda document: document.id,
    refuse: Callable[[str | os.PathLike, set[str]], None] | None = None,
) -> Iterator[_Item]:
    """Passes items on, and raises where an id comes twice; 8 bytes an item.

    Args:
      path: the file they are read from, which is read again to be exact.
      items: all of its documents, or what else it holds.
      key: the id of one.
      refuse: `refuse_repeated`, or the same for another format.

    Yields:
      The items. One whose id came before may be among them, and up to some thousands
      after it.

    Raises:
      DataError: an id occurs twice, or what `items` raises, whichever is on the
        earlier line.
    """
    refuse = refuse or refuse_repeated
    ids = UniqueIds()
    batch: list[str] = []
    while True:
        try:
            item = next(items, None)
        except DataError:
            refuse(path, ids.add(batch))
            raise
        if item is None or len(batch) == BATCH:
            refuse(path, ids.add(batch))
            batch = []
        if item is None:
            return
        batch.append(key(item))
        yield item


def whole_corpus(
    path: str | os.PathLike, documents: Iterator[Document]
) -> Iterator[Document]:
    """Passes all documents of a corpus on; 8 bytes each.

    Raises:
      DataError: an id occurs twice, see `unique`; there is no document.
    """
    empty = True
    for document in unique(path, documents):
        empty = False
        yield document
    if empty:
        raise DataError(path, "holds no document", "Add at least one line")


def refuse_repeated(path: str | os.PathLike, suspects: set[str]) -> None:
    """Raises if one of these ids occurs twice in a JSON-lines file.

    Args:
      path: the file; it is read only if there are suspects.
      suspects: ids.

    Raises:
      DataError: one does; names the line of its second occurrence.
    """
    seen: set[str] = set()
    # Line numbers count blank lines, so they come from the reader itself.
    for line, record in read_records(path) if suspects else ():
        if record["_id"] in seen:
            raise duplicate(path, record["_id"], line)
        if record["_id"] in suspects:
            seen.add(record["_id"])


def read_judgements(path: Path) -> Iterator[Judgement]:
    """Yields the judgements of a qrels file; see `unique` for repeated ones.

    Raises:
      DataError: the header is missing, a line malformed or repeated.
    """
    yield from unique(path, _parsed(path), _key, refuse_repeated_judgement)


def refuse_repeated_judgement(path: str | os.PathLike, suspects: set[str]) -> None:
    """Raises if one of these pairs (see `_key`) occurs twice in a qrels file."""
    seen: set[str] = set()
    for row in _parsed(path) if suspects else ():
        if _key(row) in seen:
            raise DataError(
                path,
                f"query {id_shown(row.query_id)} and document "
                f"{id_shown(row.document_id)} were judged on an earlier line",
                "Keep one of the lines",
                row.line,
            )
        if _key(row) in suspects:
            seen.add(_key(row))


def _key(row: Judgement) -> str:
    return f"{row.query_id}\t{row.document_id}"


def _parsed(path: str | os.PathLike) -> Iterator[Judgement]:
    lines = read_lines(path)
    first = next(lines, (1, ""))[1]
    if first.split("\t") != _HEADER:
        raise DataError(
            path,
            "the first line is not the header",
            "It must be the header 'query-id<TAB>corpus-id<TAB>score'",
            1,
        )
    for line, content in lines:
        fields = content.split("\t")
        if len(fields) != 3 or not fields[0] or not fields[1]:
            raise DataError(
                path,
                f"{len(fields)} fields separated by tabs, where there must be three "
                "that are not empty",
                "Write query-id<TAB>corpus-id<TAB>score",
                line,
            )
        try:
            row = Judgement(line, fields[0], fields[1], int(fields[2]))
        except ValueError:
            row = None
        if row is None or abs(row.score) > MOST_RELEVANT:
            raise DataError(
                path,
                f"the score is {number_shown(fields[2])}",
                "Write an integer: 0 for irrelevant, 1 and above for relevant, at most "
                f"{MOST_RELEVANT:,}",
                line,
            )
        yield row


def check_known(
    path: Path,
    rows: Iterable[Judgement],
    queries: tuple[Container[str], Path],
    documents: tuple[Container[str], Path],
    allowed: float = 0.0,
) -> int:
    """Checks that judgements are of queries and documents that are there.

    Args:
      path: the qrels file.
      rows: its judgements.
      queries: ids that are there, and their file.
      documents: the same of the documents.
      allowed: share of the judgements that may be of documents which are not there.

    Returns:
      How many are.

    Raises:
      DataError: none of the queries is there, one is not, or too many documents are
        not; it names the first such line.
    """
    rows = sorted(rows, key=lambda row: row.line)
    if rows and not any(row.query_id in queries[0] for row in rows):
        raise DataError(
            path,
            f"none of its queries (the first is {id_shown(rows[0].query_id)}) is in "
            f"{queries[1].name}",
            "The two files are not of one data set; put the right ones together",
            rows[0].line,
        )
    unknown = sum(row.document_id not in documents[0] for row in rows)
    too_many = unknown > allowed * len(rows)
    for row in rows:
        for kind, key, (known, file) in (
            ("query", row.query_id, queries),
            ("document", row.document_id, documents),
        ):
            if key not in known and (kind == "query" or too_many):
                raise DataError(
                    path,
                    f"{kind} {id_shown(key)} is not in {file.name}",
                    "Add it there, or remove this judgement",
                    row.line,
                )
    return unknown

"""Query logs as others store them, made into a BEIR directory in flat memory.

Rows are joined, de-duplicated and split in a database on disk, next to the output.

**Every unit by itself.** What becomes of a row depends on the row, on other rows of the
same query or user, and on public tables, never on rows of somebody else: one query (or
user, where there are users) more or less in the log is one more or less in the output.
So splits are drawn by a hash of the query or user, or cut at given times, not at
quantiles of the log; ids are hashes, not numbers; and equal queries of two users are
two queries, even if they have one id: a user's hash is appended to it. An id that is a
whole number is one under the spellings that pandas and others give it, see
`texts.id_of`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import decimal
import hashlib
import pathlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tfdpsq.data import tables
from tfdpsq.data.beir_writer import BeirWriter
from tfdpsq.data.texts import Document, id_of, number_shown, text_of, text_problem
from tfdpsq.validation import MOST_RELEVANT, DataError, InputError, shown

TRAIN, DEV, TEST = SPLITS = ("train", "dev", "test")
USER_FIELD = "user_id"
# What to do about rows that were dropped, where the reason does not say it.
REMEDIES = {
    "it has no query": "A user without queries is not written, which is no loss; if "
    "there should be one, check columns.query.",
    "it has no user": "Fill them in, or set columns.user to '' to protect single "
    "queries.",
    "its time is not a number of seconds, a date or ISO 8601": "Write it as one of "
    "them; rows may come in any order.",
    "its query is in an earlier split already": "Rows may come in any order: a query "
    "stays where its earliest row is. Move dev_from or test_from to keep these.",
}
# What must be one text each.
_TEXTS = frozenset(("query", "document", "title"))
_COMMIT = 50_000
_CACHE_KIB = 64 << 10

Split = Callable[["Entry"], str]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, and which of its columns hold what.

    Attributes:
      path: see `tables.read_rows`.
      columns: what -> name of the column; without those that are not there.
      header: whether the first line of text files names the columns.
      part: see `tables.read_rows`.
    """

    path: str
    columns: Mapping[str, str]
    header: bool = True
    part: str = tables.PAIRS

    def rows(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yields file, row number, and what -> value.

        Raises:
          DataError: a query or a document is not one value, or binary and not UTF-8,
            with its row.
        """
        roles = list(self.columns)
        names = list(self.columns.values())
        for path, number, row in tables.read_rows(
            self.path, names, self.header, self.part
        ):
            found = dict(zip(roles, row))
            for role in _TEXTS & found.keys():
                if isinstance(found[role], (list, dict, tuple, np.ndarray)):
                    raise DataError(
                        path,
                        f"its {role} (column {shown(self.columns[role])}) holds "
                        "several values, not one text",
                        "Write a row for each, or name another column",
                        number,
                    )
                if isinstance(found[role], bytes):
                    found[role] = self._decoded(path, number, role, found[role])
            yield path, number, found

    def _decoded(self, path: str, number: int, role: str, value: bytes) -> str:
        """Returns binary data, as some programs write texts, as text.

        Strictly: with what is not UTF-8 replaced, two texts could become one.
        """
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise DataError(
                path,
                f"the value of column {shown(self.columns[role])} is not text in UTF-8",
                "Correct it, or leave out the column",
                number,
            ) from None


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of a log.

    Attributes:
      query: its text.
      user: whose it is, "" if the log has no users.
      time: seconds since 1970, `None` if the log has no times.
    """

    query: str
    user: str
    time: float | None


@dataclasses.dataclass
class Report:
    """Counts of a log's rows, written and dropped.

    Attributes:
      rows: how many were read.
      pairs: split -> pairs that were written.
      queries: how many were written.
      documents: how many were written.
      dropped: reason -> rows dropped for it.
      first: reason -> the first of them, as FILE:ROW.
    """

    rows: int = 0
    pairs: dict[str, int] = dataclasses.field(default_factory=dict)
    queries: int = 0
    documents: int = 0
    dropped: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    first: dict[str, str] = dataclasses.field(default_factory=dict)

    def drop(self, reason: str, path: str, number: int) -> None:
        """Counts a row that is dropped."""
        self.dropped[reason] += 1
        self.first.setdefault(reason, f"{path}:{number}")


def by_hash(shares: Mapping[str, float], seed: int, by_user: bool = False) -> Split:
    """Returns a split at random, the same for all rows of a query's text or of a user.

    Args:
      shares: split -> its share; the rest is for training.
      seed: of the hash.
      by_user: whether all rows of a user go to one split.
    """

    def split(entry: Entry) -> str:
        name = entry.user if by_user else entry.query
        at = int(_hash(str(seed), name), 16) / 16.0**_DIGITS
        for each, share in shares.items():
            if at < share:
                return each
            at -= share
        return TRAIN

    return split


def by_time(starts: Mapping[str, float]) -> Split:
    """Returns a split by time.

    Args:
      starts: split -> the second from which rows belong to it, in ascending order; what
        is earlier than all is for training.
    """

    def split(entry: Entry) -> str:
        found = TRAIN
        for each, start in starts.items():
            if entry.time is not None and entry.time >= start:
                found = each
        return found

    return split


def import_pairs(
    directory: pathlib.Path,
    logs: Mapping[str, Table],
    split: Split | None = None,
    queries: Table | None = None,
    corpus: Table | None = None,
) -> Report:
    """Writes a log as a BEIR directory.

    Args:
      directory: an existing, empty directory; the database is made in it and removed.
      logs: split -> its table; or one table, under `TRAIN`, which `split` divides.
      split: the split of each row; `None` where every split has a table.
      queries: with columns "query_id" and "query", and "user" if the log has none, for
        logs that name queries by id.
      corpus: with columns "document_id", "document" and "title"; all of it is kept.
        `None` takes the documents of the log.

    Returns:
      What was written and what was dropped, with reasons.

    Raises:
      InputError: a table or column is missing, or no row is left.
      DataError: a file is malformed.
    """
    report = Report()
    with _store(directory) as store:
        if corpus is not None:
            _read_corpus(store, corpus)
        if queries is not None:
            _read_queries(store, queries)
        for name, table in logs.items():
            for path, number, row in table.rows():
                report.rows += 1
                reason = _add(store, row, name, split, queries, corpus, path, number)
                if reason:
                    report.drop(reason, path, number)
                if report.rows % _COMMIT == 0:
                    store.commit()
        if split is not None:
            _keep_first_split(store, report)
        _write(store, directory, report)
    return report


# -- The database ------------------------------------------------------------------

_SCHEMA = """
create table documents (id text primary key, title text, text text) without rowid;
create table texts (id text primary key, text text, user text) without rowid;
create table queries (id text primary key, text text, user text) without rowid;
create table judged (split text, query text, document text, score integer,
                     primary key (split, query, document)) without rowid;
"""
_DIGITS = 24


@contextlib.contextmanager
def _store(directory: pathlib.Path) -> Iterator[sqlite3.Connection]:
    path = directory / ".import.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as store:
        for pragma in ("journal_mode=off", "synchronous=off", "temp_store=file"):
            store.execute(f"pragma {pragma}")
        store.execute(f"pragma cache_size=-{_CACHE_KIB}")
        store.executescript(_SCHEMA)
        yield store
    path.unlink()


def _hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()[:_DIGITS]


def _ids_of(row: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """Returns the ids of a row by their columns, and what is wrong with one, if so."""
    ids = dict.fromkeys(("query_id", "document_id", "user"), "")
    for what in ids:
        try:
            ids[what] = id_of(row.get(what), what == "user")
        except (ValueError, OverflowError):
            return ids, (
                f"its {what} is neither a text nor a whole number with all its digits "
                "(no 1.2e+18, nor 2^53 or more with a point); write it as text"
            )
        if text_problem(what, ids[what]):
            return ids, f"its {what} holds half a surrogate pair, which is not text"
    return ids, None


def _read_corpus(store: sqlite3.Connection, corpus: Table) -> None:
    for path, number, row in corpus.rows():
        ids, problem = _ids_of(row)
        document = Document(
            ids["document_id"], text_of(row.get("title")), text_of(row["document"])
        )
        problem = problem or text_problem("document_id", document.id, identifier=True)
        problem = problem or text_problem("document", document.content)
        if not problem and not document.content:
            problem = f"document {shown(document.id)} has no text"
        if not problem and not _inserted(
            store, "documents", document.id, document.title, document.text
        ):
            problem = f"document {shown(document.id)} is there twice"
        if problem:
            raise DataError(path, problem, "Correct or remove the row", number)


def _read_queries(store: sqlite3.Connection, queries: Table) -> None:
    for path, number, row in queries.rows():
        ids, problem = _ids_of(row)
        query_id, user = ids["query_id"], ids["user"]
        problem = problem or text_problem("query_id", query_id, identifier=True)
        problem = problem or text_problem("query", text_of(row["query"]))
        if not problem and not _inserted(
            store, "texts", query_id, text_of(row["query"]), user
        ):
            problem = f"query {shown(query_id)} is there twice"
        if problem:
            raise DataError(path, problem, "Correct or remove the row", number)


def _inserted(store: sqlite3.Connection, table: str, *values: Any) -> bool:
    marks = ",".join("?" * len(values))
    cursor = store.execute(f"insert or ignore into {table} values ({marks})", values)
    return cursor.rowcount == 1


def _add(
    store: sqlite3.Connection,
    row: Mapping[str, Any],
    name: str,
    split: Split | None,
    queries: Table | None,
    corpus: Table | None,
    path: str,
    number: int,
) -> str | None:
    """Adds a row of a log; returns why it was dropped, or `None`."""
    ids, problem = _ids_of(row)
    if problem:
        return problem
    text, query_id, user = text_of(row.get("query")), ids["query_id"], ids["user"]
    time = None
    if queries is not None:
        held = store.execute(
            "select text, user from texts where id = ?", (query_id,)
        ).fetchone()
        if held is None:
            return "its query_id is not in the table of queries"
        text, user = held[0], user or held[1]
    if not text.strip() or text_problem("query", text):
        return "it has no query"
    has_users = "user" in row or (queries is not None and "user" in queries.columns)
    if has_users and not user:
        return "it has no user"
    if "time" in row:
        time = tables.seconds_of(row["time"])
        if time is None:
            return "its time is not a number of seconds, a date or ISO 8601"
    document = _document_of(store, row, ids["document_id"], corpus, path, number)
    if isinstance(document, str):
        return document
    if query_id and has_users:
        # An id may name a text that many asked. One query of them all would be its
        # first user's, and without that user the next one's.
        query_id = f"{query_id}-{_hash(query_id, user)}"
    elif not query_id:
        # A person's query is one, however often it was asked; without users or ids
        # nobody knows whose a row is, so every distinct row is a query of its own.
        query_id = "q" + (_hash(text, user) if has_users else _hash(text, document.id))
    if text_problem("query_id", query_id, identifier=True):
        return "its query_id has white space or NUL in it"
    score = _score_of(row, path, number)
    chosen = split(Entry(text, user, time)) if split is not None else name
    if not _inserted(store, "queries", query_id, text, user):
        held = store.execute(
            "select text, user from queries where id = ?", (query_id,)
        ).fetchone()
        if held != (text, user):
            return "its query_id had another text or user before"
    if not _inserted(store, "judged", chosen, query_id, document.id, score):
        return "the same pair was there before"
    if corpus is None:
        _inserted(store, "documents", document.id, document.title, document.text)
    return None


def _document_of(
    store: sqlite3.Connection,
    row: Mapping[str, Any],
    document_id: str,
    corpus: Table | None,
    path: str,
    number: int,
) -> Document | str:
    """Returns a row's document, or why it has none."""
    if corpus is not None:
        known = store.execute(
            "select 1 from documents where id = ?", (document_id,)
        ).fetchone()
        if known is None:
            return "its document_id is not in the corpus"
        return Document(document_id, "", "")
    title, text = text_of(row.get("title")), text_of(row.get("document"))
    if not f"{title}{text}".strip() or text_problem("document", title + text):
        return "it has no document"
    document_id = document_id or "d" + _hash(title, text)
    if text_problem("document_id", document_id, identifier=True):
        return "its document_id has white space or NUL in it"
    held = store.execute(
        "select title, text from documents where id = ?", (document_id,)
    ).fetchone()
    if held is not None and held != (title, text):
        # Keeping the first would let one user's row decide about another's.
        raise DataError(
            path,
            f"document_id {shown(document_id)} has another text in an earlier row",
            "Give the documents as a table of their own (corpus.path), or leave out "
            'their ids (columns.document_id="")',
            number,
        )
    return Document(document_id, title, text)


def _score_of(row: Mapping[str, Any], path: str, number: int) -> int:
    value = row.get("score", 1)
    try:
        if float(value) == int(float(value)) and abs(float(value)) <= MOST_RELEVANT:
            return int(float(value))
    except (TypeError, ValueError, OverflowError):
        pass
    is_number = isinstance(value, (int, float, decimal.Decimal))
    found = shown(value) if is_number else number_shown(value)
    raise DataError(
        path,
        # Under a wrong name it is a query, which messages do not repeat.
        f"score is {found}; judgements are integers up to {MOST_RELEVANT:,}",
        'Correct it, or leave out the column (columns.score="")',
        number,
    )


def _keep_first_split(store: sqlite3.Connection, report: Report) -> None:
    """Drops later rows of a query with rows in several splits, which time can cut."""
    store.execute("create index by_query on judged (query)")
    ranks = " ".join(f"when '{name}' then {at}" for at, name in enumerate(SPLITS))
    dropped = store.execute(
        f"delete from judged where case split {ranks} end > (select min(case split "
        f"{ranks} end) from judged as other where other.query = judged.query)"
    ).rowcount
    if dropped:
        report.dropped["its query is in an earlier split already"] += dropped


def _write(store: sqlite3.Connection, directory: pathlib.Path, report: Report) -> None:
    """Writes the BEIR files, sorted by id."""
    pairs = dict(
        store.execute(
            "select split, count(*) from judged group by split order by split"
        )
    )
    if not pairs:
        reasons = "; ".join(
            f"{count:,} rows, {reason} (first {report.first.get(reason, 'unknown')})"
            for reason, count in report.dropped.most_common(3)
        )
        raise InputError(
            f"no row of {report.rows:,} is left{': ' if reasons else ''}{reasons}. "
            "Check the names in columns."
        )
    report.pairs = pairs
    with BeirWriter(directory) as writer:
        for row in store.execute("select id, title, text from documents order by id"):
            writer.add_document(Document(*row))
            report.documents += 1
        # A query whose every pair was dropped is not written.
        for query_id, text, user in store.execute(
            "select id, text, user from queries "
            "where id in (select query from judged) order by id"
        ):
            fields = {"metadata": {USER_FIELD: user}} if user else None
            writer.add_query(query_id, text, fields)
            report.queries += 1
        for row in store.execute(
            "select split, query, document, score from judged order by 1, 2, 3"
        ):
            writer.add_judgement(*row)

"""Query logs as others store them, made into a BEIR directory in flat memory.

Rows are joined, de-duplicated and split in a database on disk, next to the output.

**Every unit by itself.** What becomes of a row depends on the row, on other rows of the
same query or user, and on public tables, never on rows of somebody else: one query (or
user, where there are users) more or less in the log is one more or less in the output.
So splits are drawn by a hash of the query or user, or cut at given times, not at
quantiles of the log; ids are hashes, not numbers; and equal queries of two users are
two queries, even if they have one id: a user's hash is appended to it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import math
import pathlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tfdpsq.data import tables
from tfdpsq.data.beir import BeirWriter, integer_score
from tfdpsq.data.texts import Document, id_of, number_shown, text_of, text_problem
from tfdpsq.validation import MOST_RELEVANT, DataError, InputError, shown

TRAIN, DEV, TEST = SPLITS = ("train", "dev", "test")
USER_FIELD = "user_id"
_DIGITS = 24
_COMMIT = 50_000
_SCHEMA = """
create table documents (id text primary key, title text, text text) without rowid;
create table texts (id text primary key, text text, user text) without rowid;
create table queries (id text primary key, text text, user text) without rowid;
create table judged (split text, query text, document text, score integer,
                     primary key (split, query, document)) without rowid;
create index by_query on judged (query);
"""

Split = Callable[["Entry"], str]


class _Dropped(Exception):
    """A row is left out, for the reason that the message gives."""


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
          DataError: a query or a document is not one text.
        """
        names = list(self.columns.values())
        for path, number, row in tables.read_rows(
            self.path, names, self.header, self.part
        ):
            found = dict(zip(self.columns, row))
            for what in {"query", "document", "title"} & found.keys():
                try:
                    found[what] = text_of(found[what])
                except ValueError:
                    raise DataError(
                        path,
                        f"column {shown(self.columns[what])} holds no single text, as "
                        f"the {what} must be",
                        "Correct it, or name another column",
                        number,
                    ) from None
            yield path, number, found


class Entry(NamedTuple):
    """Fields that decide a row's split: no user is "", no time is `None`."""

    query: str
    user: str
    time: float | None


@dataclasses.dataclass
class Report:
    """Counts of a log: rows read, what was written, and reasons for rows dropped.

    `pairs` are by split; `first` has the first row dropped for a reason, as FILE:ROW.
    """

    rows: int = 0
    pairs: dict[str, int] = dataclasses.field(default_factory=dict)
    queries: int = 0
    documents: int = 0
    dropped: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    first: dict[str, str] = dataclasses.field(default_factory=dict)


def by_hash(shares: Mapping[str, float], seed: int, by_user: bool = False) -> Split:
    """Returns a split at random, the same for all rows of a query's text or of a user.

    `shares` maps splits to their shares; the rest is for training.
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

    `starts` maps splits to the second that each begins at, in ascending order; what is
    earlier is for training.
    """

    def split(entry: Entry) -> str:
        at = -math.inf if entry.time is None else entry.time
        return [TRAIN, *(each for each, start in starts.items() if at >= start)][-1]

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
    path = directory / ".import.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as store:
        for pragma in ("journal_mode=off", "synchronous=off", "temp_store=file"):
            store.execute(f"pragma {pragma}")
        store.executescript(_SCHEMA)
        log = _Log(store, split, queries, corpus)
        for name, table in logs.items():
            for file, number, row in table.rows():
                report.rows += 1
                try:
                    log.add(name, row, file, number)
                except _Dropped as reason:
                    report.dropped[str(reason)] += 1
                    report.first.setdefault(str(reason), f"{file}:{number}")
                if report.rows % _COMMIT == 0:
                    store.commit()
        if split is not None:
            _keep_first_split(store, report)
        _write(store, directory, report)
    path.unlink()
    return report


class _Log:
    """Rows of a log, joined with tables of queries and documents in a database."""

    def __init__(
        self,
        store: sqlite3.Connection,
        split: Split | None,
        queries: Table | None,
        corpus: Table | None,
    ):
        """Reads the tables that rows refer to."""
        self._store, self._split = store, split
        self._queries, self._corpus = queries, corpus
        for table, into in ((corpus, "documents"), (queries, "texts")):
            for path, number, row in table.rows() if table else ():
                try:
                    self._add_referred(into, row)
                except _Dropped as problem:
                    raise DataError(
                        path, str(problem), "Correct or remove the row", number
                    ) from None

    def add(self, name: str, row: Mapping[str, Any], path: str, number: int) -> None:
        """Adds a row of the log of a split.

        Raises:
          _Dropped: it is left out.
          DataError: its score is none, or its document contradicts an earlier one.
        """
        ids = _ids_of(row)
        text, query_id, user = row.get("query", ""), ids["query_id"], ids["user"]
        has_users = "user" in row
        if self._queries is not None:
            held = self._one("select text, user from texts where id = ?", query_id)
            if held is None:
                raise _Dropped("its query_id is not in the table of queries")
            text, user = held[0], user or held[1]
            has_users = has_users or "user" in self._queries.columns
        if not text.strip() or text_problem("query", text):
            raise _Dropped("it has no query")
        if has_users and not user:
            raise _Dropped("it has no user")
        time = None
        if "time" in row:
            time = tables.seconds_of(row["time"])
            if time is None:
                raise _Dropped(
                    "its time is not a number of seconds, a date or ISO 8601"
                )
        document = self._document_of(row, ids["document_id"], path, number)
        if query_id and has_users:
            # An id may name a text that many asked. One query of them all would be its
            # first user's, and without that user the next one's.
            query_id = f"{query_id}-{_hash(query_id, user)}"
        elif not query_id:
            # A person's query is one, however often it was asked; without users or ids
            # nobody knows whose a row is, so every distinct row is a query of its own.
            query_id = "q" + (
                _hash(text, user) if has_users else _hash(text, document.id)
            )
        score = integer_score(row.get("score", 1))
        if score is None:
            # Under a wrong name it is a query, which messages do not repeat.
            found = number_shown(str(row["score"]))
            raise DataError(
                path,
                f"score is {found}; judgements are integers up to {MOST_RELEVANT:,}",
                'Correct it, or leave out the column (columns.score="")',
                number,
            )
        chosen = self._split(Entry(text, user, time)) if self._split else name
        if not self._inserted("queries", query_id, text, user):
            held = self._one("select text, user from queries where id = ?", query_id)
            if held != (text, user):
                raise _Dropped("its query_id had another text or user before")
        if not self._inserted("judged", chosen, query_id, document.id, score):
            raise _Dropped("the same pair was there before")
        if self._corpus is None:
            self._inserted("documents", document.id, document.title, document.text)

    def _add_referred(self, into: str, row: Mapping[str, Any]) -> None:
        ids = _ids_of(row)
        if into == "texts":
            what, key, text = "query", ids["query_id"], row["query"]
            values = (text, ids["user"])
        else:
            what, key = "document", ids["document_id"]
            values = (row.get("title", ""), row["document"])
            text = "".join(values)
        problem = text_problem(f"{what}_id", key, identifier=True)
        problem = problem or text_problem(what, text)
        if not problem and what == "document" and not text.strip():
            problem = f"document {shown(key)} has no text"
        if not problem and not self._inserted(into, key, *values):
            problem = f"{what} {shown(key)} is there twice"
        if problem:
            raise _Dropped(problem)

    def _document_of(
        self, row: Mapping[str, Any], document_id: str, path: str, number: int
    ) -> Document:
        find = "select title, text from documents where id = ?"
        if self._corpus is not None:
            if self._one(find, document_id) is None:
                raise _Dropped("its document_id is not in the corpus")
            return Document(document_id, "", "")
        title, text = row.get("title", ""), row.get("document", "")
        if not f"{title}{text}".strip() or text_problem("document", title + text):
            raise _Dropped("it has no document")
        document_id = document_id or "d" + _hash(title, text)
        held = self._one(find, document_id)
        if held not in (None, (title, text)):
            # Keeping the first would let one user's row decide about another's.
            raise DataError(
                path,
                f"document_id {shown(document_id)} has another text in an earlier row",
                "Give the documents as a table of their own (corpus.path), or leave "
                'out their ids (columns.document_id="")',
                number,
            )
        return Document(document_id, title, text)

    def _inserted(self, table: str, *values: Any) -> bool:
        marks = ",".join("?" * len(values))
        return bool(
            self._store.execute(
                f"insert or ignore into {table} values ({marks})", values
            ).rowcount
        )

    def _one(self, question: str, *values: Any) -> Any:
        return self._store.execute(question, values).fetchone()


def _hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()[:_DIGITS]


def _ids_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the ids of a row by their columns, "" for those that are not there."""
    ids = dict.fromkeys(("query_id", "document_id", "user"), "")
    for what in ids:
        try:
            ids[what] = id_of(row.get(what), what == "user")
        except (ValueError, OverflowError):
            raise _Dropped(
                f"its {what} is neither a text nor a whole number with all its digits "
                "(no 1.2e+18, nor 2^53 or more with a point); write it as text"
            ) from None
        problem = text_problem(f"its {what}", ids[what] or "-", what != "user")
        if problem:
            raise _Dropped(problem)
    return ids


def _keep_first_split(store: sqlite3.Connection, report: Report) -> None:
    """Drops later rows of a query with rows in several splits, which time can cut."""
    ranks = " ".join(f"when '{name}' then {at}" for at, name in enumerate(SPLITS))
    dropped = store.execute(
        f"delete from judged where case split {ranks} end > (select min(case split "
        f"{ranks} end) from judged as other where other.query = judged.query)"
    ).rowcount
    if dropped:
        report.dropped["its query is in an earlier split already"] += dropped


def _write(store: sqlite3.Connection, directory: pathlib.Path, report: Report) -> None:
    """Writes the BEIR files, sorted by id."""
    report.pairs = dict(
        store.execute(
            "select split, count(*) from judged group by split order by split"
        )
    )
    if not report.pairs:
        reasons = "; ".join(
            f"{count:,} rows, {reason} (first {report.first.get(reason, 'unknown')})"
            for reason, count in report.dropped.most_common(3)
        )
        raise InputError(
            f"no row of {report.rows:,} is left{': ' if reasons else ''}{reasons}. "
            "Check the names in columns."
        )
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

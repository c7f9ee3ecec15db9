"""Query logs as others store them, made into a BEIR directory in flat memory.

Rows are joined, de-duplicated and split in a temporary database on disk.

**Every unit by itself.** What becomes of a row depends on the row, on other rows of the
same query or user, and on public tables, never on rows of somebody else: one query (or
user, where there are users) more or less in the log is one more or less in the output.
So splits are drawn by a hash of the query or user, not at quantiles of the log; ids are
hashes, not numbers; and equal queries of two users are two queries, even if they have
one id: a user's hash is appended to it.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfdpsq.data.beir import BeirWriter, integer_score, open_unnamed
from tfdpsq.data.tables import Table
from tfdpsq.data.texts import Document, day_of, id_of, text_problem
from tfdpsq.validation import MOST_RELEVANT, DataError, InputError, shown

TRAIN, DEV, TEST = "train", "dev", "test"
USER_FIELD = "user_id"
# What was left out, and where it stood; next to the pairs, and as private.
DROPPED_FILE = "dropped.tsv"
_DIGITS = 24
_SCHEMA = """
create table documents (id text primary key, title text, text text) without rowid;
create table texts (id text primary key, text text, user text) without rowid;
create table queries (id text primary key, text text, user text) without rowid;
create table judged (split text, query text, document text, score integer,
                     primary key (split, query, document)) without rowid;
"""
_EQUAL_ANSWERS = """
select count(*) from (select 1 from judged join documents on id = document
where score > 0 group by split, query, title, text having count(*) > 1)
"""
Split = Callable[[str, str, Any], str]  # of a row's query, user and time


class _Dropped(Exception):
    """A row is left out, for the reason that the message gives."""


@dataclasses.dataclass
class Report:
    """Counts of a log: rows read, what was written, and reasons for rows dropped."""

    rows: int = 0
    pairs: dict[str, int] = dataclasses.field(default_factory=dict)  # by split
    queries: int = 0
    documents: int = 0
    equal_answers: int = 0  # queries judged on several documents of one text
    dropped: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    first: dict[str, str] = dataclasses.field(default_factory=dict)  # as FILE:ROW


def by_hash(shares: Mapping[str, float], seed: int, by_user: bool = False) -> Split:
    """Returns a split at random, the same for all rows of a query's text or of a user.

    `shares` maps splits to their shares; the rest is for training.
    """

    def split(query: str, user: str, _: Any) -> str:
        at = int(_hash(str(seed), user if by_user else query), 16) / 16.0**_DIGITS
        for each, share in shares.items():
            if at < share:
                return each
            at -= share
        return TRAIN

    return split


def by_time(starts: Mapping[str, str]) -> Split:
    """Returns a split by `day_of` a row's time; `starts` are first days, or ""."""
    begin = {name: start for name, start in starts.items() if start}
    if not begin or [*begin.values()] != sorted(map(day_of, begin.values())):
        raise InputError(f"splits begin at {begin}; give days as 2026-01-31, in order.")

    def split(query: str, user: str, time: Any) -> str:
        if not (day := day_of(time)):
            raise _Dropped("it has no time that can be read")
        return [TRAIN, *(name for name, start in begin.items() if start <= day)][-1]

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
      directory: an existing, empty directory.
      logs: split -> its table; or one table, under `TRAIN`, which `split` divides.
      split: the split of each row; `None` where every split has a table.
      queries: with columns "query_id" and "query", and "user" if the log has none, for
        logs that name queries by id.
      corpus: with columns "document_id", "document" and "title"; all of it is kept.
        `None` takes the documents of the log.

    Raises InputError for a missing table or column, a malformed file, or no row left.
    """
    report, log = Report(), _Log(split, queries, corpus)
    parts = {"document": corpus, "query": queries, **logs}
    with open(directory / DROPPED_FILE, "w", encoding="utf-8") as dropped:
        for name, table in parts.items():
            add = log.add if name in logs else log.add_referred
            for path, number, row in table.rows() if table else ():
                report.rows += name in logs
                try:
                    add(name, row, path, number)
                except _Dropped as reason:
                    report.dropped[str(reason)] += 1
                    report.first.setdefault(str(reason), f"{path}:{number}")
                    dropped.write(f"{path}\t{number}\t{reason}\n")
    log.write(directory, report)
    return report


class _Log:
    """Rows of a log, joined with tables of queries and documents in a database."""

    def __init__(
        self, split: Split | None, queries: Table | None, corpus: Table | None
    ):
        """Opens the database; the tables that rows refer to are added first."""
        self.execute = open_unnamed(_SCHEMA).execute
        self._split, self._queries, self._corpus = split, queries, corpus

    def add(self, name: str, row: Mapping[str, Any], path: str, number: int) -> None:
        """Adds a row of the log of a split, or raises _Dropped."""
        query_id, document_id, user = _ids_of(row)
        text, has_users = row.get("query", ""), "user" in row
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
        document = self._document_of(row, document_id, path, number)
        if query_id and has_users:
            # An id may name a text that many asked. One query of them all would be its
            # first user's, and without that user the next one's.
            query_id = f"{query_id}-{_hash(query_id, user)}"
        elif not query_id:
            # A person's query is one, however often it was asked; without users or ids
            # nobody knows whose a row is, so every distinct row is a query of its own.
            query_id = "q" + _hash(text, user if has_users else document.id)
        score = integer_score(row.get("score", 1))
        if score is None:
            problem = f"score is not an integer up to {MOST_RELEVANT:,}"
            raise DataError(path, problem, "Correct columns.score", number)
        chosen = self._split(text, user, row.get("time")) if self._split else name
        if not self._inserted("queries", query_id, text, user):
            held = self._one("select text, user from queries where id = ?", query_id)
            if held != (text, user):
                raise _Dropped("its query_id had another text or user before")
        if not self._inserted("judged", chosen, query_id, document.id, score):
            raise _Dropped("the same pair was there before")
        if self._corpus is None:
            self._inserted("documents", document.id, document.title, document.text)

    def write(self, directory: pathlib.Path, report: Report) -> None:
        """Writes the BEIR files, sorted by id, and completes the report."""
        report.pairs = dict(
            self.execute("select split, count(*) from judged group by 1 order by 1")
        )
        if not report.pairs:
            reasons = "; ".join(
                f"{count:,} rows, {reason} (first {report.first.get(reason)})"
                for reason, count in report.dropped.most_common(3)
            )
            raise InputError(
                f"no row of {report.rows:,} is left: {reasons or 'there is none'}. "
                "Check the names in columns."
            )
        (report.equal_answers,) = self.execute(_EQUAL_ANSWERS).fetchone()
        with BeirWriter(directory) as writer:
            for row in self.execute("select * from documents order by id"):
                writer.add_document(Document(*row))
                report.documents += 1
            # A query whose every pair was dropped is not written.
            for query_id, text, user in self.execute(
                "select * from queries where id in (select query from judged) "
                "order by id"
            ):
                fields = {"metadata": {USER_FIELD: user}} if user else None
                writer.add_query(query_id, text, fields)
                report.queries += 1
            for row in self.execute("select * from judged order by 1, 2, 3"):
                writer.add_judgement(*row)

    def add_referred(
        self, what: str, row: Mapping[str, Any], path: str, number: int
    ) -> None:
        """Adds a row of the table of queries or of documents, or raises _Dropped."""
        query_id, document_id, user = _ids_of(row)
        if what == "query":
            table, key, text = "texts", query_id, row["query"]
            values = (text, user)
        else:
            table, key = "documents", document_id
            values = (row.get("title", ""), row["document"])
            text = "".join(values)
        problem = text_problem(f"its {what}_id", key, identifier=True)
        problem = problem or text_problem(f"its {what}", text)
        if problem or not text.strip():
            raise _Dropped(f"in the table of {what}: {problem or 'it has no text'}")
        if not self._inserted(table, key, *values):
            if self._one(f"select * from {table} where id = ?", key) != (key, *values):
                problem = f"its {what}_id had another text or user before"
                raise DataError(path, problem, "Keep one of the rows", number)
            raise _Dropped(f"in the table of {what}: the same row was there before")

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
        if self._one(find, document_id) not in (None, (title, text)):
            # Keeping the first would let one user's row decide about another's.
            problem = f"document_id {shown(document_id)} had another text before"
            remedy = "Give documents as a table, corpus.path, or leave out their ids"
            raise DataError(path, problem, remedy, number)
        return Document(document_id, title, text)

    def _inserted(self, table: str, *values: Any) -> bool:
        insert = f"insert or ignore into {table} values ({','.join('?' * len(values))})"
        return bool(self.execute(insert, values).rowcount)

    def _one(self, question: str, *values: Any) -> Any:
        return self.execute(question, values).fetchone()


def _hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()[:_DIGITS]


def _ids_of(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the ids of query, document and user; "" for those that are not there."""
    for what in ("query_id", "document_id", "user"):
        try:
            found = id_of(row.get(what), what == "user")
        except (ValueError, OverflowError):
            raise _Dropped(
                f"its {what} is neither a text nor a whole number with all its digits "
                "(no 1.2e+18, nor 2^53 or more with a point); write it as text"
            ) from None
        if problem := text_problem(f"its {what}", found or "-", what != "user"):
            raise _Dropped(problem)
        yield found

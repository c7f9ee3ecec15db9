"""The pairs of a split, joined on disk and read one by one or by number.

A log of millions of pairs does not fit into memory. Judgements, queries and documents
are joined by SQLite in a temporary database, which has no name on disk and disappears
with the process, also where that is killed: nobody else can open it. It grows to the
size of the split's texts, where SQLITE_TMPDIR or TMPDIR points to.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from tfdpsq.data.texts import Document, Pair

_CACHE_KIB = 16 << 10
_SCHEMA = """
create table judged (query text, document text, score integer, line integer,
                     primary key (query, document)) without rowid;
create table pairs (row integer primary key, query text, document text, line integer);
create index by_query on pairs (query);
create index by_document on pairs (document);
create table queries (id text primary key, text text) without rowid;
create table documents (id text primary key, text text) without rowid;
create table users (id text primary key, user text) without rowid;
"""
_ROWS = """
insert into pairs (query, document, line) select query, document, line from judged
order by query, document
"""
_BEST_ROWS = """
insert into pairs (query, document, line) select query, document, line from
(select *, row_number() over (partition by query order by score desc, document) as place
from judged) where place = 1 order by query
"""
_JOINED = """
select p.query, q.text, p.document, d.text from pairs as p
join queries as q on q.id = p.query join documents as d on d.id = p.document
"""
_UNKNOWN = """
select line, query, document, query in (select id from queries) from pairs
where query not in (select id from queries)
or document not in (select id from documents) order by line
"""
_DROP_UNKNOWN = """
create table kept as select * from pairs order by row;
delete from pairs;
insert into pairs (query, document, line) select query, document, line from kept
where document in (select id from documents) order by row;
drop table kept;
"""
_USER_NUMBERS = """
select rank from pairs join (select id, dense_rank() over (order by user) as rank
from users) on id = query order by row
"""
_DOCUMENT_NUMBERS = """
select rank from pairs join (select id, row_number() over (order by id) as rank
from documents) on id = document order by row
"""


class Judgement(NamedTuple):
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


def open_unnamed(schema: str) -> sqlite3.Connection:
    """Opens an empty database without a name on disk, with the tables of a schema."""
    store = sqlite3.connect("", check_same_thread=False)
    store.execute(f"pragma cache_size=-{_CACHE_KIB}")
    store.execute("pragma journal_mode=off")
    store.executescript(schema)
    return store


class PairTable(Sequence[Pair]):
    """Pairs in the order of query and document ids, on disk."""

    def __init__(self, judgements: Iterable[Judgement], best: bool):
        """Takes the judgements that become rows.

        Args:
          judgements: each (query, document) once.
          best: whether a query keeps one document only: that of the highest score, then
            of the smallest id.
        """
        self._store = open_unnamed(_SCHEMA)
        self._store.executemany(
            "insert or ignore into judged (line, query, document, score) "
            "values (?, ?, ?, ?)",
            judgements,
        )
        self._store.execute(_BEST_ROWS if best else _ROWS)
        self._store.execute("delete from judged")

    def add_queries(self, queries: Iterable[tuple[str, str]]) -> None:
        """Adds the texts (id, text) of the rows' queries; passes over others."""
        self._add("queries", "query", queries)

    def add_documents(self, documents: Iterable[Document]) -> None:
        """Adds the contents of the rows' documents; passes over others."""
        rows = ((document.id, document.content) for document in documents)
        self._add("documents", "document", rows)

    def unknown(self) -> Iterator[tuple[int, str, str, bool]]:
        """Streams (line, query id, document id, is the query known) of bad rows."""
        return self._store.execute(_UNKNOWN)

    def drop_unknown(self) -> None:
        """Drops the rows of documents that are not there, and numbers the others."""
        self._store.executescript(_DROP_UNKNOWN)

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return self._one("select coalesce(max(row), 0) from pairs")

    def __iter__(self) -> Iterator[Pair]:
        """Streams the pairs."""
        for row in self._store.execute(f"{_JOINED} order by p.row"):
            yield Pair(*row)

    @overload
    def __getitem__(self, index: int) -> Pair: ...

    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...

    def __getitem__(self, index: Any) -> Any:
        """Reads a pair by its number, or a slice of them."""
        if isinstance(index, slice):
            return [self[row] for row in range(len(self))[index]]
        row = range(len(self))[int(index)] + 1
        found = self._store.execute(f"{_JOINED} where p.row = ?", (row,)).fetchone()
        return Pair(*found)

    def query_texts(self) -> tuple[int, Iterator[tuple[str, str]]]:
        """Returns the number of known queries, and streams (id, text), sorted by id."""
        count = self._one("select count(*) from queries")
        return count, self._store.execute("select id, text from queries order by id")

    def query_ids(self) -> Iterator[str]:
        """Streams the query id of each row."""
        for (name,) in self._store.execute("select query from pairs order by row"):
            yield name

    def document_numbers(self) -> np.ndarray:
        """Returns [rows] int64, equal where the documents of two rows are."""
        return self._numbers(_DOCUMENT_NUMBERS)

    def user_numbers(self, users: Iterable[tuple[str, str]]) -> np.ndarray:
        """Returns [rows] int64, the place of each row's user among all, sorted.

        Args:
          users: (query id, user) of all rows' queries, streamed; passes over others.
        """
        self._store.execute("delete from users")
        self._add("users", "query", users)
        return self._numbers(_USER_NUMBERS)

    def has_query(self, query_id: str) -> bool:
        """Returns whether a row is of the query."""
        found = self._store.execute("select 1 from pairs where query = ?", (query_id,))
        return found.fetchone() is not None

    def _add(self, table: str, column: str, rows: Iterable[tuple[str, str]]) -> None:
        self._store.executemany(
            f"insert or ignore into {table} select ?1, ?2 where exists "
            f"(select 1 from pairs where {column} = ?1)",
            rows,
        )

    def _numbers(self, question: str) -> np.ndarray:
        rows = self._store.execute(question)
        return np.fromiter((value for (value,) in rows), np.int64, len(self))

    def _one(self, question: str) -> Any:
        return self._store.execute(question).fetchone()[0]

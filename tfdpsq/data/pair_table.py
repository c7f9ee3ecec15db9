"""The pairs of a split, joined on disk and read one by one or by number.

A log of millions of pairs does not fit into memory. Here judgements, queries and
documents are joined by SQLite in a temporary database, which has no name on disk and
disappears with the process, also where that is killed: nobody else can open it. What
fits into a few MiB of cache is never written. It grows to the size of the split's
texts, where SQLITE_TMPDIR or TMPDIR points to, by default /var/tmp.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from tfdpsq.data.beir_lines import Judgement
from tfdpsq.data.texts import Document, Pair

_CACHE_KIB = 16 << 10
# Of scores: SQLite's integers have 64 bits.
_LARGEST = 2**62

_SCHEMA = """
create table judged (query text, document text, score integer, line integer,
                     primary key (query, document)) without rowid;
create table pairs (row integer primary key, query text, document text, line integer);
create table queries (id text primary key, text text) without rowid;
create table documents (id text primary key, text text) without rowid;
create table users (id text primary key, user text) without rowid;
"""
_JOINED = """
select p.query, q.text, p.document, d.text from pairs as p
join queries as q on q.id = p.query join documents as d on d.id = p.document
"""


def open_unnamed(schema: str) -> sqlite3.Connection:
    """Opens an empty database without a name on disk, with the tables of a schema."""
    store = sqlite3.connect("", check_same_thread=False)
    store.execute(f"pragma cache_size=-{_CACHE_KIB}")
    store.execute("pragma journal_mode=off")
    store.executescript(schema)
    return store


class PairTable(Sequence[Pair]):
    """Pairs in the order of query and document ids, on disk.

    Equal to any sequence of the same pairs. It is filled by, in this order,
    `add_judgements`, `choose`, `add_queries` and `add_documents`.
    """

    def __init__(self) -> None:
        """Starts without pairs."""
        self._store = open_unnamed(_SCHEMA)
        self._count = 0

    def add_judgements(self, rows: Iterable[Judgement]) -> int:
        """Adds judgements, each (query, document) once; returns their number."""
        values = (
            (r.query_id, r.document_id, max(min(r.score, _LARGEST), -_LARGEST), r.line)
            for r in rows
        )
        return self._store.executemany(
            "insert or ignore into judged values (?, ?, ?, ?)", values
        ).rowcount

    def choose(self, best: bool) -> None:
        """Makes rows of the judgements.

        Args:
          best: whether a query keeps one document only: that of the highest score, then
            of the smallest id.
        """
        rows: Iterable[Any] = self._store.execute(
            "select query, document, score, line from judged order by query, document"
        )
        if best:
            groups = itertools.groupby(rows, key=lambda row: row[0])
            # The first of equal scores has the smallest id.
            rows = (max(group, key=lambda row: row[2]) for _, group in groups)
        self._store.executemany(
            "insert into pairs (query, document, line) values (?, ?, ?)",
            ((query, document, line) for query, document, _, line in rows),
        )
        self._store.execute("create index by_query on pairs (query)")
        self._store.execute("create index by_document on pairs (document)")
        self._store.execute("delete from judged")

    def add_queries(self, queries: Iterable[tuple[str, str]]) -> None:
        """Adds the texts (id, text) of the rows' queries; passes over others.

        An id that comes again keeps its first text: who streams them refuses it, but
        some thousands of lines later.
        """
        self._store.executemany(
            "insert or ignore into queries select ?1, ?2 where exists "
            "(select 1 from pairs where query = ?1)",
            queries,
        )

    def add_documents(
        self, documents: Iterable[Document], repeated: Callable[[str], None]
    ) -> None:
        """Adds the contents of the rows' documents; passes over others.

        Args:
          documents: the corpus, streamed.
          repeated: called with the id of a document that comes again.
        """
        wanted = "select 1 from pairs where document = ?"
        for document in documents:
            if self._store.execute(wanted, (document.id,)).fetchone() is None:
                continue
            added = self._store.execute(
                "insert or ignore into documents values (?, ?)",
                (document.id, document.content),
            )
            if not added.rowcount:
                repeated(document.id)

    def unknown(self) -> tuple[list[Judgement], set[str], set[str]] | None:
        """Returns all rows, the known queries and documents; `None` if all are known.

        For errors: only then are ids in memory.
        """
        found = self._store.execute(
            "select 1 from pairs where query not in (select id from queries) "
            "or document not in (select id from documents) limit 1"
        ).fetchone()
        if found is None:
            self._count = self._one("select count(*) from pairs")
            return None
        rows = [
            Judgement(line, query, document, 1)
            for query, document, line in self._store.execute(
                "select query, document, line from pairs"
            )
        ]
        queries, documents = (
            {name for (name,) in self._store.execute(f"select id from {table}")}
            for table in ("queries", "documents")
        )
        return rows, queries, documents

    def drop_unknown(self) -> None:
        """Drops the rows of documents that are not there, and numbers the others."""
        self._store.execute(
            "create table kept as select query, document, line from pairs "
            "where document in (select id from documents) order by row"
        )
        self._store.execute("delete from pairs")
        self._store.execute(
            "insert into pairs (query, document, line) "
            "select query, document, line from kept order by rowid"
        )
        self._store.execute("drop table kept")
        self._count = self._one("select count(*) from pairs")

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return self._count

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

    def __eq__(self, other: object) -> bool:
        """Returns whether the other one is a sequence of the same pairs."""
        if not isinstance(other, Sequence) or len(other) != len(self):
            return False
        return all(ours == theirs for ours, theirs in zip(self, other))

    __hash__ = None  # type: ignore[assignment]

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
        return self._numbers(
            "select rank from pairs join (select id, row_number() over (order by id) "
            "as rank from documents) on id = document order by row"
        )

    def user_numbers(self, users: Iterable[tuple[str, str]]) -> np.ndarray:
        """Returns [rows] int64, the place of each row's user among all, sorted.

        Args:
          users: (query id, user) of all rows' queries, streamed; passes over others.
        """
        self._store.execute("delete from users")
        self._store.executemany(
            "insert or ignore into users select ?1, ?2 where exists "
            "(select 1 from pairs where query = ?1)",
            users,
        )
        return self._numbers(
            "select rank from pairs join (select id, dense_rank() over (order by user) "
            "as rank from users) on id = query order by row"
        )

    def has_query(self, query_id: str) -> bool:
        """Returns whether a row is of the query."""
        found = self._store.execute("select 1 from pairs where query = ?", (query_id,))
        return found.fetchone() is not None

    def _numbers(self, question: str) -> np.ndarray:
        rows = self._store.execute(question)
        return np.fromiter((value for (value,) in rows), np.int64, len(self))

    def _one(self, question: str) -> Any:
        return self._store.execute(question).fetchone()[0]

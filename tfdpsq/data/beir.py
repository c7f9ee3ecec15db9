"""Query-document pairs as a BEIR directory: the project's exchange format.

A directory holds ``corpus.jsonl`` (``_id``, ``title``, ``text``), ``queries.jsonl``
(``_id``, ``text``; all splits in one file), either of them also as ``.jsonl.gz``,
and ``qrels/<split>.tsv`` with the header ``query-id<TAB>corpus-id<TAB>score``.
Reading and writing are line by line; memory holds ids or their hashes. Errors name the
line and never repeat a text, which may be a private query.

Source: Thakur et al., *BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation
of Information Retrieval Models* (2021).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import sqlite3
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from absl import logging

from tfdpsq.data.io import atomic_directory, read_lines, read_objects
from tfdpsq.data.texts import Document, Pair, id_of, text_problem
from tfdpsq.validation import MOST_RELEVANT, DataError, InputError, id_text, shown

_LAYOUT = "Give a BEIR directory: corpus.jsonl, queries.jsonl and qrels/<split>.tsv"
HEADER = "query-id\tcorpus-id\tscore"
_SAME_ANSWER = "a query's further answer with the same text"
_SCHEMA = """
create table judged (line integer, query text, document text, score integer,
                     primary key (query, document)) without rowid;
create index by_document on judged (document);
create table queries (id text primary key, text text) without rowid;
create table documents (id text primary key, text text) without rowid;
create table pairs (row integer primary key, query text, document text);
"""
# The signs keep SQLite from trying every query with every document, by judged's key.
_KNOWN = (
    "+query in (select id from queries) and +document in (select id from documents)"
)
_ROWS = f"""
insert into pairs (query, document) select query, document from
(select *, row_number() over (partition by query order by score desc, document) as place
from judged where {_KNOWN}) where place <= ? order by query, document
"""
_ALL = 2**62
_JOINED = """
select p.query, q.text, p.document, d.text from pairs as p
join queries as q on q.id = p.query join documents as d on d.id = p.document
"""


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of a checked BEIR directory: queries of all splits, pairs of each.

    `flaws` are kinds of lines that are left out, and of those that are doubtful.
    """

    documents: int
    queries: int
    pairs: Mapping[str, int]
    flaws: Mapping[str, int] = dataclasses.field(default_factory=dict)


class Judgement(NamedTuple):
    """A line of a qrels file, with its number from 1; scores above 0 are relevant."""

    line: int
    query_id: str
    document_id: str
    score: int


def open_unnamed(schema: str) -> sqlite3.Connection:
    """Opens an empty database on disk, where SQLITE_TMPDIR or TMPDIR points to.

    It has no name: nobody else can open it, and it disappears with the process.
    """
    store = sqlite3.connect("", check_same_thread=False)
    store.execute(f"pragma cache_size=-{16 << 10}")  # KiB
    store.execute("pragma journal_mode=off")
    store.executescript(schema)
    return store


class PairTable(Sequence[Pair]):
    """Pairs in the order of query and document ids, joined on disk by SQLite.

    Attributes:
      left_out: judgements of queries or documents that are not there.
    """

    def __init__(
        self,
        judgements: Iterable[Judgement],
        queries: Iterable[tuple[str, str]],
        documents: Iterable[tuple[str, str]],
        best: bool,
    ):
        """Joins judgements, each once, with (id, text) of queries and of documents.

        With `best` a query keeps one document only: that of the highest score, then of
        the smallest id.
        """
        self._store = open_unnamed(_SCHEMA)
        self._store.executemany("insert into judged values (?, ?, ?, ?)", judgements)
        for table, column, rows in (
            ("queries", "query", queries),
            ("documents", "document", documents),
        ):
            self._store.executemany(
                f"insert into {table} select ?1, ?2 where exists "
                f"(select 1 from judged where {column} = ?1)",
                rows,
            )
        self._store.execute(_ROWS, (1 if best else _ALL,))
        (self._size,) = self._store.execute("select count(*) from pairs").fetchone()
        count = f"select count(*) from judged where not ({_KNOWN})"
        (self.left_out,) = self._store.execute(count).fetchone()

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return self._size

    def __iter__(self) -> Iterator[Pair]:
        """Streams the pairs."""
        return (Pair(*row) for row in self._store.execute(f"{_JOINED} order by p.row"))

    def __getitem__(self, index: Any) -> Any:
        """Reads a pair by its number, or a slice of them."""
        if isinstance(index, slice):
            return [self[row] for row in range(len(self))[index]]
        row = range(len(self))[int(index)] + 1
        found = self._store.execute(f"{_JOINED} where p.row = ?", (row,)).fetchone()
        return Pair(*found)

    def ids(self) -> Iterator[tuple[str, str]]:
        """Streams (query id, document id) of each row."""
        return self._store.execute("select query, document from pairs order by row")


class BeirDirectory:
    """A BEIR directory, read lazily.

    Each method raises DataError for the first bad line it meets: a malformed one, or a
    repeated id. Published sets and logs also have documents and queries without text
    and repeated judgements, which are passed over, and judgements of what is not there
    (ArguAna, FiQA, TREC-COVID), which make no pair: `validate` counts them, or refuses
    them. Methods that return a dictionary hold it in memory; `pairs` is for logs of any
    size. `path` is the directory; `corpus_file` and `queries_file` may be compressed.
    """

    def __init__(self, path: str | os.PathLike):
        """Finds the files; raises DataError if corpus, queries or qrels are missing."""
        self.path = Path(path)
        if not self.path.is_dir():
            raise DataError(self.path, "no such directory", _LAYOUT)
        self.corpus_file = self._find("corpus.jsonl")
        self.queries_file = self._find("queries.jsonl")
        if not self.splits():
            raise DataError(self.path / "qrels", "missing, or without a .tsv", _LAYOUT)

    def documents(self) -> Iterator[Document]:
        """Streams the corpus, in the order of the file."""
        return (document for *_, document in locate_documents(self.corpus_file))

    def queries(self) -> dict[str, str]:
        """Returns id -> text of all queries, whatever their split."""
        return dict(self.read_queries())

    def read_queries(self) -> Iterator[tuple[str, str]]:
        """Streams (id, text) of all queries, in the order of the file."""
        return ((query_id, text) for query_id, text, _ in self.read_query_lines())

    def read_query_lines(self) -> Iterator[tuple[str, str, dict]]:
        """Streams (id, text, other fields) of all queries."""
        for _, _, record in _records(self.queries_file):
            query_id, text = record.pop("_id"), record.pop("text")
            others = {k: v for k, v in record.items() if v not in (None, "", {}, [])}
            if text.strip():
                yield query_id, text, others

    def users(
        self, among: Container[str] | None = None, field: str = "user_id"
    ) -> dict[str, str]:
        """Returns query id -> whose query it is, for user-level privacy.

        `among` are ids of queries, all by default; `field` is the name of the user id,
        in a line's ``metadata`` or next to it. Raises DataError if one of the queries
        has no user, or two.
        """
        return {
            record["_id"]: _user_of(self.queries_file, line, record, field)
            for line, _, record in _records(self.queries_file)
            if among is None or record["_id"] in among
        }

    def owners(self, pairs: PairTable, field: str = "user_id") -> np.ndarray:
        """Returns [pairs] int64, the place of each pair's user among all, sorted.

        `pairs` is from `pairs` or `all_pairs`; for the rest see `users`.
        """
        users = self.users({query_id for query_id, _ in pairs.ids()}, field)
        places = {user: n for n, user in enumerate(sorted(set(users.values())))}
        rows = (places[users[query_id]] for query_id, _ in pairs.ids())
        return np.fromiter(rows, np.int64, len(pairs))

    def splits(self) -> tuple[str, ...]:
        """Returns the names of the splits, sorted."""
        return tuple(sorted(f.stem for f in (self.path / "qrels").glob("*.tsv")))

    def judgements(self, split: str) -> Iterator[Judgement]:
        """Streams the lines of a split's qrels, whatever their score.

        A line that is there twice comes once; contradicting ones are an error.
        """
        return (row for row, repeated in self._judgements(split) if not repeated)

    def _judgements(self, split: str) -> Iterator[tuple[Judgement, bool]]:
        """Streams them all, and whether each one was there before."""
        path = self._qrels_file(split)
        if not path.is_file():
            raise DataError(path, "missing", f"Choose among {', '.join(self.splits())}")
        lines = read_lines(path)
        if next(lines, (1, 0, ""))[2] != HEADER:
            raise DataError(path, "not the header of qrels", f"Write {HEADER!r}", 1)
        seen: dict[int, int] = {}
        for line, _, content in lines:
            fields = content.split("\t")
            score = integer_score(fields[-1])
            if len(fields) != 3 or not all(fields) or score is None:
                problem = "not two ids and an integer score, separated by tabs"
                raise DataError(path, problem, "1 is relevant, 0 is not", line)
            key = hash((fields[0], fields[1]))
            if seen.get(key, score) != score:
                problem = "the same pair has another score on an earlier line"
                raise DataError(path, problem, "Keep one of the lines", line)
            yield Judgement(line, fields[0], fields[1], score), key in seen
            seen[key] = score

    def qrels(self, split: str) -> dict[str, dict[str, int]]:
        """Returns query id -> document id -> score, scores of 0 and below included."""
        judged: dict[str, dict[str, int]] = {}
        for row in self.judgements(split):
            judged.setdefault(row.query_id, {})[row.document_id] = row.score
        return judged

    def positives(self, split: str) -> Iterator[Judgement]:
        """Streams the judgements above 0; raises DataError if there is none."""
        empty = True
        for row in self.judgements(split):
            if row.score > 0:
                empty = False
                yield row
        if empty:
            problem, remedy = "no pair is judged above 0", "Add a relevant document"
            raise DataError(self._qrels_file(split), problem, remedy)

    def pairs(self, split: str) -> PairTable:
        """Returns one pair per query of the split, sorted by query id, for training.

        The unit of privacy is one query. Were a query in k pairs, clipping each
        pair's gradient would let it move the sum by k clip norms and the stated
        guarantee would be k times too good. So each query keeps exactly one
        document: that of the highest score, then of the smallest id. Raises DataError
        if the split has no pair.
        """
        return self._joined(split, best=True)

    def all_pairs(self, split: str) -> PairTable:
        """Returns every pair judged above 0, sorted by query and document id.

        A query may occur several times: for evaluation, for training without privacy,
        and for training under DP whose unit is one pair or one user. A judgement more
        or less is one row more or less, and changes no other.
        """
        return self._joined(split, best=False)

    def validate(
        self, splits: Sequence[str] = ("train", "test"), strict: bool = False
    ) -> Counts:
        """Checks all documents and queries, and the qrels of these splits.

        `strict` refuses the lines that are otherwise left out and counted.
        """
        flaws, pairs = collections.Counter[str](), dict.fromkeys(splits, 0)
        queries, contents = set[str](), dict[str, int]()

        def flaw(kind: str, path: Path, line: int) -> None:
            if strict:
                raise DataError(path, kind, "Remove it, or leave strict out", line)
            flaws[kind] += 1

        for line, _, record in _records(self.queries_file):
            queries.add(record["_id"])
            if not record["text"].strip():
                flaw("a query without text", self.queries_file, line)
                queries.remove(record["_id"])
        for line, _, document in _all_documents(self.corpus_file):
            contents[document.id] = hash(document.content)
            if not document.content:
                flaw("a document without text", self.corpus_file, line)
                del contents[document.id]
        for split in splits:
            path, answers = self._qrels_file(split), set[int]()
            for row, repeated in self._judgements(split):
                if repeated:
                    flaw("a judgement that is there twice", path, row.line)
                elif row.query_id not in queries:
                    flaw("a judgement of a query that is not there", path, row.line)
                elif row.document_id not in contents:
                    flaw("a judgement of a document that is not there", path, row.line)
                elif row.score > 0:
                    answer = hash((row.query_id, contents[row.document_id]))
                    flaws[_SAME_ANSWER] += answer in answers
                    answers.add(answer)
                    pairs[split] += 1
            if not pairs[split]:
                problem = "no judgement above 0 is of a query and document that exist"
                raise DataError(path, problem, "Give all three files of one data set")
        return Counts(len(contents), len(queries), pairs, dict(+flaws))

    def fingerprint(self) -> str:
        """Returns a hash of documents, queries (with their fields) and judgements.

        It is a sum of SHA-256 modulo 2^256, in hex: their order does not count.
        """
        total = 0

        def add(*item: str | int) -> None:
            nonlocal total
            data = json.dumps(item, ensure_ascii=False).encode("utf-8")
            total += int.from_bytes(hashlib.sha256(data).digest(), "big")

        for document in self.documents():
            add("document", document.id, document.title, document.text)
        for query_id, text, fields in self.read_query_lines():
            add("query", query_id, text)
            if fields:
                add("fields", query_id, json.dumps(fields, sort_keys=True))
        for split in self.splits():
            for row in self.judgements(split):
                add("qrel", split, row.query_id, row.document_id, row.score)
        return f"{total % (1 << 256):064x}"

    def _find(self, name: str) -> Path:
        for path in (self.path / name, self.path / f"{name}.gz"):
            if path.is_file():
                return path
        raise DataError(self.path / name, "missing (as is its .gz)", _LAYOUT)

    def _qrels_file(self, split: str) -> Path:
        return self.path / "qrels" / f"{split}.tsv"

    def _joined(self, split: str, best: bool) -> PairTable:
        contents = ((document.id, document.content) for document in self.documents())
        table = PairTable(self.positives(split), self.read_queries(), contents, best)
        if table.left_out:
            said = "%s: left out %d judgements of what is not there"
            logging.warning(said, self._qrels_file(split), table.left_out)
        return table


class BeirWriter(contextlib.ExitStack):
    """Fills a directory with corpus, queries and qrels; a context manager.

    A judgement must follow its document and its query, of whose ids 64-bit hashes stay
    in memory.
    """

    def __init__(self, directory: Path):
        """Opens corpus and queries in an existing directory."""
        super().__init__()
        self._directory = directory
        (directory / "qrels").mkdir()
        self._files = {
            "document": self._open("corpus.jsonl"),
            "query": self._open("queries.jsonl"),
        }
        self._held: dict[str, set[int]] = {"document": set(), "query": set()}

    def has(self, kind: str, key: str) -> bool:
        """Returns whether a "query" or "document" of this id was added."""
        return hash(key) in self._held[kind]

    def add_document(self, document: Document) -> None:
        """Adds a document; raises InputError if it is unsound, see `add_query`."""
        content = {"title": document.title, "text": document.text}
        self._add("document", document.id, content, document.content)

    def add_query(
        self, query_id: str, text: str, fields: Mapping[str, Any] | None = None
    ) -> None:
        """Adds a query; `fields` is what else its line holds, such as its user.

        Raises InputError if its id is unsound or repeated, or its text empty.
        """
        self._add("query", query_id, {**(fields or {}), "text": text}, text)

    def add_judgement(
        self, split: str, query_id: str, document_id: str, score: int
    ) -> None:
        """Adds a judgement; raises InputError if query or document were not added."""
        query_id, document_id = id_text(query_id), id_text(document_id)
        for kind, key in (("query", query_id), ("document", document_id)):
            if not self.has(kind, key):
                raise InputError(f"no {kind} {shown(key)} is there; add it first.")
        name = f"qrels/{split}.tsv"
        if name not in self._files:
            self._files[name] = self._open(name)
            self._files[name].write(f"{HEADER}\n")
        self._files[name].write(f"{query_id}\t{document_id}\t{score}\n")

    def _add(self, kind: str, key: str, content: dict[str, Any], text: str) -> None:
        key = id_text(key)
        line = json.dumps({"_id": key, **content}, ensure_ascii=False)
        problem = text_problem("its id", key, identifier=True)
        problem = problem or text_problem("it", line)
        if not problem and not text.strip():
            problem = "is empty"
        if not problem and hash(key) in self._held[kind]:
            problem = "was given twice"
        if problem:
            raise InputError(f"{kind} {shown(key)} {problem}. Correct it first.")
        self._held[kind].add(hash(key))
        self._files[kind].write(f"{line}\n")

    def _open(self, name: str) -> IO[str]:
        path = self._directory / name
        return self.enter_context(path.open("w", encoding="utf-8", newline="\n"))


def write_beir(
    path: str | os.PathLike,
    documents: Iterable[Document],
    queries: Iterable[tuple[str, str]],
    qrels: Mapping[str, Iterable[tuple[str, str, int]]],
) -> BeirDirectory:
    """Writes a BEIR directory, new or empty, all of it or nothing.

    Documents, (id, text) of the queries of all splits, and (query id, document id,
    score) of each split are streamed. Raises InputError if a text is empty, an id
    repeated, or unknown in a judgement.
    """
    with atomic_directory(path) as partial, BeirWriter(partial) as writer:
        for document in documents:
            writer.add_document(document)
        for query_id, text in queries:
            writer.add_query(query_id, text)
        for split, rows in qrels.items():
            for row in rows:
                writer.add_judgement(split, *row)
    return BeirDirectory(path)


def locate_documents(
    path: str | os.PathLike, offset: int = 0, line: int = 0
) -> Iterator[tuple[int, int, Document]]:
    """Streams (line, byte offset, document) of a ``corpus.jsonl``: `io.text_lines`.

    Documents have a title or a text. Raises DataError if none does, for a malformed
    line, or an id that is repeated.
    """
    empty = True
    for found in _all_documents(path, offset, line):
        if found[2].content:
            empty = False
            yield found
    if empty:
        raise DataError(path, "holds no document with a text", "Add at least one")


def names_user(record: dict, field: str) -> bool:
    """Returns whether a query's line has a value where `users` looks, sound or not."""
    return any(value not in (None, "") for value in _user_values(record, field))


def integer_score(value: Any) -> int | None:
    """Returns a relevance such as 1, "1" or "1.0" as an integer, or `None`."""
    try:
        found = float(value)
        whole = found == int(found) and abs(found) <= MOST_RELEVANT
    except (TypeError, ValueError, OverflowError):
        return None
    return int(found) if whole else None


def _all_documents(*place: Any) -> Iterator[tuple[int, int, Document]]:
    for line, offset, record in _records(*place):
        yield line, offset, Document(record["_id"], record["title"], record["text"])


def _records(
    path: str | os.PathLike, offset: int = 0, line: int = 0
) -> Iterator[tuple[int, int, dict]]:
    """Yields the objects of a JSON Lines file, each with an ``_id`` of its own.

    A title or text that is absent or null is empty.
    """
    seen: set[str] = set()
    for number, place, record in read_objects(path, offset, line):
        key = record["_id"] = id_text(record.get("_id"))
        problem = text_problem("'_id'", key, identifier=True)
        for field in ("title", "text"):
            record[field] = "" if record.get(field) is None else record[field]
            problem = problem or text_problem(field, record[field])
        if not problem and key in seen:
            problem = f"id {shown(key)} occurs on an earlier line"
        if problem:
            remedy = "Write an '_id' of its own and texts of valid Unicode"
            raise DataError(path, problem, remedy, number)
        seen.add(str(key))
        yield number, place, record
    if not seen:
        raise DataError(path, "holds no line", "Add at least one")


def _user_values(record: dict, field: str) -> tuple[object, object]:
    metadata = record.get("metadata")
    inside = metadata.get(field) if isinstance(metadata, dict) else None
    return inside, record.get(field)


def _user_of(path: Path, line: int, record: dict, field: str) -> str:
    """Returns a query's user: text or a number in its metadata, or next to it."""
    try:
        found = {id_of(v, of_user=True) for v in _user_values(record, field)} - {""}
    except (ValueError, OverflowError):
        found = set()
    if len(found) == 1:
        return found.pop()
    raise DataError(
        path,
        f"query {shown(record['_id'])} has no user under {field!r}, or several",
        f'Write "metadata": {{"{field}": ...}}, a text or an integer with all its '
        "digits, into every query's line, or protect single queries",
        line,
    )

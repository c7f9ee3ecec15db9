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

import contextlib
import dataclasses
import gzip
import hashlib
import io as streams
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from tfdpsq.data.io import atomic_directory
from tfdpsq.data.lines import read_lines, read_objects
from tfdpsq.data.pairs import Judgement, PairTable
from tfdpsq.data.texts import Document, id_of, id_shown, number_shown, text_problem
from tfdpsq.validation import MOST_RELEVANT, DataError, InputError, shown

_LAYOUT = "a BEIR directory: corpus.jsonl, queries.jsonl and qrels/<split>.tsv"
HEADER = "query-id\tcorpus-id\tscore"
# Share of judgements of a published set that may be of documents it lacks.
_MISSING = 0.01


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of a checked BEIR directory.

    Attributes:
      documents: lines of the corpus.
      queries: lines of the query file, whatever their split.
      pairs: split -> judged pairs with a score above 0.
      empty_documents: documents without title and text; see `as_published`.
      unknown_judgements: judgements of documents that are not there, in all splits.
    """

    documents: int
    queries: int
    pairs: Mapping[str, int]
    empty_documents: int = 0
    unknown_judgements: int = 0


class BeirDirectory:
    """A BEIR directory, read lazily; every query and judgement is kept.

    Each method reports the first bad line it meets; `validate` meets them all. Those
    that return a dictionary hold it in memory; `pairs` is for logs of any size.

    Attributes:
      path: the directory, as a `Path`.
      as_published: whether two flaws of sets that others publish are taken as they
        are: documents without any text (FiQA, TREC-COVID), and up to one judgement
        in a hundred of a document that is not there (ArguAna).
      corpus_file: the documents, perhaps compressed.
      queries_file: the queries of all splits, perhaps compressed.
    """

    def __init__(self, path: str | os.PathLike, as_published: bool = False):
        """Finds the files of the directory.

        Raises:
          DataError: the corpus, the queries, or all qrels are missing, or one of
            them is there both plain and compressed.
        """
        self.path = Path(path)
        self.as_published = as_published
        if not self.path.is_dir():
            raise DataError(self.path, "no such directory", f"Give {_LAYOUT}")
        self.corpus_file = self._find("corpus")
        self.queries_file = self._find("queries")
        if not self.splits():
            problem = "missing: no qrels/<split>.tsv is there"
            raise DataError(self.path / "qrels", problem, f"Give {_LAYOUT}")

    def documents(self) -> Iterator[Document]:
        """Streams the corpus, in the order of the file.

        Raises:
          DataError: a line is malformed, a document empty, an id repeated, or there is
            no document.
        """
        return read_documents(self.corpus_file, self.as_published)

    def queries(self) -> dict[str, str]:
        """Returns id -> text of all queries, whatever their split."""
        return dict(self.read_queries())

    def read_queries(self) -> Iterator[tuple[str, str]]:
        """Streams (id, text) of all queries, as `read_query_lines`."""
        return ((query_id, text) for query_id, text, _ in self.read_query_lines())

    def read_query_lines(self) -> Iterator[tuple[str, str, dict]]:
        """Streams (id, text, other fields) of all queries, in the order of the file.

        Raises:
          DataError: a line is malformed, a text empty, an id repeated, or there is no
            query.
        """
        for line, record in _records(self.queries_file):
            text = _text(self.queries_file, line, record, "text")
            if not text.strip():
                problem = f"query {shown(record['_id'])} is empty"
                remedy = "Remove it and its judgements, or give it a text"
                raise DataError(self.queries_file, problem, remedy, line)
            others = {
                key: value
                for key, value in record.items()
                if key not in ("_id", "text") and value not in (None, "", {}, [])
            }
            yield record["_id"], text, others

    def users(self, split: str | None = None, field: str = "user_id") -> dict[str, str]:
        """Returns query id -> whose query it is, for user-level privacy.

        Args:
          split: look at the queries it judges above 0; `None` for all queries.
          field: name of the user id, in a line's ``metadata`` or next to it.

        Raises:
          DataError: one of the queries has no user, or two; a malformed line.
        """
        wanted = None if split is None else self.positives(split)
        return dict(self._users(field, lambda key: wanted is None or key in wanted))

    def owners(self, pairs: PairTable, field: str = "user_id") -> np.ndarray:
        """Returns [pairs] int64, the place of each pair's user among all, sorted.

        `pairs` is what `pairs` or `all_pairs` returned; for the rest see `users`.
        """
        return pairs.user_numbers(self._users(field, pairs.has_query))

    def splits(self) -> tuple[str, ...]:
        """Returns the names of the splits, sorted."""
        return tuple(sorted(f.stem for f in (self.path / "qrels").glob("*.tsv")))

    def judgements(self, split: str) -> Iterator[Judgement]:
        """Streams the lines of a split's qrels, whatever their score.

        A line that is there twice comes once.

        Raises:
          DataError: the split is missing, a line is malformed, or two contradict each
            other.
        """
        path = self._qrels_file(split)
        if not path.is_file():
            there = f"The splits here are: {', '.join(self.splits())}"
            raise DataError(path, "missing", there)
        return _read_judgements(path)

    def qrels(self, split: str) -> dict[str, dict[str, int]]:
        """Returns query id -> document id -> score, scores of 0 and below included."""
        judged: dict[str, dict[str, int]] = {}
        for row in self.judgements(split):
            judged.setdefault(row.query_id, {})[row.document_id] = row.score
        return judged

    def positives(self, split: str) -> dict[str, frozenset[str]]:
        """Returns query id -> ids of the documents judged above 0; at least one."""
        found: dict[str, set[str]] = {}
        for row in self._positive(split):
            found.setdefault(row.query_id, set()).add(row.document_id)
        return {query_id: frozenset(ids) for query_id, ids in found.items()}

    def answered(self, split: str) -> frozenset[str]:
        """Returns the ids of the documents that a query of the split is judged for."""
        return frozenset(row.document_id for row in self._positive(split))

    def pairs(self, split: str) -> PairTable:
        """Returns one pair per query of the split, sorted by query id, for training.

        The unit of privacy is one query. Were a query in k pairs, clipping each
        pair's gradient would let it move the sum by k clip norms and the stated
        guarantee would be k times too good. So each query keeps exactly one
        document: that of the highest score, then of the smallest id.

        Raises:
          DataError: the split has no pair, a judgement names an unknown id, or a
            line of any of the three files is malformed.
        """
        return self._joined(split, best=True)

    def all_pairs(self, split: str) -> PairTable:
        """Returns every pair judged above 0, sorted by query and document id.

        A query may occur several times: for evaluation, for training without privacy,
        and for training under DP whose unit is one pair or one user. A judgement more
        or less is one row more or less, and changes no other.
        """
        return self._joined(split, best=False)

    def judged_queries(self, split: str) -> tuple[int, Iterator[tuple[str, str]]]:
        """Returns the number of queries that a split judges, and streams (id, text).

        They are sorted by id, on disk; with those that are judged 0 throughout.
        """
        table = PairTable(self.judgements(split), best=True)
        table.add_queries(self.read_queries())
        return table.query_texts()

    def validate(self, splits: Sequence[str] = ("train", "test")) -> Counts:
        """Reads everything and checks it, before any work is built on it.

        Every line must be sound, ids unique, texts not empty, and judgements of known
        queries and documents.

        Args:
          splits: the splits that must be there. Others are not read.

        Raises:
          DataError: the first problem, with file, line, value and remedy.
        """
        pairs = {split: sum(1 for _ in self._positive(split)) for split in splits}
        tables = {
            split: PairTable(self.judgements(split), best=False) for split in splits
        }
        queries = documents = empty = 0
        for query_id, _ in self.read_queries():
            queries += 1
            for table in tables.values():
                table.add_queries([(query_id, "")])
        for document in self.documents():
            documents += 1
            empty += not document.content
            for table in tables.values():
                table.add_documents([Document(document.id, "", "")])
        unknown = sum(self._unknown(*item) for item in tables.items())
        return Counts(documents, queries, pairs, empty, unknown)

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

    def _users(
        self, field: str, wanted: Callable[[str], bool]
    ) -> Iterator[tuple[str, str]]:
        for line, record in _records(self.queries_file):
            if wanted(record["_id"]):
                yield record["_id"], _user_of(self.queries_file, line, record, field)

    def _find(self, name: str) -> Path:
        paths = [self.path / f"{name}.jsonl{end}" for end in ("", ".gz")]
        found = [path for path in paths if path.is_file()]
        if not found:
            raise DataError(paths[0], "missing (as is its .gz)", f"Give {_LAYOUT}")
        if len(found) > 1:
            problem = f"{found[1].name} is there too"
            raise DataError(found[0], problem, "Move the one that is stale away")
        return found[0]

    def _qrels_file(self, split: str) -> Path:
        if split != Path(split).name:
            raise InputError(f"split is {shown(split)}; give a name such as 'train'.")
        return self.path / "qrels" / f"{split}.tsv"

    def _positive(self, split: str) -> Iterator[Judgement]:
        empty = True
        for row in self.judgements(split):
            if row.score > 0:
                empty = False
                yield row
        if empty:
            remedy = "A split needs at least one relevant document"
            raise DataError(
                self._qrels_file(split), "no pair is judged above 0", remedy
            )

    def _joined(self, split: str, best: bool) -> PairTable:
        """Joins judgements and texts; `best` keeps one document of a query."""
        table = PairTable(self._positive(split), best)
        table.add_queries(self.read_queries())
        table.add_documents(self.documents())
        if self._unknown(split, table):
            table.drop_unknown()
        return table

    def _unknown(self, split: str, table: PairTable) -> int:
        """Returns how many rows are of documents that are not there, if few may be."""
        allowed = _MISSING * len(table) if self.as_published else 0
        count, first = 0, None
        for line, query_id, document_id, known_query in table.unknown():
            name, file = f"document {id_shown(document_id)}", self.corpus_file.name
            if not known_query:
                name, file = f"query {id_shown(query_id)}", self.queries_file.name
            first = first or (f"{name} is not in {file}", line)
            count += 1 if known_query else len(table)
        if first and count > allowed:
            remedy = "Add it there, or remove this judgement"
            raise DataError(self._qrels_file(split), first[0], remedy, first[1])
        return count


class BeirWriter:
    """Fills a directory with corpus, queries and qrels; a context manager.

    A judgement must follow its document and its query. Of each document and query a
    64-bit hash stays in memory. For a directory that appears as a whole, write into
    `io.atomic_directory`.
    """

    def __init__(self, directory: Path, compress: bool = False):
        """Takes an existing directory; `compress` writes ``.jsonl.gz``."""
        self._directory, self._compress = directory, compress
        self._stack = contextlib.ExitStack()
        self._files: dict[str, IO[str]] = {}
        self._held: dict[str, set[int]] = {"document": set(), "query": set()}

    def __enter__(self) -> BeirWriter:  # noqa: PYI034 (Self is of Python 3.11)
        """Opens corpus and queries."""
        self._files["document"] = self._open("corpus.jsonl")
        self._files["query"] = self._open("queries.jsonl")
        (self._directory / "qrels").mkdir()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Closes all files; raises InputError if the set is empty."""
        # Closing a file on a full disk only repeats the first error.
        with contextlib.suppress(*([] if kind is None else [OSError])):
            self._stack.close()
        if kind is None and len(self._files) == 2:
            raise InputError(f"{self._directory}: no judgement was given; add one.")

    def has_document(self, document_id: str) -> bool:
        """Returns whether a document of this id was added."""
        return hash(document_id) in self._held["document"]

    def add_document(self, document: Document) -> None:
        """Adds a document; raises InputError if it is unsound, see `add_query`."""
        content = {"title": document.title, "text": document.text}
        self._add("document", document.id, content, document.content)

    def add_query(
        self, query_id: str, text: str, fields: Mapping[str, Any] | None = None
    ) -> None:
        """Adds a query; `fields` is what else its line holds, such as its user.

        Raises:
          InputError: its id is repeated or no id, or it is empty or no text.
        """
        self._add("query", query_id, {**(fields or {}), "text": text}, text)

    def add_judgement(
        self, split: str, query_id: str, document_id: str, score: int
    ) -> None:
        """Adds a line to ``qrels/<split>.tsv``.

        Raises:
          InputError: query or document were not added before, or the score is not an
            integer.
        """
        what = f"judgement of query {shown(query_id)} and document {shown(document_id)}"
        for kind, key in (("query", query_id), ("document", document_id)):
            if hash(key) not in self._held[kind]:
                raise InputError(f"{what}: no such {kind}; add the {kind} first.")
        if isinstance(score, bool) or not isinstance(score, int):
            raise InputError(f"{what}: the score is {score!r}; it must be an integer.")
        name = f"qrels/{split}.tsv"
        if name not in self._files:
            if not split or Path(split).name != split:
                raise InputError(f"split is {split!r}; it must be a file name.")
            path = self._directory / name
            file = path.open("w", encoding="utf-8", newline="\n")
            self._files[name] = self._stack.enter_context(file)
            file.write(f"{HEADER}\n")
        self._files[name].write(f"{query_id}\t{document_id}\t{score}\n")

    def _add(self, kind: str, key: str, content: dict[str, Any], text: Any) -> None:
        what = f"{kind} {shown(key)}"
        line = json.dumps({"_id": key, **content}, ensure_ascii=False)
        problem = text_problem("its id", key, identifier=True)
        problem = problem or text_problem("its text", text) or text_problem("it", line)
        if not problem and not text.strip():
            problem = "is empty"
        if not problem and hash(key) in self._held[kind]:
            problem = "was given twice"
        if problem:
            raise InputError(f"{what} {problem}. Correct it before writing.")
        self._held[kind].add(hash(key))
        self._files[kind].write(f"{line}\n")

    def _open(self, name: str) -> IO[str]:
        enter, path = self._stack.enter_context, self._directory / name
        if not self._compress:
            return enter(path.open("w", encoding="utf-8", newline="\n"))
        raw = enter(path.with_suffix(".jsonl.gz").open("wb"))
        # No name and no time in the header: the same content, the same bytes.
        packed = enter(gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
        return enter(streams.TextIOWrapper(packed, encoding="utf-8", newline="\n"))


def write_beir(
    path: str | os.PathLike,
    documents: Iterable[Document],
    queries: Iterable[tuple[str, str]],
    qrels: Mapping[str, Iterable[tuple[str, str, int]]],
    compress: bool = False,
) -> BeirDirectory:
    """Writes a BEIR directory, all of it or nothing.

    Args:
      path: the directory to make; it must not exist, or be empty.
      documents: the corpus, streamed.
      queries: (id, text) of the queries of all splits, streamed.
      qrels: split -> (query id, document id, score), streamed.
      compress: write ``.jsonl.gz`` (the same bytes on every run).

    Raises:
      InputError: a text is empty, an id repeated, or unknown in a judgement.
    """
    with (
        atomic_directory(path) as partial,
        BeirWriter(partial, compress=compress) as writer,
    ):
        for document in documents:
            writer.add_document(document)
        for query_id, text in queries:
            writer.add_query(query_id, text)
        for split, rows in qrels.items():
            for query_id, document_id, score in rows:
                writer.add_judgement(split, query_id, document_id, score)
    return BeirDirectory(path)


def read_documents(
    path: str | os.PathLike,
    may_be_empty: bool = False,
    raw: Iterable[tuple[int, bytes]] | None = None,
) -> Iterator[Document]:
    """Streams the documents of a corpus.

    Args:
      path: one object a line with "_id", "text" and perhaps "title".
      may_be_empty: whether documents may have neither title nor text.
      raw: a part of the file, as `lines.raw_lines` yields it.

    Raises:
      DataError: a line is malformed, an id repeated, or there is no document.
    """
    for line, record in _records(path, raw):
        title = _text(path, line, record, "title")
        document = Document(record["_id"], title, _text(path, line, record, "text"))
        if not document.content and not may_be_empty:
            problem = f"document {shown(document.id)} is empty (no title, no text)"
            raise DataError(path, problem, "Remove it, or give it a text", line)
        yield document


def names_user(record: dict, field: str) -> bool:
    """Returns whether a query's line has a value where `users` looks, sound or not."""
    return any(value not in (None, "") for value in _user_values(record, field))


def _records(
    path: str | os.PathLike, raw: Iterable[tuple[int, bytes]] | None = None
) -> Iterator[tuple[int, dict]]:
    """Yields the objects of a JSON-lines file, each with an ``_id`` of its own."""
    seen: set[str] = set()
    for line, record in read_objects(path, raw):
        key = record.get("_id")
        problem = text_problem("_id", key, identifier=True)
        if not isinstance(key, str):
            problem = "no text under '_id'"
        elif key in seen:
            problem = f"id {shown(key)} occurs on an earlier line"
        if problem:
            remedy = "Write an '_id' of its own, a text, into every line"
            raise DataError(path, problem, remedy, line)
        seen.add(str(key))
        yield line, record
    if raw is None and not seen:
        raise DataError(path, "holds no line", "Add at least one")


def _text(path: str | os.PathLike, line: int, record: dict, field: str) -> str:
    """Returns a field of a record; one that is absent or null is empty."""
    value = record.get(field)
    value = "" if value is None else value
    problem = text_problem(field, value)
    if problem:
        raise DataError(path, problem, "Write a string of valid Unicode", line)
    return value


def _user_of(path: Path, line: int, record: dict, field: str) -> str:
    """Returns a query's user: text or a number in its metadata, or next to it."""
    values = _user_values(record, field)
    try:
        found = {
            id_of(value, of_user=True)
            for value in values
            if isinstance(value, (str, int)) and not isinstance(value, bool)
        } - {""}
        problem = "two users" if len(found) > 1 else f"no user under {field!r}"
    except ValueError:
        found, problem = set(), "a user whose last digits may have been rounded off"
    if len(found) == 1:
        return found.pop()
    raise DataError(
        path,
        f"query {shown(record['_id'])} has {problem}",
        f'Write "metadata": {{"{field}": ...}}, a text or an integer with all its '
        "digits, into every query's line, or protect single queries",
        line,
    )


def _user_values(record: dict, field: str) -> tuple[object, object]:
    metadata = record.get("metadata")
    inside = metadata.get(field) if isinstance(metadata, dict) else None
    return inside, record.get(field)


def _read_judgements(path: Path) -> Iterator[Judgement]:
    lines = read_lines(path)
    if next(lines, (1, ""))[1] != HEADER:
        remedy = f"It must be the header {HEADER!r}"
        raise DataError(path, "the first line is not the header", remedy, 1)
    seen: dict[int, int] = {}
    for line, content in lines:
        fields = content.split("\t")
        if len(fields) != 3 or not fields[0] or not fields[1]:
            problem = f"{len(fields)} fields separated by tabs; expected three"
            raise DataError(path, problem, f"Write {HEADER}", line)
        query, document, score = fields[0], fields[1], integer_score(fields[2])
        if score is None:
            problem = f"the score is {number_shown(fields[2])}"
            remedy = f"Write an integer up to {MOST_RELEVANT:,}; 1 is relevant"
            raise DataError(path, problem, remedy, line)
        key = hash((query, document))
        if key not in seen:
            seen[key] = score
            yield Judgement(line, query, document, score)
        elif seen[key] != score:
            problem = f"query {id_shown(query)} and document {id_shown(document)}"
            problem += " have another score on an earlier line"
            raise DataError(path, problem, "Keep one of the lines", line)


def integer_score(value: Any) -> int | None:
    """Returns a relevance such as 1, "1" or "1.0" as an integer, or `None`."""
    try:
        found = float(value)
        whole = found == int(found) and abs(found) <= MOST_RELEVANT
    except (TypeError, ValueError, OverflowError):
        return None
    return int(found) if whole else None

"""Query-document pairs as a BEIR directory: the project's exchange format.

A directory holds ``corpus.jsonl`` (``_id``, ``title``, ``text``), ``queries.jsonl``
(``_id``, ``text``; all splits in one file), either of them also as ``.jsonl.gz``,
and ``qrels/<split>.tsv`` with the header ``query-id<TAB>corpus-id<TAB>score``.
Reading is line by line, so memory does not grow with the corpus beyond what a
caller keeps.

Source: Thakur et al., *BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation
of Information Retrieval Models* (2021).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tfdpsq.data.beir_lines import (
    Judgement,
    check_known,
    other_fields,
    read_documents,
    read_judgements,
    read_records,
    refuse_repeated,
    text_field,
    unique,
    user_of,
    whole_corpus,
)
from tfdpsq.data.beir_writer import write_beir_files
from tfdpsq.data.files import atomic_directory
from tfdpsq.data.pair_table import PairTable
from tfdpsq.data.texts import Document
from tfdpsq.validation import DataError, InputError, shown

# Lines that are looked at together.
_CHUNK = 4096


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

    Construction only looks for the files. Each method reports the first bad line
    it meets; `validate` meets them all. Those that return a dictionary hold it in
    memory: they are for splits that are evaluated, and `pairs` for logs of any size.

    Attributes:
      path: the directory, as a `Path`.
      as_published: whether two flaws of sets that others publish are taken as they
        are: documents without any text (FiQA, TREC-COVID), and up to one judgement
        in a hundred of a document that is not there (ArguAna).
    """

    def __init__(self, path: str | os.PathLike, as_published: bool = False):
        """Finds the files of the directory.

        Args:
          path: the directory.
          as_published: see the attribute.

        Raises:
          DataError: the corpus, the queries, or all qrels are missing, or one of
            them is there both plain and compressed.
        """
        self.path = Path(path)
        self.as_published = as_published
        if not self.path.is_dir():
            raise DataError(
                self.path,
                "no such directory",
                "Give a BEIR directory: corpus.jsonl, queries.jsonl and "
                "qrels/<split>.tsv",
            )
        self._corpus = self._find("corpus")
        self._queries = self._find("queries")
        if not self.splits():
            raise DataError(
                self.path / "qrels",
                "missing: no qrels/<split>.tsv is there",
                "Each split needs a file with the header "
                "'query-id<TAB>corpus-id<TAB>score'",
            )

    @property
    def corpus_file(self) -> Path:
        """The file with the documents, which may be compressed."""
        return self._corpus

    @property
    def queries_file(self) -> Path:
        """The file with the queries of all splits, which may be compressed."""
        return self._queries

    def documents(self) -> Iterator[Document]:
        """Streams the corpus, in the order of the file.

        Raises:
          DataError: at the first line that is not a document.
        """
        return read_documents(self._corpus, may_be_empty=self.as_published)

    def queries(self) -> dict[str, str]:
        """Returns id -> text of all queries, whatever their split.

        Raises:
          DataError: a line is malformed, a text empty, an id repeated, or there
            is no query at all.
        """
        return dict(self.read_queries())

    def read_queries(self) -> Iterator[tuple[str, str]]:
        """Streams (id, text) of all queries; see `read_query_lines`."""
        for query_id, text, _ in self.read_query_lines():
            yield query_id, text

    def read_query_lines(self) -> Iterator[tuple[str, str, dict]]:
        """Streams (id, text, other fields) of all queries, in the order of the file.

        Raises:
          DataError: as `queries`; a repeated id some thousands of lines later.
        """
        empty = True
        for query in unique(self._queries, self._query_lines(), lambda item: item[0]):
            empty = False
            yield query
        if empty:
            raise DataError(self._queries, "holds no query", "Add at least one line")

    def _query_lines(self) -> Iterator[tuple[str, str, dict]]:
        for line, record in read_records(self._queries):
            text = text_field(self._queries, line, record, "text")
            if not text.strip():
                raise DataError(
                    self._queries,
                    f"query {shown(record['_id'])} is empty",
                    "Remove it and its judgements, or give it a text",
                    line,
                )
            yield record["_id"], text, other_fields(record)

    def other_fields(self) -> dict[str, dict]:
        """Returns query id -> what its line holds besides id and text, if anything."""
        found = ((r["_id"], other_fields(r)) for _, r in read_records(self._queries))
        return {query_id: fields for query_id, fields in found if fields}

    def users(self, split: str | None = None, field: str = "user_id") -> dict[str, str]:
        """Returns query id -> whose query it is, for user-level privacy.

        Args:
          split: look at the queries it judges above 0; `None` for all queries.
          field: name of the user id, in a line's ``metadata`` or next to it.

        Raises:
          DataError: one of the queries has no user, or two; a malformed line.
        """
        wanted = self.queries() if split is None else self.positives(split)
        return {
            record["_id"]: user_of(self._queries, line, record, field)
            for line, record in read_records(self._queries)
            if record["_id"] in wanted
        }

    def owners(self, pairs: PairTable, field: str = "user_id") -> np.ndarray:
        """Returns the user of each pair as a number, for user-level privacy.

        Args:
          pairs: what `pairs` or `all_pairs` returned.
          field: as in `users`.

        Returns:
          [pairs] int64, the user's place among all of theirs, sorted by name.

        Raises:
          DataError: as `users`.
        """
        return pairs.user_numbers(
            (record["_id"], user_of(self._queries, line, record, field))
            for line, record in read_records(self._queries)
            if pairs.has_query(record["_id"])
        )

    def splits(self) -> tuple[str, ...]:
        """Returns the names of the splits, sorted."""
        return tuple(sorted(f.stem for f in (self.path / "qrels").glob("*.tsv")))

    def qrels(self, split: str) -> dict[str, dict[str, int]]:
        """Returns query id -> document id -> score, scores of 0 and below included.

        Raises:
          DataError: the split is missing, a line malformed or repeated.
        """
        judged: dict[str, dict[str, int]] = {}
        for row in self.judgements(split):
            judged.setdefault(row.query_id, {})[row.document_id] = row.score
        return judged

    def pairs(self, split: str) -> PairTable:
        """Returns one pair per query of the split, for training under DP.

        The unit of privacy is one query. Were a query in k pairs, clipping each
        pair's gradient would let it move the sum by k clip norms and the stated
        guarantee would be k times too good. So each query keeps exactly one
        document: that of the highest score, then of the smallest id.

        Returns:
          The pairs on disk, sorted by query id. Queries judged 0 throughout have none.

        Raises:
          DataError: the split has no pair, a judgement names an unknown id, or a
            line of any of the three files is malformed.
        """
        return self._joined(split, best=True)

    def all_pairs(self, split: str) -> PairTable:
        """Returns every pair judged above 0, sorted by query and document id.

        A query may occur several times: for evaluation, for training without privacy,
        and for training under DP whose unit is one pair. A judgement more or less is
        one row more or less, and changes no other. See `pairs` for unit "query".

        Raises:
          DataError: as `pairs`.
        """
        return self._joined(split, best=False)

    def judged_queries(self, split: str) -> tuple[int, Iterator[tuple[str, str]]]:
        """Returns the number of queries that a split judges, and streams (id, text).

        They are sorted by id, on disk; with those that are judged 0 throughout.

        Raises:
          DataError: as `pairs`.
        """
        table = PairTable()
        table.add_judgements(self.judgements(split))
        table.choose(best=True)
        table.add_queries(self.read_queries())
        return table.query_texts()

    def positives(self, split: str) -> dict[str, frozenset[str]]:
        """Returns query id -> ids of the documents judged above 0.

        Raises:
          DataError: the split is missing, has no pair, or has a malformed line.
        """
        found: dict[str, set[str]] = {}
        for row in self._positive(split):
            found.setdefault(row.query_id, set()).add(row.document_id)
        return {query_id: frozenset(ids) for query_id, ids in found.items()}

    def answered(self, split: str) -> frozenset[str]:
        """Returns the ids of the documents that a query of the split is judged for.

        Raises:
          DataError: the split is missing, has no pair, or has a malformed line.
        """
        return frozenset(row.document_id for row in self._positive(split))

    def validate(self, splits: Sequence[str] = ("train", "test")) -> Counts:
        """Reads everything and checks it, before any work is built on it.

        Checked: every line's form and encoding, ids (unique, without white
        space), texts (not empty), and that every judgement names a known query
        and document. Of a line it keeps 8 bytes in memory, and judged ids on disk.

        Args:
          splits: the splits that must be there. Others are not read.

        Returns:
          The counts.

        Raises:
          DataError: the first problem, with file, line, value and remedy.
        """
        tables, pairs = {}, {}
        for split in splits:
            tables[split] = PairTable()
            pairs[split] = sum(1 for _ in self._positive(split))
            tables[split].add_judgements(self.judgements(split))
            tables[split].choose(best=False)
        queries = documents = empty = 0
        stream = self.read_queries()
        while some := list(itertools.islice(stream, _CHUNK)):
            queries += len(some)
            for table in tables.values():
                table.add_queries((name, "") for name, _ in some)
        corpus = whole_corpus(self._corpus, self.documents())
        while chunk := list(itertools.islice(corpus, _CHUNK)):
            documents += len(chunk)
            empty += sum(not document.content for document in chunk)
            for table in tables.values():
                names = (Document(document.id, "", "") for document in chunk)
                table.add_documents(names, self._refuse_repeated)
        return Counts(
            documents=documents,
            queries=queries,
            pairs=pairs,
            empty_documents=empty,
            unknown_judgements=sum(map(self._unknown, tables, tables.values())),
        )

    def fingerprint(self) -> str:
        """Returns the SHA-256, in hex, of what the directory says.

        It depends on the documents, queries (with their users and other fields) and
        judgements: not on their order, nor on compression. It is a sum of hashes
        modulo 2^256, which accidents change and only a determined forger could keep.
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
        plain = self.path / f"{name}.jsonl"
        packed = self.path / f"{name}.jsonl.gz"
        if plain.is_file() and packed.is_file():
            raise DataError(
                plain, f"{packed.name} is there too", "Move the one that is stale away"
            )
        if not plain.is_file() and not packed.is_file():
            raise DataError(
                plain,
                "missing (as is its .gz)",
                "A BEIR directory holds corpus.jsonl, queries.jsonl and "
                "qrels/<split>.tsv",
            )
        return plain if plain.is_file() else packed

    def judgements(self, split: str) -> Iterator[Judgement]:
        """Streams the lines of a split's qrels, whatever their score.

        Raises:
          DataError: the split is missing, a line malformed or repeated.
        """
        path = self._qrels_file(split)
        if path.is_dir():
            raise DataError(path, "is a directory", "Put a file with this name there")
        if not path.is_file():
            raise DataError(
                path, "missing", f"The splits here are: {', '.join(self.splits())}"
            )
        return read_judgements(path)

    def _qrels_file(self, split: str) -> Path:
        if split != Path(split).name:
            raise InputError(
                f"split is {shown(split)}, which does not name a file in "
                f"{self.path / 'qrels'}. Give a name without slashes, such as 'train'."
            )
        return self.path / "qrels" / f"{split}.tsv"

    def _positive(self, split: str) -> Iterator[Judgement]:
        empty = True
        for row in self.judgements(split):
            if row.score > 0:
                empty = False
                yield row
        if empty:
            raise DataError(
                self._qrels_file(split),
                "no pair is judged above 0",
                "A split needs at least one relevant document",
            )

    def _joined(self, split: str, best: bool) -> PairTable:
        """Joins judgements and texts; `best` keeps one document of a query."""
        table = PairTable()
        table.add_judgements(self._positive(split))
        table.choose(best)
        table.add_queries(self.read_queries())
        table.add_documents(self.documents(), self._refuse_repeated)
        if self._unknown(split, table):
            table.drop_unknown()
        return table

    def _refuse_repeated(self, document_id: str) -> None:
        refuse_repeated(self._corpus, {document_id})

    def _unknown(self, split: str, table: PairTable) -> int:
        """Returns how many rows are of documents that are not there, if few may be."""
        found = table.unknown()
        return 0 if found is None else self._check_known(split, *found)

    def _check_known(
        self,
        split: str,
        rows: Iterable[Judgement],
        queries: Container[str],
        documents: Container[str],
    ) -> int:
        return check_known(
            self._qrels_file(split),
            rows,
            (queries, self._queries),
            (documents, self._corpus),
            allowed=0.01 if self.as_published else 0.0,
        )


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

    Returns:
      The directory, open for reading.

    Raises:
      InputError: the place is taken or cannot be written, or what was given is no
        sound set (empty text, repeated id, judgement of an unknown id).
    """
    with atomic_directory(path) as partial:
        write_beir_files(partial, documents, queries, qrels, compress)
    return BeirDirectory(path)

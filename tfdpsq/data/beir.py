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
import json
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tfdpsq.data.beir_lines import (
    Judgement,
    check_known,
    document_of,
    duplicate,
    other_fields,
    read_judgements,
    read_records,
    refuse_repeated,
    text_field,
    unique,
    user_of,
)
from tfdpsq.data.beir_writer import write_beir_files
from tfdpsq.data.files import atomic_directory
from tfdpsq.data.texts import Document, Pair
from tfdpsq.validation import DataError, shown


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
    it meets; `validate` meets them all.

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
        for line, record in read_records(self._corpus):
            yield document_of(self._corpus, line, record, self.as_published)

    def queries(self) -> dict[str, str]:
        """Returns id -> text of all queries, whatever their split.

        Raises:
          DataError: a line is malformed, a text empty, an id repeated, or there
            is no query at all.
        """
        found: dict[str, str] = {}
        for line, record in read_records(self._queries):
            query_id = record["_id"]
            text = text_field(self._queries, line, record, "text")
            if not text.strip():
                raise DataError(
                    self._queries,
                    f"query {shown(query_id)} is empty",
                    "Remove it and its judgements, or give it a text",
                    line,
                )
            if query_id in found:
                raise duplicate(self._queries, query_id, line)
            found[query_id] = text
        if not found:
            raise DataError(self._queries, "holds no query", "Add at least one line")
        return found

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

    def splits(self) -> tuple[str, ...]:
        """Returns the names of the splits, sorted."""
        return tuple(sorted(f.stem for f in (self.path / "qrels").glob("*.tsv")))

    def qrels(self, split: str) -> dict[str, dict[str, int]]:
        """Returns query id -> document id -> score, scores of 0 and below included.

        Raises:
          DataError: the split is missing, a line malformed or repeated.
        """
        judged: dict[str, dict[str, int]] = {}
        for row in self._judgements(split):
            judged.setdefault(row.query_id, {})[row.document_id] = row.score
        return judged

    def pairs(self, split: str) -> list[Pair]:
        """Returns one pair per query of the split, for training under DP.

        The unit of privacy is one query. Were a query in k pairs, clipping each
        pair's gradient would let it move the sum by k clip norms and the stated
        guarantee would be k times too good. So each query keeps exactly one
        document: that of the highest score, then of the smallest id.

        Returns:
          The pairs, sorted by query id. Queries judged 0 throughout have none.

        Raises:
          DataError: the split has no pair, a judgement names an unknown id, or a
            line of any of the three files is malformed.
        """
        best: dict[str, Judgement] = {}
        for row in self._positive(split):
            held = best.get(row.query_id)
            if held is None or (-row.score, row.document_id) < (
                -held.score,
                held.document_id,
            ):
                best[row.query_id] = row
        return self._joined(split, best.values())

    def all_pairs(self, split: str) -> list[Pair]:
        """Returns every pair judged above 0, sorted by query and document id.

        A query may occur several times: for evaluation, for training without privacy,
        and for training under DP whose unit is one pair. A judgement more or less is
        one row more or less, and changes no other. See `pairs` for unit "query".

        Raises:
          DataError: as `pairs`.
        """
        return self._joined(split, self._positive(split))

    def positives(self, split: str) -> dict[str, frozenset[str]]:
        """Returns query id -> ids of the documents judged above 0.

        Raises:
          DataError: the split is missing, has no pair, or has a malformed line.
        """
        found: dict[str, set[str]] = {}
        for row in self._positive(split):
            found.setdefault(row.query_id, set()).add(row.document_id)
        return {query_id: frozenset(ids) for query_id, ids in found.items()}

    def validate(self, splits: Sequence[str] = ("train", "test")) -> Counts:
        """Reads everything and checks it, before any work is built on it.

        Checked: every line's form and encoding, ids (unique, without white
        space), texts (not empty), and that every judgement names a known query
        and document. Of a document it keeps 8 bytes in memory, and its id if it is
        judged.

        Args:
          splits: the splits that must be there. Others are not read.

        Returns:
          The counts.

        Raises:
          DataError: the first problem, with file, line, value and remedy.
        """
        rows = {split: self._positive(split) for split in splits}
        queries = self.queries()
        judged = {row.document_id for s in splits for row in self._judgements(s)}
        known: set[str] = set()
        documents = empty = 0
        for document in unique(self._corpus, self.documents()):
            documents += 1
            empty += not document.content
            if document.id in judged:
                known.add(document.id)
        if not documents:
            raise DataError(self._corpus, "holds no document", "Add at least one line")
        return Counts(
            documents=documents,
            queries=len(queries),
            pairs={split: len(found) for split, found in rows.items()},
            empty_documents=empty,
            unknown_judgements=sum(
                self._check_known(split, self._judgements(split), queries, known)
                for split in splits
            ),
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
        for query_id, text in self.queries().items():
            add("query", query_id, text)
        for query_id, fields in self.other_fields().items():
            add("fields", query_id, json.dumps(fields, sort_keys=True))
        for split in self.splits():
            for row in self._judgements(split):
                add("qrel", split, row.query_id, row.document_id, row.score)
        return f"{total % (1 << 256):064x}"

    def _find(self, name: str) -> Path:
        plain = self.path / f"{name}.jsonl"
        packed = self.path / f"{name}.jsonl.gz"
        if plain.is_file() and packed.is_file():
            raise DataError(
                plain, f"{packed.name} is there too", "Delete the one that is stale"
            )
        if not plain.is_file() and not packed.is_file():
            raise DataError(
                plain,
                "missing (as is its .gz)",
                "A BEIR directory holds corpus.jsonl, queries.jsonl and "
                "qrels/<split>.tsv",
            )
        return plain if plain.is_file() else packed

    def _judgements(self, split: str) -> Iterator[Judgement]:
        path = self._qrels_file(split)
        if not path.is_file():
            raise DataError(
                path, "missing", f"The splits here are: {', '.join(self.splits())}"
            )
        return read_judgements(path)

    def _qrels_file(self, split: str) -> Path:
        return self.path / "qrels" / f"{split}.tsv"

    def _positive(self, split: str) -> list[Judgement]:
        rows = [row for row in self._judgements(split) if row.score > 0]
        if not rows:
            raise DataError(
                self._qrels_file(split),
                "no pair is judged above 0",
                "A split needs at least one relevant document",
            )
        return rows

    def _joined(self, split: str, rows: Iterable[Judgement]) -> list[Pair]:
        """Looks up the texts of judgements, keeping only the documents in need."""
        rows = sorted(rows, key=lambda row: (row.query_id, row.document_id))
        queries = self.queries()
        wanted = {row.document_id for row in rows}
        contents: dict[str, str] = {}
        for document in self.documents():
            if document.id in wanted:
                if document.id in contents:
                    refuse_repeated(self._corpus, {document.id})
                contents[document.id] = document.content
        self._check_known(split, rows, queries, contents)
        return [
            Pair(
                row.query_id,
                queries[row.query_id],
                row.document_id,
                contents[row.document_id],
            )
            for row in rows
            if row.document_id in contents
        ]

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

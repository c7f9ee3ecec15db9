"""Writes the files of a BEIR directory record by record, in flat memory."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from tfdpsq.data.texts import Document, text_problem
from tfdpsq.data.unique_ids import SeenTexts
from tfdpsq.validation import InputError, shown


class BeirWriter:
    """Fills a directory with corpus, queries and qrels; a context manager.

    It refuses what `BeirDirectory.validate` would refuse, so that what was written
    can be read. A judgement must follow its document and its query. Of each
    record 16 bytes stay in memory, a hash of its id. For a directory that appears as
    a whole, write into `tfdpsq.data.files.atomic_directory`.
    """

    def __init__(self, directory: Path, compress: bool = False):
        """Opens the files.

        Args:
          directory: an existing directory to write to.
          compress: write ``.jsonl.gz``.
        """
        self._directory = directory
        self._compress = compress
        self._stack = contextlib.ExitStack()
        self._qrels: dict[str, IO[str]] = {}
        self._documents, self._queries = SeenTexts(), SeenTexts()
        self._judged = SeenTexts()

    def __enter__(self) -> BeirWriter:  # noqa: PYI034 (Self is of Python 3.11)
        """Opens corpus and queries."""
        self._corpus_file = self._open("corpus")
        self._queries_file = self._open("queries")
        (self._directory / "qrels").mkdir()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Closes all files; checks that the set is not empty.

        Raises:
          InputError: no document, no query or no judgement was added.
        """
        if kind is not None:
            # The first error is the one to tell: closing a file on a full disk
            # only repeats it.
            with contextlib.suppress(OSError):
                self._stack.close()
            return
        self._stack.close()
        for name, held in (
            ("document", self._documents),
            ("query", self._queries),
            ("judgement", self._judged),
        ):
            if not held:
                raise InputError(f"{self._directory}: no {name} was given; add one.")

    def has_document(self, document_id: str) -> bool:
        """Says whether a document of this id was added."""
        return document_id in self._documents

    def add_document(self, document: Document) -> None:
        """Adds a document to the corpus.

        Raises:
          InputError: its id is repeated or no id, or it is empty or no text.
        """
        what = f"document {shown(document.id)}"
        _refuse(what, text_problem("its id", document.id, identifier=True))
        _refuse(what, text_problem("its title", document.title))
        _refuse(what, text_problem("its text", document.text))
        if not document.content:
            raise InputError(f"{what} is empty; leave it out or give it a text.")
        self._remember(what, self._documents, document.id)
        _dump(
            self._corpus_file,
            {"_id": document.id, "title": document.title, "text": document.text},
        )

    def add_query(
        self, query_id: str, text: str, fields: Mapping[str, Any] | None = None
    ) -> None:
        """Adds a query.

        Args:
          query_id: its id.
          text: its text.
          fields: what else its line holds, such as metadata with its user; JSON.

        Raises:
          InputError: its id is repeated or no id, or it is empty or no text.
        """
        what = f"query {shown(query_id)}"
        _refuse(what, text_problem("its id", query_id, identifier=True))
        _refuse(what, text_problem("its text", text))
        others = json.dumps(fields or {}, ensure_ascii=False)
        _refuse(what, text_problem("what it holds besides", others))
        if not text.strip():
            raise InputError(f"{what} is empty; leave it out or give it a text.")
        self._remember(what, self._queries, query_id)
        _dump(self._queries_file, {**(fields or {}), "_id": query_id, "text": text})

    def add_judgement(
        self, split: str, query_id: str, document_id: str, score: int
    ) -> None:
        """Adds a line to ``qrels/<split>.tsv``.

        Raises:
          InputError: query or document were not added before, the two were judged
            already in this split, or the score is not an integer.
        """
        what = f"judgement of query {shown(query_id)} and document {shown(document_id)}"
        if query_id not in self._queries:
            raise InputError(f"{what}: no such query; add the query first.")
        if document_id not in self._documents:
            raise InputError(f"{what}: no such document; add the document first.")
        if isinstance(score, bool) or not isinstance(score, int):
            raise InputError(f"{what}: the score is {score!r}; it must be an integer.")
        self._remember(
            f"{what} in {split!r}", self._judged, f"{split}\t{query_id}\t{document_id}"
        )
        if split not in self._qrels:
            if not split or Path(split).name != split:
                raise InputError(f"split is {split!r}; it must be a file name.")
            path = self._directory / "qrels" / f"{split}.tsv"
            self._qrels[split] = self._stack.enter_context(
                path.open("w", encoding="utf-8", newline="\n")
            )
            self._qrels[split].write("query-id\tcorpus-id\tscore\n")
        self._qrels[split].write(f"{query_id}\t{document_id}\t{score}\n")

    def _open(self, name: str) -> IO[str]:
        enter = self._stack.enter_context
        if not self._compress:
            path = self._directory / f"{name}.jsonl"
            return enter(path.open("w", encoding="utf-8", newline="\n"))
        path = self._directory / f"{name}.jsonl.gz"
        raw = enter(path.open("wb"))
        # No name and no time in the header: the same content, the same bytes.
        packed = enter(gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
        return enter(io.TextIOWrapper(packed, encoding="utf-8", newline="\n"))

    @staticmethod
    def _remember(what: str, held: SeenTexts, identifier: str) -> None:
        if not held.add(identifier):
            raise InputError(f"{what} was given twice; ids are unique.")


def write_beir_files(
    directory: Path,
    documents: Iterable[Document],
    queries: Iterable[tuple[str, str]],
    qrels: Mapping[str, Iterable[tuple[str, str, int]]],
    compress: bool = False,
) -> None:
    """Writes what `write_beir` writes into a directory that is there already.

    For callers that add more files, under one `atomic_directory`.

    Raises:
      InputError: as `write_beir`.
    """
    with BeirWriter(directory, compress=compress) as writer:
        for document in documents:
            writer.add_document(document)
        for query_id, text in queries:
            writer.add_query(query_id, text)
        for split, rows in qrels.items():
            for query_id, document_id, score in rows:
                writer.add_judgement(split, query_id, document_id, score)


def _refuse(what: str, problem: str | None) -> None:
    if problem:
        raise InputError(f"{what}: {problem}. Correct it before writing.")


def _dump(file: IO[str], record: dict) -> None:
    file.write(json.dumps(record, ensure_ascii=False) + "\n")

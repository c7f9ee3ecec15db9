"""Embeddings of documents and queries that exist, by any encoder.

A directory holds `documents/`, another (or the same) `queries/`, each a
`retriever.DocumentIndex`. `encode` writes them; for an encoder that is not ours, such
as one of sentence-transformers or one behind a web service, `DocumentIndex.create` and
`add` do. Ids are those of the corpus and of the queries.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tfdpsq import retriever, validation
from tfdpsq.data import pair_table
from tfdpsq.data.files import sha256_of_file
from tfdpsq.data.texts import Document
from tfdpsq.privacy.proof import certificate
from tfdpsq.retriever.store import INDEX_FILE
from tfdpsq.run.core import sources, workdir
from tfdpsq.run.passes import embedding

_SCHEMA = "create table places (id text primary key, place integer) without rowid;"


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """Embeddings of some texts, read from disk.

    Attributes:
      setting: the setting that names them, for errors.
      path: the directory that was given.
      index: the embeddings.
      fingerprint: SHA-256, in hex, of ids and embeddings.
      made_by: fingerprint of the retriever of `encode`; "" for another encoder.
    """

    setting: str
    path: str
    index: retriever.DocumentIndex
    fingerprint: str
    made_by: str

    @classmethod
    def open(cls, setting: str, path: str, texts: str) -> Embeddings:
        """Opens the embeddings of `texts`, "documents" or "queries", unread.

        Raises:
          InputError: there are none, or a retriever that has a certificate made them.
          DataError: they are damaged.
        """
        place = pathlib.Path(path) / texts
        if not path or not place.is_dir():
            raise validation.InputError(
                f"{setting} is {path!r}, which has no directory {texts!r}. Give what "
                "`encode` wrote, or embeddings that retriever.DocumentIndex wrote to "
                f"DIR/{texts}, as DIR."
            )
        index = retriever.DocumentIndex(place)
        made_by = ""
        stage = pathlib.Path(path) / workdir.STAGE_FILE
        if stage.is_file():
            made_by = workdir.read_json(stage).get("inputs", {}).get("retriever", "")
        if (pathlib.Path(path) / certificate.FILE_NAME).is_file():
            raise validation.InputError(
                f"{setting} is {path}, which carries a certificate: private queries "
                "had a part in its encoder or its texts, and what is made from it here "
                "would not count their cost. Give embeddings by a public encoder."
            )
        return cls(setting, path, index, sha256_of_file(place / INDEX_FILE), made_by)

    def places(self) -> Places:
        """Compares all files with what was written, and returns the places of ids.

        Raises:
          DataError: a file differs.
        """
        self.index.verify()
        return Places(self)


class Places:
    """The place of each text among its embeddings, by its id; on disk."""

    def __init__(self, embeddings: Embeddings):
        """Reads the ids."""
        self._of = embeddings
        self._store = pair_table.open_unnamed(_SCHEMA)
        self._store.executemany(
            "insert into places values (?, ?)",
            ((name, place) for place, name in enumerate(embeddings.index.ids())),
        )

    def of(self, names: Iterable[str]) -> list[int]:
        """Returns the places of some texts.

        Raises:
          InputError: one has no embedding.
        """
        found = []
        for name in names:
            row = self._store.execute(
                "select place from places where id = ?", (name,)
            ).fetchone()
            if row is None:
                raise validation.InputError(
                    f"{self._of.setting} is {self._of.path}, which has no embedding "
                    f"of {validation.shown(name)}. Embed all texts, under their ids."
                )
            found.append(row[0])
        return found

    def take(self, names: Sequence[str]) -> np.ndarray:
        """Returns the embeddings [n, D] of some texts.

        Raises:
          InputError: one has none.
        """
        return self._of.index.take(self.of(names))

    def require_all(self, documents: Iterable[Document], corpus: str) -> None:
        """Refuses embeddings of other texts than all documents of a corpus.

        Raises:
          InputError: a document has none, or there are more than documents.
        """
        count = sum(len(self.of([document.id])) for document in documents)
        if count != self._of.index.size:
            raise validation.InputError(
                f"{self._of.setting} is {self._of.path}, with {self._of.index.size} "
                f"embeddings, but {corpus} has {count} documents. Embed the documents "
                "of this corpus, and no others."
            )


def open_both(
    documents: str, queries: str, encoder_is_public: bool
) -> tuple[Embeddings, Embeddings]:
    """Opens the embeddings of documents and queries by one public encoder.

    Raises:
      InputError: there are none; of several widths or by several retrievers; by an
        encoder that nothing shows to be public, and that was not declared so.
    """
    own = Embeddings.open("documents", documents, embedding.DOCUMENTS)
    asked = Embeddings.open("queries", queries, embedding.QUERIES)
    if (problem := sources.why_not_public(documents)) is not None:
        raise validation.InputError(
            f"documents is {documents}, which {problem}. Give embeddings of public "
            "documents by a public encoder."
        )
    require_alike(own, asked)
    if not own.made_by and not encoder_is_public:
        raise validation.InputError(
            f"documents is {documents}, by the encoder "
            f"{validation.shown(own.index.encoder)}, which `encode` did not run. Set "
            "encoder_is_public = True if no private query had a part in its weights."
        )
    return own, asked


def require_alike(documents: Embeddings, queries: Embeddings) -> None:
    """Refuses embeddings whose inner products mean nothing.

    Raises:
      InputError: they differ in width, or in the retriever that made them.
    """
    widths = documents.index.width, queries.index.width
    if widths[0] != widths[1] or documents.made_by != queries.made_by:
        raise validation.InputError(
            f"{documents.setting} is {documents.path} and {queries.setting} "
            f"{queries.path}, of {widths[0]} and {widths[1]} dimensions: they are not "
            "by one encoder. Embed both by the same."
        )


def of_encoder(embeddings: Embeddings) -> dict[str, Any]:
    """Returns what a certificate says of the encoder."""
    if embeddings.made_by:
        return {"encoder": f"the public retriever {embeddings.made_by}"}
    name = os.fspath(embeddings.index.encoder)
    return {"encoder": f"{name}, declared to be public"}

"""Embeddings of documents and queries that exist, by any encoder.

A directory holds `documents/`, another (or the same) `queries/`, each a
`retriever.VectorStore`. `encode` writes them; for an encoder that is not ours, such as
one of sentence-transformers or one behind a web service, `VectorStore.write` does. Ids
are those of the corpus and of the queries.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdpsq import retriever, validation
from tfdpsq.data.beir import open_unnamed
from tfdpsq.data.texts import Document
from tfdpsq.privacy.proof import certificate
from tfdpsq.retriever.index import ROWS
from tfdpsq.run.core import settings, sources, workdir
from tfdpsq.run.passes import embedding, query_sets

_SCHEMA = "create table places (id text primary key, place integer) without rowid;"


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """Embeddings of some texts, read from disk.

    Attributes:
      setting: the setting that names them, for errors.
      path: the directory that was given.
      store: the embeddings.
      stage: the record of `encode` or `index`; empty for another encoder's.
    """

    setting: str
    path: str
    store: retriever.VectorStore
    stage: Mapping[str, Any]

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
                "`encode` wrote, or embeddings that retriever.VectorStore wrote to "
                f"DIR/{texts}, as DIR."
            )
        store = retriever.VectorStore(place)
        if (pathlib.Path(path) / certificate.FILE_NAME).is_file():
            raise validation.InputError(
                f"{setting} is {path}, which carries a certificate: private queries "
                "had a part in its encoder or its texts, and what is made from it here "
                "would not count their cost. Give embeddings by a public encoder."
            )
        stage: dict[str, Any] = {}
        if (pathlib.Path(path) / workdir.STAGE_FILE).is_file():
            stage = workdir.read_json(pathlib.Path(path) / workdir.STAGE_FILE)
            # Others may have been put next to those that the stage made.
            made = stage.get("config", {}).get("texts", embedding.DOCUMENTS)
            if made != texts or "retriever" not in stage.get("inputs", {}):
                stage = {}
        return cls(setting, path, store, stage)

    @property
    def encoder(self) -> str:
        """Returns the encoder's name, by which texts of both kinds are compared."""
        if not self.stage:
            return self.store.encoder
        dtype = self.stage["config"].get("dtype", settings.FLOAT32)
        return f"the retriever {self.stage['inputs']['retriever']} in {dtype}"

    def require_corpus(self, corpus: str) -> None:
        """Refuses what a stage made of another corpus, as far as it recorded that.

        `corpus` is the fingerprint of the documents. Those that a stage took over from
        another index may differ, and are refused.
        """
        other = self.stage.get("inputs", {}).get("corpus", corpus) != corpus
        if other or self.stage.get("result", {}).get("taken_over"):
            raise validation.InputError(
                f"{self.setting} is {self.path}, which was made of another corpus, or "
                "took documents over from another index. Embed the documents of this "
                "corpus."
            )

    def require_queries(self, data: str, split: str, private: pathlib.Path) -> None:
        """Refuses what `encode` made of other queries than those of a split.

        Their ids may be the same. `private` holds the key of private fingerprints.
        """
        if not self.stage:
            return
        own = query_sets.split_fingerprint(sources.open_beir(data), split)
        if self.stage.get("result", {}).get("private"):
            own = sources.keyed_fingerprint(own, private)
        if own != self.stage["inputs"].get("queries"):
            raise validation.InputError(
                f"{self.setting} is {self.path}, which was not made of the queries of "
                f"split {split!r} of {data} in their present state, by their "
                "fingerprint under this private_directory's key. Embed them again, "
                "with the same private_directory."
            )

    def places(self) -> Places:
        """Returns the places of ids."""
        return Places(self)


class Places:
    """The place of each text among its embeddings, by its id; on disk."""

    def __init__(self, embeddings: Embeddings):
        """Reads the ids."""
        self._of = embeddings
        self._store = open_unnamed(_SCHEMA)
        added = self._store.executemany(
            "insert or ignore into places values (?, ?)",
            ((name, place) for place, name in enumerate(embeddings.store.ids())),
        )
        if added.rowcount != embeddings.store.size:
            raise validation.DataError(
                embeddings.store.directory,
                "an id comes twice",
                "Embed the texts again, each once.",
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
        """Returns the embeddings [n, D] of some texts, scaled to unit length.

        Raises:
          InputError: one has none.
        """
        return of_unit_length(self._of.store.vectors[self.of(names)])

    def require_all(self, documents: Iterable[Document], corpus: str) -> None:
        """Refuses embeddings of other texts than all documents of a corpus."""
        count = sum(len(self.of([document.id])) for document in documents)
        if count != self._of.store.size:
            raise validation.InputError(
                f"{self._of.setting} is {self._of.path}, with {self._of.store.size} "
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
    # A directory may be one of links, to a directory or to each file of one.
    for path in (documents, f"{documents}/{embedding.DOCUMENTS}"):
        if (problem := sources.why_not_public(path)) is not None:
            raise validation.InputError(
                f"documents is {documents}, which {problem}. Give embeddings of public "
                "documents by a public encoder."
            )
    require_alike(own, asked)
    for each in (own, asked):
        chunks = each.store.chunks(ROWS)
        if each.store.size and not any(vectors.any() for _, vectors in chunks):
            raise validation.InputError(
                f"{each.setting} is {each.path}, whose embeddings are all zeros. Embed "
                "the texts again."
            )
    if own.stage:
        return own, asked
    if re.fullmatch("[0-9a-f]{64}", own.encoder):
        raise validation.InputError(
            f"documents is {documents}, a copy of what `encode` or `index` wrote, "
            "without the stage.json that tells of its retriever. Give the directory "
            "that they wrote."
        )
    if not encoder_is_public:
        raise validation.InputError(
            f"documents is {documents}, by the encoder {own.encoder!r}, which `encode` "
            "did not run. Set encoder_is_public = True if no private query had a part "
            "in its weights."
        )
    return own, asked


def require_alike(documents: Embeddings, queries: Embeddings) -> None:
    """Refuses embeddings of two widths or encoders: inner products mean nothing."""
    found = [(one.encoder, one.store.width) for one in (documents, queries)]
    if found[0] != found[1] or bool(documents.stage) != bool(queries.stage):
        each = " and ".join(f"{name!r} ({width} dimensions)" for name, width in found)
        raise validation.InputError(
            f"{documents.setting} is {documents.path} and {queries.setting} "
            f"{queries.path}, by {each}: they are not by one encoder. Embed both by "
            "the same."
        )


def of_unit_length(vectors: np.ndarray) -> np.ndarray:
    """Scales rows to unit length, which leaves cosines as they are; zeros stay."""
    exact = vectors.astype(np.float64)
    length = np.linalg.norm(exact, axis=1, keepdims=True)
    return (exact / np.where(length > 0, length, 1.0)).astype(np.float32)

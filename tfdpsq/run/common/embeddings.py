"""Embeddings that exist, of documents or of queries, by any encoder.

A directory holds `documents/`, another (or the same) `queries/`, each a
`retriever.VectorStore`. `embed` writes them; for an encoder that is not ours, such as
one of sentence-transformers or one behind a web service, `VectorStore.write` does. Ids
are those of the corpus and of the queries.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tfdpsq import retriever
from tfdpsq.run.frame import records
from tfdpsq.run.frame.artefacts import Artefact
from tfdpsq.validation import DataError, InputError, shown

DOCUMENTS, QUERIES = "documents", "queries"
# The setting of `embed` that names the texts.
_SETTING = {DOCUMENTS: "corpus", QUERIES: "queries"}


class Embeddings:
    """Embeddings of some texts, found by id, scaled to unit length."""

    def __init__(self, artefact: Artefact, setting: str, texts: str):
        """Opens the embeddings of `texts`, DOCUMENTS or QUERIES; reads none.

        Raises:
          InputError: there are none.
          DataError: they are damaged.
        """
        self.place = f"{setting} is {artefact.path}"  # for errors
        folder = os.path.join(artefact.path, texts)
        if not os.path.isdir(folder):
            raise InputError(
                f"{self.place}, which has no directory {texts!r}. Give what embed or "
                "retriever.VectorStore wrote."
            )
        self.store = retriever.VectorStore(folder)
        self.encoder: str = self.store.encoder  # that of documents and queries
        self._texts = texts
        record = records.read_stage(artefact.path) or {}
        self._depends = record.get("depends", {})
        self.by_embed = record.get("stage") == "embed"
        if self.by_embed:
            dtype = self._depends["settings"]["dtype"]
            self.encoder = f"{self._depends['inputs']['retriever']} in {dtype}"

    @functools.cached_property
    def _rows(self) -> dict[str, int]:
        """The row of each text."""
        found = {name: row for row, name in enumerate(self.store.ids())}
        if len(found) != self.store.size:
            raise DataError(
                self.store.directory, "an id comes twice", "Embed each text once."
            )
        return found

    def take(self, names: Sequence[str]) -> np.ndarray:
        """Returns the embeddings [n, D] of some texts.

        Raises:
          InputError: one has none.
          DataError: an id comes twice.
        """
        self.require(names)
        return unit_length(self.store.vectors[[self._rows[name] for name in names]])

    def chunks(self, rows: int) -> Iterator[tuple[list[str], np.ndarray]]:
        """Yields ids and embeddings of at most `rows` texts at a time, in order."""
        for names, vectors in self.store.chunks(rows):
            yield names, unit_length(vectors)

    def require(self, names: Iterable[str], of: str = "") -> None:
        """Refuses ids without an embedding; with `of`, their owner, any others, too."""
        count = 0
        for name in names:
            count += 1
            if name not in self._rows:
                raise InputError(
                    f"{self.place}, which has no embedding of {shown(name)}. Embed all "
                    "texts, under their ids."
                )
        if of and count != self.store.size:
            raise InputError(
                f"{self.place}, with {self.store.size} embeddings, but {of} has {count}"
                f" {self._texts}. Embed these, and no others."
            )

    def require_made_of(self, fingerprint: str, path: str, split: str = "") -> None:
        """Refuses what `embed` made of other texts; their ids may be the same.

        `fingerprint` is of the corpus, or of private pairs under this workdir's key.
        """
        if not self.by_embed:
            return
        found = self._depends["inputs"][_SETTING[self._texts]]
        if (found, self._depends["settings"].get("split", "")) != (fingerprint, split):
            whose = f"split {split!r} of {path}" if split else path
            raise InputError(
                f"{self.place}, which was not made of the {self._texts} of {whose} in "
                "their present state. Embed them again, private ones in this workdir."
            )


def require_one_encoder(documents: Embeddings, queries: Embeddings) -> None:
    """Refuses embeddings by two encoders, whose inner products mean nothing."""
    found = [(each.encoder, each.store.width) for each in (documents, queries)]
    if found[0] != found[1]:
        each = " and ".join(f"{name!r} ({width} dimensions)" for name, width in found)
        raise InputError(
            f"{documents.place} and {queries.place}, by {each}: they are not by one "
            "encoder. Embed both by the same."
        )


def unit_length(vectors: np.ndarray) -> np.ndarray:
    """Scales rows to unit length, which leaves cosines as they are; zeros stay."""
    exact = vectors.astype(np.float64)
    length = np.linalg.norm(exact, axis=1, keepdims=True)
    return (exact / np.where(length > 0, length, 1.0)).astype(np.float32)

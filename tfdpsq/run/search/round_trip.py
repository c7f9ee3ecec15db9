"""The round trip of `filter`: does a synthetic query retrieve its own document?

A query passes if the document that it was written for is among its k best of the corpus
(Dai et al. 2022, *Promptagator*, arXiv:2209.11755, section 3.2), by BM25 or
by a retriever. The corpus is not in memory: BM25 reads it twice for every chunk of
queries; a retriever's embeddings are on disk and read by blocks.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from tfdpsq import evaluation, retriever, validation
from tfdpsq.data.sets import SyntheticQuery
from tfdpsq.retriever.encoding import progress_bar
from tfdpsq.retriever.store import encoder_fingerprint
from tfdpsq.run.core import layout, sources

BM25 = "bm25"

Test = Callable[[list[SyntheticQuery]], Iterable[bool]]


def comes_back(own: Any, corpus: str, batch_size: int, scratch: pathlib.Path) -> Test:
    """Returns the test of which rows pass.

    `own` is `round_trip` of `filter`; `scratch` is a directory for embeddings of the
    corpus, removed by the caller.

    Returns:
      The test, for as many rows at a time as fit into memory. It raises InputError for
      a row whose document is not in the corpus.

    Raises:
      DataError: a damaged corpus.
    """
    if own.retriever == BM25:
        return _by_words(corpus, own.k)
    return _by_vectors(own, corpus, batch_size, scratch)


def _by_words(corpus: str, k: int) -> Test:
    beir = sources.open_beir(corpus)
    index = evaluation.BM25(lambda: ((d.id, d.content) for d in beir.documents()))
    known = {hash(document.id) for document in beir.documents()}

    def test(rows: list[SyntheticQuery]) -> list[bool]:
        wanted = {row.document_id for row in rows}
        missing = {name for name in wanted if hash(name) not in known}
        _require_none(missing, rows, corpus)
        found = index.search({row.query_id: row.query for row in rows}, k)
        return [row.document_id in found.get(row.query_id, {}) for row in rows]

    return test


def _by_vectors(own: Any, corpus: str, batch_size: int, scratch: pathlib.Path) -> Test:
    model = retriever.load(pathlib.Path(own.retriever) / layout.RETRIEVER_MODEL)
    embedder = retriever.Embedder(model, "document", batch_size)
    texts = ((d.id, d.content) for d in sources.open_beir(corpus).documents())
    with progress_bar("document") as bar:
        held = retriever.VectorStore.write(
            scratch / "documents",
            encoder_fingerprint(model),
            model.config.embedding_dim,
            embedder.chunks(texts, done=bar.update),
        )
    embedder = retriever.Embedder(model, "query", batch_size)

    def test(rows: list[SyntheticQuery]) -> Iterable[bool]:
        wanted = {row.document_id for row in rows}
        places = held.places(wanted)
        _require_none(wanted - places.keys(), rows, corpus)
        asked = ((row.query_id, row.query) for row in rows)
        queries = np.concatenate([found for _, found in embedder.chunks(asked)])
        _, best = held.search(queries, own.k)
        wanted_places = np.array([[places[row.document_id]] for row in rows])
        return (best == wanted_places).any(axis=1)

    return test


def _require_none(
    missing: Collection[str], rows: list[SyntheticQuery], corpus: str
) -> None:
    """Refuses the first row whose document is missing."""
    row = next((row for row in rows if row.document_id in missing), None)
    if row is not None:
        raise validation.InputError(
            f"query {row.query_id!r} was written for document {row.document_id!r}, "
            f"which {corpus} does not have. Give the corpus that the set was written "
            "for."
        )

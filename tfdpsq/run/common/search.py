"""Searches of a corpus: by words, by retrievers, by embeddings that exist.

The corpus streams by: memory holds a chunk of it, for every exact index and for BM25.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdpsq import evaluation, retriever
from tfdpsq.data import BeirDirectory
from tfdpsq.data.texts import Document
from tfdpsq.retriever.encoding import progress_bar
from tfdpsq.retriever.index import ROWS, search_chunks
from tfdpsq.retriever.store import encoder_fingerprint
from tfdpsq.run.common.embeddings import Embeddings, unit_length
from tfdpsq.run.common.kinds import ADAPTER_FILE, MODEL, System
from tfdpsq.run.frame import records
from tfdpsq.validation import InputError

BM25, EMBEDDINGS = System.words
Run = dict[str, dict[str, float]]
Scope = Callable[[], contextlib.AbstractContextManager]


def bm25(beir: BeirDirectory) -> evaluation.BM25:
    """Returns BM25 over a corpus, which is not in memory if it is large."""
    return evaluation.BM25(lambda: ((d.id, d.content) for d in beir.documents()))


class Retrievers:
    """Retrievers that embed texts to search for them; one model in memory at a time."""

    def __init__(
        self, paths: Mapping[str, str], batch_size: int, dtype: str, scope: Scope
    ):
        """Takes what `train_retriever` wrote, by name; loads nothing yet."""
        self._paths, self._batch_size, self._dtype = paths, batch_size, dtype
        self._scope = scope
        # Fingerprints of the document towers of those that have embedded queries.
        self.towers: dict[str, str] = {}
        self._vectors: dict[tuple[str, str], np.ndarray] = {}
        self._loaded = ""
        self._model: Any = None
        self._embedder: Any = None

    def embed(self, name: str, part: str, queries: Mapping[str, str]) -> np.ndarray:
        """Returns the embeddings [Q, D] of queries, {id: text}, of a part, once."""
        if (part, name) not in self._vectors:
            self._load(name)
            self.towers[name] = encoder_fingerprint(self._model, "document")
            with self._scope():
                self._vectors[part, name] = retriever.encode_texts(
                    self._model, queries.values(), "query", self._batch_size
                )
        return self._vectors[part, name]

    def search(
        self,
        names: Sequence[str],
        part: str,
        queries: Mapping[str, str],
        k: int,
        documents: Callable[[], Iterable[Document]],
        index: str,
    ) -> Iterator[tuple[str, Run]]:
        """Yields the k best documents for `queries`, {id: text}, by some retrievers.

        Those that differ in their query towers alone share one pass over `documents`.
        """
        together = dict[str, dict[str, np.ndarray]]()
        for name in names:
            vectors = self.embed(name, part, queries)
            together.setdefault(self.towers[name], {})[name] = vectors
        for vectors_of in together.values():
            self._load(next(iter(vectors_of)))
            with progress_bar("document") as bar:
                texts = ((d.id, d.content) for d in documents())
                chunks = self._embedder.chunks(texts, ROWS, bar.update)
                found = search_chunks(vectors_of, chunks, k, index)
            for name, best in found.items():
                yield name, retriever.as_run(list(queries), best.scores, best.ids)

    def _load(self, name: str) -> None:
        if self._loaded == name:
            return
        self._model = self._embedder = None
        path = pathlib.Path(self._paths[name]) / MODEL
        with self._scope():
            self._model = retriever.load(path, self._dtype)
            self._embedder = retriever.Embedder(
                self._model, "document", self._batch_size
            )
        self._loaded = name


def adapted(path: str, queries: np.ndarray, documents: Embeddings) -> np.ndarray:
    """Maps embeddings [n, D] of queries as `layers.QueryAdapter` does.

    `path` is what `train_adapter` wrote, or "embeddings" for the queries as they are.

    Raises:
      InputError: it was trained for another encoder than that of the documents.
    """
    if path == EMBEDDINGS:
        return queries
    matrix = np.load(pathlib.Path(path) / ADAPTER_FILE)
    encoder = (records.read_stage(path) or {"result": {}})["result"].get("encoder")
    if (encoder, len(matrix)) != (documents.encoder, documents.store.width):
        raise InputError(
            f"{path} maps embeddings by {encoder!r} of {len(matrix)} dimensions, but "
            f"{documents.place}, by {documents.encoder!r} of {documents.store.width}. "
            "Give embeddings by the encoder that it was trained for."
        )
    return unit_length(queries @ matrix)


def merged(parts: Iterable[Run], k: int) -> Run:
    """Returns the k best documents of each query over consecutive parts of a corpus.

    Of equal scores the first document wins, in a part and across them, so that the cuts
    change nothing.
    """
    best: Run = {}
    for part in parts:
        for query, hits in part.items():
            both = [*best.get(query, {}).items(), *hits.items()]
            best[query] = dict(sorted(both, key=lambda hit: -hit[1])[:k])
    return best

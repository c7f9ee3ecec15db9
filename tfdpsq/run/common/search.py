"""Searches of a corpus: by words, by retrievers, by embeddings that exist.

The corpus streams by. Memory holds a chunk of it, for every exact kind of index and for
BM25; only ScaNN's tree ("scann") needs all embeddings at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdpsq import evaluation, retriever, validation
from tfdpsq.data import BeirDirectory
from tfdpsq.data.sets import SyntheticQuery
from tfdpsq.data.texts import Document
from tfdpsq.retriever.encoding import progress_bar
from tfdpsq.retriever.index import EXACT, ROWS, KBest, search_chunks
from tfdpsq.retriever.store import encoder_fingerprint
from tfdpsq.run.common.embeddings import Embeddings, unit_length
from tfdpsq.run.frame import records
from tfdpsq.run.frame.artefacts import ADAPTER_FILE, MODEL, Artefact, Retriever, System
from tfdpsq.validation import DataError, InputError

BM25, EMBEDDINGS = System.WORDS
Run = dict[str, dict[str, float]]
Scope = Callable[[], contextlib.AbstractContextManager]
_REMEDY = "Train the adapter again."


def bm25(beir: BeirDirectory) -> evaluation.BM25:
    """Returns BM25 over a corpus, which is not in memory if it is large."""
    return evaluation.BM25(lambda: ((d.id, d.content) for d in beir.documents()))


def require_retriever(setting: str, system: Artefact) -> None:
    """Refuses, of what may be searched with, all but BM25 and retrievers."""
    if system.path == BM25 or system.promised or Retriever.is_at(system.path):
        return
    raise InputError(
        f"{setting} is {system.path}, which embeds no text. Give {BM25!r}, or "
        f"{Retriever.wanted}."
    )


class Retrievers:
    """Retrievers that embed a corpus to search it; one model in memory at a time.

    Those that differ in their query towers alone are searched together, so that the
    documents are embedded once.
    """

    def __init__(
        self, paths: Mapping[str, str], batch_size: int, dtype: str, scope: Scope
    ):
        """Takes what `train_retriever` wrote, by name; loads nothing yet."""
        self._paths, self._batch_size, self._dtype = paths, batch_size, dtype
        self._scope = scope
        self._towers: dict[str, str] = {}  # fingerprints of document towers
        self._vectors: dict[tuple[str, str], np.ndarray] = {}
        self._loaded: tuple[str, retriever.TwoTower] | None = None
        self._embedder: tuple[str, retriever.Embedder] | None = None

    def search(
        self,
        part: str,
        queries: Mapping[str, str],
        k: int,
        documents: Callable[[], Iterable[Document]],
        index: str,
        stored: Mapping[str, Embeddings] | None = None,
    ) -> Iterator[tuple[str, KBest]]:
        """Yields the k best documents by each retriever.

        Args:
          part: name of the queries, which are embedded once.
          queries: {query id: text}.
          k: documents a query.
          documents: streams the documents; called once for each document tower.
          index: see `retriever.index.top_k_layer`.
          stored: embeddings of the documents by some of the retrievers.

        Raises:
          InputError: embeddings by another retriever.
        """
        stored, together = stored or {}, dict[tuple[str, str], list[str]]()
        for name in self._paths:
            self._embed(part, queries, name)
            where = str(stored[name].store.directory) if name in stored else ""
            together.setdefault((self._towers[name], where), []).append(name)
        for (tower, where), names in together.items():
            if where:
                retriever.VectorStore(where, tower)  # refuses another's
                chunks = stored[names[0]].chunks(ROWS)
            else:
                chunks = self._embedded(names[0], documents())
            vectors = {name: self._vectors[part, name] for name in names}
            yield from search_chunks(vectors, chunks, k, index).items()

    def _embed(self, part: str, queries: Mapping[str, str], name: str) -> None:
        if (part, name) in self._vectors:
            return
        with self._scope():
            model = self._model(name)
            self._towers[name] = encoder_fingerprint(model, "document")
            self._vectors[part, name] = retriever.encode_texts(
                model, queries.values(), "query", self._batch_size
            )

    def _embedded(
        self, name: str, documents: Iterable[Document]
    ) -> Iterator[tuple[list[str], np.ndarray]]:
        with self._scope():
            model = self._model(name)
            if self._embedder is None or self._embedder[0] != name:
                made = retriever.Embedder(model, "document", self._batch_size)
                self._embedder = name, made
        with progress_bar("document") as bar:
            texts = ((d.id, d.content) for d in documents)
            yield from self._embedder[1].chunks(texts, ROWS, bar.update)

    def _model(self, name: str) -> retriever.TwoTower:
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = self._embedder = None
            made = retriever.load(pathlib.Path(self._paths[name]) / MODEL, self._dtype)
            self._loaded = name, made
        return self._loaded[1]


def by_embeddings(
    adapter: str,
    documents: Embeddings,
    queries: Embeddings,
    names: Sequence[str],
    k: int,
    index: str,
) -> Run:
    """Searches by cosines of embeddings that exist, exactly.

    Args:
      adapter: what `train_adapter` wrote, or "embeddings" for the queries as they are.
      documents: of the whole corpus.
      queries: that hold those of `names`.
      names: ids of queries.
      k: documents a query.
      index: see `retriever.index.top_k_layer`.
    """
    vectors = queries.take(names)
    if adapter != EMBEDDINGS:  # as `layers.QueryAdapter` does
        vectors = unit_length(vectors @ adapter_of(adapter, documents))
    exact = index if index in EXACT else EXACT[0]
    best = search_chunks({"": vectors}, documents.chunks(ROWS), k, exact)[""]
    return retriever.as_run(names, best.scores, best.ids)


def adapter_of(path: str, documents: Embeddings) -> np.ndarray:
    """Loads an adapter's matrix, [D, D] float32.

    Raises:
      InputError: it was trained for another encoder than that of the documents.
      DataError: it is damaged.
    """
    file = pathlib.Path(path) / ADAPTER_FILE
    try:
        matrix = np.load(file)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(file, f"cannot be read ({error})", _REMEDY) from error
    if matrix.ndim != 2 or len(set(matrix.shape)) > 1 or not np.isfinite(matrix).all():
        raise DataError(file, "holds no square matrix of finite numbers", _REMEDY)
    encoder = (records.read_stage(path) or {"result": {}})["result"].get("encoder")
    if (encoder, len(matrix)) != (documents.encoder, documents.store.width):
        raise InputError(
            f"{path} maps embeddings by {encoder!r} of {len(matrix)} dimensions, but "
            f"{documents.place}, by {documents.encoder!r} of {documents.store.width}. "
            "Give embeddings by the encoder that it was trained for."
        )
    return matrix


# -- Results of a shard ----------------------------------------------------------------


def arrays_of(name: str, run: Run, queries: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns a system's run as arrays.

    They are "NAME/scores" [Q, k] float32, -inf for none, and "NAME/ids" [Q, k] str.
    """
    k = max(map(len, run.values()), default=0)
    scores = np.full([len(queries), k], -np.inf, np.float32)
    ids = np.full([len(queries), k], "", object)
    for row, query in enumerate(queries):
        hits = run.get(query, {})
        ids[row, : len(hits)], scores[row, : len(hits)] = [*hits], [*hits.values()]
    return {f"{name}/scores": scores, f"{name}/ids": ids.astype(str)}


def write_arrays(path: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays to an `.npz` file, on any file system."""
    archive = io.BytesIO()  # it needs a file that can seek
    np.savez_compressed(archive, **arrays)
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(archive.getvalue())


def read_arrays(path: str) -> Mapping[str, np.ndarray]:
    """Opens what `write_arrays` wrote; each array is read where it is used."""
    with tf.io.gfile.GFile(path, "rb") as file:
        return np.load(io.BytesIO(file.read()))


def merged(paths: Iterable[str], name: str, queries: Sequence[str], k: int) -> Run:
    """Returns the k best documents of a system over consecutive parts of a corpus.

    Args:
      paths: `.npz` files with "NAME/scores" and "NAME/ids"; others are passed over.
      name: of the system.
      queries: ids, in the order of the rows.
      k: documents a query.
    """
    best = KBest(len(queries), k)
    for path in paths:
        arrays = read_arrays(path)
        if f"{name}/scores" in arrays:
            scores, ids = arrays[f"{name}/scores"], arrays[f"{name}/ids"]
            # Of equal scores the first document wins, in a part and across them.
            rows = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
            best.merge(scores, rows, ids.astype(object), scores.shape[1])
    return retriever.as_run(queries, best.scores, best.ids)


# -- Round trips -----------------------------------------------------------------------


def comes_back(
    judge: str, k: int, corpus: str, beir: BeirDirectory, scratch: str, batch_size: int
) -> Callable[[list[SyntheticQuery]], Iterable[bool]]:
    """Returns a test: is a query's own document among its k best of the corpus?

    The round trip of Dai et al. 2022, *Promptagator*, arXiv:2209.11755, section 3.2.

    Args:
      judge: "bm25", or what `train_retriever` wrote.
      k: the lowest rank that passes.
      corpus: what holds the documents, for errors.
      beir: the same.
      scratch: a directory for their embeddings.
      batch_size: texts embedded at a time.

    Returns:
      Takes as many rows as fit into memory; raises InputError for a row whose document
      is not in the corpus.
    """

    def require_known(rows: Sequence[SyntheticQuery], known: Callable) -> None:
        for row in rows:
            if not known(row.document_id):
                raise InputError(
                    f"query {row.query_id!r} was written for document "
                    f"{validation.shown(row.document_id)}, which {corpus} does not "
                    "have. Give the corpus that the set was written for."
                )

    if judge == BM25:
        words = bm25(beir)
        hashes = {hash(document.id) for document in beir.documents()}

        def by_words(rows: list[SyntheticQuery]) -> list[bool]:
            require_known(rows, lambda name: hash(name) in hashes)
            found = words.search({row.query_id: row.query for row in rows}, k)
            return [row.document_id in found.get(row.query_id, {}) for row in rows]

        return by_words
    model = retriever.load(pathlib.Path(judge) / MODEL)
    embedder = retriever.Embedder(model, "document", batch_size)
    texts = ((document.id, document.content) for document in beir.documents())
    with progress_bar("document") as bar:
        held = retriever.VectorStore.write(
            os.path.join(scratch, "documents"),
            encoder_fingerprint(model),
            model.config.embedding_dim,
            embedder.chunks(texts, done=bar.update),
        )
    asking = retriever.Embedder(model, "query", batch_size)

    def by_vectors(rows: list[SyntheticQuery]) -> Iterable[bool]:
        places = held.places({row.document_id for row in rows})
        require_known(rows, places.__contains__)
        texts = ((row.query_id, row.query) for row in rows)
        vectors = np.concatenate([found for _, found in asking.chunks(texts)])
        _, best = held.search(vectors, k)
        own = np.array([[places[row.document_id]] for row in rows])
        return (best == own).any(axis=1)

    return by_vectors

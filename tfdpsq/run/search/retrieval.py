"""Retrieval by systems, for `evaluate` and `zero_shot`, while the corpus streams by.

Memory holds one chunk of the corpus, for every exact kind of index and for BM25. Only
ScaNN's tree ("scann") needs all embeddings at once. `evaluate` searches a corpus by
shards, `zero_shot` each of its sets at once.
"""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import evaluation, retriever, validation
from tfdpsq.data import BeirDirectory
from tfdpsq.data.texts import Document
from tfdpsq.retriever.encoding import progress_bar
from tfdpsq.retriever.index import ROWS, KBest, search_chunks
from tfdpsq.retriever.store import encoder_fingerprint
from tfdpsq.run.core import layout, sources, workdir
from tfdpsq.run.devices import strategy
from tfdpsq.run.passes import corpus_shards, embedding, passes
from tfdpsq.run.passes.shards import ShardDirectory, ShardWriter
from tfdpsq.run.search import adapted, hybrid, systems

_BEST = "npz"
Run = dict[str, dict[str, float]]


def retrieve(
    searched: systems.Systems,
    beir: BeirDirectory,
    queries: Mapping[str, str],
    k: int,
    known: Mapping[str, KBest] | None = None,
) -> Iterator[tuple[str, Run, dict[str, Any]]]:
    """Yields the results of each system.

    Retrievers that differ in their query towers alone are searched together, so that
    the documents are embedded once.

    `queries` are {query id: text}; `known` are results that exist already, see
    `merged`.

    Yields:
      The system's name, its run, and the settings that its scores depend on.

    Raises:
      InputError: embeddings of another encoder, or of other documents.
    """
    found = dict(known or {})
    dense = Retrievers(searched, queries, k)
    left = list(searched.retrievers)
    for name, path in searched.paths.items():
        if path == systems.BM25:
            words = evaluation.BM25(
                lambda: ((d.id, d.content) for d in beir.documents())
            )
            yield name, words.search(queries, k, progress=True), words.settings
            continue
        if name in searched.queries:
            asked, documents = hybrid.without_fits(queries), beir.documents()
            nearest = adapted.search(searched, name, asked, k, documents)
            yield name, retriever.as_run(list(asked), nearest.scores, nearest.ids), {}
            continue
        if name not in found:
            missing = [each for each in left if each not in found]
            found.update(dense.search(dense.one_tower(name, missing), beir.documents))
        left = [each for each in left if each != name]
        best = found.pop(name)
        yield name, retriever.as_run(list(queries), best.scores, best.ids), {}


class Retrievers:
    """Embedding systems, searched for some queries; one model in memory at a time."""

    def __init__(self, searched: systems.Systems, queries: Mapping[str, str], k: int):
        """Loads nothing yet."""
        self._systems, self._queries, self._k = searched, queries, k
        self._vectors: dict[str, np.ndarray] = {}  # system -> [Q, D]
        self._makers: dict[str, str] = {}  # system -> fingerprint of document tower
        self._model: tuple[str, retriever.TwoTower] | None = None
        self._embedder: tuple[str, retriever.Embedder] | None = None

    def one_tower(self, name: str, among: Iterable[str]) -> list[str]:
        """Returns the systems that have the same document tower as `name`."""
        self._embed_queries()
        maker = self._makers[name]
        return [each for each in among if self._makers[each] == maker]

    def search(
        self, one_tower: list[str], documents: Callable[[], Iterable[Document]]
    ) -> dict[str, KBest]:
        """Returns the best documents by systems with one document tower.

        `documents` is called once, unless their embeddings exist.
        """
        self._embed_queries()
        return search_chunks(
            {name: self._vectors[name] for name in one_tower},
            self._embedded(one_tower, documents),
            self._k,
            self._systems.index,
        )

    def _embed_queries(self) -> None:
        if self._makers:
            return
        for name in self._systems.retrievers:
            model = self._loaded(name)
            self._makers[name] = encoder_fingerprint(model)
            with strategy.here():
                self._vectors[name] = retriever.encode_texts(
                    model, self._queries.values(), "query", self._systems.batch_size
                )

    def _embedded(
        self, one_tower: list[str], documents: Callable[[], Iterable[Document]]
    ) -> Iterator[tuple[list[str], np.ndarray]]:
        """Yields ids and embeddings of all documents, a chunk at a time."""
        indexes = self._systems.indexes
        made = next((indexes[name] for name in one_tower if indexes.get(name)), "")
        if made:
            held = retriever.VectorStore(
                pathlib.Path(made) / embedding.DOCUMENTS, self._makers[one_tower[0]]
            )
            yield from held.chunks(ROWS)
            return
        if self._embedder is None or self._embedder[0] != one_tower[0]:
            self._embedder = None
            model = self._loaded(one_tower[0])
            with strategy.here():
                embedder = retriever.Embedder(
                    model, "document", self._systems.batch_size
                )
            self._embedder = one_tower[0], embedder
        texts = ((d.id, d.content) for d in documents())
        with progress_bar("document") as bar:
            yield from self._embedder[1].chunks(texts, ROWS, bar.update)

    def _loaded(self, name: str) -> retriever.TwoTower:
        if self._model is None or self._model[0] != name:
            self._model = self._embedder = None
            path = pathlib.Path(self._systems.paths[name])
            with strategy.here():
                self._model = (
                    name,
                    retriever.load(path / layout.RETRIEVER_MODEL, self._systems.dtype),
                )
        return self._model[1]


def queries_of(
    data: str, split: str, fits: Sequence[hybrid.FitSet | None] = ()
) -> dict[str, str]:
    """Returns all queries to search for: {query id: text}.

    They are the judged ones of a split, and those that weights are fitted on, so that
    each document is embedded once for all.
    """
    beir = sources.open_beir(data)
    qrels = beir.qrels(split)
    judged = {name: text for name, text in beir.read_queries() if name in qrels}
    for fit in filter(None, fits):
        judged.update(fit.read()[0])
    return judged


def start_worker(
    searched: systems.Systems,
    data: str,
    split: str,
    k: int,
    corpus: corpus_shards.CorpusShards | None,
    fits: Sequence[hybrid.FitSet | None] = (),
) -> passes.MakeShard:
    """Embeds the queries of a split; returns a function that searches a shard."""
    queries = queries_of(data, split, fits) if corpus is not None else {}
    dense = Retrievers(searched, queries, k)

    def make(index: int, out: ShardWriter) -> None:
        arrays = {}
        left = searched.by_shards
        while left and corpus is not None:
            one_tower = dense.one_tower(left[0], left)
            left = [name for name in left if name not in one_tower]
            for name, best in dense.search(
                one_tower, lambda: corpus.read(index)
            ).items():
                arrays[f"{name}/scores"] = best.scores
                arrays[f"{name}/places"] = best.places
                arrays[f"{name}/ids"] = best.ids.astype(str)
                out.count = best.size
        archive = io.BytesIO()  # it needs a file that can seek
        np.savez_compressed(archive, **arrays)
        with tf.io.gfile.GFile(out.path(_BEST), "wb") as file:
            file.write(archive.getvalue())

    return make


def merged(names: list[str], k: int, shards: ShardDirectory) -> dict[str, KBest]:
    """Merges the results of systems in all shards, for `retrieve`.

    Raises:
      DamagedShard: a shard was changed after it was made.
    """
    found: dict[str, KBest] = {}
    for index in range(shards.spec.shards):
        with shards.reading(index) as mark:
            with tf.io.gfile.GFile(shards.path(index, _BEST), "rb") as file:
                arrays = np.load(io.BytesIO(file.read()))
        for name in names:
            scores = arrays[f"{name}/scores"]
            if name not in found:
                found[name] = KBest(len(scores), k)
            found[name].merge(
                scores,
                arrays[f"{name}/places"],
                arrays[f"{name}/ids"].astype(object),
                mark.count,
            )
    return found


def index_inputs(searched: systems.Systems, data: str) -> dict[str, str]:
    """Returns ids of the existing embeddings, as inputs of a stage.

    Raises:
      InputError: one belongs to no system that needs it, is missing, was computed in
        another dtype, was made of another corpus, or holds documents of a further one.
    """
    found = {}
    given = {name: path for name, path in searched.indexes.items() if path}
    corpus = sources.corpus_fingerprint(data) if given else ""
    for name, path in sorted(given.items()):
        if name in searched.queries:
            continue  # see `adapted.inputs`
        if name not in searched.retrievers:
            raise validation.InputError(
                f"indexes.{name} is {path!r}, but systems has no retriever called "
                f"{name!r}. Correct the name, or take it out of indexes."
            )
        found[f"index {name}"] = workdir.stage_fingerprint(path)
        embedding.require_dtype(f"indexes.{name}", path, searched.dtype)
        stage = workdir.read_json(pathlib.Path(path) / workdir.STAGE_FILE)
        made_of = stage["inputs"].get("corpus")
        if made_of != corpus:
            raise validation.InputError(
                f"indexes.{name} is {path}, which was made of another corpus "
                f"(fingerprint {made_of}) than {data} ({corpus}). Index this "
                "corpus, or leave the index out."
            )
        if stage["result"].get("taken_over"):
            raise validation.InputError(
                f"indexes.{name} is {path}, which took documents over from another "
                "index, and they may differ from those of the corpus. Index the corpus "
                "without a base, or leave the index out."
            )
    return found

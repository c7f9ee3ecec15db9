"""What systems retrieve, for `evaluate` and `zero_shot`: the corpus streams by.

No more of the corpus is in memory than a chunk, for every exact kind of index and for
BM25. Only ScaNN's tree ("scann") has to hold all embeddings to be built.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfdpsq import evaluation, retriever, validation
from tfdpsq.data import BeirDirectory, Tokenizer
from tfdpsq.retriever.nearest import ROWS
from tfdpsq.run import encode, sources, systems, train_retriever, workdir

Run = dict[str, dict[str, float]]


def retrieve(
    config: Any, beir: BeirDirectory, queries: Mapping[str, str], k: int
) -> Iterator[tuple[str, Run, dict[str, Any]]]:
    """What every system finds, one after the other.

    Retrievers that differ in their query towers alone are searched together, so that
    the documents are embedded once.

    Args:
      config: says `systems`, `vocabulary`, `index` and `batch_size`, and may say
        `indexes`: system -> what `index` or `encode` wrote, whose embeddings are taken.
      beir: the documents to search.
      queries: {query id: text}.
      k: documents to find for each.

    Yields:
      The system's name, its run, and the settings that its scores depend on.

    Raises:
      InputError: embeddings of another encoder, or of other documents.
    """
    dense = _Dense(config, beir, queries, k)
    for name, path in config.systems.items():
        if path == systems.BM25:
            run, settings = evaluation.bm25_streamed(
                lambda: ((d.id, d.content) for d in beir.documents()),
                queries,
                k,
                progress=True,
            )
            yield name, run, settings
        else:
            yield name, dense.run(name), {}


class _Dense:
    """Runs of retrievers, of those with one document tower together."""

    def __init__(
        self, config: Any, beir: BeirDirectory, queries: Mapping[str, str], k: int
    ):
        self._config, self._beir, self._queries, self._k = config, beir, queries, k
        self._found: dict[str, Run] = {}
        self._vectors: dict[str, np.ndarray] = {}  # system -> [Q, D]
        self._makers: dict[str, str] = {}  # system -> fingerprint of document tower
        self._loaded: tuple[str, retriever.TwoTower] | None = None  # one at a time

    def run(self, name: str) -> Run:
        """A system's run; each is given out once."""
        if not self._makers:
            self._embed_queries()
        if name not in self._found:
            maker = self._makers[name]
            self._search(name, [n for n, m in self._makers.items() if m == maker])
        return self._found.pop(name)

    def _embed_queries(self) -> None:
        tokenizer = Tokenizer(self._config.vocabulary)
        for name, path in self._config.systems.items():
            if path == systems.BM25:
                continue
            model = self._model(name)
            maker = retriever.encoder_fingerprint(model, tokenizer.fingerprint)
            self._makers[name] = maker
            self._vectors[name] = retriever.encode_texts(
                model,
                self._queries.values(),
                tokenizer,
                "query",
                self._config.batch_size,
            )

    def _search(self, name: str, alike: list[str]) -> None:
        """Finds the runs of systems with one document tower, that of `name`."""
        kind = self._config.index
        if kind == systems.TREE:
            ids, documents = [], []
            for some, vectors in self._documents(name, alike):
                ids.extend(some)
                documents.append(vectors)
            everything = np.concatenate(documents)
            for each in alike:
                self._found[each] = retriever.as_run(
                    list(self._queries),
                    *retriever.search(
                        self._vectors[each], everything, ids, self._k, kind
                    ),
                )
            return
        best = {
            each: retriever.BestDocuments(self._vectors[each], self._k, kind)
            for each in alike
        }
        for some, vectors in self._documents(name, alike):
            for of_one in best.values():
                of_one.add(vectors, some)
        for each, of_one in best.items():
            self._found[each] = retriever.as_run(
                list(self._queries), of_one.scores, of_one.ids
            )

    def _documents(
        self, name: str, alike: list[str]
    ) -> Iterator[tuple[list[str], np.ndarray]]:
        """Ids and embeddings of all documents, a chunk at a time."""
        indexes = self._config.get("indexes", {})
        made = next((indexes[each] for each in alike if each in indexes), "")
        if made:
            held = retriever.DocumentIndex(
                pathlib.Path(made) / encode.DOCUMENTS, self._makers[name]
            )
            held.verify()
            yield from held.documents(ROWS)
            return
        embedder = retriever.Embedder(
            self._model(name),
            Tokenizer(self._config.vocabulary),
            "document",
            self._config.batch_size,
        )
        texts = ((d.id, d.content) for d in self._beir.documents())
        with retriever.progress_bar("document") as bar:
            yield from embedder.chunks(texts, ROWS, bar.update)

    def _model(self, name: str) -> retriever.TwoTower:
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None
            path = pathlib.Path(self._config.systems[name])
            self._loaded = name, retriever.load(path / train_retriever.MODEL)
        return self._loaded[1]


def index_inputs(config: Any) -> dict[str, str]:
    """What identifies the embeddings that are taken as they are, as a stage's inputs.

    Raises:
      InputError: one is of no system that needs any, is not there, was made of another
        corpus, or holds documents of a further one.
    """
    found = {}
    corpus = sources.corpus_fingerprint(config.data) if config.indexes else ""
    for name, path in sorted(config.indexes.items()):
        if config.systems.get(name, systems.BM25) == systems.BM25:
            raise validation.InputError(
                f"indexes.{name} is {path!r}, but systems has no retriever called "
                f"{name!r}. Correct the name, or take it out of indexes."
            )
        found[f"index {name}"] = workdir.stage_fingerprint(path)
        stage = workdir.read_json(pathlib.Path(path) / workdir.STAGE_FILE)
        made_of = stage["inputs"].get("corpus")
        if made_of != corpus:
            raise validation.InputError(
                f"indexes.{name} is {path}, which was made of another corpus "
                f"(fingerprint {made_of}) than {config.data} ({corpus}). Index this "
                "corpus, or leave the index out."
            )
        if stage["result"].get("taken_over"):
            raise validation.InputError(
                f"indexes.{name} is {path}, which took documents over from another "
                "index: they may be others than those of the corpus. Index the corpus "
                "without a base, or leave the index out."
            )
    return found

"""Search by embeddings that exist, as they are or with their queries adapted.

Scores are cosines, which is what `train_adapter` trains.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping

import ml_collections
import numpy as np

from tfdpsq import validation
from tfdpsq.data.texts import Document
from tfdpsq.retriever.index import ROWS, KBest, search_chunks
from tfdpsq.run.core import layout, sources, workdir
from tfdpsq.run.passes import embedding
from tfdpsq.run.passes.given_embeddings import (
    Embeddings,
    of_unit_length,
    require_alike,
)
from tfdpsq.run.search import systems


def open_both(searched: systems.Systems, name: str) -> tuple[Embeddings, Embeddings]:
    """Opens a system's embeddings of documents and queries.

    Raises:
      InputError: there are none, or not by one encoder.
      DataError: they are damaged.
    """
    documents = Embeddings.open(
        f"indexes.{name}", searched.indexes.get(name, ""), embedding.DOCUMENTS
    )
    queries = Embeddings.open(
        f"query_embeddings.{name}", searched.queries[name], embedding.QUERIES
    )
    require_alike(documents, queries)
    return documents, queries


def inputs(
    searched: systems.Systems, data: str, split: str, private: pathlib.Path
) -> dict[str, str]:
    """Returns ids of the embeddings, as inputs of a stage.

    Raises:
      InputError: as `open_both`; other documents or queries than those of `data`; or a
        system that is not an adapter, or one for another encoder.
      DataError: damaged embeddings, or a damaged adapter.
    """
    found = {}
    corpus = sources.corpus_fingerprint(data) if searched.adapted else ""
    for name in sorted(searched.adapted):
        documents, queries = open_both(searched, name)
        documents.require_corpus(corpus)
        queries.require_queries(data, split, private)
        _matrix(name, searched.adapted[name], documents)
        found[f"index {name}"] = documents.store.fingerprint
        found[f"queries {name}"] = sources.keyed_fingerprint(
            queries.store.fingerprint, private
        )
    return found


def search(
    searched: systems.Systems,
    name: str,
    queries: Mapping[str, str],
    k: int,
    documents: Iterable[Document],
) -> KBest:
    """Returns the best documents of each query by one system.

    `queries` are {query id: text}, whose embeddings are looked up; `documents` are all
    of the corpus.

    Raises:
      InputError: a query or document without an embedding, or more embeddings than
        documents.
      DataError: damaged embeddings, or a damaged adapter.
    """
    own, asked = open_both(searched, name)
    own.places().require_all(documents, "the corpus")
    vectors = asked.places().take(list(queries))
    matrix = _matrix(name, searched.adapted[name], own)
    if matrix is not None:  # as `layers.QueryAdapter` does
        vectors = of_unit_length(vectors @ matrix)
    chunks = ((ids, of_unit_length(some)) for ids, some in own.store.chunks(ROWS))
    return search_chunks({name: vectors}, chunks, k, searched.index)[name]


def _matrix(name: str, path: str, documents: Embeddings) -> np.ndarray | None:
    """Returns the matrix of an adapter; `None` for embeddings as they are.

    Raises:
      InputError: there is none, or one for another encoder.
      DataError: it is damaged.
    """
    if path == systems.EMBEDDINGS:
        return None
    file = pathlib.Path(path) / layout.ADAPTER_FILE
    if not file.is_file():
        raise validation.InputError(
            f"systems.{name} is {path}, which holds no {layout.ADAPTER_FILE}, but "
            f"query_embeddings.{name} is set. Give what train_adapter wrote, "
            f"{systems.EMBEDDINGS!r} for the embeddings as they are, or take "
            f"query_embeddings.{name} out."
        )
    try:
        matrix = np.load(file)
    except (OSError, ValueError, EOFError) as error:
        raise validation.DataError(
            file, f"cannot be read ({error})", "Train the adapter again."
        ) from error
    if not isinstance(matrix, np.ndarray):
        raise validation.DataError(
            file, "holds no array but an archive", "Train the adapter again."
        )
    if matrix.dtype != np.float32 or matrix.ndim != 2 or len(set(matrix.shape)) > 1:
        raise validation.DataError(
            file,
            f"holds {matrix.dtype} {matrix.shape}, not a square matrix of float32",
            "Train the adapter again.",
        )
    if not np.isfinite(matrix).all():
        raise validation.DataError(
            file, "holds NaN or infinity", "Train the adapter again."
        )
    encoder = workdir.read_json(file.parent / workdir.STAGE_FILE)["result"].get(
        "encoder"
    )
    if (encoder, len(matrix)) != (documents.encoder, documents.store.width):
        raise validation.InputError(
            f"systems.{name} is {path}, a map of embeddings by {encoder!r} of "
            f"{len(matrix)} dimensions, but indexes.{name} are by "
            f"{documents.encoder!r} of {documents.store.width}. Give embeddings by the "
            "encoder that it was trained for."
        )
    return matrix


def check(config: ml_collections.ConfigDict) -> None:
    """Refuses query embeddings that do not fit the other settings of `evaluate`."""
    given, named = config.query_embeddings, config.systems
    for name, path in given.items():
        if named.get(name, systems.BM25) == systems.BM25:
            raise validation.InputError(
                f"query_embeddings.{name} is {path!r}, but systems has no {name!r} "
                "that embeds. Correct the name, or take it out."
            )
    for name, path in named.items():
        if path == systems.EMBEDDINGS and name not in given:
            raise validation.InputError(
                f"systems.{name} is {path!r}, and query_embeddings.{name} is not set. "
                f"Set it, and indexes.{name}, to directories of embeddings."
            )
    if not given:
        return
    if config.index == systems.TREE:
        raise validation.InputError(
            f"index is {config.index!r}, and query_embeddings is set: embeddings that "
            'exist are searched exactly. Set index to "scann_brute_force".'
        )
    # Reranking needs the queries that it fits on in its base alone.
    fitted = ("fusion", "rerank") if config.rerank.base in given else ("fusion",)
    for setting in fitted:
        if path := config[setting].fit:
            raise validation.InputError(
                f"{setting}.fit is {path!r}, and query_embeddings is set: queries to "
                f"fit weights on have no embeddings. Set {setting}.weight instead."
            )

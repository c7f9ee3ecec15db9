r"""Embed a corpus, or queries, with a retriever; on request export a search of it.

    tfdpsq embed --workdir=OUT --config.retriever=RETRIEVER --config.corpus=BEIR \
        --config.index=scann

Writes `documents/`, embeddings and ids in a `retriever.VectorStore`, for `evaluate`
(`indexes`); and with `index`, `search/`: encoder and index as one SavedModel, text in,
ids and scores out (`retriever.SearchModel`). Documents are public, so this costs no
privacy; but it reveals the retriever, and so carries its certificate.

With `texts = "queries"` it writes `queries/`. Those of a set carry the certificate of
set and retriever. An embedding of a private query reveals its content, nearly to the
word, and no ε covers it: the output is private.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tqdm

from tfdpsq import retriever
from tfdpsq.data.sets import BEIR
from tfdpsq.retriever.index import KINDS
from tfdpsq.retriever.store import encoder_fingerprint
from tfdpsq.run.common import corpus, exported
from tfdpsq.run.common.embeddings import DOCUMENTS, QUERIES
from tfdpsq.run.common.kinds import MODEL, Corpus, Pairs, Retriever
from tfdpsq.run.frame import runner, settings, shards
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import path, setting

SEARCH = "search"
_TOWERS = {DOCUMENTS: "document", QUERIES: "query"}
_EXTENSION = "npz"


class Embed(runner.ShardedStage):
    """Embeds texts shard by shard."""

    name = "embed"
    strategies = ("default", "mirrored", "tpu")

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `embed`."""

        retriever: str = path(Retriever)
        texts: str = setting(DOCUMENTS, choices=(DOCUMENTS, QUERIES))
        corpus: str = path(Corpus, "pydocs", when={"texts": (DOCUMENTS,)})
        queries: str = path(Pairs, "pydocs", when={"texts": (QUERIES,)})
        split: str = setting(
            "test", when={"texts": (QUERIES,)}, help="of private queries"
        )
        strict: bool = setting(False, when={"texts": (QUERIES,)})
        index: str = setting(
            "",
            choices=("", *KINDS),
            when={"texts": (DOCUMENTS,)},
            help="of the search to export; scann is approximate, the others are exact",
        )
        dtype: str = setting("float32", choices=("float32", "mixed_bfloat16"))
        batch_size: int = setting(128, ge=1, speed=True)
        shard_documents: int = setting(
            65_536, ge=1, speed=True, help="texts that are in memory at a time"
        )

    def reads(self, s: Settings, given: Given) -> list[tuple[str, str]]:
        """Private queries can be read from their embeddings."""
        if s.texts == DOCUMENTS or not given["queries"].raw:
            return []
        read = f"the queries of split {s.split!r}"
        return [(read, "their embeddings, and whatever is made from them")]

    def parts(self, c: Context) -> corpus.Parts:
        """Cuts the corpus, or the file of the queries."""
        s, only = c.settings, None
        if s.texts == DOCUMENTS:
            file = str(c.given["corpus"].beir().corpus_file)
        elif c.given["queries"].raw:
            beir = c.given["queries"].beir()
            beir.validate([s.split])
            file, only = str(beir.queries_file), frozenset(beir.qrels(s.split))
        else:
            file = f"{c.given['queries'].path}/{BEIR}/queries.jsonl"
        return corpus.scan(file).cut(s.shard_documents, only=only)

    def start(self, c: Context) -> shards.Make:
        """Loads the retriever."""
        s, parts = c.settings, c.parts
        with c.scope():
            embedder = retriever.Embedder(_load(c), _TOWERS[s.texts], s.batch_size)

        def make(index: int, out: shards.ShardWriter) -> None:
            texts = ((text.id, text.content) for text in parts.read(index))
            name, unit = f"shard {index}", f" {s.texts}"
            with tqdm.tqdm(total=parts.size(index), desc=name, unit=unit) as bar:
                chunks = list(embedder.chunks(texts, done=bar.update))
            with open(out.path(_EXTENSION), "wb") as file:
                if chunks:
                    ids = np.concatenate([names for names, _ in chunks])
                    vectors = np.concatenate([vectors for _, vectors in chunks])
                    np.savez(file, ids=ids, vectors=vectors)
                    out.count = len(ids)

        return make

    def merge(self, c: Context, made: shards.Shards) -> dict[str, Any]:
        """Writes the embeddings of all shards as one store, and the search."""
        s = c.settings
        if s.index:
            exported.start_numbering()
        model = _load(c)

        def chunks() -> Iterator[tuple[list[str], np.ndarray]]:
            for shard in made.paths(_EXTENSION):
                if os.path.getsize(shard):
                    arrays = np.load(shard)
                    yield arrays["ids"].tolist(), arrays["vectors"]

        store = retriever.VectorStore.write(
            c.out / s.texts,
            encoder_fingerprint(model, _TOWERS[s.texts]),
            model.config.embedding_dim,
            chunks(),
        )
        if s.index:
            found = retriever.SearchModel(
                model, list(store.ids()), store.vectors, s.index
            )
            exported.export(found, c.out / SEARCH)
        if self.reads(s, c.given):
            c.counts[s.texts] = store.size
            return {}
        return {s.texts: store.size}


def _load(c: Context) -> retriever.TwoTower:
    return retriever.load(f"{c.given['retriever'].path}/{MODEL}", c.settings.dtype)


STAGE = Embed()

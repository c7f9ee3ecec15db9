r"""Embed a corpus with a retriever, and export both for search.

    python -m tfdpsq.run.index --workdir=OUT --config.retriever=RETRIEVER \
        --config.vocabulary=SPIECE_MODEL --config.corpus=BEIR

Writes `documents/`, embeddings in shards that are searched on disk (see
`retriever.DocumentIndex`), and, unless `kind` is "streamed", `search/`: encoder and
index as one SavedModel, text in, ids and scores out (`retriever.SearchModel`).
`--config.hybrid.weight=0.3` adds BM25 of the corpus, and the signature `search_hybrid`.
`--config.base=INDEX` copies all documents of another index of the same retriever and
embeds those with new ids; it does not notice documents that were changed or removed.
The work is cut into shards, as that of `encode`.

Documents are public, so the index costs no privacy; but it reveals the retriever, and
so carries its certificate.
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import ml_collections

from tfdpsq import evaluation, retriever, validation
from tfdpsq.data.shards import ShardDirectory
from tfdpsq.retriever import serving
from tfdpsq.run.core import acting, command, records, settings, sources, workdir
from tfdpsq.run.passes import embedding, passes, sharded_stages
from tfdpsq.run.search import exported

DOCUMENTS = embedding.DOCUMENTS
SEARCH = exported.SEARCH
STREAMED = "streamed"


SETTINGS: settings.Declaration = {
    **embedding.declared(),
    # An index of the same retriever to extend, or "".
    "base": settings.Text(""),
    # "exact", "scann_brute_force", "scann" (approximate), or "streamed": on
    # disk, for corpora larger than memory.
    "kind": settings.Text("exact", (*serving.KINDS, STREAMED)),
    # The retriever's weight in `search_hybrid`, of which BM25 has the rest, and how
    # many documents of each are fused; see `retriever.SearchModel`. Weight 0 exports
    # none.
    "hybrid": {
        "weight": settings.Number(0.0, 0, 1),
        "depth": settings.Integer(100, 1, 100_000),
    },
}


ACTING = (
    acting.Only("hybrid.weight hybrid.depth", "kind", serving.KINDS),
    acting.Only("hybrid.depth", "hybrid.weight"),
)


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings."""
    return settings.default_config(SETTINGS)


def run(
    config: ml_collections.ConfigDict,
    directory: sharded_stages.Place,
    launch: passes.Launch = passes.ALONE,
) -> dict[str, Any] | None:
    """Runs the stage into `directory` unless it is finished there.

    `directory` may be on another file system; `launch` has the shards of this process.
    Returns what `sharded_stages.run_stage` returns.

    Raises:
      InputError: bad settings; a base made by another retriever, or in another dtype.
      DataError: malformed data, or a damaged base.
    """
    acting.check(config, SETTINGS, ACTING)
    inputs = embedding.check(config.retriever, config.vocabulary)
    certificate = embedding.certificate_of(config.retriever)
    base = sources.fetched(config.base) if config.base else ""
    output = embedding.output_of(directory, config.retriever, certificate, base)
    if base:
        inputs["base"] = workdir.stage_fingerprint(base)
        embedding.require_dtype("base", base, config.dtype)
        if config.hybrid.weight:
            _require_texts(f"{base}/{DOCUMENTS}", config)

    def merge(out: pathlib.Path, shards: ShardDirectory) -> dict[str, Any]:
        if config.kind != STREAMED:
            exported.start_numbering()
        model, tokenizer, maker = embedding.load(
            config.retriever, config.vocabulary, dtype=config.dtype
        )
        if base:
            retriever.DocumentIndex(f"{base}/{DOCUMENTS}", maker).verify()
            shutil.copytree(f"{base}/{DOCUMENTS}", out / DOCUMENTS)
            index = retriever.DocumentIndex(out / DOCUMENTS, maker)
        else:
            index = retriever.DocumentIndex.create(
                out / DOCUMENTS, maker, model.config.embedding_dim
            )
        taken_over = index.size
        embedding.add_shards(index, shards)
        if config.kind != STREAMED:
            ids = list(index.ids())
            retriever.SearchModel(
                model,
                tokenizer,
                ids,
                index.embeddings(),
                config.kind,
                _postings(config.corpus, ids) if config.hybrid.weight else None,
                **config.hybrid,
            ).export(out / SEARCH)
            exported.add_config(out)
        records.write_certificate(out, certificate)
        return {"documents": index.size, "taken_over": taken_over}

    return embedding.run_pass(
        "index", config, inputs, output, merge, launch, config.base
    )


def _postings(corpus: str, ids: Sequence[str]) -> evaluation.Postings:
    """Returns BM25's index of the documents `ids`, by the texts of the corpus."""
    wanted = set(ids)
    texts = ((d.id, d.content) for d in sources.open_beir(corpus).documents())
    return evaluation.BM25(each for each in texts if each[0] in wanted).postings()


def _require_texts(base: str, config: ml_collections.ConfigDict) -> None:
    """Refuses a base with documents whose texts the corpus lacks."""
    known = {document.id for document in sources.open_beir(config.corpus).documents()}
    for name in retriever.DocumentIndex(base).ids():
        if name not in known:
            raise validation.InputError(
                f"base is {config.base}, whose document {validation.shown(name)} is "
                f"not in corpus {config.corpus}: BM25 (hybrid.weight) needs its text. "
                "Give a corpus with the old documents and the new ones, or set "
                "hybrid.weight to 0."
            )


if __name__ == "__main__":
    command.main(run, sharded=True, runs_models=True)

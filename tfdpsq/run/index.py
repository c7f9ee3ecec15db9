r"""Embed a corpus with a retriever, and export both for search.

    python -m tfdpsq.run.index --workdir=OUT --config.retriever=RETRIEVER \
        --config.corpus=BEIR

Writes `documents/`, embeddings in a `retriever.VectorStore`, and, unless `kind` is
"streamed", `search/`: encoder and index as one SavedModel, text in, ids and scores out
(`retriever.SearchModel`). `--config.base=INDEX` copies all documents of an index of
the same retriever and embeds those with new ids; it does not notice documents that were
changed or removed.
The work is cut into shards, as that of `encode`.

Documents are public, so the index costs no privacy; but it reveals the retriever, and
so carries its certificate.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterable
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import retriever
from tfdpsq.retriever.index import KINDS, ROWS
from tfdpsq.run.core import acting, command, records, settings, sources, workdir
from tfdpsq.run.passes import embedding, passes, sharded_stages
from tfdpsq.run.passes.shards import ShardDirectory
from tfdpsq.run.search import exported

DOCUMENTS = embedding.DOCUMENTS
SEARCH = exported.SEARCH
STREAMED = "streamed"


SETTINGS: settings.Declaration = {
    **embedding.declared(),
    # An index of the same retriever to extend, or "".
    "base": settings.Text(""),
    # "brute_force", "scann_brute_force" (both exact), "scann" (approximate), or
    # "streamed": on disk, for corpora larger than memory.
    "kind": settings.Text("brute_force", (*KINDS, STREAMED)),
}


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
    acting.check(config, SETTINGS, ())
    inputs = embedding.check(config.retriever)
    certificate = embedding.certificate_of(config.retriever)
    base = sources.fetched(config.base) if config.base else ""
    output = embedding.output_of(directory, config.retriever, certificate, base)
    if base:
        inputs["base"] = workdir.stage_fingerprint(base)
        embedding.require_dtype("base", base, config.dtype)

    def merge(out: pathlib.Path, shards: ShardDirectory) -> dict[str, Any]:
        if config.kind != STREAMED:
            exported.start_numbering()
        model, maker = embedding.load(config.retriever, dtype=config.dtype)
        earlier: Iterable[tuple[list[str], np.ndarray]] = ()
        taken_over = 0
        if base:
            held = retriever.VectorStore(f"{base}/{DOCUMENTS}", maker)
            earlier, taken_over = held.chunks(ROWS), held.size
        store = retriever.VectorStore.write(
            out / DOCUMENTS,
            maker,
            model.config.embedding_dim,
            itertools.chain(earlier, embedding.read(shards)),
        )
        if config.kind != STREAMED:
            retriever.SearchModel(
                model, list(store.ids()), store.vectors, config.kind
            ).export(out / SEARCH)
            exported.add_config(out / SEARCH)
        records.write_certificate(out, certificate)
        return {"documents": store.size, "taken_over": taken_over}

    return embedding.run_pass(
        "index", config, inputs, output, merge, launch, config.base
    )


if __name__ == "__main__":
    command.main(run, sharded=True, runs_models=True)

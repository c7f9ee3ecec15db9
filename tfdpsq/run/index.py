"""Embed a corpus with a retriever, and export both for search.

    python -m tfdpsq.run.index --workdir=OUT --config.retriever=RETRIEVER \
        --config.vocabulary=SPIECE_MODEL --config.corpus=BEIR

Writes `documents/`, embeddings in shards that are searched on disk (see
`retriever.DocumentIndex`), and, unless `kind` is "streamed", `search/`: encoder and
index as one SavedModel, text in, ids and scores out (`retriever.SearchModel`).
`--config.base=INDEX` copies all documents of another index of the same retriever and
embeds those with new ids; it does not notice documents that were changed or removed.
The work is cut into shards, as that of `encode`.

Documents are public, so the index costs no privacy; but it reveals the retriever, and
so carries its certificate.
"""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import ml_collections
import tensorflow as tf
from tensorflow.python.framework import ops

from tfdpsq import retriever
from tfdpsq.data.shards import ShardDirectory
from tfdpsq.retriever import serving
from tfdpsq.run.core import command, records, settings, sources, workdir
from tfdpsq.run.passes import embedding, passes, sharded_stages

DOCUMENTS = embedding.DOCUMENTS
SEARCH = "search"
STREAMED = "streamed"
# More names than a process creates before it merges.
_ROUND = 1_000_000


SETTINGS: settings.Declaration = {
    **embedding.declared(),
    # An index of the same retriever to extend, or "".
    "base": settings.Text(""),
    # "exact", "scann_brute_force", "scann" (approximate), or "streamed": on
    # disk, for corpora larger than memory.
    "kind": settings.Text("exact", (*serving.KINDS, STREAMED)),
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
    settings.check(config, SETTINGS)
    inputs = embedding.check(config.retriever, config.vocabulary)
    certificate = embedding.certificate_of(config.retriever)
    base = sources.fetched(config.base) if config.base else ""
    output = embedding.output_of(directory, config.retriever, certificate, base)
    if base:
        inputs["base"] = workdir.stage_fingerprint(base)
        embedding.require_dtype("base", base, config.dtype)

    def merge(out: pathlib.Path, shards: ShardDirectory) -> dict[str, Any]:
        if config.kind != STREAMED:
            _number_anew()
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
            retriever.SearchModel(
                model, tokenizer, list(index.ids()), index.embeddings(), config.kind
            ).export(out / SEARCH)
        records.write_certificate(out, certificate)
        return {"documents": index.size, "taken_over": taken_over}

    return embedding.run_pass(
        "index", config, inputs, output, merge, launch, config.base
    )


def _number_anew() -> None:
    """Makes TensorFlow's generated names independent of the process's earlier work.

    An exported model holds names of functions and variables with numbers that count
    what the process did before, such as the shards it made. Keras's counters restart
    (existing models keep their names); TensorFlow's cannot, and go on from the next
    million.
    """
    tf.keras.backend.clear_session()
    while ops.uid() % _ROUND:
        pass


if __name__ == "__main__":
    command.main(run, sharded=True, runs_models=True)

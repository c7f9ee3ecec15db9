"""Stage `index`: embed a corpus with a retriever, to be searched.

    python -m tfdpsq.run.index --config=configs/index.py --workdir=DIR

Writes `documents/`, embeddings in shards that are searched off the disk (see
`retriever.DocumentIndex`), and, unless `kind` is "streamed", `search/`: encoder and
index as one SavedModel, text in, ids and scores out (`retriever.SearchModel`).
`--config.base=INDEX` takes over all documents of another index of the same retriever
and embeds those whose ids it lacks: documents that were changed or taken away since are
not noticed. The work is cut into shards, as that of `encode`.

Documents are public, so the index costs no privacy; but what private queries made of
the retriever shows in it. It carries the retriever's certificate.
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
from tfdpsq.run.core import command, settings, sources, workdir
from tfdpsq.run.passes import embedding, passes, sharded_stages

DOCUMENTS = embedding.DOCUMENTS
SEARCH = "search"
STREAMED = "streamed"
# More than the numbers that a process gives out before it merges.
_ROUND = 1_000_000


SETTINGS: settings.Declaration = {
    **embedding.declared(),
    # An index of the same retriever to add to, or "".
    "base": settings.Text(""),
    # "exact", "scann_brute_force", "scann" (approximate), or "streamed": off
    # the disk, for corpora larger than memory.
    "kind": settings.Text("exact", (*serving.KINDS, STREAMED)),
}


def default_config() -> ml_collections.ConfigDict:
    """The stage's settings."""
    return settings.default_config(SETTINGS)


def run(
    config: ml_collections.ConfigDict,
    directory: sharded_stages.Place,
    launch: passes.Launch = passes.ALONE,
) -> dict[str, Any] | None:
    """Runs the stage into `directory` unless it is finished there.

    Args:
      config: the settings.
      directory: where the output goes: a local path, or one of another file system.
      launch: which shards this process does.

    Returns:
      As `sharded_stages.run_stage`.

    Raises:
      InputError: bad settings; a base made by another retriever.
      DataError: malformed data, or a damaged base.
    """
    settings.check(config, SETTINGS)
    inputs = embedding.check(config)
    output = embedding.output_of(
        directory,
        config.retriever,
        embedding.certificate_of(config.retriever),
        sources.fetched(config.base) if config.base else "",
    )
    if config.base:
        inputs["base"] = workdir.stage_fingerprint(sources.fetched(config.base))

    def merge(out: pathlib.Path, shards: ShardDirectory) -> dict[str, Any]:
        if config.kind != STREAMED:
            _number_anew()
        model, tokenizer, maker = embedding.load(config.retriever, config.vocabulary)
        if config.base:
            base = pathlib.Path(sources.fetched(config.base)) / DOCUMENTS
            retriever.DocumentIndex(base, maker).verify()
            shutil.copytree(base, out / DOCUMENTS)
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
        embedding.write_certificate(out, config.retriever)
        return {"documents": index.size, "taken_over": taken_over}

    return embedding.run_pass(
        "index", config, inputs, output, merge, launch, config.base
    )


def _number_anew() -> None:
    """Lets TensorFlow name what comes next as it would in any other process.

    An exported model holds names of functions and variables, and numbers in them that
    count what the process did before: which shards it made, if any. Keras's begin anew
    (models that are there keep their names); TensorFlow's cannot, and go on from the
    next million.
    """
    tf.keras.backend.clear_session()
    while ops.uid() % _ROUND:
        pass


if __name__ == "__main__":
    command.main(run, sharded=True)

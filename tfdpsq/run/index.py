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

from tfdpsq import retriever, validation
from tfdpsq.data.shards import ShardDirectory
from tfdpsq.privacy import read_certificate
from tfdpsq.retriever import serving
from tfdpsq.run import command, encode, passes, private_training, workdir

DOCUMENTS = encode.DOCUMENTS
SEARCH = "search"
STREAMED = "streamed"


def default_config() -> ml_collections.ConfigDict:
    """The stage's settings."""
    return ml_collections.ConfigDict(
        {
            **encode.default_config(),
            # An index of the same retriever to add to, or "".
            "base": "",
            # "exact", "scann_brute_force", "scann" (approximate), or "streamed": off
            # the disk, for corpora larger than memory.
            "kind": "exact",
        }
    )


def run(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    launch: passes.Launch = passes.ALONE,
) -> dict[str, Any] | None:
    """Runs the stage into `directory` unless it is finished there.

    Args:
      config: the settings.
      directory: where the output goes.
      launch: which shards this process does.

    Returns:
      As `sharded_stages.run_stage`.

    Raises:
      InputError: bad settings; a base made by another retriever.
      DataError: malformed data, or a damaged base.
    """
    validation.one_of("kind", config.kind, (*serving.KINDS, STREAMED))
    inputs = encode.check(config)
    base = ""
    if config.base:
        inputs["base"] = workdir.stage_fingerprint(config.base)
        base = str(pathlib.Path(config.base) / DOCUMENTS)

    def merge(out: pathlib.Path, shards: ShardDirectory) -> dict[str, Any]:
        model, tokenizer, maker = encode.load(config.retriever, config.vocabulary)
        if base:
            retriever.DocumentIndex(base, maker).verify()
            shutil.copytree(base, out / DOCUMENTS)
            index = retriever.DocumentIndex(out / DOCUMENTS, maker)
        else:
            index = retriever.DocumentIndex.create(
                out / DOCUMENTS, maker, model.config.embedding_dim
            )
        taken_over = index.size
        encode.add_shards(index, shards)
        if config.kind != STREAMED:
            retriever.SearchModel(
                model, tokenizer, list(index.ids()), index.embeddings(), config.kind
            ).export(out / SEARCH)
        private_training.write_certificate(out, read_certificate(config.retriever))
        return {"documents": index.size, "taken_over": taken_over}

    return encode.run_pass("index", config, inputs, directory, merge, launch, base)


if __name__ == "__main__":
    command.main(run, sharded=True)

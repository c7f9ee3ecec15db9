r"""Embed a corpus, or queries, with a retriever.

    python -m tfdpsq.run.encode --workdir=OUT --config.retriever=RETRIEVER \
        --config.corpus=BEIR

Writes `documents/`, embeddings and ids in a `retriever.VectorStore`: for `evaluate`
(`indexes`), or to add documents to with `index` (`base`).

The corpus is cut into shards of `shard_documents`, which several commands can share
(`--num_shards=4 --shard_index=0`, ...), or workers of Apache Beam (`--beam
--runner=DirectRunner --direct_num_workers=2 --direct_running_mode=multi_processing`);
see `sharded_stages`. The embeddings do not depend on the division.

Documents are public, so their embeddings cost no privacy; but they reveal the
retriever, and so carry its certificate.

`--config.texts=queries` embeds the queries of a synthetic set or BEIR split named by
`corpus`, and writes `queries/` instead. Those of a set carry the certificate of set and
retriever. Those of a BEIR directory are private unless `private` is False: no ε covers
them, the read is recorded, and they must be in a private directory; see `query_sets`.
"""

from __future__ import annotations

import pathlib
from typing import Any

import ml_collections

from tfdpsq import retriever
from tfdpsq.run.core import acting, command, records, releases, settings, sources
from tfdpsq.run.passes import embedding, passes, query_sets, sharded_stages
from tfdpsq.run.passes.shards import ShardDirectory

SETTINGS: settings.Declaration = {
    **embedding.declared(),
    # Texts of `corpus` to embed: "documents" or "queries".
    "texts": settings.Text(
        embedding.DOCUMENTS, (embedding.DOCUMENTS, embedding.QUERIES)
    ),
    **query_sets.declared(),
}


ACTING = (acting.Only("split private strict", "texts", (embedding.QUERIES,)),)


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings; for those of queries see `query_sets.declared`."""
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
      InputError: bad settings, no retriever, private queries that must not be read, or
        an output outside the private directory.
      DataError: malformed data.
    """
    acting.check(config, SETTINGS, ACTING)
    texts = config.texts
    inputs = embedding.check(config.retriever)
    asked: query_sets.QuerySet | None = None
    certificate = embedding.certificate_of(config.retriever)
    if texts == embedding.QUERIES:
        # Refuses two guarantees, which would have to be added, before any read.
        asked = query_sets.open_queries(
            config, directory, embedding.QUERIES, certificate
        )
        certificate = asked.certificate
    if asked is not None and asked.private:
        output = releases.Output(
            directory,
            releases.PRIVATE,
            "embeddings of private queries",
            config.private_directory,
        )
    else:
        texts_of = sources.fetched(config.corpus) if asked else ""
        output = embedding.output_of(directory, config.retriever, certificate, texts_of)

    def merge(out: pathlib.Path, shards: ShardDirectory) -> dict[str, Any]:
        model, maker = embedding.load(config.retriever, texts, config.dtype)
        store = retriever.VectorStore.write(
            out / texts, maker, model.config.embedding_dim, embedding.read(shards)
        )
        records.write_certificate(out, certificate)
        return {texts: store.size, **({"private": asked.private} if asked else {})}

    of_pass = (
        config
        if asked
        else ml_collections.ConfigDict(
            # Declarations about queries do not affect documents.
            {name: config[name] for name in embedding.declared()}
        )
    )
    return embedding.run_pass(
        "encode", of_pass, inputs, output, merge, launch, asked=asked
    )


if __name__ == "__main__":
    command.main(run, sharded=True, runs_models=True)

r"""Write synthetic queries for public documents with a generator.

    python -m tfdpsq.run.synthesize --workdir=OUT --config.generator=GENERATOR \
        --config.corpus=BEIR

Reads the generator and the corpus's documents, never a private query: the set has the
generator's guarantee and carries its certificate, for any number of queries. With
`documents = "train"` it also reads which documents have private queries; see the
setting. With `histogram` a document has as many queries as those like it have in the
private log, and the certificate is for both. Writes TFRecords and a BEIR directory.

The documents are cut into shards of `shard_documents`, which several commands can share
(`--num_shards=4 --shard_index=0`, …), or workers of Apache Beam (`--beam
--runner=...`); see `sharded_stages`. The set does not depend on the division.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import ml_collections
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import (
    SyntheticQuery,
    decode_query,
    encode_query,
    write_synthetic,
)
from tfdpsq.generator import T5QueryGenerator, checkpoints
from tfdpsq.generator.samplers import LEAST_TEMPERATURE, sampler_of
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run.core import (
    acting,
    command,
    layout,
    releases,
    settings,
    sources,
    workdir,
)
from tfdpsq.run.devices import strategy
from tfdpsq.run.passes import (
    corpus_plan,
    corpus_shards,
    document_rates,
    pass_progress,
    passes,
    sharded_stages,
)
from tfdpsq.run.passes.shards import ShardDirectory, ShardWriter
from tfdpsq.run.reporting import data_card

_EXTENSION = "tfrecord"
DOCUMENTS = ("corpus", "train")
# Recorded with every set that was written for training documents alone.
TRAINING_DOCUMENTS_READ = {
    "what": "which documents have private training queries, declared to be public",
    "where": "which documents the set has queries for",
}


SETTINGS: settings.Declaration = {
    # A directory in any format that `convert` reads, or a preset's name.
    "generator": settings.Text(""),
    "corpus": settings.Text(sources.PYDOCS, required=True),
    # "train": the documents of the pairs of `split` alone, as in the paper. Which they
    # are is a private read that no epsilon covers, so they must be declared public.
    "documents": settings.Text("corpus", DOCUMENTS),
    "split": settings.Text("train", required=True),
    "training_documents_are_public": settings.Flag(False),
    # An output of `histogram` that the generator was trained after. The set has as many
    # queries as without, for other documents.
    "histogram": settings.Text(""),
    "max_documents": settings.Integer(0, 0, 10**15),
    "samples_per_document": settings.Integer(1, 1, 1000000),
    # Most tokens of a query; 0 is as many as the generator was trained with.
    "max_length": settings.Integer(0, 0, settings.TOKENS),
    "temperature": settings.Number(1.0, LEAST_TEMPERATURE, 1e6, zero=True),
    "top_k": settings.Integer(0, 0),
    "top_p": settings.Number(0.8, 0, 1, low_open=True),
    "batch_size": settings.Integer(64),
    # "mixed_bfloat16" is faster on machines that support it; the text differs.
    "dtype": settings.Text(settings.FLOAT32, settings.DTYPES),
    # Files of the written set, for any division of the work.
    "shards": settings.Integer(4, 1, 100000),
    # Documents of one process at a time, the most that a kill can lose.
    "shard_documents": settings.Integer(8192),
    "seed": settings.Integer(0, 0, settings.SEED),
    "jit_compile": settings.Flag(False),
}


ACTING = (
    acting.Only("top_k top_p", "temperature"),
    acting.Only("split training_documents_are_public", "documents", ("train",)),
    acting.Only("max_documents histogram", "documents", ("corpus",)),
)


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings."""
    return settings.default_config(SETTINGS)


def run(
    config: ml_collections.ConfigDict,
    directory: str | pathlib.Path,
    launch: passes.Launch = passes.ALONE,
) -> dict[str, Any] | None:
    """Runs the stage into `directory` unless it is finished there.

    `directory` may be on another file system; `launch` has the shards of this process.
    Returns what `sharded_stages.run_stage` returns.

    Raises:
      InputError: bad settings, or no generator.
    """
    acting.check(config, SETTINGS, ACTING)
    corpus_shards.require_declared(config)
    generator = sources.fetched(config.generator)
    fingerprint = sources.generator_fingerprint("generator", generator)
    certificate = _certificate(config.histogram, generator)
    located = checkpoints.locate(generator)
    output = releases.Output(
        directory,
        releases.guarantee_of(certificate, str(located), config.histogram),
        "queries by a generator that private ones had an unprotected part in",
    )
    corpus = corpus_shards.cut(
        config.corpus,
        0 if config.histogram else config.max_documents,
        config.shard_documents,
        sharded_stages.pass_directory(directory),
    )
    inputs = {"generator": fingerprint, "corpus": corpus.plan.fingerprint}
    reads, rates = [], None
    if config.histogram:
        inputs["histogram"] = workdir.stage_fingerprint(config.histogram)
        rates = _rates(config, corpus.plan)
    if config.documents == "train":
        corpus = dataclasses.replace(corpus, only=training_documents(config))
        inputs["training_documents"] = corpus.fingerprint_of_only()
        reads.append(TRAINING_DOCUMENTS_READ)
    provenance = {
        "config": workdir.plain(config),
        "inputs": inputs,
        "private_reads": reads,
    }

    write = functools.partial(
        _write_set,
        provenance=provenance,
        certificate=certificate,
        shards=config.shards,
        guarantee=output.guarantee,
        numbered=rates is not None,
    )
    start = functools.partial(
        start_worker,
        config.generator,
        config.dtype,
        writing(config),
        corpus,
        pass_progress.log_of(sharded_stages.pass_directory(directory)),
        rates,
    )
    return sharded_stages.run_stage(
        output,
        config,
        inputs,
        passes.Work("synthesize", corpus.count, start),
        write,
        launch,
        also_keeps={
            corpus_shards.PLAN_FILE: corpus.plan.to_json(),
            **sharded_stages.guarantee(certificate),
        },
    )


def writing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `T5QueryGenerator.write_queries`."""
    return {
        "sampler": sampler_of(config["temperature"], config["top_k"], config["top_p"]),
        "max_length": config["max_length"] or None,
        "seed": config["seed"],
        "samples": config["samples_per_document"],
        "batch_size": config["batch_size"],
        "jit_compile": config["jit_compile"],
    }


def _certificate(histogram: str, generator: str) -> dict[str, Any] | None:
    """Returns the certificate of what a generator writes by a histogram, or by none.

    Raises:
      InputError: the histogram's cost is not in the generator's certificate.
    """
    own = sources.certificate_of_model(generator)
    if not histogram:
        return own
    counted = document_rates.certificate_of(histogram)
    try:
        return certificates.inherited_certificate(own, counted)
    except validation.InputError as error:
        raise validation.InputError(
            f"histogram is {histogram}, whose cost the certificate of {generator} does "
            "not count: epsilon would not be all that was spent. Train the generator "
            f"with --config.histogram={histogram}, or leave histogram out."
        ) from error


def _rates(
    config: ml_collections.ConfigDict, plan: corpus_plan.CorpusPlan
) -> document_rates.Rates:
    """Returns how many queries a document gets by the histogram.

    Raises:
      InputError: the histogram is of another corpus.
    """
    histogram = document_rates.Histogram.load(config.histogram)
    if histogram.corpus != plan.fingerprint:
        raise validation.InputError(
            f"histogram is {config.histogram}, which was made of another corpus than "
            f"{config.corpus}. Give the corpus of its pairs."
        )
    documents = min(config.max_documents or plan.documents, plan.documents)
    return histogram.rates(documents * config.samples_per_document, config.seed)


def training_documents(config: ml_collections.ConfigDict) -> frozenset[str]:
    """Returns the ids of the documents of the training pairs.

    Raises:
      DataError: the corpus has no such split, or a malformed line.
    """
    judged = sources.open_beir(config.corpus).positives(config.split)
    return frozenset(row.document_id for row in judged)


def start_worker(
    generator: str,
    dtype: str,
    options: Mapping[str, Any],
    corpus: corpus_shards.CorpusShards,
    logs: pathlib.Path | None = None,
    rates: document_rates.Rates | None = None,
) -> passes.MakeShard:
    """Loads the generator; returns a function that writes a shard's queries.

    `options` are what `writing` returns. `logs` is the directory of the log of speed;
    `None` for none. `rates` decides how many queries a document gets; `None` for as
    many as the options say.
    """
    with strategy.here():
        model = T5QueryGenerator.from_preset(sources.fetched(generator), dtype)

    def make(index: int, out: ShardWriter) -> None:
        each: float = options["samples"]
        if rates is not None:
            each = rates.queries / corpus.documents
        progress = pass_progress.PassProgress(
            logs,
            "queries",
            (index, corpus.count),
            total=round(corpus.size(index) * each),
            first=round(corpus.first(index) * each),
        )
        read, first = corpus.read(index), corpus.first(index)
        documents = read if rates is None else rates.of(read)
        with progress, tf.io.TFRecordWriter(out.path(_EXTENSION)) as file:
            with strategy.here():
                rows = model.write_queries(
                    documents, first=first, on_batch=progress.add, **options
                )
            for row in rows:
                file.write(encode_query(row))
                out.count += 1

    return make


def _write_set(
    out: pathlib.Path,
    written: ShardDirectory,
    provenance: dict[str, Any],
    numbered: bool,
    **options: Any,
) -> dict[str, Any]:
    """Writes the queries of all shards as one set, with its data card.

    `numbered` gives queries new numbers, where shards had none of their own.
    `options` are those of `write_synthetic`.
    """
    path, rows = out / layout.SET, _merged(written)
    if numbered:
        rows = (
            dataclasses.replace(row, query_id=f"genQ{number}")
            for number, row in enumerate(rows)
        )
    manifest = write_synthetic(path, rows, provenance=provenance, **options)
    data_card.write(path, manifest)
    return {
        "queries": manifest["count"],
        "private_reads": provenance["private_reads"],
        "empty_queries_left_out": manifest["empty_queries_left_out"],
    }


def _merged(shards: ShardDirectory) -> Iterator[SyntheticQuery]:
    """Yields the queries of all shards, in order."""
    for index in range(shards.spec.shards):
        with shards.reading(index):
            path = shards.path(index, _EXTENSION)
            for data in tf.data.TFRecordDataset(path).as_numpy_iterator():
                yield decode_query(data)


if __name__ == "__main__":
    command.main(run, sharded=True, runs_models=True)

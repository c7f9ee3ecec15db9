"""Evaluate retrievers on private test queries, by trec_eval's rules.

    python -m tfdpsq.run.evaluate --config=configs/evaluate.py --workdir=DIR

Every number is computed from private test queries and covered by no ε, so the output
belongs under `private/`. Writes TREC run and qrels files and `metrics.json`.

Documents are embedded and searched by shards of `shard_documents`, which several
commands can share (`--num_shards=4 --shard_index=0`, ...), or workers of Apache Beam
(`--beam --runner=...`); see `sharded_stages`. The command that merges them also
searches by BM25 and in `indexes`. Unmerged shards reveal as much of queries as a run.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import ml_collections

from tfdpsq import evaluation, validation
from tfdpsq.data.files import write_json
from tfdpsq.data.shards import ShardDirectory
from tfdpsq.run.core import (
    command,
    layout,
    releases,
    settings,
    sources,
    workdir,
)
from tfdpsq.run.passes import corpus_shards, passes, sharded_stages
from tfdpsq.run.reporting import similarity
from tfdpsq.run.search import retrieval, systems
from tfdpsq.run.training import private_training

SETTINGS: settings.Declaration = {
    "data": settings.Text(sources.PYDOCS, required=True),
    "split": settings.Text("test", required=True),
    "vocabulary": settings.Text(""),
    "systems": settings.Named({systems.BM25: systems.BM25}, settings.Text("")),
    # System -> directory of its embeddings of the corpus, by `index` or `encode`; ""
    # embeds the documents here.
    "indexes": settings.Named({}, settings.Text("")),
    "synthetic": settings.Named({}, settings.Text("")),
    "similarity_split": settings.Text("dev", required=True),
    "similarity": similarity.declared(),
    "baseline": settings.Text(""),
    "k": settings.Integer(100, 1, 1000000),
    "index": settings.Text("scann_brute_force", systems.INDEXES),
    "batch_size": settings.Integer(128),
    # Most documents of a shard.
    "shard_documents": settings.Integer(65536),
    "ignore_identical_ids": settings.Flag(False),
    "resamples": settings.Integer(10000, 1, 10000000),
    "seed": settings.Integer(0, 0, settings.SEED),
    "strict": settings.Flag(False),
    "private_directory": settings.Text(""),
}


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings.

    `systems` maps a name to "bm25" or to an output of `train_retriever`; `synthetic`
    maps a name to an output of `synthesize`, whose queries are compared with those of
    `similarity_split` and of the training split; see `similarity`.
    """
    return settings.default_config(SETTINGS)


def run(
    config: ml_collections.ConfigDict,
    directory: sharded_stages.Place,
    launch: passes.Launch = passes.ALONE,
) -> dict[str, Any] | None:
    """Runs the stage into `directory` unless it is finished there.

    `launch` has the shards of this process. Returns what `sharded_stages.run_stage`
    returns.

    Raises:
      InputError: bad settings, or a missing system.
      DataError: malformed data.
    """
    settings.check(config, SETTINGS)
    output = releases.Output(
        directory,
        releases.PRIVATE,
        "what is retrieved for private queries",
        config.private_directory,
    )
    _check(config)
    directory = output.directory
    private = private_training.private_directory(config, directory)
    inputs = {
        **systems.fingerprints(config),
        **retrieval.index_inputs(config),
        **similarity.inputs(config),
        "data": sources.source_fingerprint(config.data, private),
    }
    systems.vocabulary(config)
    finished = workdir.finished_stage(directory, config, inputs)
    if finished is None:
        sources.open_beir(config.data).validate(_splits(config))
    reads = private_training.reads_of(config, private)
    where = f"{layout.METRICS_FILE}, TREC files and whatever is made from them"
    reads.record(f"the queries and judgements of split {config.split!r}", where)
    similarity.record(config, reads, where)
    corpus = None
    if finished is None and retrieval.searched_by_shards(config):
        corpus = corpus_shards.cut(
            config.data,
            0,
            config.shard_documents,
            sharded_stages.pass_directory(directory),
        )
    start = functools.partial(
        retrieval.start_worker, config.copy_and_resolve_references(), corpus
    )
    return sharded_stages.run_stage(
        output,
        config,
        inputs,
        passes.Work("evaluate", corpus.count if corpus else 1, start),
        lambda out, shards: _make(config, shards, out),
        launch,
        beside={corpus_shards.PLAN_FILE: corpus.plan.to_json()} if corpus else None,
    )


def _check(config: ml_collections.ConfigDict) -> None:
    """Refuses settings that are wrong, before any data are read."""
    systems.check_search(config, layout.METRICS)
    if not config.systems and not config.synthetic:
        raise validation.InputError(
            "systems and synthetic are empty: there is nothing to evaluate. Name a "
            f"retriever in systems, {systems.BM25!r}, or a set of queries in synthetic."
        )
    if config.baseline and config.baseline not in config.systems:
        raise validation.InputError(
            f"baseline is {config.baseline!r}, which is none of the systems "
            f"{', '.join(sorted(config.systems))}. Name one of them, or none."
        )


def _splits(config: ml_collections.ConfigDict) -> list[str]:
    """Returns the splits to read."""
    found = [config.split]
    if config.synthetic:
        found += [config.similarity_split, config.similarity.training_split]
    return list(dict.fromkeys(found))


def _make(config, shards: ShardDirectory, out: pathlib.Path) -> dict[str, Any]:
    found_by_shards = retrieval.merged(config, shards)
    beir = sources.open_beir(config.data)
    qrels = beir.qrels(config.split)
    queries = retrieval.queries_of(config)
    (out / "runs").mkdir()
    evaluation.write_trec_qrels(out / "qrels.trec", qrels)
    results = {}
    notes: dict[str, Any] = {}
    for name, found, note in retrieval.retrieve(
        config, beir, queries, config.k, found_by_shards
    ):
        if note:
            notes[name] = note
        evaluation.write_trec_run(out / "runs" / f"{name}.trec", found, tag=name)
        results[name] = evaluation.evaluate_run(
            qrels, found, layout.METRICS, config.ignore_identical_ids
        )
    metrics = {
        "split": config.split,
        "queries": len(qrels),
        "rules": evaluation.rules(config.ignore_identical_ids),
        "settings": notes,
        "systems": {
            name: _summary(config, result, results.get(config.baseline))
            for name, result in results.items()
        },
        "similarity": similarity.measure(config, beir),
    }
    write_json(out / layout.METRICS_FILE, metrics)
    return {name: values["ndcg@10"] for name, values in metrics["systems"].items()}


def _summary(config, result, baseline) -> dict[str, Any]:
    summary: dict[str, Any] = {"missing_queries": len(result.missing)}
    for metric in layout.METRICS:
        interval = evaluation.bootstrap_interval(
            result.values(metric), resamples=config.resamples, seed=config.seed
        )
        summary[metric] = interval.mean
        summary[f"{metric}_ci"] = [interval.low, interval.high]
    if baseline is not None and baseline is not result:
        summary["difference_to_baseline"] = dataclasses.asdict(
            evaluation.paired_bootstrap(
                result.values("ndcg@10"),
                baseline.values("ndcg@10"),
                resamples=config.resamples,
                seed=config.seed,
            )
        )
    return summary


if __name__ == "__main__":
    command.main(run, sharded=True)

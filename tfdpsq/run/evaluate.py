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
from collections.abc import Mapping
from typing import Any

import ml_collections

from tfdpsq import evaluation, validation
from tfdpsq.data.io import write_json
from tfdpsq.evaluation.measures import warn_of_identical_ids
from tfdpsq.run.core import (
    acting,
    command,
    layout,
    records,
    releases,
    settings,
    sources,
    workdir,
)
from tfdpsq.run.passes import corpus_shards, passes, sharded_stages
from tfdpsq.run.passes.shards import ShardDirectory
from tfdpsq.run.reporting import similarity
from tfdpsq.run.search import adapted, hybrid, reranking, retrieval, systems
from tfdpsq.run.training import training_settings

SETTINGS: settings.Declaration = {
    "data": settings.Text(sources.PYDOCS, required=True),
    "split": settings.Text("test", required=True),
    "systems": settings.Named({systems.BM25: systems.BM25}, settings.Text("")),
    # System -> directory of its embeddings of the corpus, by `index` or `encode`; ""
    # embeds the documents here.
    "indexes": settings.Named({}, settings.Text("")),
    # System -> directory of the embeddings of all queries: the system is what
    # `train_adapter` wrote, or "embeddings" for those of `indexes` as they are.
    "query_embeddings": settings.Named({}, settings.Text("")),
    "synthetic": settings.Named({}, settings.Text("")),
    "similarity_split": settings.Text("dev", required=True),
    "similarity": similarity.declared(),
    "baseline": settings.Text(""),
    # System -> the one that it is compared with, where that is not `baseline`.
    "baselines": settings.Named({}, settings.Text("")),
    "fusion": hybrid.SETTINGS,
    # Name -> a generator that reorders a system's best documents.
    "rerankers": settings.Named({}, settings.Text("")),
    "rerank": reranking.SETTINGS,
    "k": settings.Integer(100, 1, 1000000),
    "index": settings.Text("scann_brute_force", systems.INDEXES),
    "batch_size": settings.Integer(128),
    **training_settings.dtype_settings(),
    # Most documents of a shard.
    "shard_documents": settings.Integer(65536),
    "ignore_identical_ids": settings.Flag(False),
    "resamples": settings.Integer(10000, 1, 10000000),
    "seed": settings.Integer(0, 0, settings.SEED),
    "strict": settings.Flag(False),
    "private_directory": settings.Text(""),
}
ACTING = (
    acting.Only(
        "fusion.method fusion.weight fusion.weights fusion.fit fusion.fit_queries",
        "fusion.base",
    ),
    acting.Only("fusion.fit_queries", "fusion.fit"),
    acting.Only("fusion.weight fusion.weights", "fusion.fit", ("",)),
    acting.Only(" ".join(f"rerank.{name}" for name in reranking.SETTINGS), "rerankers"),
    acting.Only("rerank.fit_queries", "rerank.fit"),
    acting.Only("rerank.weight", "rerank.fit", ("",)),
)


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings.

    `systems` maps a name to "bm25", to an output of `train_retriever`, or to what
    `query_embeddings` says; `synthetic` maps a name to an output of `synthesize`, whose
    queries are compared with those of `similarity_split` and of the training split; see
    `similarity`. With `fusion.base`
    every other system is also measured together with it; see `search.hybrid`.
    `rerankers` maps a name to a generator that reorders a system's best documents,
    which counts as a system of its own; see `search.reranking`.
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
    acting.check(config, SETTINGS, ACTING)
    output = releases.Output(
        directory,
        releases.PRIVATE,
        "what is retrieved for private queries",
        config.private_directory,
    )
    _check(config)
    directory = output.directory
    searched = systems.Systems.of(config)
    private = releases.private_directory(directory, config.private_directory)
    inputs = {
        **searched.fingerprints(),
        **retrieval.index_inputs(searched, config.data),
        **adapted.inputs(searched, config.data, config.split, private),
        **similarity.inputs(config),
        **hybrid.inputs(config.fusion),
        **reranking.inputs(config),
        "data": sources.source_fingerprint(config.data, private),
    }
    searched.require_retrievers()
    finished = workdir.finished_stage(directory, config, inputs)
    compared = []
    if config.synthetic:
        compared = [config.similarity_split, config.similarity.training_split]
    if finished is None:
        splits = list(dict.fromkeys([config.split, *compared]))
        counts = sources.open_beir(config.data).validate(splits)
        searched.require_documents(counts.documents)
    reads = records.private_reads(private, config.strict)
    where = f"{layout.METRICS_FILE}, TREC files and whatever is made from them"
    reads.record(f"the queries and judgements of split {config.split!r}", where)
    for split in compared:
        reads.record(f"the queries of split {split!r}", where)
    corpus = None
    if finished is None and searched.by_shards:
        corpus = corpus_shards.cut(
            config.data,
            0,
            config.shard_documents,
            sharded_stages.pass_directory(directory),
        )
    start = functools.partial(
        retrieval.start_worker,
        searched,
        config.data,
        config.split,
        _searched_k(config),
        corpus,
        _fits(config),
    )
    return sharded_stages.run_stage(
        output,
        config,
        inputs,
        passes.Work("evaluate", corpus.count if corpus else 1, start),
        lambda out, shards: _make(config, searched, shards, out),
        launch,
        also_keeps={corpus_shards.PLAN_FILE: corpus.plan.to_json()} if corpus else None,
    )


def _check(config: ml_collections.ConfigDict) -> None:
    """Refuses settings that are wrong, before any data are read."""
    systems.check_search(config.systems, config.k, layout.METRICS)
    if not config.systems and not config.synthetic:
        raise validation.InputError(
            "systems and synthetic are empty: there is nothing to evaluate. Name a "
            f"retriever in systems, {systems.BM25!r}, or a set of queries in synthetic."
        )
    for setting, name in (
        ("baseline", config.baseline),
        *((f"baselines.{of}", name) for of, name in config.baselines.items()),
        *(("baselines has a name that", of) for of in config.baselines),
    ):
        if name and name not in config.systems:
            raise validation.InputError(
                f"{setting} is {name!r}, which is none of the systems "
                f"{', '.join(sorted(config.systems))}. Name one of them, or none."
            )
    for of, name in config.baselines.items():
        if of == name:
            raise validation.InputError(
                f"baselines.{of} is {name!r}: a system is not compared with itself. "
                "Name another, or leave it out."
            )
    adapted.check(config)
    hybrid.check(config)
    reranking.check(config)


def _make(
    config: ml_collections.ConfigDict,
    searched: systems.Systems,
    shards: ShardDirectory,
    out: pathlib.Path,
) -> dict[str, Any]:
    k = _searched_k(config)
    found_by_shards = retrieval.merged(searched.by_shards, k, shards)
    beir = sources.open_beir(config.data)
    qrels = beir.qrels(config.split)
    fits = _fits(config)
    queries = retrieval.queries_of(config.data, config.split, fits)
    (out / "runs").mkdir()
    evaluation.write_trec_qrels(out / layout.QRELS_FILE, qrels)
    results, base = {}, {}
    fusion = hybrid.Fusion(config.fusion, fits[0], qrels, config.k)
    reranker = reranking.Reranking(config.rerank, config.rerankers, fits[1])
    notes: dict[str, Any] = {}
    for name, found, note in retrieval.retrieve(
        searched, beir, queries, k, found_by_shards
    ):
        if note:
            notes[name] = note
        found = _best(config, found, qrels)
        fusion.add(name, found)
        judged = {query: hits for query, hits in found.items() if query in qrels}
        results[name] = _measured(config, name, judged, qrels, out)
        if name == config.rerank.base:
            base = found
    for name, run, note in reranker.runs(base, beir, queries, qrels):
        notes[name] = note
        results[name] = _measured(config, name, run, qrels, out)
    against = {name: config.baseline for name in searched.paths}
    against.update(config.baselines)
    against.update(dict.fromkeys(config.rerankers, config.rerank.baseline))
    metrics = {
        "split": config.split,
        "queries": len(qrels),
        "rules": evaluation.rules(config.ignore_identical_ids),
        "settings": notes,
        "systems": {
            name: _summary(
                result, results.get(against[name]), config.resamples, config.seed
            )
            for name, result in results.items()
        },
        "fused": {
            name: {
                **_summary(
                    result,
                    fusion.results.get(against[name]),
                    config.resamples,
                    config.seed,
                ),
                **fusion.notes[name],
            }
            for name, result in fusion.results.items()
        },
        "similarity": similarity.measure(config, beir),
    }
    write_json(out / layout.METRICS_FILE, metrics)
    return {name: values["ndcg@10"] for name, values in metrics["systems"].items()}


def _fits(config: ml_collections.ConfigDict) -> list[hybrid.FitSet | None]:
    """Returns the sets that weights of fusion and of reranking are fitted on."""
    return [
        hybrid.fit_set(config.fusion),
        hybrid.fit_set(config.rerank, "rerank") if config.rerankers else None,
    ]


def _searched_k(config: ml_collections.ConfigDict) -> int:
    """Returns how many documents to search for: one more, to leave out a self-match."""
    return config.k + config.ignore_identical_ids


def _best(
    config: ml_collections.ConfigDict,
    run: retrieval.Run,
    qrels: Mapping[str, Mapping[str, int]],
) -> retrieval.Run:
    """Returns the best `k` documents of each query, without self-matches.

    They go before anything else is made of a run: in a fusion they would set the scale
    of all other scores, and in reranking take a place.
    """
    if not config.ignore_identical_ids:
        return run
    warn_of_identical_ids(qrels, run, ignored=True)
    others = {
        query: {name: score for name, score in hits.items() if name != query}
        for query, hits in run.items()
    }
    return {
        query: dict(evaluation.ranked(hits)[: config.k])
        for query, hits in others.items()
    }


def _measured(
    config: ml_collections.ConfigDict,
    name: str,
    run: retrieval.Run,
    qrels: Mapping[str, Mapping[str, int]],
    out: pathlib.Path,
) -> evaluation.RankingResult:
    """Writes a system's run, and measures it."""
    path = out / "runs" / f"{name}.trec"
    evaluation.write_trec_run(path, run, name)
    return evaluation.evaluate_run(
        qrels, run, layout.METRICS, config.ignore_identical_ids
    )


def _summary(
    result: evaluation.RankingResult,
    baseline: evaluation.RankingResult | None,
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    summary: dict[str, Any] = {"missing_queries": len(result.missing)}
    for metric in layout.METRICS:
        interval = evaluation.bootstrap_interval(
            result.values(metric), resamples=resamples, seed=seed
        )
        summary[metric] = interval.mean
        summary[f"{metric}_ci"] = [interval.low, interval.high]
    if baseline is not None and baseline is not result:
        summary["difference_to_baseline"] = dataclasses.asdict(
            evaluation.paired_bootstrap(
                result.values("ndcg@10"),
                baseline.values("ndcg@10"),
                resamples=resamples,
                seed=seed,
            )
        )
    return summary


if __name__ == "__main__":
    command.main(run, sharded=True, runs_models=True)

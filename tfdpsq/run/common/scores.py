"""Numbers of systems on test sets, for `evaluate`: means, intervals, comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdpsq import evaluation
from tfdpsq.evaluation.measures import warn_of_identical_ids
from tfdpsq.run.common import reranking, search
from tfdpsq.run.common.benchmark_sets import METRICS, Part
from tfdpsq.run.common.fusion import FitSet, fused
from tfdpsq.run.frame.runner import Context

QRELS_FILE = "qrels.trec"

Results = Mapping[str, evaluation.RankingResult]


@dataclasses.dataclass
class Measured:
    """What systems reach on one corpus.

    Attributes:
      test: the corpus and its queries.
      queries: how many are judged.
      systems: results by system.
      fused: results of each with the base of a fusion.
      settings: what a system's scores depend on.
      weights: of each in the fusion.
    """

    test: Part
    queries: int
    systems: dict[str, evaluation.RankingResult] = dataclasses.field(
        default_factory=dict
    )
    fused: dict[str, evaluation.RankingResult] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    weights: dict[str, Any] = dataclasses.field(default_factory=dict)


def measure(
    c: Context,
    test: Part,
    queries: Mapping[str, str],
    fits: tuple[FitSet, FitSet],
    paths: Sequence[str],
    notes: dict[str, Any],
) -> Measured:
    """Measures systems, fusions and rerankers on one corpus; writes TREC files.

    Args:
      c: of `evaluate`.
      test: the corpus and its queries.
      queries: {query id: text}, with those to fit weights on.
      fits: the queries that fusion and reranking fit a weight on.
      paths: results of the systems by shards, see `search.merged`.
      notes: what their scores depend on.
    """
    s, beir, (fusing, fitting) = c.settings, test.beir(), fits
    qrels, more = beir.qrels(test.split), test.ignore_identical_ids
    out = c.out / "runs" / test.name
    out.mkdir(parents=True)
    evaluation.write_trec_qrels((out if test.name else c.out) / QRELS_FILE, qrels)
    found = Measured(test, len(qrels), settings=notes)

    def run_of(name: str) -> search.Run:
        run = search.merged(paths, name, list(queries), s.k + more)
        return _without_self(run, qrels, s.k) if more else run

    def add(name: str, run: search.Run) -> None:
        run = {query: hits for query, hits in run.items() if query in qrels}
        evaluation.write_trec_run(out / f"{name}.trec", run, name)
        found.systems[name] = evaluation.evaluate_run(qrels, run, METRICS, more)

    base = run_of(s.fusion.base) if s.fusion.base else {}
    for name in s.systems:
        run = run_of(name)
        add(name, run)
        if s.fusion.base not in ("", name):
            run, found.weights[name] = fused(s.fusion, fusing, name, base, run, s.k)
            run = {query: hits for query, hits in run.items() if query in qrels}
            found.fused[name] = evaluation.evaluate_run(qrels, run, METRICS)
    if s.rerankers:
        base = run_of(s.rerank.base)
        base = {q: base[q] for q in (*qrels, *fitting.queries) if q in base}
        generators = {name: one.path for name, one in c.given["rerankers"].items()}
        for name, run, note in reranking.reranked(
            s.rerank, generators, fitting, base, queries, beir, c.scope
        ):
            add(name, run)
            notes[name] = note
    return found


def _without_self(run: search.Run, qrels: Mapping[str, Any], k: int) -> search.Run:
    """Returns the best `k` documents of each query, without that of its own id.

    They go before anything else is made of a run: in a fusion they would set the scale
    of all other scores, and in reranking take a place.
    """
    warn_of_identical_ids(qrels, run, ignored=True)
    others = {
        query: {name: score for name, score in hits.items() if name != query}
        for query, hits in run.items()
    }
    return {q: dict(evaluation.ranked(hits)[:k]) for q, hits in others.items()}


def summary(
    parts: Sequence[Measured], against: Mapping[str, str], resamples: int, seed: int
) -> dict[str, Any]:
    """Returns a set's numbers, as JSON.

    Args:
      parts: one, or the forums of CQADupStack, each of which counts the same.
      against: system -> the one that it is compared with.
      resamples: of the intervals and tests.
      seed: of the same.
    """
    test = parts[0].test

    def rows(results: Sequence[Results]) -> dict[str, dict[str, Any]]:
        found = {}
        for name in results[0]:
            missing = sum(len(each[name].missing) for each in results)
            found[name] = row = dict[str, Any](missing_queries=missing)
            for metric in METRICS:
                values = [each[name].values(metric) for each in results]
                interval = evaluation.macro_interval(
                    values, resamples=resamples, seed=seed
                )
                row[metric] = interval.mean
                row[f"{metric}_ci"] = [interval.low, interval.high]
            base = against.get(name, name)
            if base != name and base in results[0]:
                difference = evaluation.paired_bootstrap(
                    _as_one(results, name),
                    _as_one(results, base),
                    resamples=resamples,
                    seed=seed,
                )
                row["difference_to_baseline"] = dataclasses.asdict(difference)
        return found

    fused = rows([part.fused for part in parts])
    found: dict[str, Any] = {
        "split": test.split,
        "queries": sum(part.queries for part in parts),
        "rules": evaluation.rules(test.ignore_identical_ids),
        "settings": parts[0].settings,
        "systems": rows([part.systems for part in parts]),
        "fused": {
            name: {**row, **parts[0].weights[name]} for name, row in fused.items()
        },
    }
    if len(parts) > 1:
        found["rules"]["averaged_over"] = f"{len(parts)} forums, each counting the same"
        found["parts"] = {
            part.test.name: {n: dict(one.means) for n, one in part.systems.items()}
            for part in parts
        }
    return found


def summary_of_sets(
    found: Sequence[Measured], against: Mapping[str, str], resamples: int, seed: int
) -> dict[str, Any]:
    """Returns the numbers of each set, and their means over sets, as JSON.

    Every two systems are compared on each set, in NDCG@10, by `compare_systems`.
    """
    sets: dict[str, list[Measured]] = {}
    for one in found:
        sets.setdefault(one.test.name.partition("/")[0], []).append(one)
    summaries = {}
    for name, parts in sets.items():
        results = [part.systems for part in parts]
        values = {system: _as_one(results, system) for system in results[0]}
        pairs = evaluation.compare_systems(values, resamples, seed)
        summaries[name] = {
            **summary(parts, against, resamples, seed),
            "comparisons": [dataclasses.asdict(pair) for pair in pairs],
        }
    mean = {
        system: {
            metric: float(
                np.mean([s["systems"][system][metric] for s in summaries.values()])
            )
            for metric in METRICS
        }
        for system in found[0].systems
    }
    return {"sets": summaries, "mean": {"sets": len(sets), "systems": mean}}


def _as_one(results: Sequence[Results], name: str) -> np.ndarray:
    """Returns a system's NDCG@10 of all parts, scaled so that each weighs the same."""
    parts = [each[name].values(METRICS[0]) for each in results]
    share = sum(map(len, parts)) / len(parts)
    return np.concatenate([part * (share / len(part)) for part in parts])

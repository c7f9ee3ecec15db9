"""Numbers of systems on test sets, for `evaluate`: means, intervals, comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdpsq import evaluation
from tfdpsq.evaluation import RankingResult
from tfdpsq.evaluation.measures import warn_of_identical_ids
from tfdpsq.run.common.benchmark_sets import METRICS, Part
from tfdpsq.run.common.fusion import fused, reranked
from tfdpsq.run.common.search import Run
from tfdpsq.run.frame.runner import Context

QRELS_FILE = "qrels.trec"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Results on one corpus, by system."""

    test: Part
    queries: int  # that are judged
    systems: dict[str, RankingResult]
    fused: dict[str, RankingResult]  # each with the base of the fusion


def measure(
    c: Context, test: Part, queries: Mapping[str, str], run_of: Callable[[str], Run]
) -> Measured:
    """Measures systems, fusions and rerankers on one corpus; writes TREC files.

    `queries` maps ids of judged queries to texts; `run_of` reads what a system found.
    """
    s, beir, more = c.settings, test.beir(), test.ignore_identical_ids
    qrels = {q: rows for q, rows in beir.qrels(test.split).items() if q in queries}
    out = c.out / "runs" / test.name
    out.mkdir(parents=True)
    evaluation.write_trec_qrels((out if test.name else c.out) / QRELS_FILE, qrels)
    found = Measured(test, len(qrels), {}, {})

    def read(name: str) -> Run:
        run = run_of(name)
        return _without_self(run, qrels, s.k) if more else run

    def add(name: str, run: Run) -> None:
        evaluation.write_trec_run(out / f"{name}.trec", run, name)
        found.systems[name] = evaluation.evaluate_run(qrels, run, METRICS, more)

    base = read(s.fusion.base) if s.fusion.base else {}
    for name in s.systems:
        run = read(name)
        add(name, run)
        if s.fusion.base not in ("", name):
            run = fused(s.fusion, name, base, run, s.k)
            found.fused[name] = evaluation.evaluate_run(qrels, run, METRICS)
    base = read(s.rerank.base) if s.rerankers else {}
    for name, generator in c.given["rerankers"].items():
        add(name, reranked(s.rerank, generator.path, base, queries, beir, c.scope))
    return found


def _without_self(run: Run, qrels: Mapping[str, Any], k: int) -> Run:
    """Returns the best `k` documents of each query, without that of its own id.

    In a fusion it would set the scale of all scores, in reranking take a place.
    """
    warn_of_identical_ids(qrels, run, ignored=True)
    others = {
        query: {name: score for name, score in hits.items() if name != query}
        for query, hits in run.items()
    }
    return {q: dict(evaluation.ranked(hits)[:k]) for q, hits in others.items()}


def summary(parts: Sequence[Measured], s: Any) -> dict[str, Any]:
    """Returns a set's numbers as JSON; each of CQADupStack's forums counts the same."""
    test, fusing = parts[0].test, s.fusion
    fused = _rows([part.fused for part in parts], s)
    found: dict[str, Any] = {
        "split": test.split,
        "queries": sum(part.queries for part in parts),
        "rules": evaluation.rules(test.ignore_identical_ids),
        "systems": _rows([part.systems for part in parts], s),
        "fused": {
            name: {**row, "weight": fusing.weights.get(name, fusing.weight)}
            for name, row in fused.items()
        },
    }
    if len(parts) > 1:
        found["rules"]["averaged_over"] = f"{len(parts)} forums, each counting the same"
        found["parts"] = {
            part.test.name: {n: dict(one.means) for n, one in part.systems.items()}
            for part in parts
        }
    return found


def _rows(
    results: Sequence[Mapping[str, RankingResult]], s: Any
) -> dict[str, dict[str, Any]]:
    """Returns means over parts of each system, and the difference to its baseline."""
    rows, how = {}, {"resamples": s.resamples, "seed": s.seed}
    for name in results[0]:
        missing = sum(len(each[name].missing) for each in results)
        rows[name] = row = dict[str, Any](missing_queries=missing)
        for metric in METRICS:
            values = [each[name].values(metric) for each in results]
            interval = evaluation.macro_interval(values, **how)
            row[metric] = interval.mean
            row[f"{metric}_ci"] = [interval.low, interval.high]
        base = s.baselines.get(name, s.baseline)
        if base != name and base in results[0]:
            difference = evaluation.paired_bootstrap(
                _as_one(results, name), _as_one(results, base), **how
            )
            row["difference_to_baseline"] = dataclasses.asdict(difference)
    return rows


def summary_of_sets(found: Sequence[Measured], s: Any) -> dict[str, Any]:
    """Returns the numbers of each set, and their means over sets, as JSON."""
    sets: dict[str, list[Measured]] = {}
    for one in found:
        sets.setdefault(one.test.name.partition("/")[0], []).append(one)
    each = {name: summary(parts, s) for name, parts in sets.items()}
    mean: dict[str, dict[str, float]] = {}
    for system in found[0].systems:
        rows = [of["systems"][system] for of in each.values()]
        mean[system] = {m: float(np.mean([row[m] for row in rows])) for m in METRICS}
    return {"sets": each, "mean": {"sets": len(sets), "systems": mean}}


def _as_one(results: Sequence[Mapping[str, RankingResult]], name: str) -> np.ndarray:
    """Returns a system's NDCG@10 of all parts, scaled so that each weighs the same."""
    parts = [each[name].values(METRICS[0]) for each in results]
    share = sum(map(len, parts)) / len(parts)
    return np.concatenate([part * (share / len(part)) for part in parts])

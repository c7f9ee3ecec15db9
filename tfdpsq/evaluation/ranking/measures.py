"""Ranking quality by trec_eval's rules, through pytrec-eval-terrier.

A *run* maps query id to {document id: score}; *qrels* map query id to
{document id: relevance}. Everything that two evaluators could do differently
(ties, gain, missing queries, self-matches) is decided here once and returned by
`rules`, so that it can be written with the numbers. TREC files: `trec.py`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytrec_eval
from absl import logging

from tfdpsq import validation
from tfdpsq.evaluation.ranking.trec import (
    Qrels,
    Run,
    checked_score,
    ranked,
    read_trec_qrels,
    read_trec_run,
    write_trec_qrels,
    write_trec_run,
)
from tfdpsq.validation import InputError

__all__ = [
    "RankingResult",
    "evaluate_run",
    "ranked",
    "read_trec_qrels",
    "read_trec_run",
    "rules",
    "write_trec_qrels",
    "write_trec_run",
]

# Our name -> trec_eval's measure, cut at k.
_CUT = {"ndcg": "ndcg_cut", "recall": "recall", "map": "map_cut", "capped_recall": "P"}


@dataclasses.dataclass(frozen=True)
class _Metric:
    """A metric, and the measure of trec_eval's that it is made of.

    Attributes:
      name: ours, without k.
      k: ranks that are looked at; `None` for all.
      measure: pytrec-eval's name of it.
    """

    name: str
    k: int | None
    measure: str

    @property
    def key(self) -> str:
        """Returns pytrec-eval's name of the result."""
        return self.measure.replace(".", "_")

    def value(self, found: Mapping[str, float], relevant: int) -> float:
        """Returns a query's value from pytrec-eval's results and its relevant count."""
        value = float(found.get(self.key, 0.0))
        if self.name == "mrr" and self.k is not None and value:
            return value if round(1 / value) <= self.k else 0.0
        if self.name == "capped_recall" and self.k is not None and relevant:
            # Precision at k is a whole number of documents over k.
            return round(value * self.k) / min(self.k, relevant)
        return value


@dataclasses.dataclass(frozen=True)
class RankingResult:
    """The result of `evaluate_run`.

    Attributes:
      per_query: query id -> {metric: value in [0, 1]}, for **every** query of the
        qrels, in sorted order of query id.
      means: metric -> mean over every query of the qrels.
      missing: judged queries for which the run returns nothing; each counts as 0.
      unjudged: queries of the run that the qrels do not hold; left out.
      without_relevant: queries judged, but with no relevant document: 0 by
        trec_eval's rules whatever the run returns.
      rules: see `rules`.
    """

    per_query: dict[str, dict[str, float]]
    means: dict[str, float]
    missing: tuple[str, ...]
    unjudged: tuple[str, ...]
    without_relevant: tuple[str, ...]
    rules: dict[str, Any]

    def values(self, metric: str) -> np.ndarray:
        """One metric per query, [queries] float64, in sorted order of query id.

        Two results over the same qrels are aligned, as `paired_bootstrap` needs.

        Raises:
          InputError: a metric that was not computed.
        """
        if metric not in self.means:
            raise InputError(
                f"metric is {metric!r}; computed were {', '.join(self.means)}."
            )
        return np.array([row[metric] for row in self.per_query.values()])


def rules(ignore_identical_ids: bool = False) -> dict[str, Any]:
    """The rules `evaluate_run` applies, in words, with the evaluator's version."""
    version = importlib.metadata.version("pytrec-eval-terrier")
    return {
        "evaluator": f"pytrec-eval-terrier {version}",
        "gain": "linear (the relevance itself), discount log2(rank + 1)",
        "ties": "by score as float32, descending, then by document id, descending, "
        "as strings",
        "relevant": "judged above 0; what is judged below 0 counts as 0",
        "recall": "relevant retrieved / all relevant, uncapped",
        "capped_recall": "relevant among the first k / the smaller of k and all "
        "relevant (BEIR's R_cap@k)",
        "map": "precision at every relevant document retrieved (map@k: among the first "
        "k), summed, / all relevant",
        "mrr": "1 / rank of the first relevant document, 0 where it is beyond k",
        "missing_queries": "a judged query absent from the run counts as 0",
        "unjudged_queries": "left out of the mean",
        "unjudged_documents": "not relevant",
        "self_matches": "documents whose id equals the query's id are removed"
        if ignore_identical_ids
        else "kept",
    }


def evaluate_run(
    qrels: Qrels,
    run: Run,
    metrics: Sequence[str] = ("ndcg@10", "recall@10"),
    ignore_identical_ids: bool = False,
) -> RankingResult:
    """Scores a run against relevance judgements.

    Args:
      qrels: query id -> {document id: relevance}, integers; above 0 is relevant.
      run: query id -> {document id: score}; scores are any finite real numbers
        (float32 scalars too), higher is better.
      metrics: "ndcg@k", "recall@k", "capped_recall@k", "mrr@k" or "map@k", any k of
        at least 1, or "map" over all that was retrieved; see `rules`.
      ignore_identical_ids: drop a document whose id equals the query's. Right
        where queries are documents of the corpus (ArguAna, Quora), harmful where
        both are merely numbered from 0; a warning says when it matters.

    Returns:
      A `RankingResult`; a query missing from the run counts as 0 there, while
      trec_eval itself would leave it out of the mean. So does every query of a run
      that found nothing at all.

    Raises:
      InputError: unknown metric, a score that is not finite, a relevance
        that is not an integer, no qrels, or a run that shares no query with them.
    """
    wanted = {metric: _metric(metric) for metric in metrics}
    if not wanted:
        raise InputError("metrics is empty; name at least one, such as 'ndcg@10'.")
    _check_qrels(qrels)
    judged = sorted(qrels)
    warn_of_identical_ids(qrels, run, ignore_identical_ids)
    clean = {}
    for query_id in judged:
        hits = {
            _checked_id(document_id): checked_score(score, query_id, document_id)
            for document_id, score in run.get(query_id, {}).items()
            if not (ignore_identical_ids and document_id == query_id)
        }
        if hits:
            clean[query_id] = hits
    if run and not set(run) & set(qrels):
        raise InputError(
            f"the run ({len(run)} queries) and the qrels ({len(qrels)}) share no query "
            "id; check that both come from the same data and split."
        )
    evaluator = pytrec_eval.RelevanceEvaluator(
        # A query without judgements is dropped by pytrec-eval, and so 0 below.
        {query_id: _plain(judgements) for query_id, judgements in qrels.items()},
        {metric.measure for metric in wanted.values()},
    )
    found = evaluator.evaluate(clean)
    relevant = {
        query_id: sum(relevance > 0 for relevance in qrels[query_id].values())
        for query_id in judged
    }
    per_query = {
        query_id: {
            name: metric.value(found.get(query_id, {}), relevant[query_id])
            for name, metric in wanted.items()
        }
        for query_id in judged
    }
    missing = tuple(query_id for query_id in judged if query_id not in clean)
    if missing:
        logging.warning(
            "%d of %d judged queries have no result in the run and count as 0 "
            "(first: %r).",
            len(missing),
            len(judged),
            missing[0],
        )
    return RankingResult(
        per_query=per_query,
        means={
            metric: float(np.mean([row[metric] for row in per_query.values()]))
            for metric in wanted
        },
        missing=missing,
        unjudged=tuple(sorted(set(run) - set(qrels))),
        without_relevant=tuple(
            query_id for query_id in judged if not relevant[query_id]
        ),
        rules=rules(ignore_identical_ids),
    )


def _metric(metric: str) -> _Metric:
    if metric == "map":
        return _Metric("map", None, "map")
    match = re.fullmatch(r"([a-z_]+)@([1-9][0-9]*)", metric)
    if match and match[1] in _CUT:
        return _Metric(match[1], int(match[2]), f"{_CUT[match[1]]}.{match[2]}")
    if match and match[1] == "mrr":
        # trec_eval has no cut of this one: `value` makes it.
        return _Metric("mrr", int(match[2]), "recip_rank")
    known = ", ".join(f"'{name}@k'" for name in (*_CUT, "mrr"))
    raise InputError(
        f"metric is {metric!r}; write {known} with k of at least 1, or 'map'."
    )


def _check_qrels(qrels: Qrels) -> None:
    if not qrels:
        raise InputError("qrels hold no query; there is nothing to score against.")
    for query_id, judgements in qrels.items():
        _checked_id(query_id)
        for document_id, relevance in judgements.items():
            _checked_id(document_id)
            if isinstance(relevance, bool) or not isinstance(
                relevance, numbers.Integral
            ):
                raise InputError(
                    f"qrels: relevance of document {document_id!r} for query "
                    f"{query_id!r} is {relevance!r}; it must be an integer."
                )
            if relevance > validation.MOST_RELEVANT:
                raise InputError(
                    f"qrels: relevance of document {document_id!r} for query "
                    f"{query_id!r} is {validation.shown(relevance)}; it must be at "
                    f"most {validation.MOST_RELEVANT:,}, as trec_eval keeps a table of "
                    "all values below it. Write smaller integers in the same order."
                )


def _checked_id(identifier: str) -> str:
    """Refuses what ends the process in pytrec-eval's C code."""
    if "\0" in identifier:
        raise InputError(f"id {identifier!r} holds a NUL character. Give another id.")
    return identifier


def _plain(judgements: Mapping[str, int]) -> dict[str, int]:
    # Everything below 0 is equally not relevant; trec_eval crashes on what is below -1.
    return {doc: max(int(value), -1) for doc, value in judgements.items()}


def warn_of_identical_ids(qrels: Qrels, run: Run, ignored: bool) -> None:
    """Logs a warning where the rule for self-matches seems wrong for the data."""
    relevant = retrieved = 0
    for query_id, judgements in qrels.items():
        if query_id in run.get(query_id, {}):
            retrieved += 1
            relevant += judgements.get(query_id, 0) > 0
    if ignored and relevant:
        logging.warning(
            "ignore_identical_ids removes %d documents judged relevant: ids of queries "
            "and documents seem to collide; turn it off for this data.",
            relevant,
        )
    elif not ignored and retrieved > relevant:
        logging.warning(
            "%d queries retrieve an unjudged document of their own id: where queries "
            "are documents (ArguAna, Quora) set ignore_identical_ids.",
            retrieved - relevant,
        )

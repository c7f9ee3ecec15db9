"""Hybrid retrieval: one ranking made of several, by scores or by ranks.

By scores: each query's scores are moved and scaled to [0, 1] within each run, and the
weighted sum ranks; a document that a run did not find has 0 there. By ranks: reciprocal
rank fusion (Cormack, Clarke and Büttcher 2009), the weighted sum of 1/(60 + rank).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from tfdpsq.evaluation.measures import Run, ranked
from tfdpsq.validation import InputError, one_of, positive_integer

METHODS = ("scores", "ranks")
# Of reciprocal rank fusion, as its authors chose it.
_RANK_OFFSET = 60


def fuse(
    runs: Sequence[Run], weights: Sequence[float], method: str = "scores", k: int = 100
) -> dict[str, dict[str, float]]:
    """Fuses runs of the same corpus.

    Args:
      runs: query id -> {document id: score}, larger is better.
      weights: of each run, 0 or more.
      method: "scores" or "ranks".
      k: most documents to keep for a query.

    Returns:
      A run with the queries of all; ties go to the larger document id.
    """
    one_of("method", method, METHODS)
    positive_integer("k", k)
    usable = all(np.isfinite(weight) and weight >= 0 for weight in weights)
    if not runs or len(runs) != len(weights) or not usable:
        raise InputError(
            f"weights are {tuple(weights)} of {len(runs)} runs. Give at least one run, "
            "and a finite weight of 0 or more for each."
        )
    parts = _scaled if method == "scores" else _reciprocal_ranks
    fused: dict[str, dict[str, float]] = {}
    for query_id in dict.fromkeys(name for run in runs for name in run):
        total: dict[str, float] = {}
        for run, weight in zip(runs, weights):
            for document_id, part in parts(run.get(query_id, {})).items():
                total[document_id] = total.get(document_id, 0.0) + weight * part
        best = heapq.nlargest(k, ((score, name) for name, score in total.items()))
        fused[query_id] = {name: score for score, name in best}
    return fused


def _scaled(hits: Mapping[str, float]) -> dict[str, float]:
    """Returns scores scaled to [0, 1]; 1 where all are equal."""
    if not hits:
        return {}
    lowest, highest = min(hits.values()), max(hits.values())
    if highest == lowest:
        return dict.fromkeys(hits, 1.0)
    return {name: (s - lowest) / (highest - lowest) for name, s in hits.items()}


def _reciprocal_ranks(hits: Mapping[str, float]) -> dict[str, float]:
    return {
        name: 1 / (_RANK_OFFSET + rank)
        for rank, (name, _) in enumerate(ranked(hits), 1)
    }

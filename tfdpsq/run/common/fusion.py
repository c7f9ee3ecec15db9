"""Hybrid retrieval in `evaluate`: every system fused with one of them, such as BM25.

What is deployed is rarely a retriever alone, so the question is what it adds to BM25.
The weight of a retriever is fixed, or fitted on public or synthetic queries. Private
queries are refused for it: a weight is a function of all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging

from tfdpsq import evaluation
from tfdpsq.data import read_manifest, read_synthetic
from tfdpsq.evaluation.fusion import METHODS
from tfdpsq.run.common.benchmark_sets import METRICS
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.artefacts import Artefact, SyntheticSet
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.settings import Rule, path, setting
from tfdpsq.validation import InputError

Run = Mapping[str, Mapping[str, float]]
Qrels = Mapping[str, Mapping[str, int]]
# Before the ids of queries to fit on; no id of a data set has it.
_FIT = "\x01"


@dataclasses.dataclass(frozen=True)
class FusionSettings(settings.Settings):
    """How systems are fused with `base`."""

    base: str = setting("", help="the system that all others are fused with")
    method: str = setting("scores", choices=METHODS, when="base")
    weight: float = setting(
        0.3, ge=0, le=1, when={"fit": ("",)}, help="of the others; base has the rest"
    )
    weights: dict = setting({}, of=Rule(ge=0.0, le=1.0), when={"fit": ("",)})
    fit: str = path(SyntheticSet, "", when="base", help="to fit each weight on")
    fit_queries: int = setting(500, ge=2, when="fit")


class FitSet:
    """A set of queries to fit weights on.

    Attributes:
      place: the setting that names it and its value, for errors.
      queries: {query id: text}, an evenly spread part of the set.
      qrels: {query id: {document id: relevance}}.
    """

    def __init__(self, given: Artefact | None, setting: str, most: int):
        """Reads at most `most` queries; of no set, none."""
        self.queries: dict[str, str] = {}
        self.qrels: dict[str, dict[str, int]] = {}
        if given is None:
            return
        self.place = f"{setting} is {given.path}"
        count = read_manifest(given.path)["count"]
        rows = np.linspace(0, count - 1, min(most, count)).astype(int)
        wanted = set(rows.tolist())
        for row, query in enumerate(read_synthetic(given.path)):
            if row in wanted:
                name = f"{_FIT}{setting}{row}"
                self.queries[name] = query.query
                self.qrels[name] = {query.document_id: 1}

    def is_found(self, *runs: Run) -> bool:
        """Returns whether a run finds the document of any query: else weights tie."""
        return any(
            run.get(query, {}).keys() & right.keys()
            for query, right in self.qrels.items()
            for run in runs
        )


def without_fits(queries: Mapping[str, str]) -> list[str]:
    """Returns the ids of queries but those to fit on, which have no embeddings."""
    return [name for name in queries if not name.startswith(_FIT)]


def require_protected(setting: str, given: Artefact | None) -> None:
    """Refuses a set to fit on that tells of private queries without protection."""
    if given is not None and given.privacy == Privacy.PRIVATE:
        raise InputError(
            f"{setting} is {given.path}, which private queries had an unprotected part "
            "in: a weight fitted on it would tell of them. Give public queries, or a "
            "set with a finite epsilon."
        )


def fused(
    own: FusionSettings, fit: FitSet, name: str, base: Run, other: Run, k: int
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Fuses a system's run with the base's.

    Args:
      own: the settings.
      fit: the queries to fit the weight on; both runs hold them.
      name: of the system.
      base: the run of the base.
      other: that of the system.
      k: documents a query.

    Returns:
      The run, and its "weight", with the measure that it was "fitted" to.
    """
    weight, notes = own.weights.get(name, own.weight), {}
    if fit.qrels and fit.is_found(base, other):
        first, second = (
            {query: run.get(query, {}) for query in fit.qrels} for run in (base, other)
        )
        weight, notes["fitted"] = evaluation.fit_weight(
            first, second, fit.qrels, own.method, METRICS[0], k
        )
    elif fit.qrels:
        # In a job all models are paid for by now.
        logging.warning(
            "%s: no run of %s or %s finds a document of its queries, so all weights "
            "tie; %g is taken. Give a set of this corpus's documents.",
            fit.place,
            own.base,
            name,
            weight,
        )
    run = evaluation.fuse([base, other], [1 - weight, weight], own.method, k)
    return run, {"weight": weight, **notes}

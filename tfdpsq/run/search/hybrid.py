"""Hybrid retrieval in `evaluate`: every system fused with one of them, such as BM25.

What is deployed is rarely a retriever alone, so the question is what it adds to BM25.
The weight of a retriever is fixed, or fitted on public or synthetic queries. Private
queries are refused for it: a weight is a function of all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from tfdpsq import evaluation, validation
from tfdpsq.data import read_manifest
from tfdpsq.evaluation.fusion import METHODS
from tfdpsq.run.core import layout, settings, sources

SETTINGS: settings.Declaration = {
    # The system that all others are fused with; "" fuses none.
    "base": settings.Text(""),
    # See `evaluation.fuse`.
    "method": settings.Text("scores", METHODS),
    # Of the other system; the base has 1 - weight.
    "weight": settings.Number(0.3, 0, 1),
    # System -> a weight of its own.
    "weights": settings.Named({}, settings.Number(0.3, 0, 1)),
    # A set of public or synthetic queries (`prepare`, `synthesize`, `filter`) to fit
    # each system's weight on; "" takes `weight`.
    "fit": settings.Text(""),
    # How many of its queries are searched for.
    "fit_queries": settings.Integer(500, 2, 1_000_000),
}

# Before the ids of queries to fit on; no id of a data set has it.
_FIT = "\x01"


def without_fits(queries: Mapping[str, str]) -> dict[str, str]:
    """Returns the queries but those to fit on, which have no embeddings elsewhere."""
    return {name: text for name, text in queries.items() if not name.startswith(_FIT)}


@dataclasses.dataclass(frozen=True)
class FitSet:
    """A set of queries to fit weights on.

    Attributes:
      setting: the settings that name it: "fusion", "rerank".
      path: of the set.
      most: queries to take of it.
    """

    setting: str
    path: str
    most: int

    def check(self) -> None:
        """Refuses a set that may be of private queries, before it is read."""
        if not sources.is_free(self.path):
            raise validation.InputError(
                f"{self.setting}.fit is {self.path!r}, which is not a set of public or "
                "synthetic queries. A weight fitted on private queries tells about "
                "them. Give what prepare, synthesize or filter wrote."
            )

    def inputs(self) -> dict[str, str]:
        """Returns the id of the set, as an input of a stage.

        Raises:
          InputError: it was written by a generator without a guarantee.
          DataError: it is damaged.
        """
        certificate = sources.certificate_of_pairs(self.path)
        if certificate is not None and not certificate["private"]:
            raise validation.InputError(
                f"{self.setting}.fit is {self.path}, whose generator learnt from "
                "private queries without protection, so a weight fitted on it tells "
                "about them. Give public queries, or a set with a certificate of "
                "finite epsilon."
            )
        return {f"{self.setting}.fit": read_manifest(self.path)["fingerprint"]}

    def read(self) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        """Reads an evenly spread part of the set.

        Returns:
          {query id: text}, and {query id: {document id: relevance}}.
        """
        source = sources.load_source(self.path)
        wanted = min(self.most, source.count)
        places = set(np.linspace(0, source.count - 1, wanted).astype(int).tolist())
        pairs = [p for row, p in enumerate(source.read()) if row in places]
        ids = [f"{_FIT}{self.setting}{number}" for number in range(len(pairs))]
        return (
            {name: pair.query for name, pair in zip(ids, pairs)},
            {name: {pair.document_id: 1} for name, pair in zip(ids, pairs)},
        )


def fit_set(own: Any, setting: str = "fusion") -> FitSet | None:
    """Returns the set that `fit` of some settings names; `None` without one."""
    return FitSet(setting, own.fit, own.fit_queries) if own.fit else None


def check(config: Any) -> None:
    """Refuses settings of a fusion that do not fit the rest, before data are read."""
    own = config.fusion
    if own.base and own.base not in config.systems:
        raise validation.InputError(
            f"fusion.base is {own.base!r}, which is none of the systems "
            f"{', '.join(sorted(config.systems))}. Name one of them, or none."
        )
    for name, weight in own.weights.items():
        if name not in config.systems or name == own.base:
            raise validation.InputError(
                f"fusion.weights.{name} is {weight:g}, but no system {name!r} is fused "
                "with the base. Correct the name, or take it out."
            )
    if fit := fit_set(own):
        fit.check()


def inputs(own: Any, setting: str = "fusion") -> dict[str, str]:
    """Returns the id of the set to fit on, if there is one; see `FitSet.inputs`."""
    fit = fit_set(own, setting)
    return fit.inputs() if fit else {}


def require_found(
    setting: str,
    path: str,
    qrels: Mapping[str, Mapping[str, int]],
    runs: Sequence[Mapping[str, Mapping[str, float]]],
    among: str,
) -> None:
    """Refuses to fit on queries that nothing right is found for: no weight would count.

    `path` is the set to fit on, named by the `fit` of `setting`, such as "rerank";
    `runs` are to be mixed, and `among` says which documents they hold.
    """
    if _any_found(qrels, runs):
        return
    raise validation.InputError(
        f"none of the {len(qrels)} queries of {setting}.fit {path} has its document "
        f"among {among}, so no weight is better than another. Give a set "
        f"of this corpus's documents, or leave {setting}.fit out."
    )


def _any_found(
    qrels: Mapping[str, Mapping[str, int]],
    runs: Sequence[Mapping[str, Mapping[str, float]]],
) -> bool:
    return any(
        run.get(query, {}).keys() & right.keys()
        for query, right in qrels.items()
        for run in runs
    )


class Fusion:
    """Fuses systems with the base as they come, and measures the results.

    Attributes:
      results: system -> what it reaches with the base, on the judged queries.
      notes: system -> its "weight", and "fitted" where it was fitted.
    """

    def __init__(
        self,
        own: Any,
        fit: FitSet | None,
        qrels: Mapping[str, Mapping[str, int]],
        k: int,
    ):
        """Reads the judgements to fit on, from the set that the settings name.

        `qrels` are of the evaluated queries, each with at most `k` documents.
        """
        self.results: dict[str, evaluation.RankingResult] = {}
        self.notes: dict[str, dict[str, Any]] = {}
        self._own, self._qrels, self._k = own, qrels, k
        self._fit_qrels = fit.read()[1] if fit else {}
        self._base: Any = None
        self._waiting: list[tuple[str, Any]] = []

    def add(self, name: str, found: Mapping[str, Mapping[str, float]]) -> None:
        """Takes a run without self-matches; keeps it until the base is known."""
        if not self._own.base:
            return
        if name == self._own.base:
            self._base = found
        else:
            self._waiting.append((name, found))
        if self._base is not None:
            for waiting in self._waiting:
                self._fuse(*waiting)
            self._waiting.clear()

    def _fuse(self, name: str, found: Mapping[str, Mapping[str, float]]) -> None:
        own, k = self._own, self._k
        weight, notes = own.weights.get(name, own.weight), {}
        if self._fit_qrels:
            base, other = (
                {query: run.get(query, {}) for query in self._fit_qrels}
                for run in (self._base, found)
            )
            if _any_found(self._fit_qrels, [base, other]):
                weight, value = evaluation.fit_weight(
                    base, other, self._fit_qrels, own.method, layout.METRICS[0], k
                )
                notes = {"fitted": value}
            else:
                # Not refused: in a job this comes after all models are paid for.
                logging.warning(
                    "neither %s nor %s finds the document of any query of fusion.fit "
                    "%s, so no weight could be fitted, and %g is taken. Give a set of "
                    "this corpus's documents",
                    own.base,
                    name,
                    own.fit,
                    weight,
                )
        base, other = (
            {query: run.get(query, {}) for query in self._qrels}
            for run in (self._base, found)
        )
        run = evaluation.fuse([base, other], [1 - weight, weight], own.method, k)
        run = {query: hits for query, hits in run.items() if hits}
        self.results[name] = evaluation.evaluate_run(self._qrels, run, layout.METRICS)
        self.notes[name] = {"weight": weight, **notes}

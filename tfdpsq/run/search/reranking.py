"""Reranking in `evaluate`: a system's best documents, ordered with a generator.

A generator knows for which documents it would have written a query. For each query the
best `depth` documents of the base, such as BM25, are ordered by

    (1 - weight) * score of the base + weight * log p(query | document)

with the likelihood in nats; the others keep their order below. Of deployed systems this
is the one that a generator is part of itself, under its own certificate.

How much a generator's likelihood is worth next to the base differs from corpus to
corpus. So the weight can be fitted, on public or synthetic queries: for the baseline,
such as the public T5, whose weight all take, as generators that were trained on other
queries than these seem worse on them than they are; without one, for each reranker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tqdm import tqdm

from tfdpsq import evaluation, validation
from tfdpsq.data import BeirDirectory
from tfdpsq.evaluation.measures import ranked
from tfdpsq.generator import QueryLikelihood, T5QueryGenerator
from tfdpsq.run.core import layout, settings, sources
from tfdpsq.run.devices import strategy
from tfdpsq.run.search import benchmark_sets, hybrid, systems

SETTINGS: settings.Declaration = {
    # The system whose best documents are reordered.
    "base": settings.Text(systems.BM25, required=True),
    # How many of them, for each query.
    "depth": settings.Integer(20, 2, 1_000_000),
    # Of the log-likelihood; the base has 1 - weight.
    "weight": settings.Number(0.25, 0, 1),
    # A set of public or synthetic queries (`prepare`, `synthesize`, `filter`) to fit
    # the weight on; "" takes `weight`.
    "fit": settings.Text(""),
    # How many of its queries are searched for.
    "fit_queries": settings.Integer(500, 2, 1_000_000),
    # The reranker that others are compared with, such as the public T5; "" for none.
    "baseline": settings.Text(""),
    # Pairs scored at a time.
    "batch_size": settings.Integer(64),
}

Run = Mapping[str, Mapping[str, float]]
# Weights to fit: finer where a weak generator's optimum is.
_WEIGHTS = (0.0, 0.02, 0.05, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


def check(config: Any) -> None:
    """Refuses settings that do not fit the rest, before any data are read."""
    own = config.rerank
    for name, path in config.rerankers.items():
        benchmark_sets.check_file_name("a reranker", name)
        if name in config.systems:
            raise validation.InputError(
                f"rerankers.{name} has the name of a system. Give it another."
            )
        if not path:
            raise validation.InputError(
                f"rerankers.{name} is {path!r}. Give it a generator: what finetune "
                "wrote, a T5, or a preset's name."
            )
    if not config.rerankers:
        return
    if own.base not in config.systems:
        raise validation.InputError(
            f"rerank.base is {own.base!r}, which is none of the systems "
            f"{', '.join(sorted(config.systems))}. Name one of them."
        )
    if own.depth > config.k:
        raise validation.InputError(
            f"rerank.depth is {own.depth}, but k is {config.k}, so that no query has "
            "as many documents. Raise k, or lower rerank.depth."
        )
    if fit := hybrid.fit_set(own, "rerank"):
        fit.check()
    if own.baseline and own.baseline not in config.rerankers:
        raise validation.InputError(
            f"rerank.baseline is {own.baseline!r}, which is none of the rerankers "
            f"{', '.join(sorted(config.rerankers))}. Name one of them, or none."
        )


def require_fits(own: Any, path: str, beir: BeirDirectory) -> None:
    """Refuses a set for none of whose queries BM25 finds the document.

    It is called before models are trained, when another base is not known yet.
    """
    if own.base != systems.BM25:
        return
    queries, qrels = hybrid.FitSet("rerank", path, own.fit_queries).read()
    index = evaluation.BM25(lambda: ((d.id, d.content) for d in beir.documents()))
    found = index.search(queries, own.depth)
    among = f"the best {own.depth} of {own.base}"
    hybrid.require_found("rerank", path, qrels, [found], among)


def inputs(config: Any) -> dict[str, str]:
    """Returns the ids of all rerankers and of the set to fit on, as inputs of a stage.

    Raises:
      InputError: one is missing, no generator, or has no vocabulary; or the set's
        generator has no guarantee.
      DataError: a damaged certificate or set.
    """
    found = hybrid.inputs(config.rerank, "rerank") if config.rerankers else {}
    for name, path in sorted(config.rerankers.items()):
        model = sources.generator_fingerprint(f"rerankers.{name}", path)
        found[f"reranker {name}"] = model
    return found


class Reranking:
    """Orders the best documents of a system with each of several generators."""

    def __init__(
        self, own: Any, rerankers: Mapping[str, str], fit: hybrid.FitSet | None = None
    ):
        """Reads the judgements to fit on; `rerankers` maps names to generators."""
        self._own, self._rerankers = own, rerankers
        self._fit_qrels = fit.read()[1] if fit else {}

    def runs(
        self,
        base: Run,
        beir: BeirDirectory,
        queries: Mapping[str, str],
        qrels: Iterable[str],
    ) -> Iterator[tuple[str, dict[str, dict[str, float]], dict[str, float]]]:
        """Yields each reranker's name, its run, and its "weight" and "depth".

        Of a fitted weight, "fitted" is what it reaches on the queries that it is fitted
        on. Documents are read once for each reranker, as a stream; of pairs, memory
        holds ids and scores.

        `base` is the run of `rerank.base`, `queries` maps the ids of all its queries to
        their texts, and `qrels` has the ids of those that are evaluated.

        Raises:
          InputError: for no query to fit on the base finds its document.
        """
        own, judged = self._own, set(qrels)
        weight = own.weight
        # The baseline first: its weight is that of all.
        for name in sorted(self._rerankers, key=lambda name: name != own.baseline):
            fits = self._fit_qrels if own.baseline in ("", name) else {}
            best = {
                query: dict(ranked(hits)[: own.depth])
                for query, hits in base.items()
                if query in judged or query in fits
            }
            if fits:
                among = f"the best {own.depth} of {own.base}"
                hybrid.require_found("rerank", own.fit, fits, [best], among)
            path = self._rerankers[name]
            nats = _likelihoods(own, name, path, best, beir, queries)
            fitted = {}
            if fits:
                weight, value = self._fitted(base, best, nats)
                fitted = {"fitted": value}
            run = {
                query: _ordered(hits, _mixed(best[query], nats[query], weight))
                for query, hits in base.items()
                if query in judged
            }
            yield name, run, {"weight": weight, "depth": own.depth, **fitted}

    def _fitted(self, base: Run, best: Run, nats: Run) -> tuple[float, float]:
        """Returns the weight that is best for the queries to fit on, and its NDCG@10.

        Of equally good weights it is the smallest.
        """
        values = {}
        for weight in _WEIGHTS:
            run = {
                query: _ordered(base[query], _mixed(best[query], nats[query], weight))
                for query in self._fit_qrels
                if base.get(query)
            }
            metric = layout.METRICS[0]
            measured = evaluation.evaluate_run(self._fit_qrels, run, [metric])
            values[weight] = measured.means[metric]
        weight = max(_WEIGHTS, key=lambda one: (values[one], -one))
        return weight, values[weight]


def _likelihoods(
    own: Any,
    name: str,
    path: str,
    best: Run,
    beir: BeirDirectory,
    queries: Mapping[str, str],
) -> dict[str, dict[str, float]]:
    """Returns log p(query | document) under one generator, for the documents given."""
    wanted: dict[str, list[str]] = {}
    for query, hits in best.items():
        for document in hits:
            wanted.setdefault(document, []).append(query)
    nats: dict[str, dict[str, float]] = {query: {} for query in best}
    places: list[tuple[str, str]] = []

    def pairs() -> Iterator[tuple[str, str]]:
        for document in beir.documents():
            for query in wanted.get(document.id, ()):
                places.append((query, document.id))
                yield document.content, queries[query]

    with strategy.here(), tqdm(desc=f"{name}: likelihoods", unit="pair") as bar:
        model = T5QueryGenerator.from_preset(path)
        likelihood = QueryLikelihood(model, batch_size=own.batch_size)
        for row, value in enumerate(likelihood.scores(pairs())):
            query, document = places[row]
            nats[query][document] = value
            bar.update()
    return nats


def _mixed(
    scores: Mapping[str, float], nats: Mapping[str, float], weight: float
) -> dict[str, float]:
    return {
        document: (1 - weight) * scores[document] + weight * nats[document]
        for document in nats
    }


def _ordered(
    hits: Mapping[str, float], scored: Mapping[str, float]
) -> dict[str, float]:
    """Returns the new scores, and below them the other documents in their order."""
    rest = {name: score for name, score in hits.items() if name not in scored}
    if not rest:
        return dict(scored)
    shift = min(scored.values()) - 1 - max(rest.values())
    return {**scored, **{name: score + shift for name, score in rest.items()}}

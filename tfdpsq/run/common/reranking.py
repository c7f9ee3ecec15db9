"""Reranking in `evaluate`: a system's best documents, ordered with a generator.

A generator knows for which documents it would have written a query. For each query the
best `depth` documents of the base, such as BM25, are ordered by

    (1 - weight) * score of the base + weight * log p(query | document)

with the likelihood in nats; the others keep their order below. A deployed reranker is
part of the generator, under its certificate.

How much a likelihood is worth next to the base differs from corpus to corpus. So the
weight can be fitted, on public or synthetic queries: for the baseline, such as the
public T5, whose weight all take, as generators that were trained on other queries than
these seem worse on them than they are; without a baseline, for each reranker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from tqdm import tqdm

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator import QueryLikelihood, T5QueryGenerator, checkpoints
from tfdpsq.run.common.benchmark_sets import METRICS
from tfdpsq.run.common.fusion import FitSet, Run
from tfdpsq.run.common.search import BM25, Scope
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.artefacts import Artefact, SyntheticSet
from tfdpsq.run.frame.settings import path, setting
from tfdpsq.validation import InputError

# Weights to fit: finer where a weak generator's optimum is.
_WEIGHTS = (0.0, 0.02, 0.05, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


@dataclasses.dataclass(frozen=True)
class RerankSettings(settings.Settings):
    """How generators order the best documents of `base`."""

    base: str = setting(BM25, help="the system whose best documents are reordered")
    depth: int = setting(20, ge=2, help="how many of them, for each query")
    weight: float = setting(
        0.25, ge=0, le=1, when={"fit": ("",)}, help="of the log-likelihood"
    )
    fit: str = path(SyntheticSet, "", help="to fit the weight on")
    fit_queries: int = setting(500, ge=2, when="fit")
    baseline: str = setting(
        "", help="the reranker that others are compared with, such as the public T5"
    )
    batch_size: int = setting(64, ge=1, speed=True)


def require_scorer(setting: str, generator: Artefact) -> None:
    """Refuses what is no generator, or holds no vocabulary, before any search."""
    if generator.promised:
        return
    checkpoints.open_checkpoint(generator.path)  # its headers
    if checkpoints.vocabulary_in(generator.path) is None:
        raise InputError(
            f"{setting} is {generator.path}, which has no {VOCABULARY_FILE}. Add it."
        )


def reranked(
    own: RerankSettings,
    rerankers: Mapping[str, str],
    fit: FitSet,
    base: Run,
    queries: Mapping[str, str],
    beir: BeirDirectory,
    scope: Scope,
) -> Iterator[tuple[str, dict[str, dict[str, float]], dict[str, float]]]:
    """Orders the best documents of the base with each of several generators.

    Documents are read once for each, as a stream.

    Args:
      own: the settings.
      rerankers: generators by name.
      fit: queries to fit the weight on.
      base: the run of `own.base`.
      queries: {query id: text} of all queries in it.
      beir: the documents.
      scope: what models are made in.

    Yields:
      Name, run, and its "weight" and "depth"; of a fitted weight also what it reaches
      on the queries it is "fitted" on.

    Raises:
      InputError: the base finds the document of no query to fit on.
    """
    best = {q: dict(evaluation.ranked(hits)[: own.depth]) for q, hits in base.items()}
    if fit.qrels and not fit.is_found(best):
        raise InputError(
            f"{fit.place}, of which no query has its document among the best "
            f"{own.depth} of {own.base}, so all weights tie. Give a set of this "
            "corpus's documents, or leave it out."
        )
    weight = own.weight
    # The baseline first: its weight is that of all.
    for name in sorted(rerankers, key=lambda name: name != own.baseline):
        nats = _likelihoods(own, name, rerankers[name], best, beir, queries, scope)
        notes: dict[str, float] = {"depth": own.depth}
        if fit.qrels and own.baseline in ("", name):
            weight, notes["fitted"] = _fitted(fit, base, best, nats)
        run = {
            query: _ordered(hits, best[query], nats[query], weight)
            for query, hits in base.items()
            if query not in fit.qrels
        }
        yield name, run, {"weight": weight, **notes}


def _fitted(fit: FitSet, base: Run, best: Run, nats: Run) -> tuple[float, float]:
    """Returns the best weight, of equally good ones the smallest, and its NDCG@10."""
    values = {}
    for weight in _WEIGHTS:
        run = {
            query: _ordered(base[query], best[query], nats[query], weight)
            for query in fit.qrels
            if base.get(query)
        }
        measured = evaluation.evaluate_run(fit.qrels, run, METRICS[:1])
        values[weight] = measured.means[METRICS[0]]
    weight = max(values, key=values.__getitem__)  # the first of equal ones
    return weight, values[weight]


def _likelihoods(
    own: RerankSettings,
    name: str,
    generator: str,
    best: Run,
    beir: BeirDirectory,
    queries: Mapping[str, str],
    scope: Scope,
) -> dict[str, dict[str, float]]:
    """Returns log p(query | document), in nats, of the documents in a run."""
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

    with scope(), tqdm(desc=f"{name}: likelihoods", unit="pair") as bar:
        model = T5QueryGenerator.from_preset(generator)
        likelihood = QueryLikelihood(model, batch_size=own.batch_size)
        for row, value in enumerate(likelihood.scores(pairs())):
            query, document = places[row]
            nats[query][document] = value
            bar.update()
    return nats


def _ordered(
    hits: Mapping[str, float],
    best: Mapping[str, float],
    nats: Mapping[str, float],
    weight: float,
) -> dict[str, float]:
    """Returns mixed scores, and below them the other documents in their order."""
    mixed = {d: (1 - weight) * best[d] + weight * nats[d] for d in nats}
    rest = {name: score for name, score in hits.items() if name not in mixed}
    if not rest:
        return mixed
    shift = min(mixed.values()) - 1 - max(rest.values())
    return {**mixed, **{name: score + shift for name, score in rest.items()}}

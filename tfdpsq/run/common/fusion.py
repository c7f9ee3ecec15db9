"""Systems of `evaluate` together: fused with one of them, and reordered by generators.

What is deployed is rarely a retriever alone, so the question is what it adds to BM25.

A generator knows for which documents it would have written a query. For each query the
best `depth` documents of the base, such as BM25, are ordered by

    (1 - weight) * score of the base + weight * log p(query | document)

with the likelihood in nats; the others keep their order below. A deployed reranker is
part of the generator, under its certificate.

How much a retriever or a likelihood is worth next to the base differs from corpus to
corpus. Weights are settings: one that is fitted on private queries would tell of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from tqdm import tqdm

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.evaluation.fusion import METHODS
from tfdpsq.generator import QueryLikelihood, T5QueryGenerator, checkpoints
from tfdpsq.run.common.search import BM25, Run, Scope
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.artefacts import Artefact
from tfdpsq.run.frame.settings import Rule, setting
from tfdpsq.validation import InputError


@dataclasses.dataclass(frozen=True)
class FusionSettings(settings.Settings):
    """Settings of fusion with the system `base`."""

    base: str = setting("", help="the system that all others are fused with")
    method: str = setting("scores", choices=METHODS, when="base")
    weight: float = setting(
        0.3, ge=0, le=1, when="base", help="of the others; base has the rest"
    )
    weights: dict = setting(
        {}, of=Rule(ge=0.0, le=1.0), when="base", help="another for some"
    )


@dataclasses.dataclass(frozen=True)
class RerankSettings(settings.Settings):
    """Settings of reranking the best documents of the system `base`."""

    base: str = setting(BM25, help="the system whose best documents are reordered")
    depth: int = setting(20, ge=2, help="how many of them, for each query")
    weight: float = setting(0.25, ge=0, le=1, help="of the log-likelihood")
    batch_size: int = setting(64, ge=1, speed=True)


def fused(own: FusionSettings, name: str, base: Run, other: Run, k: int) -> Run:
    """Returns the best `k` documents of a system and the base together."""
    weight = own.weights.get(name, own.weight)
    return evaluation.fuse([base, other], [1 - weight, weight], own.method, k)


def require_scorer(setting: str, generator: Artefact) -> None:
    """Refuses an input that is not a generator or holds no vocabulary."""
    if generator.promised:
        return
    checkpoints.open_checkpoint(generator.path)  # its headers
    if checkpoints.vocabulary_in(generator.path) is None:
        raise InputError(
            f"{setting} is {generator.path}, which has no {VOCABULARY_FILE}. Add it."
        )


def reranked(
    own: RerankSettings,
    generator: str,
    base: Run,
    queries: Mapping[str, str],
    beir: BeirDirectory,
    scope: Scope,
) -> Run:
    """Orders the best documents of the run `base` with a generator, a directory."""
    best = {q: dict(evaluation.ranked(hits)[: own.depth]) for q, hits in base.items()}
    wanted: dict[str, list[str]] = {}
    for query, hits in best.items():
        for document in hits:
            wanted.setdefault(document, []).append(query)
    places: list[tuple[str, str]] = []

    def pairs() -> Iterator[tuple[str, str]]:
        for document in beir.documents():
            for query in wanted.get(document.id, ()):
                places.append((query, document.id))
                yield document.content, queries[query]

    mixed: Run = {query: {} for query in base}
    with scope():
        model = T5QueryGenerator.from_preset(generator)
        likelihood = QueryLikelihood(model, batch_size=own.batch_size)
        scores = tqdm(likelihood.scores(pairs()), desc="likelihoods", unit="pair")
        for row, nats in enumerate(scores):
            query, document = places[row]
            score = (1 - own.weight) * best[query][document] + own.weight * nats
            mixed[query][document] = score
    for query, hits in base.items():
        found = mixed[query]
        rest = {name: score for name, score in hits.items() if name not in found}
        shift = min(found.values()) - 1 - max(rest.values()) if rest else 0.0
        found.update({name: score + shift for name, score in rest.items()})
    return mixed

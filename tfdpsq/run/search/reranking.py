"""Reranking in `evaluate`: a system's best documents, ordered with a generator.

A generator knows for which documents it would have written a query. For each query the
best `depth` documents of the base, such as BM25, are ordered by

    (1 - weight) * score of the base + weight * log p(query | document)

with the likelihood in nats; the others keep their order below. Of deployed systems this
is the one that a generator is part of itself, under its own certificate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tqdm import tqdm

from tfdpsq import validation
from tfdpsq.data import BeirDirectory, Tokenizer
from tfdpsq.evaluation.ranking.trec import ranked
from tfdpsq.generator import QueryLikelihood, T5QueryGenerator, checkpoints
from tfdpsq.run.core import settings, sources, workdir
from tfdpsq.run.devices import strategy
from tfdpsq.run.search import benchmark_sets, systems
from tfdpsq.run.training import training_settings

SETTINGS: settings.Declaration = {
    # The system whose best documents are ordered anew.
    "base": settings.Text(systems.BM25, required=True),
    # How many of them, for each query.
    "depth": settings.Integer(20, 2, 1_000_000),
    # Of the log-likelihood; the base has 1 - weight.
    "weight": settings.Number(0.25, 0, 1),
    # The reranker that others are compared with, such as the public T5; "" for none.
    "baseline": settings.Text(""),
    # As the generators were trained.
    **training_settings.prompt_settings(),
    **training_settings.length_settings(384, 128),
    # Pairs scored at a time.
    "batch_size": settings.Integer(64),
}

Run = Mapping[str, Mapping[str, float]]


def check(config: Any) -> None:
    """Refuses settings that do not fit the rest, before any data are read.

    Raises:
      InputError: names the setting.
    """
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
    if own.baseline and own.baseline not in config.rerankers:
        raise validation.InputError(
            f"rerank.baseline is {own.baseline!r}, which is none of the rerankers "
            f"{', '.join(sorted(config.rerankers))}. Name one of them, or none."
        )


def inputs(config: Any) -> dict[str, str]:
    """Returns the ids of all rerankers, as inputs of a stage.

    Raises:
      InputError: one is missing, no generator, has no vocabulary, or was trained with
        another prompt.
      DataError: a damaged certificate.
    """
    found = {}
    for name, path in sorted(config.rerankers.items()):
        model, vocabulary = generator_inputs(
            f"rerankers.{name}", path, "rerank.prompt", config.rerank.prompt
        )
        found[f"reranker {name}"] = model
        found[f"vocabulary of reranker {name}"] = vocabulary
    return found


def generator_inputs(
    setting: str, path: str, prompt_setting: str, prompt: str
) -> tuple[str, str]:
    """Returns the ids of a generator that orders documents, and of its vocabulary.

    Args:
      setting: that names the generator.
      path: its value.
      prompt_setting: that states the prompt.
      prompt: its value.

    Raises:
      InputError: it is missing, no generator, has no vocabulary, or was trained with
        another prompt.
      DataError: a damaged certificate.
    """
    try:
        located = checkpoints.locate(path)
        checkpoints.open_checkpoint(path)  # its headers
        vocabulary = sources.vocabulary_file("", path)
    except validation.InputError as error:
        raise validation.InputError(
            f"{setting} is {path}, which cannot order documents: {error} "
            "Give a generator with its vocabulary: what finetune wrote, a T5, or a "
            "preset's name."
        ) from error
    sources.certificate_of_model(path)  # it is whole, or refused
    sources.require_prompt(prompt_setting, prompt, located)
    return workdir.model_fingerprint(located), Tokenizer(vocabulary).fingerprint


def rerank(
    config: Any, base: Run, beir: BeirDirectory, queries: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """Yields each reranker's name and its run.

    Documents are read once for each reranker, as a stream; of pairs, memory holds ids
    and scores.

    Args:
      config: of the stage.
      base: the run of `rerank.base`.
      beir: the corpus.
      queries: {query id: text} of all queries of the run.
    """
    own = config.rerank
    best = {query: dict(ranked(hits)[: own.depth]) for query, hits in base.items()}
    wanted: dict[str, list[str]] = {}
    for query, hits in best.items():
        for document in hits:
            wanted.setdefault(document, []).append(query)
    for name, path in config.rerankers.items():
        with strategy.here():
            likelihood = QueryLikelihood(
                T5QueryGenerator.from_preset(path),
                Tokenizer(sources.vocabulary_file("", path)),
                own.document_length,
                own.query_length,
                own.batch_size,
                own.prompt,
            )
            scored: dict[str, dict[str, float]] = {query: {} for query in best}
            places: list[tuple[str, str]] = []

            def pairs(places=places):
                for document in beir.documents():
                    for query in wanted.get(document.id, ()):
                        places.append((query, document.id))
                        yield document.content, queries[query]

            with tqdm(desc=f"{name}: likelihoods", unit="pair") as bar:
                for row, nats in enumerate(likelihood.scores(pairs())):
                    query, document = places[row]
                    first = (1 - own.weight) * best[query][document]
                    scored[query][document] = first + own.weight * nats
                    bar.update()
        yield name, {q: _ordered(hits, scored[q]) for q, hits in base.items()}


def _ordered(
    hits: Mapping[str, float], scored: Mapping[str, float]
) -> dict[str, float]:
    """Returns the new scores, and below them the other documents in their order."""
    rest = {name: score for name, score in hits.items() if name not in scored}
    if not rest:
        return dict(scored)
    shift = min(scored.values()) - 1 - max(rest.values())
    return {**scored, **{name: score + shift for name, score in rest.items()}}

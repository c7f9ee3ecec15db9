"""Checks of the systems that `evaluate` and `zero_shot` measure, before any search."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import ml_collections

from tfdpsq import evaluation, validation
from tfdpsq.data import Tokenizer
from tfdpsq.retriever import nearest
from tfdpsq.run.core import workdir
from tfdpsq.run.search import benchmark_sets

BM25 = "bm25"
# The one kind of index that needs all embeddings in memory.
TREE = "scann"
INDEXES = (*nearest.KINDS, TREE)


def check_search(config: ml_collections.ConfigDict, metrics: Sequence[str]) -> None:
    """Refuses names and numbers that would make a search impossible to score.

    Raises:
      InputError: names the setting.
    """
    evaluation.evaluate_run({"q": {"d": 1}}, {"q": {"d": 1.0}}, metrics)
    for metric in metrics:
        if int(metric.partition("@")[2] or 0) > config.k:
            raise validation.InputError(
                f"{metric!r} needs more documents than the {config.k} that are found "
                "for a query. Raise k."
            )
    for name, path in config.systems.items():
        benchmark_sets.check_file_name("a system", name)
        if not path:
            raise validation.InputError(
                f"systems.{name} is {path!r}. Give it the directory of a retriever "
                f"that train_retriever wrote, or {BM25!r}."
            )


def fingerprints(config: ml_collections.ConfigDict) -> dict[str, str]:
    """Returns the ids of all retrievers of `systems`, as inputs of a stage.

    Raises:
      InputError: one is missing.
    """
    return {
        f"system {name}": workdir.stage_fingerprint(path)
        for name, path in sorted(config.systems.items())
        if path != BM25
    }


def vocabulary(config: ml_collections.ConfigDict) -> dict[str, str]:
    """Returns the fingerprint of the vocabulary, if a retriever needs one.

    Raises:
      InputError: a retriever that is missing, or was trained with another vocabulary.
      DataError: it is not a vocabulary.
    """
    retrievers = {n: p for n, p in config.systems.items() if p != BM25}
    if not retrievers:
        return {}
    if not config.vocabulary:
        raise validation.InputError(
            f"vocabulary is {config.vocabulary!r}, but system {min(retrievers)!r} "
            "needs one. Give the SentencePiece file that it was trained with."
        )
    tokenizer = Tokenizer(config.vocabulary)
    for name, path in retrievers.items():
        stage = workdir.read_json(pathlib.Path(path) / workdir.STAGE_FILE)
        theirs = stage.get("inputs", {}).get("vocabulary")
        if not (pathlib.Path(path) / "model").is_dir():
            raise validation.InputError(
                f"system {name!r} is {path}, which holds no retriever. Give what "
                "train_retriever wrote."
            )
        if theirs not in (None, tokenizer.fingerprint):
            raise validation.InputError(
                f"vocabulary is {config.vocabulary}, but system {name!r} ({path}) was "
                "trained with another. Give the SentencePiece file it was trained "
                "with; systems of several vocabularies need a run each."
            )
    return {"vocabulary": tokenizer.fingerprint}

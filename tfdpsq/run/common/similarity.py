"""Similarity of synthetic queries to private ones, for the stage `evaluate`.

All of it reads private queries, and no ε covers it.

- `bleu`: synthetic queries against the held-out ones of the same documents.
- `mauve`, `distinct`, `lengths`, `vocabulary`: all synthetic queries against all
  held-out ones, as distributions, on samples of one size.
- `copies`: distances to the *training* queries, with the held-out queries as the
  control; left out where the queries compared with are the training queries.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdpsq import evaluation, words
from tfdpsq.data import BeirDirectory, read_manifest, read_synthetic
from tfdpsq.run.common import text_features
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.artefacts import File, Generator
from tfdpsq.run.frame.settings import path, setting

# k-means starts from these seeds; the first is the published one.
_FIRST_SEED = 25
# Training queries that are indexed at a time.
_INDEXED = 20_000


@dataclasses.dataclass(frozen=True)
class SimilaritySettings(settings.Settings):
    """How sets of queries are compared with private ones."""

    featurizer: str = setting(
        "t5",
        choices=tuple(text_features.PRESETS),
        help="makes the features for MAUVE and distances",
    )
    init: str = path(Generator, "", when={"featurizer": ("t5",)})
    gpt2: str = path(
        File,
        "",
        when={"featurizer": ("gpt2",)},
        help="a preset of keras-nlp's; without one, the published MAUVE's is fetched",
    )
    seeds: int = setting(5, ge=2, when="featurizer", help="of k-means, for MAUVE")
    samples: int = setting(5_000, ge=2, help="most texts of a set that get features")
    training_split: str = setting("train", help="where copies are looked for")
    batch_size: int = setting(128, ge=1, speed=True)


@dataclasses.dataclass
class _Texts:
    """Queries of one kind: their number, and a sample of them in random order.

    A beginning of the sample is a smaller one. `features` are [n, d]; `by_grams` are
    [n] distances to the nearest training query.
    """

    count: int
    sample: list[str]
    features: np.ndarray | None = None
    by_grams: np.ndarray | None = None


def measure(
    own: SimilaritySettings, sets: Mapping[str, str], beir: BeirDirectory, split: str
) -> dict[str, dict[str, Any]]:
    """Compares sets of synthetic queries with private ones.

    Args:
      own: the settings.
      sets: their directories, by name.
      beir: the private pairs.
      split: of the held-out queries.

    Returns:
      {set: JSON values}, see the module; without "mauve" where there is no featurizer
      or fewer than two texts on a side.
    """
    if not sets:
        return {}
    references: dict[str, list[str]] = {}
    held: dict[str, str] = {}
    for pair in beir.all_pairs(split):
        references.setdefault(pair.document_id, []).append(pair.query)
        held[pair.query_id] = pair.query
    asked = list(held.values())
    trained_on = beir.pairs(own.training_split)

    def training_queries() -> Iterator[str]:
        return (pair.query for pair in trained_on)

    held_out = _Texts(len(asked), [asked[at] for at in _drawn(own, len(asked))])
    rows = _drawn(own, len(trained_on))
    training = _Texts(len(trained_on), [trained_on[at].query for at in rows])
    synthetic, answers, copies = {}, {}, {}
    for name, place in sets.items():
        count = read_manifest(place)["count"]
        sample = dict.fromkeys(_drawn(own, count), "")
        answers[name] = hypotheses = list[tuple[str, str]]()

        def queries(place: str, sample: dict, hypotheses: list) -> Iterator[str]:
            for row, query in enumerate(read_synthetic(place)):
                if row in sample:
                    sample[row] = query.query
                if query.document_id in references:
                    hypotheses.append((query.document_id, query.query))
                yield query.query

        found = queries(place, sample, hypotheses)
        copies[name] = evaluation.exact_copies(found, training_queries())
        synthetic[name] = _Texts(count, list(sample.values()))
    weights = own.init or own.gpt2
    _add_features(own, weights, [held_out, training, *synthetic.values()])
    _add_distances([held_out, *synthetic.values()], training_queries())
    used = f"{own.featurizer} {weights or text_features.PRESETS[own.featurizer]}"
    rules = {
        "words": words.RULES,
        "equal_texts": "the same words in the same order",
        "featurizer": used if own.featurizer else "none",
    }
    results = {}
    for name, texts in synthetic.items():
        results[name] = {
            **_bleu(answers[name], references, split),
            **_as_distributions(own, texts, held_out),
            "rules": rules,
        }
        if split != own.training_split:  # else queries would be their own control
            control = evaluation.exact_copies(asked, training_queries())
            exact = {"synthetic": copies[name], "held_out": control}
            results[name]["copies"] = _copies(texts, held_out, training, exact)
    return results


def _drawn(own: SimilaritySettings, count: int) -> list[int]:
    """Draws the sample's places; they are public, and the same in every run."""
    return np.random.default_rng(0).permutation(count)[: own.samples].tolist()


def _add_features(
    own: SimilaritySettings, weights: str, several: Sequence[_Texts]
) -> None:
    """Makes all features in one call, so that the model is loaded once."""
    if not own.featurizer:
        return
    together = [text for texts in several for text in texts.sample]
    found = text_features.features(together, own.featurizer, weights, own.batch_size)
    ends = np.cumsum([len(texts.sample) for texts in several])
    for texts, part in zip(several, np.split(found, ends[:-1])):
        texts.features = part


def _add_distances(several: Sequence[_Texts], trained_on: Iterable[str]) -> None:
    """Compares all samples with some training queries after the others."""
    stream = iter(trained_on)
    vectors = [evaluation.gram_vectors(texts.sample) for texts in several]
    while some := list(itertools.islice(stream, _INDEXED)):
        private = evaluation.gram_vectors(some)
        for texts, ours in zip(several, vectors):
            found = evaluation.nearest_by_cosine(ours, private)
            before = texts.by_grams
            texts.by_grams = found if before is None else np.minimum(found, before)


def _bleu(
    hypotheses: Sequence[tuple[str, str]],
    references: Mapping[str, list[str]],
    split: str,
) -> dict[str, Any]:
    """Scores synthetic queries against the held-out queries of their documents."""
    if not hypotheses:
        return {"bleu": None, "queries": 0}
    score, signature = evaluation.corpus_bleu(
        [query for _, query in hypotheses],
        [references[document_id] for document_id, _ in hypotheses],
    )
    return {
        "bleu": score,
        "signature": signature,
        "queries": len(hypotheses),
        "against": f"private queries of split {split!r} on the same documents",
    }


def _as_distributions(
    own: SimilaritySettings, texts: _Texts, held_out: _Texts
) -> dict[str, Any]:
    """Compares samples of synthetic and held-out queries of the same size."""
    size = min(len(texts.sample), len(held_out.sample))
    ours, theirs = texts.sample[:size], held_out.sample[:size]
    both = {
        "synthetic": evaluation.diversity_of(ours),
        "held_out": evaluation.diversity_of(theirs),
    }
    difference = evaluation.diversity_difference(ours, theirs)
    sizes = {"synthetic": texts.count, "held_out": held_out.count, "compared": size}
    found: dict[str, Any] = {"sizes": sizes}
    for kind in ("distinct", "lengths", "vocabulary"):
        found[kind] = {name: values[kind] for name, values in both.items()}
        found[kind].update(difference.get(kind, {}))
    if texts.features is not None and held_out.features is not None and size > 1:
        mauve = evaluation.mauve_of_features(
            texts.features[:size],
            held_out.features[:size],
            seeds=range(_FIRST_SEED, _FIRST_SEED + own.seeds),
        )
        found["mauve"] = dataclasses.asdict(mauve)
    return found


def _copies(
    texts: _Texts, held_out: _Texts, training: _Texts, exact: Mapping[str, Any]
) -> dict[str, Any]:
    """Compares distances to the nearest training query with those of the control."""
    found: dict[str, Any] = {"exact": exact}
    if texts.by_grams is not None and held_out.by_grams is not None:
        found["by_grams"] = evaluation.closeness(texts.by_grams, held_out.by_grams)
    if training.features is not None:
        ours, control = (
            evaluation.nearest_by_cosine(each.features, training.features)
            for each in (texts, held_out)
        )
        found["by_features"] = evaluation.closeness(ours, control)
    found["training_queries"] = training.count
    found["training_queries_with_features"] = len(training.sample)
    return found

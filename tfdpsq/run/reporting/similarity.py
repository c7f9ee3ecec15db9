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
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import evaluation, validation, words
from tfdpsq.data import BeirDirectory, Tokenizer, read_manifest, read_synthetic
from tfdpsq.data.texts import Pair
from tfdpsq.generator import checkpoints
from tfdpsq.run.core import settings, sources, workdir
from tfdpsq.run.reporting import text_features

FEATURIZERS = {"": "", "t5": text_features.PRESET, "gpt2": text_features.GPT2}
# k-means starts from these seeds; the first is the published one.
_FIRST_SEED = 25
# Training queries that are indexed at a time.
_INDEXED = 20_000
_TWO_TEXTS = "MAUVE makes clusters of at least 2 texts of each kind."
_TWO_SEEDS = "MAUVE needs at least 2: one value without a deviation says little."


def declared() -> dict[str, settings.Setting]:
    """Returns the settings of the comparison.

    `featurizer` makes the features for MAUVE and distances: "t5", the encoder of the
    T5 `init` (by default the package's own, so that numbers compare across data);
    "gpt2", the keras-nlp preset `init`; or "", for neither. k-means runs with `seeds`
    seeds. At most `samples` texts of a set get features; a public seed draws them.
    Copies are looked for among the queries of `training_split`.
    """
    return {
        "featurizer": settings.Text("t5", tuple(FEATURIZERS)),
        "init": settings.Text(""),
        "batch_size": settings.Integer(128),
        "seeds": settings.Integer(5, 2, 10_000, remedy=_TWO_SEEDS),
        "samples": settings.Integer(5_000, 2, remedy=_TWO_TEXTS),
        "training_split": settings.Text("train", required=True),
    }


def inputs(config: ml_collections.ConfigDict) -> dict[str, str]:
    """Checks `evaluate`'s config; fingerprints what is read besides the pairs.

    Raises:
      InputError: bad settings, or no such model.
      DataError: no such split or set.
    """
    if not config.synthetic:
        return {}
    own = config.similarity
    for name, path in config.synthetic.items():
        if not path or not sources.is_free(path):
            raise validation.InputError(
                f"synthetic.{name} is {path!r}, which holds no set of queries. Give it "
                "the directory of a set that synthesize or filter wrote."
            )
    splits = sources.open_beir(config.data).splits()
    for field, split in (
        ("similarity_split", config.similarity_split),
        ("similarity.training_split", own.training_split),
    ):
        validation.one_of(field, split, splits)
    found = {
        f"synthetic {name}": read_manifest(path)["fingerprint"]
        for name, path in sorted(config.synthetic.items())
    }
    if own.featurizer:
        init = check_models(own)
        if os.path.isdir(init):
            init = workdir.model_fingerprint(init)
        found["featurizer"] = init
    return found


def check_models(own: ml_collections.ConfigDict) -> str:
    """Returns where the featurizer's weights are; "" without one.

    Raises:
      InputError: there are none.
    """
    if not own.featurizer:
        return ""
    # GPT-2 by its name is downloaded where it is needed.
    found = _init(own)
    if own.featurizer == "gpt2":
        text_features.require_gpt2(found)
    else:
        try:
            tokenizer = Tokenizer(sources.vocabulary_file("", found))
            shape = checkpoints.open_checkpoint(found).config
            tokenizer.require_embeddings(shape.vocabulary_size)
        except (validation.InputError, OSError) as error:
            raise validation.InputError(
                f"similarity.init is {own.init!r}: {error}"
            ) from error
    return os.fspath(checkpoints.locate(found)) if own.featurizer == "t5" else found


@dataclasses.dataclass
class _Texts:
    """Queries of one kind, with a sample in memory.

    Attributes:
      count: number of queries.
      sample: those that get features, in random order: its beginning is a smaller
        sample.
      features: [len(sample), d], where there is a featurizer.
      by_grams: [len(sample)] distances to the nearest training query.
    """

    count: int
    sample: list[str]
    features: np.ndarray | None = None
    by_grams: np.ndarray | None = None


class _Queries(Sequence[str]):
    """The queries of pairs, read from disk."""

    def __init__(self, pairs: Sequence[Pair]):
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[str]:
        return (pair.query for pair in self._pairs)

    def __getitem__(self, row: Any) -> Any:
        return self._pairs[row].query


@dataclasses.dataclass(frozen=True)
class _Control:
    """Copies and distances of the held-out queries."""

    exact: Mapping[str, Any]
    distances: Mapping[str, np.ndarray]


def measure(
    config: ml_collections.ConfigDict, beir: BeirDirectory
) -> dict[str, dict[str, Any]]:
    """Compares every synthetic set with the private queries.

    Returns:
      {set: JSON values}, see the module; "mauve" is omitted without a featurizer
      or with fewer than two texts on a side.
    """
    if not config.synthetic:
        return {}
    own = config.similarity
    pairs = beir.all_pairs(config.similarity_split)
    references: dict[str, list[str]] = {}
    for pair in pairs:
        references.setdefault(pair.document_id, []).append(pair.query)
    asked = list({pair.query_id: pair.query for pair in pairs}.values())
    held_out = _texts(own, asked)
    trained_on = _Queries(beir.pairs(own.training_split))
    training = _texts(own, trained_on)
    synthetic, hypotheses, copies = {}, {}, {}
    for name, path in config.synthetic.items():
        synthetic[name], hypotheses[name], copies[name] = _read(
            own, path, references, trained_on
        )
    _add_features(own, [held_out, training, *synthetic.values()])
    _add_distances([held_out, *synthetic.values()], trained_on)
    control = _Control(
        evaluation.exact_copies(asked, trained_on), _distances(held_out, training)
    )
    return {
        name: {
            **_bleu(hypotheses[name], references, config.similarity_split),
            **_as_distributions(own, texts, held_out),
            # Training queries are no control of distances to themselves.
            **(
                {}
                if config.similarity_split == own.training_split
                else {"copies": _copies(texts, copies[name], training, control)}
            ),
            "rules": {
                "words": words.RULES,
                "equal_texts": "the same words in the same order",
                "featurizer": _featurizer(own),
            },
        }
        for name, texts in synthetic.items()
    }


def _init(own: ml_collections.ConfigDict) -> str:
    return own.init or FEATURIZERS[own.featurizer]


def _featurizer(own: ml_collections.ConfigDict) -> str:
    return f"{own.featurizer} {_init(own)}" if own.featurizer else "none"


def _texts(own: ml_collections.ConfigDict, texts: Sequence[str]) -> _Texts:
    return _Texts(len(texts), [texts[place] for place in _drawn(own, len(texts))])


def _drawn(own: ml_collections.ConfigDict, count: int) -> list[int]:
    """Draws the sample's places; they are public, and the same in every run."""
    return np.random.default_rng(0).permutation(count)[: own.samples].tolist()


def _add_features(own: ml_collections.ConfigDict, several: Sequence[_Texts]) -> None:
    """Makes all features in one call, so that the model is loaded once."""
    together = [text for texts in several for text in texts.sample]
    if own.featurizer == "t5":
        features = text_features.t5_encoder_features(
            together, _init(own), own.batch_size
        )
    elif own.featurizer == "gpt2":
        features = text_features.gpt2_features(together, _init(own), own.batch_size)
    else:
        return
    ends = np.cumsum([len(texts.sample) for texts in several])
    for texts, of_texts in zip(several, np.split(features, ends[:-1])):
        texts.features = of_texts


def _read(
    own: ml_collections.ConfigDict,
    path: str,
    references: Container[str],
    trained_on: Sequence[str],
) -> tuple[_Texts, list[tuple[str, str]], dict[str, Any]]:
    """Streams a set.

    Returns:
      Its sample, (document id, query) of documents that have references, and the
      number of copies among all its queries.
    """
    count = read_manifest(path)["count"]
    sample = dict.fromkeys(_drawn(own, count), "")
    hypotheses = []

    def queries() -> Iterator[str]:
        for place, row in enumerate(read_synthetic(path)):
            if place in sample:
                sample[place] = row.query
            if row.document_id in references:
                hypotheses.append((row.document_id, row.query))
            yield row.query

    copies = evaluation.exact_copies(queries(), trained_on)
    return _Texts(count, list(sample.values())), hypotheses, copies


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
    own: ml_collections.ConfigDict, texts: _Texts, held_out: _Texts
) -> dict[str, Any]:
    """Compares samples of synthetic and held-out queries of the same size."""
    size = min(len(texts.sample), len(held_out.sample))
    both = {"synthetic": texts.sample[:size], "held_out": held_out.sample[:size]}
    ours, theirs = both.values()
    each = {name: evaluation.diversity_of(of) for name, of in both.items()}
    difference = evaluation.diversity_difference(ours, theirs)
    found: dict[str, Any] = {
        "sizes": {
            "synthetic": texts.count,
            "held_out": held_out.count,
            "compared": size,
        },
        **{
            kind: {
                **{name: figures[kind] for name, figures in each.items()},
                **difference.get(kind, {}),
            }
            for kind in ("distinct", "lengths", "vocabulary")
        },
    }
    if texts.features is not None and held_out.features is not None and size > 1:
        seeds = range(_FIRST_SEED, _FIRST_SEED + own.seeds)
        mauve = evaluation.mauve_of_features(
            texts.features[:size],
            held_out.features[:size],
            seeds=seeds,
        )
        found["mauve"] = dataclasses.asdict(mauve)
    return found


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


def _distances(texts: _Texts, training: _Texts) -> dict[str, np.ndarray]:
    """Returns the sample's distances to the nearest training query, by measure."""
    found = {} if texts.by_grams is None else {"by_grams": texts.by_grams}
    if texts.features is not None and training.features is not None:
        found["by_features"] = evaluation.nearest_by_cosine(
            texts.features, training.features
        )
    return found


def _copies(
    texts: _Texts,
    exact: Mapping[str, Any],
    training: _Texts,
    control: _Control,
) -> dict[str, Any]:
    return {
        "exact": {
            "synthetic": exact,
            "held_out": control.exact,
        },
        **{
            name: evaluation.closeness(distances, control.distances[name])
            for name, distances in _distances(texts, training).items()
        },
        "training_queries": training.count,
        "training_queries_with_features": len(training.sample),
    }

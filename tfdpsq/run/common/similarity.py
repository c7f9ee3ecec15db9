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
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import evaluation, words
from tfdpsq.data import BeirDirectory, Tokenizer, read_manifest, read_synthetic
from tfdpsq.data.beir import PairTable
from tfdpsq.generator import checkpoints
from tfdpsq.layers import MaskedMeanPooling
from tfdpsq.run.common.kinds import Generator
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.settings import path, setting
from tfdpsq.validation import InputError

_INDEXED = 20_000  # training queries at a time
_LENGTH = 128  # tokens of a text: more than a query has


@dataclasses.dataclass(frozen=True)
class SimilaritySettings(settings.Settings):
    """Settings of the comparison of query sets with private queries."""

    init: str = path(
        Generator,
        "t5_tiny_pydocs",
        help="whose encoder makes features for MAUVE, or a keras-nlp preset of GPT-2",
    )
    seeds: int = setting(5, ge=2, help="of k-means, for MAUVE, from 25 as published")
    samples: int = setting(5_000, ge=1, help="most texts of a set that get features")
    training_split: str = setting("train", help="where copies are looked for")
    batch_size: int = setting(128, ge=1, speed=True)


def measure(
    own: SimilaritySettings, sets: Mapping[str, str], beir: BeirDirectory, split: str
) -> dict[str, dict[str, Any]]:
    """Compares sets (directories by name) with the private queries of a split.

    Returns {set: JSON values}, see the module; of one text there is no "mauve".
    """
    if not sets:
        return {}
    references: dict[str, list[str]] = {}
    asked: dict[str, str] = {}
    for pair in beir.all_pairs(split):
        references.setdefault(pair.document_id, []).append(pair.query)
        asked[pair.query_id] = pair.query
    held_out = _sample(own, asked.values(), len(asked))
    featurize = load_features(own.init, own.batch_size)
    features = featurize(held_out)
    training = beir.pairs(own.training_split)
    apart = split != own.training_split  # else queries would be their own control
    control = _distances(held_out, training) if apart else np.zeros(0)
    results = {}
    for name, place in sets.items():
        rows = (r for r in read_synthetic(place) if r.document_id in references)
        pairs = [(row.query, references[row.document_id]) for row in rows]
        count = read_manifest(place)["count"]
        sample = _sample(own, _queries(place), count)
        size = min(len(sample), len(held_out))
        results[name] = found = {
            **_bleu(pairs, split),
            "sizes": {"synthetic": count, "held_out": len(asked), "compared": size},
            **_diversity(sample[:size], held_out[:size]),
            "rules": {"words": words.RULES, "featurizer": own.init},
        }
        if size > 1:
            theirs, seeds = featurize(sample[:size]), range(25, 25 + own.seeds)
            mauve = evaluation.mauve_of_features(theirs, features[:size], seeds=seeds)
            found["mauve"] = dataclasses.asdict(mauve)
        if apart:
            exact = {"synthetic": _queries(place), "held_out": asked.values()}
            found["copies"] = {
                "exact": {
                    side: evaluation.exact_copies(texts, (p.query for p in training))
                    for side, texts in exact.items()
                },
                "by_grams": evaluation.closeness(_distances(sample, training), control),
                "training_queries": len(training),
            }
    return results


def _queries(place: str) -> Iterable[str]:
    return (row.query for row in read_synthetic(place))


def _sample(own: SimilaritySettings, texts: Iterable[str], count: int) -> list[str]:
    """Draws texts at public places in random order: a beginning is a sample, too."""
    places = np.random.default_rng(0).permutation(count)[: own.samples].tolist()
    found = dict.fromkeys(places, "")
    for place, text in enumerate(texts):
        if place in found:
            found[place] = text
    return list(found.values())


def _distances(texts: Sequence[str], training: PairTable) -> np.ndarray:
    """Returns [n] distances to the nearest training query, some of these at a time."""
    found, vectors = np.full(len(texts), np.inf), evaluation.gram_vectors(texts)
    stream = (pair.query for pair in training)
    while some := list(itertools.islice(stream, _INDEXED)):
        private = evaluation.gram_vectors(some)
        found = np.minimum(found, evaluation.nearest_by_cosine(vectors, private))
    return found


def _bleu(pairs: Sequence[tuple[str, list[str]]], split: str) -> dict[str, Any]:
    """Scores synthetic queries against the held-out queries of their documents."""
    if not pairs:
        return {"bleu": None, "queries": 0}
    score, signature = evaluation.corpus_bleu(*map(list, zip(*pairs)))
    against = f"private queries of split {split!r} on the same documents"
    found = {"bleu": score, "signature": signature, "queries": len(pairs)}
    return {**found, "against": against}


def _diversity(ours: Sequence[str], theirs: Sequence[str]) -> dict[str, dict]:
    """Compares samples of synthetic and held-out queries of the same size."""
    own, other = evaluation.diversity_of(ours), evaluation.diversity_of(theirs)
    found: dict[str, dict] = {**evaluation.diversity_difference(ours, theirs)}
    for kind in ("distinct", "lengths", "vocabulary"):
        both = {"synthetic": own[kind], "held_out": other[kind]}
        found[kind] = {**both, **found.get(kind, {})}
    return found


def load_features(
    init: str, batch_size: int = 128
) -> Callable[[Sequence[str]], np.ndarray]:
    """Loads a T5's encoder, or a GPT-2.

    Returns:
      Takes n texts and returns [n, width] float32; equal texts have equal rows.
    """
    directory = checkpoints.locate(init)
    file = directory / "config.json"
    gpt2 = file.is_file() and "GPT2Backbone" in file.read_text("utf-8")
    encode, states = (_gpt2 if gpt2 else _t5)(directory)
    matrix = tf.TensorSpec([None, None], tf.int32)
    forward = tf.function(states, [matrix, matrix], autograph=False)

    def features(texts: Sequence[str]) -> np.ndarray:
        # Each once, so that equal texts are equal to the bit; like lengths together.
        unique = sorted(dict.fromkeys(texts), key=len)
        ids, lengths = map(np.asarray, encode(unique))
        found: dict[str, np.ndarray] = {}
        for start in range(0, len(unique), batch_size):
            some = slice(start, start + batch_size)
            mask = np.arange(lengths[some].max()) < lengths[some, np.newaxis]
            rows = forward(ids[some, : mask.shape[1]], mask.astype(np.int32)).numpy()
            found.update(zip(unique[some], rows))
        return np.stack([found[text] for text in texts])

    return features


def _t5(directory: pathlib.Path) -> tuple[Callable, Callable]:
    """Returns a T5's tokens of texts, and the means of its encoder's states."""
    vocabulary = checkpoints.vocabulary_in(directory)
    if vocabulary is None:
        raise InputError(f"similarity.init, {directory}, has no vocabulary. Add it.")
    tokenizer = Tokenizer(vocabulary)
    config, encoder = checkpoints.load_encoder(directory)
    tokenizer.require_embeddings(config.vocabulary_size)
    pool = MaskedMeanPooling()

    def states(tokens: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        found = encoder({"encoder_token_ids": tokens, "encoder_padding_mask": mask})
        return pool(found, mask=mask)

    return lambda texts: tokenizer.encode(texts, _LENGTH), states


def _gpt2(directory: pathlib.Path) -> tuple[Callable, Callable]:
    """Returns GPT-2's tokens of texts, and the state of each text's last token."""
    from keras_nlp import models

    tokenizer = models.GPT2Tokenizer.from_preset(str(directory))
    model = models.GPT2Backbone.from_preset(str(directory))

    def encode(texts: Sequence[str]) -> tuple[Any, Any]:
        rows = tokenizer([text or tokenizer.end_token for text in texts])[:, :_LENGTH]
        return rows.to_tensor().numpy(), rows.row_lengths().numpy()

    def states(tokens: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        found = model({"token_ids": tokens, "padding_mask": mask})
        return tf.gather(found, tf.reduce_sum(mask, 1) - 1, batch_dims=1)

    return encode, states

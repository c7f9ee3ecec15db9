"""Small retrievers, their batches, plans and searches, for tests."""

import numpy as np
import tensorflow as tf

from helpers import plans
from tfdpsq.layers import T5Config
from tfdpsq.privacy import PrivacyPlan
from tfdpsq.retriever import RetrieverConfig, TwoTower
from tfdpsq.retriever.index import search_chunks


def collate(arrays, indices, weights=None):
    """A batch of rows of `encode_pairs`' arrays; weight 0 marks padding."""
    batch = {name: array[indices] for name, array in arrays.items()}
    weights = np.ones(len(indices)) if weights is None else weights
    return {**batch, "weights": np.asarray(weights, np.float32)}


def tensors(arrays, indices, weights=None):
    """`collate` as tensors."""
    batch = collate(arrays, np.asarray(indices), weights)
    return {name: tf.constant(values) for name, values in batch.items()}


def small_towers(dropout=0.0, **options):
    """A retriever of six numbers a text, with weights of a fixed seed."""
    tf.keras.utils.set_random_seed(1)
    t5 = T5Config(30, 1, 2, 8, 12, 4, "1.1", dropout=dropout)
    return TwoTower(RetrieverConfig(t5, 6, 10.0, 4, 5, **options))


def plan(rows, clip_norm, multiplier, **options):
    """A plan of at most so many rows; no noise is drawn."""
    spec = plans.spec(
        clip_norm=clip_norm,
        num_units=1000,
        batch_size=rows,
        steps=1,
        sensitivity_multiplier=multiplier,
        **options,
    )
    return PrivacyPlan(spec, rows, 1.0)


def search(queries, documents, ids, k, kind="scann_brute_force"):
    """Scores and ids [Q, k] of the best documents."""
    best = search_chunks({"": queries}, [(ids, documents)], k, kind)[""]
    return best.scores, best.ids

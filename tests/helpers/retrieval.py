"""Batches and searches of a retriever, for tests."""

import numpy as np

from tfdpsq.retriever.index import search_chunks


def collate(arrays, indices, weights=None):
    """A batch of rows of `encode_pairs`' arrays; weight 0 marks padding."""
    batch = {name: array[indices] for name, array in arrays.items()}
    weights = np.ones(len(indices)) if weights is None else weights
    return {**batch, "weights": np.asarray(weights, np.float32)}


def search(queries, documents, ids, k, kind="scann_brute_force"):
    """Scores and ids [Q, k] of the best documents."""
    best = search_chunks({"": queries}, [(ids, documents)], k, kind)[""]
    return best.scores, best.ids

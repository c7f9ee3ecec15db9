"""Copies of private texts: naive oracles, and what the control means."""

import numpy as np
import pytest

from tfdpsq.evaluation import (
    closeness,
    exact_copies,
    gram_vectors,
    nearest_by_cosine,
)
from tfdpsq.validation import InputError


def test_exact_copies_are_counted_by_words():
    private = ["Sort a list", "read a ﬁle", "read a file", "merge two trees"]
    texts = ["sort  A list ", "READ A FILE", "read a file", "sort a list!", "merge"]
    found = exact_copies(texts, private)
    # The first four; the first and fourth are one private text, as the others are.
    assert found == {"count": 4, "share": 4 / 5, "distinct": 2}
    assert exact_copies(["x"], private) == {"count": 0, "share": 0, "distinct": 0}


def _vectors(n, d=6, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def test_cosine_distances_equal_the_naive_ones():
    ours, theirs = _vectors(10, seed=1) * 7, _vectors(13, seed=2)
    a, b = (
        x / np.linalg.norm(x, axis=1, keepdims=True)
        for x in (ours.astype(np.float64), theirs.astype(np.float64))
    )
    expected = (1 - a @ b.T).min(axis=1)
    got = nearest_by_cosine(ours, theirs)
    assert (got.dtype, got.shape) == (np.float64, (10,))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_bad_vectors_and_texts_are_refused():
    with pytest.raises(InputError, match="width 3, private 4"):
        nearest_by_cosine(np.ones([2, 3]), np.ones([2, 4]))
    with pytest.raises(InputError, match="texts is empty"):
        exact_copies([], ["a"])
    with pytest.raises(InputError, match="must be finite"):
        closeness(np.array([np.nan]), np.array([0.1]))


def _naive_nearest(texts, private):
    def runs(text):
        text = f"\2\2{' '.join(text.casefold().split())}\3\3\3"
        return {text[i : i + 5] for i in range(len(text) - 4)}

    sets = [runs(text) for text in private]
    return [
        1 - max(len(runs(t) & s) / (len(runs(t)) * len(s)) ** 0.5 for s in sets)
        for t in texts
    ]


def _sentences(n, seed):
    random = np.random.default_rng(seed)
    words = "sort read list file merge tree node a the of Two it".split()
    return [" ".join(random.choice(words, random.integers(1, 9))) for _ in range(n)]


def test_gram_distances_equal_the_naive_ones():
    texts = _sentences(40, 1) + ["zzz", "", "?!", "a"]
    private = [*_sentences(30, 2), "?!", "tree  NODE"]
    got = nearest_by_cosine(gram_vectors(texts), gram_vectors(private))
    np.testing.assert_allclose(got, _naive_nearest(texts, private), atol=1e-9)
    assert got[40] == 1 and got[42] == pytest.approx(0)  # nothing in common; the same

"""Losses of a softmax, against float64 and TensorFlow's own."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.layers.softmax import cross_entropy, log_sum_exp

CASES = [((7,), None), ((4, 7), False), ((3, 2, 50), True)]


def _scores(shape, scale=5.0):
    return np.random.default_rng(1).normal(0, scale, shape).astype(np.float32)


def _exact(scores):
    """Returns log Σ exp and the softmax in float64."""
    scores = scores.astype(np.float64)
    largest = scores.max(axis=-1, keepdims=True)
    sums = np.exp(scores - largest).sum(axis=-1, keepdims=True)
    return (np.log(sums) + largest)[..., 0], np.exp(scores - largest) / sums


def _with_gradient(function, scores, upstream, compiled):
    def both(scores):
        with tf.GradientTape() as tape:
            tape.watch(scores)
            found = function(scores)
            total = tf.reduce_sum(found * upstream)
        return found, tape.gradient(total, scores)

    if compiled is not None:
        both = tf.function(both, jit_compile=compiled)
    return [values.numpy() for values in both(tf.constant(scores))]


@pytest.mark.parametrize("shape, compiled", CASES)
def test_log_sum_exp_and_cross_entropy_equal_float64(shape, compiled):
    scores, upstream = _scores(shape), _scores(shape[:-1], 1.0)
    ids = np.random.default_rng(2).integers(0, shape[-1], shape[:-1])
    total, softmax = _exact(scores)
    ones = np.eye(shape[-1])[ids]
    for function, value, slope, off in (
        (log_sum_exp, total, softmax, {"rtol": 1e-6}),
        (
            lambda given: cross_entropy(ids, given),
            total - (scores * ones).sum(-1),
            softmax - ones,
            {"atol": 3e-6},
        ),
    ):
        found, gradient = _with_gradient(function, scores, upstream, compiled)
        np.testing.assert_allclose(found, value, **off)
        expected = slope * upstream[..., np.newaxis]
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


def test_extreme_scores_lose_no_digits():
    """Where exp alone would overflow, or the own score's probability be 0."""
    scores = np.float32([[300, 302, -1e30], [-1e4, -1e4, -1e30], [0, 500, -np.inf]])
    own = np.array([0, 1, 0])
    found = cross_entropy(own, scores).numpy()
    exact = np.log1p(np.exp(2.0)), np.log(2.0), 500.0
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    theirs = tf.nn.sparse_softmax_cross_entropy_with_logits(own, scores)
    np.testing.assert_allclose(found, theirs, rtol=1e-6)
    np.testing.assert_allclose(
        log_sum_exp(scores), tf.reduce_logsumexp(scores, axis=-1), rtol=1e-6
    )


@pytest.mark.parametrize("bad, compiled", [(np.nan, None), (np.inf, True)])
def test_bad_row_spoils_no_other_row(bad, compiled):
    scores = _scores((3, 5))
    scores[1, 2] = bad
    ids = np.array([0, 1, 2])
    for function in (log_sum_exp, lambda given: cross_entropy(ids, given)):
        found, gradient = _with_gradient(function, scores, np.ones(3, "f4"), compiled)
        assert list(np.isfinite(found)) == [True, False, True]
        assert list(np.isfinite(gradient).all(axis=1)) == [True, False, True]

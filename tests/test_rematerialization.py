"""A function run twice: the same gradients, and no example touches another."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.rematerialization import rematerialized

_ROWS = 4


def _function(kernel):
    def function(x, scale, ids):
        hidden = tf.nn.gelu(x @ kernel) * scale
        return hidden + tf.cast(ids, x.dtype)[:, None], hidden

    return function


def _values():
    random = np.random.default_rng(0)
    kernel = tf.Variable(random.normal(size=(3, 5)), dtype=tf.float32)
    return kernel, tf.constant(random.normal(size=(_ROWS, 3)), tf.float32)


def _gradients(run, upstream, kernel, x):
    """By x, by what all examples share, and by a variable; one output is not used."""
    scale, ids = tf.constant([[2.0]]), tf.range(_ROWS)
    with tf.GradientTape() as tape:
        tape.watch([x, scale])
        output, _ = run(_function(kernel), [x, scale, ids])
        total = tf.reduce_sum(output * upstream)
    return tape.gradient(total, [x, scale, kernel])


def _plainly(function, tensors):
    return function(*tensors)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_gradients_equal_those_of_one_run(mode):
    upstream = tf.random.stateless_normal([_ROWS, 5], [1, 2])
    kernel, x = _values()

    def found(run):
        def gradients():
            return _gradients(run, upstream, kernel, x)

        if mode == "eager":
            return gradients()
        return tf.function(gradients, jit_compile=mode == "xla")()

    for one, other in zip(found(rematerialized), found(_plainly)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_function_runs_again_for_the_gradient():
    runs = []

    def function(x):
        runs.append(None)
        return tf.exp(x)

    x = tf.ones([2, 3])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = rematerialized(function, [x])
    assert len(runs) == 1
    np.testing.assert_allclose(tape.gradient(y, x), np.e * np.ones([2, 3]), rtol=1e-6)
    assert len(runs) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_gradient_stays_with_its_example(bad):
    """The second run waits for the upstream gradient, row by row, not for all of it."""
    good = np.random.default_rng(1).normal(size=(_ROWS, 5)).astype("float32")
    spoilt = good.copy()
    spoilt[0] = bad
    by_good, by_spoilt = (
        _gradients(rematerialized, tf.constant(upstream), *_values())[0].numpy()
        for upstream in (good, spoilt)
    )
    assert not np.isfinite(by_spoilt[0]).any()
    np.testing.assert_array_equal(by_spoilt[1:], by_good[1:])

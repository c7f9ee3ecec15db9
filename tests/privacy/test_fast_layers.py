"""The one-pass engine against a naive float64 loop, on Keras's own layers."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import fast_oracle as oracle

from tfdpsq.privacy import fast
from tfdpsq.privacy.fast import factored, gradient_norms

ROWS = oracle.ROWS
# A case costs seconds in a graph, and more under XLA; these meet every kind of use
# between them.
_COMPILED = ("attention", "conv1d", "einsum", "language", "tied, wide", "time")


@pytest.mark.parametrize("name", oracle.MODELS)
def test_norms_of_each_weight_equal_a_naive_float64_loop(name):
    model, twin, x = oracle.made(name)
    gradients = oracle.naive(twin, x)
    found = oracle.norms_apart(model, x)
    expected = [oracle.norms([gradient]) for gradient in gradients]
    size = np.median(oracle.norms(gradients))
    names = [variable.name for variable in model.trainable_variables]
    for row in range(ROWS):  # not on average: each example's norm
        oracle.assert_close(
            [norms[row] for norms in found],
            [norms[row] for norms in expected],
            size,
            names,
        )


@pytest.mark.parametrize("name", oracle.MODELS)
def test_in_float64_nothing_but_rounding_is_left(name):
    """Each term counts: one that is wrong or missing would show at 1e-11."""
    _, twin, x = oracle.made(name)
    gradients = oracle.naive(twin, x)
    norms = oracle.norms(gradients)
    found = oracle.run(twin, x, clip_norm=float(np.median(norms)), mode="eager")
    assert found.norms.dtype == tf.float64
    np.testing.assert_allclose(found.norms, norms, rtol=1e-11)
    expected = oracle.clipped_by_hand(gradients, np.median(norms))
    for one, other in zip(found.sums, expected):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-11 * np.median(norms))


def _cases():
    for name in oracle.MODELS:
        for mode in ("eager", "graph", "xla"):
            slow = mode == "xla" and name not in _COMPILED
            slow |= mode == "graph" and name in (*_COMPILED, "transformer")
            yield pytest.param(name, mode, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("name", "mode"), _cases())
def test_clipped_sums_equal_a_naive_float64_loop(name, mode):
    model, twin, x = oracle.made(name)
    gradients = oracle.naive(twin, x)
    norms = oracle.norms(gradients)
    clip_norm = float(np.median(norms))  # some examples are clipped, some are not
    found = oracle.run(model, x, clip_norm=clip_norm, mode=mode)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    variables = model.trainable_variables
    oracle.assert_close(
        found.sums,
        oracle.clipped_by_hand(gradients, clip_norm),
        clip_norm,
        [variable.name for variable in variables],
    )
    assert all(s.shape == v.shape for s, v in zip(found.sums, variables))
    losses = oracle.losses(twin, x).numpy()
    off = np.abs(found.losses - losses)
    assert np.max(off) <= 1e-5 * np.max(np.abs(losses))


def test_a_norm_without_cross_terms_would_be_wrong():
    """Were each use squared by itself, a shared weight's norm would be far off."""
    for name, shared in (("reusing", 0), ("reusing", 1), ("tied", 0)):
        model, twin, x = oracle.made(name)
        truth = oracle.norms([oracle.naive(twin, x)[shared]])
        variable = model.trainable_variables[shared]
        seen = []
        original = factored.merge

        def apart(uses, shape, seen=seen, original=original):
            seen.append(
                sum(
                    gradient_norms.squared_norms(original([use], shape)).norm
                    for use in uses
                )
            )
            return original(uses, shape)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factored, "merge", apart)
            found = oracle.run(model, x, [variable], mode="eager")
        np.testing.assert_allclose(found.norms, truth, rtol=1e-5)
        without = np.sqrt(seen[0])
        assert np.max(np.abs(without / truth - 1)) > 0.1, name


@pytest.mark.parametrize(
    ("bad", "mode"), [(np.nan, "eager"), (np.inf, "eager"), (np.nan, "xla")]
)
@pytest.mark.parametrize("name", ["dense, long", "conv1d", "einsum", "nested", "tied"])
def test_a_row_that_is_no_number_costs_nobody_else(name, bad, mode):
    """The row's NaN is in the activations as well as in the gradients."""
    model, twin, x = oracle.made(name)
    good = [row for row in range(ROWS) if row != 2]
    gradients = [g[good] for g in oracle.naive(twin, x)]
    clip_norm = float(np.median(oracle.norms(gradients)))
    x[2, ..., 1] = bad
    x[2, ..., 0] = -bad
    found = oracle.run(model, x, clip_norm=clip_norm, mode=mode)
    if name == "tied" and np.isinf(bad):
        x[2] = np.nan  # tanh makes a number of it, and so the row may count
        found = oracle.run(model, x, clip_norm=clip_norm, mode=mode)
    assert np.isinf(found.norms[2])
    np.testing.assert_allclose(
        np.asarray(found.norms)[good], oracle.norms(gradients), rtol=1e-5
    )
    expected = oracle.clipped_by_hand(gradients, clip_norm)
    oracle.assert_close(found.sums, expected, clip_norm)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("reusing", np.nan), ("reusing", np.inf), ("reusing", 1e30), ("attention", 1e30)],
)
def test_a_gradient_that_overflows_costs_nobody_else(name, bad):
    """Of 1e30 the square overflows; lookups have ids, which are never NaN."""
    model, twin, x = oracle.made(name)
    good = [row for row in range(ROWS) if row != 4]
    gradients = [g[good] for g in oracle.naive(twin, x)]
    clip_norm = float(np.median(oracle.norms(gradients)))
    poison = np.where(np.arange(ROWS) == 4, bad, 1.0).astype("float32")
    found = tf.function(fast.clipped_sum)(
        lambda: oracle.losses(model, x) * poison,
        [model],
        model.trainable_variables,
        clip_norm,
    )
    assert np.isinf(found.norms[4])
    expected = oracle.clipped_by_hand(gradients, clip_norm)
    oracle.assert_close(found.sums, expected, clip_norm)


@pytest.mark.parametrize("garbage", [0.0, np.nan, 1e20])
def test_padding_rows_contribute_nothing(garbage):
    model, twin, x = oracle.made("dense, long")
    gradients = [g[:4] for g in oracle.naive(twin, x)]
    x[4:] = garbage
    weights = tf.constant([1.0, 1, 1, 1, 0, 0])
    found = oracle.run(model, x, clip_norm=0.7, weights=weights)
    oracle.assert_close(found.sums, oracle.clipped_by_hand(gradients, 0.7), 0.7)
    options = {"clip_norm": 0.7, "mode": "eager"}
    nothing = oracle.run(model, x, weights=tf.zeros([ROWS]), **options)
    assert all(not np.any(total) for total in nothing.sums)


def test_one_example_moves_the_sum_by_at_most_the_clip_norm():
    for name in ("attention", "reusing", "conv1d"):
        model, _, x = oracle.made(name)
        weights = np.ones(ROWS, np.float32)
        options = {"clip_norm": 1e-2, "mode": "eager"}
        whole = oracle.run(model, x, weights=tf.constant(weights), **options).sums
        weights[3] = 0
        without = oracle.run(model, x, weights=tf.constant(weights), **options).sums
        moved = np.sqrt(sum(np.sum((w - o) ** 2) for w, o in zip(whole, without)))
        assert moved == pytest.approx(1e-2, rel=1e-4)


def test_it_runs_inside_a_while_loop():
    model, twin, x = oracle.made("attention")
    expected = [g.sum(0) for g in oracle.naive(twin, x)]

    @tf.function
    def accumulated(x):
        def add(index, *sums):
            part = tf.slice(x, [2 * index, 0], [2, x.shape[1]])
            new = fast.clipped_sum(
                lambda: oracle.losses(model, part),
                [model],
                model.trainable_variables,
                1e30,
            ).sums
            return index + 1, *(total + one for total, one in zip(sums, new))

        zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
        return tf.while_loop(lambda i, *_: i < 3, add, (tf.constant(0), *zeros))[1:]

    overall = max(np.linalg.norm(e) for e in expected)
    oracle.assert_close(accumulated(tf.constant(x)), expected, overall)


def test_frozen_weights_cost_nothing_and_others_stay_exact():
    model, twin, x = oracle.made("nested")
    gradients = oracle.naive(twin, x)
    found = oracle.run(model, x, model.trainable_variables[2:], clip_norm=0.5)
    oracle.assert_close(found.sums, oracle.clipped_by_hand(gradients[2:], 0.5), 0.5)


@pytest.mark.parametrize("name", oracle.MODELS)
def test_every_model_passes_its_own_check(name):
    model, _, x = oracle.made(name)
    variables = model.trainable_variables
    fast.check(lambda: oracle.losses(model, oracle.single(x)), [model], variables)

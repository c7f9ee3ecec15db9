"""Sums of clipped gradients with coefficients, against a float64 loop."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import (
    Terms,
    fast,
    make_logical_step,
    make_optimizer,
    train,
)
from tfdpsq.privacy.terms import require_losses
from tfdpsq.validation import InputError

_C = 0.4


_plan = functools.partial(plans.plan, clip_norm=_C, num_units=40, batch_size=6, steps=2)


def _layer():
    layer = tf.keras.layers.Dense(1, use_bias=False)
    layer.build([None, 3])
    layer.kernel.assign([[0.3], [-0.2], [0.5]])
    return layer


def _rows(count):
    random = np.random.default_rng(0)
    return random.normal(size=[count, 3]).astype(np.float32)


def _terms(x, layer, coefficients, losses=None):
    values = tf.square(layer(x))[:, 0]
    losses = values if losses is None else losses
    return Terms(values, tf.cast(coefficients, tf.float32), losses)


def _naive(x, coefficients, clip_norm=_C):
    weight = np.array([0.3, -0.2, 0.5])
    total = 0.0
    for row, coefficient in zip(x.astype(float), coefficients):
        gradient = 2 * (row @ weight) * row
        scale = min(1.0, clip_norm / np.linalg.norm(gradient))
        total = total + coefficient * scale * gradient
    return total


def test_each_clipped_gradient_counts_by_its_coefficient():
    x, layer = _rows(5), _layer()
    x[1] *= 0.1
    coefficients = [0.5, 1.0, -0.75, 0.0, 2.0]
    found = fast.clipped_sum(
        lambda: _terms(x, layer, coefficients), [layer], [layer.kernel], _C
    )
    expected = _naive(x, coefficients)
    np.testing.assert_allclose(found.sums[0].numpy()[:, 0], expected, rtol=1e-5)
    assert found.norms.shape == [5] and found.losses.shape == [5]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_term_that_is_no_number_contributes_nothing(bad):
    x, layer = _rows(4), _layer()
    expected = _naive(x[[0, 1]], [1.0, -1.0])
    x[2] = bad
    coefficients = [1.0, -1.0, 1.0, bad]
    found = fast.clipped_sum(
        lambda: _terms(x, layer, coefficients), [layer], [layer.kernel], _C
    )
    np.testing.assert_allclose(found.sums[0].numpy()[:, 0], expected, rtol=1e-5)


def test_a_step_takes_terms_and_reports_the_losses_of_the_rows():
    layer, x = _layer(), _rows(4)
    optimizer = make_optimizer(_plan(), 1.0, "sgd", noise_seed=4)

    def per_example_losses(batch):
        # Every pair of rows is a term, of coefficient 1 where both are in use.
        used = batch["weights"]
        both = tf.reshape(used[:, None] * used[None, :], [-1])
        pairs = tf.gather(batch["x"], np.repeat(np.arange(4), 4))
        return _terms(pairs, layer, both)._replace(
            coefficients=both, losses=tf.constant([1.0, 2.0, 3.0, 9.0])
        )

    step = tf.function(
        make_logical_step(
            per_example_losses,
            [layer.kernel],
            optimizer,
            4,
            layers=[layer],
            rows_are_independent=False,
            copies_are_separate=True,
        )
    )

    def update(weights, count):
        start = layer.kernel.numpy()
        optimizer.iterations.assign(0)
        batch = {"x": tf.constant(x), "weights": tf.constant(weights, tf.float32)}
        loss = float(step(batch, tf.constant(count)))
        moved = layer.kernel.numpy() - start
        layer.kernel.assign(start)
        return moved[:, 0], loss

    noise, loss = update([0, 0, 0, 0], 0)
    assert loss == 0
    found, loss = update([1, 1, 1, 0], 3)
    assert loss == pytest.approx(2.0)  # the mean of three
    expected = -_naive(np.repeat(x[:3], 3, 0), np.ones(9)) / 6
    np.testing.assert_allclose(found - noise, expected, rtol=1e-4, atol=1e-6)


def test_without_privacy_the_gradient_is_the_plain_one():
    layer, x = _layer(), _rows(3)
    optimizer = make_optimizer(_plan(epsilon=math.inf), 1.0, "sgd")
    coefficients = [0.5, -2.0, np.nan]
    found = optimizer.clipped_sum(
        lambda: _terms(x, layer, coefficients),
        [layer.kernel],
        [layer],
        tf.ones([3]),
    )
    expected = _naive(x[:2], coefficients[:2], math.inf)
    np.testing.assert_allclose(found.sums[0].numpy()[:, 0], expected, rtol=1e-5)


@pytest.mark.parametrize("engine", ["dpkeras", "vectorized"])
def test_other_engines_refuse_terms(engine):
    layer, x = _layer(), _rows(3)
    optimizer = make_optimizer(_plan(), 1.0, "sgd", engine)
    with pytest.raises(InputError, match="made of terms, and engine"):
        optimizer.clipped_sum(
            lambda: _terms(x, layer, [1.0] * 3), [layer.kernel], [layer], tf.ones([3])
        )


def test_shapes_that_do_not_fit_are_refused():
    ones = tf.ones([4])
    with pytest.raises(InputError, match=r"coefficients of shape \(3,\) for values"):
        require_losses(Terms(ones, tf.ones([3]), ones))
    with pytest.raises(InputError, match="losses have shape"):
        require_losses(Terms(tf.ones([]), tf.ones([]), ones))
    layer, x = _layer(), _rows(4)
    with pytest.raises(InputError, match="made of terms, which are clipped one by one"):
        fast.clipped_sum(
            lambda: _terms(x, layer, [1.0] * 4),
            [layer],
            [layer.kernel],
            _C,
            rows_per_unit=2,
        )


def test_coupled_rows_without_copies_are_refused_before_a_step():
    """Declared as coupled, a loss must still be told apart by the fast engine."""
    layer, x = _layer(), _rows(40)
    plan = _plan(sensitivity_multiplier=39.0)
    taken = []

    def coupled(batch):
        scores = layer(batch["x"])[:, 0]
        return tf.square(scores - tf.reduce_mean(scores))

    with pytest.raises(InputError, match="depends on other rows of what layer"):
        train(
            plan,
            coupled,
            [layer.kernel],
            make_optimizer(plan, 0.1, "sgd"),
            lambda rows: {"x": x[rows]},
            None,
            layers=[layer],
            on_step=lambda step, loss: taken.append(step),
        )
    assert not taken


def test_groups_must_be_told_from_one_another():
    """Undivided, a loss over all rows would be clipped as if it kept to its group."""
    layer, x = _layer(), _rows(40)
    plan = _plan(clip_groups=2, sensitivity_multiplier=2.0)

    def coupled(batch):
        scores = layer(batch["x"])[:, 0]
        return tf.square(scores - tf.reduce_mean(scores))

    def run(microbatch_size):
        train(
            plan,
            coupled,
            [layer.kernel],
            make_optimizer(plan, 0.1, "sgd", "vectorized"),
            lambda rows: {"x": x[rows]},
            microbatch_size,
            layers=[layer],
        )

    with pytest.raises(InputError, match="microbatch_size is None and clip_groups 2"):
        run(None)
    with pytest.raises(InputError, match="the loss of a row is another one among"):
        run(plan.max_rows)


@pytest.mark.parametrize("engine", ["dpkeras", "vectorized"])
def test_units_taken_one_by_one_have_dropout_of_their_own(engine):
    """Else whoever spoils the batch gives all others one mask, and their sum grows."""
    dropout = tf.keras.layers.Dropout(0.5)
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build([None, 64])
    plan = _plan(clip_norm=0.01)
    optimizer = make_optimizer(plan, 1.0, "sgd", engine, noise_seed=4)
    step = tf.function(
        make_logical_step(
            lambda batch: layer(dropout(batch["x"], training=True))[:, 0],
            [layer.kernel],
            optimizer,
            8,
            layers=[dropout, layer],
        )
    )

    def update(x, count):
        layer.kernel.assign(np.ones([64, 1]))
        optimizer.iterations.assign(0)
        weights = (np.arange(8) < count).astype(np.float32)
        batch = {"x": tf.constant(x), "weights": tf.constant(weights)}
        step(batch, tf.constant(count))
        return layer.kernel.numpy() - 1

    x = np.ones([8, 64], np.float32)
    noise = update(x, 0)
    whole = np.linalg.norm(update(x, 8) - noise) * 6 / 0.01
    x[7] = np.nan
    spoilt = np.linalg.norm(update(x, 8) - noise) * 6 / 0.01
    # Two masks of one half share half of what they keep: √(m + m(m - 1)/2), not m.
    assert whole == pytest.approx(math.sqrt(8 + 28), rel=0.1)
    assert spoilt == pytest.approx(math.sqrt(7 + 21), rel=0.1)


def test_what_is_set_before_a_step_is_set_again_and_restored(tmp_path):
    """`before_step` sees every step once its state is there, after a resume too."""
    x = _rows(40)

    def run(directory, stop_after=None):
        layer, seen = _layer(), []
        memory = tf.Variable(0.0, trainable=False)

        def before(step):
            seen.append((step, float(memory)))
            if step % 3 == 0:
                memory.assign(float(step) + 0.5)

        plan = _plan(steps=7)
        train(
            plan,
            lambda batch: tf.square(layer(batch["x"]))[:, 0] + memory,
            [layer.kernel],
            make_optimizer(plan, 0.1, "sgd"),
            lambda rows: {"x": x[rows]},
            4,
            layers=[layer],
            directory=directory,
            data_fingerprint="x",
            save_every=1,
            before_step=before,
            state=[memory],
            on_step=lambda step, loss: step == stop_after,
        )
        return seen, float(memory)

    run(tmp_path, stop_after=5)
    seen, memory = run(tmp_path)
    # First 0, for trying out; then from step 5 on, with what was set at step 3.
    assert seen[1:] == [(5, 3.5), (6, 3.5)]
    assert memory == 6.5

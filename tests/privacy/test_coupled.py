"""Rows that read each other, clipped one at a time: against a float64 loop."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import (
    Coupled,
    coupled,
    make_logical_step,
    make_optimizer,
    train,
)
from tfdpsq.validation import InputError

_C, _ROWS = 10.0, 6


_plan = functools.partial(
    plans.plan,
    clip_norm=_C,
    num_units=_ROWS,
    batch_size=3,
    steps=2,
    max_batch_size=_ROWS,
    sensitivity_multiplier=2 * _ROWS - 1,
)


def _kernel():
    return tf.Variable([[0.3, -0.2], [0.5, 0.1]])


def _coupled(kernel, batch):
    """ℓ_i = log Σ_j exp(x_i W x_j) − x_i W x_i, differentiated by a tape."""

    def losses():
        scores = batch["x"] @ kernel @ tf.transpose(batch["x"])
        away = (1 - batch["weights"]) * 1e9
        return tf.reduce_logsumexp(scores - away, 1) - tf.linalg.diag_part(scores)

    def gradient(coefficients, variables):
        with tf.GradientTape() as tape:
            kept = tf.where(coefficients != 0, losses(), 0.0)
            total = tf.reduce_sum(coefficients * kept)
        return tape.gradient(total, variables)

    return Coupled(tf.where(batch["weights"] > 0, losses(), 0.0), gradient)


def _rows():
    x = np.random.default_rng(3).normal(size=[_ROWS, 2]).astype(np.float32)
    return {"x": 2 * x, "weights": np.array([1, 1, 0, 1, 1, 0], np.float32)}


def _tensors(batch):
    return {name: tf.constant(values) for name, values in batch.items()}


def _plain_loop(batch):
    """(each real row's clipped gradient, norms before) in float64."""
    x, real = batch["x"].astype(np.float64), batch["weights"] > 0
    weight, found, norms = _kernel().numpy().astype(np.float64), [], []
    for i in np.flatnonzero(real):
        scores = x[i] @ weight @ x[real].T
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        gradient = np.outer(x[i], shares @ x[real] - x[i])
        norms.append(np.linalg.norm(gradient))
        found.append(gradient * min(1, _C / norms[-1]))
    return np.array(found), np.array(norms)


@pytest.mark.parametrize("compiled", [False, True])
def test_each_row_is_clipped_by_itself(compiled):
    kernel, batch = _kernel(), _rows()
    each, norms = _plain_loop(batch)
    assert norms.min() < _C < norms.max()
    found = tf.function(
        lambda b: coupled.clipped_sum(_coupled(kernel, b), [kernel], _C, b["weights"]),
        jit_compile=compiled,
        autograph=False,
    )(_tensors(batch))[0]
    np.testing.assert_allclose(found, each.sum(0), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_row_without_a_finite_norm_adds_exactly_nothing(bad):
    """Also where only its square is beyond float32; the others are as they were."""
    kernel, batch = _kernel(), _rows()
    made = _coupled(kernel, _tensors(batch))

    def spoilt(coefficients, variables):
        (found,) = made.gradient(coefficients, variables)
        return [tf.where(coefficients[3] != 0, bad, 1.0) * found]

    found = coupled.clipped_sum(
        Coupled(made.losses, spoilt), [kernel], _C, tf.constant(batch["weights"])
    )[0]
    expected = np.delete(_plain_loop(batch)[0], 2, axis=0).sum(0)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_no_row_is_longer_than_the_clip_norm_by_rounding():
    """Clipped by the computed norm, about half of them would be, by some 1e-8 of it."""
    rows, clip_norm = 64, 0.7
    gradients = np.random.default_rng(5).normal(size=[rows, 40]).astype(np.float32)
    weight = tf.Variable(tf.zeros([40]))
    made = Coupled(
        tf.zeros([rows]),
        lambda coefficients, _: [tf.linalg.matvec(gradients.T, coefficients)],
    )
    clip = tf.function(
        lambda weights: coupled.clipped_sum(made, [weight], clip_norm, weights)[0]
    )
    alone = [clip(tf.one_hot(row, rows)).numpy() for row in range(rows)]
    lengths = np.linalg.norm(np.asarray(alone, np.float64), axis=1)
    assert np.all(lengths <= clip_norm)
    np.testing.assert_allclose(lengths, clip_norm, rtol=1e-4)


def test_any_gradients_stay_within_the_sensitivity():
    """One row more moves the sum by (2n - 1)·C at most, however rows turn around."""
    kernel = _kernel()
    sign = {"now": 1.0}

    def gradient(coefficients, variables):
        grown = tf.reduce_sum(coefficients * tf.range(1.0, _ROWS + 1))
        return [sign["now"] * 1e4 * grown * tf.eye(2)]

    made = Coupled(tf.zeros([_ROWS]), gradient)
    whole = coupled.clipped_sum(made, [kernel], _C, tf.ones([_ROWS]))[0]
    sign["now"] = -1.0
    fewer = coupled.clipped_sum(
        made, [kernel], _C, tf.constant([1.0] * (_ROWS - 1) + [0.0])
    )[0]
    moved = np.linalg.norm(whole - fewer)
    assert moved <= (2 * _ROWS - 1) * _C
    assert moved == pytest.approx((2 * _ROWS - 1) * _C, rel=1e-4)


@pytest.mark.parametrize("epsilon", [2.0, np.inf])
def test_two_replicas_take_the_step_of_one(epsilon, logical_cpus):
    """Rows are dealt to them, each adds its own, and noise is added once."""
    batch, results = _rows(), []
    for names in (None, logical_cpus[:2]):
        strategy = tf.distribute.get_strategy()
        if names:
            strategy = tf.distribute.MirroredStrategy(
                names, tf.distribute.ReductionToOneDevice()
            )
        with strategy.scope():
            kernel = _kernel()
            plan = _plan(epsilon=epsilon)
            optimizer = make_optimizer(plan, 1.0, "sgd", noise_seed=7)
            step = make_logical_step(
                lambda part, kernel=kernel: _coupled(kernel, part),
                [kernel],
                optimizer,
                _ROWS,
                coupled=True,
            )
            count = tf.constant(_ROWS)
            run = tf.function(
                lambda b, step=step, s=strategy, c=count: s.run(step, args=(b, c))
            )
            run(_tensors(batch))
        results.append(kernel.numpy())
    np.testing.assert_allclose(*results, rtol=1e-6, atol=1e-6)
    assert np.abs(results[0] - _kernel().numpy()).max() > 1e-3


def test_what_is_not_covered_is_refused_before_anything_is_spent():
    kernel, batch = _kernel(), _rows()

    def begin(plan, loss=None, **options):
        train(
            plan,
            loss or (lambda part: _coupled(kernel, part)),
            [kernel],
            make_optimizer(plan, 1.0, "sgd"),
            lambda rows: {"x": batch["x"][rows % _ROWS]},
            2,
            **{"coupled": True, **options},
        )

    small = _plan(sensitivity_multiplier=2.0)
    with pytest.raises(InputError, match="Set it to 11 and max_batch_size to 6"):
        begin(small)
    with pytest.raises(InputError, match="coupled rows are clipped one by one, but"):
        begin(_plan(unit="user", rows_per_unit=2))
    with pytest.raises(InputError, match="does not return Coupled with one loss"):
        begin(_plan(), lambda part: _coupled(kernel, part).losses)
    with pytest.raises(InputError, match="Set coupled to True"):
        begin(_plan(sensitivity_multiplier=1.0), coupled=False)
    optimizer = make_optimizer(_plan(), 1.0, "sgd")
    step = make_logical_step(
        lambda part: _coupled(kernel, part), [kernel], optimizer, 3, coupled=True
    )
    with pytest.raises(InputError, match="must form one microbatch"):
        step(_tensors(batch), tf.constant(6))

"""Clipping each variable by itself: its bound, its neighbours, what is refused."""

import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import fitted, plans

from tfdpsq.privacy import (
    Coupled,
    PrivacySpec,
    fast,
    make_logical_step,
    make_optimizer,
    make_plan,
    verify_certificate,
)
from tfdpsq.validation import InputError

_CLIP = 0.7


def _model():
    tf.keras.utils.set_random_seed(3)
    return fitted.functional()  # its first layer runs twice


def _losses(model, x, y):
    logits = model(x, training=True)
    losses = tf.keras.losses.sparse_categorical_crossentropy(y, logits, True)
    return losses * tf.reduce_max(tf.abs(x), 1)


def _rows(count=8):
    x, y = fitted.data(count)
    # Some gradients below their bound, others far above it.
    return x * np.geomspace(1e-3, 50, count)[:, np.newaxis].astype("float32"), y


def _sums(model, x, y, weights=None, jit=False, **options):
    @tf.function(autograph=False, jit_compile=jit)
    def run(x, y):
        found = fast.clipped_sum(
            lambda: _losses(model, x, y),
            [model],
            model.trainable_variables,
            _CLIP,
            weights,
            per_layer=True,
            **options,
        )
        return found.sums, found.norms

    sums, norms = run(tf.constant(x), tf.constant(y))
    return [np.asarray(one, np.float64) for one in sums], norms.numpy()


def _naive(model, x, y, units):
    """Σ over units of each variable's gradient, clipped alone; float64 arithmetic."""
    variables = model.trainable_variables
    sizes = [variable.shape.num_elements() for variable in variables]
    sums = [np.zeros(v.shape) for v in variables]
    for unit in units:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(_losses(model, x[unit], y[unit]))
        for one, size, gradient in zip(sums, sizes, tape.gradient(total, variables)):
            gradient = np.asarray(gradient, np.float64)
            most = _CLIP * math.sqrt(size / sum(sizes))
            one += gradient * min(1.0, most / np.linalg.norm(gradient))
    return sums


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("together", [1, 2])
def test_each_variable_is_clipped_to_its_share(together, jit):
    model, (x, y) = _model(), _rows()
    sums, _ = _sums(model, x, y, jit=jit, rows_per_unit=together)
    units = [slice(at, at + together) for at in range(0, 8, together)]
    for found, expected in zip(sums, _naive(model, x, y, units)):
        # The bound on rounding lowers a factor by less than a thousandth.
        np.testing.assert_allclose(found, expected, atol=2e-3 * _CLIP)


def test_a_unit_moves_the_sum_by_the_clip_norm_at_most():
    model, (x, y) = _model(), _rows()
    sizes = [v.shape.num_elements() for v in model.trainable_variables]
    for row in range(8):
        only = np.arange(8) == row
        weights = tf.constant(only.astype("float32"))
        own, norms = _sums(model, x, y, weights)
        for one, size in zip(own, sizes):
            bound = _CLIP * math.sqrt(size / sum(sizes))
            assert np.linalg.norm(one) <= bound * (1 + 1e-6)
        whole = math.sqrt(sum(np.linalg.norm(one) ** 2 for one in own))
        assert whole <= _CLIP * (1 + 1e-6)
        if row == 7:  # far above every bound: nothing of C is left unused
            assert norms[row] > 10 * _CLIP and whole > 0.999 * _CLIP


def test_a_unit_without_a_finite_gradient_adds_nothing_to_any_variable():
    model, (x, y) = _model(), _rows()
    spoilt = x.copy()
    spoilt[3] = np.inf
    expected = _naive(model, x, y, [slice(at, at + 1) for at in range(8) if at != 3])
    found, norms = _sums(model, spoilt, y)
    assert np.isinf(norms[3])
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, atol=2e-3 * _CLIP)


def _spec(**changes):
    values = dict(
        epsilon=2.0,
        clip_norm=_CLIP,
        num_units=100,
        batch_size=10,
        steps=5,
        clip_per_layer=True,
    )
    return PrivacySpec(**{**values, **changes})


def test_a_step_uses_it_and_costs_the_same():
    plan, whole = make_plan(_spec()), make_plan(_spec(clip_per_layer=False))
    assert plan.noise_stddev == whole.noise_stddev
    assert plan.epsilon(5) == whole.epsilon(5)
    assert plan.fingerprint != whole.fingerprint
    model, (x, y) = _model(), _rows()
    optimizer = make_optimizer(plan, 0.1)
    clipped = optimizer.clipped_sum(
        lambda: _losses(model, tf.constant(x), tf.constant(y)),
        model.trainable_variables,
        [model],
        tf.ones([8]),
    )
    for one, other in zip(clipped.sums, _sums(model, x, y)[0]):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_model_trains_with_it():
    model = fitted.compiled(_model(), fitted.plan_of(clip_per_layer=True))
    before = [w.copy() for w in model.get_weights()]
    model.fit(*fitted.data())
    assert all((a != b).any() for a, b in zip(before, model.get_weights()))


def test_certificates_say_it_and_verify():
    certificate = plans.certificate(make_plan(_spec()), 5)
    assert "by itself" in certificate["mechanism"]["clipping_in_words"]
    assert certificate["spec"]["clip_per_layer"] is True
    assert not verify_certificate(certificate).problems
    plain = plans.certificate(make_plan(_spec(clip_per_layer=False)), 5)
    assert "clip_per_layer" not in plain["spec"]
    assert "clipping_in_words" not in plain["mechanism"]


@pytest.mark.parametrize("engine", ["dpkeras", "vectorized"])
def test_engines_that_clip_all_weights_together_are_refused(engine):
    with pytest.raises(InputError, match="clip_per_layer is True and engine"):
        make_optimizer(make_plan(_spec()), 0.1, engine=engine)
    # Without privacy nothing is clipped.
    make_optimizer(make_plan(_spec(epsilon=math.inf)), 0.1, engine=engine)


def test_rows_that_read_each_other_are_refused():
    plan = make_plan(_spec(sensitivity_multiplier=19.0, num_units=10))
    model = _model()
    with pytest.raises(InputError, match="coupled rows are clipped over all weights"):
        make_logical_step(
            lambda batch: Coupled(tf.zeros([10]), None, None),
            model.trainable_variables,
            make_optimizer(plan, 0.1),
            10,
            [model],
            coupled=True,
        )


def test_anything_but_true_or_false_is_refused():
    with pytest.raises(InputError, match="clip_per_layer is 1; say True or False"):
        _spec(clip_per_layer=1)

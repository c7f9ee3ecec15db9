"""Sums other than of each row's clipped gradient: by variable, of terms, coupled."""

import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import fitted, plans

from tfdpsq.privacy import (
    Coupled,
    Terms,
    coupled,
    make_optimizer,
)

# -- Each variable clipped by itself --------------------------------------------------


@pytest.mark.parametrize("together", [1, 2])
def test_each_variable_is_clipped_to_its_share(together):
    """A unit without a finite gradient adds nothing to any of them."""
    clip_norm, rows = 0.7, 8
    tf.keras.utils.set_random_seed(3)
    model = fitted.functional()  # its first layer runs twice
    x, y = fitted.data(rows)
    # Some gradients below their bound, others far above it.
    x = x * np.geomspace(1e-3, 50, rows)[:, np.newaxis].astype("float32")
    sizes = [v.shape.num_elements() for v in model.trainable_variables]
    bounds = [clip_norm * math.sqrt(size / sum(sizes)) for size in sizes]

    def losses(x, y):
        logits = model(x, training=True)
        found = tf.keras.losses.sparse_categorical_crossentropy(y, logits, True)
        return found * tf.reduce_max(tf.abs(x), 1)

    expected = [np.zeros(v.shape) for v in model.trainable_variables]
    for at in range(0, rows, together):
        if at == 2:
            continue
        unit = slice(at, at + together)
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(losses(x[unit], y[unit]))
        gradients = tape.gradient(total, model.trainable_variables)
        for one, gradient, most in zip(expected, gradients, bounds):
            gradient = np.asarray(gradient, np.float64)
            one += gradient * min(1.0, most / np.linalg.norm(gradient))
    x[2] = np.inf
    plan = plans.plan(
        clip_norm=clip_norm,
        num_units=100,
        batch_size=10,
        steps=5,
        clip_per_layer=True,
        **({"unit": "user", "rows_per_unit": 2} if together == 2 else {}),
    )
    found = make_optimizer(plan, 0.1).clipped_sum(
        lambda: losses(tf.constant(x), tf.constant(y)),
        model.trainable_variables,
        [model],
        tf.ones([rows]),
    )
    for one, other in zip(found.sums, expected):
        # The bound on rounding lowers a factor by less than a thousandth.
        np.testing.assert_allclose(one, other, atol=2e-3 * clip_norm)


# -- Terms with coefficients ----------------------------------------------------------


def test_each_clipped_gradient_of_a_term_counts_by_its_coefficient():
    """Without privacy, too; under privacy a NaN term counts for nothing."""
    layer = tf.keras.layers.Dense(1, use_bias=False)
    layer.build([None, 3])
    weight = np.array([0.3, -0.2, 0.5])
    layer.kernel.assign(weight[:, np.newaxis])
    x = np.random.default_rng(0).normal(size=[6, 3]).astype(np.float32)
    x[1] *= 0.1
    coefficients = [0.5, 1.0, -0.75, 2.0, 1.0, np.nan]

    def expected(clip_norm):
        total = 0.0
        for row, coefficient in zip(x[:4].astype(float), coefficients):
            gradient = 2 * (row @ weight) * row
            scale = min(1.0, clip_norm / np.linalg.norm(gradient))
            total = total + coefficient * scale * gradient
        return total

    wanted = {2.0: expected(0.4), math.inf: expected(math.inf)}

    def terms():
        values = tf.square(layer(x))[:, 0]
        return Terms(values, tf.constant(coefficients), values)

    for epsilon, total in wanted.items():
        x[4] = 0 if math.isinf(epsilon) else np.nan
        plan = plans.plan(
            epsilon=epsilon, clip_norm=0.4, num_units=40, batch_size=6, steps=2
        )
        optimizer = make_optimizer(plan, 1.0, "sgd")
        found = optimizer.clipped_sum(terms, [layer.kernel], [layer], tf.ones([6]))
        np.testing.assert_allclose(found.sums[0].numpy()[:, 0], total, rtol=1e-5)


# -- Rows that read each other --------------------------------------------------------

_C, _ROWS = 10.0, 6


def _kernel():
    return tf.Variable([[0.3, -0.2], [0.5, 0.1]])


def _coupled(kernel, batch, bad=None):
    """ℓ_i = log Σ_j exp(x_i W x_j) − x_i W x_i, differentiated by a tape."""

    def losses():
        scores = batch["x"] @ kernel @ tf.transpose(batch["x"])
        away = (1 - batch["weights"]) * 1e9
        return tf.reduce_logsumexp(scores - away, 1) - tf.linalg.diag_part(scores)

    def gradient(coefficients, variables):
        with tf.GradientTape() as tape:
            kept = tf.where(coefficients != 0, losses(), 0.0)
            total = tf.reduce_sum(coefficients * kept)
        (found,) = tape.gradient(total, variables)
        return [
            found if bad is None else tf.where(coefficients[3] != 0, bad, 1) * found
        ]

    return Coupled(tf.where(batch["weights"] > 0, losses(), 0.0), gradient)


def _rows():
    x = np.random.default_rng(3).normal(size=[_ROWS, 2]).astype(np.float32)
    return {"x": 2 * x, "weights": np.array([1, 1, 0, 1, 1, 0], np.float32)}


def _clipped_by_hand(batch):
    """Each real row's clipped gradient in float64."""
    x, real = batch["x"].astype(np.float64), batch["weights"] > 0
    weight, found, norms = _kernel().numpy().astype(np.float64), [], []
    for i in np.flatnonzero(real):
        scores = x[i] @ weight @ x[real].T
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        gradient = np.outer(x[i], shares @ x[real] - x[i])
        norms.append(np.linalg.norm(gradient))
        found.append(gradient * min(1, _C / norms[-1]))
    assert min(norms) < _C < max(norms)
    return np.array(found)


@pytest.mark.parametrize("bad", [None, np.nan, 1e30])
def test_each_coupled_row_is_clipped_by_itself(bad):
    """A row without a finite norm adds nothing."""
    kernel, batch = _kernel(), _rows()
    tensors = {name: tf.constant(values) for name, values in batch.items()}
    (found,) = coupled.clipped_sum(
        _coupled(kernel, tensors, bad), [kernel], _C, tensors["weights"]
    )
    each = _clipped_by_hand(batch)
    expected = (each if bad is None else np.delete(each, 2, axis=0)).sum(0)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)

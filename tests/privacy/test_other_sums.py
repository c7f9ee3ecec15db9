"""The clipped sum of rows that read each other, one row at a time."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans
from helpers.small_runs import interrupted_at

from tfdpsq.privacy import Preempted, engines, read_ledger, train
from tfdpsq.validation import InputError

_C, _ROWS = 10.0, 6


def _plan(**changes):
    values = dict(clip_norm=_C, num_units=12, batch_size=3, steps=2, max_batch_size=12)
    return plans.plan(**{**values, "sensitivity_multiplier": 23, **changes})


def _kernel():
    return tf.Variable([[0.3, -0.2], [0.5, 0.1]])


def _losses(kernel, batch, bad=None):
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

    return tf.where(batch["weights"] > 0, losses(), 0.0), gradient


def _engine(bad=None):
    def clipped(plan, batch, variables):
        losses, gradient = _losses(variables[0], batch, bad)
        return engines.clipped_row_by_row(
            plan, losses, gradient, variables, batch["weights"]
        )

    return clipped


def _rows():
    x = np.random.default_rng(3).normal(size=[_ROWS, 2]).astype(np.float32)
    return {"x": 2 * x, "weights": np.array([1, 1, 0, 1, 1, 0], np.float32)}


def _by_hand(batch):
    """Each real row's gradient in float64."""
    x, real = batch["x"].astype(np.float64), batch["weights"] > 0
    weight, found = _kernel().numpy().astype(np.float64), []
    for i in np.flatnonzero(real):
        scores = x[i] @ weight @ x[real].T
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        found.append(np.outer(x[i], shares @ x[real] - x[i]))
    return np.array(found)


@pytest.mark.parametrize("bad", [None, np.nan, 1e30])
def test_each_coupled_row_is_clipped_by_itself(bad):
    """A row without a finite norm adds nothing."""
    kernel, batch = _kernel(), _rows()
    tensors = {name: tf.constant(values) for name, values in batch.items()}
    (found,) = _engine(bad)(_plan(), tensors, [kernel]).sums
    each = _by_hand(batch)
    norms = np.linalg.norm(each, axis=(1, 2), keepdims=True)
    assert norms.min() < _C < norms.max()
    each *= np.minimum(1, _C / norms)
    expected = (each if bad is None else np.delete(each, 2, axis=0)).sum(0)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_nothing_is_clipped_without_epsilon():
    batch = _rows()
    tensors = {name: tf.constant(values) for name, values in batch.items()}
    plan = _plan(epsilon=float("inf"))
    (found,) = _engine()(plan, tensors, [_kernel()]).sums
    np.testing.assert_allclose(found, _by_hand(batch).sum(0), rtol=2e-5, atol=1e-5)


def _train(plan, **options):
    x, kernel = _rows()["x"], _kernel()
    return train(
        plan,
        lambda batch: _losses(kernel, batch)[0],
        [kernel],
        plans.optimizer(0.1),
        lambda at: {"x": x[at % _ROWS]},
        4,
        engine=_engine(),
        **options,
    )


def test_an_engine_of_ones_own_trains(tmp_path):
    """One step is rehearsed, and the second taken by another process."""
    losses, kept = [], {"directory": tmp_path, "data_fingerprint": "twelve rows"}
    with pytest.raises(Preempted):
        _train(_plan(), on_step=interrupted_at(1), **kept)
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 1
    assert _train(_plan(), on_step=lambda *told: losses.append(told), **kept) == 2
    ((step, loss),) = losses
    assert step == 2 and np.isfinite(loss)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sensitivity_multiplier": 22.0}, "one of 12 rows.* by 23 clip norms"),
        ({"unit": "user", "rows_per_unit": 2}, "clips 2 rows together"),
    ],
)
def test_plans_that_do_not_cover_rows_that_read_each_other_are_refused(
    changes, message
):
    tensors = {name: tf.constant(values) for name, values in _rows().items()}
    with pytest.raises(InputError, match=message):
        _engine()(_plan(**changes), tensors, [_kernel()])

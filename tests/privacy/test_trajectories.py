"""What optimizers make of clipped and noised gradients, step by step.

The loss is linear in the weights, so that gradients do not depend on where a
trajectory is: the same rows and the same seed give every optimizer the same
gradients, which plain SGD shows. Adam is then recomputed from them in float64, as its
paper has it; T5X's Adafactor is in test_adafactor.py.
"""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import Groups, RunKey, make_logical_step

_STEPS = 6
_COUNTS = (13, 16, 5, 0, 9, 16)  # rows in use, of 16


_plan = functools.partial(
    plans.plan, epsilon=4.0, num_units=400, batch_size=16, steps=_STEPS
)


class _Linear:
    """A weighted sum of x·W + b: row i's gradients are aᵢ xᵢ ⊗ c and aᵢ c."""

    def __init__(self):
        random = np.random.default_rng(0)
        self.layer = tf.keras.layers.Dense(3)
        self.layer.build([None, 4])
        self.layer.kernel.assign(random.normal(size=[4, 3]))
        self.layer.bias.assign(random.normal(size=[3]))
        self.variables = [self.layer.kernel, self.layer.bias]

    def per_example_losses(self, batch):
        columns = tf.constant([1.0, -0.5, 0.25])
        return batch["a"] * tf.reduce_sum(self.layer(batch["x"]) * columns, 1)

    def values(self):
        return [v.numpy().astype(np.float64) for v in self.variables]


def _rows(number, seed=0):
    """Rows of all lengths, so that some are clipped and some are not."""
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=[number, 4]).astype(np.float32),
        "a": np.exp(random.normal(-0.5, 1.5, size=number)).astype(np.float32),
    }


def _trajectory(optimizer, rate, from_zero=False):
    """Weights before, after, and iterations, of each step of k = 4 microbatches."""
    model, plan = _Linear(), _plan()
    made = plans.optimizer(rate, optimizer)
    key = RunKey(plan, 7)
    step = tf.function(
        make_logical_step(
            plan,
            model.per_example_losses,
            model.variables,
            made,
            4,
            layers=[model.layer],
        )
    )
    seen = []
    for number, count in enumerate(_COUNTS):
        if from_zero:
            for variable in model.variables:
                variable.assign(tf.zeros_like(variable))
        before = model.values()
        batch = {**_rows(16, number), "weights": np.float32(np.arange(16) < count)}
        tensors = {k: tf.constant(v) for k, v in batch.items()}
        step(tensors, tf.constant(count), [], key.step_keys(number))
        seen.append(
            (before, model.values(), int(tf.convert_to_tensor(made.iterations)))
        )
    return seen


@pytest.fixture(scope="module")
def gradients():
    """Per step and weight, what SGD at rate 1 subtracts from zero."""
    steps = _trajectory("sgd", 1.0, from_zero=True)
    return [[-value for value in after] for _, after, _ in steps]


def _sgd(start, gradients, rates):
    for gradient, rate in zip(gradients, rates):
        start = start - rate * gradient
        yield start


def _adam(start, gradients, rates):
    """Kingma & Ba 2015, algorithm 1 with section 2's order of computation."""
    mean, square = np.zeros_like(start), np.zeros_like(start)
    for t, (gradient, rate) in enumerate(zip(gradients, rates), 1):
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        corrected = rate * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        start = start - corrected * mean / (np.sqrt(square) + 1e-7)
        yield start


_BY_HAND = {"sgd": _sgd, "adam": _adam}
_CONSTANT = (0.6, [0.6] * _STEPS)
_SCHEDULE = (
    tf.keras.optimizers.schedules.ExponentialDecay(0.4, 1, 0.5),
    [0.4 * 0.5**step for step in range(_STEPS)],
)


@pytest.mark.parametrize(
    "optimizer, rate",
    [("sgd", _SCHEDULE), ("adam", _CONSTANT), ("adam", _SCHEDULE)],
)
def test_a_trajectory_follows_its_paper_once_per_logical_step(
    optimizer, rate, gradients
):
    given, by_step = rate
    seen = _trajectory(optimizer, given)
    assert [iterations for *_, iterations in seen] == list(range(1, _STEPS + 1))
    for weight, start in enumerate(seen[0][0]):
        own = [gradient[weight] for gradient in gradients]
        expected = _BY_HAND[optimizer](start, own, by_step)
        for (_, after, _), value in zip(seen, expected):
            # Keras's 1 - 0.999 of float32 is off by 1.3e-5 of it.
            np.testing.assert_allclose(after[weight], value, rtol=2e-5, atol=1e-5)


def test_replicas_leave_a_users_rows_together(strategy_of):
    """Two rows each, clipped as one: dealt out row by row they would be two."""
    groups = Groups.of([f"u{row % 24}" for row in range(64)])
    plan = _plan(num_units=40, batch_size=12, unit="user", rows_per_unit=2)
    found = []
    for replicas in (1, 2):
        with strategy_of(replicas).scope():
            model = _Linear()
            optimizer = plans.optimizer(0.1, "adam")
            losses, rows = model.per_example_losses, _rows(64)
            plans.trained(
                plan,
                losses,
                [model.layer],
                rows,
                optimizer=optimizer,
                units=groups,
                seed=3,
            )
            found.append(model.values())
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

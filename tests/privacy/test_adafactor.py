"""T5X's Adafactor against the formulas, Keras's, and its own state."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.privacy.adafactor import T5XAdafactor

_SHAPES = {
    "scalar": [],
    "vector": [200],
    "small matrix": [6, 9],
    "one small dimension": [127, 130],
    "matrix": [130, 128],
    "square": [128, 128],
    "three": [128, 3, 129],
    "two large of three": [2, 140, 128],
}
# The dimensions that are factored: row (second largest), column (largest).
_FACTORED = {
    "matrix": (1, 0),
    "square": (0, 1),
    "three": (0, 2),
    "two large of three": (2, 1),
}


def _oracle(
    start,
    gradients,
    dims,
    rates,
    multiply_by_parameter_scale=True,
    decay_rate=0.8,
    clipping_threshold=1.0,
    epsilon1=1e-30,
    epsilon2=1e-3,
):
    """Yields the weight after each step, in float64, by sums over whole arrays."""
    weight = np.array(start, np.float64)
    rows = columns = moment = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates)):
        t = step + 1
        beta = 1 - t**-decay_rate
        squares = np.float64(gradient) ** 2 + epsilon1
        if dims is None:
            moment = beta * moment + (1 - beta) * squares
            estimate = moment
        else:
            row, column = dims
            rows = beta * rows + (1 - beta) * squares.mean(column, keepdims=True)
            columns = beta * columns + (1 - beta) * squares.mean(row, keepdims=True)
            estimate = rows * columns / rows.mean(row, keepdims=True)
        update = gradient / np.sqrt(estimate)
        if clipping_threshold:
            size = math.sqrt(np.mean(update**2))
            update = update / max(1.0, size / clipping_threshold)
        size = max(math.sqrt(np.mean(weight**2)), epsilon2)
        update = rate * update * (size if multiply_by_parameter_scale else 1.0)
        weight = weight - update
        yield weight


def _given(shape, steps=5, dtype=np.float32):
    """A start and gradients of sizes that differ by rows, columns and steps."""
    random = np.random.default_rng(len(shape) + sum(shape))
    start = random.normal(size=shape).astype(dtype)
    sizes = [np.exp(random.normal(size=n)) for n in shape]
    spread = np.ones([]) if not sizes else sizes[0]
    for size in sizes[1:]:
        spread = spread[..., np.newaxis] * size
    gradients = [
        (10.0 ** (step - 3) * spread * random.normal(size=shape)).astype(dtype)
        for step in range(steps)
    ]
    return start, gradients


def _steps(made, start, gradients):
    variable = tf.Variable(start)
    made.build([variable])
    for gradient in gradients:
        made.apply_gradients([(tf.constant(gradient), variable)])
        yield variable.numpy()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multiply_by_parameter_scale": False, "clipping_threshold": None},
        {"decay_rate": 0.5},
        {"epsilon1": 1e-2, "epsilon2": 3.0, "clipping_threshold": 0.3},
    ],
)
def test_a_step_is_that_of_the_formulas(options):
    for name, shape in _SHAPES.items():
        start, gradients = _given(shape)
        made = T5XAdafactor(0.3, **options)
        expected = _oracle(start, gradients, _FACTORED.get(name), [0.3] * 5, **options)
        for found, wanted in zip(_steps(made, start, gradients), expected):
            np.testing.assert_allclose(
                found, wanted, rtol=1e-4, atol=2e-6, err_msg=name
            )


@pytest.mark.parametrize("least, dims", [(6, (0, 1)), (7, None)])
def test_only_large_dimensions_are_factored(least, dims):
    start, gradients = _given([6, 9])
    made = T5XAdafactor(0.3, min_dim_size_to_factor=least)
    *_, found = _steps(made, start, gradients)
    *_, wanted = _oracle(start, gradients, dims, [0.3] * 5)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    *_, other = _oracle(start, gradients, None if dims else (0, 1), [0.3] * 5)
    assert np.abs(found - other).max() > 0.01


def test_a_rate_is_not_capped_and_a_schedule_is_followed():
    """Keras's takes at most 1/√t: .447 from the fifth step on."""
    start, gradients = _given([8], 6)
    rates = [2.0 * 0.9**step for step in range(6)]
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(2.0, 1, 0.9)
    for rate, by_step in ((0.9, [0.9] * 6), (schedule, rates)):
        *_, found = _steps(T5XAdafactor(rate), start, gradients)
        *_, wanted = _oracle(start, gradients, None, by_step)
        np.testing.assert_allclose(found, wanted, rtol=1e-4)
        keras = tf.keras.optimizers.Adafactor(rate)
        *_, capped = _steps(keras, start, gradients)
        assert np.abs(capped - found).max() > 0.1


def test_slots_of_bfloat16_weights_are_float32():
    start, gradients = _given([4, 5], dtype=tf.bfloat16.as_numpy_dtype)
    made = T5XAdafactor(0.3)
    *_, found = _steps(made, start, gradients)
    *_, wanted = _oracle(start, map(np.float64, gradients), None, [0.3] * 5)
    np.testing.assert_allclose(np.float64(found), wanted, rtol=0.03, atol=0.03)
    assert found.dtype == "bfloat16" and made.variables[-1].dtype == "float32"


def test_its_config_makes_it_again():
    changed = dict(learning_rate=0.25, decay_rate=0.5, epsilon2=0.5)
    made = T5XAdafactor(**changed)
    config = tf.keras.optimizers.serialize(made)
    again = tf.keras.optimizers.deserialize(config)
    assert type(again) is T5XAdafactor and again.get_config() == made.get_config()
    for name, value in changed.items():
        assert again.get_config()[name] == value, name

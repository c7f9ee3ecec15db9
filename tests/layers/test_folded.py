"""Texts folded into the examples' dimension, and an engine that knows of it."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.layers import Folded
from tfdpsq.privacy import fast
from tfdpsq.validation import InputError


def _two_inputs():
    inputs = {"x": tf.keras.Input([4]), "scale": tf.keras.Input([1])}
    dense = tf.keras.layers.Dense(3, "tanh")
    return tf.keras.Model(inputs, dense(inputs["x"]) * inputs["scale"])


def _inputs(rows=3, count=5):
    random = np.random.default_rng(0)
    return {
        "x": tf.constant(random.normal(size=[rows, count, 4]), tf.float32),
        "scale": tf.constant(random.normal(size=[rows, count, 1]), tf.float32),
    }


def test_folded_equals_the_layer_at_each_position():
    inner, inputs = _two_inputs(), _inputs()
    found = Folded(inner)(inputs)
    for position in range(5):
        alone = inner({name: value[:, position] for name, value in inputs.items()})
        np.testing.assert_allclose(found[:, position], alone, rtol=1e-6)


def test_clipping_treats_all_positions_as_one_example():
    inner, inputs = _two_inputs(), _inputs()
    folded = Folded(inner)
    variables = inner.trainable_variables

    def losses():
        return tf.reduce_sum(folded(inputs) ** 2, [1, 2])

    found = fast.clipped_sum(losses, [folded], variables, 0.5)
    expected = [np.zeros(v.shape) for v in variables]
    for row in range(3):
        with tf.GradientTape() as tape:
            loss = losses()[row]
        gradients = [
            g.numpy().astype(np.float64) for g in tape.gradient(loss, variables)
        ]
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        assert norm == pytest.approx(float(found.norms[row]), rel=1e-5)
        expected = [e + g * min(1, 0.5 / norm) for e, g in zip(expected, gradients)]
    for one, other in zip(found.sums, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    fast.check(losses, [folded], variables)


def test_positions_must_be_static_and_equal():
    folded = Folded(tf.keras.layers.Dense(2))
    with pytest.raises(InputError, match="one and the same static K"):
        folded(tf.ones([3]))
    two = Folded(_two_inputs())
    with pytest.raises(InputError, match=r"\(3, 4, 1\), \(3, 5, 4\)"):
        two({"x": tf.ones([3, 5, 4]), "scale": tf.ones([3, 4, 1])})

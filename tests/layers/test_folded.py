"""Texts folded into the examples' dimension; test_fast.py clips them."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.layers import Folded
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


def test_positions_must_be_static_and_equal():
    folded = Folded(tf.keras.layers.Dense(2))
    with pytest.raises(InputError, match="one and the same static K"):
        folded(tf.ones([3]))
    two = Folded(_two_inputs())
    with pytest.raises(InputError, match=r"\(3, 4, 1\), \(3, 5, 4\)"):
        two({"x": tf.ones([3, 5, 4]), "scale": tf.ones([3, 4, 1])})

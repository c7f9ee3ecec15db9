"""Masked mean pooling against float64, and where masks usually go wrong."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.layers.pooling import MaskedMeanPooling
from tfdpsq.validation import InputError

LENGTHS = np.array([5, 1, 3, 4])


def _example():
    hidden = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
    return hidden, np.arange(5)[None, :] < LENGTHS[:, None]


def _oracle(hidden):
    rows = zip(hidden.astype(np.float64), LENGTHS)
    return np.stack([row[:n].mean(axis=0) for row, n in rows])


@pytest.mark.parametrize(
    "mode, dtype", [("eager", np.bool_), ("graph", np.int32), ("xla", np.float32)]
)
def test_equals_the_mean_of_real_tokens(mode, dtype):
    hidden, mask = _example()
    layer = MaskedMeanPooling()
    pool = layer if mode == "eager" else tf.function(layer, jit_compile=mode == "xla")
    got = pool(tf.constant(hidden), mask=tf.constant(mask.astype(dtype)))
    assert got.shape == (4, 6)
    np.testing.assert_allclose(got, _oracle(hidden), rtol=0, atol=5e-7)


@pytest.mark.parametrize("poison", [1e30, np.nan])
def test_padding_values_change_nothing(poison):
    hidden, mask = _example()
    dirty = np.where(mask[:, :, None], hidden, np.float32(poison))
    layer = MaskedMeanPooling()
    clean, got = layer(hidden, mask=mask), layer(dirty, mask=mask)
    np.testing.assert_array_equal(got, clean)


def test_gradient_is_one_over_length_at_real_tokens_and_zero_at_padding():
    hidden, mask = map(tf.constant, _example())
    with tf.GradientTape() as tape:
        tape.watch(hidden)
        total = tf.reduce_sum(MaskedMeanPooling()(hidden, mask=mask))
    expected = np.where(mask, 1 / LENGTHS[:, None], 0)[:, :, None]
    got = tape.gradient(total, hidden)
    np.testing.assert_allclose(got, np.broadcast_to(expected, (4, 5, 6)), rtol=1e-6)


def test_row_of_padding_is_an_error_eagerly():
    hidden, mask = _example()
    mask[2] = False
    with pytest.raises(InputError, match="row 2 of the mask holds padding only"):
        MaskedMeanPooling()(hidden, mask=mask)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_row_of_padding_in_a_graph_is_zero_and_spoils_no_other(jit_compile):
    hidden, mask = _example()
    mask[2] = False
    layer = MaskedMeanPooling()

    @tf.function(jit_compile=jit_compile)
    def run(hidden, mask):
        with tf.GradientTape() as tape:
            tape.watch(hidden)
            pooled = layer(hidden, mask=mask)
            total = tf.reduce_sum(pooled**2)
        return pooled, tape.gradient(total, hidden)

    pooled, gradient = run(tf.constant(hidden), tf.constant(mask))
    expected = _oracle(hidden)
    expected[2] = 0
    np.testing.assert_allclose(pooled, expected, atol=5e-7)
    assert np.isfinite(gradient).all()
    assert not np.any(gradient[2])


@pytest.mark.parametrize(("hidden", "mask"), [((4, 5), (4, 5)), ((4, 5, 6), (4,))])
def test_mismatched_shapes_are_refused(hidden, mask):
    with pytest.raises(InputError, match=r"they must be \[B, L, D\] and \[B, L\]"):
        MaskedMeanPooling()(tf.ones(hidden), mask=tf.ones(mask))


def test_bfloat16_hidden_states_are_averaged_in_float32():
    # 257 is odd and above 256: bfloat16 has no such count, and its running sum of
    # ones stops at 256, which would give 256/256 or 256/257 at best.
    hidden = tf.concat([tf.ones([1, 256, 1]), tf.fill([1, 1, 1], 258.0)], axis=1)
    got = MaskedMeanPooling()(tf.cast(hidden, tf.bfloat16), mask=tf.ones([1, 257]))
    assert got.dtype == tf.float32
    assert float(got[0, 0]) == pytest.approx((256 + 258) / 257, rel=1e-6)

"""The soft prompt: what it puts where; test_fast_t5.py trains it alone."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.layers import SoftPrompt
from tfdpsq.validation import InputError

keras = tf.keras
_P, _B, _L, _D = 3, 4, 5, 6


def _inputs():
    random = np.random.default_rng(0)
    embedded = random.normal(size=[_B, _L, _D]).astype(np.float32)
    mask = (np.arange(_L) < np.array([[5], [1], [3], [2]])).astype(np.int32)
    return tf.constant(embedded), tf.constant(mask)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_prompt_comes_first_and_keeps_all_tokens(mode):
    embedded, mask = _inputs()
    layer = SoftPrompt(_P)
    layer(embedded, mask)
    run = tf.function(layer, jit_compile=mode == "xla") if mode != "eager" else layer
    prompted, longer = run(embedded, mask)
    assert prompted.shape == [_B, _P + _L, _D] and longer.shape == [_B, _P + _L]
    vectors = layer.vectors.numpy()
    assert len(np.unique(vectors)) == _P * _D and np.abs(vectors).max() <= 0.5
    for row in range(_B):
        np.testing.assert_array_equal(prompted[row, :_P], vectors)
        np.testing.assert_array_equal(longer[row, :_P], [1] * _P)
    np.testing.assert_array_equal(prompted[:, _P:], embedded)
    np.testing.assert_array_equal(longer[:, _P:], mask)
    assert longer.dtype == tf.int32


@pytest.mark.parametrize("length", [0, True])
def test_bad_lengths_are_refused(length):
    with pytest.raises(
        InputError, match=f"soft prompt length is {length!r}; .*above 0"
    ):
        SoftPrompt(length)

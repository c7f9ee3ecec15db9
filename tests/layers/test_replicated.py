"""Batches run at a time, on processors, equal batches run alone."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.layers.replicated import Replicated


def _batches(count):
    return [(tf.fill([3], float(number)),) for number in range(count)]


def test_overlapped_batches_come_back_in_their_order():
    run = Replicated(lambda x: tf.reduce_sum(x * x), overlapped=True)
    assert run.at_a_time == 2
    for count in (2, 1, 2, 2):
        found = run(_batches(count))
        np.testing.assert_array_equal(found, [3.0 * n * n for n in range(count)])
    assert Replicated(lambda x: x).at_a_time == 1


def test_errors_of_a_batch_reach_the_caller():
    def function(x):
        tf.debugging.assert_less(x, 1.0)
        return x

    run = Replicated(function, overlapped=True)
    run(_batches(1))
    run(_batches(1))
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(_batches(2))

"""Batches run at a time, on processors, equal batches run alone."""

import threading

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


def test_two_batches_are_in_work_at_once():
    """Each waits for the other: one after the other they would wait in vain."""
    meeting = threading.Barrier(2, timeout=20)
    run = Replicated(lambda x: x + 1, overlapped=True)
    run(_batches(2))  # in turn: it is traced
    traced = run._function

    def meets(x):
        meeting.wait()
        return traced(x)

    run._function = meets
    np.testing.assert_array_equal(run(_batches(2)), [[1.0] * 3, [2.0] * 3])


def test_an_error_of_a_batch_reaches_the_caller():
    def function(x):
        tf.debugging.assert_less(x, 1.0)
        return x

    run = Replicated(function, overlapped=True)
    run(_batches(1))
    run(_batches(1))
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(_batches(2))

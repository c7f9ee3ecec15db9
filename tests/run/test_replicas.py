"""Ordinary training on replicas: the steps that one device takes, dropout included."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq import retriever
from tfdpsq.layers import T5Config
from tfdpsq.run import plain_training


def _strategy(replicas, logical_cpus):
    if replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        logical_cpus[:replicas], tf.distribute.ReductionToOneDevice()
    )


def _ids(random, shape, length):
    return {
        "ids": random.integers(2, 30, (*shape, length)).astype(np.int32),
        "lengths": random.integers(1, length + 1, shape).astype(np.int32),
    }


# -- The retriever --------------------------------------------------------------------


def _trained(strategy, rows_at_a_time=0, seed=3, steps=4, rate=1e-3):
    """Losses and weights of a few steps on one batch, with hard negatives."""
    random = np.random.default_rng(0)
    rows, hard = 8, 2
    batch = {
        "document_key": np.arange(rows),
        "positive_keys": np.full([rows, 1], -1),
        "weights": np.array([1, 1, 1, 1, 1, 1, 1, 0], np.float32),
        "negative_keys": 100 + np.arange(rows * hard).reshape(rows, hard),
    }
    for name, shape in (
        ("query", [rows]),
        ("document", [rows]),
        ("negative", [rows, hard]),
    ):
        for what, values in _ids(random, shape, 5).items():
            batch[f"{name}_{what}"] = values
    with strategy.scope():
        tf.keras.utils.set_random_seed(4)
        t5 = T5Config(30, 1, 2, 8, 12, 4, dropout=0.2)
        model = retriever.TwoTower(retriever.RetrieverConfig(t5, 6, 10.0, 5, 5))
        step = plain_training.make_step(model, rate, rows_at_a_time, seed=seed)
        losses = [step(batch) for _ in range(steps)]
    return losses, [v.numpy() for v in model.trainable_variables]


@pytest.fixture(scope="module")
def alone():
    """By one device."""
    return _trained(tf.distribute.get_strategy())


@pytest.mark.parametrize("replicas, rows_at_a_time", [(2, 0), (4, 1)])
def test_a_row_loses_the_same_units_wherever_it_is_embedded(
    logical_cpus, alone, replicas, rows_at_a_time
):
    """Replicas, and parts of their rows that are embedded one after the other."""
    losses, weights = _trained(_strategy(replicas, logical_cpus), rows_at_a_time)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
    for one, other in zip(weights, alone[1]):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_seed_and_step_decide_what_is_dropped(alone):
    """At rate 0 nothing else differs from step to step."""
    default = tf.distribute.get_strategy()
    losses, other = (
        _trained(default, seed=seed, steps=3, rate=0.0)[0] for seed in (3, 4)
    )
    assert losses[0] == alone[0][0]  # begun anew
    found = sorted([*losses, *other])
    assert min(np.diff(found)) > 1e-4

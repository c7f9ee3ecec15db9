"""Retriever training on replicas: the steps of one device, dropout included."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq import privacy, retriever
from tfdpsq.data import write_rows
from tfdpsq.layers import T5Config
from tfdpsq.run.common import direct

pytestmark = pytest.mark.slow


def _ids(random, shape, length):
    return {
        "ids": random.integers(2, 30, (*shape, length)).astype(np.int32),
        "lengths": random.integers(1, length + 1, shape).astype(np.int32),
    }


def _batch(rows, hard):
    """With `hard` negatives of each row, all different."""
    random = np.random.default_rng(0)
    batch = {
        "document_key": np.arange(rows),
        "positive_keys": np.full([rows, 1], -1),
        "negative_keys": 100 + np.arange(rows * hard).reshape(rows, hard),
    }
    for name, shape in (
        ("query", [rows]),
        ("document", [rows]),
        ("negative", [rows, hard]),
    ):
        for what, values in _ids(random, shape, 5).items():
            batch[f"{name}_{what}"] = values
    return batch


def _two_tower():
    tf.keras.utils.set_random_seed(4)
    t5 = T5Config(30, 1, 2, 8, 12, 4, dropout=0.2)
    return retriever.TwoTower(retriever.RetrieverConfig(t5, 6, 10.0, 5, 5))


def _trained(strategy, rows_at_a_time=0, seed=3, steps=4, rate=1e-3):
    """Losses and weights of a few steps on one batch, with hard negatives."""
    weights = np.array([1, 1, 1, 1, 1, 1, 1, 0], np.float32)
    batch = {**_batch(8, 2), "weights": weights}
    with strategy.scope():
        model = _two_tower()
        adam = tf.keras.optimizers.Adam(rate)
        model.compile(adam, rows_at_a_time=rows_at_a_time, seed=seed)
        data = tf.data.Dataset.from_tensor_slices(batch).batch(8, drop_remainder=True)
        losses = model.fit(data, epochs=steps, verbose=0).history["loss"]
    return losses, [v.numpy() for v in model.trainable_variables]


@pytest.fixture(scope="module")
def alone():
    """By one device."""
    return _trained(tf.distribute.get_strategy())


@pytest.mark.parametrize("replicas, rows_at_a_time", [(2, 2), (4, 0)])
def test_row_loses_the_same_units_wherever_it_is_embedded(
    strategy_of, alone, replicas, rows_at_a_time
):
    """Replicas, and parts of their rows that are embedded one after the other."""
    losses, weights = _trained(strategy_of(replicas), rows_at_a_time)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
    for one, other in zip(weights, alone[1]):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_seed_and_step_decide_what_is_dropped(alone):
    """At rate 0 nothing else differs from step to step."""
    losses, _ = _trained(tf.distribute.get_strategy(), seed=4, steps=3, rate=0.0)
    found = sorted([*losses, alone[0][0]])  # that of another seed's first step
    assert min(np.diff(found)) > 1e-4


def _trained_directly(strategy, method, directory):
    """Weights (and negatives) after some private steps."""
    n, rows = 40, 8
    pairs = {
        name: values
        for name, values in _batch(n, 1).items()
        if not name.startswith("negative")
    }
    values = dict(epsilon=8.0, clip_norm=0.5, num_units=n, batch_size=rows, steps=4)
    if method == "naive":
        values.update(max_batch_size=25, sensitivity_multiplier=49)
    plan = privacy.make_plan(privacy.PrivacySpec(**values, accountant="rdp"))
    with strategy.scope():
        model = _two_tower()
        corpus = {
            name: values for name, values in pairs.items() if name.startswith("doc")
        }
        stored = write_rows(directory / "rows", [pairs])
        if method == "naive":
            made = retriever.NaiveLosses(model, 4)
            loss, layers, state = model.per_example_losses, made.layers, []
            options = {"engine": direct.naive_engine(made)}
        else:
            loss = retriever.PublicNegatives(model, corpus, 12, seed=5, refresh_every=2)
            layers, state = loss.layers, loss.state
            options = {"before_step": loss.refresh, "state": state}
        executed = privacy.train(
            plan,
            loss,
            model.trainable_variables,
            plans.optimizer(1e-3, "adam"),
            stored.take,
            4,
            layers=layers,
            seed=3,
            **options,
        )
    assert executed == 4
    return [v.numpy() for v in (*model.trainable_variables, *state)]


@pytest.mark.parametrize("method", ["naive", "public_negatives"])
def test_direct_private_training_takes_the_steps_of_one_replica(
    strategy_of, method, tmp_path
):
    """Which negatives are drawn, what they are embedded as, noise, dropout."""
    alone, shared = (
        _trained_directly(strategy_of(replicas), method, tmp_path / name)
        for name, replicas in (("alone", 1), ("shared", 2))
    )
    for one, other in zip(shared, alone):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    # Noise of its own would be seen: each step of Adam moves a weight by 1e-3.
    start = _two_tower().trainable_variables
    assert min(np.abs(a - b).max() for a, b in zip(alone, start)) > 1e-3

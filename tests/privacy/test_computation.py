"""A run goes on only with the model and the loss that it began with."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import PrivateModel, computation, make_optimizer, replay
from tfdpsq.privacy.proof.ledger import FILE_NAME, read_ledger

_ROWS = 4
layers = tf.keras.layers


def _described(losses, batch, held, variables):
    batch = {**batch, "weights": np.ones(_ROWS, np.float32)}
    function = replay.traced(losses, batch, held, variables).function
    state = [variable for layer in held for variable in layer.variables]
    return computation.described(function, variables, state)


def _dense(activation="relu", rate=0.5, scale=1.0, loss=tf.square, policy="float32"):
    x = np.random.default_rng(1).normal(size=[_ROWS, 5]).astype(np.float32)
    model = tf.keras.Sequential(
        [
            layers.Dense(6, activation, dtype=policy),
            layers.Dropout(rate),
            layers.Lambda(lambda values: values * np.full([6], scale, np.float32)),
            layers.Dense(1),
        ]
    )
    model(x)

    def losses(batch):
        made = loss(tf.cast(model(batch["x"], training=True), tf.float32))
        return tf.reduce_mean(tf.reshape(made, [_ROWS, -1]), 1)

    return _described(losses, {"x": x}, [model], model.trainable_variables)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"activation": "tanh"}, r"Relu \(1\).*Tanh \(1\)"),
        ({"loss": tf.abs}, "Square.* only then.*Abs"),
        ({"rate": 0.25}, "other constants"),
        ({"scale": 1.5}, "other constants"),
        ({"policy": "mixed_bfloat16"}, "Cast .*only now"),
    ],
)
def test_another_computation_is_told_apart(options, told):
    """And the same one, traced again under other names and numbers, is not."""
    before = _dense()
    layers.Dense(1).build([None, 2])
    assert computation.difference(before, _dense()) is None
    assert re.search(told, computation.difference(before, _dense(**options)))


def test_another_number_of_replicas_is_the_same_computation(strategy_of):
    """A run may go on under another strategy."""
    before = _dense()
    with strategy_of(2).scope():
        assert computation.difference(before, _dense()) is None


class _Stop(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise InterruptedError


def _run(directory, activation="relu", loss="mse"):
    plan = plans.plan(num_units=60, n_is_public=True, batch_size=8, steps=6)
    parts = [layers.Dense(3, activation), layers.Dense(1)]
    private = PrivateModel(tf.keras.Sequential(parts), plan, 4)
    if loss == "mse":
        loss = tf.keras.losses.MeanSquaredError(reduction="none")
    private.compile(make_optimizer(plan, 0.1, "sgd"), loss)
    x = np.random.default_rng(0).normal(size=[60, 5]).astype(np.float32)
    with pytest.raises(InterruptedError):
        private.fit(x, x[:, :1], directory=directory, callbacks=[_Stop()])


def test_a_fit_goes_on_with_the_model_and_the_loss_that_it_began_with(tmp_path):
    """Another activation used to go on, under one ledger and the same noise."""
    _run(tmp_path)
    with pytest.raises(ValueError, match=r"Relu \(1\) only then.*Tanh \(1\) only now"):
        _run(tmp_path, "tanh")
    with pytest.raises(ValueError, match="Abs"):
        _run(tmp_path, loss=lambda true, made: tf.abs(true - made))
    assert read_ledger(tmp_path / FILE_NAME).steps_paid == 1
    _run(tmp_path)


def test_a_run_of_another_tensorflow_is_not_compared_and_goes_on(caplog):
    description = _dense()
    older = json.dumps({**json.loads(description), "tensorflow": "2.14"})
    assert computation.difference(older, _dense("tanh")) is None
    assert "2.14" in caplog.text

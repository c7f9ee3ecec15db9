"""Arguments of `PrivateModel` that are refused before anything is spent or written."""

import functools
import os
import re

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans
from helpers.fitted import compiled, plan_of
from helpers.small_runs import unpaid

from tfdpsq import layers, privacy, validation

ROWS = 40
_X = np.random.default_rng(1).normal(size=(ROWS, 4)).astype(np.float32)
_Y = _X[:, :1]


_plan = functools.partial(
    plan_of, clip_norm=0.1, num_units=ROWS, n_is_public=True, batch_size=8, steps=2
)


def _private():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
    private = privacy.PrivateModel(model, _plan(), 4)
    private.compile(plans.optimizer(0.01, "adam"), loss="mse")
    return private


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(directory=" "), "directory is ' '"),
        (dict(directory="gs://bucket/run"), "'gs://bucket/run'"),
        (dict(x=3.0), "fit got a float of shape ()"),
        (dict(y={"a": _Y}), "fit got a dict of shape ()"),
        (dict(directory="release/model"), "would release the noise's seeds"),
        (dict(groups=[1] * ROWS), "Groups.of(labels)"),
        (dict(steps_per_epoch=0), "steps_per_epoch is 0"),
        (dict(steps_per_epoch=-4), "steps_per_epoch is -4"),
    ],
)
def test_arguments_that_fit_cannot_take_are_named(
    tmp_path, monkeypatch, given, message
):
    monkeypatch.chdir(tmp_path)
    private = _private()
    with pytest.raises(validation.InputError, match=re.escape(message)):
        private.fit(**{"x": _X, "y": _Y, **given})
    assert private.steps_executed == 0 and private.epsilon() == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "x, y, message",
    [
        (_X[:, :3], _Y, r"expected shape=\(None, 4\)"),
        (np.where(_X > 9, 1, None), _Y, "of object. Give arrays of numbers"),
        (_X[:, :0], _Y, r"of shape \(40, 0\)"),
        (_X, np.ones([len(_X), 3, 2]), "Dimensions must be equal|could not|row"),
        (_X, _Y.astype(str), "refused a value"),
    ],
)
def test_rows_that_the_model_does_not_take_spend_nothing(x, y, message):
    private = _private()
    with pytest.raises(ValueError, match=message):
        private.fit(x, y)
    assert private.steps_executed == 0


def test_a_model_of_two_outputs_and_hidden_nan_values_are_refused():
    """relu(NaN) is 0: the loss is finite, and its gradient is not."""
    inputs, spoilt = tf.keras.Input((4,)), _X.copy()
    spoilt[:, 2] = np.nan
    hidden = tf.keras.layers.Dense(3, "relu")(inputs)
    output = tf.keras.layers.Dense(1)(hidden)
    for outputs, x, said in (
        ([output, hidden], _X, "has several outputs"),
        (output, spoilt, "gradient that is NaN or infinite"),
    ):
        private = _private()
        private.model = tf.keras.Model(inputs, outputs)
        with pytest.raises(validation.InputError, match=said):
            private.fit(x, _Y)


@pytest.mark.parametrize("row, columns, bad_x", [(1, 3, True), (1501, 40, False)])
def test_one_row_that_the_loss_refuses_is_found_before_a_step_is_paid(
    tmp_path, row, columns, bad_x
):
    """An id of no embedding, or a label of no class, in any of 2,000 rows."""
    x = np.random.default_rng(0).integers(0, 9, [2000, columns])
    y = np.zeros([2000], np.int32)
    if bad_x:
        x[row, -1] = 9
    else:
        y[row] = 2
    model = tf.keras.Sequential(
        [
            tf.keras.Input([columns], dtype=tf.int64),
            tf.keras.layers.Embedding(9, 4),
            tf.keras.layers.GlobalAveragePooling1D(),
            tf.keras.layers.Dense(2),
        ]
    )
    plan = plan_of(num_units=2000, batch_size=500, steps=4)
    private = compiled(model, plan, "sgd")
    with pytest.raises(ValueError, match="before the first step.*failed"):
        private.fit(x, y, directory=tmp_path / "run")
    assert private.steps_executed == 0
    assert unpaid(tmp_path / "run")


def test_layers_that_refuse_a_text_of_padding_are_trained():
    """The model is tried on rows of zeros, which only the trial makes."""
    ids = tf.keras.Input([5], dtype=tf.int32)
    hidden = tf.keras.layers.Embedding(9, 4, mask_zero=True)(ids)
    outputs = tf.keras.layers.Dense(1)(layers.MaskedMeanPooling()(hidden))
    private = privacy.PrivateModel(tf.keras.Model(ids, outputs), _plan(), 4)
    private.compile(plans.optimizer(0.01, "adam"), loss="mse")
    texts = np.random.default_rng(1).integers(1, 9, (ROWS, 5)).astype(np.int32)
    texts[:, 3:] = 0
    before = [weight.numpy() for weight in private.model.weights]
    private.fit(texts, _Y)
    moved = [np.abs(w - b).max() for w, b in zip(private.model.weights, before)]
    assert min(moved) > 0 and np.isfinite(moved).all()

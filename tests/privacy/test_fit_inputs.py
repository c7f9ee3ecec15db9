"""Arguments of `PrivateModel` that are refused before anything is spent or written."""

import functools
import os
import re

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans
from helpers.fitted import compiled, plan_of

from tfdpsq import layers, privacy, validation
from tfdpsq.privacy import fit_inputs
from tfdpsq.privacy.proof.ledger import FILE_NAME, read_ledger

ROWS = 40
_X = np.random.default_rng(1).normal(size=(ROWS, 4)).astype(np.float32)
_Y = _X[:, :1]


_plan = functools.partial(
    plans.plan,
    epsilon=8.0,
    clip_norm=0.1,
    num_units=ROWS,
    n_is_public=True,
    batch_size=8,
    steps=2,
)


def _private(loss="mse", **options):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
    plan = _plan()
    private = privacy.PrivateModel(model, plan, 4)
    private.compile(privacy.make_optimizer(plan, 0.01), loss=loss, **options)
    return private


@pytest.fixture(scope="module")
def fitted():
    private = _private()
    private.fit(_X, _Y)
    return private


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(directory=""), "directory is '', which is not a path"),
        (dict(directory=" "), "directory is ' ', which is not a path"),
        (dict(directory="a\0b"), "not a path of this machine"),
        (dict(directory=5), "directory is 5, which is not a path"),
        (dict(directory="gs://bucket/run"), "'gs://bucket/run', which is not a path"),
        (dict(x=3.0), "fit got a float. Give arrays with one row per example"),
        (dict(x=np.array(3.0)), "has no rows"),
        (dict(callbacks=["a"]), "callbacks has 'a', which is no Keras callback"),
        (dict(callbacks=[tf.keras.callbacks.History]), "which is no Keras callback"),
        (dict(groups=[1] * ROWS), "groups is a list. Give Groups.of"),
        (dict(epochs=3), "fit got epochs. The plan has the number of steps"),
        (dict(batch_size=3), "fit got batch_size. The plan has it"),
        (dict(validation_split=0.1), "Give validation_data"),
        (dict(sample_weight=_Y), "multiply by it in the loss"),
        (dict(workers=2), "fit got workers. fit has no such argument"),
    ],
)
def test_what_fit_cannot_take_is_named(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    private = _private()
    with pytest.raises(validation.InputError, match=re.escape(message)):
        private.fit(**{"x": _X, "y": _Y, **given})
    assert private.steps_executed == 0 and private.epsilon() == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(loss="nosuch"), "loss is 'nosuch', which Keras does not know"),
        (dict(loss=5), "loss is 5; give a Keras loss"),
        (dict(loss_weights=[0.0]), "loss_weights is [0.0]: fit has one loss"),
        (dict(run_eagerly=True), "run_eagerly is True: Python code of layers would"),
    ],
)
def test_what_compile_cannot_take_is_named(given, message):
    with pytest.raises(validation.InputError, match=re.escape(message)):
        _private(**given)


def test_functions_that_run_eagerly_see_no_row():
    private, seen = _private(), []
    private.model.add(tf.keras.layers.Lambda(lambda x: seen.append(x) or x))
    tf.config.run_functions_eagerly(True)
    try:
        del seen[:]
        with pytest.raises(validation.InputError, match=r"run_functions_eagerly\(True"):
            private.fit(_X, _Y)
    finally:
        tf.config.run_functions_eagerly(False)
    assert [hasattr(x, "numpy") for x in seen] == [False]  # traced, once
    assert private.steps_executed == 0


@pytest.mark.parametrize(
    "x, y, message",
    [
        (_X[:, :3], _Y, "sequential.* could not be called on rows of x .ValueError"),
        (_X.astype("datetime64[s]"), _Y, "could not be called on rows of x"),
        (np.where(_X > 9, 1, None), _Y, "holds Python objects .NoneType.. Give ar"),
        (_X.astype(object), _Y, "holds Python objects .float.. Give arrays of num"),
        (_X[:, :0], _Y, r"an array of shape \(40, 0\), which holds nothing"),
        (_X[:0], _Y[:0], r"an array of shape \(0, 4\), which holds nothing"),
        (np.full_like(_X, np.nan), _Y, "rows tried, 0 had a finite loss"),
        (_X, {"a": _Y}, "the targets are a dict of 1 arrays, and the model has one"),
        (_X, [_Y, _Y], "the targets are a list of 2 arrays"),
        (_X, np.ones([len(_X), 3, 2]), r"rows of shape \(3, 2\) and outputs .*\(1,\)"),
        (_X, _Y.astype(str), "refused a value of the rows"),
    ],
)
def test_rows_that_the_model_does_not_take_spend_nothing(x, y, message):
    private = _private()
    with pytest.raises(validation.InputError, match=message):
        private.fit(x, y)
    assert private.steps_executed == 0


def test_values_that_an_activation_hides_are_named():
    """relu(NaN) is 0: the loss is finite, and its gradient is not."""
    private = _private()
    private.model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(3, "relu", input_shape=(4,)),
            tf.keras.layers.Dense(1),
        ]
    )
    x = _X.copy()
    x[:, 2] = np.nan
    with pytest.raises(validation.InputError, match="gradient that is NaN or infinite"):
        private.fit(x, _Y)


def test_a_model_of_two_outputs_is_refused():
    inputs = tf.keras.Input((4,))
    outputs = [tf.keras.layers.Dense(size)(inputs) for size in (1, 2)]
    plan = _plan()
    private = privacy.PrivateModel(tf.keras.Model(inputs, outputs), plan, 4)
    private.compile(privacy.make_optimizer(plan, 0.01), loss="mse")
    with pytest.raises(validation.InputError, match="has 2 outputs, and the loss"):
        private.fit(_X, _Y)


def test_a_train_step_that_is_not_called_is_told(caplog):
    class Own(tf.keras.Sequential):
        def train_step(self, data):
            raise AssertionError("it was called")

    plan = _plan()
    model = Own([tf.keras.layers.Dense(1, input_shape=(4,))])
    private = privacy.PrivateModel(model, plan, 4)
    private.compile(privacy.make_optimizer(plan, 0.01), loss="mse")
    private.fit(_X, _Y)
    assert "train_step of Own is not called" in caplog.text


@pytest.mark.parametrize("name", ["model", "plan"])
@pytest.mark.parametrize("value", [None, "a", []])
def test_a_model_and_a_plan_are_needed(name, value):
    given = {"model": tf.keras.Sequential(), "plan": _plan(), name: value}
    with pytest.raises(validation.InputError, match=f"{name} is .*; give a"):
        privacy.PrivateModel(**given)


@pytest.mark.parametrize("accountant", ["bogus", "first_pld", "", 0])
def test_epsilon_by_no_accountant_is_refused(fitted, accountant):
    with pytest.raises(validation.InputError, match="choose one of 'pld', 'rdp'"):
        fitted.epsilon(accountant)


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(description=None), "description is None. Give a sentence"),
        (dict(description=5), "description is 5. Give a sentence"),
        (dict(sensitivity_argument=3), "sensitivity_argument is 3. Give a sentence"),
        (dict(fingerprints=["a"]), "fingerprints is ['a']. Give a dict"),
        (dict(fingerprints="pairs"), "fingerprints is 'pairs'. Give a dict"),
    ],
)
def test_a_certificate_that_would_not_verify_is_not_made(fitted, given, message):
    with pytest.raises(validation.InputError, match=re.escape(message)):
        fitted.certificate(**{"description": "A line.", **given})
    made = fitted.certificate("A line.", fingerprints={"pairs": "0"})
    assert privacy.verify_certificate(made).problems == ()


@pytest.mark.parametrize("row", [0, 7, ROWS - 1])
@pytest.mark.parametrize("which", [0, 1])
def test_a_changed_value_of_any_row_is_other_data(row, which):
    """A killed `fit` would go on with other rows under the same noise."""
    arrays = [_X.copy(), _Y.copy()]
    before = fit_inputs.fingerprint(arrays)
    assert before == fit_inputs.fingerprint([np.asfortranarray(_X), _Y])
    arrays[which][row, -1] += 1
    assert fit_inputs.fingerprint(arrays) != before


def test_a_mask_is_not_dropped_and_lists_are_arrays_only_of_one_output():
    masked = np.ma.masked_array(_X, mask=_X > 1)
    with pytest.raises(validation.InputError, match="its mask would be dropped"):
        _private().fit(masked, _Y)
    with pytest.raises(validation.InputError, match="np.array makes one of a list"):
        _private().fit(_X, _Y.tolist())
    private = _private()
    private.fit(_X, [_Y])
    assert private.steps_executed == 2


@pytest.mark.parametrize("linked", [False, True])
def test_seeds_are_kept_in_no_directory_that_is_released(tmp_path, linked):
    place = tmp_path / "release" / "model"
    if linked:
        (tmp_path / "release").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "release")
        place = tmp_path / "link" / "model"
    private = _private()
    with pytest.raises(ValueError, match="in a folder 'release', and would hold the s"):
        private.fit(_X, _Y, directory=place)
    assert not place.exists() and private.steps_executed == 0


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("row", [0, 1, 1501, 1999])
def test_one_row_that_the_loss_refuses_is_found_before_a_step_is_paid(
    tmp_path, row, wide
):
    """An id of no embedding, in any of 2,000 rows, of few columns or of many."""
    x = np.random.default_rng(0).integers(0, 9, [2000, 40 if wide else 3])
    y = np.zeros([2000], np.int32)
    ends = [tf.keras.layers.GlobalAveragePooling1D(), tf.keras.layers.Dense(2)]
    model = tf.keras.Sequential(
        [tf.keras.Input([x.shape[1]], dtype=tf.int64), tf.keras.layers.Embedding(9, 4)]
        + ends
    )
    plan = plan_of(num_units=2000, batch_size=500, steps=4)
    for bad_x in (True, False):
        given, labels = x.copy(), y.copy()
        if bad_x:
            given[row, -1] = 9
        else:
            labels[row] = 2
        private = compiled(model, plan, "sgd")
        with pytest.raises(ValueError, match="could not be computed"):
            private.fit(given, labels, directory=tmp_path / "run")
        assert private.steps_executed == 0
        ledger = tmp_path / "run" / FILE_NAME
        assert not ledger.exists() or read_ledger(ledger).steps_paid == 0


@pytest.mark.parametrize(
    "pooling", [layers.MaskedMeanPooling, layers.FirstTokenPooling]
)
def test_layers_that_refuse_a_text_of_padding_are_trained(pooling):
    """The model is tried on rows of zeros, which only the trial makes."""
    ids = tf.keras.Input([5], dtype=tf.int32)
    hidden = tf.keras.layers.Embedding(9, 4, mask_zero=True)(ids)
    outputs = tf.keras.layers.Dense(1)(pooling()(hidden))
    plan = _plan()
    private = privacy.PrivateModel(tf.keras.Model(ids, outputs), plan, 4)
    private.compile(privacy.make_optimizer(plan, 0.01), loss="mse")
    texts = np.random.default_rng(1).integers(1, 9, (ROWS, 5)).astype(np.int32)
    texts[:, 3:] = 0
    before = [weight.numpy() for weight in private.model.weights]
    private.fit(texts, _Y)
    moved = [np.abs(w - b).max() for w, b in zip(private.model.weights, before)]
    assert min(moved) > 0 and np.isfinite(moved).all()

"""Callbacks of `fit` get losses of private rows: they watch, and set nothing."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.fitted import compiled, data, functional, plan_of

from tfdpsq.privacy import Groups
from tfdpsq.privacy.proof.ledger import FILE_NAME, read_ledger
from tfdpsq.validation import InputError


@pytest.mark.parametrize(
    "callback, said",
    [
        (tf.keras.callbacks.LearningRateScheduler(lambda at: 0.5**at), "Le"),
        (tf.keras.callbacks.ReduceLROnPlateau(monitor="loss"), "private loss"),
        (
            tf.keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
            "which chooses by private",
        ),
    ],
)
def test_choices_by_a_private_loss_are_refused_before_a_step(tmp_path, callback, said):
    private = compiled(functional(), plan_of(), "sgd")
    with pytest.raises(ValueError, match=said):
        private.fit(*data(), callbacks=[callback], directory=tmp_path)
    assert not list(tmp_path.iterdir())


class _Does(tf.keras.callbacks.Callback):
    """Calls a function of the model after the second step, or at the end."""

    def __init__(self, function, at_the_end=False):
        super().__init__()
        self._function, self._at_the_end = function, at_the_end

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and not self._at_the_end:
            self._function(self.model)

    def on_train_end(self, logs=None):
        if self._at_the_end:
            self._function(self.model)


def _set_rate(private):
    private.optimizer.learning_rate = 0.01


def _set_epsilon(private):
    private.optimizer.epsilon = 1e3


def _set_iterations(private):
    """The rate of a schedule follows from it."""
    private.optimizer.iterations.assign(0)


def _set_weights(private):
    private.model.set_weights([1.5 * v for v in private.model.get_weights()])


@pytest.mark.parametrize(
    "change, said",
    [
        (_set_rate, "learning_rate changed after step 2"),
        (_set_epsilon, "epsilon changed after step 2"),
        (_set_iterations, "iterations changed after step 2"),
        (_set_weights, "a weight changed after step 2"),
        (lambda private: private.fit(*data()), "the same budget a second time"),
    ],
)
def test_what_a_callback_sets_between_two_steps_is_refused(tmp_path, change, said):
    """A killed run would repeat noise from other weights."""
    private = compiled(functional(), plan_of(), "adam")
    options = {"directory": tmp_path, "steps_per_epoch": 8}
    with pytest.raises(InputError, match=said):
        private.fit(*data(), callbacks=[_Does(change)], **options)
    assert private.steps_executed == 2
    assert read_ledger(tmp_path / FILE_NAME).steps_paid == 2


@pytest.mark.parametrize("directory", [True, False])
def test_weights_that_a_callback_sets_at_the_end_are_refused(tmp_path, directory):
    """It has seen each step's private loss, and no ε covers what it sets."""
    private = compiled(functional(), plan_of(), "sgd")
    own = _Does(_set_weights, at_the_end=True)
    options = {"directory": tmp_path} if directory else {}
    with pytest.raises(InputError, match="a weight changed after the last step"):
        private.fit(*data(), callbacks=[own], steps_per_epoch=8, **options)
    assert private.steps_executed == 8
    with pytest.raises(InputError, match="changed since fit"):
        private.certificate("Three numbers from six.")


def test_a_row_that_no_unit_owns_is_not_tried():
    x, y = data()
    y[40:] = -1  # of no class
    groups = Groups(np.arange(32), np.arange(0, 33, 2))
    plan = plan_of(unit="user", rows_per_unit=2, num_units=16, batch_size=4)
    compiled(functional(), plan, "sgd").fit(x, y, groups=groups)


def test_weights_changed_since_fit_have_no_certificate(tmp_path):
    """A callback has saved those of each epoch, and the last are what fit left.

    Layers are frozen to build on them; only their values count.
    """
    private = compiled(functional(), plan_of(), "sgd")
    keep = tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.h5"))
    private.fit(*data(), callbacks=[keep], steps_per_epoch=1)  # 8 epochs
    before = private.certificate("Three numbers from six.")
    private.model.layers[-1].trainable = False
    private.model.load_weights(str(tmp_path / "8.h5"))
    assert private.certificate("Three numbers from six.") == before
    private.model.load_weights(str(tmp_path / "7.h5"))
    with pytest.raises(InputError, match="changed since fit"):
        private.certificate("Three numbers from six.")

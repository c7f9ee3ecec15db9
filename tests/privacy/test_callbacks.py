"""Callbacks of `fit`, which get losses of private rows: they watch, and set nothing."""

import numpy as np
import pytest
import tensorflow as tf
from fitted import NONE, compiled, data, functional, plan_of

from tfdpsq.privacy import PrivateModel, make_optimizer
from tfdpsq.privacy.proof.ledger import FILE_NAME, read_ledger


def test_arrays_that_a_callback_changes_are_not_those_of_fit(tmp_path):
    """A killed run would take its steps again on the rows as they were."""
    x, y = data()

    class Spoils(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            x[:] = np.nan

    private = compiled(functional(), plan_of(steps=3), "sgd")
    history = private.fit(
        x, y, directory=tmp_path, callbacks=[Spoils()], steps_per_epoch=1
    )
    assert np.isnan(x).all() and min(history.history["loss"]) > 0.1


class _SetsRate(tf.keras.callbacks.Callback):
    """Sets the learning rate, and says whether it was asked to before the step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(("epoch", epoch))

    def on_train_batch_begin(self, batch, logs=None):
        steps = int(tf.convert_to_tensor(self.model.optimizer.iterations))
        self.seen.append((batch, steps))
        if steps == 2:
            self.model.optimizer.learning_rate = 0.01


@pytest.mark.parametrize("kept", [True, False], ids=["directory", "none"])
@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_rates_that_no_epsilon_covers_are_refused(tmp_path, optimizer, kept):
    """Callbacks get losses; and a killed run would repeat noise from other weights."""
    x, y = data()
    options = {"directory": tmp_path} if kept else {}
    for callback, said in (
        (
            tf.keras.callbacks.LearningRateScheduler(lambda at: 0.5**at),
            "killed run .*Le",
        ),
        (tf.keras.callbacks.ReduceLROnPlateau(monitor="loss"), "from the private loss"),
        (
            tf.keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
            "no ε covers that choice",
        ),
    ):
        private = compiled(functional(), plan_of(), optimizer)
        with pytest.raises(ValueError, match=said):
            private.fit(x, y, callbacks=[callback], **options)
        assert not list(tmp_path.iterdir())
    private, own = compiled(functional(), plan_of(), optimizer), _SetsRate()
    with pytest.raises(ValueError, match=r"learning_rate .* was 0\.05 and .* 0\.01"):
        private.fit(x, y, callbacks=[own], **options)
    assert own.seen == [("epoch", 0), (0, 0), (1, 1), (2, 2)]
    # Of a call that failed all steps count, unless the ledger has them.
    assert private.steps_executed == (2 if kept else 3)
    if kept:
        assert read_ledger(tmp_path / FILE_NAME).steps_paid == 2


class _Chooses(tf.keras.callbacks.Callback):
    """Puts other weights in place, as if by their losses, once no step is left.

    After the steps of the last call number `when`, or at the end.
    """

    def __init__(self, when):
        super().__init__()
        self._when, self.last, self._first, self.chosen = when, None, None, False

    def on_train_batch_end(self, batch, logs=None):
        # Read by the variables: `get_weights` is what `fit` itself uses.
        if not self.chosen:
            self.last = [v.numpy() for v in self.model.model.weights]
        self._first = self._first or self.last
        if batch == self._when:
            self._choose()

    def on_train_end(self, logs=None):
        if self._when is None:
            self._choose()

    def _choose(self):
        self.chosen = True
        self.model.model.set_weights([1.5 * values for values in self._first])


@pytest.mark.parametrize("at_once, when", [(1, 7), (1, None), (4, None), (4, 5)])
@pytest.mark.parametrize("kept", [True, False], ids=["directory", "none"])
def test_weights_that_a_callback_chooses_are_not_those_certified(
    tmp_path, caplog, kept, at_once, when
):
    """It has seen each step's private loss; what is certified is the last step's."""
    private = PrivateModel(functional(), plan := plan_of(), microbatch_size=8)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=NONE)
    optimizer = make_optimizer(plan, 0.05, "sgd")
    private.compile(optimizer, loss, steps_per_execution=at_once)
    own, options = _Chooses(when), {"directory": tmp_path} if kept else {}
    private.fit(*data(), callbacks=[own], steps_per_epoch=8, **options)
    assert private.steps_executed == 8 and "They are set back" in caplog.text
    for values, last in zip(private.model.get_weights(), own.last):
        np.testing.assert_array_equal(values, last)

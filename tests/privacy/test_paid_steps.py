"""What the loop owes the ledger: pay first, and repeat what was paid for already.

In one process, by raising where test_resume.py kills.
"""

import functools
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import checkpoint
from tfdpsq.privacy.proof.ledger import FILE_NAME, Ledger, read_ledger

_STEPS = 6
_plan = functools.partial(
    plans.plan, epsilon=4.0, num_units=60, batch_size=8, steps=_STEPS
)


class _Stop(Exception):
    """Ends a run at a chosen point."""


def _stop():
    raise _Stop


class _Run:
    """One life of a training run; another one goes on from its directory."""

    def __init__(self, directory, stop_at=None, stop=None):
        random = np.random.default_rng(0)
        data = random.normal(size=[60, 5]).astype(np.float32)
        self.model = tf.keras.Sequential(
            [tf.keras.layers.Dropout(0.5), tf.keras.layers.Dense(3)]
        )
        self.model.build([None, 5])  # from random weights: they must be restored
        self.optimizer = tf.keras.optimizers.Adam(0.1)
        self.rows, self.losses = [], []

        def take(rows):
            self.rows.append(rows.tolist())
            return {"x": data[rows]}

        def on_step(executed, loss):
            self.losses.append(loss)
            if executed == stop_at:
                raise _Stop
            return executed == stop

        self.raised = None
        try:
            self.executed = plans.trained(
                _plan(),
                lambda batch: tf.reduce_sum(self.model(batch["x"], True) ** 2, 1),
                [self.model],
                take,
                optimizer=self.optimizer,
                directory=directory,
                save_every=2,
                on_step=on_step,
            )
        except _Stop as raised:
            self.raised = raised
        # Looks before the first step are at five rows or fewer.
        self.rows = [rows for rows in self.rows if len(rows) > 5]
        self.steps = int(tf.convert_to_tensor(self.optimizer.iterations))

    def bytes(self):
        state = [*self.model.trainable_variables, *self.optimizer.variables]
        return [v.numpy().tobytes() for v in state]


def _paid(directory):
    return read_ledger(directory / FILE_NAME).steps_paid


def test_step_that_cannot_be_paid_for_has_no_effect(tmp_path, monkeypatch):
    """Were it paid for after its update, three steps would run on two."""
    pay = Ledger.pay
    monkeypatch.setattr(
        Ledger, "pay", lambda self, step: _stop() if step == 2 else pay(self, step)
    )
    run = _Run(tmp_path)
    assert run.raised is not None
    assert run.steps == 2 and len(run.losses) == 2
    assert _paid(tmp_path) == 2


def test_replayed_steps_are_the_same_and_not_paid_for_again(tmp_path):
    begun, whole = tmp_path / "begun", tmp_path / "whole"
    assert _Run(begun, stop_at=1).steps == 1  # paid; the state before it is saved
    shutil.copytree(begun, whole)
    uninterrupted = _Run(whole)
    assert uninterrupted.executed == uninterrupted.steps == _STEPS

    first = _Run(begun, stop_at=3)  # the state after step 2 is saved
    assert first.raised is not None and first.steps == 3
    assert _paid(begun) == 3
    try:
        second = _Run(begun)
    except ValueError as error:
        raise AssertionError("the run that it was is refused") from error
    assert second.executed == second.steps == _STEPS
    assert _paid(begun) == _STEPS
    assert (begun / FILE_NAME).read_bytes() == (whole / FILE_NAME).read_bytes()
    # Row by row, and the loss, in which dropout has a part, to the last bit.
    assert len(second.rows) == 4
    assert first.rows + second.rows[1:] == uninterrupted.rows
    assert first.rows[2] == second.rows[0] != second.rows[1]
    assert first.losses + second.losses[1:] == uninterrupted.losses
    assert first.losses[2] == second.losses[0]
    # Noise and slots are in these.
    assert second.bytes() == uninterrupted.bytes()


def test_a_run_that_a_hook_stops_pays_for_the_whole_plan(tmp_path):
    """Five steps were seen; the state after two of them is left, and one is redone."""
    first = _Run(tmp_path, stop_at=5)
    assert first.raised is not None and first.steps == 5
    (tmp_path / checkpoint.STATE / "step-00000004.npz").unlink()
    second = _Run(tmp_path, stop=3)
    assert second.steps == 3
    assert second.executed == _paid(tmp_path) == _STEPS


# -- Weights that something else changes -------------------------------------------

_ROWS = np.linspace(-1, 1, 300, dtype=np.float32).reshape(60, 5)


def _layer():
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build([None, 5])
    return layer


def _linear(layer, directory, before=tf.identity, **options):
    """Trains a linear layer on rows, or on what `before` makes of them."""
    losses = lambda batch: layer(before(batch["x"]))[:, 0]  # noqa: E731
    return plans.trained(
        _plan(), losses, [layer], {"x": _ROWS}, directory=directory, **options
    )


def test_weights_that_are_not_trained_must_be_as_they_were(tmp_path):
    """Under the same noise a paid step would be another sum: frozen random features.

    Here those of no layer; test_before_spending.py has a layer's.
    """
    kernel, layer = tf.Variable(tf.random.normal([5, 5]), trainable=False), _layer()

    def run():
        with pytest.raises(_Stop):
            _linear(layer, tmp_path, lambda x: x @ kernel, on_step=lambda *_: _stop())

    run()
    was = kernel.numpy()
    kernel.assign_add(1e-3 * np.eye(5))
    with pytest.raises(ValueError, match="frozen weights changed since"):
        run()
    assert _paid(tmp_path) == 1
    kernel.assign(was)
    run()


def test_weights_that_a_hook_sets_reach_no_saved_state(tmp_path):
    """Whoever calls `train` again after the refusal goes on with the steps' own."""
    layer = _layer()

    def run(directory, on_step):
        layer.kernel.assign(tf.ones([5, 1]))
        _linear(layer, directory, save_every=1, on_step=on_step)
        return layer.kernel.numpy()

    def at_once(step, loss):
        layer.kernel.assign(tf.zeros([5, 1]))

    def at_the_end(step, loss):
        if step == _STEPS:
            layer.kernel.assign(tf.zeros([5, 1]))

    run(tmp_path / "one", lambda step, loss: step == 1)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    clean = run(tmp_path / "other", None)
    for spoil in (at_once, at_the_end):
        with pytest.raises(ValueError, match="a weight changed after step"):
            run(tmp_path / "one", spoil)
    np.testing.assert_array_equal(run(tmp_path / "one", None), clean)


@pytest.mark.parametrize("hook", ["on_step", "before_step"])
def test_weights_and_state_that_hooks_change_are_refused(tmp_path, hook):
    """Averages, decay or annealing of its own: what a killed run would not repeat."""
    layer, own, calls = _layer(), tf.Variable(0.0, trainable=False), []

    def changes(*_):
        calls.append(1)
        if len(calls) == 2:
            # A saved state restores variables that no layer holds and no loss reads.
            changed = own if hook == "on_step" else layer.kernel
            changed.assign(changed + 1.0)
        return False

    state = [own] if hook == "on_step" else []
    with pytest.raises(ValueError, match="a weight changed after step"):
        _linear(layer, tmp_path, state=state, **{hook: changes})
    assert _paid(tmp_path) == (1 if hook == "before_step" else 2)

"""What the loop owes the ledger: pay first, and repeat what was paid for already.

In one process, by raising where test_resume.py kills.
"""

import functools
import math
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import Diverged, checkpoint, train
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
        plan = _plan()
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
            self.executed = train(
                plan,
                lambda batch: tf.reduce_sum(self.model(batch["x"], True) ** 2, 1),
                self.model.trainable_variables,
                self.optimizer,
                take,
                4,
                layers=[self.model],
                directory=directory,
                data_fingerprint="sixty rows",
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


def _linear(layer, directory, before=None, rate=0.1, **options):
    """Trains a linear layer on rows, or on what `before` makes of them."""
    before = before or tf.identity
    return train(
        _plan(),
        lambda batch: layer(before(batch["x"]))[:, 0],
        [layer.kernel],
        options.pop("optimizer", None) or plans.optimizer(rate),
        lambda at: {"x": _ROWS[at]},
        4,
        layers=[layer, *options.pop("layers", ())],
        directory=directory,
        data_fingerprint="rows",
        **options,
    )


@pytest.mark.parametrize("in_a_layer", [True, False])
def test_weights_that_are_not_trained_must_be_as_they_were(tmp_path, in_a_layer):
    """Under the same noise a paid step would be another sum: frozen random features."""
    frozen = tf.keras.layers.Dense(5, trainable=False, use_bias=False)
    frozen.build([None, 5])
    kernel, layer = frozen.kernel, _layer()

    def run():
        with pytest.raises(_Stop):
            _linear(
                layer,
                tmp_path,
                frozen if in_a_layer else lambda x: x @ kernel,
                layers=[frozen] if in_a_layer else [],
                on_step=lambda executed, loss: _stop(),
            )

    run()
    was = kernel.numpy()
    kernel.assign_add(1e-3 * np.eye(5))
    with pytest.raises(ValueError, match="frozen weights changed since"):
        run()
    assert _paid(tmp_path) == 1
    kernel.assign(was)
    run()


@pytest.mark.parametrize("to", [1, 9])
def test_iterations_that_a_hook_sets_are_refused(tmp_path, to):
    """Loading weights from a TensorFlow checkpoint sets them, too."""
    optimizer = plans.optimizer()

    def on_step(executed, loss):
        if executed == 3:
            optimizer.iterations.assign(to)

    with pytest.raises(ValueError, match="iterations changed after step 3"):
        _linear(_layer(), tmp_path, optimizer=optimizer, on_step=on_step)
    assert _paid(tmp_path) == 3


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


class _Breaks(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is infinite in step 5, where that is compiled."""

    def __call__(self, step):
        then = math.inf if tf.inside_function() else 0.05
        return tf.where(tf.cast(step, tf.int64) < 4, 0.05, then)

    def get_config(self):
        return {}


def test_hooks_see_no_step_a_second_time(tmp_path):
    """Step 4 is taken again, from a saved state, after step 5 diverged."""
    seen, begun = [], []
    with pytest.raises(Diverged) as ended:
        _linear(
            _layer(),
            tmp_path,
            rate=_Breaks(),
            save_every=3,
            on_step=lambda executed, loss: seen.append(executed),
            before_step=begun.append,
        )
    assert (ended.value.diverged_at, ended.value.weights_of) == (5, 4)
    assert seen == [1, 2, 3, 4, 5] and begun == [0, 1, 2, 3, 4]

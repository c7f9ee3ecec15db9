"""The ledger of a run: steps are paid before they run, from the run's own weights.

In one process; test_resume.py kills, and compares what is repeated.
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


def _paid(directory):
    return read_ledger(directory / FILE_NAME).steps_paid


def test_step_that_cannot_be_paid_for_has_no_effect(tmp_path, monkeypatch):
    """Were it paid for after its update, three steps would run on two."""
    pay, losses, optimizer = Ledger.pay, [], plans.optimizer()
    monkeypatch.setattr(
        Ledger, "pay", lambda self, step: _stop() if step == 2 else pay(self, step)
    )
    with pytest.raises(_Stop):
        _linear(
            _layer(),
            tmp_path,
            optimizer=optimizer,
            on_step=lambda executed, loss: losses.append(loss),
        )
    assert int(optimizer.iterations) == len(losses) == _paid(tmp_path) == 2


def test_a_run_that_a_hook_stops_pays_for_the_whole_plan(tmp_path):
    """Five steps were seen; the state after two of them is left, and one is redone."""
    first, second = plans.optimizer(), plans.optimizer()

    def die(executed, loss):
        if executed == 5:
            raise _Stop

    with pytest.raises(_Stop):
        _linear(_layer(), tmp_path, optimizer=first, save_every=2, on_step=die)
    assert int(first.iterations) == 5
    (tmp_path / checkpoint.STATE / "step-00000004.npz").unlink()
    options = {"save_every": 2, "on_step": lambda executed, loss: executed == 3}
    executed = _linear(_layer(), tmp_path, optimizer=second, **options)
    assert int(second.iterations) == 3
    assert executed == _paid(tmp_path) == _STEPS


# -- Weights that something else changes -------------------------------------------


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

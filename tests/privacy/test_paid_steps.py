"""What the loop owes the ledger: pay first, and repeat what was paid for already.

In one process, by raising where test_resume.py kills.
"""

import functools
import json
import math
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import (
    Diverged,
    PrivateModel,
    checkpoint,
    discard_state,
    make_optimizer,
    train,
)
from tfdpsq.privacy.proof.ledger import FILE_NAME, Ledger, read_ledger
from tfdpsq.validation import DataError

_STEPS = 6


class _Stop(Exception):
    """Ends a run at a chosen point."""


def _stop():
    raise _Stop


_plan = functools.partial(
    plans.plan, epsilon=4.0, num_units=60, batch_size=8, steps=_STEPS
)


class _Run:
    """One life of a training run; another one goes on from its directory."""

    def __init__(self, directory, stop_at=None, plan=None, stop=None):
        random = np.random.default_rng(0)
        data = random.normal(size=[60, 5]).astype(np.float32)
        self.model = tf.keras.Sequential(
            [tf.keras.layers.Dropout(0.5), tf.keras.layers.Dense(3)]
        )
        self.model.build([None, 5])  # from random weights: they must be restored
        plan = plan or _plan()
        self.optimizer = make_optimizer(plan, 0.1, "adam")
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
        state = [*self.model.trainable_variables, *self.optimizer.state()]
        return [v.numpy().tobytes() for v in state]


def _cannot_pay(monkeypatch, step):
    pay = Ledger.pay

    def refuse(self, number):
        if number == step:
            raise _Stop
        return pay(self, number)

    monkeypatch.setattr(Ledger, "pay", refuse)


def test_a_step_that_cannot_be_paid_for_has_no_effect(tmp_path, monkeypatch):
    """Were it paid for after its update, three steps would run on two."""
    _cannot_pay(monkeypatch, 2)
    run = _Run(tmp_path)
    assert run.raised is not None
    assert run.steps == 2 and len(run.losses) == 2
    assert read_ledger(tmp_path / FILE_NAME).steps_paid == 2


def test_steps_taken_again_are_the_same_and_not_paid_for_again(tmp_path):
    begun, whole = tmp_path / "begun", tmp_path / "whole"
    assert _Run(begun, stop_at=1).steps == 1  # paid; the state before it is saved
    shutil.copytree(begun, whole)
    uninterrupted = _Run(whole)
    assert uninterrupted.executed == uninterrupted.steps == _STEPS

    first = _Run(begun, stop_at=3)  # the state after step 2 is saved
    assert first.raised is not None and first.steps == 3
    assert read_ledger(begun / FILE_NAME).steps_paid == 3
    try:
        second = _Run(begun)
    except ValueError as error:
        raise AssertionError("the run that it was is refused") from error
    assert second.executed == second.steps == _STEPS
    assert read_ledger(begun / FILE_NAME).steps_paid == _STEPS
    assert (begun / FILE_NAME).read_bytes() == (whole / FILE_NAME).read_bytes()
    # Row by row, and the loss, in which dropout has a part, to the last bit.
    assert len(second.rows) == 4
    assert first.rows + second.rows[1:] == uninterrupted.rows
    assert first.rows[2] == second.rows[0] != second.rows[1]
    assert first.losses + second.losses[1:] == uninterrupted.losses
    assert first.losses[2] == second.losses[0]
    # Noise and slots are in these.
    assert second.bytes() == uninterrupted.bytes()


def test_copies_of_a_run_that_paid_nothing_share_nothing(tmp_path, monkeypatch):
    """A correction in one of them would be another run, under the same noise."""
    attempts = [checkpoint.open_secrets(tmp_path / "seeds", 0, {}) for _ in range(2)]
    assert len({seed for a in attempts for seed in (a.noise_seed, a.sampler_seed)}) == 4
    begun, copy = tmp_path / "begun", tmp_path / "copy"
    with monkeypatch.context() as patch:
        _cannot_pay(patch, 0)
        assert _Run(begun).steps == 0  # seeds and first weights, and nothing more
    shutil.copytree(begun, copy)
    one, other = _Run(begun, stop_at=1), _Run(copy, stop_at=1)
    assert one.rows[0] != other.rows[0]
    states = (checkpoint.open_secrets(at, 1, {}) for at in (begun, copy))
    seeds = {seed for s in states for seed in (s.noise_seed, s.sampler_seed)}
    assert len(seeds) == 4
    assert read_ledger(begun / FILE_NAME).head != read_ledger(copy / FILE_NAME).head


def test_seeds_of_an_attempt_before_take_no_step_again(tmp_path, monkeypatch):
    """They gave a second release, independent of the first, which nobody counted."""
    run, backup = tmp_path / "run", tmp_path / "backup"
    with monkeypatch.context() as patch:
        _cannot_pay(patch, 0)
        assert _Run(run).steps == 0
    shutil.copytree(run / checkpoint.STATE, backup)
    with monkeypatch.context() as patch:  # killed between a new ledger and its seeds
        patch.setattr(checkpoint, "open_secrets", lambda *_: _stop())
        assert _Run(run).raised is not None
    assert _Run(run).executed == _STEPS  # nothing was paid: it restarts
    paid = (run / FILE_NAME).read_bytes()
    discard_state(run)
    shutil.copytree(backup, run / checkpoint.STATE)
    told = f"{checkpoint.SECRETS}: these are not the seeds of the 6 .*{FILE_NAME} pays"
    with pytest.raises(DataError, match=f"{told}.* Restore the state .*budget of its"):
        _Run(run)
    assert (run / FILE_NAME).read_bytes() == paid


@pytest.mark.parametrize("name", [FILE_NAME, checkpoint.STATE])
def test_ledger_and_seeds_of_two_runs_do_not_go_on_together(tmp_path, name):
    """Plan, data and settings are the same, and so is the number of paid steps."""
    one, other = tmp_path / "one", tmp_path / "other"
    for directory in (one, other):
        assert _Run(directory, stop_at=1).steps == 1
    (one / name).rename(tmp_path / name)
    (other / name).rename(one / name)
    with pytest.raises(DataError, match="not the seeds of the 1 steps"):
        _Run(one)
    (one / name).rename(other / name)
    (tmp_path / name).rename(one / name)
    assert _Run(one).executed == _Run(other).executed == _STEPS


def test_seeds_of_an_older_version_which_name_no_ledger_go_on(tmp_path):
    assert _Run(tmp_path, stop_at=1).steps == 1
    path = tmp_path / checkpoint.STATE / checkpoint.SECRETS
    kept = json.loads(path.read_text())
    header = (tmp_path / FILE_NAME).read_text().splitlines()[0]
    assert kept.pop("ledger") == json.loads(header)["chain"]
    path.write_text(json.dumps(kept))
    assert _Run(tmp_path).executed == _STEPS


def test_a_run_stopped_early_counts_and_pays_for_what_it_ran(tmp_path):
    run = _Run(tmp_path, stop=4)
    assert run.executed == run.steps == 4
    assert read_ledger(tmp_path / FILE_NAME).steps_paid == 4


def test_weights_that_no_state_has_must_be_as_they_were(tmp_path):
    """Under the same noise a paid step would be another sum: frozen random features."""
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(4, input_shape=[5], trainable=False),
            tf.keras.layers.Dense(1),
        ]
    )

    def run():
        ran = []
        optimizer = make_optimizer(_plan(), 0.1, "sgd")
        with pytest.raises(_Stop):
            train(
                _plan(),
                lambda batch: tf.square(model(batch["x"])[:, 0]),
                model.trainable_variables,
                optimizer,
                lambda rows: {"x": np.ones([len(rows), 5], np.float32)},
                4,
                layers=[model],
                directory=tmp_path,
                data_fingerprint="ones",
                on_step=lambda executed, loss: ran.append(executed) or _stop(),
            )
        return ran

    assert run() == [1]
    frozen = model.layers[0].kernel
    was = frozen.numpy()
    frozen.assign_add(1e-3 * np.eye(5, 4))
    with pytest.raises(ValueError, match="not trained are others.*same seed"):
        run()
    assert read_ledger(tmp_path / FILE_NAME).steps_paid == 1
    frozen.assign(was)
    assert run() == [1]
    # Begun before such weights were told apart: goes on as it did.
    path = tmp_path / checkpoint.STATE / checkpoint.SECRETS
    kept = json.loads(path.read_text())
    del kept["settings"][checkpoint.NOT_TRAINED]
    path.write_text(json.dumps(kept))
    frozen.assign_add(np.eye(5, 4))
    assert run() == [1]


def test_frozen_weights_that_no_layer_of_the_list_holds_are_compared(tmp_path):
    """The loss reads them all the same; without `layers` it is all that tells."""
    frozen, trained = tf.Variable(tf.eye(5, 4)), tf.Variable(tf.ones(4))

    def run():
        with pytest.raises(_Stop):
            train(
                _plan(),
                lambda batch: tf.linalg.matvec(tf.matmul(batch["x"], frozen), trained),
                [trained],
                make_optimizer(_plan(), 0.1, "sgd", "vectorized"),
                lambda rows: {"x": np.ones([len(rows), 5], np.float32)},
                4,
                directory=tmp_path,
                data_fingerprint="ones",
                on_step=lambda executed, loss: _stop(),
            )

    run()
    frozen.assign_add(1e-3 * tf.eye(5, 4))
    with pytest.raises(ValueError, match="not trained are others"):
        run()
    frozen.assign(tf.eye(5, 4))
    run()
    assert read_ledger(tmp_path / FILE_NAME).steps_paid == 1


@pytest.mark.parametrize("when", ["on_step", "before_call"])
def test_weights_that_callbacks_change_are_refused_before_the_next_step(tmp_path, when):
    """Averages, decay or annealing of its own: what a killed run would not repeat."""
    weights, rate = tf.Variable(tf.ones(4)), tf.Variable(1.0, trainable=False)

    class Changes(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if when == "before_call" and epoch == 1:
                weights.assign(0.9 * weights)

        def on_train_batch_end(self, batch, logs=None):
            if when == "on_step" and batch == 1:
                rate.assign_add(1.0)

    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.own, self.rate = weights, rate

        def call(self, x):
            return tf.linalg.matvec(x, self.own)[:, None] * self.rate

    private = PrivateModel(Model(), _plan(), microbatch_size=4)
    loss = tf.keras.losses.MeanSquaredError(reduction="none")
    private.compile(make_optimizer(_plan(), 0.1, "sgd", "vectorized"), loss)
    with pytest.raises(ValueError, match="weights were changed between two steps"):
        private.fit(
            np.ones([60, 4], np.float32),
            np.ones([60, 1], np.float32),
            directory=tmp_path,
            steps_per_epoch=2,
            callbacks=[Changes()],
            verbose=0,
        )
    assert read_ledger(tmp_path / FILE_NAME).steps_paid == 2


def test_iterations_that_a_hook_sets_are_refused(tmp_path):
    """Loading weights from a TensorFlow checkpoint sets them, too."""
    w, optimizer = (
        tf.Variable(tf.ones(5)),
        make_optimizer(_plan(), 0.1, "sgd", "dpkeras"),
    )

    def on_step(executed, loss):
        if executed == 3:
            optimizer.iterations.assign(1)

    with pytest.raises(ValueError, match="iterations .* set to 1 before step 3"):
        train(
            _plan(),
            lambda batch: tf.linalg.matvec(batch["x"], w),
            [w],
            optimizer,
            lambda rows: {"x": np.ones([len(rows), 5], np.float32)},
            4,
            directory=tmp_path,
            data_fingerprint="ones",
            on_step=on_step,
        )
    assert read_ledger(tmp_path / FILE_NAME).steps_paid == 3


def test_weights_that_a_hook_sets_reach_no_result_and_no_saved_state(tmp_path):
    """Whoever calls `train` again after the refusal goes on with the steps' own."""
    w = tf.Variable(tf.ones(5))

    def run(directory, on_step):
        own = make_optimizer(_plan(), 0.1, "sgd", "dpkeras")
        rows = np.linspace(-1, 1, 300, dtype=np.float32).reshape(60, 5)
        kept = {"directory": directory, "data_fingerprint": "rows", "save_every": 1}
        w.assign(tf.ones(5))
        train(
            _plan(),
            lambda batch: tf.linalg.matvec(batch["x"], w),
            [w],
            own,
            lambda at: {"x": rows[at]},
            4,
            on_step=on_step,
            **(kept if directory else {}),
        )
        return w.numpy()

    run(tmp_path / "one", lambda step, loss: step == 1)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    with pytest.raises(ValueError, match="weights were changed between two steps"):
        run(tmp_path / "one", lambda step, loss: w.assign(tf.zeros(5)) is None)
    clean = run(tmp_path / "other", None)
    np.testing.assert_array_equal(run(tmp_path / "one", None), clean)

    seen = []

    def at_the_end(step, loss):
        seen.append(w.numpy())
        if step == _STEPS:
            w.assign(seen[0])

    for directory in (None, tmp_path / "third"):
        del seen[:]
        last = run(directory, at_the_end)
        np.testing.assert_array_equal(last, seen[-1])
        assert np.abs(last - seen[0]).max() > 1e-3


def test_what_preempted_sets_is_set_back():
    """It is asked after `on_step`, which has seen the loss."""
    w, losses = tf.Variable(tf.ones(5)), []

    def preempted():
        w.assign(tf.fill([5], losses[-1]))
        return False

    with pytest.raises(ValueError, match="weights were changed between two steps"):
        train(
            _plan(),
            lambda batch: tf.linalg.matvec(batch["x"], w),
            [w],
            make_optimizer(_plan(), 0.1, "sgd", "dpkeras"),
            lambda rows: {"x": np.ones([len(rows), 5], np.float32)},
            4,
            on_step=lambda step, loss: losses.append(loss),
            preempted=preempted,
        )
    assert len(losses) == 1 and np.abs(w.numpy() - losses[0]).max() > 1e-3


def test_state_that_only_hooks_read_is_compared(tmp_path):
    """A saved state restores variables that no layer holds and no loss reads."""
    w, own = tf.Variable(tf.ones(5)), tf.Variable(0.0, trainable=False)
    with pytest.raises(ValueError, match="weights were changed between two steps"):
        train(
            _plan(),
            lambda batch: tf.linalg.matvec(batch["x"], w),
            [w],
            make_optimizer(_plan(), 0.1, "sgd", "dpkeras"),
            lambda rows: {"x": np.ones([len(rows), 5], np.float32)},
            4,
            directory=tmp_path,
            data_fingerprint="ones",
            state=[own],
            on_step=lambda *_: own.assign_add(1.0) is None,
        )


class _Breaks(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is infinite in step 5, where that is compiled."""

    def __call__(self, step):
        then = math.inf if tf.inside_function() else 0.05
        return tf.where(tf.cast(step, tf.int64) < 4, 0.05, then)

    def get_config(self):
        return {}


def test_hooks_see_no_step_a_second_time(tmp_path):
    """Step 4 is taken again, from a saved state, after step 5 diverged."""
    w, seen, begun = tf.Variable(tf.ones(5)), [], []
    with pytest.raises(Diverged) as ended:
        train(
            _plan(),
            lambda batch: tf.linalg.matvec(batch["x"], w),
            [w],
            make_optimizer(_plan(), _Breaks(), "sgd", "dpkeras"),
            lambda rows: {"x": np.ones([len(rows), 5], np.float32)},
            4,
            directory=tmp_path,
            data_fingerprint="ones",
            save_every=3,
            on_step=lambda executed, loss: seen.append(executed),
            before_call=lambda steps: begun.extend(steps),
        )
    assert (ended.value.diverged_at, ended.value.weights_of) == (5, 4)
    assert seen == [1, 2, 3, 4, 5] and begun == [0, 1, 2, 3, 4]


def test_two_runs_share_nothing(tmp_path):
    one, other = _Run(tmp_path / "a"), _Run(tmp_path / "b")
    assert one.rows[0] != other.rows[0]
    assert one.losses != pytest.approx(other.losses, rel=1e-3)


def test_steps_paid_by_a_killed_run_count_though_they_are_not_repeated(tmp_path):
    """Five steps were seen; the state after two of them is left, and one is redone."""
    first = _Run(tmp_path, stop_at=5)
    assert first.raised is not None and first.steps == 5
    (tmp_path / checkpoint.STATE / "step-00000004.npz").unlink()
    second = _Run(tmp_path, stop=3)
    assert second.steps == 3
    assert second.executed == read_ledger(tmp_path / FILE_NAME).steps_paid == 5

"""Replicas, loops of steps and interruptions change nothing of what is trained."""

import functools
import json
import math
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import (
    Coupled,
    Diverged,
    Preempted,
    checkpoint,
    make_optimizer,
    train,
)
from tfdpsq.privacy.batches import batch_of, padded_rows, split_over_replicas
from tfdpsq.privacy.proof.ledger import FILE_NAME, Ledger, read_ledger
from tfdpsq.validation import InputError

_N, _STEPS, _MICROBATCH = 60, 7, 4


_plan = functools.partial(
    plans.plan, epsilon=4.0, num_units=_N, batch_size=14, steps=_STEPS
)


class _Run:
    """A classifier with dropout, trained with fixed seeds, or a directory's."""

    def __init__(self, strategy, plan=None, seed=3, rate=0.05, **options):
        random = np.random.default_rng(0)
        x = random.normal(size=[_N, 6]).astype(np.float32)
        y = random.normal(size=[_N]).astype(np.float32)
        plan = plan or _plan()
        self.losses, self.preempted, self.diverged = [], None, None
        self.seen = {}  # the weights after each step, as `on_step` finds them
        with strategy.scope():
            tf.keras.utils.set_random_seed(1)
            model = tf.keras.Sequential(
                [
                    tf.keras.layers.Dense(8, "tanh"),
                    tf.keras.layers.Dropout(0.5),
                    tf.keras.layers.Dense(1),
                ]
            )
            model.build([None, 6])
            noise = None if "directory" in options else 7
            optimizer = make_optimizer(plan, rate, "adam", noise_seed=noise)

            def note(done, loss):
                self.losses.append((done, loss))
                self.seen[done] = [v.numpy() for v in model.trainable_variables]

            options.setdefault("on_step", note)
            try:
                self.executed = train(
                    plan,
                    lambda batch: (model(batch["x"], True)[:, 0] - batch["y"]) ** 2,
                    model.trainable_variables,
                    optimizer,
                    lambda rows: {"x": x[rows], "y": y[rows]},
                    _MICROBATCH,
                    layers=[model],
                    sampler_seed=None if "directory" in options else seed,
                    data_fingerprint="sixty rows" if "directory" in options else "",
                    **options,
                )
            except Preempted as stopped:
                self.preempted = stopped.executed
            except Diverged as ended:
                self.diverged = ended
            self.weights = [v.numpy() for v in model.trainable_variables]
            self.state = [v.numpy() for v in optimizer.state()]

    def assert_like(self, other, atol=1e-5):
        for one, two in zip(self.weights, other.weights):
            np.testing.assert_allclose(one, two, rtol=0, atol=atol)


def _trained_together(strategy):
    """The weights of a run whose rows read each other."""
    random = np.random.default_rng(0)
    x = random.normal(size=[_N, 6]).astype(np.float32)
    plan = _plan(max_batch_size=25, sensitivity_multiplier=49)
    with strategy.scope():
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False)])
        model.build([None, 6])

        def losses(batch):
            def made():
                scores = tf.math.tanh(model(batch["x"])[:, 0])
                counted = tf.where(batch["weights"] > 0, scores, 0.0)
                return (scores - tf.reduce_mean(counted)) ** 2

            def gradient(coefficients, variables):
                with tf.GradientTape() as tape:
                    total = tf.reduce_sum(coefficients * made())
                return tape.gradient(total, variables)

            return Coupled(made(), gradient)

        train(
            plan,
            losses,
            model.trainable_variables,
            make_optimizer(plan, 0.05, "adam", noise_seed=7),
            lambda rows: {"x": x[rows]},
            _MICROBATCH,
            layers=[model],
            sampler_seed=3,
            coupled=True,
        )
    return model.trainable_variables[0].numpy()


def test_rows_that_read_each_other_are_trained_alike_on_replicas(strategy_of):
    alone = _trained_together(tf.distribute.get_strategy())
    shared = _trained_together(strategy_of(2))
    np.testing.assert_allclose(shared, alone, rtol=0, atol=1e-5)


# -- Dealing --------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_shares_hold_every_row_drawn_once_and_in_the_microbatches_of_one(replicas):
    """The draw is the whole batch's: who is in it was decided before it is dealt."""
    plan = _plan(max_batch_size=30)
    rows = -(-plan.max_rows // (_MICROBATCH * replicas)) * _MICROBATCH * replicas
    for step in range(20):
        draw = plan.sampler(seed=5).draw(step)
        batch = batch_of(lambda at: {"row": at + 100}, draw, rows)
        rows_of, count_of = split_over_replicas(
            batch, draw.count, replicas, _MICROBATCH
        )
        seen = []
        for replica in range(replicas):
            share, count = rows_of(replica), count_of(replica)
            # In use from the front, and nothing beyond.
            assert (share["weights"][:count] == 1).all()
            assert (share["weights"][count:] == 0).all()
            assert len(share["row"]) * replicas == rows
            for start in range(0, count, _MICROBATCH):
                number = start // _MICROBATCH * replicas + replica
                first = number * _MICROBATCH
                used = min(_MICROBATCH, draw.count - first)
                np.testing.assert_array_equal(
                    share["row"][start : start + used],
                    draw.indices[first : first + used] + 100,
                )
            seen += share["row"][:count].tolist()
        assert sorted(seen) == sorted((draw.indices[: draw.count] + 100).tolist())


# -- Replicas -------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [4.0, math.inf])
def test_any_number_of_replicas_trains_the_same_weights(strategy_of, epsilon):
    """Dropout included: its masks follow from the microbatch, not from the replica."""
    plan = _plan(epsilon=epsilon)
    alone = _Run(strategy_of(1), plan)
    for replicas in (2, 4) if plan.spec.private else (2,):
        shared = _Run(strategy_of(replicas), plan)
        shared.assert_like(alone)
        np.testing.assert_allclose(shared.losses, alone.losses, rtol=1e-4)
    # Other masks would be seen: so far do the weights move with other rows.
    other = _Run(strategy_of(1), plan, seed=4)
    assert max(np.abs(a - b).max() for a, b in zip(other.weights, alone.weights)) > 0.01


def test_more_replicas_than_microbatches_are_refused(strategy_of, tmp_path):
    plan = _plan(max_batch_size=30, batch_size=2)
    with strategy_of(4).scope():
        assert padded_rows(plan, 30, 4) == 32  # 8 microbatches, 2 each
        with pytest.raises(ValueError, match="has 2 microbatches, and of 4 replicas"):
            padded_rows(plan, 30, 16)


@pytest.mark.parametrize(
    "before, after", [(2, 1), (1, 2), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_a_run_goes_on_under_other_replicas(strategy_of, tmp_path, before, after):
    """Killed between two saved states; what is redone is the same step."""
    begun = _Run(
        strategy_of(1),
        directory=tmp_path / "whole",
        preempted=lambda: True,
        save_every=2,
    )
    assert begun.preempted == 1
    shutil.copytree(tmp_path / "whole", tmp_path / "moved")

    class Killed(Exception):
        """Ends the run where SIGKILL would."""

    def die(done, loss):
        if done == 5:
            raise Killed

    with pytest.raises(Killed):
        _Run(
            strategy_of(before),
            directory=tmp_path / "moved",
            save_every=2,
            on_step=die,
        )
    assert read_ledger(tmp_path / "moved" / FILE_NAME).steps_paid == 5
    moved = _Run(strategy_of(after), directory=tmp_path / "moved", save_every=2)
    assert [done for done, _ in moved.losses] == [5, 6, 7]
    whole = _Run(strategy_of(1), directory=tmp_path / "whole", save_every=2)
    moved.assert_like(whole)
    assert moved.executed == whole.executed == _STEPS
    ledgers = [
        (tmp_path / name / FILE_NAME).read_bytes() for name in ("moved", "whole")
    ]
    assert ledgers[0] == ledgers[1]  # every step once


# -- Loops ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "replicas, jit, secure",
    [(1, False, False), (2, False, False), (1, True, False), (1, False, True)],
)
def test_loops_of_steps_are_the_steps_one_by_one(strategy_of, replicas, jit, secure):
    strategy, plan = strategy_of(replicas), _plan(secure=secure)
    alone = _Run(strategy, plan, jit_compile=jit)
    looped = _Run(strategy, plan, jit_compile=jit, steps_per_loop=3)
    looped.assert_like(alone, 1e-6)
    assert [done for done, _ in looped.losses] == list(range(1, _STEPS + 1))
    np.testing.assert_allclose(looped.losses, alone.losses, rtol=1e-5)


def test_noise_cancels_alike_in_loops_and_on_replicas(strategy_of):
    options = dict(sampler="shuffled", n_is_public=True, noise_window=3)
    plan = _plan(clip_per_layer=True, **options)  # epochs of 4 steps
    alone = _Run(strategy_of(1), plan)
    for replicas, steps in ((1, 3), (2, 1), (2, 3)):
        other = _Run(strategy_of(replicas), plan, steps_per_loop=steps)
        other.assert_like(alone)
    plain = _Run(strategy_of(1), _plan(sampler="shuffled", n_is_public=True))
    assert any((a != b).any() for a, b in zip(alone.weights, plain.weights))


def test_a_loop_is_paid_for_before_it_and_saved_where_steps_are(
    strategy_of, tmp_path, monkeypatch
):
    paid, events = Ledger.pay, []

    def pay(self, step):
        events.append(("paid", step))
        return paid(self, step)

    monkeypatch.setattr(Ledger, "pay", pay)
    run = _Run(
        strategy_of(1),
        directory=tmp_path,
        save_every=4,
        steps_per_loop=3,
        on_step=lambda done, loss: events.append(("done", done)),
    )
    assert run.executed == _STEPS
    loops = [range(0, 3), range(3, 4), range(4, 7)]  # none goes past step 4
    assert events == [
        event
        for loop in loops
        for event in (
            *(("paid", step) for step in loop),
            *(("done", step + 1) for step in loop),
        )
    ]
    states = sorted(path.name for path in (tmp_path / "state").glob("step-*"))
    assert states == ["step-00000004.npz", "step-00000007.npz"]


def test_a_stop_inside_a_loop_counts_the_whole_loop(strategy_of, tmp_path):
    run = _Run(
        strategy_of(1),
        directory=tmp_path,
        steps_per_loop=3,
        on_step=lambda done, loss: done == 2,
    )
    assert run.executed == 3 == read_ledger(tmp_path / FILE_NAME).steps_paid
    assert run.state[0] == 3  # iterations: what ran is what is said to have run


def test_loops_that_cannot_be_are_refused(strategy_of):
    with pytest.raises(ValueError, match="has to be set before every step"):
        _Run(strategy_of(1), steps_per_loop=2, before_step=lambda done: None)
    with pytest.raises(ValueError, match="steps_per_loop.*0"):
        _Run(strategy_of(1), steps_per_loop=0)


# -- Being asked to end ---------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_a_run_that_is_asked_to_end_goes_on_to_the_same_bytes(
    strategy_of, tmp_path, secure
):
    strategy, plan = strategy_of(1), _plan(secure=secure)
    begun = _Run(strategy, plan, directory=tmp_path / "a", preempted=lambda: True)
    assert begun.preempted == 1
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    asked = iter([False, True])
    stopped = _Run(
        strategy,
        plan,
        directory=tmp_path / "a",
        preempted=lambda: next(asked),
        steps_per_loop=2,
    )
    assert stopped.preempted == 5 == read_ledger(tmp_path / "a" / FILE_NAME).steps_paid
    ended, whole = (
        _Run(strategy, plan, directory=tmp_path / name, steps_per_loop=2)
        for name in "ab"
    )
    assert [done for done, _ in ended.losses] == [6, 7]
    for one, other in zip(ended.weights + ended.state, whole.weights + whole.state):
        np.testing.assert_array_equal(one, other)


def test_a_request_during_the_last_step_comes_too_late(strategy_of):
    """What is finished is not thrown away."""
    asked = iter([False] * (_STEPS - 1) + [True])
    run = _Run(strategy_of(1), preempted=lambda: next(asked))
    assert run.preempted is None and run.executed == _STEPS


# -- What would make a step that is paid for another step ----------------------------


def test_a_step_that_xla_compiled_is_not_repeated_uncompiled(strategy_of, tmp_path):
    """Its draws may be others there; replicas leave compiling to the strategy."""
    options = {"directory": tmp_path, "jit_compile": True}
    begun = _Run(strategy_of(1), preempted=lambda: True, **options)
    assert begun.preempted == 1
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match="jit_compile was True .* and is False now"):
        _Run(strategy_of(2), **options)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert _Run(strategy_of(1), **options).executed == _STEPS


def test_a_run_on_replicas_that_were_dealt_other_rows_is_refused(strategy_of, tmp_path):
    strategy = strategy_of(1)
    _Run(strategy, directory=tmp_path, preempted=lambda: True)
    path = tmp_path / checkpoint.STATE / checkpoint.SECRETS
    content = json.loads(path.read_text())
    content["settings"]["replicas"] = "2"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="began on 2 replicas with an older tfdpsq"):
        _Run(strategy, directory=tmp_path)
    content["settings"]["replicas"] = "1"  # whose rows nobody dealt
    path.write_text(json.dumps(content))
    assert _Run(strategy, directory=tmp_path).executed == _STEPS


# -- Divergence -----------------------------------------------------------------------


class _Breaks(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is infinite from a step on, where a step is compiled.

    Checks beforehand call it outside and see nothing wrong.
    """

    def __init__(self, last):
        self._last = last

    def __call__(self, step):
        then = math.inf if tf.inside_function() else 0.05
        return tf.where(tf.cast(step, tf.int64) < self._last, 0.05, then)

    def get_config(self):
        return {"last": self._last}


@pytest.mark.parametrize(
    "replicas, secure, steps_per_loop, kept",
    [(1, False, 1, 4), (2, False, 1, 4), (1, True, 1, 4), (2, True, 3, 3)],
)
def test_a_run_that_diverges_ends_at_its_last_finite_call_and_pays_for_the_plan(
    strategy_of, tmp_path, replicas, secure, steps_per_loop, kept
):
    """Step 5 makes the weights infinite; calls of three steps end after step 3 and 6.

    Its last saved state is older, so what is kept is computed again.
    """
    run = _Run(
        strategy_of(replicas),
        _plan(secure=secure),
        rate=_Breaks(4),
        directory=tmp_path,
        save_every=3,
        steps_per_loop=steps_per_loop,
    )
    ended = run.diverged
    assert (ended.paid, ended.weights_of) == (_STEPS, kept)
    assert ended.diverged_at == (5 if steps_per_loop == 1 else 6)
    for found, then in zip(run.weights, run.seen[kept]):
        np.testing.assert_allclose(found, then, rtol=0, atol=1e-6)
    assert not all(np.isfinite(v).all() for v in run.seen[ended.diverged_at])
    paid = (tmp_path / FILE_NAME).read_text().splitlines()[1:]
    assert [json.loads(line)["step"] for line in paid] == list(range(_STEPS))
    assert read_ledger(tmp_path / FILE_NAME).steps_paid == _STEPS

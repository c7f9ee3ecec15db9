"""Replicas and interruptions change nothing of what is trained."""

import functools
import json
import math
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import Diverged, Preempted
from tfdpsq.privacy.proof.ledger import FILE_NAME, read_ledger
from tfdpsq.privacy.step import Setup, rows_of_batch
from tfdpsq.validation import InputError

_N, _STEPS, _MICROBATCH = 60, 7, 4


_plan = functools.partial(
    plans.plan, epsilon=4.0, num_units=_N, batch_size=14, steps=_STEPS
)


class _Run:
    """A classifier with dropout, trained with a fixed seed, or a directory's."""

    def __init__(
        self,
        strategy,
        plan=None,
        seed=3,
        rate=0.05,
        interrupt=(),
        microbatch=_MICROBATCH,
        optimizer="adam",
        **options,
    ):
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
            optimizer = plans.optimizer(rate, optimizer)

            def note(done, loss):
                self.losses.append((done, loss))
                self.seen[done] = [v.numpy() for v in model.trainable_variables]
                if done in interrupt:
                    raise Preempted(done)

            options.setdefault("on_step", note)
            try:
                self.executed = plans.trained(
                    plan,
                    lambda batch: (model(batch["x"], True)[:, 0] - batch["y"]) ** 2,
                    [model],
                    {"x": x, "y": y},
                    microbatch,
                    optimizer,
                    seed=None if "directory" in options else seed,
                    **options,
                )
            except Preempted as stopped:
                self.preempted = stopped.executed
            except Diverged as ended:
                self.diverged = ended
            self.weights = [v.numpy() for v in model.trainable_variables]
            self.state = [v.numpy() for v in optimizer.variables]

    def assert_like(self, other, atol=1e-5):
        for one, two in zip(self.weights, other.weights):
            np.testing.assert_allclose(one, two, rtol=0, atol=atol)


# -- Replicas -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(strategy_of):
    """One replica, step by step."""
    return _Run(strategy_of(1))


@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_replicas_train_the_same_weights(strategy_of, alone, replicas):
    """Dropout included: its masks follow from the microbatch, not from the replica."""
    shared = _Run(strategy_of(replicas))
    shared.assert_like(alone)
    assert [done for done, _ in shared.losses] == list(range(1, _STEPS + 1))
    np.testing.assert_allclose(shared.losses, alone.losses, rtol=1e-4)


@pytest.mark.parametrize(
    "strategy", ["OneDeviceStrategy", "MirroredStrategy", "MirroredStrategy, compiled"]
)
def test_a_strategy_of_one_device_trains_the_same_weights(alone, strategy):
    name, _, compiled = strategy.partition(", ")
    device = tf.config.list_logical_devices("CPU")[0].name
    device = [device] if name == "MirroredStrategy" else device
    trained = _Run(getattr(tf.distribute, name)(device), jit_compile=bool(compiled))
    trained.assert_like(alone)
    np.testing.assert_allclose(trained.losses, alone.losses, rtol=1e-4)


@pytest.mark.parametrize("microbatch, engine", [(7, "fast"), (4, "rowwise")])
def test_draws_follow_a_rows_place_whatever_the_microbatches(
    strategy_of, alone, microbatch, engine
):
    other = _Run(strategy_of(1), microbatch=microbatch, engine=engine)
    other.assert_like(alone, atol=1e-6)


def test_other_rows_would_be_seen(strategy_of, alone):
    other = _Run(strategy_of(1), seed=4)
    assert max(np.abs(a - b).max() for a, b in zip(other.weights, alone.weights)) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, optimizer",
    [({"epsilon": math.inf}, "adam"), ({"secure": True}, "t5x_adafactor")],
)
def test_replicas_of_other_plans_train_the_same(strategy_of, changes, optimizer):
    plan = _plan(**changes)
    shared = _Run(strategy_of(2), plan, optimizer=optimizer)
    shared.assert_like(_Run(strategy_of(1), plan, optimizer=optimizer))


@pytest.mark.parametrize(
    "before, after, microbatch",
    [(2, 1, 4), (1, 1, 2), pytest.param(1, 2, 4, marks=pytest.mark.slow)],
)
def test_a_run_goes_on_under_other_replicas_and_microbatches(
    strategy_of, tmp_path, before, after, microbatch
):
    """Killed between two saved states; what is redone is the same step."""
    options = {"directory": tmp_path / "whole", "save_every": 2}
    assert _Run(strategy_of(1), interrupt=[1], **options).preempted == 1
    shutil.copytree(tmp_path / "whole", tmp_path / "moved")

    class Killed(Exception):
        """Ends the run where SIGKILL would."""

    def die(done, loss):
        if done == 5:
            raise Killed

    options["directory"] = tmp_path / "moved"
    with pytest.raises(Killed):
        _Run(strategy_of(before), on_step=die, **options)
    assert read_ledger(tmp_path / "moved" / FILE_NAME).steps_paid == 5
    moved = _Run(strategy_of(after), microbatch=microbatch, **options)
    assert [done for done, _ in moved.losses] == [5, 6, 7]
    whole = _Run(strategy_of(1), directory=tmp_path / "whole", save_every=2)
    moved.assert_like(whole)
    assert moved.executed == whole.executed == _STEPS
    ledgers = [
        (tmp_path / name / FILE_NAME).read_bytes() for name in ("moved", "whole")
    ]
    assert ledgers[0] == ledgers[1]  # every step once


def test_more_replicas_than_microbatches_are_refused(strategy_of):
    plan = _plan()
    setup = Setup(plan, len, [], [], -(-plan.max_rows // 3))
    with strategy_of(2).scope():
        assert rows_of_batch(setup) == 4 * setup.microbatch_size
    with strategy_of(4).scope():
        with pytest.raises(InputError, match="makes 3 microbatches for 4 replicas"):
            rows_of_batch(setup)


# -- Being asked to end ---------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_is_asked_to_end_goes_on_to_the_same_bytes(
    strategy_of, tmp_path, secure
):
    strategy, plan = strategy_of(1), _plan(secure=secure)
    begun = _Run(strategy, plan, directory=tmp_path / "a", interrupt=[1])
    assert begun.preempted == 1
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    stopped = _Run(
        strategy,
        plan,
        directory=tmp_path / "a",
        interrupt=[5],
    )
    assert stopped.preempted == 5 == read_ledger(tmp_path / "a" / FILE_NAME).steps_paid
    ended, whole = (_Run(strategy, plan, directory=tmp_path / name) for name in "ab")
    assert [done for done, _ in ended.losses] == [6, 7]
    for one, other in zip(ended.weights + ended.state, whole.weights + whole.state):
        np.testing.assert_array_equal(one, other)


# -- What would make a step that is paid for another step ----------------------------


def test_a_step_that_xla_compiled_is_not_repeated_uncompiled(strategy_of, tmp_path):
    """Its draws may be others there; replicas leave compiling to the strategy."""
    options = {"directory": tmp_path, "jit_compile": True}
    begun = _Run(strategy_of(1), interrupt=[1], **options)
    assert begun.preempted == 1
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match="jit_compile changed .*'True' to 'False'"):
        _Run(strategy_of(2), **options)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


# -- Divergence -----------------------------------------------------------------------


@pytest.mark.parametrize("replicas, secure", [(1, False), (2, True)])
def test_a_run_that_diverges_ends_at_its_last_finite_step_and_pays_for_the_plan(
    strategy_of, tmp_path, replicas, secure
):
    """Step 5 makes the weights infinite; those of step 4 are computed again from 3.

    Hooks see none of them a second time.
    """
    begun = []
    run = _Run(
        strategy_of(replicas),
        _plan(secure=secure),
        rate=plans.Breaks(4),
        directory=tmp_path,
        save_every=3,
        before_step=begun.append,
    )
    assert [done for done, _ in run.losses] == [1, 2, 3, 4, 5]
    assert begun == [0, 1, 2, 3, 4]
    ended = run.diverged
    assert (ended.paid, ended.weights_of) == (_STEPS, 4)
    assert ended.diverged_at == 5
    for found, then in zip(run.weights, run.seen[4]):
        np.testing.assert_allclose(found, then, rtol=0, atol=1e-6)
    assert not all(np.isfinite(v).all() for v in run.seen[ended.diverged_at])
    paid = (tmp_path / FILE_NAME).read_text().splitlines()[1:]
    assert [json.loads(line)["step"] for line in paid] == list(range(_STEPS))
    assert read_ledger(tmp_path / FILE_NAME).steps_paid == _STEPS

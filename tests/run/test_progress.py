"""What runs log: rates, percentiles and ε of every step, once, whatever was killed."""

import json
import math
import os
import pathlib
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from helpers import forking
from tensorboard.backend.event_processing import event_accumulator

from tfdpsq import validation
from tfdpsq.privacy import PrivacySpec, make_plan
from tfdpsq.run.core import point_log
from tfdpsq.run.core.progress import Progress, log_directory
from tfdpsq.run.passes import pass_progress

ROOT = pathlib.Path(__file__).resolve().parents[2]


class _Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def _points(directory):
    lines = (directory / point_log.FILE_NAME).read_text().splitlines()
    return [json.loads(line) for line in lines]


def _shown(directory):
    """What TensorBoard shows: tag -> {step: value}, every step once."""
    read = event_accumulator.EventAccumulator(str(directory), {"scalars": 0})
    read.Reload()
    shown = {}
    for tag in read.Tags()["scalars"]:
        events = read.Scalars(tag)
        shown[tag] = {event.step: event.value for event in events}
        assert len(shown[tag]) == len(events), "a step twice"
    return shown


def _run(progress, clock, steps, seconds=None):
    """Takes steps, whose loss is their number; returns how long each took."""
    random = np.random.default_rng(steps[0])
    took = []
    for step in steps:
        took.append(random.exponential(0.2) if seconds is None else seconds)
        clock.now += took[-1]
        progress(step, float(step))
    return took


# -- Numbers -----------------------------------------------------------------------


def test_rates_and_percentiles_are_those_of_the_recorded_times(tmp_path):
    clock = _Clock()
    progress = Progress(tmp_path, 1500, True, 32, 32 * 120, clock=clock)
    took = _run(progress, clock, range(1, 1501))
    curve = progress.close()
    points = _points(tmp_path)
    for point in (points[0], points[70], points[-1]):
        # The first step of a process is traced, too; of the others the last thousand.
        times = np.array(took[1 : point["step"]][-1000:])
        for share in (50, 90, 99):
            expected = np.percentile(times, share)
            assert point[f"step_seconds_p{share}"] == pytest.approx(expected, rel=1e-6)
        rate = 1 / times.mean()
        assert point["steps_per_second"] == pytest.approx(rate, rel=1e-6)
        assert point["examples_per_second"] == pytest.approx(32 * rate, rel=1e-6)
        assert point["tokens_per_second"] == pytest.approx(3840 * rate, rel=1e-6)
    # Two hundred points and those for whoever waits ten seconds; all steps are in one.
    steps = [point["step"] for point in points]
    assert steps[0] == 7 and steps[-1] == 1500 and len(steps) < 300
    starts = [0, *steps[:-1]]
    for start, point in zip(starts, points):
        assert point["loss"] == pytest.approx((start + 1 + point["step"]) / 2)
    assert points[-1]["seconds"] == pytest.approx(sum(took), rel=1e-6)
    assert curve["step"] == steps
    assert curve == json.loads((tmp_path / "curve.json").read_text())


def test_whoever_waits_sees_a_point_every_ten_seconds(tmp_path):
    clock = _Clock()
    with Progress(tmp_path, 10_000, clock=clock) as progress:
        _run(progress, clock, range(1, 31), seconds=4.0)
    # 4 s a step: the third after a point is the first that is ten seconds later.
    assert [p["step"] for p in _points(tmp_path)] == [*range(4, 30, 3), 30]


def test_in_strict_mode_steps_and_epsilon_are_all_there_is(tmp_path, capfd):
    clock = _Clock()
    progress = Progress(
        tmp_path, 400, False, 32, 3840, 50, lambda step: step / 100, clock=clock
    )
    # Slow steps make no points of their own: these would tell how slow they were.
    _run(progress, clock, range(1, 401), seconds=30.0)
    assert progress.close() == {"step": [], "loss": [], "seconds": []}
    points = _points(tmp_path)
    assert points == [
        {"step": step, "of": 400, "epsilon": step / 100} for step in range(2, 401, 2)
    ]
    assert set(_shown(tmp_path)) == {"epsilon"}
    # Nor does when points were added tell: of all of them the same time is kept.
    events = [
        event
        for path in tmp_path.glob("events.*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        if event.HasField("summary")
    ]
    assert len(events) == 200 and len({event.wall_time for event in events}) == 1
    told = capfd.readouterr().err
    assert "400/400" in told and "step/s" not in told and "s/step" not in told


def test_a_number_that_is_none_is_logged_as_text(tmp_path):
    with Progress(tmp_path, 2, epsilon=lambda step: math.inf) as progress:
        progress(1, math.nan)
        progress(2, 3.0)
    first, second = _points(tmp_path)
    assert first["loss"] == "nan" and first["epsilon"] == second["epsilon"] == "inf"
    assert _shown(tmp_path)["loss"] == {2: 3.0}
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert math.isnan(curve["loss"][0]) and curve["loss"][1] == 3.0


# -- ε so far ----------------------------------------------------------------------

_PLANS = {
    "poisson, pld": dict(epsilon=8.0, num_units=600, batch_size=30, steps=60),
    "rdp": dict(epsilon=3.0, num_units=600, batch_size=60, steps=25, accountant="rdp"),
    "truncating": dict(
        epsilon=2.0,
        num_units=600,
        batch_size=6,
        steps=50,
        max_batch_size=24,
        delta=1e-4,
    ),
    "shuffled": dict(
        epsilon=4.0,
        num_units=60,
        batch_size=6,
        steps=35,
        sampler="shuffled",
        n_is_public=True,
    ),
}


@pytest.mark.parametrize("name", _PLANS)
def test_epsilon_so_far_is_never_less_than_what_is_spent(name):
    plan = make_plan(PrivacySpec(clip_norm=0.5, **_PLANS[name]))
    steps = plan.spec.steps
    shown = [plan.epsilon_so_far(step) for step in range(steps + 1)]
    assert shown[0] == 0.0
    assert shown == sorted(shown)
    assert shown[-1] == plan.epsilon(steps)  # the certificate's
    exact = plan.spec.accountant == "rdp"
    for step in (1, steps // 2, steps - 1):
        spent = plan.epsilon(step)
        assert shown[step] >= spent
        # RDP is loose where little is spent; later on it says something.
        if exact or step > 1:
            assert shown[step] <= spent * (1 + 1e-11 if exact else 1.5)


def test_epsilon_so_far_without_privacy_and_beyond_the_plan():
    spec = PrivacySpec(
        epsilon=math.inf, clip_norm=1.0, num_units=60, batch_size=6, steps=5
    )
    assert make_plan(spec).epsilon_so_far(1) == math.inf
    plan = make_plan(PrivacySpec(clip_norm=0.5, **_PLANS["rdp"]))
    with pytest.raises(validation.InputError, match="26 steps were executed"):
        plan.epsilon_so_far(26)


# -- Killed, and gone on with --------------------------------------------------------

# Takes steps that save every fifth, and dies without a word after 17 of them, in the
# middle of a line.
_KILLED = """
import os, pathlib, signal, sys
from tfdpsq.run.core.progress import Progress
out = pathlib.Path(sys.argv[1])
progress = Progress(out, 600, True, 8, 80, 5)
for step in range(1, 18):
    progress(step, float(step))
with open(out / "log.jsonl", "ab") as file:
    file.write(b'{"step": 18, "lo')
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_killed_with_kill_9_has_every_step_once(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(_KILLED)
    child = forking.run([sys.executable, str(script), str(tmp_path)], cwd=ROOT)
    assert child.returncode == -9, child.stderr
    before = point_log.read_points(tmp_path / point_log.FILE_NAME)
    time.sleep(1.1)  # TensorBoard reads files in the order of the second they are of
    # Every third step, and every step after which a state is saved.
    assert [point["step"] for point in before] == [3, 5, 6, 9, 10, 12, 15]
    # The last state is that after 15 steps; 16 and 17 are taken again.
    clock = _Clock()
    with Progress(tmp_path, 600, True, 8, 80, 5, clock=clock) as progress:
        _run(progress, clock, range(16, 601), seconds=0.5)
    points = _points(tmp_path)
    assert points[: len(before)] == before
    steps = [point["step"] for point in points]
    assert steps == sorted({*range(3, 601, 3), *range(5, 601, 5)})
    # 1 + … + 600, each loss in one mean.
    counts = np.diff([0, *steps])
    total = sum(count * p["loss"] for count, p in zip(counts, points))
    assert total == pytest.approx(600 * 601 / 2, rel=1e-5)
    assert points[-1]["seconds"] > before[-1]["seconds"] + 290
    shown = _shown(tmp_path)
    assert shown["loss"] == pytest.approx({p["step"]: p["loss"] for p in points})


def test_a_run_that_begins_anew_leaves_nothing_of_the_old_one(tmp_path):
    for steps in (9, 4):
        with Progress(tmp_path, 10) as progress:
            for step in range(1, steps + 1):
                progress(step, 1.0)
    assert [point["step"] for point in _points(tmp_path)] == [1, 2, 3, 4]


def test_a_run_stopped_between_two_points_says_how_far_it_came(tmp_path):
    with pytest.raises(SystemExit):
        with Progress(tmp_path, 1000) as progress:
            for step in range(1, 8):
                progress(step, float(step))
            raise SystemExit(75)
    assert [(p["step"], p["loss"]) for p in _points(tmp_path)] == [(5, 3.0), (7, 6.5)]


@pytest.mark.parametrize(
    "line",
    ['{"step": 0, "loss": "abc", "seconds": 1}', '{"step": 1, "of": %s}' % ("1" * 400)],
    ids=["text", "400 digits"],
)
def test_a_damaged_log_does_not_end_a_run_whose_steps_are_paid(tmp_path, line):
    """Every restart would fail in the same place, after all of ε."""
    (tmp_path / point_log.FILE_NAME).write_text(line + "\n")
    with Progress(tmp_path, 10) as progress:
        for step in range(1, 8):
            progress(step, float(step))
        curve = progress.close()
    assert curve["step"][-1] == 7.0 and set(curve["step"]) <= set(range(1, 8))


def test_nothing_is_left_behind_where_no_step_was_taken(tmp_path):
    with pytest.raises(ValueError, match="refused"):
        with Progress(tmp_path / "run", 10):
            raise ValueError("refused")
    assert not (tmp_path / "run").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(validation.InputError, match="run: cannot be written"):
        Progress(tmp_path / "run", 10)


@pytest.mark.parametrize("name", ["log.jsonl", "curve.json"])
@pytest.mark.parametrize("make", [pathlib.Path.mkdir, os.mkfifo])
def test_a_place_is_tried_before_the_first_step(tmp_path, name, make):
    """It was told when a step, or all of them, had been paid for."""
    make(tmp_path / name)
    with pytest.raises(validation.InputError, match=rf"{name}: is not a file"):
        Progress(tmp_path, 10)
    assert os.listdir(tmp_path) == [name]


# -- Passes over a corpus ------------------------------------------------------------


def test_a_pass_logs_its_rate_since_its_first_items_came(tmp_path):
    clock = _Clock()
    with pass_progress.PassProgress(
        tmp_path, "queries", (3, 16), 640, 1920, clock
    ) as progress:
        clock.now += 50  # loading and tracing
        for _ in range(10):
            progress.add(64, 1000)
            clock.now += 3.2
    pass_progress.finished(tmp_path, 3, 16, 640, 82.0)
    points = _points(tmp_path)
    # 64 queries and 1,000 tokens every 3.2 s.
    assert points[-2]["queries_per_second"] == pytest.approx(9 * 64 / 32)
    assert points[-2]["tokens_per_second"] == pytest.approx(9 * 1000 / 32)
    assert [point.get("queries") for point in points] == [64, 320, 576, 640, None]
    assert points[-1]["rows_per_second"] == pytest.approx(640 / 82)
    assert {point["shard"] for point in points} == {3}
    (folder,) = tmp_path.glob("process-*")
    assert set(_shown(folder)["queries_per_second"]) == {2240, 2496, 2560}


def test_logs_never_lie_in_what_may_be_released(tmp_path):
    logs = tmp_path / "private" / "logs" / "one"
    assert log_directory(tmp_path / "release" / "one") == logs
    assert log_directory(tmp_path / "private" / "one") == logs
    assert log_directory(tmp_path / "one") == logs
    assert pass_progress.log_of(str(tmp_path / "release" / ".one.shards")) == logs
    assert pass_progress.log_of("gs://bucket/.one.shards") is None
    assert log_directory(tmp_path / "one", "/elsewhere").parts[:2] == ("/", "elsewhere")


def test_a_log_that_cannot_be_written_does_not_stop_a_worker(tmp_path):
    (tmp_path / "logs").write_text("a file")
    pass_progress.finished(tmp_path / "logs", 0, 4, 10, 1.0)
    pass_progress.finished(None, 0, 4, 10, 1.0)
    assert (tmp_path / "logs").read_text() == "a file"

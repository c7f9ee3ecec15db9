"""What runs log: losses and ε of every step, once, whatever was killed."""

import json
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import forking
from tensorboard.backend.event_processing import event_accumulator

from tfdpsq import validation
from tfdpsq.privacy import PrivacySpec, make_plan
from tfdpsq.run.common.progress import LOG_FILE, Progress, read_points

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _points(directory):
    lines = (directory / LOG_FILE).read_text().splitlines()
    return [json.loads(line) for line in lines]


def _shown(directory):
    """What TensorBoard shows: tag -> {step: value}, every step once."""
    read = event_accumulator.EventAccumulator(str(directory), {"tensors": 0})
    read.Reload()
    shown = {}
    for tag in read.Tags()["tensors"]:
        events = read.Tensors(tag)
        shown[tag] = {e.step: float(tf.make_ndarray(e.tensor_proto)) for e in events}
        assert len(shown[tag]) == len(events), "a step twice"
    return shown


# -- Numbers -----------------------------------------------------------------------


def test_every_step_is_in_one_point(tmp_path):
    with Progress(tmp_path, 1500) as progress:
        for step in range(1, 1501):
            progress(step, float(step))
    points = _points(tmp_path)
    steps = [point["step"] for point in points]
    assert steps[-1] == 1500 and len(steps) < 300
    for start, point in zip([0, *steps[:-1]], points):
        assert point["loss"] == pytest.approx((start + 1 + point["step"]) / 2)
    assert points[-1]["steps_per_second"] > 0


def test_strict_mode_logs_steps_and_epsilon_alone(tmp_path, capfd):
    options = {"measured": False, "save_every": 50}
    options["epsilon"] = lambda step: step / 100
    with Progress(tmp_path, 400, **options) as progress:
        for step in range(1, 401):
            progress(step, float(step))
    points = _points(tmp_path)
    assert points == [
        {"step": step, "of": 400, "epsilon": step / 100} for step in range(2, 401, 2)
    ]
    # Events hold the time of each.
    assert not list(tmp_path.glob("events.*"))
    told = capfd.readouterr().err
    assert "step/s" not in told and "s/step" not in told


# -- ε so far ----------------------------------------------------------------------

_PLANS = {
    "truncating": dict(epsilon=2.0, batch_size=6, max_batch_size=24, delta=1e-4),
    "rdp": dict(epsilon=3.0, batch_size=60, accountant="rdp"),
    "shuffled": dict(epsilon=4.0, batch_size=60, sampler="shuffled", n_is_public=True),
}


@pytest.mark.parametrize("name", _PLANS)
def test_epsilon_so_far_is_never_less_than_what_is_spent(name):
    spec = {"clip_norm": 0.5, "num_units": 600, "steps": 25, **_PLANS[name]}
    plan = make_plan(PrivacySpec(**spec))
    shown = [plan.epsilon_so_far(step) for step in range(26)]
    assert shown[0] == 0.0
    assert shown == sorted(shown)
    assert shown[-1] == plan.epsilon(25)  # the certificate's
    exact = plan.spec.accountant == "rdp"
    for step in (1, 12, 24):
        spent = plan.epsilon(step)
        assert shown[step] >= spent
        # RDP is loose where little is spent; later on it says something.
        if exact or step > 1:
            assert shown[step] <= spent * (1 + 1e-11 if exact else 1.5)
    with pytest.raises(validation.InputError, match="26 steps"):
        plan.epsilon_so_far(26)


# -- Killed, and gone on with --------------------------------------------------------

# Takes steps that save every fifth, and dies without a word after 17 of them, in the
# middle of a line.
_KILLED = """
import os, pathlib, signal, sys
from tfdpsq.run.common.progress import Progress
out = pathlib.Path(sys.argv[1])
progress = Progress(out, 600, save_every=5)
for step in range(1, 18):
    progress(step, float(step))
with open(out / "log.jsonl", "ab") as file:
    file.write(b'{"step": 18, "lo')
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_run_logs_every_step_once(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(_KILLED)
    child = forking.run([sys.executable, str(script), str(tmp_path)], cwd=ROOT)
    assert child.returncode == -9, child.stderr
    before = read_points(tmp_path / LOG_FILE)
    # Every third step, and every step after which a state is saved.
    assert [point["step"] for point in before] == [3, 5, 6, 9, 10, 12, 15]
    # The last state is that after 15 steps; 16 and 17 are taken again.
    with Progress(tmp_path, 600, save_every=5) as progress:
        for step in range(16, 601):
            progress(step, float(step))
    points = _points(tmp_path)
    assert points[: len(before)] == before
    steps = [point["step"] for point in points]
    assert steps == sorted({*range(3, 601, 3), *range(5, 601, 5)})
    # 1 + … + 600, each loss in one mean.
    counts = np.diff([0, *steps])
    total = sum(count * p["loss"] for count, p in zip(counts, points))
    assert total == pytest.approx(600 * 601 / 2, rel=1e-5)
    shown = _shown(tmp_path)
    assert shown["loss"] == pytest.approx({p["step"]: p["loss"] for p in points})


def test_place_of_logs_is_tried_before_the_first_step(tmp_path):
    """It was told when a step, or all of them, had been paid for."""
    (tmp_path / "log" / "log.jsonl").mkdir(parents=True)
    (tmp_path / "run").write_text("a file")
    for name in ("log", "run"):
        with pytest.raises((OSError, validation.InputError), match=name):
            Progress(tmp_path / name, 10)

"""`--strategy`: what is refused, and how training reacts to signals."""

import json
import os
import signal
import time
import types

import ml_collections
import pytest

from tfdpsq import validation
from tfdpsq.run.core import stages
from tfdpsq.run.devices import clusters, preemption, strategy

_TWO = {"worker": ["a:1", "b:2"]}


def _tf_config(cluster=_TWO, kind="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    "found, message",
    [
        ("", "is not set"),
        ("{", "not a cluster and task"),
        (_tf_config(index=2), "worker 2, which is not in"),
        (_tf_config({**_TWO, "ps": ["c:3"]}), r"jobs \['ps'\]"),
        (_tf_config({"worker": ["a", "b:2"]}), "'a', which is not host:port"),
        (_tf_config({"worker": ["a:1", "a:1"]}), "an address twice"),
    ],
)
def test_bad_tf_config_is_refused_with_an_example(found, message):
    with pytest.raises(validation.InputError, match=message) as raised:
        clusters.read_tf_config(found)
    assert '"index": 0' in str(raised.value)


def test_good_tf_config_is_read():
    assert clusters.read_tf_config(_tf_config(index="1")) == (_TWO, "worker", 1)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"kind": "gpu"}, "strategy is 'gpu'"),
        ({"kind": "mirrored", "offered": ("default",)}, "it trains nothing"),
        ({"kind": "tpu"}, "tpu is not set"),
        ({"tpu": "local"}, "tpu is 'local'"),
        ({"kind": "mirrored", "replicas": -1}, "replicas is -1"),
    ],
)
def test_flags_without_meaning_are_refused(flags, message):
    with pytest.raises(validation.InputError, match=message):
        with strategy.opened(**flags):
            pass


# -- Being asked to end ---------------------------------------------------------------


@pytest.fixture
def notice():
    """One that listens; afterwards the signals are handled as before."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    made = preemption.Notice()
    made.listen()
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_training_notes_a_signal_and_leaves_the_second_to_python(notice, number):
    with notice.training() as asked:
        assert not asked()
        os.kill(os.getpid(), number)
        assert asked()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_signal_in_the_last_step_ends_before_the_next_training(notice):
    """The training that it came in is finished, and its output is written first."""
    with notice.training():
        os.kill(os.getpid(), signal.SIGTERM)
    reached = []
    with pytest.raises(SystemExit) as raised:
        with notice.training():
            reached.append("a step is paid")
    assert raised.value.code == preemption.RESTART and not reached


def test_signal_in_the_last_step_ends_a_job_after_its_stage(notice, tmp_path):
    (tmp_path / "work").mkdir()
    job = stages.Stages(tmp_path / "work")
    devices = strategy.Devices(notice=notice)
    ran = []

    def run(config, out, given):
        with given.notice.training():
            os.kill(os.getpid(), signal.SIGTERM)
        ran.append(out.name)
        return {"seconds": 1.0}

    module = types.SimpleNamespace(run=run)
    with pytest.raises(SystemExit) as raised:
        job.run(module, ml_collections.ConfigDict(), "a", True, devices)
    assert raised.value.code == preemption.RESTART
    assert ran == ["a"] and stages.Stages(tmp_path / "work").seconds == {"a": 1.0}


def test_sigterm_outside_of_training_ends_at_once_with_75(notice):
    with pytest.raises(SystemExit) as raised:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert raised.value.code == preemption.RESTART == 75
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def test_importing_a_stage_changes_no_signal_handler():
    before = signal.getsignal(signal.SIGTERM)
    with preemption.Notice().training() as asked:
        assert not asked() and signal.getsignal(signal.SIGTERM) == before


def test_scratch_of_dead_workers_is_removed_and_of_living_ones_kept(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(strategy.tempfile, "tempdir", str(tmp_path))
    left, new = tmp_path / "tfdpsq-worker-left", tmp_path / "tfdpsq-worker-new"
    for path in (left, new):
        (path / "private").mkdir(parents=True)
    os.utime(left, (1, 1))
    with strategy.scratch_directory() as living:
        os.utime(living, (1, 1))
        with strategy.scratch_directory() as other:
            assert set(tmp_path.iterdir()) == {new, living, other}
    assert set(tmp_path.iterdir()) == {new}

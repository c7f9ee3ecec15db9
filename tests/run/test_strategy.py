"""`--strategy`: what is refused, and how training reacts to signals."""

import os
import signal
import sys
import time

import pytest

from tfdpsq.run import process
from tfdpsq.run.frame import devices, runner
from tfdpsq.run.frame.places import Place
from tfdpsq.validation import InputError


@pytest.mark.parametrize("text", ["", "{", '{"task": {}}', '{"cluster": []}'])
def test_bad_tf_config_is_refused_with_an_example(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(InputError, match="names no cluster and task") as raised:
        with devices.opened("multiworker"):
            pass
    assert '"index": 0' in str(raised.value)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"kind": "tpu"}, "tpu is not set"),
        ({"tpu": "local"}, "tpu is 'local', which applies to strategy 'tpu' only"),
        ({"replicas": 2}, "replicas is 2, which applies to strategy 'mirrored' only"),
    ],
)
def test_flags_without_meaning_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        with devices.opened(**flags):
            pass


def test_batch_that_replicas_cannot_share_is_refused(strategy_of):
    two = devices.Devices(strategy_of(2))
    assert two.replicas == 2 and two.chief and not two.several_workers
    two.require_share(8)
    with pytest.raises(InputError, match="batch_size is 9, which 2 replicas cannot"):
        two.require_share(9)


# -- Being asked to end ---------------------------------------------------------------


@pytest.fixture
def notice():
    """One that listens; afterwards the signals are handled as before."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    made = process.Notice()
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
    assert raised.value.code == process.RESTART and not reached


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_an_object_is_finalised_is_not_lost(notice, monkeypatch, number):
    """Python prints what `__del__` raises, and goes on: to the next paid step."""

    class Finalised:
        def __del__(self):
            os.kill(os.getpid(), number)
            sum(range(1000))

    monkeypatch.setattr(sys, "unraisablehook", lambda raised: None)
    Finalised()
    with pytest.raises(SystemExit):
        with notice.training():
            pass


def test_sigterm_outside_of_training_ends_at_once_with_75(notice):
    with pytest.raises(SystemExit) as raised:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert raised.value.code == process.RESTART == 75
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def test_importing_a_stage_changes_no_signal_handler():
    before = signal.getsignal(signal.SIGTERM)
    with process.Notice().training() as asked:
        assert not asked() and signal.getsignal(signal.SIGTERM) == before


# -- Several workers -----------------------------------------------------------------


def test_worker_that_is_not_the_chief_writes_in_a_place_of_its_own(tmp_path):
    place = Place.of(tmp_path / "release" / "one")
    left = place.private / "workers" / "worker1" / "private" / "rows"
    left.mkdir(parents=True)  # by a worker that was killed

    class Second(devices.Devices):
        several_workers, chief, worker = True, False, "worker1"

        def chiefs(self, flag):
            return False

    with runner.own_place(place, Second()) as own:
        assert own.name == "one" and not left.exists()
        assert own.private.is_relative_to(place.private)
        own.partial.mkdir(parents=True)
    assert not (place.private / "workers" / "worker1").exists()

"""A run killed with SIGKILL goes on to the same bytes, and pays for each step once."""

import gc
import json
import os
import pathlib
import resource
import shutil
import signal
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import forking, resume_child

from tfdpsq.data import io
from tfdpsq.privacy import checkpoint, optimizers
from tfdpsq.privacy.proof.ledger import FILE_NAME
from tfdpsq.validation import InputError

_CHILD = pathlib.Path(__file__).parents[1] / "helpers/resume_child.py"
_STEPS = 12


def _start(directory, output, death):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return forking.Command(
        [sys.executable, _CHILD, directory, output, death],
        env=environment,
    )


def _killed(directory, output, death):
    child = _start(directory, output, death)
    seen, errors = child.communicate()
    assert child.returncode == -signal.SIGKILL, errors
    return [int(line) for line in seen.split()]


def _finished(directory, output):
    child = _start(directory, output, "never")
    seen, errors = child.communicate()
    assert child.returncode == 0, errors
    with np.load(output) as values:
        return [int(line) for line in seen.split()], [values[k] for k in values.files]


def _paid(directory):
    lines = (directory / FILE_NAME).read_text().splitlines()
    return [json.loads(line)["step"] for line in lines[1:]]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that was killed after paying for step 0, and its copy killed later."""
    base = tmp_path_factory.mktemp("begun")
    output = base / "none.npz"
    assert _killed(base / "begun", output, "pay:0") == []
    assert _paid(base / "begun") == [0]  # paid for, not taken
    shutil.copytree(base / "begun", base / "later")
    assert _killed(base / "later", output, "update:5") == [1, 2, 3, 4, 5]
    assert _paid(base / "later") == [0, 1, 2, 3, 4]
    return base


def test_killed_run_ends_in_the_same_bytes_and_pays_each_step_once(begun, tmp_path):
    """Both runs start from one paid step, the same seeds and the same weights."""
    killed, whole, output = tmp_path / "killed", tmp_path / "whole", tmp_path / "o.npz"
    shutil.copytree(begun / "later", killed)
    shutil.copytree(begun / "begun", whole)
    # The state after step 3 was saved: steps 4 and 5 are taken again, unpaid.
    assert _killed(killed, output, "save:6") == [4, 5, 6]
    assert _paid(killed) == [0, 1, 2, 3, 4, 5]
    seen, one = _finished(killed, output)
    assert seen == list(range(4, _STEPS + 1))
    seen, other = _finished(whole, output)
    assert seen == list(range(1, _STEPS + 1))
    assert len(one) == len(other) > 10
    for left, right in zip(one, other):
        assert left.tobytes() == right.tobytes()
    assert _paid(killed) == list(range(_STEPS))
    assert (killed / FILE_NAME).read_bytes() == (whole / FILE_NAME).read_bytes()
    seeds = pathlib.Path(checkpoint.STATE) / checkpoint.SECRETS
    assert (killed / seeds).read_bytes() == (whole / seeds).read_bytes()


def test_lost_or_older_state_is_never_paid_for_twice(begun, tmp_path):
    def refused(change, match):
        broken, output = tmp_path / "broken", tmp_path / "none.npz"
        shutil.copytree(begun / "later", broken)
        change(broken)
        with pytest.raises(ValueError, match=match):
            resume_child.main(broken, output, "never")
        assert not output.exists()
        shutil.rmtree(broken)

    def older_ledger(at):  # a backup of it was restored
        lines = (at / FILE_NAME).read_bytes().splitlines(keepends=True)
        (at / FILE_NAME).write_bytes(b"".join(lines[:2]))

    def no_weights(at):  # left out of a backup, being large
        for file in (at / checkpoint.STATE).glob("step-*"):
            file.unlink()

    refused(lambda at: shutil.rmtree(at / checkpoint.STATE), "budget a second time")
    refused(no_weights, "budget a second time")
    refused(older_ledger, "Lines of the ledger were lost")


def test_partial_files_of_a_killed_process_are_removed(tmp_path):
    """They are a directory, of which saving a state made a traceback."""
    checkpoint.open_secrets(tmp_path, "run", 0, {})
    state = tmp_path / checkpoint.STATE
    left = state / io.partial_name("rows")
    left.mkdir()
    (left / "rows-00000.bin").write_bytes(b"tokens")
    (state / ".01234567.partial").write_bytes(b"weights")
    checkpoint.save(tmp_path, 0, [tf.Variable(1.0)], "run")
    names = {path.name for path in state.iterdir()}
    assert names == {checkpoint.SECRETS, "step-00000000.npz"}


@pytest.mark.parametrize("size", [100, 40_100])
def test_full_disk_keeps_the_state_before(tmp_path, monkeypatch, size):
    """An archive that was left open printed a traceback after it."""
    checkpoint.open_secrets(tmp_path, "run", 0, {})
    weights = [tf.Variable(tf.ones([10_000])), tf.Variable([1, 2])]
    checkpoint.save(tmp_path, 1, weights, "run")
    state = tmp_path / checkpoint.STATE
    before = {path.name: path.read_bytes() for path in state.iterdir()}
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        with pytest.raises(InputError, match="after step 2 could not .* too large"):
            checkpoint.save(tmp_path, 2, weights, "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    gc.collect(1)  # not what older tests left, such as a cluster that waits
    assert not unraisable
    assert {path.name: path.read_bytes() for path in state.iterdir()} == before


def test_run_goes_on_with_or_without_a_gpu():
    """Keras puts that into an optimizer's configuration."""
    said = [
        optimizers.settings_of(tf.keras.optimizers.Adam(rate, jit_compile=compiled))
        for rate, compiled in ((0.1, True), (0.1, False), (0.2, False))
    ]
    assert said[0] == said[1] != said[2]

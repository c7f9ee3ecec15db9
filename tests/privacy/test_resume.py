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

from tfdpsq.data import files
from tfdpsq.privacy import checkpoint
from tfdpsq.privacy.proof.ledger import FILE_NAME
from tfdpsq.validation import InputError

_CHILD = pathlib.Path(__file__).parents[1] / "helpers/resume_child.py"
_STEPS = 12


def _start(directory, output, death, engine="fast", secure=""):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return forking.Command(
        [sys.executable, _CHILD, directory, output, death, engine, secure],
        env=environment,
    )


def _killed(directory, output, death, secure=""):
    child = _start(directory, output, death, secure=secure)
    seen, errors = child.communicate()
    assert child.returncode == -signal.SIGKILL, errors
    return [int(line) for line in seen.split()]


def _finished(directory, output, engine="fast", secure=""):
    child = _start(directory, output, "never", engine, secure)
    seen, errors = child.communicate()
    assert child.returncode == 0, errors
    with np.load(output) as values:
        return [int(line) for line in seen.split()], [values[k] for k in values.files]


def _paid(directory):
    lines = (directory / FILE_NAME).read_text().splitlines()
    return [json.loads(line)["step"] for line in lines[1:]]


@pytest.mark.parametrize("secure", ["", pytest.param("SECURE", marks=pytest.mark.slow)])
def test_killed_runs_end_in_the_same_bytes_and_pay_once(tmp_path, secure):
    """Both runs start from one paid step, the same seeds and the same weights."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    output = tmp_path / "killed.npz"
    assert _killed(killed, output, "pay:0", secure) == []
    assert _paid(killed) == [0]  # paid for, not taken
    shutil.copytree(killed, whole)
    assert _killed(killed, output, "update:5", secure) == [1, 2, 3, 4, 5]
    assert _paid(killed) == [0, 1, 2, 3, 4]
    # The state after step 3 was saved: steps 4 and 5 are taken again, unpaid.
    assert _killed(killed, output, "save:6", secure) == [4, 5, 6]
    assert _paid(killed) == [0, 1, 2, 3, 4, 5]
    seen, one = _finished(killed, output, secure=secure)
    assert seen == list(range(4, _STEPS + 1))
    seen, other = _finished(whole, tmp_path / "whole.npz", secure=secure)
    assert seen == list(range(1, _STEPS + 1))
    assert len(one) == len(other) > 10
    for left, right in zip(one, other):
        assert left.tobytes() == right.tobytes()
    assert _paid(killed) == list(range(_STEPS))
    assert (killed / FILE_NAME).read_bytes() == (whole / FILE_NAME).read_bytes()
    seeds = pathlib.Path(checkpoint.STATE) / checkpoint.SECRETS
    assert (killed / seeds).read_bytes() == (whole / seeds).read_bytes()


def test_lost_or_foreign_state_is_never_paid_for_twice(tmp_path):
    run = tmp_path / "run"
    _killed(run, tmp_path / "none.npz", "update:4")

    def refused(change, match):
        broken = tmp_path / "broken"
        shutil.copytree(run, broken)
        change(broken)
        with pytest.raises(ValueError, match=match):
            resume_child.main(broken, tmp_path / "none.npz", "never")
        assert not (tmp_path / "none.npz").exists()
        shutil.rmtree(broken)

    state = checkpoint.STATE
    refused(lambda at: shutil.rmtree(at / state), "would spend the budget a second")
    refused(
        lambda at: [f.unlink() for f in (at / state).glob("step-*")],
        "there is no saved state",
    )

    def cut(at):
        for path in (at / state).glob("step-*3.npz"):
            path.write_bytes(path.read_bytes()[:-40])

    refused(cut, "it cannot be read")

    def reseed(at):
        path = at / state / checkpoint.SECRETS
        kept = json.loads(path.read_text())
        kept["sampler_seed"] += 1
        path.write_text(json.dumps(kept))

    refused(reseed, "not the seeds that")

    def shorten(at):
        lines = (at / FILE_NAME).read_bytes().splitlines(keepends=True)
        (at / FILE_NAME).write_bytes(b"".join(lines[:2]))

    refused(shorten, "Lines of the ledger were lost")


def test_what_changed_is_named_once_a_step_is_paid_for(tmp_path):
    """The second run would not be the rest of the first."""
    run, output = tmp_path / "run", tmp_path / "none.npz"
    _killed(run, output, "pay:0")
    for change, message in (
        ({"data": "other rows"}, "the private data changed, and 1 steps"),
        ({"clip_norm": 0.6}, "plan"),
        ({"engine": "vectorized"}, "engine was fast when the run.*vectorized"),
    ):
        with pytest.raises(ValueError, match=message):
            resume_child.main(run, output, "never", **change)
        assert _paid(run) == [0]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dpkeras", "vectorized"])
def test_other_engines_resume_too(tmp_path, engine):
    child = _start(tmp_path / "run", tmp_path / "o.npz", "update:2", engine)
    child.communicate()
    seen, _ = _finished(tmp_path / "run", tmp_path / "o.npz", engine)
    assert seen == list(range(1, _STEPS + 1))


def test_rows_that_a_killed_process_began_to_write_are_removed(tmp_path):
    """They are a directory, of which saving a state made a traceback."""
    found = checkpoint.open_secrets(tmp_path, 0, {})
    state = tmp_path / checkpoint.STATE
    left = state / files.partial_name("rows")
    left.mkdir()
    (left / "rows-00000.bin").write_bytes(b"tokens")
    (state / ".01234567.partial").write_bytes(b"weights")
    checkpoint.save(tmp_path, 0, [tf.Variable(1.0)], found)
    names = {path.name for path in state.iterdir()}
    assert names == {checkpoint.SECRETS, "step-00000000.npz"}


@pytest.mark.parametrize("size", [100, 3_000, 41_000])
def test_a_state_that_does_not_fit_on_the_disk_is_told_in_one_line(
    tmp_path, monkeypatch, size
):
    """An archive that was left open printed a traceback after it."""
    found = checkpoint.open_secrets(tmp_path, 0, {})
    weights = [tf.Variable(tf.ones([10_000])), tf.Variable([1, 2])]
    checkpoint.save(tmp_path, 1, weights, found)
    state = tmp_path / checkpoint.STATE
    before = {path.name: path.read_bytes() for path in state.iterdir()}
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        with pytest.raises(InputError, match="after step 2 could not .* too large"):
            checkpoint.save(tmp_path, 2, weights, found)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    gc.collect()
    assert not unraisable
    assert {path.name: path.read_bytes() for path in state.iterdir()} == before


def test_states_are_archives_as_numpy_writes_them(tmp_path):
    found = checkpoint.open_secrets(tmp_path, 0, {})
    checkpoint.save(tmp_path, 1, [tf.Variable([1.0, 2.0]), tf.Variable(3)], found)
    arrays = {"00000": np.float32([1, 2]), "00001": np.int32(3)}
    np.savez(tmp_path / "numpys.npz", secrets=np.array(found.digest), **arrays)
    written = (tmp_path / checkpoint.STATE / "step-00000001.npz").read_bytes()
    assert written == (tmp_path / "numpys.npz").read_bytes()


def test_a_run_goes_on_whether_or_not_there_is_a_gpu(tmp_path):
    """Keras puts that into an optimizer's config."""
    began = {"optimizer": "[('jit_compile', True), ('learning_rate', 0.1)]"}
    secrets = checkpoint.open_secrets(tmp_path, 0, began)
    now = {"optimizer": "[('jit_compile', False), ('learning_rate', 0.1)]"}
    assert checkpoint.open_secrets(tmp_path, 1, now) == secrets
    other = {"optimizer": "[('jit_compile', False), ('learning_rate', 0.2)]"}
    with pytest.raises(InputError, match="optimizer was .*0.1.* is .*0.2"):
        checkpoint.open_secrets(tmp_path, 1, other)

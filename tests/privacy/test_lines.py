"""What the ledger wrote survives the power; a full disk costs nothing."""

import errno
import os
import pathlib
import stat
import subprocess
import sys
import textwrap

import pytest
import tensorflow as tf

from tfdpsq.privacy import checkpoint
from tfdpsq.privacy.proof.ledger import Ledger, PrivateReads, read_ledger
from tfdpsq.validation import InputError

PLAN, DATA = "plan " * 10, "data " * 10  # As in ledger_child.py.
_TESTS = pathlib.Path(__file__).parents[1]


def _open(path):
    return Ledger(path, PLAN, DATA, 10)


class _Device:
    """What would be left if the power failed now: only what was flushed."""

    def __init__(self, monkeypatch):
        self.files, self.names = {}, {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.flush)

    def flush(self, descriptor):
        self._fsync(descriptor)
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self.names[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            # Also one that is open for writing alone.
            path = pathlib.Path(f"/proc/self/fd/{descriptor}")
            self.files[status.st_ino] = path.read_bytes()

    def content(self, path):
        """Bytes of a file; None if it, or a folder of its path, has no name yet."""
        return self.files.get(self.names.get(path.parent, {}).get(path.name))

    def restore(self, path, target):
        content = self.content(path)
        assert content is not None, path
        target.write_bytes(content)
        return target


def test_paid_step_is_on_the_device_before_its_update(tmp_path, monkeypatch):
    device = _Device(monkeypatch)
    path = tmp_path / "private" / "stage" / "ledger.jsonl"
    with _open(path) as ledger:
        for step in range(3):
            copy = device.restore(path, tmp_path / f"copy{step}")
            assert read_ledger(copy).steps_paid == step
            assert ledger.pay(step)
        assert read_ledger(device.restore(path, tmp_path / "copy")).steps_paid == 3


def test_seeds_states_and_reads_are_on_the_device_when_written(tmp_path, monkeypatch):
    """Without them, paid steps cannot be repeated, and the budget is lost."""
    device = _Device(monkeypatch)
    checkpoint.open_secrets(tmp_path, "run", 0, {})
    folder = tmp_path / checkpoint.STATE
    seeds = folder / checkpoint.SECRETS
    assert device.content(seeds) == seeds.read_bytes()
    reads = PrivateReads(tmp_path / "private_reads.jsonl")
    for step in range(2):
        checkpoint.save(tmp_path, step, [tf.Variable([1.0, 2.0])], "run")
        state = folder / f"step-{step:08d}.npz"
        assert device.content(state) == state.read_bytes()
        reads.record(f"read {step}", "the terminal")
        assert device.content(reads.path).count(b"\n") == step + 1


def test_reopening_flushes_lines_that_a_killed_process_left_in_memory(
    tmp_path, monkeypatch
):
    """Else a power failure after the replayed update would leave it unpaid."""
    path = tmp_path / "ledger.jsonl"
    with _open(path) as ledger, monkeypatch.context() as killed:
        killed.setattr(os, "fsync", lambda descriptor: None)
        ledger.pay(0)
    device = _Device(monkeypatch)
    with _open(path) as ledger:
        assert ledger.pay(0) is False
        (inode,) = device.files
        assert inode == path.stat().st_ino
        assert device.files[inode] == path.read_bytes()


@pytest.mark.parametrize("cut", [True, False])
def test_step_whose_flush_fails_must_not_run(tmp_path, monkeypatch, cut):
    """Where its line cannot be taken back it counts as paid."""
    path = tmp_path / "ledger.jsonl"

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with _open(path) as ledger, monkeypatch.context() as failing:
        failing.setattr(os, "fsync", fail)
        if not cut:
            failing.setattr(os, "ftruncate", fail)
        with pytest.raises(InputError, match="cannot be written"):
            ledger.pay(0)
    with pytest.raises(InputError, match="cannot be written"):
        ledger.pay(0)  # closed
    with _open(path) as ledger:
        assert ledger.steps_paid == (0 if cut else 1)
        assert ledger.pay(0) is cut


def test_disk_full_at_any_byte_pays_nothing_and_loses_nothing(tmp_path):
    code = f"""
        import os, resource, sys
        sys.path.insert(0, {str(_TESTS)!r})
        from helpers import ledger_child as child
        from tfdpsq.validation import InputError as Refused
        def open_ledger(path):
            return child.Ledger(path, child.PLAN, child.DATA, 10)
        def limit(size):  # the nearest thing to a full disk that needs no rights
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        for size in range(0, 200, 20):
            limit(size)
            try:
                open_ledger("new/ledger.jsonl")
            except Refused as error:
                assert "Free space there" in str(error)
            else:
                raise SystemExit("opened on a full disk")
            assert os.path.getsize("new/ledger.jsonl") == 0
        limit(resource.RLIM_INFINITY)
        ledger = open_ledger("new/ledger.jsonl")
        ledger.pay(0)
        size = os.path.getsize("new/ledger.jsonl")
        ledger.pay(1)
        line = os.path.getsize("new/ledger.jsonl") - size
        before = open("new/ledger.jsonl", "rb").read()
        for left in range(line):
            limit(len(before) + left)
            try:
                ledger.pay(2)
            except Refused as error:
                assert os.path.abspath("new/ledger.jsonl") in str(error)
            else:
                raise SystemExit("paid on a full disk")
            assert ledger.steps_paid == 2 and not ledger.pay(1)
            assert open("new/ledger.jsonl", "rb").read() == before
        limit(len(before) + line)
        assert ledger.pay(2)
        # Where the torn line cannot be taken back, reopening does.
        limit(len(before) + line + 5)
        def fail(*arguments):
            raise OSError(5, "Input/output error")
        os.ftruncate = fail
        try:
            ledger.pay(3)
        except Refused:
            raise SystemExit(7)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr
    with _open(tmp_path / "new" / "ledger.jsonl") as ledger:
        assert ledger.steps_paid == 3
        assert ledger.pay(3) and ledger.pay(4)

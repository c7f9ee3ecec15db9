"""What the ledger wrote survives the power; a full or closed disk costs nothing."""

import fcntl
import os
import pathlib
import stat
import subprocess
import sys
import textwrap

import pytest
import tensorflow as tf

from tfdpsq.privacy import checkpoint
from tfdpsq.privacy.proof import append_only
from tfdpsq.privacy.proof.append_only import AppendOnlyFile
from tfdpsq.privacy.proof.ledger import Ledger, read_ledger
from tfdpsq.privacy.proof.reads import PrivateReads
from tfdpsq.validation import InputError

PLAN, DATA = "plan " * 10, "data " * 10  # As in ledger_child.py.
_CHILD = pathlib.Path(__file__).parents[1] / "helpers/ledger_child.py"


def _open(path):
    return Ledger.open(path, PLAN, DATA, 10)


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


def test_a_paid_step_is_on_the_device_before_its_update(tmp_path, monkeypatch):
    device = _Device(monkeypatch)
    path = tmp_path / "private" / "stage" / "ledger.jsonl"
    with _open(path) as ledger:
        for folder in (path.parent, path.parent.parent):
            assert folder.name in device.names[folder.parent]
        for step in range(3):
            copy = device.restore(path, tmp_path / f"copy{step}")
            assert read_ledger(copy).steps_paid == step
            assert ledger.pay(step)
        assert read_ledger(device.restore(path, tmp_path / "copy")).steps_paid == 3


def test_seeds_and_states_are_on_the_device_before_what_they_are_for(
    tmp_path, monkeypatch
):
    """Without them, paid steps cannot be repeated, and the budget is lost."""
    device = _Device(monkeypatch)
    secrets = checkpoint.open_secrets(tmp_path, 0, {})
    folder = tmp_path / checkpoint.STATE
    seeds = folder / checkpoint.SECRETS
    assert device.content(seeds) == seeds.read_bytes()
    for step in range(2):
        checkpoint.save(tmp_path, step, [tf.Variable([1.0, 2.0])], secrets)
        state = folder / f"step-{step:08d}.npz"
        assert device.content(state) == state.read_bytes()


def test_a_replay_relies_on_the_device_alone(tmp_path, monkeypatch):
    """A line whose process was killed before its flush may be in memory only.

    Reopened, it reads as paid, and the step's update follows without a new line. Had
    opening not flushed it, a power failure then would leave an update unpaid.
    """
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


def test_a_failed_flush_stops_the_run_and_counts_as_paid(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    ledger = _open(path)
    with monkeypatch.context() as failing:

        def fail(descriptor):
            raise OSError(5, "Input/output error")

        failing.setattr(os, "fsync", fail)
        with pytest.raises(InputError, match="cannot be written .Input/output error"):
            ledger.pay(0)
    with pytest.raises(InputError, match="is closed. Open it again"):
        ledger.pay(0)
    with _open(path) as ledger:
        assert ledger.steps_paid == 1 and ledger.pay(0) is False


def test_a_recorded_read_is_on_the_device_before_it_happens(tmp_path, monkeypatch):
    device = _Device(monkeypatch)
    reads = PrivateReads(tmp_path / "private_reads.jsonl")
    for count in (1, 2):
        reads.record(f"read {count}", "the terminal")
        assert device.content(reads.path).count(b"\n") == count


def test_of_two_that_make_a_ledger_at_once_one_has_it(tmp_path, monkeypatch):
    """Both found none; the slower must not put its own in place of the other's."""
    path = tmp_path / "ledger.jsonl"
    with _open(path) as ledger, monkeypatch.context() as slower:
        ledger.pay(0)
        slower.setattr(pathlib.Path, "exists", lambda self: False)
        with pytest.raises(InputError, match="another process uses it"):
            _open(path)
        ledger.pay(1)
    assert read_ledger(path).steps_paid == 2
    assert os.listdir(tmp_path) == ["ledger.jsonl"]


def _process(code, folder, privileges=True):
    """Runs code in a folder, with `open_ledger` there, and InputErrors as `Refused`.

    Args:
      code: Python.
      folder: where it runs.
      privileges: whether it keeps root's right to write anywhere.
    """
    prelude = f"""
        import os, resource, sys
        sys.path.insert(0, {str(_CHILD.parent)!r})
        from helpers import ledger_child as child
        from tfdpsq.validation import InputError as Refused
        def open_ledger(path):
            return child.Ledger.open(path, child.PLAN, child.DATA, 10)
        def limit(size):
            "The nearest thing to a full disk that needs no rights."
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        if os.geteuid() == 0 and not {privileges}:
            os.setuid(65534)
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def closed_folder(tmp_path_factory):
    """A folder with a ledger, neither of which may be written by us or by nobody."""
    folder = tmp_path_factory.mktemp("closed")
    # Root passes all permissions, so the test runs as nobody, who must get here.
    ours = [path for path in folder.parents if path.stat().st_uid == os.geteuid()]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in ours}
    _open(folder / "ledger.jsonl").close()
    try:
        if os.geteuid() == 0:
            for path, mode in modes.items():
                if not mode & 0o001:
                    path.chmod(mode | 0o011)
        folder.chmod(0o555)
        (folder / "ledger.jsonl").chmod(0o444)
        yield folder
    finally:
        folder.chmod(0o700)
        for path, mode in modes.items():
            if stat.S_IMODE(path.stat().st_mode) != mode:
                path.chmod(mode)


@pytest.mark.parametrize("name", ["new.jsonl", "ledger.jsonl", "deep/new.jsonl"])
def test_a_closed_directory_or_file_is_named(closed_folder, name):
    done = _process(f"open_ledger({name!r})", closed_folder, privileges=False)
    assert f"InputError: {closed_folder / name}: cannot be written (Perm" in done.stderr
    assert "Choose a directory you may write to" in done.stderr
    assert os.listdir(closed_folder) == ["ledger.jsonl"]


def test_no_ledger_appears_on_a_full_disk(tmp_path):
    code = """
        for size in range(0, 300, 7):
            limit(size)
            try:
                open_ledger("new/ledger.jsonl")
            except Refused as error:
                assert "File too large" in str(error) or "No space" in str(error)
                assert "Free space there" in str(error)
            else:
                raise SystemExit("opened on a full disk")
            assert os.listdir("new") == []
        limit(resource.RLIM_INFINITY)
        open_ledger("new/ledger.jsonl")
    """
    done = _process(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_ledger(tmp_path / "new" / "ledger.jsonl").steps_paid == 0


def test_a_disk_full_at_any_byte_pays_nothing_and_loses_nothing(tmp_path):
    code = """
        ledger = open_ledger("ledger.jsonl")
        ledger.pay(0)
        size = os.path.getsize("ledger.jsonl")
        ledger.pay(1)
        line = os.path.getsize("ledger.jsonl") - size
        before = open("ledger.jsonl", "rb").read()
        for left in range(line):
            limit(len(before) + left)
            try:
                ledger.pay(2)
            except Refused as error:
                assert os.path.abspath("ledger.jsonl") in str(error)
                assert "Free space there" in str(error)
            else:
                raise SystemExit("paid on a full disk")
            assert ledger.steps_paid == 2 and not ledger.pay(1)
            assert open("ledger.jsonl", "rb").read() == before
        limit(len(before) + line)
        assert ledger.pay(2)
    """
    done = _process(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 3


def test_where_the_torn_line_cannot_be_taken_back_reopening_does(tmp_path):
    code = """
        ledger = open_ledger("ledger.jsonl")
        ledger.pay(0)
        limit(os.path.getsize("ledger.jsonl") + 20)
        def fail(*arguments):
            raise OSError(5, "Input/output error")
        os.ftruncate = fail
        try:
            ledger.pay(1)
        except Refused:
            raise SystemExit(7)
    """
    done = _process(code, tmp_path)
    assert done.returncode == 7, done.stderr
    with _open(tmp_path / "ledger.jsonl") as ledger:
        assert ledger.steps_paid == 1
        assert ledger.pay(1) and ledger.pay(2)


@pytest.mark.parametrize("paid", [0, 1])
def test_a_ledger_replaced_before_it_was_locked_is_not_used(
    paid, tmp_path, monkeypatch
):
    """The slower one has opened the file that the faster one puts another in place of.

    It would then lock a file that nobody sees: two runs, each with a ledger.
    """
    path = tmp_path / "ledger.jsonl"
    with _open(path) as ledger:
        for step in range(paid):
            ledger.pay(step)
    flock, late = fcntl.flock, []

    def others_first(descriptor, operation):
        if not late:
            late.append(descriptor)
            if paid:  # a backup is put back, say
                copy = tmp_path / "copy"
                copy.write_bytes(path.read_bytes())
                with _open(copy) as ledger:
                    ledger.pay(paid)
                os.replace(copy, path)
            else:  # nothing was paid, so a run makes its ledger again
                with _open(path) as ledger:
                    ledger.pay(0)
        return flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", others_first)
    with pytest.raises(InputError, match="was replaced while it was opened"):
        _open(path)
    assert late and read_ledger(path).steps_paid == paid + 1


def test_what_a_kill_left_of_making_the_file_is_removed(tmp_path):
    """A killed `audit` left one next to its list of reads for good."""
    path = tmp_path / "ledger.jsonl"
    names = [f".ledger.jsonl.{number:012x}.partial" for number in range(3)]
    abandoned, linked, locked = (tmp_path / name for name in names)
    others = [tmp_path / f".other.{0:012x}.partial", tmp_path / ".ledger.jsonl.partial"]
    for file in (abandoned, *others):
        file.write_bytes(b"")
    AppendOnlyFile.open(path, b"first\n").close()
    assert not abandoned.exists()
    # Killed between the two names of a file.
    os.link(path, linked)
    with locked.open("xb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # of a process that is making it
        AppendOnlyFile.open(path, b"").close()
        assert sorted(tmp_path.iterdir()) == sorted([path, locked, *others])
    assert path.read_bytes() == b"first\n"


def test_a_file_taken_for_abandoned_before_it_was_locked_is_made_again(
    tmp_path, monkeypatch
):
    path, lock, taken = tmp_path / "ledger.jsonl", fcntl.flock, []

    def flock(file, how):
        if not taken:  # the moment between making the file and locking it
            taken.extend(tmp_path.iterdir())
            taken[0].unlink()
        lock(file, how)

    monkeypatch.setattr(append_only.fcntl, "flock", flock)
    AppendOnlyFile.open(path, b"first\n").close()
    assert len(taken) == 1 and list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"first\n"

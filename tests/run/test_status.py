"""What is done, running and left in a workdir, without a lock being touched."""

import fcntl
import json
import subprocess
import sys

import pytest

from tfdpsq.privacy import Ledger
from tfdpsq.run import status
from tfdpsq.run.core import progress, workdir
from tfdpsq.run.passes import pass_progress
from tfdpsq.run.passes.shards import PassSpec, ShardDirectory
from tfdpsq.run.status import DONE, INTERRUPTED, LEFT, RUNNING

PARTIAL = ".{}.0123456789ab.partial"

# Takes a lock, says so, and holds it until it is told to let go.
_HOLDER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold():
    """A function that lets another process hold a lock; returns its number."""
    children = []

    def start(path):
        child = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        children.append(child)
        assert child.stdout.readline() == b"held\n"
        return child.pid

    yield start
    for child in children:
        child.communicate()


def _done(directory):
    directory.mkdir(parents=True)
    (directory / workdir.STAGE_FILE).write_text("{}")


def _logged(private, name, steps, of, seconds=0.5, epsilon=None):
    """A log as training writes it."""
    now = iter(range(10**6))
    with progress.Progress(
        private / "logs" / name, of, epsilon=epsilon, clock=lambda: seconds * next(now)
    ) as one:
        for step in range(1, steps + 1):
            one(step, 2.5)


def _paid(private, name, steps, of):
    run = private / "runs" / name
    run.mkdir(parents=True)
    with Ledger(run / "ledger.jsonl", "plan", "data", of) as ledger:
        for step in range(steps):
            ledger.pay(step)
    (run / "state").mkdir()
    (run / "state" / "secrets.json").write_text("{}")


def _stage(found, name):
    (stage,) = (stage for stage in found["stages"] if stage["name"] == name)
    return stage


_CONFIG = {
    "epsilons": ["inf", 8.0, 0.5],
    "direct_epsilons": [16.0],
    "audit_epsilons": [],
    "pretrain": {"steps": 0},
}


def test_job_in_the_middle_says_what_is_left_and_how_long_it_takes(tmp_path, hold):
    release, private = tmp_path / "release", tmp_path / "private"
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    _done(release / "prepare")
    _done(private / "generator_inf")
    _done(private / "synthetic_inf")
    seconds = {"prepare": 3.0, "generator_inf": 100.0, "synthetic_inf": 40.0}
    (private / "seconds.json").write_text(json.dumps(seconds))
    partial = release / PARTIAL.format("generator_eps8")
    partial.mkdir()
    process = hold(partial)
    _paid(private, "generator_eps8", 30, 120)
    _logged(private, "generator_eps8", 29, 120, 0.5, lambda step: step / 10)
    found = status.status(str(tmp_path))
    assert found["states"] == {DONE: 3, RUNNING: 1, INTERRUPTED: 0, LEFT: 11}
    now = _stage(found, "generator_eps8")
    assert now["state"] == RUNNING and now["processes"] == [process]
    # The ledger knows of 30 steps, the log of 29 at 2 steps a second: 90 / 2.
    assert (now["count"], now["total"], now["epsilon"]) == (30, 120, 2.9)
    assert now["per_second"] == pytest.approx(2.0)
    assert now["remaining"] == pytest.approx(45.0)
    # As its kind took; of the others nothing is known.
    assert _stage(found, "generator_eps0.5")["remaining"] == 100.0
    assert _stage(found, "synthetic_eps8")["remaining"] == 40.0
    assert found["remaining"] == pytest.approx(45 + 100 + 2 * 40)
    assert len(found["unknown"]) == 8 and "evaluation" in found["unknown"]
    assert "step 30 of 120" in status.as_text(found)


def test_killed_stage_is_interrupted_and_a_damaged_ledger_told(tmp_path):
    release, private = tmp_path / "release", tmp_path / "private"
    (release / PARTIAL.format("generator_eps8")).mkdir(parents=True)
    _paid(private, "generator_eps8", 30, 120)
    _paid(private, "lost", 5, 120)
    (private / "runs" / "lost" / "state" / "secrets.json").unlink()
    _paid(private, "torn", 5, 10)
    with open(private / "runs" / "torn" / "ledger.jsonl", "a") as file:
        file.write("{}\n")
    found = status.status(str(tmp_path))
    assert [stage["state"] for stage in found["stages"]] == [INTERRUPTED] * 3
    stage = _stage(found, "generator_eps8")
    assert stage["count"] == 30 and stage["remaining"] is None  # there is no log
    assert "cannot go on" in _stage(found, "lost")["note"]
    assert "ledger.jsonl:7" in _stage(found, "torn")["note"]


def test_pass_that_two_processes_share(tmp_path, hold):
    spec = PassSpec("synthesize", 8, {}, {})
    shards = ShardDirectory(str(tmp_path / ".set.shards"), spec)
    shards.open()
    for index in range(3):
        with shards.writing(index) as out, open(out.path("txt"), "w") as file:
            file.write("text")
        logs = tmp_path / "private" / "logs" / "set"
        pass_progress.finished(logs, index, 8, 100, 20.0)
    (stage,) = status.status(str(tmp_path))["stages"]
    assert (stage["count"], stage["total"]) == (3, 8)
    for index in (3, 4):
        lock = tmp_path / ".set.shards" / f".{spec.file(index, 'lock')}"
        lock.touch()
        hold(lock)
    (stage,) = status.status(str(tmp_path / "set"))["stages"]
    assert stage["state"] == RUNNING and len(stage["processes"]) == 2
    # Five shards, 20 s each, by two.
    assert stage["remaining"] == pytest.approx(5 * 20 / 2)


def test_status_takes_no_lock(tmp_path, hold, monkeypatch):
    """Whoever tried one, if only shared, could make a stage fail that starts then."""
    for name in ("one", "other"):
        (tmp_path / PARTIAL.format(name)).mkdir()
    hold(tmp_path / PARTIAL.format("one"))
    for name in ("flock", "lockf", "fcntl"):
        monkeypatch.delattr(fcntl, name)
    found = status.status(str(tmp_path))
    states = {stage["name"]: stage["state"] for stage in found["stages"]}
    assert states == {"one": RUNNING, "other": INTERRUPTED}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["{here}"], 0, "one"),
        (["{here}", "--json"], 0, '"stages"'),
        (["/nowhere/at/all"], 2, "/nowhere/at/all"),
        (["gs://bucket/work"], 2, "gs://bucket/work"),
        (["one", "two"], 2, "usage:"),
    ],
)
def test_command_prints_the_state_or_what_is_wrong(tmp_path, capsys, words, code, said):
    _done(tmp_path / "one")
    with pytest.raises(SystemExit) as ended:
        status.main(["status", *(word.format(here=tmp_path) for word in words)])
    told = capsys.readouterr()
    assert ended.value.code == code and said in (told.err if code else told.out)
    assert not (told.out if code else told.err)

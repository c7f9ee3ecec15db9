"""What is done, running and left in a workdir, without a lock being touched."""

import contextlib
import fcntl
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tfdpsq import validation
from tfdpsq.data.shards import PassSpec, ShardDirectory
from tfdpsq.privacy import Ledger
from tfdpsq.run import status
from tfdpsq.run.core import locks, point_log, progress, releases, workdir
from tfdpsq.run.passes import pass_progress, passes
from tfdpsq.run.status import (
    DONE,
    INTERRUPTED,
    LEFT,
    RUNNING,
    planned_stages,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
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


def _done(directory, seconds=None):
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
    with Ledger.open(run / "ledger.jsonl", "plan", "data", of) as ledger:
        for step in range(steps):
            ledger.pay(step)
    (run / "state").mkdir()
    (run / "state" / "secrets.json").write_text("{}")


def _stage(found, name):
    (stage,) = (stage for stage in found["stages"] if stage["name"] == name)
    return stage


def _command(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        status.main(["status", *map(str, words)])
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


# -- Workdirs of each kind ---------------------------------------------------------

_CONFIG = {
    "epsilons": ["inf", 8.0, 0.5],
    "direct_epsilons": [16.0],
    "audit_epsilons": [],
    "pretrain": {"steps": 0},
}


def test_a_job_in_the_middle(tmp_path, hold):
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
    assert (
        found["unknown"]
        == [
            "retriever_untrained",
            "retriever_public_only",
            "retriever_original",
            "retriever_synthetic_inf",
            "retriever_synthetic_eps8",
            "retriever_synthetic_eps0_5",
            "retriever_direct_eps16",
        ][:7]
        + ["evaluation"][:1]
    )
    text = status.as_text(found)
    first = text.splitlines()[0]
    assert "3 done, 1 running, 11 left; about 3.8 min more, and 8 of unknown" in first
    rate = "ε of this run so far 2.9; 2 steps/s; 45 s more"
    assert f"step 30 of 120 (25%); {rate}; process {process}" in text
    assert "generator_inf" in text and "100 s" in text


def test_what_was_killed_is_interrupted(tmp_path):
    release, private = tmp_path / "release", tmp_path / "private"
    (release / PARTIAL.format("generator_eps8")).mkdir(parents=True)
    _paid(private, "generator_eps8", 30, 120)
    _paid(private, "lost", 5, 120)
    (private / "runs" / "lost" / "state" / "secrets.json").unlink()
    (tmp_path / ".t5.state").mkdir()
    found = status.status(str(tmp_path))
    assert [stage["state"] for stage in found["stages"]] == [INTERRUPTED] * 3
    stage = _stage(found, "generator_eps8")
    assert stage["count"] == 30 and stage["remaining"] is None  # there is no log
    assert "cannot go on" in _stage(found, "lost")["note"]
    assert _stage(found, "t5")["place"] == ""


def test_a_damaged_ledger_is_told_and_the_rest_as_well(tmp_path):
    private = tmp_path / "private"
    _paid(private, "one", 5, 10)
    _done(tmp_path / "two")
    _paid(private, "three", 1, 10**400)
    _logged(private, "three", 2, 5)
    with open(private / "runs" / "one" / "ledger.jsonl", "a") as file:
        file.write("{}\n")
    found = status.status(str(tmp_path))
    assert "ledger.jsonl:7" in _stage(found, "one")["note"]
    assert "damaged ledger: 1000" in _stage(found, "three")["note"]
    assert _stage(found, "two")["state"] == DONE


# More digits than a float has room for, and fewer than Python refuses to read.
_LONG = "9" * 400
_DAMAGED = (
    "{}",
    "[" * 100_000,
    '{"step": "x", "of": "y"}',
    '{"step": null}',
    '{"step": [3], "of": 5}',
    '{"step": 3, "of": 5, "steps_per_second": NaN}',
    '{"step": 1e400, "of": 3}',
    '{"shard": 1, "seconds": 1, "finished": 1, "process": [1], "time": 9e9}',
    '{"shard": 1, "process": 1, "host": "h", "time": "x"}',
    '{"shard": 1, "process": 1, "host": "h", "time": 9e18, "rows_per_second": "q"}',
    '{"name": 3, "shards": "x"}',
    '{"name": "[", "shards": 3}',
    '{"epsilons": ["x"], "direct_epsilons": [], "audit_epsilons": []}',
    '{"epsilons": [8], "direct_epsilons": [], "audit_epsilons": [], "pretrain": 3}',
    f'{{"epsilons": [{_LONG}], "direct_epsilons": [], "audit_epsilons": []}}',
    f'{{"name": "synthesize", "shards": {_LONG}}}',
    '{"name": "synthesize", "shards": -3}',
    '{"step": 3, "of": 5, "steps_per_second": 1e-320}',
    '{"shard": 1, "seconds": 1e308, "finished": 1, "process": 1, "time": 9e9}',
    "\xff",
)


@pytest.mark.parametrize("line", _DAMAGED, ids=range(len(_DAMAGED)))
def test_a_damaged_file_is_refused_or_passed_over(tmp_path, line):
    files = {
        name: tmp_path / place
        for name, place in {
            "steps": "private/logs/generator_eps8/log.jsonl",
            "shards": "private/logs/synthetic_eps8/log.jsonl",
            "pass": "release/.synthetic_eps8.shards/pass.json",
            "config": workdir.CONFIG_FILE,
        }.items()
    }
    (tmp_path / "release" / PARTIAL.format("generator_eps8")).mkdir(parents=True)
    sound = {
        "shards": {
            "shard": 1,
            "finished": 9,
            "seconds": 2.5,
            "process": 1,
            "time": 9e9,
        },
        "pass": {"name": "synthesize", "shards": 3},
        "config": _CONFIG,
    }
    for damaged in files:
        for name, path in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            text = line if name == damaged else json.dumps(sound.get(name, {}))
            path.write_text(text + "\n", "latin-1")
        with contextlib.suppress(validation.InputError):
            found = status.status(str(tmp_path))
            assert status.as_text(found)
            json.dumps(found, allow_nan=False)
    # A run that resumes cuts the line off.
    with progress.Progress(files["steps"].parent, 2) as one:
        one(1, 2.5)
        one(2, 2.5)
    assert [p["step"] for p in point_log.read_points(files["steps"])] == [1, 2]


@pytest.mark.parametrize("place", ["release", "private", ""])
def test_one_stage_before_it_is_there_and_after(tmp_path, hold, place):
    out = tmp_path / place / "generator"
    with pytest.raises(validation.InputError, match="does not exist, and nothing"):
        status.status(str(out))
    partial = out.parent / PARTIAL.format("generator")
    partial.mkdir(parents=True)
    _paid(tmp_path / "private", "generator", 3, 10)
    _logged(tmp_path / "private", "generator", 3, 10)
    _done(out.parent / "another")
    hold(partial)
    (stage,) = status.status(str(out))["stages"]
    assert stage["state"] == RUNNING and stage["remaining"] == pytest.approx(3.5)
    partial.rmdir()
    _done(out)
    (stage,) = status.status(str(out))["stages"]
    assert stage["state"] == DONE and stage["remaining"] == 0


def test_a_private_directory_elsewhere_can_be_given(tmp_path):
    _done(tmp_path / "work" / "generator")
    _paid(tmp_path / "hidden", "other", 3, 10)
    found = status.status(str(tmp_path / "work"), str(tmp_path / "hidden"))
    assert _stage(found, "other")["count"] == 3


# -- Passes over shards ------------------------------------------------------------


def test_a_pass_that_two_processes_share(tmp_path, hold):
    spec = PassSpec("synthesize", 8, {}, {})
    shards = ShardDirectory(str(tmp_path / ".set.shards"), spec)
    shards.open()

    def make(index, out):
        with open(out.path("txt"), "w") as file:
            file.write("text")
        out.count = 100

    maker = passes.Maker(shards, passes.Work("synthesize", 8, lambda: make))
    maker.make_all(range(3))
    logs = tmp_path / "private" / "logs" / "set"
    # It took no time: as if it had been 20 s a shard.
    (logs / "log.jsonl").unlink()
    for index in range(3):
        pass_progress.finished(logs, index, 8, 100, 20.0)
    found = status.status(str(tmp_path))
    (stage,) = found["stages"]
    assert (stage["state"], stage["count"], stage["total"]) == (INTERRUPTED, 3, 8)
    assert stage["remaining"] == pytest.approx(5 * 20)
    for index in (3, 4):
        lock = tmp_path / ".set.shards" / f".{spec.file(index, 'lock')}"
        lock.touch()
        hold(lock)
    clock = iter([0.0, 5.0, 15.0, 15.0])
    with pass_progress.PassProgress(
        logs, "queries", (3, 8), 100, 300, lambda: next(clock)
    ) as one:
        one.add(25, 100)
        one.add(25, 100)
    (stage,) = status.status(str(tmp_path / "set"))["stages"]
    assert stage["state"] == RUNNING and len(stage["processes"]) == 2
    # Five shards, 20 s each, by two.
    assert stage["remaining"] == pytest.approx(5 * 20 / 2)
    assert stage["per_second"] == pytest.approx(2.5) and stage["rate_of"] == "queries"
    # A pass that begins anew knows nothing of the one before it.
    later = time.time() + 100
    os.utime(tmp_path / ".set.shards" / "pass.json", (later, later))
    (stage,) = status.status(str(tmp_path))["stages"]
    assert stage["count"] == 3 and stage["remaining"] is None


# -- Locks -------------------------------------------------------------------------


def test_the_holder_of_a_lock_is_found_without_asking_for_it(tmp_path, hold):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(), other.mkdir()
    assert locks.holders([one, other, tmp_path / "nowhere"]) == []
    process = hold(one)
    assert locks.holders([one, other]) == [process]
    descriptor = os.open(other, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # not what a stage takes
    assert locks.holders([other]) == []
    os.close(descriptor)


def test_status_takes_no_lock(tmp_path, hold, monkeypatch):
    """Whoever tried one, if only shared, could make a stage fail that starts then."""
    for name in ("one", "other"):
        (tmp_path / PARTIAL.format(name)).mkdir()
    hold(tmp_path / PARTIAL.format("one"))
    ShardDirectory(str(tmp_path / ".set.shards"), PassSpec("p", 2, {}, {})).open()
    (tmp_path / ".set.shards" / ".p-00000-of-00002.lock").touch()

    def refuse(*arguments):
        raise AssertionError(f"a lock was tried: {arguments}")

    for name in ("flock", "lockf", "fcntl"):
        monkeypatch.setattr(fcntl, name, refuse)
    found = status.status(str(tmp_path))
    states = {stage["name"]: stage["state"] for stage in found["stages"]}
    assert states == {"one": RUNNING, "other": INTERRUPTED, "set": INTERRUPTED}


def test_a_stage_is_running_while_it_is_made(tmp_path):
    seen = []
    workdir.run_stage(
        releases.Output(tmp_path / "one", releases.PUBLIC, "nothing"),
        {},
        {},
        lambda out: seen.extend(status.status(str(tmp_path))["stages"]),
    )
    (stage,) = seen
    assert stage["state"] == RUNNING and stage["processes"] == [os.getpid()]
    assert status.status(str(tmp_path))["states"][DONE] == 1


# -- The job that the other tests share --------------------------------------------


def test_what_is_planned_is_what_a_job_makes(job):
    config = json.loads((job.directory / "config.json").read_text())
    planned = dict(planned_stages(config))
    made = {
        path.parent.name: path.parent.parent.name
        for path in job.directory.glob("*/*/stage.json")
    }
    assert planned == made
    assert list(planned_stages({"config": "of a stage"})) == []
    found = status.status(str(job.directory))
    assert found["states"] == {DONE: len(made), RUNNING: 0, INTERRUPTED: 0, LEFT: 0}
    assert found["remaining"] == 0 and found["unknown"] == []


def test_logs_of_a_job_agree_with_its_ledgers_and_certificates(job):
    private = job.directory / "private"
    for ledger in sorted((private / "runs").glob("*/ledger.jsonl")):
        name = ledger.parent.name
        if name == "histogram_eps0.4":
            continue  # one step without a log
        points = [
            json.loads(line) for line in open(private / "logs" / name / "log.jsonl")
        ]
        paid = len(ledger.read_text().splitlines()) - 1
        assert [point["step"] for point in points] == list(range(1, paid + 1)), name
        (path,) = job.directory.glob(f"*/{name}/certificate.json")
        certificate = json.loads(path.read_text())
        own = certificate["guarantee"]["epsilon"]
        if "continuation" in certificate:  # of a histogram
            own = certificate["continuation"]["epsilon_of_this_run"]
        found = points[-1]["epsilon"]
        assert own == found == "inf" or found == pytest.approx(own, rel=1e-6)
    for name in ("synthetic_inf", "synthetic_eps8"):
        log = (private / "logs" / name / "log.jsonl").read_text().splitlines()
        assert json.loads(log[-1])["rows_per_second"] > 0
        done, total = (json.loads(log[-2])[name] for name in ("queries", "total"))
        assert total == 84 and abs(done - total) < 9  # by chance, with a histogram


# -- The command -------------------------------------------------------------------


def test_the_command_prints_text_or_json_and_exits_with_0(tmp_path, capsys):
    _done(tmp_path / "one")
    code, out, _ = _command(capsys, tmp_path)
    assert code == 0 and out == f"{tmp_path}: 1 done\n  done         one\n"
    code, out, _ = _command(capsys, tmp_path, "--json")
    assert code == 0 and json.loads(out) == status.status(str(tmp_path))


@pytest.mark.parametrize(
    "words, message",
    [
        (["/nowhere/at/all"], "/nowhere/at/all does not exist"),
        (["{here}"], "holds no stage, finished or begun"),
        ([""], "the workdir is given as an empty value"),
        (["{here}", "--private="], "--private is given as an empty value"),
        (["gs://bucket/work"], "gs://bucket/work is not on a disk of this machine"),
        ([], "usage:"),
        (["one", "two"], "usage:"),
        (["{here}", "--colour"], "colour"),
    ],
)
def test_bad_commands_exit_with_2(tmp_path, capsys, words, message):
    words = [word.format(here=tmp_path) for word in words]
    code, out, errors = _command(capsys, *words)
    assert code == 2 and out == "" and message in errors

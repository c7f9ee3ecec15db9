"""The main job at a tiny size, as its users run it: killed on the way, restarted."""

import dataclasses
import fcntl
import json
import os
import pathlib
import pickle
import sys
import time

from helpers import forking, tiny

_TESTS = pathlib.Path(__file__).parents[1]
_ROOT = _TESTS.parent

_CONFIG = """
import sys

sys.path.insert(0, {here!r})

from helpers import recorder
from helpers import tiny

def get_config():
    recorder.record({recorded!r})
    return tiny.tiny_config({data!r}, {embedded!r})
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """A finished job.

    Attributes:
      directory: its workdir; "pairs" lies beside it.
      queries: all private queries.
      before: its stages that were finished when it was killed; see `stages`.
      table: what the restarted command printed.
      recorded: directory of what `recorder` kept.
    """

    directory: pathlib.Path
    queries: list
    before: dict
    table: str
    recorded: pathlib.Path


def shared(folder):
    """Returns the job that all processes of a test run share; the first one makes it.

    `folder` is the same for all of them. Tests leave the job as it is.
    """
    made = folder / "job.pickle"
    with open(folder / "job.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            assert not (folder / "job").exists(), "it failed in the test that made it"
            (folder / "job").mkdir()
            made.write_bytes(pickle.dumps(make(folder / "job")))
        return pickle.loads(made.read_bytes())


def make(base):
    """Runs the job in `base`, with a kill in the middle."""
    queries = tiny.write_pairs(base / "pairs")
    tiny.write_embedded(base / "embedded")
    config = base / "config.py"
    config.write_text(
        _CONFIG.format(
            here=str(_TESTS),
            recorded=str(base / "recorded"),
            data=str(base / "pairs"),
            embedded=str(base / "embedded"),
        )
    )
    before = _killed_during(config, base / "work", "generator_eps8")
    done = forking.run(**_arguments(config, base / "work"))
    assert done.returncode == 0, done.stderr[-3000:]
    return Job(base / "work", queries, before, done.stdout, base / "recorded")


def stages(directory):
    """Which run each finished stage is of; file times tell nothing."""
    return {
        path: json.loads(path.read_text())["run"]
        for path in directory.rglob("stage.json")
        if "partial" not in path.parts
    }


def _arguments(config, directory):
    return {
        "words": [
            sys.executable,
            "-m",
            "tfdpsq.run",
            "pipeline",
            f"--config={config}",
            f"--workdir={directory}",
        ],
        "cwd": _ROOT,
        "env": {**os.environ, "PYTHONPATH": str(_ROOT)},
    }


def _killed_during(config, directory, stage):
    """Starts the job and kills it (-9) in the middle of a stage."""
    log = directory.parent / "killed.log"
    with open(log, "w") as stderr:
        job = forking.Command(**_arguments(config, directory), stderr=stderr)
        deadline = time.monotonic() + 300
        while f"{stage}: started" not in log.read_text():
            assert job.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        job.kill()
        job.wait()
    return stages(directory)

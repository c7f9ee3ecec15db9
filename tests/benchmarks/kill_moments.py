"""Commands of `kills.py` in child processes, and the moments of their kills."""

import contextlib
import math
import os
import pathlib
import random
import runpy
import signal
import subprocess
import sys
import time
import traceback

from kill_stages import EVENTS

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Interval between two looks at the directory, and longest delay after an event (s).
_POLL, _DELAY = 0.002, 0.05
_LONGEST = 900
# Whether commands are forked; set once, by `main`.
FORKED = False


class Failed(Exception):
    """A command behaved as no command may."""


class Forked:
    """A command in a process forked from this one, with the used part of Popen.

    This process has imported what commands import, and computed nothing with it.
    """

    def __init__(self, command, log):
        """Starts `python -m MODULE FLAGS…` in a session of its own."""
        sys.stdout.flush()
        self.pid = os.fork()
        self.returncode = None
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            os.chdir(ROOT)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(log.fileno(), 2)
            sys.argv = command[1:]
            random.seed()
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code or 0
            if not isinstance(code, int):
                code = 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def poll(self):
        """Returns its exit status, `None` while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=math.inf):
        """Returns its exit status; raises TimeoutExpired, as a Popen does."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a command", timeout)
            time.sleep(_POLL)
        return self.returncode


def start(command, place):
    with open(place.parent / f"{place.name}.log", "ab") as log:
        if FORKED:
            return Forked(command[1:], log)
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"},
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )


def end_group(child):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def run_to_the_end(command, place, status=0):
    child = start(command, place)
    try:
        code = child.wait(_LONGEST)
    except subprocess.TimeoutExpired:
        code = "no end"
    finally:
        end_group(child)
    if code != status:
        said = (place.parent / f"{place.name}.log").read_text(errors="replace")
        raise Failed(f"exit status {code}: {said[-1500:]}")


def wait(child, seen):
    """Returns whether something was seen before the process ended."""
    deadline = time.monotonic() + _LONGEST
    while time.monotonic() < deadline:
        if seen():
            return True
        if child.poll() is not None:
            return False
        time.sleep(_POLL)
    return False


def choose_moment(stage, seconds, generator):
    """Draws a share of the reference's time, or a delay after an event, equally often.

    The first two thirds of a tiny stage are imports and reading, so the distribution of
    shares prefers the rest.
    """
    if generator.random() < 0.5:
        share = float(generator.beta(2, 1))
        return {"at": "time", "seconds": round(share * seconds, 3)}
    event = str(generator.choice(stage.events))
    count = int(generator.integers(1, 8)) if event in ("ledger", "state") else 1
    delay = float(generator.uniform(0, _DELAY)) * float(generator.random() < 0.7)
    return {"at": event, "count": count, "delay": round(delay, 4)}


def kill_at(command, place, stage, moment):
    """Starts a command and kills it at the moment; returns the files at that time."""
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    started = time.monotonic()
    child = start(command, place)
    if moment["at"] == "time":
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(moment["seconds"])
    else:
        wait(child, lambda: _happened(place, stage, moment, before))
        time.sleep(moment["delay"])
    ended = child.poll()
    end_group(child)
    if ended not in (None, 0):
        said = (place.parent / f"{place.name}.log").read_text(errors="replace")
        raise Failed(f"exit status {ended} before it was killed: {said[-1500:]}")
    return {
        "seconds": round(time.monotonic() - started, 2),
        "ended_before": ended is not None,
        "steps_paid": [_steps(path) for path in sorted(place.rglob("ledger.jsonl"))],
        "states": len(list(place.rglob("step-*.npz"))),
        "unfinished": len(list(place.rglob("*.partial"))),
        "finished": (place / stage.out).is_dir() and stage.module != "pipeline",
        "new_files": sum(path not in before for path in place.rglob("*")),
    }


def _happened(place, stage, moment, before):
    if moment["at"] == "finished":
        return (place / stage.out).is_dir()
    try:
        found = [
            path for pattern in EVENTS[moment["at"]] for path in place.glob(pattern)
        ]
        if moment["at"] == "ledger":
            return any(_steps(path) >= moment["count"] for path in found)
        if moment["at"] == "state":
            return len({path for path in found if path not in before}) >= min(
                2, moment["count"]
            )
        return any(path not in before for path in found)
    except OSError:  # renamed between two looks
        return True


def _steps(ledger):
    return max(0, ledger.read_bytes().count(b"\n") - 1)

"""What is said of a pass whose processes run on other machines."""

import json
import os
import pathlib
import time

import pytest

from tfdpsq.data.shards import PassSpec, ShardDirectory
from tfdpsq.run import status
from tfdpsq.run.passes import pass_progress
from tfdpsq.run.status import INTERRUPTED, RUNNING


def test_processes_of_other_machines_are_known_by_the_log(tmp_path, monkeypatch):
    """Of a pass on a disk that they share; not for ever after they fell silent."""
    spec = PassSpec("encode", 8, {}, {})
    shards = ShardDirectory(str(tmp_path / ".out.shards"), spec)
    shards.open()
    logs = tmp_path / "private" / "logs" / "out"

    def at(host, process, shard, **times):
        with monkeypatch.context() as there:
            there.setattr(pass_progress.socket, "gethostname", lambda: host)
            there.setattr(pass_progress.os, "getpid", lambda: process)
            if times:
                pass_progress.finished(logs, shard, 8, 100, times["seconds"])
            else:
                clock = iter([0.0, 5.0, 15.0, 15.0])
                with pass_progress.PassProgress(
                    logs, "documents", (shard, 8), 100, 0, lambda: next(clock)
                ) as one:
                    one.add(25)
                    one.add(25)

    def stage():
        (found,) = status.status(str(tmp_path))["stages"]
        return found

    with shards.writing(0) as out:
        pathlib.Path(out.path("npy")).write_text("any")
    at("one", 7, 0, seconds=20.0)
    at("one", 7, 1)
    at("other", 7, 2)  # a process of the same number
    found = stage()
    assert found["state"] == RUNNING and found["processes"] == []
    assert found["note"] == "2 processes on one, other, by the log"
    # Seven shards of 20 s by two; each does 25 in the 10 s after its first documents.
    assert found["remaining"] == pytest.approx(7 * 20 / 2)
    assert found["per_second"] == pytest.approx(2 * 2.5)
    with shards.lock(3, wait=False):
        found = stage()
        assert found["processes"] == [os.getpid()]
        assert found["remaining"] == pytest.approx(7 * 20 / 3)
        text = status.as_text(status.status(str(tmp_path)))
        assert f"process {os.getpid()}; 2 processes on one, other, by the log" in text
    # Silent for three shards' time and more.
    lines = (logs / "log.jsonl").read_text().splitlines()
    later = [{**json.loads(line), "time": int(time.time()) - 70} for line in lines]
    os.utime(tmp_path / ".out.shards" / "pass.json", (1, 1))
    (logs / "log.jsonl").write_text("".join(json.dumps(p) + "\n" for p in later))
    found = stage()
    assert (found["state"], found["count"]) == (INTERRUPTED, 1) and not found["note"]

"""Steps of a workdir that are done, running, interrupted and left."""

import fcntl
import os

import pytest

from tfdpsq.data import io
from tfdpsq.privacy import Ledger
from tfdpsq.run import jobs
from tfdpsq.run.common.progress import Progress
from tfdpsq.run.frame import records, runner
from tfdpsq.run.frame.places import PRIVATE, Place
from tfdpsq.run.stages import status
from tfdpsq.validation import InputError


@pytest.fixture
def work(tmp_path):
    """A job of four steps: one done, one that is killed, one that runs, one left."""
    from helpers import squares

    names = ("a", "b", "c", "d")
    steps = [
        {"name": n, "stage": "squares", "place": f"release/{n}", "guarantee": "public"}
        for n in names
    ]
    made = squares.STAGE, squares.Squares.Settings()
    runner.execute(*made, Place.of(tmp_path / "release" / "a"))
    io.write_json(tmp_path / PRIVATE / jobs.LIST_FILE, {"steps": steps})
    killed = Place.of(tmp_path / "release" / "b")
    killed.run.mkdir(parents=True)
    with Ledger(killed.run / "ledger.jsonl", "plan", "data", 120) as ledger:
        for step in range(30):
            ledger.pay(step)
    with Progress(killed.logs, 120, epsilon=lambda step: step / 10) as progress:
        progress(29, 2.5)
    return tmp_path


def test_job_in_the_middle_says_what_is_done_and_left(work):
    running = Place.of(work / "release" / "c")
    with open(running.lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(str(os.getpid()))
        file.flush()
        code, text = status.main([str(work)])
    assert code == 0
    lines = [line.split() for line in text.splitlines()[1:]]
    assert [line[:2] for line in lines] == [
        ["done", "a"],
        ["interrupted", "b"],
        ["running", "c"],
        ["left", "d"],
    ]
    assert "sum 1240" in text
    assert "30 steps paid" in text and "29 of 120" in text
    assert f"process {os.getpid()}" in text
    assert "1 done, 1 interrupted, 1 running, 1 left" in text


def test_output_and_directory_of_outputs_have_a_state(work):
    (one,) = status.survey(work / "release" / "a")
    assert (one.name, one.state, one.stage) == ("a", "done", "squares")
    assert one.seconds == records.seconds(Place.of(work / "release" / "a"))
    (work / PRIVATE / jobs.LIST_FILE).unlink()
    found = {(one.name, one.state) for one in status.survey(work)}
    assert found == {("a", "done"), ("b", "interrupted")}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/nowhere/at/all"], "/nowhere/at/all"),
        (["gs://bucket/work"], "gs://bucket/work"),
        (["one", "two"], "give one directory"),
        ([], "give one directory"),
    ],
)
def test_wrong_directory_is_named(words, said):
    with pytest.raises(InputError, match=said):
        status.main(words)

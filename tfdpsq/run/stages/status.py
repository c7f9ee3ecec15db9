"""Show the state of a workdir: outputs that are done, being made, interrupted or left.

    tfdpsq status WORKDIR

WORKDIR is that of a job, a directory of outputs, or one output. The command only reads.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib

from tfdpsq.data import io
from tfdpsq.run.common import progress
from tfdpsq.run.frame import places, records, runs
from tfdpsq.run.frame.places import Place
from tfdpsq.run.jobs import LIST_FILE
from tfdpsq.validation import InputError


def main(words: list[str]) -> tuple[int, str]:
    """Returns the exit status and the text to print."""
    if len(words) != 1 or not pathlib.Path(words[0]).is_dir():
        raise InputError(f"{' '.join(words)!r}: give one directory, a workdir.")
    states = survey(pathlib.Path(words[0]).absolute())
    counts = collections.Counter(one.state for one in states)
    head = ", ".join(f"{number} {state}" for state, number in counts.items())
    width = max((len(one.name) for one in states), default=0)
    lines = [
        f"  {one.state:11}  {one.name:{width}}  {one.seconds:8.1f} s  {one.detail}"
        for one in states
    ]
    return 0, "\n".join([f"{words[0]}: {head or 'nothing yet'}", *lines]) + "\n"


@dataclasses.dataclass(frozen=True)
class State:
    """The state of one step."""

    name: str  # of its output
    stage: str  # "" if unknown
    state: str  # "done", "running", "interrupted" or "left"
    detail: str  # process, progress or result, in words
    seconds: float  # so far, all tries together


def survey(workdir: pathlib.Path) -> list[State]:
    """Returns the state of every step of a job, or of every output in a workdir.

    `workdir` may also be an output's own directory.
    """
    private = workdir / places.PRIVATE
    if (private / LIST_FILE).is_file():
        listed = io.read_json(private / LIST_FILE, "Start the job again")["steps"]
        return [_state(workdir / one["place"], one["stage"]) for one in listed]
    if records.read_stage(workdir) is not None:
        return [_state(workdir)]
    folders = (workdir, workdir / places.RELEASE, private)
    found = [file.parent for each in folders for file in each.glob("*/stage.json")]
    begun = {path.name for n in ("partial", "runs") for path in private.glob(f"{n}/*")}
    begun -= {path.name for path in found}
    return [_state(path) for path in (*found, *(private / n for n in sorted(begun)))]


def _state(path: pathlib.Path, stage: str = "") -> State:
    place = Place.of(path)
    record, took = records.read_stage(place.path), records.seconds(place)
    if record is not None:
        line = record.get("line", "")
        return State(place.name, record["stage"], "done", line, took)
    process, paid = places.holder(place), runs.steps_paid(place)
    shards = len(list(place.partial.glob("shards/*/[0-9]*.json")))
    detail = [f"process {process}"] if process else []
    detail += [f"{paid} steps paid"] if paid else []
    detail += [f"{shards} shards"] if shards else []
    points = progress.read_points(place.logs / progress.LOG_FILE)
    detail += ["step {step} of {of}".format(**p) for p in points[-1:] if "step" in p]
    begun = process or paid or place.partial.exists() or place.record.exists()
    state = "running" if process else "interrupted" if begun else "left"
    return State(place.name, stage, state, ", ".join(detail), took)

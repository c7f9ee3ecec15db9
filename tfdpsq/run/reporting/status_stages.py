"""State of the stages in a workdir, read from disk without touching anything.

| state       | what is there                                                         |
|-------------|-----------------------------------------------------------------------|
| done        | `NAME/` with its `stage.json`                                         |
| running     | `.NAME.*.partial`, or a shard in `.NAME.shards/`, locked by a process |
| interrupted | the same without a lock, or a run's ledger or state without an output |
| left        | nothing, but the job's config asks for it                             |

Locks are those of this machine: a stage that runs on another one looks interrupted.
A pass over shards also counts as running if a process of another machine wrote to its
log on the shared disk in the last minute, or in the time of three shards.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tfdpsq import validation
from tfdpsq.data.shards import PASS_FILE
from tfdpsq.privacy import checkpoint, ledger
from tfdpsq.run.core import locks, point_log, progress, workdir
from tfdpsq.run.core.stages import SECONDS_FILE

DONE, RUNNING, INTERRUPTED, LEFT = STATES = ("done", "running", "interrupted", "left")

_PARTIAL = re.compile(r"\.(.+)\.[0-9a-f]{12}\.partial")
# State of an unfinished pretraining, and of a pass that is not merged.
_LEFT = re.compile(r"\.(.+)\.(?:state|shards)")
# Folders of a workdir that contain stages.
_FOLDERS = ("", "release", "private", "points", "private/choices/*/points")
# Fields of a shard's log line other than the count.
_NO_COUNT = (
    "shard",
    "of",
    "total",
    "seconds",
    "process",
    "host",
    "time",
    "finished",
)
# Seconds without a log line after which a remote process counts as gone.
_SILENT = 60.0
_EPSILON = re.compile(r"_(inf|eps[^_]+)$")
# These train for the same number of steps of the same batch size.
_ALIKE = ("retriever_public_only", "retriever_original", "retriever_synthetic")


@dataclasses.dataclass
class Stage:
    """One stage.

    Attributes:
      name: of its output directory.
      place: the folder of its output, within the workdir.
      state: one of `STATES`.
      processes: ids of the processes that make it.
      unit: what `count` counts: "step", "queries", "documents", "shards".
      count: units done; for a private run, steps paid for.
      total: units in all.
      per_second: rate, from the last point of the log.
      rate_of: unit of the rate: "steps", "queries", "rows", …
      epsilon: spent so far, or "inf".
      loss: from the last point of the log.
      written: time of that point, in seconds since 1970.
      seconds: duration of a finished stage, all its processes included.
      remaining: seconds that it still needs; `None` if unknown.
      note: anything else.
    """

    name: str
    place: str = ""
    state: str = LEFT
    processes: list[int] = dataclasses.field(default_factory=list)
    unit: str | None = None
    count: int | None = None
    total: int | None = None
    per_second: float | None = None
    rate_of: str | None = None
    epsilon: float | str | None = None
    loss: float | str | None = None
    written: float | None = None
    seconds: float | None = None
    remaining: float | None = None
    note: str = ""


def survey(directory: pathlib.Path, private: pathlib.Path | None) -> list[Stage]:
    """Returns all stages of a workdir, or the one whose output a directory is.

    Args:
      directory: a workdir, or the output of one stage, which may not exist yet.
      private: the private directory, if not the default one.

    Raises:
      InputError: neither a workdir nor a stage.
      DataError: a file that cannot be read.
    """
    found: dict[str, Stage] = {}
    own = private or directory / "private"
    if directory.is_dir() and not (directory / workdir.STAGE_FILE).is_file():
        found = _stages(directory, None)
        _add_runs(found, directory, own, None)
        _add_planned(found, directory)
    if not found:
        folder, name = directory.absolute().parent, directory.absolute().name
        found = _stages(folder, name) if folder.is_dir() else {}
        own = private or _private_of(folder)
        _add_runs(found, folder, own, name)
    if not found and not directory.exists():
        raise validation.InputError(
            f"{directory} does not exist, and nothing is being made there. Give the "
            "--workdir of a job or of a stage."
        )
    if not found:
        raise validation.InputError(
            f"{directory} holds no stage, finished or begun. Give the --workdir of a "
            "job or of a stage."
        )
    _add_times(list(found.values()), own)
    return list(found.values())


def _private_of(folder: pathlib.Path) -> pathlib.Path:
    """Returns the private directory of a stage in a folder."""
    if folder.name == "private":
        return folder
    above = folder.parent if folder.name == "release" else folder
    return above / "private"


def _stages(directory: pathlib.Path, only: str | None) -> dict[str, Stage]:
    """Finds finished and unfinished outputs, by name."""
    found: dict[str, Stage] = {}
    folders = [""] if only else _FOLDERS
    for folder in (
        path for pattern in folders for path in _folders(directory, pattern)
    ):
        place = folder.relative_to(directory).as_posix()
        for path in sorted(folder.iterdir()):
            name, state, processes = _what(path)
            if name is None or only not in (None, name):
                continue
            stage = found.setdefault(name, Stage(name))
            stage.place = "" if place == "." else place
            # Killed processes may have left several; one may be in use.
            if STATES.index(state) < STATES.index(stage.state):
                stage.state = state
            stage.processes = sorted({*stage.processes, *processes})
    return found


def _folders(directory: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    if not pattern:
        return [directory]
    return sorted(path for path in directory.glob(pattern) if path.is_dir())


def _what(path: pathlib.Path) -> tuple[str | None, str, list[int]]:
    """Returns the stage that a path belongs to, its state, and its processes."""
    if (path / workdir.STAGE_FILE).is_file() and not path.name.startswith("."):
        return path.name, DONE, []
    partial = _PARTIAL.fullmatch(path.name)
    left = _LEFT.fullmatch(path.name)
    if not path.is_dir():
        return None, LEFT, []
    if partial:
        name, processes = partial[1], locks.holders([path])
    elif left:
        name, processes = left[1], locks.holders(path.glob(".*.lock"))
    else:
        return None, LEFT, []
    return name, RUNNING if processes else INTERRUPTED, processes


def _add_runs(
    found: dict[str, Stage],
    folder: pathlib.Path,
    private: pathlib.Path,
    only: str | None,
) -> None:
    """Adds what ledgers and logs record, and stages that have only these."""
    runs = private / workdir.RUNS
    for path in sorted(runs.iterdir()) if runs.is_dir() else ():
        if (path / ledger.FILE_NAME).is_file() and only in (None, path.name):
            stage = found.setdefault(path.name, Stage(path.name))
            if stage.state == LEFT:
                stage.state = INTERRUPTED
            if stage.state != DONE:
                _add_ledger(stage, path)
    for stage in found.values():
        points = point_log.read_points(
            private / progress.LOGS / stage.name / point_log.FILE_NAME
        )
        if points and "shard" not in points[-1]:
            _add_point(stage, points[-1])
        shards = folder / stage.place / f".{stage.name}.shards"
        if stage.state != DONE and (shards / PASS_FILE).is_file():
            _add_shards(stage, shards, points)


def _add_ledger(stage: Stage, run: pathlib.Path) -> None:
    try:
        paid = ledger.read_ledger(run / ledger.FILE_NAME)
    except validation.DataError as error:
        stage.note = str(error)
        return
    stage.unit, stage.count, stage.total = "step", paid.steps_paid, paid.steps_allowed
    if stage.state == INTERRUPTED and paid.steps_paid and not checkpoint.is_open(run):
        stage.note = "it cannot go on: its budget is spent and its seeds are gone"


def _add_point(stage: Stage, point: Mapping[str, Any]) -> None:
    unit = next(iter(point))  # points are ordered by their first field
    stage.unit = unit
    if stage.count is None:  # else the ledger knows better
        stage.count, stage.total = point[unit], point.get("of")
    per_second = point.get(f"{'steps' if unit == 'step' else unit}_per_second")
    if isinstance(per_second, (int, float)):
        stage.per_second = per_second
        stage.rate_of = "steps" if unit == "step" else unit
    stage.epsilon, stage.loss = point.get("epsilon"), point.get("loss")
    stage.written = point.get("time")


def _add_shards(
    stage: Stage, shards: pathlib.Path, points: list[dict[str, Any]]
) -> None:
    """Adds a pass's progress from its marks, and its rate from its log."""
    spec = workdir.read_json(shards / PASS_FILE)
    named = re.compile(rf"{spec['name']}-(\d+)-of-\d+\.json")
    marks = filter(None, (named.fullmatch(path.name) for path in shards.iterdir()))
    done = {int(mark[1]) for mark in marks}
    stage.unit, stage.count, stage.total = "shards", len(done), spec["shards"]
    begun = (shards / PASS_FILE).stat().st_mtime - 1  # before it, another pass's
    points = [point for point in points if point.get("time", 0) >= begun]
    took = [point["seconds"] for point in points if "finished" in point]
    last = {point["shard"]: point for point in points if point["shard"] not in done}
    shares = {at: _share_done(point) for at, point in last.items()}
    if not took:
        took = [last[at]["seconds"] / share for at, share in shares.items() if share]
    rates = {(point.get("host"), point["process"]): point for point in points}
    here = socket.gethostname()
    busy = [rates[here, p] for p in stage.processes if (here, p) in rates]
    others = _heard_of(rates, here, 3 * sum(took) / len(took) if took else 0.0)
    if others:
        stage.state = RUNNING
        hosts = sorted({str(point["host"]) for point in others})
        noun = "process" if len(others) == 1 else "processes"
        stage.note = f"{len(others)} {noun} on {', '.join(hosts)}, by the log"
    at_work = max(len(stage.processes) + len(others), 1)
    if took:
        left = stage.total - stage.count - sum(shares.values())
        stage.remaining = max(left, 0.0) * sum(took) / len(took) / at_work
    for point in [*busy, *others] or points[-1:]:
        for name, rate in point.items():
            if name.endswith("_per_second") and not name.startswith("tokens"):
                stage.per_second = (stage.per_second or 0.0) + rate
                stage.rate_of = name[: -len("_per_second")]
        stage.written = max(stage.written or 0, point["time"])


def _heard_of(
    last: Mapping[tuple[Any, int], dict[str, Any]], here: str, silent: float
) -> list[dict[str, Any]]:
    """Returns the last lines of other machines' processes that are still at work.

    A process counts as gone after `silent` seconds without a line, or a minute if that
    is longer. `last` is keyed by (machine, process); `here` is this machine.
    """
    since = time.time() - max(silent, _SILENT)
    return [
        point
        for (host, _), point in last.items()
        if host not in (None, here) and point["time"] >= since
    ]


def _share_done(point: Mapping[str, Any]) -> float:
    """Returns the share of a shard that is done by its last line."""
    counted = [v for k, v in point.items() if k not in _NO_COUNT and "_per_" not in k]
    total = point.get("total")
    return min(counted[0] / total, 1.0) if total and counted else 0.0


def _add_planned(found: dict[str, Stage], directory: pathlib.Path) -> None:
    """Adds the stages of the job's config, in the order in which they run."""
    path = directory / workdir.CONFIG_FILE
    planned = dict(planned_stages(workdir.read_json(path))) if path.is_file() else {}
    rest = {name: stage for name, stage in found.items() if name not in planned}
    ordered = {
        name: found.get(name) or Stage(name, place) for name, place in planned.items()
    }
    found.clear()
    found.update({**ordered, **rest})


def planned_stages(config: Any) -> Iterator[tuple[str, str]]:
    """Yields (name, place) of every stage of a pipeline's config, in order."""
    lists = ("epsilons", "direct_epsilons", "audit_epsilons")
    if not isinstance(config, Mapping) or not set(lists) <= set(config):
        return
    epsilons, direct, audited = ([float(e) for e in config[name]] for name in lists)
    release, private = "release", "private"

    def named(what: str, of: list[float], free: bool = True):
        for epsilon in of:
            finite = epsilon != float("inf")
            label = f"eps{epsilon:g}" if finite else "inf"
            yield f"{what}_{label}", release if finite and free else private

    yield "prepare", release
    if config["pretrain"]["steps"]:
        yield "public_model", release
    yield from named("generator", epsilons)
    yield from named("synthetic", epsilons)
    yield "retriever_untrained", release
    yield "retriever_public_only", release
    yield "retriever_original", private
    yield from named("retriever_synthetic", epsilons)
    yield from named("retriever_direct", direct)
    yield "evaluation", private
    if audited:
        yield "canaries", private
    for epsilon in audited:
        for what in ("audited", "audited_synthetic", "audit"):
            yield from named(what, [epsilon], free=False)


def _add_times(stages: list[Stage], private: pathlib.Path) -> None:
    """Adds the duration of finished stages and the time that others still need."""
    path = private / SECONDS_FILE
    took = workdir.read_json(path) if path.is_file() else {}
    alike: dict[str, list[float]] = {}
    for stage in stages:
        if stage.state == DONE and stage.name in took:
            stage.seconds = took[stage.name]
            alike.setdefault(_kind(stage.name), []).append(took[stage.name])
    for stage in stages:
        known = alike.get(_kind(stage.name))
        if stage.state == DONE:
            stage.remaining = 0.0
        elif stage.remaining is not None:
            continue
        elif stage.unit == "step" and stage.total and stage.per_second:
            stage.remaining = (
                max(stage.total - (stage.count or 0), 0) / stage.per_second
            )
        elif known:
            stage.remaining = sum(known) / len(known)


def _kind(name: str) -> str:
    """Returns a name that stages of similar duration share."""
    kind = _EPSILON.sub("", name)
    return "retriever" if kind in _ALIKE else kind

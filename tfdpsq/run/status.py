"""Show the state of a workdir: stages done, running and left, and the time they need.

    python -m tfdpsq.run.status WORKDIR
    python -m tfdpsq.run.status WORKDIR --json

WORKDIR is that of a job, or the output of one stage, which may not exist yet. The
command only reads and takes no lock: run it at any time. The remaining time of a
running stage follows from the last line of its log (strict mode keeps no log: times are
private), that of a stage that has not begun from finished stages of its kind. A stage
on another machine looks interrupted, unless it is a pass over shards, whose log all
machines write (it counts as running for a minute after a line, or the time of three
shards).

| state       | what is there                                                         |
|-------------|-----------------------------------------------------------------------|
| done        | `NAME/` with its `stage.json`                                         |
| running     | `.NAME.*.partial`, or a shard in `.NAME.shards/`, locked by a process |
| interrupted | the same without a lock, or a run's ledger or state without an output |
| left        | nothing, but the job's config asks for it                             |

    --private=DIR    the private directory, if not the default one

Exit status: 0 for every state, 2 if there is no such directory, it is not a workdir, or
the command is wrong.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import math
import os
import pathlib
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from absl import app, flags

from tfdpsq import validation
from tfdpsq.privacy import checkpoint
from tfdpsq.privacy.proof import ledger
from tfdpsq.run.core import (
    command,
    layout,
    locks,
    point_log,
    progress,
    releases,
    workdir,
)
from tfdpsq.run.core.stages import LONGEST, SECONDS_FILE, measured
from tfdpsq.run.passes.shards import PASS_FILE

_USAGE = "usage: python -m tfdpsq.run.status WORKDIR [--json] [--private=DIR]\n"
DONE, RUNNING, INTERRUPTED, LEFT = STATES = ("done", "running", "interrupted", "left")

# Folders of a workdir that contain stages, besides itself.
_FOLDERS = ("release", "private")
# Seconds without a log line after which a remote process counts as gone, or the time
# of three shards.
_SILENT = 60.0
# Shards of a pass, and steps of a run: more are of a damaged file.
_MOST = 10**9
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
    seconds: float | None = None
    remaining: float | None = None
    note: str = ""


def status(path: str, private: str | None = None) -> dict[str, Any]:
    """Returns the state of a workdir or a stage.

    Returns:
      "stages", a list of dicts (see `Stage`); "states", the number in
      each; "remaining", the sum of the known times in seconds; "unknown", the names of
      stages without a known time.

    Raises:
      InputError: an empty path, no such directory, or neither a workdir nor a stage.
    """
    if "://" in path:
        raise validation.InputError(
            f"{path} is not on a disk of this machine, so its locks cannot be read. "
            "Give a local directory."
        )
    stages = survey(
        pathlib.Path(path), None if private is None else pathlib.Path(private)
    )
    return {
        "workdir": path,
        "states": {
            state: sum(stage.state == state for stage in stages) for state in STATES
        },
        "remaining": sum(stage.remaining or 0.0 for stage in stages),
        "unknown": [stage.name for stage in stages if stage.remaining is None],
        "stages": [dataclasses.asdict(stage) for stage in stages],
    }


def as_text(found: dict[str, Any]) -> str:
    """Formats the state as text."""
    stages = [Stage(**values) for values in found["stages"]]
    counts = [f"{n} {state}" for state, n in found["states"].items() if n]
    head = f"{found['workdir']}: {', '.join(counts)}"
    if found["states"][DONE] < len(stages):
        unknown = len(found["unknown"])
        known = len(stages) - found["states"][DONE] - unknown
        if known:
            head += f"; about {progress.duration(found['remaining'])} more"
        if unknown:
            head += f"{', and' if known else ';'} {unknown} of unknown length"
    width = max(len(stage.name) for stage in stages)
    lines = [
        f"  {stage.state:11}  {stage.name:{width}}  {_details(stage)}".rstrip()
        for stage in stages
    ]
    return "\n".join([head, *lines]) + "\n"


def _details(stage: Stage) -> str:
    if stage.state == DONE:
        return "" if stage.seconds is None else progress.duration(stage.seconds)
    parts = []
    if stage.count is not None and stage.state in (RUNNING, INTERRUPTED):
        parts.append(_counted(stage.count, stage.total, stage.unit))
    if stage.epsilon is not None:
        value = stage.epsilon
        shown = f"{value:.3g}" if isinstance(value, (int, float)) else "∞"
        parts.append(f"ε of this run so far {shown}")
    if stage.per_second is not None:
        parts.append(f"{stage.per_second:.3g} {stage.rate_of}/s")
    if stage.remaining is not None:
        parts.append(f"{progress.duration(stage.remaining)} more")
    if stage.processes:
        noun = "process" if len(stage.processes) == 1 else "processes"
        parts.append(f"{noun} {', '.join(map(str, stage.processes))}")
    return "; ".join([*parts, *([stage.note] if stage.note else [])])


def _counted(count: int, total: int | None, unit: str | None) -> str:
    if not total:
        return f"{count:,} {unit}"
    share = f"{count:,} of {total:,} ({count / total:.0%})"
    return f"step {share}" if unit == "step" else f"{share} {unit}"


def survey(directory: pathlib.Path, private: pathlib.Path | None) -> list[Stage]:
    """Returns all stages of a workdir, or the one whose output a directory is.

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
    if not found:
        problem = "does not exist, and nothing is being made there"
        if directory.exists():
            problem = "holds no stage, finished or begun"
        raise validation.InputError(
            f"{directory} {problem}. Give the --workdir of a job or of a stage."
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
    inside = [p for name in _FOLDERS for p in sorted(directory.glob(name))]
    for folder in [directory, *([] if only else filter(pathlib.Path.is_dir, inside))]:
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


def _what(path: pathlib.Path) -> tuple[str | None, str, list[int]]:
    """Returns the stage that a path belongs to, its state, and its processes."""
    if (path / workdir.STAGE_FILE).is_file() and not path.name.startswith("."):
        return path.name, DONE, []
    found = releases.UNFINISHED.fullmatch(path.name)
    if found is None or not path.is_dir():
        return None, LEFT, []
    # The state of a pretraining and the shards of a pass have locks inside.
    inside = found[2] in ("state", "shards")
    processes = locks.holders(path.glob(".*.lock") if inside else [path])
    return found[1], RUNNING if processes else INTERRUPTED, processes


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
            private / layout.LOGS / stage.name / point_log.FILE_NAME
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
    if paid.steps_allowed > _MOST:
        stage.note = f"damaged ledger: {validation.shown(paid.steps_allowed)} steps"
        return
    stage.unit, stage.count, stage.total = "step", paid.steps_paid, paid.steps_allowed
    if stage.state == INTERRUPTED and paid.steps_paid and not checkpoint.is_open(run):
        stage.note = "it cannot go on: its budget is spent and its seeds are gone"


def _add_point(stage: Stage, point: Mapping[str, Any]) -> None:
    unit = next(iter(point))  # points are ordered by their first field
    if not isinstance(point[unit], int):
        return
    stage.unit = unit
    if stage.count is None:  # else the ledger knows better
        total = point.get("of")
        stage.count = point[unit]
        stage.total = total if isinstance(total, int) else None
    per_second = point.get(f"{'steps' if unit == 'step' else unit}_per_second")
    if isinstance(per_second, (int, float)):
        stage.per_second = per_second
        stage.rate_of = "steps" if unit == "step" else unit
    stage.epsilon = point.get("epsilon")


def _add_shards(
    stage: Stage, shards: pathlib.Path, points: list[dict[str, Any]]
) -> None:
    """Adds a pass's progress from its marks, and its rate from its log."""
    spec = workdir.read_json(shards / PASS_FILE, name=str, shards=int)
    if not 1 <= spec["shards"] <= _MOST:
        raise validation.DataError(
            shards / PASS_FILE,
            f"it is damaged: shards is {validation.shown(spec['shards'])}",
            "Restore it, or make it again.",
        )
    marks = shards.glob(f"{glob.escape(os.path.basename(spec['name']))}-*-of-*.json")
    stage.unit, stage.count, stage.total = "shards", len(list(marks)), spec["shards"]
    begun = (shards / PASS_FILE).stat().st_mtime - 1  # before it, another pass's
    points = [point for point in points if _is_of_shard(point, begun)]
    took = [point["seconds"] for point in points if "finished" in point]
    each = sum(took) / len(took) if took else 0.0
    last = {(point.get("host"), point["process"]): point for point in points}
    here = socket.gethostname()
    busy = [last[here, p] for p in stage.processes if (here, p) in last]
    since = time.time() - max(3 * each, _SILENT)
    others = [
        point
        for (host, _), point in last.items()
        if host not in (None, here) and point["time"] >= since
    ]
    if others:
        stage.state = RUNNING
        hosts = sorted({str(point["host"]) for point in others})
        noun = "process" if len(others) == 1 else "processes"
        stage.note = f"{len(others)} {noun} on {', '.join(hosts)}, by the log"
    if took:
        at_work = max(len(stage.processes) + len(others), 1)
        stage.remaining = (stage.total - stage.count) * each / at_work
    for point in [*busy, *others] or points[-1:]:
        for name, rate in point.items():
            known = name.endswith("_per_second") and isinstance(rate, (int, float))
            if known and not name.startswith("tokens"):
                stage.per_second = (stage.per_second or 0.0) + rate
                stage.rate_of = name[: -len("_per_second")]


def _is_of_shard(point: Mapping[str, Any], begun: float) -> bool:
    """Returns whether a line is one that `pass_progress` wrote after that time."""
    needed = ("process", "time", *(["seconds"] if "finished" in point else []))
    if not all(isinstance(point.get(name), (int, float)) for name in needed):
        return False
    return point["time"] >= begun


def _add_planned(found: dict[str, Stage], directory: pathlib.Path) -> None:
    """Adds the stages of the job's config, in the order in which they run."""
    path = directory / workdir.CONFIG_FILE
    try:
        config = workdir.read_json(path) if path.is_file() else {}
        planned = dict(planned_stages(config))
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        if isinstance(error, validation.InputError):
            raise
        raise validation.DataError(
            path, f"it is damaged ({error})", "Restore it, or move it away."
        ) from error
    if layout.IMPORTED in found:
        planned = {layout.IMPORTED: "private", **planned}
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

    def named(what: str, of: list[float], free: bool = True) -> Any:
        row = what.startswith("retriever_") or what == "adapter"
        name = layout.epsilon_row if row else layout.epsilon_name
        for epsilon in of:
            place = release if math.isfinite(epsilon) and free else private
            yield f"{what}_{name(epsilon)}", place

    yield "prepare", release
    if config["pretrain"]["steps"]:
        yield "public_model", release
    adapters = [float(e) for e in config.get("adapter_epsilons", ())]
    if adapters and config["adapter"]["unit"] != "pair":
        yield "mined", private
    yield from named("adapter", adapters)
    counts = float(config.get("histogram_epsilon", 0))
    yield from named("histogram", [counts] if counts else [])
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
    took = measured(private / SECONDS_FILE)
    of_kind: dict[str, list[float]] = {}
    for stage in stages:
        if stage.state == DONE and stage.name in took:
            stage.seconds = took[stage.name]
            of_kind.setdefault(_kind(stage.name), []).append(took[stage.name])
    for stage in stages:
        known = of_kind.get(_kind(stage.name))
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
    for stage in stages:  # as if unknown where a damaged log gives no usable number
        if not 0 <= (stage.remaining or 0.0) < LONGEST:
            stage.remaining = None
        if not math.isfinite(stage.per_second or 0.0):
            stage.per_second = None


def _kind(name: str) -> str:
    """Returns a name that stages of similar duration share."""
    kind = _EPSILON.sub("", name)
    return "retriever" if kind in _ALIKE else kind


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits; `argv` is the command line, program first."""
    own = flags.FlagValues()
    flags.DEFINE_bool("json", False, "Print it as JSON.", flag_values=own)
    flags.DEFINE_string(
        "private", None, "The stages' private directory.", flag_values=own
    )

    def run(words: Sequence[str]) -> tuple[int, str]:
        if len(words) != 1:
            raise app.UsageError("")
        found = status(words[0], own.private)
        return 0, json.dumps(found, indent=1) + "\n" if own.json else as_text(found)

    command.script(run, own, argv, __doc__, _USAGE)


if __name__ == "__main__":
    main()

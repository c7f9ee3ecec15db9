"""State of a workdir: stages done, running and left, and the time they need.

    python -m tfdpsq.run.status WORKDIR
    python -m tfdpsq.run.status WORKDIR --json

WORKDIR is that of a job, or the output of one stage, which may not exist yet. The
command only reads and takes no lock: run it at any time. The remaining time of a
running stage follows from the last line of its log (strict mode keeps no log: times are
private), that of a stage that has not begun from finished stages of its kind. A stage
on another machine looks interrupted, unless it is a pass over shards, whose log all
machines write.

    --private=DIR    the private directory, if not the default one

Exit status: 0 for every state, 2 if there is no such directory, it is not a workdir, or
the command is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NoReturn

from tfdpsq.run.core import progress

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags  # noqa: E402

from tfdpsq import validation  # noqa: E402
from tfdpsq.run.core import command  # noqa: E402
from tfdpsq.run.reporting import status_stages
from tfdpsq.run.reporting.status_stages import DONE, INTERRUPTED, RUNNING, Stage  # noqa: E402

_USAGE = "usage: python -m tfdpsq.run.status WORKDIR [--json] [--private=DIR]\n"


def status(path: str, private: str | None = None) -> dict[str, Any]:
    """Returns the state of a workdir or a stage.

    Args:
      path: the directory.
      private: the private directory, if not the default one.

    Returns:
      "stages", a list of dicts (see `status_stages.Stage`); "states", the number in
      each; "remaining", the sum of the known times in seconds; "unknown", the names of
      stages without a known time.

    Raises:
      InputError: no such directory, or neither a workdir nor a stage.
    """
    if "://" in path:
        raise validation.InputError(
            f"{path} is not on a disk of this machine, and has no locks that could be "
            "looked at. Ask for the state of a local directory."
        )
    stages = status_stages.survey(
        pathlib.Path(path), None if private is None else pathlib.Path(private)
    )
    return {
        "workdir": path,
        "states": {
            state: sum(stage.state == state for stage in stages)
            for state in status_stages.STATES
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
        parts.append(f"ε so far {shown}")
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


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits.

    Args:
      argv: the command line, program first; `None` takes the process's.
    """
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

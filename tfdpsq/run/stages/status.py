"""Show the state of a workdir: outputs that are done, being made, interrupted or left.

    tfdpsq status WORKDIR [--json]

WORKDIR is that of a job, a directory of outputs, or one output. The command only reads.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib

from tfdpsq.run.frame import pipeline
from tfdpsq.validation import InputError


def main(words: list[str]) -> tuple[int, str]:
    """Returns the exit status and the text to print."""
    paths = [word for word in words if word != "--json"]
    if len(paths) != 1 or paths[0].startswith("-"):
        raise InputError("give one directory: tfdpsq status WORKDIR [--json]")
    if not pathlib.Path(paths[0]).is_dir():
        raise InputError(f"{paths[0]} is not a directory. Give a workdir.")
    states = pipeline.survey(pathlib.Path(paths[0]).absolute())
    if "--json" in words:
        return 0, json.dumps([dataclasses.asdict(one) for one in states], indent=2)
    counts = collections.Counter(one.state for one in states)
    head = ", ".join(f"{number} {state}" for state, number in counts.items())
    width = max((len(one.name) for one in states), default=0)
    lines = [
        f"  {one.state:11}  {one.name:{width}}  {one.seconds:8.1f} s  {one.detail}"
        for one in states
    ]
    return 0, "\n".join([f"{paths[0]}: {head or 'nothing yet'}", *lines]) + "\n"

"""Show the state of a workdir: outputs that are done, being made, interrupted or left.

    tfdpsq status WORKDIR

WORKDIR is that of a job, a directory of outputs, or one output. The command only reads.
"""

from __future__ import annotations

import collections
import pathlib

from tfdpsq.run.frame import pipeline
from tfdpsq.validation import InputError


def main(words: list[str]) -> tuple[int, str]:
    """Returns the exit status and the text to print."""
    if len(words) != 1 or not pathlib.Path(words[0]).is_dir():
        raise InputError(f"{' '.join(words)!r}: give one directory, a workdir.")
    states = pipeline.survey(pathlib.Path(words[0]).absolute())
    counts = collections.Counter(one.state for one in states)
    head = ", ".join(f"{number} {state}" for state, number in counts.items())
    width = max((len(one.name) for one in states), default=0)
    lines = [
        f"  {one.state:11}  {one.name:{width}}  {one.seconds:8.1f} s  {one.detail}"
        for one in states
    ]
    return 0, "\n".join([f"{words[0]}: {head or 'nothing yet'}", *lines]) + "\n"

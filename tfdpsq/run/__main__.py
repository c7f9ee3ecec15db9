"""The console command `tfdpsq STAGE ...`, equal to `python -m tfdpsq.run.STAGE ...`."""

from __future__ import annotations

import ast
import difflib
import pathlib
import runpy
import sys
from typing import NoReturn

from tfdpsq.run.core import streams

_USAGE = """usage: tfdpsq STAGE [--config=FILE] --workdir=DIR [--config.KEY=VALUE ...]

`tfdpsq STAGE --help` shows a stage's flags and settings. Stages:

"""


def stages() -> dict[str, str]:
    """Returns the name and one line of every command: its docstring's first line.

    Parses the files instead of importing them: TensorFlow takes seconds to load.
    """
    found = {}
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        if not path.stem.startswith("_"):
            docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            line = docstring.partition("\n")[0]
            found[path.stem] = line.rstrip(".")
    return found


def main() -> NoReturn | None:
    """Runs the stage that the first argument names, with the other arguments.

    Exits with 2 and the nearest name if there is no such stage.
    """
    streams.prepare()
    known = stages()
    words = sys.argv[1:]
    if not words or words[0] in ("--help", "-h", "help"):
        width = max(map(len, known))
        rows = "".join(f"  {name:{width}}  {line}\n" for name, line in known.items())
        if words:
            sys.exit(0 if streams.say(_USAGE + rows) else 2)
        sys.stderr.write(_USAGE + rows)
        sys.exit(2)
    stage = words[0]
    if stage not in known:
        near = difflib.get_close_matches(stage[:80], known, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        sys.stderr.write(
            f"error: there is no stage {stage[:80]!r}.{hint} `tfdpsq --help` lists "
            "the stages.\n"
        )
        sys.exit(2)
    sys.argv = [f"tfdpsq {stage}", *words[1:]]
    runpy.run_module(f"tfdpsq.run.{stage}", run_name="__main__", alter_sys=True)
    return None


if __name__ == "__main__":
    main()

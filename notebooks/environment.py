"""Makes the environment that the notebooks run stages in, and runs commands there.

The kernel of a notebook may be any Python from 3.9 to 3.13, with any TensorFlow or
none: stages run in an environment of Python 3.11, which `uv` makes, and the kernel
reads their results with `tfdpsq.results`. Needs the standard library alone.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

_PYTHON = "3.11"
# Written last: an environment without it is made again.
_READY = "tfdpsq-ready"


def make(checkout: str | os.PathLike) -> str:
    """Makes an environment of Python 3.11 with tfdpsq, unless it is there.

    Args:
      checkout: directory of the project, from which it is installed.

    Returns:
      Path of its Python. With TFDPSQ_PYTHON set, that Python, and nothing is made.

    Raises:
      RuntimeError: it cannot be made, such as without a network; the message says what
        to do.
    """
    given = os.environ.get("TFDPSQ_PYTHON")
    if given:
        return given
    checkout = pathlib.Path(checkout).resolve()
    digest = hashlib.sha256(str(checkout).encode())
    for path in [
        checkout / "constraints.txt",
        *sorted(checkout.glob("tfdpsq/**/*.py")),
    ]:
        digest.update(path.read_bytes())
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    folder = cache / "tfdpsq" / "environment"
    python, ready = folder / "bin" / "python", folder / _READY
    if ready.is_file() and ready.read_text() == digest.hexdigest():
        return str(python)
    uv = shutil.which("uv")
    if uv is None:
        _run("uv cannot be installed", sys.executable, *"-m pip install -q uv".split())
        uv = shutil.which("uv") or os.path.join(os.path.dirname(sys.executable), "uv")
    said = f"no environment of Python {_PYTHON} can be made in {folder}"
    if not python.is_file():
        _run(said, uv, "venv", "--quiet", "--python", _PYTHON, str(folder))
    pins = ["-c", str(checkout / "constraints.txt")]
    install = [uv, "pip", "install", "--quiet", "--python", str(python), *pins]
    _run(f"{said} from {checkout}", *install, f"{checkout}[stack]")
    ready.write_text(digest.hexdigest())
    return str(python)


def run(python: str, *words: str) -> None:
    """Runs a command there; its output and progress appear as they come.

    Args:
      python: what `make` returned.
      *words: the command, such as "-m", "tfdpsq.run", "verify", "certificate.json".

    Raises:
      RuntimeError: it failed; its own message stands above.
    """
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([python, *words], check=False, env={**os.environ, **quiet})
    if done.returncode:
        raise RuntimeError(
            f"`{' '.join(words)}` ended with exit status {done.returncode}: see its "
            "message above. After 75, run the cell again to go on."
        )


def knobs(show: Callable[..., Any], **choices: Sequence[Any]) -> bool:
    """Shows a list to pick from for each argument of `show`, and what that returns.

    Args:
      show: called again with what was picked, such as `Job.look`.
      **choices: argument -> values, the first of which is shown first; a value may be a
        pair of a label and what is passed.

    Returns:
      Whether widgets are shown: not where ipywidgets is not installed, as it need not
      be outside Colab.
    """
    try:
        import ipywidgets
    except ImportError:
        return False
    lists = {
        name: ipywidgets.Dropdown(options=list(values), description=name)
        for name, values in choices.items()
    }
    ipywidgets.interact(show, **lists)
    return True


def _run(said: str, *command: str) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        problem = done.stderr.strip().splitlines()[-1:] if done.returncode else None
    except OSError as error:
        problem = [str(error)]
    if problem is not None:
        raise RuntimeError(
            f"{said}: {' '.join(problem) or 'no reason was given'}. It needs a network "
            "once, for the Python package index. Without one, set TFDPSQ_PYTHON to the "
            f"Python {_PYTHON} of an environment that has tfdpsq."
        )

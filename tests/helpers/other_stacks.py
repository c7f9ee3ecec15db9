"""Checks `tfdpsq.layers` and `tfdpsq.privacy` in an environment of another stack.

`make` installs the extra `privacy` from this checkout in an environment of its own, and
`check` runs `stack_checks.py` there. Takes minutes, and a package index.
"""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]


def find(name):
    """Returns a Python of this name that runs, on PATH or kept by pyenv, or `None`."""
    kept = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    version = name.replace("python", "")
    on_path = shutil.which(name)
    found = [on_path] if on_path else []
    found += sorted(map(str, kept.glob(f"versions/{version}*/bin/python")))
    for python in found:
        ran = subprocess.run([python, "-c", ""], check=False, capture_output=True)
        if ran.returncode == 0:
            return python
    return None


def make(python, tensorflow, environment):
    """Makes an environment with the extra `privacy`, and returns its Python.

    Raises:
      subprocess.CalledProcessError: pip or venv failed.
    """
    found = pathlib.Path(environment) / "bin" / "python"
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    keras = f"tf_keras=={tensorflow.rpartition('.')[0]}.*"
    wanted = [f"tensorflow=={tensorflow}", keras]
    with tempfile.TemporaryDirectory() as folder:  # pip builds where the sources are
        for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        ignored = shutil.ignore_patterns("__pycache__", "presets")
        shutil.copytree(ROOT / "tfdpsq", f"{folder}/tfdpsq", ignore=ignored)
        pip = [str(found), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *wanted, f"{folder}[privacy]"], check=True)
    return str(found)


def check(python, keras3=False, **environment):
    """Runs the checks, and returns what they print.

    Raises:
      AssertionError: a check failed; its message is the end of what it wrote.
    """
    done = subprocess.run(
        [python, str(ROOT / "tests" / "helpers" / "stack_checks.py")],
        env={
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_USE_LEGACY_KERAS": "0" if keras3 else "",
            **environment,
        },
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])

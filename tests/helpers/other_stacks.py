"""Checks `tfdpsq.layers` and `tfdpsq.privacy` in an environment of another stack.

    python tests/other_stacks.py --python python3.12 --tensorflow 2.21.0

makes an environment, installs the extra `privacy` from this checkout, runs
`stack_checks.py` there, and prints its line of JSON. Without arguments it runs the
checks in its own environment; `--keras3` checks the layers on Keras 3, and
installs the extra `layers` alone. Takes minutes, and a package index.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
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


def make(python, tensorflow, environment, keras3=False):
    """Makes an environment, and returns its Python.

    Raises:
      subprocess.CalledProcessError: pip or venv failed.
    """
    found = pathlib.Path(environment) / "bin" / "python"
    if not found.exists():
        subprocess.run([python, "-m", "venv", str(environment)], check=True)
    pip = [str(found), "-m", "pip", "install", "--quiet"]
    wanted = [f"tensorflow=={tensorflow}"]
    if not keras3:
        wanted.append(f"tf_keras=={tensorflow.rpartition('.')[0]}.*")
    with tempfile.TemporaryDirectory() as folder:  # pip builds where the sources are
        for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        ignored = shutil.ignore_patterns("__pycache__", "presets")
        shutil.copytree(ROOT / "tfdpsq", f"{folder}/tfdpsq", ignore=ignored)
        extra = "layers" if keras3 else "privacy"
        # The sources as they are now, whatever was installed under the same version.
        subprocess.run([str(found), *"-m pip uninstall -qy tfdpsq".split()], check=True)
        subprocess.run([*pip, *wanted, f"{folder}[{extra}]"], check=True)
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


def main():
    """Makes an environment if one is asked for, and prints what the checks found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="such as python3.12")
    parser.add_argument("--tensorflow", help="such as 2.21.0")
    parser.add_argument("--environment", help="where to make and to keep it")
    parser.add_argument("--keras3", action="store_true")
    given = parser.parse_args()
    if given.python is None:
        print(json.dumps(check(sys.executable, given.keras3, PYTHONPATH=str(ROOT))))
        return
    if given.tensorflow is None:
        parser.error("--python needs --tensorflow, such as 2.21.0")
    with tempfile.TemporaryDirectory() as folder:
        environment = given.environment or f"{folder}/environment"
        found = find(given.python) or given.python
        python = make(found, given.tensorflow, environment, given.keras3)
        print(json.dumps(check(python, given.keras3)))


if __name__ == "__main__":
    main()

"""Makes each mistake of `mistakes.py` in a copy of the code: its test file must fail.

    pytest -m slow tests/privacy/test_mistakes.py -n 2               # all; hours
    pytest -m slow tests/privacy/test_mistakes.py -k every_replica   # one

Tests are named after the first words of the sentences. `-rP` shows what the tests of a
mistake that was caught said.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from privacy.mistakes import MISTAKES

ROOT = pathlib.Path(__file__).parents[2]
# A test file takes a minute or two, or several where the tiny job is built for it.
_SECONDS = 900


def _each(values, named):
    """Parameters of a test, each in a group of its own: any worker may take it."""
    groups = [(value, named(value)) for value in values]
    return [
        pytest.param(value, marks=pytest.mark.xdist_group(group), id=group)
        for value, group in groups
    ]


def _first_words(mistake):
    return "_".join(re.findall("[a-z0-9]+", mistake.fault.lower())[:8])


def _run_in_copy(directory, test, changed=None):
    """Runs a test file's quick tests in a copy, where one file is changed.

    Args:
      directory: an empty one, for the copy.
      test: the file, below tests/.
      changed: pair of a file below tfdpsq/ and its new text; none without it.

    Returns:
      pytest's exit status: 0, all passed; 1, a test failed; others, it did not run.
    """
    copy, temp = directory / "copy", directory / "temp"
    for folder in ("tfdpsq", "tests", "configs"):
        ignored = shutil.ignore_patterns("__pycache__", "benchmarks")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    shutil.copy(ROOT / "setup.cfg", copy)
    if changed:
        (copy / "tfdpsq" / changed[0]).write_text(changed[1], "utf-8")
    # Nothing of the run that this test is in, such as the place of its tiny job.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env["PYTHONPATH"] = f"{copy}{os.pathsep}{copy / 'tests'}"
    # No test fails because the machine is busy.
    options = ("-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=0")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--basetemp", temp, f"tests/{test}"],
        cwd=copy,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    print(done.stdout[-4000:])
    shutil.rmtree(copy)
    return done.returncode


def test_each_mistake_applies():
    """If one does not, the code has changed: restate the change against it."""
    assert len({*map(_first_words, MISTAKES)}) == len(MISTAKES)
    for fault, source, test, old, new in MISTAKES:
        text = (ROOT / "tfdpsq" / source).read_text("utf-8")
        assert text.count(old) == 1, (fault, source, old)
        compile(text.replace(old, new), source, "exec")
        assert (ROOT / "tests" / test).is_file(), (fault, test)


@pytest.mark.slow
@pytest.mark.timeout(_SECONDS + 60)
@pytest.mark.parametrize("test", _each(sorted({m.test for m in MISTAKES}), str))
def test_unchanged_copy_passes(test, tmp_path):
    assert _run_in_copy(tmp_path, test) == 0


@pytest.mark.slow
@pytest.mark.timeout(_SECONDS + 60)
@pytest.mark.parametrize("mistake", _each(MISTAKES, _first_words))
def test_mistake_is_caught(mistake, tmp_path):
    text = (ROOT / "tfdpsq" / mistake.source).read_text("utf-8")
    changed = mistake.source, text.replace(mistake.old, mistake.new)
    status = _run_in_copy(tmp_path, mistake.test, changed)
    assert status == 1

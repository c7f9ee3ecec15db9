"""The console command: lists stages, runs one, and ends as its caller expects."""

import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf
from helpers import forking

from tfdpsq.run import command

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _run(*words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return forking.run([sys.executable, *words], cwd=ROOT, env=environment)


def _tfdpsq(*words):
    return _run("-m", "tfdpsq.run", *words)


def test_help_lists_every_command():
    shown = _tfdpsq("--help")
    assert shown.returncode == 0
    files = {path.stem for path in (ROOT / "tfdpsq/run/stages").glob("[a-z]*.py")}
    assert files == set(command.names())
    assert files <= {line.split()[0] for line in shown.stdout.splitlines() if line}


@pytest.mark.parametrize("of_tensorflow", [False, True])
def test_memory_that_runs_out_is_one_line_which_quotes_nothing(capsys, of_tensorflow):
    with pytest.raises(SystemExit) as ended, command.reported():
        if of_tensorflow:
            raise tf.errors.ResourceExhaustedError(None, None, "of a private row")
        raise MemoryError("of a private row")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and "private" not in said
    assert "batch_size" in said


def test_crashing_stage_leaves_no_memory_on_disk(tmp_path):
    """A core dump would hold private queries and seeds."""
    script = tmp_path / "crashes.py"
    script.write_text(
        "import atexit, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))\n"
        "atexit.register(lambda: print(resource.getrlimit(resource.RLIMIT_CORE)[0]))\n"
        "from tfdpsq.run import command\n"
        "sys.argv = ['tfdpsq', 'prepare', '--workdir=']\n"
        "command.main()\n"
    )
    shown = _run(str(script))
    assert shown.returncode == 2, shown.stderr
    assert shown.stdout.splitlines()[-1] == "0"


def test_output_that_nobody_can_read_is_no_traceback():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "tfdpsq.run", "--help"]
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, cwd=ROOT)
    assert ended.returncode == 2
    assert b"Traceback" not in ended.stderr and b"Exception" not in ended.stderr

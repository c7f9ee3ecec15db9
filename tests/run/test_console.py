"""The console command: lists stages, runs one, and names the nearest for a typo."""

import functools
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import pytest
import tensorflow as tf
from absl import flags
from helpers import forking
from ml_collections import config_flags

from tfdpsq.run import finetune
from tfdpsq.run.__main__ import stages
from tfdpsq.run.core import command
from tfdpsq.run.devices import preemption

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _run(*words):
    return forking.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def _tfdpsq(*words):
    return _run("-m", "tfdpsq.run", *words)


def test_help_lists_every_command_with_one_line():
    shown = _tfdpsq("--help")

    assert shown.returncode == 0
    lines = {
        line.split()[0]: line for line in shown.stdout.splitlines() if "  " in line
    }
    files = {path.stem for path in (ROOT / "tfdpsq" / "run").glob("[a-z]*.py")}
    assert files == set(stages()) and files <= set(lines)
    assert all(len(lines[name].split()) > 3 for name in files)


def test_the_help_of_a_stage_lists_its_flags_and_every_setting_with_its_default(
    monkeypatch,
):
    shown = _tfdpsq("finetune", "--help")

    assert shown.returncode == 0
    assert "--workdir" in shown.stdout and "--budget" in shown.stdout
    assert finetune.__doc__.strip() in shown.stdout
    prefix = "  --config."
    lines = [line for line in shown.stdout.splitlines() if line.startswith(prefix)]
    given = [shlex.split(line.partition("  (")[0].strip())[0] for line in lines]
    # As words of a command line they give the default config again.
    monkeypatch.setattr(sys, "argv", ["finetune", *given])
    config = flags.FlagValues()
    config_flags.DEFINE_config_dict(
        "config", finetune.default_config(), flag_values=config
    )
    config(sys.argv)
    assert config.config.to_dict() == finetune.default_config().to_dict()
    assert {word.partition("=")[0] for word in given} >= {
        f"--config.{name}" for name in ("epsilon", "lora.rank", "accountant")
    }
    assert "(pld, rdp)" in shown.stdout


def test_every_line_of_the_help_is_a_verb_phrase():
    for name, line in stages().items():
        verb = line.split()[0].replace("-", "")
        # Imperative: "Train a ..."; not "Trains", not a noun phrase such as "The job".
        assert verb.isalpha() and verb.istitle() and not verb.endswith("s"), name
        assert verb not in ("A", "An", "The", "Of", "How", "What", "Stage"), name
        assert "\n" not in line and len(line) <= 85, name


def test_a_stage_runs_with_its_own_flags(tmp_path):
    missing = tmp_path / "certificate.json"
    shown = _tfdpsq("verify", str(missing))

    assert shown.returncode == 2
    assert shown.stderr.splitlines()[-1].startswith("error: ")
    assert str(missing) in shown.stderr


@pytest.mark.parametrize("stage", ["finetune", "budget", "verify", "forget", "status"])
def test_ctrl_c_while_a_command_is_imported_is_75(stage, tmp_path):
    """It was a traceback and status -2 in the seconds that TensorFlow takes."""
    (tmp_path / "absl.py").write_text(  # what every command imports early
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
        "except BaseException:\n    pass\n"
    )
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    for words in (("-m", f"tfdpsq.run.{stage}"), ("-m", "tfdpsq.run", stage)):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            # Whatever runs the tests in the background ignores it.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        assert done.returncode == 75, done.stderr
        assert done.stderr.split("\n", 1)[1] == (
            "the command was asked to end. Start the same command again to go on.\n"
        )


def test_ctrl_c_is_75_in_a_script_and_a_program_keeps_its_own_handler(capsys):
    assert signal.getsignal(signal.SIGINT) is not preemption._end

    def interrupted(words):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        command.script(interrupted, flags.FlagValues(), ["verify"], "", "")
    assert ended.value.code == preemption.RESTART
    assert "Start the same command again" in capsys.readouterr().err


@pytest.mark.parametrize("of_tensorflow", [False, True])
def test_memory_that_runs_out_is_one_line_which_quotes_nothing(capsys, of_tensorflow):
    def started():
        if of_tensorflow:
            raise tf.errors.ResourceExhaustedError(None, None, "of a private row")
        raise MemoryError("of a private row")

    with pytest.raises(SystemExit) as ended, command._reported_errors():
        started()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and "private" not in said
    assert "Lower batch_size" in said


def test_a_stage_that_crashes_leaves_no_memory_on_disk(tmp_path):
    """A core dump would hold private queries and seeds."""
    code = (
        "import atexit, resource, sys\n"
        "show = lambda: print(resource.getrlimit(resource.RLIMIT_CORE)[0])\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))\n"
        "atexit.register(show)\n"
        "from tfdpsq.run import prepare\n"
        "from tfdpsq.run.core import command\n"
        "sys.argv = ['prepare', '--workdir=']\n"
        "command.main(prepare.run)\n"
    )
    script = tmp_path / "crashes.py"
    script.write_text(code)
    shown = _run(str(script))
    assert shown.returncode == 2, shown.stderr
    assert shown.stdout.splitlines()[-1] == "0"


@pytest.mark.parametrize(
    ("typed", "meant"), [("finetun", "finetune"), ("evalute", "evaluate")]
)
def test_a_typo_gets_the_nearest_stage(typed, meant):
    shown = _tfdpsq(typed)

    assert shown.returncode == 2
    assert f"there is no stage '{typed}'. Did you mean {meant}?" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_no_stage_gets_the_list():
    shown = _tfdpsq()

    assert shown.returncode == 2
    assert "usage: tfdpsq STAGE" in shown.stderr


@pytest.mark.parametrize("output", ["/dev/full", "closed", "ascii", "reader gone"])
def test_output_that_nobody_can_read_is_no_traceback(output):
    words = [sys.executable, "-m", "tfdpsq.run", "--help"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    end = None
    if output == "closed":
        words = ["sh", "-c", 'exec "$@" >&-', "sh", *words]
    elif output == "/dev/full":
        end = os.open(output, os.O_WRONLY)
    elif output == "reader gone":
        reader, end = os.pipe()
        os.close(reader)
    ended = subprocess.run(
        words,
        stdout=end if end is not None else subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    )
    if end is not None:
        os.close(end)
    assert b"Traceback" not in ended.stderr and b"Exception" not in ended.stderr
    # What is closed from the beginning is wanted so.
    assert ended.returncode == (0 if output in ("closed", "ascii") else 2)


@pytest.mark.parametrize("output", [">/dev/full", ">&-", "| true"])
def test_output_that_imports_cannot_write_to_ends_no_stage(tmp_path, output):
    """A library says on standard output which backend it has."""
    words = f'"{sys.executable}" -m tfdpsq.run.prepare --config=no.py --workdir=out'
    ended = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words} {output}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    assert ended.returncode == 2, ended.stderr
    assert "error: " in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_stage_is_imported_is_75(tmp_path, number):
    """The first seconds of every command."""
    slow = tmp_path / "ml_collections" / "__init__.py"
    slow.parent.mkdir()
    slow.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "tfdpsq.run.prepare"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        cwd=tmp_path,
        # A shell that starts the tests in the background has SIGINT ignored in them.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    assert "here\n" in iter(process.stdout.readline, "")
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == preemption.RESTART
    assert preemption.AGAIN in errors


@pytest.mark.parametrize(
    "begin, number",
    [
        ("Notice().listen()", signal.SIGINT),
        ("Notice().listen()", signal.SIGTERM),
        ("imported()", signal.SIGINT),  # SIGTERM ends it then, by the default
    ],
)
def test_a_signal_while_an_object_is_finalised_is_not_lost(tmp_path, begin, number):
    """Python prints what `__del__` raises, and goes on: to the next paid step."""
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from tfdpsq.run.devices import preemption\n"
        f"preemption.{begin}\n"
        "class Finalised:\n"
        "    def __del__(self):\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "        sum(range(1000))\n"
        "made = Finalised()\n"
        "del made\n"
        "print('went on')\n"
    )
    script = tmp_path / "finalised.py"
    script.write_text(code)
    done = _run(str(script))
    assert done.returncode == preemption.RESTART
    assert preemption.AGAIN in done.stderr and "Traceback" not in done.stderr
    assert "went on" not in done.stdout


def test_other_errors_of_finalisers_are_printed_as_ever(tmp_path):
    script = tmp_path / "finalised.py"
    script.write_text(
        "from tfdpsq.run.devices import preemption\n"
        "preemption.imported()\n"
        "class Finalised:\n"
        "    def __del__(self):\n"
        "        raise SystemExit(3)\n"
        "made = Finalised()\n"
        "del made\n"
        "print('went on')\n"
    )
    done = _run(str(script))
    assert done.returncode == 0 and "went on" in done.stdout
    assert "SystemExit: 3" in done.stderr


def test_a_finished_stage_keeps_its_status(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from tfdpsq.run.devices import preemption\n"
        "preemption.Notice().listen()\n"
        "preemption.finished()\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    os.kill(os.getpid(), number)\n"
    )
    script = tmp_path / "finished.py"
    script.write_text(code)
    assert _run(str(script)).returncode == 0

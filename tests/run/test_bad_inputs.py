"""Bad input through the command line: one line on standard error, status 2, no output.

Every row is a command as a user types it. They run in this process, through each
stage's own entry point, as importing TensorFlow takes seconds.
"""

import contextlib
import io
import os
import pathlib
import runpy
import signal
import sys
import time

import pytest
from absl import flags
from helpers import forking, tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]

_TUNE = "finetune --config=configs/finetune.py --workdir=@/out "
_JOB = "pipeline --config=configs/quickstart.py --workdir=@/out "
# A command, and the value or place that its message names.
ROWS = [
    # Settings: not a number, beyond a range, of another kind, not among the choices.
    (_TUNE + "--config.learning_rate=nan", "learning_rate is nan"),
    (_TUNE + "--config.epsilon=1000", "epsilon is 1000.0"),
    (_TUNE + "--config.steps=1.5", "--config.steps=1.5"),
    (_TUNE + "--config.engine=jax", "engine is 'jax'"),
    (_TUNE + "--config.init=/no/such/model", "/no/such/model"),
    (_TUNE + "--config.learning_rat=1", "--config.learning_rate"),
    ("train_retriever --workdir=@/out --config.epsilon=3", "epsilon is 3.0"),
    ("synthesize --workdir=@/out --config.top_p=1.5", "top_p is 1.5"),
    ("evaluate --workdir=@/out --config.resamples=0", "resamples is 0"),
    ("audit --workdir=@/out --config.confidence=nan", "confidence is nan"),
    (_JOB + "--config.epsilons=(inf,0.0)", "epsilons[1] is 0.0"),
    (_JOB + "--config.strict=True", "strict is True"),
    # Data.
    ("prepare --workdir=@/out --config.data=/no/such/beir", "/no/such/beir"),
    ("prepare --workdir=@/out --config.data=@/deep", "corpus.jsonl:1"),
    # Configs.
    ("finetune --config=@/none.py --workdir=@/out", "none.py"),
    ("finetune --config=@/text.py --workdir=@/out", "text.py:1"),
    ("finetune --config=configs/filter.py --workdir=@/out", "stage filter"),
    ("mine --workdir=@/out --config=@/must.py", "k has no value"),
    # Flags and places.
    ("finetune --workdir=@/out", "vocabulary"),
    ("mine", "--workdir"),
    ("mine --workdir=@/out --wrokdir=x", "--workdir"),
    ("synthesize --workdir=@/out --num_shards=2 --shard_index=2", "shard_index is 2"),
    ("prepare --workdir=@/taken --config.data=@/pairs", "taken"),
    ("finetune --workdir=@/a\udcff", "--workdir"),  # bytes that are not UTF-8
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory of bad files, and one of good pairs."""
    base = tmp_path_factory.mktemp("bad")
    for name in ("pairs", "deep"):
        tiny.write_pairs(base / name, train=8, dev=2, test=2)
    deep = '{"_id": "d0", "text": ' + "[" * 100_000 + "}\n"
    (base / "deep" / "corpus.jsonl").write_text(deep)
    for name, text in {
        "text": "this is not Python at all\n",
        "must": (
            "from ml_collections import config_dict\nfrom tfdpsq.run import mine\n"
            "def get_config():\n    c = mine.default_config()\n    c.unlock()\n"
            "    del c.k\n    c.k = config_dict.required_placeholder(int)\n"
            "    return c\n"
        ),
    }.items():
        (base / f"{name}.py").write_text(text)
    (base / "taken").mkdir()
    (base / "taken" / "thesis.txt").write_text("not ours")
    return base


def _run(words):
    """Exit status and standard error of a command, by its own entry point."""
    stage, *arguments = words
    known = set(flags.FLAGS)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    argv, errors = sys.argv, io.StringIO()
    sys.argv = [stage, *arguments]
    try:
        with contextlib.redirect_stderr(errors), contextlib.chdir(ROOT):
            runpy.run_module(f"tfdpsq.run.{stage}", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.argv = argv
        for name in set(flags.FLAGS) - known:
            delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status, errors.getvalue()


@pytest.mark.parametrize(("command", "said"), ROWS, ids=[r[0][:60] for r in ROWS])
def test_bad_input_is_one_line_and_status_2(base, command, said):
    before = set(base.rglob("*"))
    status, errors = _run(command.replace("@", str(base)).split(" "))
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(lines) == 1, errors[-2000:]
    assert said in lines[0] and "Traceback" not in errors
    assert len(lines[0]) < 2500
    # Nothing was made but the empty private directory beside the output.
    assert set(base.rglob("*")) - before <= {base / "private"}


def _command(*words, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return forking.Command([sys.executable, *words], ROOT, environment, **options)


# Files may not grow beyond 8 kB, as on a disk that is nearly full.
_ON_A_FULL_DISK = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
sys.argv = sys.argv[1:]
runpy.run_module("tfdpsq.run.prepare", run_name="__main__", alter_sys=True)
"""


def test_full_disk_is_told_and_leaves_nothing_half_written(tmp_path):
    script = tmp_path / "full.py"
    tiny.write_pairs(tmp_path / "pairs")
    script.write_text(_ON_A_FULL_DISK)
    out = tmp_path / "out" / "prepare"
    words = (f"--workdir={out}", f"--config.data={tmp_path / 'pairs'}")
    done = _command(script, "prepare", *words, "--config.vocabulary_size=320")
    _, errors = done.communicate()
    assert done.returncode == 2, errors[-2000:]
    assert "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith("error: ") and "quota" in last
    assert not list((tmp_path / "out").rglob("*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stage_that_is_asked_to_end_ends_with_75(base, number, tmp_path):
    """75 means: start the same command again to go on."""
    config = tmp_path / "slow.py"
    config.write_text(
        "import signal, sys, time\n\nfrom tfdpsq.data import BeirDirectory\n"
        "from tfdpsq.run import mine\n\n\n"
        "def documents(self):\n    print('here', file=sys.stderr, flush=True)\n"
        "    time.sleep(60)\n"
        "\n\ndef get_config():\n    BeirDirectory.documents = documents\n"
        "    return mine.default_config()\n"
    )
    process = _command(
        *("-m", "tfdpsq.run.mine", f"--config={config}"),
        f"--workdir={tmp_path / 'private' / 'out'}",
        f"--config.pairs={base / 'pairs'}",
    )
    deadline = time.monotonic() + 60
    while "here" not in process.said()[1]:
        assert process.poll() is None and time.monotonic() < deadline, process.said()
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "Traceback" not in errors

"""Bad input through the command line: one line on standard error, status 2, no output.

Every row is a command as a user types it. They run in this process, as importing
TensorFlow takes seconds.
"""

import contextlib
import functools
import io
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from helpers import tiny

from tfdpsq.run import command as commands

ROOT = pathlib.Path(__file__).resolve().parents[2]

_TUNE = "finetune --config=configs/finetune.py --workdir=@/out "
_LOG = "import --workdir=@/private/out --config.log_documents_are_public=True "
_LOG += "--config.logs.train=@/"
# A command, and the value or place that its message names.
ROWS = [
    # Settings: not a number, beyond a range, of another kind, not among the choices.
    (_TUNE + "--config.learning_rate=nan", "learning_rate is nan"),
    (_TUNE + "--config.steps=1.5", "--config.steps=1.5"),
    (_TUNE + "--config.init=/no/such/model", "/no/such/model"),
    (_TUNE + "--config.learning_rat=1", "Did you mean learning_rate?"),
    # Data.
    ("prepare --workdir=@/out --config.data=/no/such/beir", "/no/such/beir"),
    ("prepare --workdir=@/out --config.data=@/deep", "corpus.jsonl:1"),
    (_LOG + "mixed.csv", "mixed.csv:3: byte 2 of the line is 0xfc, which is not UTF-8"),
    # Configs.
    ("finetune --config=@/none.py --workdir=@/out", "none.py"),
    ("mine --workdir=@/out --config=@/text.py", "no function get_config()"),
    # What `fit` sets for these data gives way to the command line.
    (
        "pipeline --workdir=@ --config=@/fit.py --config.data=@/pairs "
        "--config.finetune.n_bound=9 --config.finetune.steps=9",
        "finetune.batch_size is -9",
    ),
    # Flags and places.
    ("finetun", "Did you mean finetune?"),
    ("mine", "--workdir"),
    ("mine --workdir=@/out --wrokdir=x", "workdir"),
    ("mine --workdir=@/out --config.pairs=@/pairs", "is not under private/"),
    ("prepare --workdir=@/taken --config.data=@/pairs", "taken"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory of bad files, and one of good pairs."""
    base = tmp_path_factory.mktemp("bad")
    for name in ("pairs", "deep"):
        tiny.write_pairs(base / name, train=8, dev=2, test=2)
    deep = '{"_id": "d0", "text": ' + "[" * 100_000 + "}\n"
    (base / "deep" / "corpus.jsonl").write_text(deep)
    # Two files were put together.
    mixed = "query,document\ntür,a\n".encode() + "tür,b\n".encode("latin-1")
    (base / "mixed.csv").write_bytes(mixed)
    (base / "text.py").write_text("STEPS = 3\n")
    (base / "fit.py").write_text(
        "from tfdpsq.run.stages.pipeline import STAGE\nget_config = STAGE.config\n"
        "def fit(config, documents, pairs):\n"
        "    config.finetune.update(steps=-1, batch_size=-pairs)\n"
    )
    (base / "taken").mkdir()
    (base / "taken" / "thesis.txt").write_text("not ours")
    return base


def _run(words):
    """Exit status and standard error of a command."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    argv, errors = sys.argv, io.StringIO()
    sys.argv = ["tfdpsq", *words]
    try:
        with contextlib.redirect_stderr(errors), contextlib.chdir(ROOT):
            commands.main()
        status = 0
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.argv = argv
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
    made = set(base.rglob("*")) - before
    assert all(path.is_relative_to(base / "private") for path in made)


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
)
def test_stage_that_is_asked_to_end_ends_with_75(base, number, tmp_path):
    """75 means: start the same command again to go on."""
    config = tmp_path / "slow.py"
    config.write_text(
        "import signal, sys, time\n\nfrom tfdpsq.data import BeirDirectory\n"
        "from tfdpsq.run.stages import mine\n\n\n"
        "def documents(self):\n    print('here', file=sys.stderr, flush=True)\n"
        "    time.sleep(60)\n"
        "\n\ndef get_config():\n    BeirDirectory.documents = documents\n"
        "    return mine.STAGE.config()\n"
    )
    words = [sys.executable, "-m", "tfdpsq.run", "mine", f"--config={config}"]
    words += [f"--workdir={tmp_path / 'private' / 'out'}"]
    with open(tmp_path / "errors", "w+") as file:
        process = subprocess.Popen(  # not forked: what handles signals is imported
            [*words, f"--config.pairs={base / 'pairs'}"],
            cwd=ROOT,
            stderr=file,
            preexec_fn=functools.partial(signal.signal, number, signal.SIG_DFL),
        )
        while "here" not in (tmp_path / "errors").read_text():
            assert process.poll() is None, (tmp_path / "errors").read_text()
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(timeout=60)
    errors = (tmp_path / "errors").read_text()
    assert process.returncode == 75, errors
    assert "Traceback" not in errors

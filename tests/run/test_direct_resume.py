"""Training the retriever directly, killed with SIGKILL: it goes on to the same bytes."""

import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tfdpsq import retriever
from tfdpsq.data import train_vocabulary
from tfdpsq.run import train_retriever

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parents[1]
_spec = importlib.util.spec_from_file_location("tiny", _HERE / "tiny.py")
_tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tiny)

_STEPS = 20
_SETTINGS = {
    "t5.vocabulary_size": 320,
    "t5.num_layers": 1,
    "t5.num_heads": 2,
    "t5.hidden_dim": 16,
    "t5.intermediate_dim": 24,
    "t5.key_value_dim": 8,
    "t5.dropout": 0.2,
    "embedding_dim": 16,
    "document_length": 24,
    "query_length": 10,
    "method": "public_negatives",
    "negatives": 12,
    # So that a step after a kill may need what was drawn, and embedded, before it.
    "refresh_every": 7,
    "epsilon": 8.0,
    "batch_size": 8,
    "microbatch_size": 4,
    "steps": _STEPS,
    "save_every": 5,
    "accountant": "rdp",
    "n_is_public": True,
}


def _start(base, **options):
    settings = {
        **_SETTINGS,
        "pairs": base.parent / "pairs",
        "vocabulary": base.parent / "spiece.model",
        **options,
    }
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tfdpsq.run.train_retriever",
            "--config=configs/train_retriever.py",
            f"--workdir={base / 'retriever'}",
            *(f"--config.{key}={value}" for key, value in settings.items()),
        ],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _paid(base):
    path = base / "private" / "runs" / "retriever" / "ledger.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[1:-1]  # a torn last line is not yet one
    return [json.loads(line)["step"] for line in lines]


def _kill_after(base, steps):
    child = _start(base)
    while len(_paid(base)) < steps:
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.002)
    child.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert not (base / "retriever").exists()


def _finish(base):
    child = _start(base)
    _, errors = child.communicate()
    assert child.returncode == 0, errors[-3000:]


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_negatives_to_the_same_weights(tmp_path):
    queries = _tiny.write_pairs(tmp_path / "pairs")
    train_vocabulary(queries, 300, tmp_path / "spiece.model")  # made-up queries
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    _kill_after(killed, 1)
    shutil.copytree(killed / "private", whole / "private")
    for steps in (7, 13):
        _kill_after(killed, steps)
    _finish(killed)
    _finish(whole)
    assert _paid(killed) == _paid(whole) == list(range(_STEPS))
    certificates = [
        json.loads((base / "retriever" / "certificate.json").read_text())
        for base in (killed, whole)
    ]
    assert certificates[0] == certificates[1]
    models = [
        retriever.load(base / "retriever" / train_retriever.MODEL)
        for base in (killed, whole)
    ]
    for one, other in zip(*(model.get_weights() for model in models)):
        np.testing.assert_array_equal(one, other)

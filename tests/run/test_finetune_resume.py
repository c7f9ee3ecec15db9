"""The finetune stage, killed with SIGKILL through its command line."""

import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parents[1]
_spec = importlib.util.spec_from_file_location("tiny", _HERE / "tiny.py")
_tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tiny)

_STEPS = 24
_SETTINGS = {
    "t5.vocabulary_size": 320,
    "t5.num_layers": 1,
    "t5.num_heads": 2,
    "t5.hidden_dim": 16,
    "t5.intermediate_dim": 24,
    "t5.key_value_dim": 8,
    "t5.dropout": 0.2,
    "document_length": 24,
    "query_length": 10,
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
        "vocabulary": base.parent / "prepare" / "vocabulary" / "spiece.model",
        **options,
    }
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tfdpsq.run.finetune",
            "--config=configs/finetune.py",
            f"--workdir={base / 'generator'}",
            *(f"--config.{key}={value}" for key, value in settings.items()),
        ],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _paid(base):
    path = base / "private" / "runs" / "generator" / "ledger.jsonl"
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
    assert not (base / "generator").exists()  # nothing half-finished is released


def _finish(base, status=0, **options):
    child = _start(base, **options)
    _, errors = child.communicate()
    assert child.returncode == status, errors[-3000:]
    return errors


@pytest.mark.slow
def test_a_killed_stage_goes_on_to_the_same_bytes(tmp_path):
    _tiny.write_pairs(tmp_path / "pairs")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "tfdpsq.run.prepare",
            "--config=configs/prepare.py",
            f"--workdir={tmp_path / 'prepare'}",
            f"--config.data={tmp_path / 'pairs'}",
            "--config.vocabulary_size=320",
        ],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        check=True,
        capture_output=True,
    )
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    _kill_after(killed, 1)
    shutil.copytree(killed / "private", whole / "private")
    # Another setting, other data: refused, and nothing is spent.
    before = _paid(killed)
    message = _finish(killed, status=2, learning_rate=0.5)
    assert "config.learning_rate: 0.001 there, 0.5 now" in message
    _tiny.write_pairs(tmp_path / "other", train=59)
    message = _finish(killed, status=2, pairs=tmp_path / "other")
    assert "begun with another config or other data" in message
    assert _paid(killed) == before
    for steps in (9, 17):
        _kill_after(killed, steps)
    _finish(killed)
    _finish(whole)
    assert _paid(killed) == _paid(whole) == list(range(_STEPS))
    for name in ("config.json", "certificate.json"):
        one = json.loads((killed / "generator" / name).read_text())
        assert one == json.loads((whole / "generator" / name).read_text())
    for name in ("model.safetensors", "spiece.model"):
        one = (killed / "generator" / name).read_bytes()
        assert one == (whole / "generator" / name).read_bytes()
    # The seeds are gone with the state; the ledger stays.
    assert [p.name for p in (killed / "private/runs/generator").iterdir()] in (
        ["ledger.jsonl", "run.json"],
        ["run.json", "ledger.jsonl"],
    )
    # The finished stage is not trained a second time, nor is it paid for again.
    shutil.rmtree(killed / "generator")
    assert "would spend the budget a second time" in _finish(killed, status=2)

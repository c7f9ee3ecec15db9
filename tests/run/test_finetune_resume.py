"""The finetune stage, killed with SIGKILL through its command line."""

import json
import os
import shutil
import subprocess

import pytest
from helpers import killing as _killing
from helpers import tiny as _tiny

_STEPS = 24
_SETTINGS = {
    "t5.vocabulary_size": 320,
    **_tiny.FLAGS,
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


def _points(base):
    return list(map(json.loads, open(base / "private/logs/generator/log.jsonl")))


@pytest.mark.slow
def test_a_killed_stage_goes_on_to_the_same_bytes(tmp_path):
    _tiny.write_pairs(tmp_path / "pairs")
    prepare = {"data": tmp_path / "pairs", "vocabulary_size": 320}
    subprocess.run(
        _killing.command("prepare", tmp_path / "prepare", prepare),
        cwd=_killing.ROOT,
        env={**os.environ, "PYTHONPATH": str(_killing.ROOT)},
        check=True,
        capture_output=True,
    )
    settings = {
        **_SETTINGS,
        "pairs": tmp_path / "pairs",
        "vocabulary": tmp_path / "prepare" / "vocabulary" / "spiece.model",
    }
    killed, whole = (
        _killing.Run("finetune", tmp_path / name, "generator", settings)
        for name in ("killed", "whole")
    )
    killed.kill_after(1)
    shutil.copytree(killed.base / "private", whole.base / "private")
    # Another setting, other data: refused, and nothing is spent.
    before = killed.paid()
    message = killed.finish(status=2, learning_rate=0.5)
    assert "config.learning_rate: 0.001 there, 0.5 now" in message
    _tiny.write_pairs(tmp_path / "other", train=59)
    message = killed.finish(status=2, pairs=tmp_path / "other")
    assert "begun with another config or other data" in message
    assert killed.paid() == before
    for steps in (9, 17):
        killed.kill_after(steps)
    killed.finish()
    whole.finish()
    assert killed.paid() == whole.paid() == list(range(_STEPS))
    for name in ("config.json", "certificate.json"):
        one = json.loads((killed.out / name).read_text())
        assert one == json.loads((whole.out / name).read_text())
    for name in ("model.safetensors", "spiece.model"):
        one = (killed.out / name).read_bytes()
        assert one == (whole.out / name).read_bytes()
    # Points are those of a run that was not killed, each once, to the last one.
    one, other = (_points(run.base) for run in (killed, whole))
    assert [point["step"] for point in one] == list(range(1, _STEPS + 1))
    for name in ("step", "loss", "epsilon"):
        assert [p[name] for p in one] == [p[name] for p in other]
    spent = json.loads((killed.out / "certificate.json").read_text())["guarantee"]
    assert one[-1]["epsilon"] == pytest.approx(spent["epsilon"], rel=1e-6)
    # The seeds are gone with the state; the ledger stays.
    assert [p.name for p in (killed.base / "private/runs/generator").iterdir()] in (
        ["ledger.jsonl", "run.json"],
        ["run.json", "ledger.jsonl"],
    )
    # The finished stage is not trained a second time, nor is it paid for again.
    shutil.rmtree(killed.out)
    assert "would spend the budget a second time" in killed.finish(status=2)

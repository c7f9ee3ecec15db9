"""Workdirs, stages and runs of an older version: gone on with, or refused by name."""

import json

import ml_collections
import pytest

import tfdpsq
from tfdpsq.privacy.proof.ledger import FILE_NAME, Ledger
from tfdpsq.run.core import workdir
from tfdpsq.run.training import private_training
from tfdpsq.validation import InputError

_REFUSED = (
    f"It was made by tfdpsq 0.1.0, and this is tfdpsq {tfdpsq.__version__}: go on with "
    "tfdpsq 0.1.0"
)
_OLD = {"seed": 0, "steps": 3}
# A setting that 0.1.0 did not have.
_NEW = {**_OLD, "secure": False}


def _without_version(path):
    """Leaves a JSON file as 0.1.0 wrote it."""
    content = json.loads(path.read_text())
    assert content.pop("made_by") == f"tfdpsq {tfdpsq.__version__}"
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return content


def _config(values):
    return ml_collections.ConfigDict(values)


def test_a_workdir_of_the_version_before(tmp_path):
    workdir.open_workdir(tmp_path / "work", _config(_OLD))
    path = tmp_path / "work" / "config.json"
    content = _without_version(path)
    workdir.open_workdir(tmp_path / "work", _config(_OLD))
    assert json.loads(path.read_text()) == content  # still of the version before
    with pytest.raises(InputError, match="secure: None there, False now") as refused:
        workdir.open_workdir(tmp_path / "work", _config(_NEW))
    assert _REFUSED in str(refused.value)
    assert json.loads(path.read_text()) == content


def test_a_finished_stage_of_the_version_before(tmp_path):
    out = tmp_path / "work" / "public"
    out.mkdir(parents=True)
    config, inputs = workdir.plain(_config(_OLD)), {"corpus": "c"}
    wanted = {"config": config, "inputs": inputs}
    stage = {**wanted, "fingerprint": workdir._fingerprint(wanted), "run": "r"}
    (out / "stage.json").write_text(json.dumps({**stage, "result": {}}))
    found = workdir.finished_stage(out, _config(_OLD), inputs)
    assert found["run"] == "r"
    with pytest.raises(InputError, match="config.secure: None there") as refused:
        workdir.finished_stage(out, _config(_NEW), inputs)
    assert _REFUSED in str(refused.value)
    # Of this version, nothing is said of versions.
    (out / "stage.json").write_text(json.dumps({**stage, **workdir.made_by()}))
    with pytest.raises(InputError, match="config.secure") as refused:
        workdir.finished_stage(out, _config(_NEW), inputs)
    assert "It was made by" not in str(refused.value)


def test_a_run_that_paid_steps_under_the_version_before(tmp_path):
    run = tmp_path / "private" / "runs" / "generator"

    def begin(config):
        with private_training.open_run(
            run, _config(config), {"pairs": "p"}, tmp_path / "generator"
        ):
            pass

    begin(_OLD)
    _without_version(run / "run.json")
    # Nothing is paid for: this version takes it over.
    begin(_OLD)
    content = _without_version(run / "run.json")
    with Ledger.open(run / FILE_NAME, "plan", "data", 3) as ledger:
        ledger.pay(0)
    begin(_OLD)
    with pytest.raises(InputError, match="config.secure: None there") as refused:
        begin(_NEW)
    assert _REFUSED in str(refused.value)
    assert json.loads((run / "run.json").read_text()) == content

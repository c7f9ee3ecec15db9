"""A stage that fails after its budget is spent keeps what it bought."""

import numpy as np
import pytest
from helpers import framed, tiny

from tfdpsq import validation
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.privacy import read_certificate, read_ledger, verify_certificate
from tfdpsq.run.common import training
from tfdpsq.run.frame import records
from tfdpsq.run.stages import finetune
from tfdpsq.validation import InputError

STEPS = 5


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("kept")
    tiny.write_start(base)
    return base


def _run(base, out, **more):
    changes = {"steps": STEPS, "save_every": 2, "microbatch_size": 8, "epsilon": 8.0}
    changes["trained"] = ("*layer_norm*",)  # a small graph
    changes = tiny.training(base, **{**changes, **more})
    return framed.run(finetune.STAGE, out, **changes)


def _paid(out):
    return read_ledger(out.parent / "private" / "runs" / out.name / "ledger.jsonl")


def test_diverging_run_leaves_its_last_finite_weights(base, tmp_path, monkeypatch):
    """Adam's first step is the learning rate, 3e38; two with one sign are infinite.

    The ε must be that of the whole plan: that training ended was decided by noised
    weights. (The largest rate that settings allow is 1,000.)
    """
    out = tmp_path / "generator"
    with monkeypatch.context() as patch:
        patch.setattr(training, "learning_rate", lambda *_: 3e38)
        with pytest.raises(InputError, match="diverged at step .* kept"):
            _run(base, out)
    certificate = read_certificate(out)
    assert verify_certificate(certificate).problems == ()
    assert certificate["accounting"]["steps_executed"] == STEPS
    assert _paid(out).steps_paid == STEPS
    said = records.read_stage(out)["result"]["diverged"]
    assert certificate["training"]["diverged"] == said
    weights = [v.numpy() for v in T5QueryGenerator.from_preset(out).trainable_variables]
    assert all(np.isfinite(values).all() for values in weights)
    # Of step 1, which no saved state has: states are saved every second.
    assert max(np.abs(values).max() for values in weights) > 1e38
    # Nothing secret is left over, and the same command ends the same way, for free.
    own = out.parent / "private" / "runs" / out.name
    assert not (own / "state").exists()
    before = (own / "ledger.jsonl").read_bytes()
    with pytest.raises(InputError, match="weights of step 1"):
        _run(base, out)
    assert (own / "ledger.jsonl").read_bytes() == before


def test_failure_after_the_last_step_is_mended_for_free(base, tmp_path, monkeypatch):
    """As a full disk would: every step is paid, and there is no output yet."""
    out = tmp_path / "generator"

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records, "write_certificate", full)
        with pytest.raises((OSError, validation.InputError)):
            _run(base, out)
    assert not out.exists() and _paid(out).steps_paid == STEPS
    ledger = out.parent / "private" / "runs" / out.name / "ledger.jsonl"
    before = ledger.read_bytes()
    _run(base, out)
    assert ledger.read_bytes() == before
    certificate = read_certificate(out)
    assert certificate["accounting"]["steps_executed"] == STEPS
    assert certificate["run_id"] == _paid(out).run

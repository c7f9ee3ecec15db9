"""A stage that fails after its budget is spent keeps what it bought."""

import numpy as np
import pytest
from helpers import tiny

from tfdpsq import validation
from tfdpsq.data import train_vocabulary
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.privacy import read_certificate, read_ledger, verify_certificate
from tfdpsq.run import finetune
from tfdpsq.run.core import records, workdir
from tfdpsq.run.training import private_training

STEPS = 5


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("kept")
    tiny.write_pairs(base / "pairs")
    documents = (base / "pairs" / "corpus.jsonl").read_text().splitlines()
    train_vocabulary(documents, 320, base / "spiece.model")
    return base


def _config(base, **changes):
    config = tiny.tiny_config(base / "pairs").finetune
    config.pairs, config.vocabulary = str(base / "pairs"), str(base / "spiece.model")
    config.steps, config.save_every, config.query_length = STEPS, 2, 12
    config.update(changes)
    return config


def _paid(out):
    return read_ledger(out.parent / "private" / "runs" / out.name / "ledger.jsonl")


def _run(base, out, monkeypatch, rates=None, **changes):
    """Trains; `rates` replaces the learning rate from a step on."""
    if rates is not None:
        monkeypatch.setattr(private_training, "learning_rate", lambda *_: rates)
    return finetune.run(_config(base, **changes), out)


def test_a_run_that_diverges_leaves_its_last_finite_weights(
    base, tmp_path, monkeypatch
):
    """Adam's first step is the learning rate, 3e38; two with one sign are infinite.

    The ε must be that of the whole plan: that training ended was decided by noised
    weights. (The largest rate that settings allow is 1,000.)
    """
    out = tmp_path / "generator"
    with pytest.raises(finetune.DivergedError, match="training diverged at step") as e:
        _run(base, out, monkeypatch, 3e38)
    certificate = read_certificate(out)
    assert e.value.certificate == certificate
    assert verify_certificate(certificate).problems == ()
    assert certificate["accounting"]["steps_executed"] == STEPS
    assert _paid(out).steps_paid == STEPS
    said = workdir.read_json(out / workdir.STAGE_FILE)["result"]["diverged"]
    assert certificate["training"]["diverged"] == said
    assert said.startswith("training diverged at step ")
    at, kept = (int(said.split(word)[1].split()[0].strip(".:")) for word in _WORDS)
    assert 0 <= kept < at <= STEPS
    weights = [v.numpy() for v in T5QueryGenerator.from_preset(out).trainable_variables]
    assert all(np.isfinite(values).all() for values in weights)
    # Of the last good step, which no saved state has: states are saved every second.
    assert kept == 1 and max(np.abs(values).max() for values in weights) > 1e38
    # Nothing secret is left over, and the same command ends the same way, for free.
    own = out.parent / "private" / "runs" / out.name
    assert not (own / "state").exists()
    before = (own / "ledger.jsonl").read_bytes()
    with pytest.raises(finetune.DivergedError, match=f"weights of step {kept}"):
        _run(base, out, monkeypatch)
    assert (own / "ledger.jsonl").read_bytes() == before


_WORDS = ("diverged at step ", "weights of step ")


def test_a_failure_after_the_last_step_is_mended_by_the_same_command(
    base, tmp_path, monkeypatch
):
    """As a full disk would: every step is paid, and there is no output yet."""
    out = tmp_path / "generator"

    def full(*_):
        raise OSError(28, "No space left on device")

    ledger = out.parent / "private" / "runs" / out.name / "ledger.jsonl"
    before = None
    for module, fails in (
        (private_training, "ledger_head"),
        (records, "write_certificate"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, fails, full)
            with pytest.raises((OSError, validation.InputError)):
                _run(base, out, monkeypatch)
        assert not out.exists() and _paid(out).steps_paid == STEPS
        assert before in (None, ledger.read_bytes())
        before = ledger.read_bytes()
    _run(base, out, monkeypatch)
    assert ledger.read_bytes() == before
    certificate = read_certificate(out)
    assert certificate["accounting"]["steps_executed"] == STEPS
    assert certificate["ledger_head"] == _paid(out).head

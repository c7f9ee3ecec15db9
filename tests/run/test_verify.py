"""The command that verifies a certificate: what it prints, and how it exits."""

import functools
import json
import os

import pytest
from helpers import plans

from tfdpsq.privacy import Ledger
from tfdpsq.run import verify

_plan = functools.partial(plans.plan, num_units=2000, batch_size=100, steps=4)


@pytest.fixture
def unprotected(tmp_path):
    """The path of an unprotected run's certificate."""
    certificate = plans.certificate(_plan(epsilon=float("inf")))
    path = tmp_path / "unprotected.json"
    path.write_text(json.dumps(certificate))
    return str(path)


@pytest.fixture
def made(tmp_path):
    """A true certificate, its ledger, and a function that writes an edited copy."""
    plan = _plan(epsilon=1.0, accountant="pld")
    ledger = tmp_path / "ledger.jsonl"
    with Ledger.open(ledger, plan.fingerprint, "data", 4) as opened:
        for step in range(4):
            opened.pay(step)
        head = opened.head
    certificate = plans.certificate(plan, ledger_head=head)

    def write(name="certificate.json", **changes):
        path = tmp_path / name
        path.write_text(json.dumps({**certificate, **changes}, indent=2))
        return str(path)

    return certificate, str(ledger), write


def _exit(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        verify.main(["verify", *words])
    said = capsys.readouterr()
    return caught.value.code, said.out, said.err


def test_true_certificate_exits_with_0(made, capsys):
    certificate, ledger, write = made
    code, out, _ = _exit(capsys, write())
    epsilon = certificate["guarantee"]["epsilon"]
    assert code == 0 and f"epsilon {epsilon}, delta 0.00025 for one query" in out
    assert f"epsilon {epsilon:.6g} by PLD" in out and "4 of 4 steps" in out
    code, out, _ = _exit(capsys, write(), f"--ledger={ledger}")
    assert code == 0 and "with the ledger" in out
    code, out, _ = _exit(capsys, os.path.dirname(write()))  # as a set's card says
    assert code == 0


@pytest.mark.parametrize("mark", ["config.json", "manifest.json"])
def test_certificate_of_another_artefact_exits_with_1(made, tmp_path, capsys, mark):
    """A file copied to the wrong place; it agrees with itself."""
    marked = {"certificate_digest": "another"}
    if mark == "manifest.json":
        marked = {"certificate": {**made[0], "digest": "another"}}
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / mark).write_text(json.dumps(marked))
    path = tmp_path / "one" / "certificate.json"
    path.write_text(json.dumps(made[0]))
    code, out, _ = _exit(capsys, str(path.parent))
    assert code == 1 and f"{path}: of something else, while {mark} says" in out
    path.unlink()
    code, _, err = _exit(capsys, str(path.parent))
    assert code == 2 and f"{path}: missing, while {mark} says" in err


def test_wrong_epsilon_is_recomputed_and_exits_with_1(made, capsys):
    certificate, _, write = made
    path = write(guarantee={**certificate["guarantee"], "epsilon": 0.1})
    code, out, _ = _exit(capsys, path)
    assert code == 1
    assert "guarantee.epsilon is 0.1, but what was run gives 0.99" in out


def test_ledger_of_other_steps_exits_with_1(made, tmp_path, capsys):
    certificate, _, write = made
    other = str(tmp_path / "other.jsonl")
    with Ledger.open(other, certificate["plan"], "data", 4) as opened:
        opened.pay(0)
    code, out, _ = _exit(capsys, write(), f"--ledger={other}")
    assert code == 1 and "the steps paid for are 1" in out


def test_unprotected_run_guarantees_nothing(unprotected, capsys):
    code, out, _ = _exit(capsys, unprotected)
    assert code == 0 and "epsilon inf" in out and "holds" not in out


def test_unreadable_input_exits_with_2_and_a_line(made, tmp_path, capsys):
    _, ledger, write = made
    old = write("old.json", format="tfdpsq-certificate/1")
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"format"')
    broken = tmp_path / "broken.jsonl"
    broken.write_text("is my rash contagious\n")
    for words, message in (
        ([old], "old.json"),
        ([str(damaged)], "damaged.json: is not a certificate"),
        ([str(tmp_path / "none.json")], "none.json: cannot be read"),
        ([write(), f"--ledger={broken}"], "broken.jsonl:1: "),
        ([], "usage:"),
        ([write(), ledger], "usage:"),
    ):
        code, out, err = _exit(capsys, *words)
        assert (code, out) == (2, ""), words
        assert message in err, words
        assert "Traceback" not in err and "rash" not in err

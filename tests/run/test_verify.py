"""The command that verifies a certificate: what it prints, and how it exits."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from helpers import plans

from tfdpsq.privacy import Ledger
from tfdpsq.privacy.proof.certificate import digest_of
from tfdpsq.run import verify

ROOT = pathlib.Path(__file__).resolve().parents[2]
_HEAVY = (
    "tensorflow_recommenders",
    "tensorflow_datasets",
    "scann",
    "keras_nlp",
    "apache_beam",
)


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


def test_a_true_certificate_exits_with_0(made, capsys):
    certificate, ledger, write = made
    code, out, _ = _exit(capsys, write())
    assert code == 0
    epsilon = certificate["guarantee"]["epsilon"]
    assert f"states      epsilon {epsilon}, delta 0.00025 for one query" in out
    assert f"epsilon {epsilon:.6g} by PLD" in out and "4 of 4 steps" in out
    assert "holds: it agrees with itself (not compared with a ledger)" in out
    code, out, _ = _exit(capsys, write(), f"--ledger={ledger}")
    assert code == 0 and "agrees with itself and with the ledger" in out
    folder = os.path.dirname(write())  # as a set's card says
    code, out, _ = _exit(capsys, folder)
    assert code == 0 and out.startswith(f"{folder}/certificate.json\n")


@pytest.mark.parametrize(
    "mark", ["config.json", "model/config.json", "stage.json", "manifest.json"]
)
def test_the_certificate_of_another_artefact_exits_with_1(made, tmp_path, capsys, mark):
    """It agrees with itself, and says nothing of what it lies next to."""
    other = {**made[0], "description": "Another model."}
    other["digest"] = digest_of(other)
    folders = {}
    for name, certificate in (("one", made[0]), ("other", other)):
        marked = {"certificate_digest": certificate["digest"]}
        if mark == "manifest.json":
            marked = {"certificate": certificate}
        path = tmp_path / name / mark
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(marked))
        folders[tmp_path / name] = certificate
    for folder, certificate in folders.items():
        (folder / "certificate.json").write_text(json.dumps(certificate))
        code, out, _ = _exit(capsys, str(folder), f"--ledger={made[1]}")
        assert code == 0 and "agrees with itself and with the ledger" in out
    for folder, certificate in zip(folders, reversed(folders.values())):
        path = folder / "certificate.json"
        path.write_text(json.dumps(certificate))
        code, out, _ = _exit(capsys, str(folder))
        assert code == 1 and "DOES NOT HOLD, problems: 1" in out
        named = mark.rpartition("/")[2]
        assert f"- {path}: of something else, while {named} says" in out
        assert folders[folder]["digest"] in out
        path.unlink()
        code, _, err = _exit(capsys, str(folder))
        assert code == 2 and f"{path}: missing, while {named} says" in err


def test_a_lowered_epsilon_exits_with_1_and_is_named(made, capsys):
    certificate, _, write = made
    path = write(guarantee={**certificate["guarantee"], "epsilon": 0.1})
    code, out, _ = _exit(capsys, path)
    assert code == 1
    assert "DOES NOT HOLD, problems: 2" in out
    assert "- guarantee.epsilon is 0.1, but what was run gives 0.99" in out
    assert "- digest is" in out


def test_a_ledger_of_other_steps_exits_with_1(made, tmp_path, capsys):
    certificate, _, write = made
    other = str(tmp_path / "other.jsonl")
    with Ledger.open(other, certificate["plan"], "data", 4) as opened:
        opened.pay(0)
    code, out, _ = _exit(capsys, write(), f"--ledger={other}")
    assert code == 1
    assert "accounting.steps_executed is 4, but the steps paid for are 1" in out
    assert "ledger_head is" in out


def test_an_unprotected_run_agrees_with_itself_and_guarantees_nothing(
    unprotected, capsys
):
    code, out, _ = _exit(capsys, unprotected)
    assert code == 0
    assert "epsilon inf" in out and "guarantees nothing" in out and "holds" not in out


def test_what_cannot_be_read_exits_with_2_and_a_line(made, tmp_path, capsys):
    _, ledger, write = made
    old = write("old.json", format="tfdpsq-certificate/1")
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"format"')
    broken = tmp_path / "broken.jsonl"
    broken.write_text("is my rash contagious\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, message in (
        ([old], "which held too little to be verified"),
        ([str(damaged)], "damaged.json: is not a certificate"),
        ([str(tmp_path / "none.json")], "none.json: cannot be read"),
        ([str(empty)], "empty/certificate.json: cannot be read"),
        ([""], "'' is not a path of this machine"),
        (["gs://bucket/certificate.json"], "copied here first"),
        ([write(), f"--ledger={broken}"], "broken.jsonl:1: the line is no"),
        ([write(), f"--ledger={tmp_path / 'none'}"], "none: cannot be read"),
        ([write(), "--ledger="], "--ledger is given as an empty value"),
        ([], "usage: python -m tfdpsq.run.verify CERTIFICATE|DIRECTORY"),
        ([write(), ledger], "usage:"),
        ([write(), "--ledgr=x"], "Unknown command line flag 'ledgr'"),
    ):
        code, out, err = _exit(capsys, *words)
        assert (code, out) == (2, ""), words
        assert message in err, words
        assert "Traceback" not in err and "rash" not in err
    code, out, _ = _exit(capsys, "--help")
    assert code == 0 and "Exit status: 0 the certificate holds" in out


def test_the_command_needs_none_of_the_heavy_libraries(unprotected):
    code = (
        "import sys\n"
        "from tfdpsq.run import verify\n"
        "try:\n"
        f"    verify.main(['verify', {unprotected!r}])\n"
        "except SystemExit as end:\n"
        f"    print(end.code, [n for n in {_HEAVY!r} if n in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.stdout.splitlines()[-1] == "0 []", result.stderr[-2000:]

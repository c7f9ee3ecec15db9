"""The command that verifies certificates: what it prints, and how it exits."""

import dataclasses
import functools
import json
import os
import re
import sys

import pytest
from helpers import plans

from tfdpsq import privacy
from tfdpsq.privacy import Ledger
from tfdpsq.run import command

_plan = functools.partial(plans.plan, num_units=2000, batch_size=100, steps=4)


@pytest.fixture
def made(tmp_path):
    """A true certificate, its ledger, and a function that writes an edited copy."""
    plan = _plan(epsilon=1.0, accountant="pld")
    ledger = tmp_path / "ledger.jsonl"
    with Ledger(ledger, plan.fingerprint, "data", 4) as opened:
        for step in range(4):
            opened.pay(step)
        run = opened.run
    certificate = plans.certificate(plan, run_id=run)

    def write(name="certificate.json", **changes):
        path = tmp_path / name
        path.write_text(json.dumps({**certificate, **changes}, indent=2))
        return str(path)

    return certificate, str(ledger), write


def _exit(capsys, *words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tfdpsq", "verify", *words])
        with pytest.raises(SystemExit) as caught:
            command.main()
    said = capsys.readouterr()
    return caught.value.code, said.out, said.err


def test_true_certificate_exits_with_0(made, capsys):
    certificate, ledger, write = made
    code, out, _ = _exit(capsys, write())
    epsilon = certificate["guarantee"]["epsilon"]
    assert code == 0 and f"epsilon {epsilon}, delta 0.00025 for one query" in out
    assert f"epsilon {epsilon:.6g} by PLD" in out and "4 of 4 steps" in out
    code, out, _ = _exit(capsys, write(), f"--ledger={ledger}")
    assert code == 0 and "compared with 1 of its 1 ledgers" in out
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
    code, out, _ = _exit(capsys, str(path.parent))
    assert code == 1 and f"{path}: missing, while {mark} says" in out


def test_wrong_epsilon_is_recomputed_and_exits_with_1(made, capsys):
    certificate, _, write = made
    path = write("edited.json", guarantee={**certificate["guarantee"], "epsilon": 0.1})
    code, out, _ = _exit(capsys, path)
    assert code == 1
    assert "guarantee.epsilon is 0.1, but what was run gives 0.99" in out


def test_ledger_of_other_steps_exits_with_1(made, tmp_path, capsys):
    certificate, _, write = made
    other = str(tmp_path / "other.jsonl")
    with Ledger(other, certificate["plan"], "data", 4) as opened:
        opened.pay(0)
    code, out, _ = _exit(capsys, write(), f"--ledger={other}")
    assert code == 1 and "paid steps 4, but the ledger 1" in out


def test_unprotected_run_guarantees_nothing(tmp_path, capsys):
    path = tmp_path / "unprotected.json"
    path.write_text(json.dumps(plans.certificate(_plan(epsilon=float("inf")))))
    code, out, _ = _exit(capsys, str(path))
    assert code == 0 and "epsilon inf" in out and "holds" not in out


def test_unreadable_certificate_exits_with_1(made, tmp_path, capsys):
    write = made[2]
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"format"')
    for path in (write("old.json", format="tfdpsq-certificate/1"), str(damaged)):
        code, out, _ = _exit(capsys, path)
        assert code == 1 and path in out and "DOES NOT HOLD" in out


def test_bad_command_or_ledger_exits_with_2_and_a_line(made, tmp_path, capsys):
    write = made[2]
    broken = tmp_path / "broken.jsonl"
    broken.write_text("is my rash contagious\n")
    for words, message in (
        (["/none"], "'/none' does not exist"),
        ([write(), f"--ledger={broken}"], "broken.jsonl:1: "),
        ([write(), "--delta=2"], "delta is 2"),
        ([], "usage:"),
    ):
        code, out, err = _exit(capsys, *words)
        assert (code, out) == (2, ""), words
        assert message in err, words
        assert "Traceback" not in err and "rash" not in err


# -- Several certificates ----------------------------------------------------------

_SMALL = plans.plan(epsilon=1.0, num_units=200, batch_size=20, steps=4)


def _write(folder, run, steps=4, pairs="keyed:1", unit="query", **stage):
    """Writes what a run of `_SMALL` leaves."""
    plan = privacy.make_plan(dataclasses.replace(_SMALL.spec, unit=unit))
    folder.mkdir(parents=True)
    certificate = plans.certificate(
        plan, steps, fingerprints={"pairs": pairs}, run_id=run
    )
    (folder / "certificate.json").write_text(json.dumps(certificate))
    if stage:
        (folder / "stage.json").write_text(json.dumps(stage))
    return folder


@pytest.fixture
def job(tmp_path):
    """A workdir with two runs released, one of them twice, and one kept private."""
    work = tmp_path / "work"
    _write(work / "release" / "generator", "a")
    _write(work / "release" / "synthetic" / "set", "a")
    _write(work / "release" / "retriever", "b", 3)
    _write(work / "private" / "audited", "c")
    _write(work / "evaluation", "e", guarantee="private")
    return work


def _epsilon(line):
    """The composed epsilon by PLD of a line."""
    return float(re.search(r"epsilon (\S+) by PLD", line)[1])


def _total(out, start):
    (line,) = [line for line in out.splitlines() if line.startswith(start)]
    return _epsilon(line)


def test_runs_of_a_workdir_are_composed_each_once(job, capsys):
    code, out, _ = _exit(capsys, str(job))
    assert code == 0 and "log 1, 2 runs" in out
    # Steps of one mechanism: those of both runs, one after the other.
    spec = dataclasses.replace(_SMALL.spec, steps=7)
    whole = dataclasses.replace(_SMALL, spec=spec).epsilon(7, "pld")
    assert _total(out, "log 1, 2 runs") == pytest.approx(whole, rel=1e-4)
    # What was kept private counts if it is named.
    code, out, _ = _exit(capsys, str(job), str(job / "private" / "audited"))
    assert code == 0 and "log 1, 3 runs" in out


def test_logs_are_composed_only_as_declared(job, tmp_path, capsys):
    other = _write(tmp_path / "next", "n", pairs="keyed:2")
    assert _exit(capsys, str(job), str(other))[0] == 1
    code, out, _ = _exit(capsys, f"log={job}", f"log={other}")
    together = _total(out, "log, 3 runs")
    assert code == 0
    code, out, _ = _exit(capsys, f"jan={job}", f"feb={other}", "--disjoint=time")
    apart = _total(out, "all 2 logs disjoint by time")
    assert code == 0 and apart == max(_total(out, "jan"), _total(out, "feb"))
    assert apart < together


def test_runs_that_cannot_be_told_apart_or_composed_have_no_total(tmp_path, capsys):
    one = _write(tmp_path / "one", "a")
    pair = _write(tmp_path / "pair", "b", unit="pair")
    code, out, _ = _exit(capsys, f"log={one}", f"log={pair}")
    assert code == 1 and "DOES NOT HOLD" in out
    folders = [str(_write(tmp_path / name, None)) for name in ("copy", "or_other")]
    code, out, _ = _exit(capsys, *folders)
    assert code == 1 and "without a run id" in out


def test_artefact_that_lost_its_certificate_makes_the_total_unknown(job, capsys):
    folder = _write(job / "release" / "other", "s")
    certificate = json.loads((folder / "certificate.json").read_text())
    manifest = {"certificate": certificate, "guarantee": "certified"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert _exit(capsys, str(job))[0] == 0
    (folder / "certificate.json").unlink()
    code, out, _ = _exit(capsys, str(job))
    assert code == 1 and str(folder) in out

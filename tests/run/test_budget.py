"""`tfdpsq budget` composes the distinct runs of directories of artefacts."""

import dataclasses
import json

import pytest
from helpers import plans

from tfdpsq import privacy
from tfdpsq.run import budget

_PLAN = plans.plan(epsilon=1.0, num_units=200, batch_size=20, steps=4)


def _write(folder, head, steps=4, pairs="keyed:1", unit="query", **stage):
    """Writes what a run of `_PLAN` leaves; `head` is that of its ledger."""
    plan = privacy.make_plan(dataclasses.replace(_PLAN.spec, unit=unit))
    made = {"fingerprints": {"pairs": pairs}, "ledger_head": head}
    folder.mkdir(parents=True)
    certificate = plans.certificate(plan, steps, **made)
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
    _write(work / "release" / ".next.0123456789ab.partial", "d")
    _write(work / "evaluation", "e", guarantee="private")
    return work


def _exit(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        budget.main(["budget", *map(str, words), "--json"])
    said = capsys.readouterr()
    return caught.value.code, json.loads(said.out) if said.out else said.err


def test_runs_of_a_workdir_are_composed_each_once(job, capsys):
    code, found = _exit(capsys, job, "--budget=5")
    assert code == 0 and found["logs"][0]["runs"] == 2
    # Steps of one mechanism: those of both runs, one after the other.
    whole = dataclasses.replace(_PLAN, spec=dataclasses.replace(_PLAN.spec, steps=7))
    expected = whole.epsilon(7, "pld")
    assert found["together"]["epsilon"] == pytest.approx(expected, rel=1e-4)
    assert found["left"] == pytest.approx(5 - expected, rel=1e-3)
    assert _exit(capsys, job, "--budget=0.5")[0] == 1
    # What was kept private counts if it is named.
    code, found = _exit(capsys, job, job / "private" / "audited")
    assert code == 0 and found["logs"][0]["runs"] == 3


def test_logs_are_composed_only_as_declared(job, tmp_path, capsys):
    other = _write(tmp_path / "next", "n", pairs="keyed:2")
    assert _exit(capsys, job, other)[0] == 1
    one = _exit(capsys, f"log={job}", f"log={other}")[1]
    assert (one["logs"][0]["runs"], len(one["logs"])) == (3, 1)
    code, found = _exit(capsys, f"jan={job}", f"feb={other}", "--disjoint=time")
    parts = [log["epsilon"] for log in found["logs"]]
    assert code == 0
    assert found["together"]["epsilon"] == max(parts) < one["together"]["epsilon"]


def test_runs_that_cannot_be_told_apart_or_composed_have_no_total(tmp_path, capsys):
    one = _write(tmp_path / "one", "a")
    pair = _write(tmp_path / "pair", "b", unit="pair")
    code, found = _exit(capsys, f"log={one}", f"log={pair}", "--budget=9")
    assert code == 1 and found["together"] is found["left"] is None
    folders = [_write(tmp_path / name, None) for name in ("copy", "or_other")]
    code, found = _exit(capsys, *folders)
    assert code == 1 and "ledger head" in found["not_composed"][0]["why"]


def test_artefact_that_lost_its_certificate_makes_the_total_unknown(job, capsys):
    folder = _write(job / "release" / "other", "s")
    certificate = json.loads((folder / "certificate.json").read_text())
    manifest = {"certificate": certificate, "guarantee": "certified"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert _exit(capsys, job, "--budget=5")[0] == 0
    (folder / "certificate.json").unlink()
    code, found = _exit(capsys, job, "--budget=5")
    assert code == 1 and found["left"] is None
    (refused,) = found["not_composed"]
    assert str(folder) in json.dumps(refused)


@pytest.mark.parametrize(
    "words, message",
    [([], "usage:"), (["/none"], "does not exist"), (["@", "--delta=2"], "delta is 2")],
)
def test_bad_input_is_one_line_and_status_2(job, capsys, words, message):
    code, said = _exit(capsys, *[word.replace("@", str(job)) for word in words])
    assert code == 2 and message in said

"""`tfdpsq forget`: what is private goes, what proves a release stays."""

import fcntl
import json
import os

import pytest
from helpers import plans

from tfdpsq import privacy
from tfdpsq.run import forget, verify
from tfdpsq.run.core import layout, outputs, releases, sources
from tfdpsq.validation import InputError

_SECRET = "who sorts a list"
_KEPT = {
    "config.json",
    "release/generator/certificate.json",
    "release/generator/stage.json",
    "private/private_reads.jsonl",
    "private/runs/generator/ledger.jsonl",
    "private/notes.txt",
}


def _write(path, content=_SECRET):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def _stage(folder, guarantee, **files):
    stage = {"config": {}, "inputs": {}, "fingerprint": "f", "run": "r"}
    for name, content in files.items():
        _write(folder / name.replace("__", "."), content)
    _write(folder / "stage.json", json.dumps({**stage, "guarantee": guarantee}))


@pytest.fixture
def work(tmp_path):
    """A workdir with one release and what a job keeps private."""
    work = tmp_path / "work"
    private, run = work / "private", work / "private" / "runs" / "generator"
    run.mkdir(parents=True)
    plan = plans.plan(epsilon=1.0, num_units=200, batch_size=20, steps=4)
    with privacy.Ledger.open(
        run / "ledger.jsonl", plan.fingerprint, "keyed:1", 4
    ) as paid:
        for step in range(4):
            paid.pay(step)
        head = paid.head
    made = plans.certificate(plan, fingerprints={"pairs": "keyed:1"}, ledger_head=head)
    certificate = json.dumps(made)
    _stage(work / "release" / "generator", "certified", certificate__json=certificate)
    _stage(private / "generator_inf", "private", weights=_SECRET)
    _stage(work / "evaluation", "private", metrics__json=_SECRET)
    for name in ("run.json", "state/secrets.json", "rows/pairs/rows-00000"):
        _write(run / name)
    for name in ("private/logs/generator/log.jsonl", "private/fingerprint.key"):
        _write(work / name)
    _write(work / "release" / ".next.0123456789ab.partial" / "weights")
    _write(work / "report.html")
    _write(private / "private_reads.jsonl", "")
    _write(private / "notes.txt", "mine")
    _write(work / "config.json", "{}")
    return work


def _exit(capsys, command, *words):
    with pytest.raises(SystemExit) as caught:
        command.main(["command", *map(str, words)])
    said = capsys.readouterr()
    return caught.value.code, said.out, said.err


def _files(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_forget_lists_first_and_then_deletes_what_is_private(work, capsys):
    before = _files(work)
    code, out, _ = _exit(capsys, forget, work)
    assert (code, _files(work)) == (0, before)
    assert all(f"{work / name}\n" in out for name in before - _KEPT)
    code, _, _ = _exit(capsys, forget, work, "--delete")
    assert code == 0
    assert _files(work) == {*_KEPT, f"private/{layout.FORGOTTEN}"}
    # What was released still agrees with what was paid.
    ledger = work / "private" / "runs" / "generator" / "ledger.jsonl"
    certificate = work / "release" / "generator" / "certificate.json"
    code, _, _ = _exit(capsys, verify, certificate, f"--ledger={ledger}")
    assert code == 0


@pytest.mark.parametrize("place", ["release/next", "private/next", "next", ""])
def test_no_output_is_made_in_a_forgotten_workdir(work, place):
    outputs.mark_forgotten(work / "private")
    guarantee = "public" if "release" in place else "private"
    for call in (
        lambda: releases.Output(work / place, guarantee, "queries"),
        lambda: outputs.open_private(work / "private"),
        lambda: sources.keyed_fingerprint("f", work / "private"),
    ):
        with pytest.raises(InputError, match="tfdpsq forget"):
            call()
    releases.Output(work.parent / "other" / "next", guarantee, "queries")


def test_running_stage_is_not_deleted(work, capsys):
    before = _files(work)
    descriptor = os.open(work / "private/runs/generator/ledger.jsonl", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    code, out, err = _exit(capsys, forget, work, "--delete")
    os.close(descriptor)
    assert (code, out) == (2, "") and str(os.getpid()) in err
    assert _files(work) == before

"""`tfdpsq forget`: what is private goes, what proves a release stays."""

import fcntl
import json
import os
import shutil
import time

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq import privacy
from tfdpsq.data import shards, write_rows
from tfdpsq.privacy import checkpoint
from tfdpsq.run import budget, choose, convert, forget, pretrain, status, verify
from tfdpsq.run.core import layout, outputs, progress, releases, sources, workdir
from tfdpsq.run.passes import pass_progress
from tfdpsq.run.reproduction import reproduce_report
from tfdpsq.run.training import choice_points, private_training
from tfdpsq.validation import InputError

_STAGE = {"config": {}, "inputs": {}, "fingerprint": "f", "run": "r"}
_SECRET = "who sorts a list"


def _certificate(ledger):
    plan = plans.plan(epsilon=1.0, num_units=200, batch_size=20, steps=4)
    with privacy.Ledger.open(ledger, plan.fingerprint, "keyed:1", 4) as opened:
        for step in range(4):
            opened.pay(step)
        head = opened.head
    return plans.certificate(plan, fingerprints={"pairs": "keyed:1"}, ledger_head=head)


def _write(path, content=_SECRET):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def _stage(folder, guarantee, **files):
    for name, content in files.items():
        _write(folder / name.replace("__", "."), content)
    _write(folder / "stage.json", json.dumps({**_STAGE, "guarantee": guarantee}))


@pytest.fixture
def job(tmp_path):
    """A workdir with one release and all that a job keeps private."""
    work = tmp_path / "work"
    private, release = work / "private", work / "release"
    run = private / "runs" / "generator"
    run.mkdir(parents=True)
    certificate = json.dumps(_certificate(run / "ledger.jsonl"))
    _stage(release / "generator", "certified", certificate__json=certificate)
    _stage(release / "prepare", "public", public__jsonl="cut from documents")
    _write(release / ".next.0123456789ab.partial" / "weights")
    _write(run / "run.json")
    _write(run / "state" / "secrets.json")
    _write(run / "state" / "rows" / "rows-00000")
    _write(run / "rows" / "pairs" / "rows-00000")
    _write(private / "logs" / "generator" / "log.jsonl")
    _write(private / "choices" / "grid" / "points" / "a" / "stage.json")
    _stage(private / "generator_inf", "private", weights=_SECRET)
    _write(private / "fingerprint.key")
    _write(private / "private_reads.jsonl", "")
    _write(private / "seconds.json")
    _stage(work / "evaluation", "private", metrics__json=_SECRET)
    _write(work / "report.html")
    _write(work / "results.json")
    _write(work / "config.json", "{}")
    # The owner's own files, with and without a link out of the workdir.
    _write(tmp_path / "pairs" / "queries.jsonl")
    _write(private / "notes.txt", "mine")
    _write(private / "keep" / "deep" / "notes.txt", "mine")
    _write(private / "generator_inf" / "later.txt", "mine")
    _write(private / "logs" / "diary.txt", "mine")
    _write(private / "runs" / "generator" / "notes.txt", "mine")
    _write(private / "logs" / "generator" / "events.out.tfevents.1.vm.2.0.v2")
    later = time.time() + 100
    os.utime(private / "generator_inf" / "later.txt", (later, later))
    (private / "link").symlink_to(tmp_path / "pairs")
    (private / "generator_inf" / "data").symlink_to(tmp_path / "pairs")
    (private / "logs" / "queries").symlink_to(tmp_path / "pairs" / "queries.jsonl")
    return work


def _exit(capsys, command, *words):
    with pytest.raises(SystemExit) as caught:
        command.main(["command", *map(str, words)])
    said = capsys.readouterr()
    return caught.value.code, said.out, said.err


def _files(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


_LEFT = {
    "config.json",
    "release/generator/certificate.json",
    "release/generator/stage.json",
    "release/prepare/public.jsonl",
    "release/prepare/stage.json",
    "private/forgotten.json",
    "private/private_reads.jsonl",
    "private/runs/generator/ledger.jsonl",
    "private/notes.txt",
    "private/keep/deep/notes.txt",
    "private/generator_inf/later.txt",
    "private/logs/queries",
    "private/logs/diary.txt",
    "private/runs/generator/notes.txt",
}


def test_without_the_flag_it_lists_and_changes_nothing(job, capsys):
    before = _files(job)
    code, out, _ = _exit(capsys, forget, job)
    assert (code, _files(job)) == (0, before)
    listed = set(out.split("kept,")[0].split("\n")[1:])
    gone = before - _LEFT
    assert listed - {""} == {f"  {job / name}" for name in gone}
    assert "Nothing was deleted. Add --delete" in out


def test_what_a_link_under_release_leads_to_is_kept(job, capsys):
    """With it went the only certificate of something that was released."""
    kept = job / "private" / "generator_8"
    certificate = (job / "release" / "generator" / "certificate.json").read_text()
    _stage(kept, "certified", certificate__json=certificate)
    (job / "release" / "generator_8").symlink_to("../private/generator_8")
    made = forget.plan(job)
    assert made.linked == [kept / "certificate.json", kept / "stage.json"]
    assert not set(made.linked) & set(made.delete) and made.delete
    assert "KEPT, as a link under release/ leads to it" in forget.as_text(made, False)
    # One link after another, and what should never have been released.
    (kept / "scores").symlink_to(job / "evaluation")
    for path in (*made.unsure, job / "private/notes.txt"):
        path.unlink()
    code, out, _ = _exit(capsys, forget, job, "--delete")
    assert code == 1 and f"  {job / 'evaluation' / 'metrics.json'}\n" in out
    assert (kept / "certificate.json").read_text() == certificate
    (kept / "scores").unlink()
    code, out, _ = _exit(capsys, forget, job, "--delete")
    assert code == 0 and not (job / "evaluation").exists()
    assert (kept / "certificate.json").read_text() == certificate


def test_what_is_private_goes_and_what_proves_the_release_stays(job, tmp_path, capsys):
    code, out, _ = _exit(capsys, forget, job, "--delete")
    assert code == 1 and _files(job) == _LEFT  # for later.txt
    later = job / "private" / "generator_inf" / "later.txt"
    assert (
        "LEFT, newer than its stage, or of a name that no stage writes; delete what "
        f"is private:\n  {later}" in out
    )
    assert "left, as tfdpsq did not make it" in out
    assert f"  {job / 'private' / 'link'}\n" in out
    for path in job.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert _SECRET not in path.read_text()
    assert (tmp_path / "pairs" / "queries.jsonl").read_text() == _SECRET
    assert not (job / "evaluation").exists()
    # Nothing is left to do but what only the owner can decide on.
    code, out, _ = _exit(capsys, forget, job, "--delete")
    named = [job / "private/logs/diary.txt", job / "private/runs/generator/notes.txt"]
    assert code == 1 and all(f"  {path}\n" in out.split("LEFT,")[1] for path in named)
    for path in named:
        path.unlink()
    code, out, _ = _exit(capsys, forget, job, "--delete")
    assert code == 0 and "deleted 0 files" in out
    ledger = job / "private" / "runs" / "generator" / "ledger.jsonl"
    certificate = job / "release" / "generator" / "certificate.json"
    code, out, _ = _exit(capsys, verify, certificate, f"--ledger={ledger}")
    assert code == 0 and "agrees with itself and with the ledger" in out
    code, out, _ = _exit(capsys, budget, job)
    assert code == 0 and "together (1 run)" in out


def test_a_workdir_forgotten_by_half_takes_no_stage_and_is_finished(
    job, capsys, monkeypatch
):
    made = forget.plan(job)
    half = made.delete[: len(made.delete) // 2]
    rest = made.delete[len(made.delete) // 2 :]
    forget.forget(forget.Plan(made.private, half))
    assert all(path.exists() for path in rest)
    with pytest.raises(InputError, match="deleted by `tfdpsq forget`, all or in part"):
        outputs.open_private(made.private)
    with pytest.raises(InputError, match="use another workdir"):
        sources.keyed_fingerprint("f", made.private)
    code, _, _ = _exit(capsys, forget, job, "--delete")
    assert code == 1 and _files(job) == _LEFT
    with pytest.raises(InputError, match="use another workdir"):
        outputs.open_private(made.private)


@pytest.mark.parametrize(
    ("place", "private"),
    [
        ("release/next", ""),
        ("release/deep/next", ""),
        ("private/next", ""),
        ("next", ""),
        ("", ""),  # a job's workdir itself
        ("elsewhere/next", "private"),
        ("file", ""),  # by a link, as a URL
    ],
)
def test_no_output_is_made_in_a_workdir_that_was_forgotten(job, place, private):
    """synthesize, filter and convert need no private directory, and went on there."""
    (job.parent / "link").symlink_to(job)
    path = f"file://{job.parent}/link/release/x" if place == "file" else job / place
    given = str(job / private) if private else ""
    guarantee = "private" if "release" not in str(path) else "public"
    releases.Output(path, guarantee, "queries", given)
    outputs.mark_forgotten(job / "private")
    with pytest.raises(InputError, match="deleted by `tfdpsq forget`.*another workdir"):
        releases.Output(path, guarantee, "queries", given)
    releases.Output(job.parent / "other" / "next", guarantee, "queries")


@pytest.mark.parametrize("closed", ["work", "work/private"])
def test_a_directory_that_may_not_be_entered_is_named(tmp_path, monkeypatch, closed):
    """Not the mark of `forget` in it, which nobody has seen."""
    private, stat = tmp_path / "work" / "private", os.stat
    private.mkdir(parents=True)

    def refuse(path, **options):
        if str(path).startswith(f"{tmp_path / closed}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(InputError, match=f"^{tmp_path / closed}: Permission denied"):
        releases.require_not_forgotten(private)


def test_a_forgotten_workdir_takes_no_conversion(job, tmp_path):
    """A stage that reads and writes nothing else of the workdir."""
    outputs.mark_forgotten(job / "private")
    before = _files(job)
    with pytest.raises(InputError, match="deleted by `tfdpsq forget`"):
        convert.convert("t5_tiny_pydocs", job / "release" / "keras", "keras")
    assert _files(job) == before


def test_the_status_of_a_forgotten_workdir_says_so(job, capsys):
    _write(job / "private" / "logs" / "generator" / "log.jsonl", "")
    _write(job / "private" / "seconds.json", "{}")
    code, out, err = _exit(capsys, status, job)
    assert code == 0 and "was forgotten" not in out, err
    run = job / "private" / "runs" / "next"
    run.mkdir()
    shutil.copy(job / "private/runs/generator/ledger.jsonl", run)
    _exit(capsys, forget, job, "--delete")
    code, out, _ = _exit(capsys, status, job)
    (line,) = [line for line in out.splitlines() if " next " in line]
    assert "interrupted" in line and "deleted by `tfdpsq forget`" in line
    assert "seeds are gone" not in out and "the workdir was forgotten" in out


def test_files_that_cannot_be_deleted_are_named(job, capsys, monkeypatch):
    key = job / "private" / "fingerprint.key"
    unlink = type(key).unlink

    def refuse(path, *args, **kwargs):
        if path == key:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(type(key), "unlink", refuse)
    code, out, _ = _exit(capsys, forget, job, "--delete")
    assert code == 1 and f"NOT deleted, check its permissions:\n  {key}" in out
    assert key.is_file() and _files(job) == {*_LEFT, "private/fingerprint.key"}


def test_a_running_stage_is_not_deleted(job, capsys):
    before = _files(job)
    for path in (
        job / "release" / ".next.0123456789ab.partial",
        job / "private" / "runs" / "generator" / "ledger.jsonl",
    ):
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        code, out, err = _exit(capsys, forget, job, "--delete")
        os.close(descriptor)
        assert (code, out) == (2, "") and f"in use by process {os.getpid()}" in err
    assert _files(job) == before


def test_what_is_no_workdir_is_refused(job, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    shutil.move(job / "private", tmp_path / "elsewhere")
    (job / "private").symlink_to(tmp_path / "elsewhere")
    for words, message in (
        ([], "usage:"),
        ([tmp_path / "none"], "none is not a directory of this machine"),
        ([tmp_path / "empty"], "holds nothing that tfdpsq made"),
        ([tmp_path / "pairs"], "holds nothing that tfdpsq made"),
        (["gs://bucket/job"], "is not a directory of this machine"),
        ([job], "which is not followed. Give the directory itself"),
        ([job, f"--private={tmp_path / 'none'}"], "does not exist"),
        ([job, "--private="], "--private is '', an empty value"),
        ([job, "--yes"], "Unknown command line flag 'yes'"),
    ):
        code, out, err = _exit(capsys, forget, *words, "--delete")
        assert (code, out) == (2, "") and message in err, err
    code, _, _ = _exit(
        capsys, forget, job, f"--private={tmp_path / 'elsewhere'}", "--delete"
    )
    assert code == 1
    assert not (tmp_path / "elsewhere" / "fingerprint.key").exists()


def test_an_empty_name_is_not_the_current_directory(job, capsys, monkeypatch):
    """A script's unset variable would delete what is private there."""
    monkeypatch.chdir(job)
    before = _files(job)
    code, out, err = _exit(capsys, forget, "", "--delete")
    assert (code, out) == (2, "") and "workdir is given as an empty value" in err
    assert _files(job) == before


def test_all_that_killed_stages_write_in_private_is_known(tmp_path, capsys):
    """Tokenised pairs of a plain training were left, as of a name that none writes."""
    work = tmp_path / "work"
    private = work / "private"
    run = private / workdir.RUNS / "retriever"
    outputs.open_private(private)
    inputs = {"pairs": "keyed:1"}
    with private_training.open_run(run, {"steps": 3}, inputs, work / "retriever"):
        pass
    secrets = checkpoint.open_secrets(run, 0, {})
    checkpoint.save(run, 0, [tf.Variable([1.0])], secrets)
    for rows in (
        run / private_training.ROWS / "pairs",
        run / checkpoint.STATE / "rows",
    ):
        write_rows(rows, iter([{"ids": np.zeros([4, 3], np.int32)}]))
    log = progress.log_directory(work / "retriever")
    with progress.Progress(log, 1) as bar:
        bar(1, 2.0)
    pass_progress._say(log, 0, 1, 1, {"rows": 1, "rows_per_second": 2.0})
    for path in (
        run / f".{private_training.RUN_FILE}.0123456789ab.partial",
        log / f".{layout.CURVE_FILE}.0123456789ab.partial",
        private / ".seconds.json.0123456789ab.partial",
        private / choose.CHOICES / "grid" / choice_points.PLAN_FILE,
        private / choose.CHOICES / "grid" / choose.CHOICE_FILE,
        private / choose.CHOICES / "grid" / choose.SCORES / "a.json",
    ):
        _write(path)
    made = forget.plan(work)
    assert (made.unsure, made.left) == ([], [])
    assert set(made.delete) == {path for path in private.rglob("*") if path.is_file()}
    code, _, _ = _exit(capsys, forget, work, "--delete")
    assert code == 0 and _files(work) == {"private/forgotten.json"}


def test_unfinished_directories_are_ours_by_their_records(tmp_path, capsys):
    """`.my-thesis.state` was deleted, whose name is all that it shares with ours."""
    work = tmp_path / "work"
    _write(work / "private" / "fingerprint.key")
    ours = work / "private" / ".set.shards", work / ".generator.state"
    shards.ShardDirectory(ours[0], shards.PassSpec("a", 2, {}, {})).open()
    pretrain._open_state(ours[1], {"steps": 3}, {"documents": "d"})
    for folder in ours:
        _write(folder / "deep" / "part-00000")
    theirs = [
        work / "private" / ".keys.shards" / "ssh",
        work / ".my-thesis.state" / "chapter.txt",
        work / ".my-thesis.state" / "deep" / "notes.txt",
        work / "release" / ".notes.state" / "run.json",
    ]
    for path in theirs:
        _write(path, "[]")
    made = forget.plan(work)
    assert sorted(made.unsure) == sorted(theirs)
    records = [ours[1] / "run.json", ours[0] / "pass.json"]
    assert sorted(made.delete[-2:]) == sorted(records)  # last, if it is killed
    code, out, _ = _exit(capsys, forget, work, "--delete")
    assert code == 1 and all(f"  {path}\n" in out.split("LEFT,")[1] for path in theirs)
    assert _files(work) == {
        "private/forgotten.json",
        *(path.relative_to(work).as_posix() for path in theirs),
    }
    assert not any(folder.exists() for folder in ours)


def test_an_output_next_to_its_private_directory_is_known(tmp_path, capsys):
    """A single stage's: OUT/generator, with OUT/private."""
    _stage(tmp_path / "out" / "generator", "certified", weights="w")
    _write(tmp_path / "out" / "private" / workdir.RUNS / "generator" / "run.json")
    code, _, _ = _exit(capsys, forget, tmp_path / "out", "--delete")
    assert code == 0
    assert _files(tmp_path / "out") == {
        "generator/stage.json",
        "generator/weights",
        "private/forgotten.json",
    }


def test_the_pages_of_a_reproduction_are_deleted(job, capsys):
    """Its examples quote private queries, and were said not to be tfdpsq's."""
    assert {reproduce_report.RESULTS_FILE, reproduce_report.PAGE_FILE} < {
        *layout.JOB_FILES
    }
    pages = [job / name for name in layout.JOB_FILES]
    pages += [job / "private" / name for name in layout.EXAMPLE_FILES]
    pages += [p.with_name(f".{p.name}.0123456789ab.partial") for p in pages]
    for path in pages:
        _write(path)
    assert set(pages) < set(forget.plan(job).delete)
    _exit(capsys, forget, job, "--delete")
    assert not any(path.exists() for path in pages)
    # In what is no job's workdir they are somebody's own.
    (job / "config.json").unlink()
    for path in pages:
        _write(path)
    made = forget.plan(job)
    assert not set(pages) & set(made.delete)
    assert set(pages[len(layout.JOB_FILES) :][:2]) < set(made.left)


@pytest.mark.parametrize("place", ["private/sets", "sets"])
def test_an_output_for_each_set_is_deleted(job, place, capsys):
    """`zero_shot` has no `stage.json` of its own: private judgements were left."""
    folder = job / place
    for name in ("mine", "cqadupstack/android"):
        _stage(folder / layout.SETS / name, "private", qrels__trec=_SECRET)
    _write(folder / layout.SETS / ".next.0123456789ab.partial" / "qrels.trec")
    _write(folder / "metrics.json")
    _write(folder / ".metrics.json.0123456789ab.partial")
    public = job / "public"
    _stage(public / layout.SETS / "scifact", "public", qrels__trec="d")
    _write(public / "metrics.json", "{}")
    before = _files(public)
    _exit(capsys, forget, job, "--delete")
    assert not folder.exists() and _files(public) == before
    _write(folder / layout.SETS / ".next.0123456789ab.partial" / "qrels.trec")
    _exit(capsys, forget, job, "--delete")
    assert not folder.exists()


def test_an_output_with_one_private_set_is_private(job):
    """Wherever among its sets that one is."""
    for name, guarantee in (("a", "public"), ("b", "private"), ("c", "public")):
        folder = job / "sets" / layout.SETS / name
        _stage(folder, guarantee, qrels__trec=_SECRET)
    gone = job / "sets" / layout.SETS / "b" / "qrels.trec"
    assert gone in forget.plan(job).delete


@pytest.mark.parametrize("name", ["a", "private"])
def test_a_private_point_of_a_grid_is_deleted(job, name, capsys):
    """Also one that is called as the private directory is."""
    _stage(job / "points" / name, "private", weights=_SECRET)
    _exit(capsys, forget, job, "--delete")
    assert not (job / "points" / name).exists()


def test_a_ledger_in_an_output_is_kept(job, capsys):
    """It proves what was paid for, wherever a training was told to keep it."""
    kept = job / "private" / "generator_8" / "ledger.jsonl"
    _stage(kept.parent, "private", ledger__jsonl="steps", weights=_SECRET)
    _exit(capsys, forget, job, "--delete")
    assert kept.is_file() and not (kept.parent / "weights").exists()


def test_no_time_of_the_release_tells_when_it_was_forgotten(job, capsys):
    _exit(capsys, forget, job, "--delete")
    assert not list((job / "release").glob(".next.*"))
    assert (job / "release").stat().st_mtime == outputs.MODIFIED


def test_outputs_deeper_in_a_private_directory_are_named(job, capsys):
    """They were called not made by tfdpsq, and the workdir forgotten."""
    for path in forget.plan(job).unsure:
        path.unlink()
    deeper = job / "private" / "tests" / "evaluation"
    _stage(deeper, "private", metrics__json=_SECRET)
    code, out, _ = _exit(capsys, forget, job, "--delete")
    assert code == 1 and f"  {deeper / 'metrics.json'}\n" in out.split("LEFT,")[1]


def test_a_directory_is_private_only_if_a_stage_kept_secrets_there(
    job, tmp_path, capsys
):
    home = tmp_path / "home"
    _write(home / "logs" / "boot.log", "mine")
    _write(home / "runs" / "2024" / "result.txt", "mine")
    before = _files(tmp_path)
    for words, message in (
        ([f"--private={home}"], "so that no stage kept its secrets there"),
        ([f"--private={job / 'release'}"], "is released, and certificates would be"),
        ([f"--private={job}"], "itself, released artefacts included"),
        ([f"--private={tmp_path}"], "itself, released artefacts included"),
    ):
        code, out, err = _exit(capsys, forget, job, *words, "--delete")
        assert (code, out) == (2, "") and message in err, err
    for part in ("private", "release"):
        code, _, err = _exit(capsys, forget, job / part, "--delete")
        assert code == 2 and "Give the workdir that it is in" in err
    # Nor is one called so in a directory with nothing of ours.
    _write(tmp_path / "project" / "private" / "logs" / "diary.txt", "mine")
    code, _, err = _exit(capsys, forget, tmp_path / "project", "--delete")
    assert code == 2 and "holds nothing that tfdpsq made" in err
    assert _files(tmp_path) == before | {"project/private/logs/diary.txt"}


@pytest.mark.parametrize("beside", [False, True])
def test_another_private_directory_of_a_stage_is_named(job, tmp_path, capsys, beside):
    """Its seeds and its key are there, whatever else was deleted."""
    place = tmp_path / "elsewhere" if not beside else job.parent / "secrets"
    _write(place / "fingerprint.key")
    _write(place / "runs" / "other" / "run.json")
    config = {"private_directory": str(place)}
    stage = {**_STAGE, "config": config, "guarantee": "certified"}
    stage["written_in"] = str(job / "release" / "other")
    _write(job / "release" / "other" / "stage.json", json.dumps(stage))
    own = forget.plan(job)
    assert own.elsewhere == [place]
    with pytest.raises(SystemExit) as caught:
        forget.main(["forget", str(job), "--delete"])
    said = capsys.readouterr().out
    assert caught.value.code == 1 and f"--private=DIRECTORY:\n  {place}" in said
    with pytest.raises(SystemExit):
        forget.main(["forget", str(job), f"--private={place}", "--delete"])
    assert not (place / "fingerprint.key").exists()
    assert forget.plan(job).elsewhere == []


def test_a_copy_of_a_workdir_does_not_name_the_first_one(job, tmp_path):
    config = {"private_directory": str(job / "private")}
    stage = {**_STAGE, "config": config, "guarantee": "certified"}
    stage["written_in"] = str(job / "release" / "other")
    _write(job / "release" / "other" / "stage.json", json.dumps(stage))
    shutil.copytree(job, tmp_path / "copy", symlinks=True)
    assert forget.plan(tmp_path / "copy").elsewhere == []


def test_nothing_is_made_in_a_private_directory_that_was_forgotten(tmp_path):
    outputs.mark_forgotten(outputs.open_private(tmp_path / "private"))
    for place in ("private/next", "private/deep/next", "release/next", "next"):
        with pytest.raises(InputError, match="deleted by `tfdpsq forget`"):
            releases.Output(tmp_path / place, releases.PUBLIC, "documents")


def test_on_a_full_disk_logs_make_room_for_the_mark(job, monkeypatch):
    tries, mark = [], outputs.mark_forgotten

    def full(private):
        tries.append((private / "logs" / "generator" / "log.jsonl").exists())
        if tries[-1]:
            raise InputError("no space is left")
        mark(private)

    monkeypatch.setattr(outputs, "mark_forgotten", full)
    assert forget.forget(forget.plan(job)) == []
    assert tries == [True, False]
    assert (job / "private" / layout.FORGOTTEN).is_file()
    assert not (job / "private" / "fingerprint.key").exists()

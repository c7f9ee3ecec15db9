"""`tfdpsq forget` and a stage at the same time: one of them is refused.

A lock is of an open file, so a second one in this process stands for another's.
"""

import contextlib
import fcntl
import os
import shutil

import pytest
import test_forget

from tfdpsq.privacy import checkpoint
from tfdpsq.run import forget
from tfdpsq.run.core import layout, locks, outputs, releases, workdir
from tfdpsq.run.training import private_training
from tfdpsq.validation import InputError

_FORGOTTEN = "deleted by `tfdpsq forget`"

job = test_forget.job  # the fixture


def _output(job, guarantee="private", place="private/next"):
    return releases.Output(job / place, guarantee, "private queries")


@contextlib.contextmanager
def _held(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _delete(job, capsys):
    code, _, told = test_forget._exit(capsys, forget, job, "--delete")
    return code, told


def test_an_output_declared_before_its_workdir_was_forgotten_is_not_made(job):
    """`mine` hashes a corpus in between, and wrote what private queries match."""
    private, evaluation = _output(job), _output(job, place="next")
    release = _output(job, "certified", "release/next")
    outputs.mark_forgotten(job / "private")
    before = test_forget._files(job)
    for output in (private, evaluation):
        with pytest.raises(InputError, match=_FORGOTTEN):
            with workdir.new_directory(output):
                raise AssertionError("the stage would write there")
    assert test_forget._files(job) == before
    # What is not deleted is not refused: its budget was spent.
    with outputs.filled(release) as partial:
        shutil.copy(job / "release/generator/certificate.json", partial)
    assert (release.place / "certificate.json").is_file()


def test_an_output_whose_workdir_is_forgotten_while_it_is_made_is_removed(job):
    output = _output(job)
    with pytest.raises(InputError, match=_FORGOTTEN):
        with workdir.new_directory(output) as partial:
            (partial / "queries").write_text("who sorts a list")
            outputs.mark_forgotten(job / "private")
    assert not list((job / "private").glob("*next*"))


def test_an_output_is_locked_until_it_has_its_name(job, monkeypatch):
    """Its lock was let go of before: `forget` deleted what was being renamed."""
    named, rename = [], os.rename

    def seen(source, target):
        named.append((target.name, locks.holders([source])))
        rename(source, target)

    monkeypatch.setattr(os, "rename", seen)
    with workdir.new_directory(_output(job)) as partial:
        (partial / "queries").write_text("who sorts a list")
    assert named == [("next", [os.getpid()])]
    assert locks.holders([job / "private" / "next"]) == []


def test_a_stage_that_begins_after_the_first_look_is_not_deleted(
    job, capsys, monkeypatch
):
    """It was in no list of paths to look for locks of."""
    partial = job / "private" / ".next.0123456789ab.partial"
    mark = outputs.mark_forgotten
    before = test_forget._files(job)
    with contextlib.ExitStack() as stage, monkeypatch.context() as patch:

        def begun(private):
            partial.mkdir()
            stage.enter_context(_held(partial))
            mark(private)

        patch.setattr(outputs, "mark_forgotten", begun)
        code, told = _delete(job, capsys)
        assert code == 2 and f"in use by process {os.getpid()}" in told
        assert test_forget._files(job) == before  # the mark, too, is not there
        outputs.open_private(job / "private")
    code, _ = _delete(job, capsys)
    assert code == 1 and test_forget._files(job) == test_forget._LEFT


def test_an_output_named_between_the_walk_and_the_look_for_locks_is_deleted(
    job, capsys, monkeypatch
):
    partial = job / "private" / ".next.0123456789ab.partial"
    test_forget._stage(partial, "private", queries="who sorts a list")
    holders = locks.holders

    def named_before(paths):
        if (job / "private" / layout.FORGOTTEN).exists() and partial.exists():
            partial.rename(job / "private" / "next")
        return holders(paths)

    monkeypatch.setattr(locks, "holders", named_before)
    _delete(job, capsys)
    assert not partial.exists() and test_forget._files(job) == test_forget._LEFT


def test_what_was_marked_and_not_deleted_is_deleted_by_the_same_command(job, capsys):
    """Killed after the mark; it stays where the next attempt is refused."""
    outputs.mark_forgotten(job / "private")
    before = test_forget._files(job)
    with _held(job / "private" / "runs" / "generator" / "ledger.jsonl"):
        code, told = _delete(job, capsys)
    assert code == 2 and "in use by process" in told
    assert test_forget._files(job) == before
    code, _ = _delete(job, capsys)
    assert code == 1 and test_forget._files(job) == test_forget._LEFT


def test_a_run_that_was_locked_after_the_mark_keeps_no_secrets(job, monkeypatch):
    run, held = job / "private" / "runs" / "next", workdir.held

    def late(directory, message):
        outputs.mark_forgotten(job / "private")
        return held(directory, message)

    monkeypatch.setattr(workdir, "held", late)
    with pytest.raises(InputError, match=_FORGOTTEN):
        with private_training.open_run(run, {}, {}, job / "next"):
            raise AssertionError("the run would make seeds")
    assert not list(run.iterdir())


def test_a_run_that_ends_in_a_forgotten_workdir_discards_its_seeds(job):
    """It was refused to, and they were left."""
    run = job / "private" / "runs" / "next"
    with private_training.open_run(run, {}, {}, job / "next"):
        checkpoint.open_secrets(run, 0, {})
    outputs.mark_forgotten(job / "private")
    private_training.close_run(run, job / "next")
    assert not checkpoint.is_open(run)

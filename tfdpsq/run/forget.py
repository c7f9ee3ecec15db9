"""Delete what is private in a workdir, and keep what proves its releases.

    python -m tfdpsq.run.forget WORKDIR             # lists what would be deleted
    python -m tfdpsq.run.forget WORKDIR --delete    # deletes it

| deleted                                              | kept                         |
|------------------------------------------------------|------------------------------|
| outputs under `private/`, and others whose           | what is finished in release/ |
| `stage.json` states the guarantee "private"          |                              |
| `private/runs/*`: seeds, states, tokenised pairs     | `ledger.jsonl` of every run  |
| `private/logs/`, `private/choices/`, durations       | `private_reads.jsonl`        |
| `private/fingerprint.key`                            | certificates, `config.json`  |
| `report.html`, `results.json`, `tables.*`,           |                              |
| `private/examples.*`                                 |                              |
| unfinished outputs: `.NAME.*.partial`, `.shards`, …  | what tfdpsq did not make     |

`verify CERTIFICATE --ledger=LEDGER` works as before. Ledgers and the list
of private reads hold no query: steps, hashes, and kinds of reads. Without the key,
nobody can test guesses at the pairs on the fingerprints in certificates, nor show which
pairs were trained on. Files are removed, not overwritten: snapshots, backups and copies
elsewhere are yours to delete.

What a link under `release/` leads to is released, wherever it is: it is kept and
listed. Other links are not followed, and neither links nor files that tfdpsq does not
write are deleted: they are listed as left. A file in a stage's directory that is newer
than its `stage.json` counts as yours, and so does one among runs and logs whose name no
stage writes, and what is in a `.NAME.state` or `.NAME.shards` without the record of a
run or pass. A workdir that was forgotten takes no further stage; one that was forgotten
by half is finished by the same command.

    --private=DIR    the private directory, if not the default one

Exit status: 0 nothing of ours is left to delete, or it was only listed; 1 something
private could not be deleted, or files that may be private were left, be it for a link
under `release/` or in another private directory; 2 no workdir, a stage is running, or a
wrong command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import stat
from collections.abc import Iterator, Sequence
from typing import NoReturn

from absl import app, flags

from tfdpsq import validation
from tfdpsq.data.shards import PASS_FILE
from tfdpsq.privacy import checkpoint
from tfdpsq.privacy.proof import certificate_files, ledger, reads
from tfdpsq.run.core import (
    command,
    layout,
    locks,
    outputs,
    point_log,
    releases,
    workdir,
)

_USAGE = "usage: python -m tfdpsq.run.forget WORKDIR [--delete] [--private=DIR]\n"
_KEY = "fingerprint.key"
# In every directory of a run that was begun.
_OF_RUNS = (ledger.FILE_NAME, layout.RUN_FILE)


def _temporary(*names: str) -> re.Pattern:
    """Returns a pattern of what a command that was killed left of files."""
    return re.compile(
        rf"\.({'|'.join(map(re.escape, names))})\.[0-9a-f]{{12}}(\.partial)?"
    )


# Of files in a private directory; in that of a job; in a job's workdir; of `zero_shot`.
_TEMPORARY = _temporary(*outputs.PRIVATE_FILES, layout.FORGOTTEN)
_OF_EXAMPLES = _temporary(*layout.EXAMPLE_FILES)
_OF_JOBS = _temporary(*layout.JOB_FILES)
_OF_SETS = _temporary(layout.METRICS_FILE, certificate_files.FILE_NAME)
# Folders of a workdir that hold outputs, besides the private one.
_FOLDERS = (".", releases.RELEASE_FOLDER, "points")


def _names(files: Sequence[str], folders: Sequence[str]) -> str:
    """Returns a pattern of files, finished or not, and of all that is in folders."""
    file, folder = ("|".join(map(re.escape, names)) for names in (files, folders))
    return rf"({file})|\.({file})\.[0-9a-f]{{12}}\.partial|({folder})/.*"


# In `outputs.PRIVATE_FOLDERS`, paths below one run's directory that stages write.
_WRITTEN = {
    layout.RUNS: _names(
        [layout.RUN_FILE, ledger.FILE_NAME], [checkpoint.STATE, layout.ROWS]
    ),
    layout.LOGS: rf"({layout.PROCESS}\d+/)?("
    + _names([point_log.FILE_NAME, layout.CURVE_FILE], [])
    + rf"|{re.escape(layout.EVENTS)}.*)",
}
# Of unfinished directories with names that others use, too: the record that is written
# first in it, and two of its entries.
_RECORDS = {
    "state": (layout.RUN_FILE, ("config", "inputs")),
    "shards": (PASS_FILE, ("settings", "inputs")),
}
# In private/, besides what `outputs` names: files that prove something.
_PROOFS = (reads.FILE_NAME, ledger.FILE_NAME, layout.FORGOTTEN)


@dataclasses.dataclass
class Plan:
    """The files of a workdir to delete, keep and leave.

    Attributes:
      private: its private directory.
      delete: files, in the order in which they are deleted.
      folders: directories that are removed where they are empty, innermost first.
      kept: files in the private directory that prove the releases.
      linked: files that would be deleted, had no link under `release/` released them.
      left: what tfdpsq did not make, in or among what is deleted.
      unsure: files in a stage's output that are newer than its `stage.json`, among
        runs and logs with names that no stage writes, in an unfinished directory
        without a record, or around outputs deeper in the private directory: somebody's
        own, of another workdir, or of one whose copy did not keep file times.
      elsewhere: other private directories that stages of the workdir had.
    """

    private: pathlib.Path
    delete: list[pathlib.Path] = dataclasses.field(default_factory=list)
    folders: list[pathlib.Path] = dataclasses.field(default_factory=list)
    kept: list[pathlib.Path] = dataclasses.field(default_factory=list)
    linked: list[pathlib.Path] = dataclasses.field(default_factory=list)
    left: list[pathlib.Path] = dataclasses.field(default_factory=list)
    unsure: list[pathlib.Path] = dataclasses.field(default_factory=list)
    elsewhere: list[pathlib.Path] = dataclasses.field(default_factory=list)


def plan(directory: str | os.PathLike, private: str | None = None) -> Plan:
    """Decides what is deleted in a workdir; changes nothing.

    `directory` is the workdir of a job, or the one that stages' outputs are in;
    `private` is its private directory, by default `private` in it.

    Raises:
      InputError: it is not a workdir, its private directory is a link or none of ours,
        or a stage is running.
    """
    validation.given_path("the workdir", directory)
    root = pathlib.Path(directory)
    if "://" in os.fspath(directory) or not root.is_dir():
        raise validation.InputError(
            f"{directory} is not a directory of this machine. Give a workdir."
        )
    if root.resolve().name in (releases.PRIVATE_FOLDER, releases.RELEASE_FOLDER):
        raise validation.InputError(
            f"{root} is a part of a workdir. Give the workdir that it is in."
        )
    if private is not None and not private.strip():  # the current directory, else
        raise validation.InputError(
            f"--private is {private!r}, an empty value. Give the directory that stages "
            "had as private_directory, or leave --private out."
        )
    own = root / releases.PRIVATE_FOLDER if private is None else pathlib.Path(private)
    if own.is_symlink():
        raise validation.InputError(
            f"{own} is a link to {os.readlink(own)}, which is not followed. Give the "
            "directory itself, with --private=DIRECTORY."
        )
    made = Plan(own)
    if private is not None:
        _require_private(own, root)
    ours = own.is_dir() and (_is_private(own) or any(map(_stated, _folders(root))))
    job = (root / workdir.CONFIG_FILE).is_file()
    if ours:
        _plan_private(made, own, job)
    for name in _FOLDERS:
        folder = root / name
        if folder.is_dir() and not folder.is_symlink():
            _plan_outputs(made, folder, own)
    known = ours and (made.delete or made.kept)
    if not known and not any(map(_stated, _folders(root))):
        raise validation.InputError(
            f"{root} holds nothing that tfdpsq made. Give the workdir of a job, or the "
            "directory that stages' outputs are in."
        )
    if job:
        made.delete += _files(root, layout.JOB_FILES, _OF_JOBS)
    _keep_linked(made, root / releases.RELEASE_FOLDER)
    made.elsewhere = sorted(_elsewhere(root, own))
    busy = locks.holders([root, *made.delete, *made.folders, *made.kept])
    if busy:
        raise validation.InputError(
            f"{root} is in use by process {', '.join(map(str, busy))}. Stop it, or "
            "wait until it is finished."
        )
    # Last, so that what was forgotten by half is known for what it is.
    known_by = (releases.STAGE_FILE, *(name for name, _ in _RECORDS.values()))
    made.delete.sort(key=lambda path: path.name in known_by)
    made.folders.sort(key=lambda path: len(path.parts), reverse=True)
    return made


def plan_marked(directory: str | os.PathLike, private: str | None = None) -> Plan:
    """Decides what is deleted in a workdir that takes no stage from then on.

    A stage that began before the mark and looked for it has locked what it makes.

    Raises:
      InputError: as `plan`; where a stage began meanwhile, the mark is removed again.
        Or the mark cannot be written.
    """
    made = plan(directory, private)  # a running stage goes on without a mark
    marked = _is_marked(made)
    _mark(made)
    try:
        # Twice: the first time, an output that gets its name after the walk and before
        # the look for locks is missed by both.
        for _ in range(2):
            made = plan(directory, private)
    except validation.InputError:
        if not marked:  # else something may be deleted already
            outputs.unmark_forgotten(made.private)
        raise
    return made


def forget(made: Plan) -> list[pathlib.Path]:
    """Deletes what a plan lists.

    Returns:
      Files that could not be deleted.

    Raises:
      InputError: the mark that the workdir was forgotten cannot be written.
    """
    _mark(made)
    failed = []
    for path in made.delete:
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError:
            failed.append(path)
    for folder in made.folders:
        try:
            folder.rmdir()
        except OSError:  # it holds something of somebody else's
            continue
    for folder in {path.parent for path in made.delete}:
        outputs.settle(folder / "x")
    return failed


def _is_marked(made: Plan) -> bool:
    """Returns whether the private directory is known to be forgotten."""
    return (made.private / layout.FORGOTTEN).exists()


def _mark(made: Plan) -> None:
    """Marks the private directory, if something of ours is in it.

    On a full disk after deleting logs and rows: no stage needs those to be right.
    """
    ours = any(made.private in path.parents for path in [*made.delete, *made.kept])
    if not ours or _is_marked(made):
        return
    try:
        outputs.mark_forgotten(made.private)
    except validation.InputError:
        spare = [p for p in made.delete if {layout.LOGS, layout.ROWS} & {*p.parts}]
        for path in spare:
            with contextlib.suppress(OSError):
                path.unlink()
        outputs.mark_forgotten(made.private)


def _require_private(own: pathlib.Path, root: pathlib.Path) -> None:
    """Refuses a directory given as private that no stage kept its secrets in."""
    problem = None
    if not own.is_dir():
        problem = "does not exist"
    elif releases.is_released(own):
        problem = "is released, and certificates would be deleted"
    elif own.resolve() in (root.resolve(), *root.resolve().parents):
        problem = f"holds {root} itself, released artefacts included"
    elif not _is_private(own):
        problem = (
            f"holds no {_KEY}, {reads.FILE_NAME} or ledger, so that no stage kept its "
            "secrets there"
        )
    if problem:
        raise validation.InputError(
            f"--private is {own}, which {problem}. Give the directory that stages had "
            "as private_directory."
        )


def _is_private(own: pathlib.Path) -> bool:
    """Returns whether something in a directory shows that stages kept secrets there."""
    runs = (own / workdir.RUNS).glob("*")
    return any((own / name).is_file() for name in (*_PROOFS, _KEY)) or any(
        (run / name).is_file() for run in runs for name in _OF_RUNS
    )


def _elsewhere(root: pathlib.Path, own: pathlib.Path) -> set[pathlib.Path]:
    """Returns private directories of stages here besides `own`, but forgotten ones."""
    named = {root / releases.PRIVATE_FOLDER}
    for folder in (*(root / name for name in _FOLDERS), own):
        for path in _folders(folder) if folder.is_dir() else ():
            stage = path / releases.STAGE_FILE
            config = certificate_files.stated(stage, "config")
            given = config.get("private_directory") if isinstance(config, dict) else ""
            if not isinstance(given, str) or not os.path.isabs(given):
                continue
            # A moved or copied workdir may have its private directory next to it.
            before = certificate_files.stated(stage, workdir.WRITTEN_IN)
            moved = given
            if isinstance(before, str) and os.path.isabs(before):
                beside = os.path.relpath(given, before)
                moved = os.path.normpath(os.path.join(os.path.abspath(path), beside))
            named.add(pathlib.Path(moved if os.path.isdir(moved) else given))
    return {
        path
        for path in named
        if path.is_dir()
        and not path.is_symlink()
        and _is_private(path)
        and not (path / layout.FORGOTTEN).exists()
        and not (own.is_dir() and path.samefile(own))
    }


def _plan_private(made: Plan, own: pathlib.Path, job: bool) -> None:
    """Plans for a private directory: by name, or as stages' outputs.

    `job` says that it is in the workdir of a whole job.
    """
    examples = _files(own, layout.EXAMPLE_FILES, _OF_EXAMPLES) if job else []
    made.delete += examples
    for path in sorted(own.iterdir()):
        name = path.name
        if path.is_symlink():
            made.left.append(path)
        elif path.is_file():
            if name in _PROOFS:
                made.kept.append(path)
            elif name in outputs.PRIVATE_FILES or _TEMPORARY.fullmatch(name):
                made.delete.append(path)
            elif path not in examples:
                made.left.append(path)
        elif name in outputs.PRIVATE_FOLDERS:
            _plan_tree(made, path, None, _WRITTEN[name])
        elif releases.UNFINISHED.fullmatch(name):
            _plan_unfinished(made, path)
        elif _stated(path):
            _plan_tree(made, path, path / releases.STAGE_FILE)
        elif sets := _sets_of(path):
            _plan_sets(made, path, sets)
        elif any(map(_stated, path.rglob("*"))):
            made.unsure += sorted(each for each in path.rglob("*") if _is_file(each))
        else:
            made.left.append(path)


def _plan_outputs(made: Plan, folder: pathlib.Path, own: pathlib.Path) -> None:
    """Plans for private and unfinished outputs outside a private directory."""
    for path in _folders(folder):
        stage = path / releases.STAGE_FILE
        if path.name == own.name and path.samefile(own):
            continue
        if releases.UNFINISHED.fullmatch(path.name):
            _plan_unfinished(made, path)
        elif _guarantee(path) == releases.PRIVATE:
            _plan_tree(made, path, stage)
        elif sets := _sets_of(path):
            states = {_guarantee(each) for each in sets} - {None}
            if not states or releases.PRIVATE in states:
                _plan_sets(made, path, sets)


def _plan_sets(made: Plan, folder: pathlib.Path, sets: list[pathlib.Path]) -> None:
    """Plans to delete an output of `zero_shot`, which has one for each of its sets."""
    for path in sets:
        if releases.UNFINISHED.fullmatch(path.name):
            _plan_unfinished(made, path)
        else:
            _plan_tree(made, path, path / releases.STAGE_FILE)
    names = (layout.METRICS_FILE, certificate_files.FILE_NAME)
    own = _files(folder, names, _OF_SETS)
    made.delete += own
    made.left += [p for p in sorted(folder.iterdir()) if _is_file(p) and p not in own]
    made.folders += {folder, folder / layout.SETS, *(path.parent for path in sets)}


def _sets_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns what `zero_shot` wrote in a directory for its sets, finished or not.

    Those of CQADupStack are one directory deeper.
    """
    runs = folder / layout.SETS
    if runs.is_symlink() or not runs.is_dir():
        return []
    inside = [path for above in (runs, *_folders(runs)) for path in _folders(above)]
    return [
        path
        for path in inside
        if _stated(path) or releases.UNFINISHED.fullmatch(path.name)
    ]


def _plan_unfinished(made: Plan, folder: pathlib.Path) -> None:
    """Plans to delete what a command left unfinished, if a record shows that one did.

    A partial output has none; nobody else ends a name in twelve digits and `.partial`.
    """
    name, entries = _RECORDS.get(folder.name.rpartition(".")[2], ("", ()))
    record = folder / name
    if all(isinstance(certificate_files.stated(record, e), dict) for e in entries):
        _plan_tree(made, folder, None)
    else:
        made.unsure += sorted(path for path in folder.rglob("*") if _is_file(path))


def _plan_tree(
    made: Plan,
    folder: pathlib.Path,
    stage: pathlib.Path | None,
    written: str | None = None,
) -> None:
    """Plans to delete a tree, but for proofs, links, and what somebody else may own.

    That is what is newer than `stage`, and below each directory of `folder` what does
    not match `written`.
    """
    newest = stage.stat().st_mtime if stage is not None else None
    for above, folders, names in os.walk(folder):
        here = pathlib.Path(above)
        made.folders.append(here)
        made.left += [here / name for name in folders if (here / name).is_symlink()]
        for name in sorted(names):
            path = here / name
            if name == ledger.FILE_NAME:
                made.kept.append(path)
            elif not _is_file(path):
                made.left.append(path)
            elif newest is not None and path.stat().st_mtime > newest:
                made.unsure.append(path)
            elif written is not None and not _is_written(path, folder, written):
                made.unsure.append(path)
            else:
                made.delete.append(path)


def _keep_linked(made: Plan, release: pathlib.Path) -> None:
    """Keeps what links in the folder of releases lead to."""
    targets: set[str] = set()
    waiting = [os.fspath(release)]
    while waiting:
        for above, folders, names in os.walk(waiting.pop()):
            for path in (above, *(os.path.join(above, n) for n in folders + names)):
                real = os.path.realpath(path)
                if os.path.islink(path) and real not in targets:
                    targets.add(real)
                    waiting.append(real)

    def linked(path: pathlib.Path) -> bool:
        real = os.path.realpath(path)
        return any(real == each or real.startswith(each + "/") for each in targets)

    if targets:
        made.linked = sorted(filter(linked, made.delete))
        made.delete = [path for path in made.delete if not linked(path)]


def _is_written(path: pathlib.Path, folder: pathlib.Path, written: str) -> bool:
    """Returns whether a file of a folder's runs has a name that stages write."""
    _, _, below = path.relative_to(folder).as_posix().partition("/")
    return bool(re.fullmatch(written, below))


def _files(
    folder: pathlib.Path, names: Sequence[str], unfinished: re.Pattern
) -> list[pathlib.Path]:
    """Returns the files in a directory that have these names, finished or not."""
    return [
        path
        for path in sorted(folder.iterdir())
        if (path.name in names or unfinished.fullmatch(path.name)) and _is_file(path)
    ]


def _folders(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the directories in a directory, links apart."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield path


def _unsafe(path: pathlib.Path) -> bool:
    """Returns whether a file belongs to nothing that may be released."""
    try:
        return releases.stated(path) not in (releases.PUBLIC, releases.CERTIFIED)
    except validation.DataError:  # what would say so is damaged
        return True


def _stated(path: pathlib.Path) -> bool:
    """Returns whether a directory is a finished stage's output."""
    stage = path / releases.STAGE_FILE
    return certificate_files.stated(stage, "fingerprint") is not None


def _guarantee(path: pathlib.Path) -> str | None:
    """Returns the guarantee that the `stage.json` in a directory states."""
    stage = path / releases.STAGE_FILE
    return certificate_files.stated(stage, certificate_files.GUARANTEE)


def _is_file(path: pathlib.Path) -> bool:
    """Returns whether a path is a plain file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def as_text(made: Plan, deleted: bool, failed: Sequence[pathlib.Path] = ()) -> str:
    """Formats what was or would be deleted, kept and left."""
    gone = [path for path in made.delete if path not in failed]
    verb = "deleted" if deleted else "would delete"
    lines = [f"{verb} {len(gone):,} files:"]
    lines += [f"  {path}" for path in gone]
    for title, paths in (
        ("kept, as it proves what was released:", made.kept),
        (
            f"KEPT, as a link under {releases.RELEASE_FOLDER}/ leads to it; remove the "
            "link if it is private:",
            made.linked,
        ),
        ("left, as tfdpsq did not make it:", made.left),
        (
            "LEFT, newer than its stage, or of a name that no stage writes; delete "
            "what is private:",
            made.unsure,
        ),
        ("NOT deleted, check its permissions:", failed),
        (
            "NOT looked at, but stages kept secrets there; run it again for each, with "
            "--private=DIRECTORY:",
            made.elsewhere,
        ),
    ):
        lines += [title, *(f"  {path}" for path in paths)] if paths else []
    if not deleted and gone:
        lines.append("Nothing was deleted. Add --delete to delete it for good.")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits; `argv` is the command line, program first."""
    own = flags.FlagValues()
    flags.DEFINE_bool("delete", False, "Delete it.", flag_values=own)
    flags.DEFINE_string("private", None, "The private directory.", flag_values=own)

    def run(words: Sequence[str]) -> tuple[int, str]:
        if len(words) != 1:
            raise app.UsageError("")
        planned = plan_marked if own.delete else plan
        made = planned(words[0], own.private)
        failed = forget(made) if own.delete else []
        unsure = bool(made.unsure or made.elsewhere) or any(map(_unsafe, made.linked))
        unsure = own.delete and unsure
        return int(bool(failed) or unsure), as_text(made, own.delete, failed)

    command.script(run, own, argv, __doc__, _USAGE)


if __name__ == "__main__":
    main()

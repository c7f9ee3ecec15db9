"""Writes outputs whole and checked, with the modes and times of their guarantee.

Private output is readable by its owner alone from the first byte: files are 0600,
directories 0700, including temporary ones.

Output that may be released gets constant times, since real ones would reveal how long
the private stages before it took. (A file's change time cannot be set, but copies and
archives do not keep it. Object stores set times of their own.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import threading
from collections.abc import Iterator

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.run.core import layout, releases
from tfdpsq.run.core.releases import PRIVATE, PRIVATE_FOLDER, RELEASE_FOLDER, Output

# 1980-01-01, the first day that a zip file can state.
MODIFIED = 315_532_800
# 2037-01-01: Linux does not update an access time in the future (relatime).
ACCESSED = 2_114_380_800
# Names of our files in a private directory; our folders follow.
PRIVATE_FILES = (
    "fingerprint.key",
    "private_reads.jsonl",
    "seconds.json",
    "peak_memory.json",
)
PRIVATE_FOLDERS = (layout.RUNS, layout.LOGS)


# -- Private directories ----------------------------------------------------------


def open_private(directory: pathlib.Path) -> pathlib.Path:
    """Creates or reopens a private directory, readable by its owner alone.

    An existing one loses the rights of others if it is called `private`, also where
    that is a link to it, and so does what we have written there; anything else in it is
    left as it is.

    Raises:
      InputError: it is a file, would be released, or cannot be made.
    """
    releases.private_directory(directory, os.fspath(directory))
    if directory.exists() and not directory.is_dir():
        raise validation.InputError(
            f"{directory} is a file; it should be the directory of what must stay "
            "private. Move the file away, or set private_directory to another path."
        )
    if not directory.is_dir():
        make_parents(directory)
        with _explained(directory):
            directory.mkdir(mode=0o700, exist_ok=True)
    elif directory.name == PRIVATE_FOLDER:
        _close(pathlib.Path(os.path.realpath(directory)))
    for name in PRIVATE_FILES:
        _close(directory / name)
    for name in PRIVATE_FOLDERS:
        for folder, folders, names in os.walk(directory / name):
            for each in (".", *folders, *names):
                _close(pathlib.Path(folder, each))
    return directory


# -- Writing ---------------------------------------------------------------------


@contextlib.contextmanager
def filled(output: Output) -> Iterator[pathlib.Path]:
    """Fills an output directory, which appears whole and checked or not at all.

    Yields:
      A temporary directory that its owner alone can enter. The caller is to lock it.

    Raises:
      InputError: as `io.atomic_directory`; or the result is not what was stated.
    """
    directory = output.directory
    make_parents(directory)
    try:
        with owner_only(), io.atomic_directory(directory) as partial:
            yield partial
            releases.check_made(partial, output)
            finish(partial, output)
    finally:
        settle(directory)  # a stage that fails has moved them, too


def write_file(path: str | os.PathLike, text: str, guarantee: str, holds: str) -> None:
    """Writes or replaces a file outside a stage's directory, such as a report.

    `guarantee` and `holds` are those of `Output`, which may refuse the path.
    """
    output = Output(pathlib.Path(path), guarantee, holds)
    make_parents(output.directory)
    try:
        with owner_only(), io.atomic_file(path) as partial:
            partial.write_text(text, "utf-8")
            finish(partial, output)
    finally:
        settle(output.directory)


def finish(path: pathlib.Path, output: Output) -> None:
    """Sets the modes and times of a guarantee on a file or directory.

    Called before the path gets its final name.
    """
    outside = 0o077 if output.owner_only else _umask.outside()
    for each in [*sorted(path.rglob("*"), reverse=True), path]:  # directories last
        if each.is_symlink():
            continue
        each.chmod((0o777 if each.is_dir() else 0o666) & ~outside)
        if output.guarantee != PRIVATE:
            os.utime(each, (ACCESSED, MODIFIED))


def open_directory(output: Output) -> pathlib.Path:
    """Creates or reopens a directory shared by several stages and files.

    A new private one is its owner's alone; the rights of an existing one are the
    owner's decision.
    """
    directory = output.directory
    make_parents(directory)
    with _explained(directory):
        if not directory.is_dir():
            with owner_only():
                directory.mkdir(exist_ok=True)
            if not output.owner_only:
                directory.chmod(0o777 & ~_umask.outside())
    return directory


def settle(place: releases.Place) -> None:
    """Resets the times of the directories above an output, up to `release` itself.

    Creating, renaming or removing anything there changes them.
    """
    if not io.is_local(os.fspath(place)):
        return
    for name in set(releases.spellings(place)):
        parts = name.split("/")
        if RELEASE_FOLDER not in parts:
            continue
        for end in range(parts.index(RELEASE_FOLDER) + 1, len(parts)):
            with contextlib.suppress(OSError):  # missing, or another user's
                os.utime("/".join(parts[:end]), (ACCESSED, MODIFIED))


class _Umask:
    """The process's umask, tightened while any thread needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth, self._before = 0, 0

    def outside(self) -> int:
        """Returns the umask that the process was started with."""
        with self._lock:
            if self._depth:
                return self._before
            found = os.umask(0o077)
            os.umask(found)
            return found

    def close(self) -> None:
        with self._lock:
            if not self._depth:
                self._before = os.umask(0o077)
            self._depth += 1

    def open(self) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                os.umask(self._before)


_umask = _Umask()


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Makes files created inside the block readable by their owner alone."""
    _umask.close()
    try:
        yield
    finally:
        _umask.open()


def make_parents(path: pathlib.Path) -> None:
    """Creates the directories above a path; inside a private one for the owner alone.

    Raises:
      InputError: one of them is a file, or cannot be made.
    """
    missing = []
    above = pathlib.Path(os.path.abspath(path)).parent
    with _explained(path):
        while not above.exists():
            missing.append(above)
            above = above.parent
        outside = _umask.outside()
        for folder in reversed(missing):
            closed = releases.is_under_private(folder)
            with owner_only():
                folder.mkdir(exist_ok=True)
            folder.chmod(0o700 if closed else 0o777 & ~outside)
        if not above.is_dir():
            raise NotADirectoryError(
                errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(above)
            )


def _close(path: pathlib.Path) -> None:
    """Removes the rights of all but the owner, if we may."""
    with contextlib.suppress(OSError):  # missing, or another user's
        mode = path.stat().st_mode
        if mode & 0o077 and not path.is_symlink():
            path.chmod(mode & 0o700)


@contextlib.contextmanager
def _explained(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise validation.InputError(
            f"{path}: cannot be made ({error.strerror}: {error.filename}). Choose "
            "another path, or change the permissions of those above it."
        ) from error

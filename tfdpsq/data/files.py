"""Files and directories that appear whole or not at all.

Everything tfdpsq leaves on disk goes through here: it is written under a
temporary name next to its destination, flushed to the device, and renamed. A
reader therefore never meets half a file, and a failed or interrupted run leaves
nothing behind (one killed outright leaves only a ``.<name>.<hex>.partial``, which
nothing reads and which may be deleted).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tfdpsq.validation import InputError

# The device, a quota or a limit refuses the bytes: no fault of the program.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike) -> Iterator[Path]:
    """Fills a directory that appears under its name only when complete.

    | the body        | `path` afterwards                                    |
    |-----------------|------------------------------------------------------|
    | returns         | holds all that the body wrote, flushed to the disk   |
    | raises anything | is missing or empty, as before; nothing else is left |

    Args:
      path: the directory to make. It must not exist, or be empty; a link or a mount
        point, which cannot be replaced, it must not be.

    Yields:
      A temporary directory next to `path`, on the same file system, to write to.

    Raises:
      InputError: `path` is taken (before the body runs, or by another process
        meanwhile), cannot be written, or the disk is full.
    """
    target = Path(os.path.abspath(path))
    _refuse_taken(target)
    with _explained(target, forbidden=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial_of(target)
        partial.mkdir()
    try:
        if target.is_dir():
            with _explained(target, forbidden=True):  # or the last line would fail
                shutil.copymode(target, partial)
                os.rename(partial, target)
            partial.mkdir()
        with _explained(target):
            yield partial
            for folder, _, names in os.walk(partial):
                for name in names:
                    flush(os.path.join(folder, name))
                flush(folder)
        _refuse_taken(target)
        with _explained(target, forbidden=True):
            os.rename(partial, target)  # Also replaces an empty directory.
            flush(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def atomic_write(path: str | os.PathLike, content: bytes | str) -> None:
    """Writes a file (text as UTF-8) that is seen either old or new, never between.

    Args:
      path: the file; its directory is created, an older file is replaced.
      content: all of the new content.

    Raises:
      InputError: the place cannot be written, or the disk is full. An older file
        is then still there, whole.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    with atomic_file(path) as partial:
        partial.write_bytes(data)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes a JSON value as `atomic_write` does; equal values give equal bytes.

    Raises:
      InputError: as `atomic_write`.
      TypeError, ValueError: `value` is not JSON, or holds NaN or an infinity.
    """
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    atomic_write(path, text + "\n")


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike, locked: bool = True) -> Iterator[Path]:
    """Writes a file atomically, for content that comes piece by piece.

    Args:
      path: the file; its directory is created, an older file is replaced.
      locked: whether to lock it while it is written, and to remove what killed
        processes left of it. Not for writers with locks of their own, such as HDF5.

    Yields:
      An empty file next to it, to write to.

    Raises:
      InputError: the place cannot be written, or the disk is full. An older file
        is then still there, whole.
    """
    target = Path(os.path.abspath(path))
    with _explained(target, forbidden=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        if locked:
            _remove_abandoned(target)
        partial = _partial_of(target)
        held = open(partial, "xb")
    try:
        if locked:
            with contextlib.suppress(OSError):  # no locks on this file system
                fcntl.flock(held, fcntl.LOCK_EX)
        with _explained(target):
            yield partial
        with _explained(target, forbidden=True):
            flush(partial)
            os.replace(partial, target)
            flush(target.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        held.close()


def _remove_abandoned(target: Path) -> None:
    """Removes what killed processes left of `target`: files that nobody has locked."""
    for left in target.parent.glob(partial_pattern(target.name)):
        with contextlib.suppress(OSError), open(left, "rb") as file:
            # One that was made just now may be locked in a moment.
            if time.time() - os.fstat(file.fileno()).st_ctime > 1:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()


def sha256_of_file(path: str | os.PathLike) -> str:
    """Returns the SHA-256 of a file's bytes, in hex, reading it in pieces."""
    with open(path, "rb") as file:
        return sha256_of(file)


def sha256_of(file: BinaryIO) -> str:
    """Returns the SHA-256 of what is left of an open file, in hex."""
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def check_writable(directory: str | os.PathLike) -> Path:
    """Creates `directory` and proves, by doing it, that files can be written there.

    To be called before hours of work whose result is to go there.

    Returns:
      `directory`, absolute.

    Raises:
      InputError: it cannot be created or written, or the disk is full.
    """
    target = Path(os.path.abspath(directory))
    with _explained(target, forbidden=True):
        target.mkdir(parents=True, exist_ok=True)
        probe = _partial_of(target / "probe")
        try:
            probe.write_bytes(bytes(1 << 16))
            flush(probe)
        finally:
            probe.unlink(missing_ok=True)
    return target


def partial_name(name: str) -> str:
    """Returns a unique name for a file or directory while it is being written."""
    return f".{name}.{secrets.token_hex(6)}.partial"


def partial_pattern(name: str) -> str:
    """Returns the glob of a file's hidden names; it matches no other file's.

    `.eps8.5.<hex>.partial` is of `eps8.5`, not of `eps8`.
    """
    return f".{glob.escape(name)}.{'[0-9a-f]' * 12}.partial"


def _partial_of(target: Path) -> Path:
    return target.with_name(partial_name(target.name))


def _refuse_taken(target: Path) -> None:
    try:
        taken = any(target.iterdir())
    except FileNotFoundError:
        taken = False
    except NotADirectoryError:
        taken = True
    except PermissionError as error:
        raise InputError(
            f"{target}: cannot be read ({error.strerror}). Choose another directory "
            "or change its permissions."
        ) from error
    if target.is_symlink() or os.path.ismount(target):
        raise InputError(
            f"{target}: is a {'link' if target.is_symlink() else 'mount point'}, which "
            "cannot be replaced by the finished directory. Choose another directory, "
            "such as one in it."
        )
    if taken:
        raise InputError(
            f"{target}: already exists, and is not an empty directory. Choose another "
            "directory."
        )


def flush(path: str | os.PathLike) -> None:
    """Forces a file or a directory's entries to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a directory; the rest is an error.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def full_disk_as_os_error() -> Iterator[None]:
    """Gives TensorFlow's errors of a full disk the type that Python's have."""
    try:
        yield
    except Exception as error:
        errors = getattr(sys.modules.get("tensorflow"), "errors", None)
        if errors is not None and isinstance(error, errors.OpError):
            for number in FULL:
                if os.strerror(number).lower() in str(error).lower():
                    raise OSError(number, os.strerror(number)) from error
        raise


@contextlib.contextmanager
def _explained(target: Path, forbidden: bool = False) -> Iterator[None]:
    """Turns the errors of a full or closed disk into one with a remedy.

    Args:
      target: what was to be written.
      forbidden: whether refused permissions are about `target`. Inside a caller's
        block they may be about a file that is only read, and pass unchanged.
    """
    try:
        with full_disk_as_os_error():
            yield
    except OSError as error:
        if error.errno in FULL:
            remedy = "Free space there (or lift the quota), or choose another disk"
        elif forbidden and error.errno in _FORBIDDEN:
            remedy = "Choose a directory you may write to, or change its permissions"
        elif forbidden:
            remedy = "Choose another path"
        else:
            raise
        raise InputError(
            f"{target}: cannot be written ({error.strerror}). {remedy}. Nothing "
            "half-written was left."
        ) from error

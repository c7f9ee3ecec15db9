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
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from tfdpsq.validation import InputError

# The device, a quota or a limit refuses the bytes: no fault of the program.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike) -> Iterator[Path]:
    """Fills a directory that appears under its name only when complete.

    | the body        | `path` afterwards                                  |
    |-----------------|----------------------------------------------------|
    | returns         | holds all that the body wrote, flushed to the disk |
    | raises anything | is as it was before; the temporary one is removed  |

    Args:
      path: the directory to make. It must not exist, or be empty.

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
        partial = _partial_name(target)
        partial.mkdir()
    try:
        with _explained(target):
            yield partial
            for folder, _, names in os.walk(partial):
                for name in names:
                    _flush(Path(folder, name))
                _flush(Path(folder))
        _refuse_taken(target)
        with _explained(target, forbidden=True):
            os.rename(partial, target)  # Also replaces an empty directory.
            _flush(target.parent)
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


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Writes a file atomically, for content that comes piece by piece.

    Args:
      path: the file; its directory is created, an older file is replaced.

    Yields:
      An empty file next to it, to write to.

    Raises:
      InputError: the place cannot be written, or the disk is full. An older file
        is then still there, whole.
    """
    target = Path(os.path.abspath(path))
    with _explained(target, forbidden=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial_name(target)
        partial.touch(exist_ok=False)
    try:
        with _explained(target):
            yield partial
        with _explained(target, forbidden=True):
            _flush(partial)
            os.replace(partial, target)
            _flush(target.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sha256_of_file(path: str | os.PathLike) -> str:
    """Returns the SHA-256 of a file's bytes, in hex, reading it in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
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
        probe = _partial_name(target / "probe")
        try:
            with open(probe, "xb") as file:
                file.write(bytes(1 << 16))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    return target


def _partial_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.partial")


def _refuse_taken(target: Path) -> None:
    try:
        taken = any(target.iterdir())
    except FileNotFoundError:
        taken = target.is_symlink()  # A dangling link: renaming over it would fail.
    except NotADirectoryError:
        taken = True
    except PermissionError as error:
        raise InputError(
            f"{target}: cannot be read ({error.strerror}). Choose another directory "
            "or change its permissions."
        ) from error
    if taken:
        raise InputError(
            f"{target}: already exists, and is not an empty directory. Choose another "
            "directory."
        )


def _flush(path: Path) -> None:
    """Forces a file or a directory's entries to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a directory; the rest is an error.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(target: Path, forbidden: bool = False) -> Iterator[None]:
    """Turns the errors of a full or closed disk into one with a remedy.

    Args:
      target: what was to be written.
      forbidden: whether refused permissions are about `target`. Inside a caller's
        block they may be about a file that is only read, and pass unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
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

"""Files that only grow, a whole line at a time: what ledger and read list stand on.

Every line is on the device when `append` returns, or the file is as it was. A file
appears under its name with its first bytes whole, or not at all, and is locked from
then on, so that two processes never mix their lines. The lock is the operating
system's (`flock`) and ends with its process, however that dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tfdpsq.validation import DataError, InputError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HEX = "[0-9a-f]" * 12
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class AppendOnlyFile:
    """A locked file. Not for several threads at once; close it to unlock it.

    Attributes:
      path: the file, absolute.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        """Takes over a descriptor, opened for appending and locked; `open` calls it."""
        self.path = path
        self._descriptor: int | None = descriptor
        self._size = os.fstat(descriptor).st_size

    @classmethod
    def open(
        cls, path: str | os.PathLike, first: bytes, wait: bool = False
    ) -> AppendOnlyFile:
        """Opens a file, or makes it, and its directory, where there is none.

        Args:
          path: the file, on a file system with hard links and locks. A new one is
            readable by its owner alone.
          first: what a new file begins with.
          wait: until another process lets go of the file, instead of raising.

        Raises:
          InputError: the file is in use, or cannot be made or written.
        """
        target = Path(os.path.abspath(path))
        with _explained(target):
            _remove_abandoned(target)
            descriptor = None if target.exists() else _create(target, first)
            if descriptor is None:
                descriptor = os.open(target, os.O_RDWR | os.O_APPEND)
                try:
                    _lock(target, descriptor, wait)
                    # A process killed before its flush leaves lines in memory alone.
                    # Whoever reads them relies on them, so they go to the device.
                    os.fsync(descriptor)
                except BaseException:
                    os.close(descriptor)
                    raise
            return cls(target, descriptor)

    def reader(self) -> BinaryIO:
        """Returns the whole content as a stream, to be closed by the caller."""
        file = open(os.dup(self._open_descriptor()), "rb")
        file.seek(0)
        return file

    def cut(self, size: int) -> None:
        """Cuts off what follows the first `size` bytes.

        Raises:
          InputError: the file is closed or cannot be written.
        """
        with _explained(self.path):
            os.ftruncate(self._open_descriptor(), size)
            os.fsync(self._open_descriptor())
        self._size = size

    def replace(self, first: bytes) -> None:
        """Puts a new file, locked as well and begun by `first`, in this one's place.

        Raises:
          InputError: the file is closed, was deleted, or the new one cannot be
            written; this one then stays.
          DataError: another program changed the file.
        """
        old = self._open_descriptor()
        with _explained(self.path):
            self._check_untouched(old)
            # The lock on the old one keeps others away until the new one is there.
            self._descriptor = _create(self.path, first, os.replace)
        os.close(old)
        self._size = len(first)

    def append(self, line: bytes) -> None:
        """Adds a line, newline included, which is on the device when this returns.

        Raises:
          InputError: the file is closed, was deleted, or cannot be written (the
            disk is full); its content is then as before.
          DataError: another program changed the file.
        """
        descriptor = self._open_descriptor()
        with _explained(self.path):
            self._check_untouched(descriptor)
            try:
                if os.write(descriptor, line) != len(line):  # The rest did not fit.
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                # Should this fail too, the next to open it finds a torn line.
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, self._size)
                raise
            try:
                os.fsync(descriptor)
            except OSError:
                # Whether the line survives is unknown: only reopening can tell.
                self.close()
                raise
        self._size += len(line)

    def close(self) -> None:
        """Unlocks the file. Does nothing where it is closed."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise InputError(f"{self.path}: is closed. Open it again.")
        return self._descriptor

    def _check_untouched(self, descriptor: int) -> None:
        if not _is_at(self.path, descriptor):
            raise InputError(
                f"{self.path}: was deleted or replaced while in use. Put it back; "
                "without it this run cannot go on."
            )
        found = os.fstat(descriptor).st_size
        if found != self._size:
            raise DataError(
                self.path,
                f"another program changed its length from {self._size} to {found} "
                "bytes",
                "Restore it from a backup; it must not be edited",
            )


def _create(path: Path, first: bytes, place: Callable = os.link) -> int | None:
    """Makes a file and locks it; None where another process made it meanwhile.

    It is locked before it has its name, so nobody comes in between. `place` gives it
    the name; a link, unlike a rename, never replaces another's file.
    """
    _make_folder(path.parent, 0o700)  # what else comes there is private, too
    partial, descriptor = _locked_new(path)
    try:
        if os.write(descriptor, first) != len(first):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
        place(partial, path)
    except FileExistsError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):  # renamed
            os.unlink(partial)
    _flush(path.parent)
    return descriptor


def _locked_new(path: Path) -> tuple[Path, int]:
    """Makes a file of a name of its own next to `path`, and locks it."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")
        descriptor = os.open(partial, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(partial, descriptor):
                return partial, descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another process took it for abandoned


def _remove_abandoned(path: Path) -> None:
    """Removes what processes left that were killed while they made the file.

    That is a file that nobody has locked, or one more name of the file itself.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.{_HEX}.partial"):
        with contextlib.suppress(OSError), open(left, "rb") as file:
            if not _is_at(path, file.fileno()):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def _lock(path: Path, descriptor: int, wait: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise InputError(
            f"{path}: another process uses it. Wait until that ends, or stop it."
        ) from error
    if not _is_at(path, descriptor):
        raise InputError(f"{path}: was replaced while it was opened. Start again.")


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _make_folder(folder: Path, mode: int = 0o777) -> None:
    """Makes a directory and those above it, with their entries on the device."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(mode, exist_ok=True)
    _flush(folder.parent)


def _flush(folder: Path) -> None:
    """Forces a directory's entries to the device."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a directory; the rest is an error.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Gives the operating system's refusals a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            remedy = "Free space there (or lift the quota)"
        elif error.errno in _FORBIDDEN:
            remedy = "Choose a directory you may write to, or change its permissions"
        else:
            remedy = "Choose a path on a file system with hard links and locks"
        raise InputError(
            f"{path}: cannot be written ({error.strerror}). {remedy}, and run the "
            "same command again: it goes on from what is there."
        ) from error

"""Files that grow by whole lines: the ledger and the list of private reads.

A line is on the device when `append` returns. A process that dies while it writes
leaves a torn last line, without its newline, which the next one to open the file cuts
off. The file is locked (`flock`) while it is open; the lock ends with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from absl import logging

from tfdpsq.validation import InputError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LockedLines:
    """A file of lines, locked until `close`; readable by its owner alone.

    Attributes:
      path: the file, absolute.
      lines: its lines when it was opened, without their newlines.
    """

    def __init__(self, path: str | os.PathLike, wait: bool = False):
        """Opens and locks a file; makes it, and its directory, where there is none.

        Args:
          path: on a file system with locks.
          wait: wait for another process that has it open, instead of raising.

        Raises:
          InputError: another process has it open, or it cannot be made or written.
        """
        self.path = Path(os.path.abspath(path))
        with explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
            self._descriptor = os.open(self.path, flags, 0o600)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else _NOW))
                _flush(self.path.parent)
                self.lines = self._read()
            except BlockingIOError as error:
                os.close(self._descriptor)
                raise InputError(
                    f"{self.path}: another process uses it. Wait until that ends, or "
                    "stop it."
                ) from error
            except BaseException:
                os.close(self._descriptor)
                raise

    def _read(self) -> list[bytes]:
        """Returns the whole lines, after cutting off a torn one."""
        content = self.path.read_bytes()
        whole = content.rpartition(b"\n")[0]
        self._size = len(whole) + 1 if b"\n" in content else 0
        if len(content) > self._size:
            logging.warning(
                "%s: cut off %d bytes of a line that was being written when its "
                "process died",
                self.path,
                len(content) - self._size,
            )
            os.ftruncate(self._descriptor, self._size)
        # Lines of a process killed before its flush may be in memory alone.
        os.fsync(self._descriptor)
        return whole.split(b"\n") if self._size else []

    def append(self, line: bytes) -> None:
        """Adds a line, which is on the device when this returns.

        Raises:
          InputError: the file cannot be written (the disk is full, say); its content
            is then as before.
        """
        data = line + b"\n"
        with explained(self.path):
            try:
                if os.write(self._descriptor, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._descriptor)
            except OSError:
                # Should this fail, too, the next process finds a torn line.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
                raise
        self._size += len(data)

    def restart(self, first: bytes) -> None:
        """Replaces all lines by one."""
        with explained(self.path):
            os.ftruncate(self._descriptor, 0)
        self._size = 0
        self.append(first)

    def close(self) -> None:
        """Unlocks the file. Does nothing where it is closed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_NOW = fcntl.LOCK_NB


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot flush a directory
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns the operating system's refusals into one sentence with a remedy.

    Raises:
      InputError: in place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        remedy = "Use a directory that you may write to, on a file system with locks"
        if error.errno in _FULL:
            remedy = "Free space there, or lift the quota"
        raise InputError(
            f"{path}: cannot be written ({error.strerror}). {remedy}, and run the "
            "same command again: it goes on from what is there."
        ) from error

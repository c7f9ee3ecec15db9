"""The ledger: one line on disk for every step, before the update that it pays for.

    {"data": ..., "format": ..., "plan": ..., "run": ..., "steps": T}
    {"step": 0}
    {"step": 1}

Training that is killed and started again must not forget what it spent. So each logical
step appends a line, flushed to the device *before* the optimizer moves:

| killed                        | the ledger has          | after the restart       |
|-------------------------------|-------------------------|-------------------------|
| before or while appending     | step not paid           | paid, then run          |
| between line and update       | paid, without effect    | run, not paid again     |
| after the update              | paid, with its effect   | rerun where its effect  |
|                               |                         | was not saved, not paid |

The ledger never holds fewer steps than took effect. A replay is free because it is the
*same* step, with the same rows and the same noise: nothing new is seen of the data.

`run` is random and names the run: seeds, states and certificates state it, and it may
be released; the file is as secret as the data. Until a step is paid for, every opening
begins a new run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from tfdpsq.validation import DataError, InputError, parse_json

FORMAT = "tfdpsq-ledger/2"
FILE_NAME = "ledger.jsonl"
READS_FILE_NAME = "private_reads.jsonl"

_RESTORE = "Restore the ledger from a backup; without it, count all planned steps"


class LockedLines(contextlib.AbstractContextManager):
    """A file that grows by whole lines, locked until `close`; private to its owner.

    A process that dies while it writes leaves a torn last line, which the next one to
    open the file cuts off. The lock (`flock`) ends with its process.

    Attributes:
      path: the file, absolute.
      lines: its lines when it was opened, without their newlines.
    """

    def __init__(self, path: str | os.PathLike, wait: bool = False):
        """Opens and locks a file, and creates it with its directory if needed.

        Raises:
          InputError: it is in use, and not `wait`; or it cannot be written.
        """
        self.path = Path(os.path.abspath(path))
        with _explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
            self._descriptor = os.open(self.path, flags, 0o600)
            try:
                how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
                fcntl.flock(self._descriptor, how)
                flush_folder(self.path.parent)
                content = self.path.read_bytes()
                *self.lines, torn = content.split(b"\n")
                self._size = len(content) - len(torn)
                if torn:
                    logging.warning("%s: cut off %d bytes", self.path, len(torn))
                    os.ftruncate(self._descriptor, self._size)
                # Lines of a process killed before its flush may be in memory alone.
                os.fsync(self._descriptor)
            except BaseException:
                self.close()
                raise

    def append(self, line: bytes) -> None:
        """Adds a line, which is on the device when this returns.

        Raises an `InputError` where the disk is full, say; the file is then as before.
        """
        data = line + b"\n"
        with _explained(self.path):
            try:
                if os.write(self._descriptor, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._descriptor)
            except OSError:
                # If this fails, too, the next process finds a torn line.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
                raise
        self._size += len(data)

    def close(self) -> None:
        """Unlocks the file; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self.close()


def flush_folder(folder: Path) -> None:
    """Waits until a folder's new and renamed files are on the device."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:
        raise InputError(
            f"{path}: another process uses it. Wait for that, or stop it."
        ) from error
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}). Free space there, or use "
            "another directory, on a file system with locks."
        ) from error


@dataclasses.dataclass(frozen=True)
class LedgerSummary:
    """The content of a ledger; see `Ledger`."""

    plan: str
    data: str  # the fingerprint of the private data, not for release
    steps_allowed: int
    steps_paid: int
    run: str


class Ledger(LockedLines):
    """An open ledger, locked against every other process until closed.

    Attributes:
      run: random name of the run, 32 hex digits; may be released.
      steps_allowed: logical steps of the plan.
      steps_paid: logical steps paid.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        plan_fingerprint: str,
        data_fingerprint: str,
        steps: int,
        steps_taken: int = 0,
        repeats: bool = False,
    ):
        """Creates a ledger, or reopens the one of the same plan and data.

        Args:
          path: the file, in a private directory, on a file system with locks.
          plan_fingerprint: `PrivacyPlan.fingerprint`.
          data_fingerprint: identifies the private data.
          steps: logical steps the plan allows.
          steps_taken: logical steps of the last saved state.
          repeats: begin a new run whatever was paid, as without a guarantee.

        Raises:
          InputError: the file is in use, has paid steps of another plan, data or
            number of steps, or cannot be written.
          DataError: a line is damaged, or fewer steps are paid than ran.
        """
        header = _json(
            format=FORMAT,
            plan=plan_fingerprint,
            data=data_fingerprint,
            steps=int(steps),
            run=secrets.token_hex(16),
        )
        wanted = _summary(Path(path), [header])
        super().__init__(path)
        try:
            found = _summary(self.path, self.lines)
            if found.steps_paid < steps_taken:
                problem = f"{found.steps_paid} steps are paid, {steps_taken} were saved"
                problem += ". Lines of the ledger were lost"
                raise DataError(self.path, problem, "Restore it from a backup")
            if not found.steps_paid or (repeats and found.plan == plan_fingerprint):
                with _explained(self.path):
                    os.ftruncate(self._descriptor, 0)
                self._size, found = 0, wanted
                self.append(header)
            # Fingerprints are not quoted: guesses at the data could be tested on them.
            for what, was, now in (
                ("the private data", found.data, wanted.data),
                ("the number of steps", found.steps_allowed, wanted.steps_allowed),
                ("the plan", found.plan, wanted.plan),
            ):
                if was != now:
                    raise InputError(
                        f"{self.path}: {what} changed, and {found.steps_paid} steps "
                        "are paid. Restore it, or pay again in another directory."
                    )
        except BaseException:
            self.close()
            raise
        self.run, self.steps_allowed = found.run, found.steps_allowed
        self.steps_paid = found.steps_paid

    def pay(self, step: int) -> bool:
        """Pays for a logical step; to be called right before its update.

        Returns:
          True if it is newly paid, on the device; False for a replay of a paid step.

        Raises:
          InputError: a gap, overspending or a full disk; then the step must not run.
        """
        paid = self.steps_paid
        if step >= self.steps_allowed:
            raise InputError(f"{self.path}: step {step} would overspend the plan.")
        if 0 <= step < paid:
            return False
        if step != paid:
            raise InputError(f"{self.path}: step {step} is not the next one, {paid}.")
        self.append(_json(step=paid))
        self.steps_paid += 1
        return True


def read_ledger(path: str | os.PathLike) -> LedgerSummary:
    """Reads a ledger, which may be in use; a torn last line counts as unpaid.

    Raises:
      DataError: there is no ledger, or a line is damaged.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise DataError(path, problem, f"Give a {FILE_NAME}") from error
    return _summary(Path(path), content.split(b"\n")[:-1])


def ledger_in(directory: str | os.PathLike | None, plan: str) -> LedgerSummary | None:
    """Returns a directory's ledger of a plan, given its fingerprint, or `None`."""
    if directory is None or not (path := Path(directory) / FILE_NAME).exists():
        return None
    found = read_ledger(path)
    return found if found.plan == plan else None


class PrivateReads:
    """Records reads of private data that ε does not cover, in order, each once.

    ε counts the steps of training alone: not validation metrics on private queries, a
    vocabulary made from them, a model chosen by them, or losses that somebody watches.
    Each read is recorded before it happens, and the certificate lists it.

    Attributes:
      path: a file of JSON lines, created with the first entry, which several processes
        may share; `None` keeps the list in memory.
      strict: whether a private read is refused instead of recorded.
    """

    def __init__(self, path: str | os.PathLike | None = None, strict: bool = False):
        """Reads the file, if it is there.

        Raises:
          InputError: the file cannot be read, or a line of it is damaged.
        """
        self.path = None if path is None else Path(os.path.abspath(path))
        self.strict = strict
        self._entries: list[dict[str, str]] = []
        if self.path is not None and self.path.exists():
            self._entries = _share(self.path, None)

    @property
    def entries(self) -> list[dict[str, str]]:
        """The reads, each a dict of "what" and "where"."""
        return [dict(entry) for entry in self._entries]

    def record(self, what: str, where: str) -> None:
        """Records a read of private data; to be called before it happens.

        Args:
          what: kind of thing that is read, nothing of its content.
          where: who or what gets to see it.

        Raises:
          InputError: strict mode, or the file cannot be written. Then do not read.
        """
        if self.strict:
            raise InputError(
                f"strict mode refuses a private read that no epsilon covers: {what} "
                f"(where: {where}). Leave it out, or turn strict off."
            )
        entry = {"what": what, "where": where}
        if entry not in self._entries:
            logging.warning("private read that no ε covers: %s (%s)", what, where)
        if self.path is not None:
            self._entries = _share(self.path, entry)
        elif entry not in self._entries:
            self._entries.append(entry)


def _share(path: Path, entry: dict[str, str] | None) -> list[dict[str, str]]:
    """Returns a file's entries, after adding one that is new among them."""
    entries: list[dict[str, str]] = []
    with LockedLines(path, wait=True) as file:
        for number, line in enumerate(file.lines, 1):
            try:
                content = parse_json(line)
                entries.append({"what": content["what"], "where": content["where"]})
            except (ValueError, TypeError, KeyError) as error:
                problem, remedy = "the line is not an entry", "Restore a backup"
                raise DataError(path, problem, remedy, number) from error
        if entry is not None and entry not in entries:
            file.append(_json(**entry))
            entries.append(entry)
    return entries


def _json(**content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _summary(path: Path, lines: Sequence[bytes]) -> LedgerSummary:
    if not lines:  # its process was killed before it wrote the header
        return LedgerSummary("", "", 0, 0, "")
    try:
        header = parse_json(lines[0])
        names = ("plan", "data", "steps", "run")
        plan, data, steps, run = (header[name] for name in names)
        if header["format"] != FORMAT:
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        # Not quoted: another file may have been given, of private queries, say.
        problem = f"the line is not the header of a {FORMAT} file"
        raise DataError(path, problem, _RESTORE, 1) from error
    for number, line in enumerate(lines[1:]):
        if line != _json(step=number) or number >= steps:
            raise DataError(
                path, f"the line is not that of step {number}", _RESTORE, number + 2
            )
    return LedgerSummary(plan, data, steps, len(lines) - 1, run)

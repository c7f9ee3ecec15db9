"""The ledger: one line on disk for every step, before the update it pays for.

Training that is killed and started again must not spend more than its plan, and
must not forget what it spent. So each logical step appends a line to a file that
the data's owner keeps, flushed to the device *before* the optimizer moves:

    {"chain": ..., "data": ..., "format": ..., "nonce": ..., "plan": ..., "steps": T}
    {"chain": ..., "step": 0}
    {"chain": ..., "step": 1}

| killed                        | the ledger has          | after the restart       |
|-------------------------------|-------------------------|-------------------------|
| before or while appending     | step not paid           | paid, then run          |
| between line and update       | paid, without effect    | run, not paid again     |
| after the update              | paid, with its effect   | rerun where its effect  |
|                               |                         | was not saved, not paid |

Until a step is paid for, every opening begins a new ledger, see `Ledger.open`.

The ledger never holds fewer steps than took effect. Were the line written after
the update, the middle row would be an update that nobody paid for. A replay is free
because it is the *same* step: the caller must repeat it with the same rows and the
same noise, so that nothing new is seen of the data.

`chain` is SHA-256 over the chain of the line before and this line's content, so a
line in the middle that is edited, removed, repeated or moved is found. `nonce`
makes the last chain, the `head`, safe to release in a certificate: without it the
head would be a hash on which guesses at the private data could be tested. It is
secret, as is the whole file.

It proves, to anyone who holds both file and certificate, that the certificate's steps
are the paid ones, in order and no more than the plan allows. It does not prove that
lines were not cut off its end (compare `head`, or the steps of a checkpoint), that
no other ledger of the same data was deleted, or that its owner did not write a new
chain throughout: it guards against accidents and against resuming wrongly, not
against the one who owns the data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import numbers
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from absl import logging

from tfdpsq.privacy.proof.append_only import AppendOnlyFile
from tfdpsq.validation import DataError, InputError, parse_json, positive_integer

FORMAT = "tfdpsq-ledger/1"
FILE_NAME = "ledger.jsonl"

_HEADER = {"format": str, "plan": str, "data": str, "steps": int, "nonce": str}
_RESTORE = (
    "Restore the ledger from a backup; it must not be edited. Without it nobody can "
    "say what was spent: count all its steps as spent"
)


@dataclasses.dataclass(frozen=True)
class LedgerSummary:
    """Summary of a ledger.

    Attributes:
      plan: fingerprint of the plan it was opened with, which its steps follow.
      data: fingerprint of the private data; not for release.
      steps_allowed: logical steps the plan has.
      steps_paid: logical steps paid, from the first on.
      head: chain of the last line, 64 hex digits; stands for all lines.
    """

    plan: str
    data: str
    steps_allowed: int
    steps_paid: int
    head: str


class Ledger:
    """An open ledger, locked against every other process until closed.

    Not for several threads at once. Also a context manager that closes it.
    """

    def __init__(
        self, file: AppendOnlyFile, summary: LedgerSummary, first_chain: str
    ) -> None:
        """Takes over a locked file; to be made by `Ledger.open`.

        Args:
          file: the ledger's lines.
          summary: what they say.
          first_chain: chain of the first of them.
        """
        self._file = file
        self._summary = summary
        self._first_chain = first_chain

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        plan_fingerprint: str,
        data_fingerprint: str,
        steps: int,
        steps_taken: int = 0,
        repeats: bool = False,
    ) -> Ledger:
        """Makes a ledger, or reopens the one of the same plan and data.

        A ledger without paid steps is replaced by a new one, of any plan and data: no
        step ran, and a copy of it may have gone on as another run, whose head must
        not be this one's.

        A new ledger appears with its header whole or not at all. On reopening, all
        lines are checked, and a torn last line is cut off. That is safe: a line
        ends with its newline, `pay` returns only when all of it is on the device,
        and the update comes after that. A line without its newline is thus of a
        step that had no effect, and that will be paid when it is run. What is not
        the beginning of the one line that may follow is not a torn line but damage.

        Args:
          path: the file, on a file system with locks and hard links. It belongs
            with the private data, never in a directory meant for release.
          plan_fingerprint: `PrivacyPlan.fingerprint`.
          data_fingerprint: identifies the private data.
          steps: logical steps the plan allows.
          steps_taken: logical steps that are known to have run, by a saved state.
          repeats: a ledger of the same plan is replaced whatever was paid; for runs
            without a guarantee, which spend nothing.

        Raises:
          InputError: the file is in use, has paid steps of another plan, data or
            number of steps, or cannot be read or written.
          DataError: a line is damaged, or fewer steps are paid than ran.
        """
        header = {
            "format": FORMAT,
            "plan": _text("plan_fingerprint", plan_fingerprint),
            "data": _text("data_fingerprint", data_fingerprint),
            "steps": int(positive_integer("steps", steps)),
            "nonce": secrets.token_hex(32),
        }
        first, head = _line(header, "")
        file = AppendOnlyFile.open(path, first)
        try:
            with file.reader() as lines:
                summary, first_chain, size, torn = _read(file.path, lines)
            if summary.steps_paid < steps_taken:
                raise DataError(
                    file.path,
                    f"it pays for {summary.steps_paid} steps, and a saved state is "
                    f"that after {steps_taken}",
                    "Lines of the ledger were lost: restore it from a backup",
                )
            begun = summary.steps_paid and not (
                repeats and summary.plan == plan_fingerprint
            )
            if begun:
                _check_same(file.path, summary, header)
            elif summary.head != head:
                file.replace(first)
                summary, first_chain, torn = _summary(header, 0, head), head, 0
            if torn:
                logging.warning(
                    "%s: cut off %d bytes of a line that was being written when its "
                    "process died; its step had no effect",
                    file.path,
                    torn,
                )
                file.cut(size)
        except BaseException:
            file.close()
            raise
        return cls(file, summary, first_chain)

    @property
    def path(self) -> Path:
        """The file, absolute."""
        return self._file.path

    @property
    def steps_allowed(self) -> int:
        """Logical steps the plan has."""
        return self._summary.steps_allowed

    @property
    def steps_paid(self) -> int:
        """Logical steps paid, from the first on."""
        return self._summary.steps_paid

    @property
    def first_chain(self) -> str:
        """Chain of the first line, 64 hex digits: no other ledger has it."""
        return self._first_chain

    @property
    def head(self) -> str:
        """Chain of the last line, 64 hex digits; may be released."""
        return self._summary.head

    @property
    def summary(self) -> LedgerSummary:
        """Returns what `read_ledger` would now."""
        return self._summary

    def pay(self, step: int) -> bool:
        """Pays for a logical step; to be called right before its update.

        | step                   | result                                        |
        |------------------------|-----------------------------------------------|
        | the next one           | True: newly paid, on the device when returned |
        | paid before            | False: a replay, which must repeat that step  |
        | after the next one     | InputError: a gap                             |
        | beyond the plan        | InputError: overspending                      |
        | any, and the disk full | InputError: not paid, ledger as before        |

        Args:
          step: number of the step, from 0.

        Raises:
          InputError: as above, or the ledger is closed, or was deleted. The step
            must then not run.
          DataError: another program changed the file.
        """
        whole = isinstance(step, numbers.Integral) and not isinstance(step, bool)
        if not whole or step < 0:
            raise InputError(f"step is {step!r}; it must be an integer of at least 0.")
        paid, allowed = self._summary.steps_paid, self._summary.steps_allowed
        if step >= allowed:
            raise InputError(
                f"{self.path}: step {step} would overspend: the plan has {allowed} "
                f"steps, 0 to {allowed - 1}. Stop here, or make a new plan that "
                "counts more steps, with the noise they need, and train from the "
                "start."
            )
        if step < paid:
            return False
        if step > paid:
            raise InputError(
                f"{self.path}: step {step} comes after a gap: {paid} steps are paid, "
                f"so step {paid} is next. Resume from the checkpoint that belongs to "
                "this ledger."
            )
        line, chain = _line({"step": paid}, self._summary.head)
        self._file.append(line)
        self._summary = dataclasses.replace(
            self._summary, steps_paid=paid + 1, head=chain
        )
        return True

    def close(self) -> None:
        """Unlocks the file. Does nothing where it is closed."""
        self._file.close()

    def __enter__(self) -> Ledger:
        """Returns the ledger."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the ledger."""
        self.close()


def read_ledger(path: str | os.PathLike) -> LedgerSummary:
    """Checks all lines of a ledger, without locking it, and says what it holds.

    A torn last line counts as unpaid, as for `Ledger.open`, and is left in place:
    the ledger may be in use.

    Raises:
      DataError: there is no ledger, or a line is damaged.
    """
    target = Path(path)
    try:
        with open(target, "rb") as file:
            return _read(target, file)[0]
    except OSError as error:
        raise DataError(
            target,
            f"cannot be read ({error.strerror})",
            f"Give the {FILE_NAME} that training wrote",
        ) from error


def ledger_in(directory: str | os.PathLike | None, plan: str) -> LedgerSummary | None:
    """Returns the ledger in a directory; `None` where there is none of this plan."""
    path = None if directory is None else Path(directory) / FILE_NAME
    if path is None or not path.exists():
        return None
    found = read_ledger(path)
    return found if found.plan == plan else None


def _text(name: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{name} is {value!r}; it must be a text, not empty.")
    return value


def _line(content: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """Returns the only line with this content that may follow, and its chain."""
    chain = hashlib.sha256(previous.encode() + _canonical(content)).hexdigest()
    return _canonical({**content, "chain": chain}) + b"\n", chain


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _read(path: Path, file: BinaryIO) -> tuple[LedgerSummary, str, int, int]:
    """Reads and checks all lines.

    Returns:
      What they say, the first one's chain, the bytes of whole ones, and of a torn last
      one.
    """
    first = file.readline()
    header, first_chain = _header(path, first)
    chain = first_chain
    size, steps = len(first), 0
    for raw in file:
        expected, following = _line({"step": steps}, chain)
        if raw != expected:
            if not raw.endswith(b"\n") and expected.startswith(raw):
                return _summary(header, steps, chain), first_chain, size, len(raw)
            raise DataError(
                path,
                f"{raw[:60]!r} does not follow from the lines before it: this line "
                "or one above was edited, removed, repeated or moved",
                _RESTORE,
                steps + 2,
            )
        if steps >= header["steps"]:
            raise DataError(
                path,
                f"pays for step {steps}, yet the plan has {header['steps']} steps",
                _RESTORE,
                steps + 2,
            )
        steps, chain, size = steps + 1, following, size + len(raw)
    return _summary(header, steps, chain), first_chain, size, 0


def _summary(header: Mapping[str, Any], paid: int, head: str) -> LedgerSummary:
    return LedgerSummary(header["plan"], header["data"], header["steps"], paid, head)


def _header(path: Path, raw: bytes) -> tuple[dict[str, Any], str]:
    """Returns the header's content and chain.

    Raises:
      DataError: it is damaged, or is of no ledger. It is never torn, as a ledger
        appears with its header.
    """
    try:
        content = parse_json(raw)
        chain = content.pop("chain")
        found = content["format"]
        sound = {key: type(value) for key, value in content.items()} == _HEADER
        sound = sound and (raw, chain) == _line(content, "")
    except (ValueError, KeyError, TypeError, AttributeError):
        found, sound = None, False
    if found != FORMAT and str(found).startswith(FORMAT.split("/")[0]):
        raise DataError(path, f"format is {found!r}", f"This tfdpsq reads {FORMAT}", 1)
    if not sound or found != FORMAT:
        # Not repeated: another file may have been given, of private queries, say.
        raise DataError(path, "the line is not a ledger's header", _RESTORE, 1)
    return content, chain


def _check_same(path: Path, found: LedgerSummary, wanted: Mapping[str, Any]) -> None:
    """Raises InputError where a ledger was made for something else."""
    for what, there, now in (
        ("the private data", found.data, wanted["data"]),
        ("the number of steps", found.steps_allowed, wanted["steps"]),
        ("the plan", found.plan, wanted["plan"]),
    ):
        if there != now:
            # On a hash of the data guesses at them can be tested.
            shown = f": {there} when the ledger was made, {now} now"
            raise InputError(
                f"{path}: {what} changed{'' if there == found.data else shown}, "
                f"and {found.steps_paid} steps are paid. Put back the data, the spec "
                "and the dp-accounting it was made with (another one may find another "
                "noise), or begin a new run with another ledger, whose spending adds "
                "up with this one's."
            )

"""The ledger: one line on disk for every step, before the update that it pays for.

    {"data": ..., "format": ..., "plan": ..., "run": ..., "steps": T}
    {"step": 0}
    {"step": 1}

Training that is killed and started again must not spend more than its plan, and must
not forget what it spent. So each logical step appends a line, flushed to the device
*before* the optimizer moves:

| killed                        | the ledger has          | after the restart       |
|-------------------------------|-------------------------|-------------------------|
| before or while appending     | step not paid           | paid, then run          |
| between line and update       | paid, without effect    | run, not paid again     |
| after the update              | paid, with its effect   | rerun where its effect  |
|                               |                         | was not saved, not paid |

The ledger never holds fewer steps than took effect. Were the line written after the
update, the middle row would be an update that nobody paid for. A replay is free because
it is the *same* step: the caller repeats it with the same rows and the same noise, so
that nothing new is seen of the data.

`run` is random and names the run: seeds, states and certificates state it. Until a step
is paid for, every opening begins a new run, so a copy of the directory that goes on is
another run. The file is as secret as the data, but `run` tells nothing of it and may be
released.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdpsq.privacy.proof.lines import LockedLines
from tfdpsq.validation import DataError, InputError, parse_json, positive_integer

FORMAT = "tfdpsq-ledger/2"
FILE_NAME = "ledger.jsonl"

_HEADER = {"format": str, "plan": str, "data": str, "steps": int, "run": str}
_RESTORE = (
    "Restore the ledger from a backup; it must not be edited. Without it nobody can "
    "say what was spent: count all its steps as spent"
)


@dataclasses.dataclass(frozen=True)
class LedgerSummary:
    """What a ledger says.

    Attributes:
      plan: fingerprint of the plan that its steps follow.
      data: fingerprint of the private data; not for release.
      steps_allowed: logical steps of the plan.
      steps_paid: logical steps paid, from the first on.
      run: random name of the run, 32 hex digits.
    """

    plan: str
    data: str
    steps_allowed: int
    steps_paid: int
    run: str


class Ledger:
    """An open ledger, locked against every other process until closed.

    Not for several threads at once. Also a context manager that closes it.

    Attributes:
      summary: what it says now.
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
        """Makes a ledger, or reopens the one of the same plan and data.

        Args:
          path: the file, on a file system with locks. It belongs with the private
            data, never in a directory meant for release.
          plan_fingerprint: `PrivacyPlan.fingerprint`.
          data_fingerprint: identifies the private data.
          steps: logical steps the plan allows.
          steps_taken: logical steps that are known to have run, by a saved state.
          repeats: begin a new run of the same plan whatever was paid; for runs without
            a guarantee, which spend nothing.

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
            "run": secrets.token_hex(16),
        }
        self._file = LockedLines(path)
        try:
            found = _summary(self.path, self._file.lines) if self._file.lines else None
            paid = found.steps_paid if found else 0
            if paid < steps_taken:
                raise DataError(
                    self.path,
                    f"it pays for {paid} steps, and a saved state is that after "
                    f"{steps_taken}",
                    "Lines of the ledger were lost: restore it from a backup",
                )
            if found and paid and not (repeats and found.plan == plan_fingerprint):
                _require_same(self.path, found, header)
                self.summary = found
            else:
                self._file.restart(_json(header))
                self.summary = _summary(self.path, [_json(header)])
        except BaseException:
            self._file.close()
            raise

    @property
    def path(self) -> Path:
        """The file, absolute."""
        return self._file.path

    @property
    def steps_allowed(self) -> int:
        """Logical steps of the plan."""
        return self.summary.steps_allowed

    @property
    def steps_paid(self) -> int:
        """Logical steps paid, from the first on."""
        return self.summary.steps_paid

    @property
    def run(self) -> str:
        """Random name of the run, 32 hex digits; may be released."""
        return self.summary.run

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
          InputError: as above. The step must then not run.
        """
        whole = isinstance(step, numbers.Integral) and not isinstance(step, bool)
        if not whole or step < 0:
            raise InputError(f"step is {step!r}; it must be an integer of at least 0.")
        paid, allowed = self.steps_paid, self.steps_allowed
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
        self._file.append(_json({"step": paid}))
        self.summary = dataclasses.replace(self.summary, steps_paid=paid + 1)
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
    """Reads a ledger, without locking it; it may be in use.

    A torn last line counts as unpaid, as for `Ledger`; without a whole line nothing is
    paid, of no plan.

    Raises:
      DataError: there is no ledger, or a line is damaged.
    """
    target = Path(path)
    try:
        content = target.read_bytes()
    except OSError as error:
        raise DataError(
            target,
            f"cannot be read ({error.strerror})",
            f"Give the {FILE_NAME} that training wrote",
        ) from error
    return _summary(target, content.split(b"\n")[:-1])


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


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _summary(path: Path, lines: Sequence[bytes]) -> LedgerSummary:
    """Checks all lines of a ledger.

    Raises:
      DataError: one is damaged, missing or repeated.
    """
    if not lines:  # its process was killed before it wrote the header
        return LedgerSummary("", "", 0, 0, "")
    try:
        header = parse_json(lines[0])
        found = header["format"]
        sound = {key: type(value) for key, value in header.items()} == _HEADER
    except (ValueError, KeyError, TypeError, AttributeError):
        found, sound = None, False
    if found != FORMAT and str(found).startswith(FORMAT.split("/")[0]):
        raise DataError(path, f"format is {found!r}", f"This tfdpsq reads {FORMAT}", 1)
    if not sound or found != FORMAT:
        # Not quoted: another file may have been given, of private queries, say.
        raise DataError(path, "the line is not a ledger's header", _RESTORE, 1)
    steps = len(lines) - 1
    for number, line in enumerate(lines[1:]):
        if line != _json({"step": number}) or number >= header["steps"]:
            raise DataError(
                path, f"the line is not that of step {number}", _RESTORE, number + 2
            )
    return LedgerSummary(
        header["plan"], header["data"], header["steps"], steps, header["run"]
    )


def _require_same(path: Path, found: LedgerSummary, wanted: Mapping[str, Any]) -> None:
    """Refuses a ledger with steps paid for something else."""
    for what, there, now in (
        ("the private data", found.data, wanted["data"]),
        ("the number of steps", found.steps_allowed, wanted["steps"]),
        ("the plan", found.plan, wanted["plan"]),
    ):
        if there != now:
            # The data's fingerprint is not quoted: guesses could be tested on it.
            shown = f": {there} when the ledger was made, {now} now"
            raise InputError(
                f"{path}: {what} changed{'' if there == found.data else shown}, "
                f"and {found.steps_paid} steps are paid. Restore the data, the spec "
                "and the dp-accounting that it was made with, or begin a new run with "
                "another ledger, whose spending adds up with this one's."
            )

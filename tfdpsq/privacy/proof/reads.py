"""Reads of private data outside the privacy budget.

Clipping and noise cover the steps of training, and ε counts those alone. Whatever
else looks at private data is not covered: validation metrics on private queries, a
vocabulary made from them, a model chosen by them, training losses that somebody
watches. Each such read is recorded here before it happens, and the certificate
lists it; in strict mode it is refused instead.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from absl import logging

from tfdpsq.privacy.proof.ledger import LockedLines
from tfdpsq.validation import DataError, InputError, parse_json

FILE_NAME = "private_reads.jsonl"


class PrivateReads:
    """Records private reads, in the order of their first time, each once.

    Attributes:
      path: the file that keeps them beyond this process, or `None`.
      strict: whether a private read is refused instead of recorded.
    """

    def __init__(self, path: str | os.PathLike | None = None, strict: bool = False):
        """Reads the list of a file, if there is one.

        Args:
          path: JSON lines, created with the first entry; `None` keeps the list in
            memory. Several processes may share one file.
          strict: see the class.

        Raises:
          InputError: the file cannot be read, or a line of it is damaged.
        """
        self.path = None if path is None else Path(os.path.abspath(path))
        self.strict = strict
        self._entries: list[dict[str, str]] = []
        self._warned: list[dict[str, str]] = []
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
          where: where it goes: who or what gets to see it.

        Raises:
          InputError: strict mode, or the file cannot be written; the read must
            then not happen.
        """
        if self.strict:
            raise InputError(
                f"strict mode refuses a read of private data outside the budget: "
                f"{what} (where: {where}). Leave it out, or turn strict off."
            )
        entry = {"what": what, "where": where}
        if entry not in self._warned:
            self._warned.append(entry)
            logging.warning(
                "private read, covered by no epsilon: %s (where: %s)", what, where
            )
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
            file.append(json.dumps(entry, sort_keys=True).encode())
            entries.append(entry)
    return entries

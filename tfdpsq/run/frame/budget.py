"""Certificates of what was released, and the limit of `--budget` on their total.

What is in a workdir's `release/` counts, and what is in its `private/` does not. Runs
under a limit are composed with every certificate below the `release/` of their workdir
and below each `--released`, before their first step. Without a limit nothing is
checked: a workdir cannot know what was released elsewhere. A run that was killed before
it was finished does not count: nothing of it was released.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from tfdpsq import privacy, validation
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof.certificate import FILE_NAME
from tfdpsq.run.frame import places
from tfdpsq.run.frame.artefacts import class_stated
from tfdpsq.run.frame.places import Place, Privacy
from tfdpsq.validation import InputError

# The certificate itself, and what says that one is missing if there is none.
_MARKED = {FILE_NAME, *(name.rpartition("/")[2] for name in certificates.MARKED)}


@dataclasses.dataclass
class Found:
    """Certificates in some directories.

    Attributes:
      certificates: by digest.
      places: of each digest, the directories of the artefacts that carry it.
      problems: why a certificate cannot be read, or is missing.
      private: directories that were passed over.
    """

    certificates: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    places: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    private: list[str] = dataclasses.field(default_factory=list)

    def add(self, path: str) -> None:
        """Adds the certificate in a file, or those of all artefacts in a directory.

        Private ones are passed over, unless they are given themselves.

        Raises:
          InputError: there is no such file or directory.
        """
        root = pathlib.Path(path)
        if not root.exists():
            raise InputError(f"{path!r} does not exist. Give a workdir or an output.")
        if root.is_file():
            self._read(path, certificates.load_certificate)
            return
        folders = {file.parent for name in _MARKED for file in root.rglob(name)}
        for folder in sorted(folders):
            has_one = (folder / FILE_NAME).exists()
            if not has_one and folder != root and (folder.parent / FILE_NAME).exists():
                continue  # a part of the artefact above, as a retriever's `model/`
            inside = places.PRIVATE in folder.relative_to(root).parts
            hidden = inside or class_stated(str(folder)) == Privacy.PRIVATE
            if not hidden or folder == root:
                self._read(str(folder), privacy.read_certificate)
            elif not any(folder.is_relative_to(known) for known in self.private):
                self.private.append(str(folder))

    def _read(self, place: str, read: Any) -> None:
        """Adds a certificate, or why there is none."""
        try:
            found = read(place)
        except InputError as error:
            self.problems.append(str(error))
            return
        if found is None:
            return
        digest = str(found.get("digest"))
        known = self.places.setdefault(digest, [])
        if digest in self.certificates and found["private"] and not found.get("run_id"):
            self.problems.append(
                f"{known[0]} and {place} hold equal certificates without a run id: two "
                "runs with the same settings, or copies of one. If they are copies, "
                "give one of them."
            )
        self.certificates[digest] = found
        known += [place] if place not in known else []


@dataclasses.dataclass(frozen=True)
class Budget:
    """A limit on ε.

    Attributes:
      epsilon: of all releases together; above 0.
      released: directories of earlier ones, besides the workdir's.
    """

    epsilon: float
    released: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuses a limit that is not a positive number."""
        validation.positive("budget", self.epsilon)

    def require_within(self, place: Place, runs: Sequence[budget.Run]) -> None:
        """Refuses runs that would exceed the limit; nothing is spent yet.

        Args:
          place: of an output, whose workdir's releases count.
          runs: that are about to begin, and those whose releases they start from.

        Raises:
          InputError: the total would exceed the limit, or cannot be computed.
        """
        runs = [run for run in runs if run.plan.spec.private]
        if not runs:
            return
        found, own = Found(), place.private.parent / places.RELEASE
        for folder in (*([str(own)] if own.exists() else []), *self.released):
            found.add(folder)
        if found.problems:
            raise InputError(f"the budget cannot be checked: {found.problems[0]}")
        earlier: list[budget.Run] = []
        for digest, certificate in found.certificates.items():
            where = found.places[digest][0]
            earlier += certificates.verified_runs(certificate, where)
        budget.require_within(self.epsilon, earlier, runs)

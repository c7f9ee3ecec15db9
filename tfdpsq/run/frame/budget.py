"""Certificates of what was released, and the limit of `--budget` on their total.

What is in a workdir's `release/` counts, and what is in its `private/` does not. A run
under a limit is composed with every certificate below the `release/` of its workdir and
below each `--released`, before its first step. Without a limit nothing is checked: a
workdir cannot know what was released elsewhere. A run that was killed before it was
finished does not count: nothing of it was released.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from tfdpsq import privacy, validation
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof.certificate import FILE_NAME
from tfdpsq.run.frame import places
from tfdpsq.run.frame.places import Place
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
          InputError: there is no such file or directory, or no certificate in it.
        """
        root = pathlib.Path(path)
        if not root.exists():
            raise InputError(f"{path!r} does not exist. Give a workdir or an output.")
        files = [root]
        if root.is_dir():
            folders = {file.parent for name in _MARKED for file in root.rglob(name)}
            files = [f / FILE_NAME for f in sorted(folders) if self._counts(f, root)]
        if not any([self._read(file) for file in files]):
            raise InputError(
                f"{path} holds no {FILE_NAME} of anything released. Give the workdir "
                "or the directory of an artefact that was."
            )

    def _counts(self, folder: pathlib.Path, root: pathlib.Path) -> bool:
        """Returns whether an artefact was released, and is no part of another."""
        names = (places.PRIVATE, places.RELEASE)
        within = [part for part in folder.relative_to(root).parts if part in names]
        if within[-1:] == [places.PRIVATE]:
            if not any(folder.is_relative_to(known) for known in self.private):
                self.private.append(str(folder))
            return False
        # The certificate of a retriever covers its model/, and is compared with it.
        config = f"{folder.name}/config.json" in certificates.CONFIGS
        above = config and (folder.parent / FILE_NAME).exists()
        return not above or (folder / FILE_NAME).exists()

    def _read(self, file: pathlib.Path) -> bool:
        """Adds a certificate, or why there is none; returns whether one is due."""
        named = file.name != FILE_NAME
        read = certificates.load_certificate if named else privacy.read_certificate
        place = file if named else file.parent
        try:
            found = read(place)
        except InputError as error:
            self.problems.append(str(error))
            return True
        if found is None:
            return False
        self.certificates[found["digest"]] = found
        known = self.places.setdefault(found["digest"], [])
        known += [str(place)] if str(place) not in known else []
        if len(known) == 2 and found["private"] and not found["run_id"]:
            self.problems.append(
                f"{known[0]} and {known[1]} hold equal certificates without a run id: "
                "two runs with the same settings, or copies of one. If they are "
                "copies, give one of them."
            )
        return True


@dataclasses.dataclass(frozen=True)
class Budget:
    """A limit on ε.

    Attributes:
      epsilon: of all releases together.
      released: directories of earlier ones, besides the workdir's.
    """

    epsilon: float
    released: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuses a limit that is not a positive number, and missing directories."""
        validation.positive("budget", self.epsilon)
        for folder in self.released:
            if not os.path.isdir(folder):
                raise InputError(f"released is {folder}, where there is no directory.")

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
        found = Found()
        with contextlib.suppress(InputError):  # nothing was released yet
            found.add(str(place.private.parent / places.RELEASE))
        for folder in self.released:
            found.add(folder)
        if found.problems:
            raise InputError(f"the budget cannot be checked: {found.problems[0]}")
        earlier: list[budget.Run] = []
        for digest, certificate in found.certificates.items():
            where = found.places[digest][0]
            earlier += certificates.verified_runs(certificate, where)
        budget.require_within(self.epsilon, earlier, runs)

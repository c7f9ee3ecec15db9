"""The limit of `--budget`: what all releases together may spend.

A run under a limit is composed with every certificate below the `release/` of its
workdir and below each `--released`, before its first step. Without a limit nothing is
checked: a workdir cannot know what was released elsewhere. What is private, or was
killed before it was finished, does not count: nothing of it was released.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from tfdpsq import privacy, validation
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run.frame import places
from tfdpsq.run.frame.artefacts import class_stated
from tfdpsq.run.frame.places import Place, Privacy
from tfdpsq.validation import InputError


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
        """Refuses a limit that is no positive number, and missing directories."""
        validation.positive("budget", self.epsilon)
        for folder in self.released:
            if not os.path.isdir(folder):
                raise InputError(f"released is {folder}, where there is no directory.")

    @contextlib.contextmanager
    def spending(self, place: Place, runs: Sequence[budget.Run]) -> Iterator[None]:
        """Refuses runs that would exceed the limit; keeps others out while they spend.

        Args:
          place: of the output.
          runs: that are about to begin, and those whose releases they start from.

        Raises:
          InputError: the total would exceed the limit; or another process spends in
            the same workdir, whose release is not there yet.
        """
        with places.locked(Place(f"{place.private}/spending", place.private)):
            earlier: list[budget.Run] = []
            own = str(place.private.parent / places.RELEASE)
            folders = [own, *self.released]
            for path, found in _found(folders).items():
                earlier += certificates.verified_runs(found, path)
            budget.require_within(self.epsilon, earlier, list(runs))
            yield


def _found(folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the certificates in some directories, each once, by one of its places."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for folder in folders:
        for path in sorted(pathlib.Path(folder).rglob(certificates.FILE_NAME)):
            if class_stated(str(path.parent)) < Privacy.PRIVATE:
                certificate = privacy.read_certificate(path.parent)
                assert certificate is not None
                found[certificate["digest"]] = (str(path.parent), certificate)
    return dict(found.values())

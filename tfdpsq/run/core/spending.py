"""Certificates of what was released, and the limit that `--budget` sets on a stage.

A stage under a limit composes its plan with every certificate in the `release/` folder
of its workdir and in each directory given with `--released`, before its first step, and
refuses to run if their total would exceed the limit. Until it ends, no other stage can
begin under a limit that counts the same `release/`: what it will release is not there
yet. This holds among processes of one machine and for that folder alone; stages with
other workdirs that name each other in `--released` must run one after the other.
Without `--budget` nothing is
checked: a workdir cannot know what was released elsewhere. A run that was killed before
it was finished does not count: nothing of it was released, and the command that resumes
it is checked with all of its steps.
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
from tfdpsq.privacy.proof.certificate import FILE_NAME
from tfdpsq.run.core import releases, workdir

# The certificate itself, and what says that one is missing if there is none.
_MARKED = (FILE_NAME, *certificates.MARKED)


@dataclasses.dataclass
class Found:
    """Certificates in some directories.

    Attributes:
      certificates: digest -> certificate.
      places: digest -> directories of the artefacts that carry it, or files with other
        names, of which a directory can hold several.
      refused: path -> why it could not be read.
      unreleased: directories that were passed over, as they stay private.
    """

    certificates: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    places: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    unreleased: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Found) -> None:
        """Adds what was found elsewhere."""
        self.certificates |= other.certificates
        self.refused |= other.refused
        self.unreleased += other.unreleased
        for digest, places in other.places.items():
            known = self.places.setdefault(digest, [])
            known += [place for place in places if place not in known]

    @property
    def ambiguous(self) -> list[str]:
        """Why certificates may be of one run or of two, a line each.

        Runs outside a directory have no id, so copies of one certificate look like the
        certificates of two runs with the same settings.
        """
        return [
            f"{self.places[digest][0]} and {self.places[digest][1]} hold equal "
            "certificates without a run id: two runs with the same settings, or copies "
            "of one. If they are copies, give one of them."
            for digest, certificate in self.certificates.items()
            if len(self.places[digest]) > 1
            and certificate.get("private")
            and not certificate.get("run_id")
        ]


@dataclasses.dataclass(frozen=True)
class _Limit:
    epsilon: float
    released: tuple[str, ...]
    folders: tuple[str, ...]


_limits: list[_Limit] = []
# Folders of releases that this process has locked, until its outermost limit ends.
_reserved: dict[str, contextlib.ExitStack] = {}


def find_certificates(directory: str | os.PathLike) -> Found:
    """Finds the certificates of all artefacts in a directory, or that in a file.

    Under a directory called `release`, everything that is finished counts. Elsewhere,
    directories called `private` and those that state the guarantee "private" are
    passed over, unless one is given itself.

    Raises:
      InputError: there is no such directory, or no artefact in it was released.
    """
    found, root = Found(), pathlib.Path(directory)
    if not os.fspath(directory).strip():  # which would be the current directory
        raise validation.InputError(
            f"{os.fspath(directory)!r} names no directory. Give a workdir, an "
            f"artefact's directory or a {FILE_NAME}."
        )
    if root.is_file():
        _add(found, root.parent, root)
    elif not root.is_dir():
        raise validation.InputError(
            f"{os.fspath(directory)} does not exist. Give a workdir, an artefact's "
            f"directory or a {FILE_NAME}."
        )
    else:
        _walk(found, root, first=True)
    if not found.certificates and not found.refused:
        raise validation.InputError(
            f"{root} holds no {FILE_NAME} of anything released. Give the workdir or "
            "the directory of an artefact that was."
        )
    return found


def _walk(
    found: Found, folder: pathlib.Path, first: bool = False, private: bool = False
) -> None:
    """Adds what is in a folder; of one in `private`, only what is released."""
    released = releases.is_released(folder)
    counts = released or not private
    if counts and any((folder / name).is_file() for name in _MARKED):
        itself = releases.marked(folder) == releases.PRIVATE
        if itself and not first and not released:
            found.unreleased.append(os.fspath(folder))
            # It can contain another job's workdir, whose releases count.
            counts, private = False, True
        elif not _is_part(folder):
            _add(found, folder, folder / FILE_NAME)
    for inside in sorted(folder.iterdir()):
        if not inside.is_dir() or releases.UNFINISHED.fullmatch(inside.name):
            continue
        hides = inside.name == releases.PRIVATE_FOLDER
        if hides and counts and not releases.is_released(inside):
            found.unreleased.append(os.fspath(inside))
        _walk(found, inside, private=private or hides)
    if counts:
        _require_certificate(found, folder)


def _is_part(folder: pathlib.Path) -> bool:
    """Returns whether the certificate of a folder's files is that of the one it is in.

    So it is of a retriever's `model/`.
    """
    if (folder / FILE_NAME).exists():
        return False
    digests = {certificates.digest_in(folder / n) for n in _MARKED[1:]} - {None}
    above = certificates.stated(folder.parent / FILE_NAME, "digest")
    return digests == {above}


def _require_certificate(found: Found, folder: pathlib.Path) -> None:
    """Refuses a stage's output that was certified, and has no certificate left."""
    stage = folder / releases.STAGE_FILE
    stated = certificates.stated(stage, certificates.GUARANTEE)
    if stated != releases.CERTIFIED or any(folder.rglob(FILE_NAME)):
        return
    if not any(folder in pathlib.Path(path).parents for path in found.refused):
        found.refused[os.fspath(stage)] = (
            f'states the guarantee "{stated}", but there is no {FILE_NAME} in '
            f"{folder}. Copy what is missing from where this was made."
        )


def _add(found: Found, folder: pathlib.Path, path: pathlib.Path) -> None:
    try:
        if path.name == FILE_NAME:
            certificate = privacy.read_certificate(folder)
        else:
            certificate = certificates.load_certificate(path)
    except validation.InputError as error:
        found.refused[os.fspath(path)] = str(error)
        return
    if certificate is not None:
        digest = str(certificate.get("digest"))
        found.certificates[digest] = certificate
        place = folder if path.name == FILE_NAME else path
        places = found.places.setdefault(digest, [])
        if os.fspath(place) not in places:
            places.append(os.fspath(place))


# -- The limit of a stage ----------------------------------------------------------


@contextlib.contextmanager
def limited(
    epsilon: float, released: Sequence[str], place: str | os.PathLike
) -> Iterator[None]:
    """Limits what stages inside the block may spend.

    `epsilon` is the total of all releases, 0 for no limit, and `released` are
    directories of earlier ones. `place` is the workdir, links followed: its `release/`
    counts, or the one it is in, or the one next to it.

    Raises:
      InputError: a limit that is not a positive number; or directories without one.
    """
    if not epsilon:
        if released:
            raise validation.InputError(
                f"released is {', '.join(released)}, which counts against a budget "
                "only, and none was given. Add --budget=EPSILON."
            )
        yield
        return
    validation.positive("budget", epsilon)
    folders: set[pathlib.Path] = set()
    for inside in map(pathlib.Path, releases.spellings(os.fspath(place))):
        for above in (inside, *inside.parents[:2]):
            folders.add(above / releases.RELEASE_FOLDER)
        folders |= {up for up in inside.parents if up.name == releases.RELEASE_FOLDER}
    real = {os.path.realpath(folder) for folder in folders}
    _limits.append(_Limit(epsilon, tuple(released), tuple(sorted(real))))
    try:
        yield
    finally:
        _limits.pop()
        while _reserved and not _limits:
            _reserved.popitem()[1].close()


def is_limited() -> bool:
    """Returns whether `require_within` has anything to check."""
    return bool(_limits)


def require_within(runs: Sequence[budget.Run]) -> None:
    """Refuses runs that would exceed the limit, if there is one; nothing is spent yet.

    `runs` are those that are about to begin, and those whose releases they start from.

    Raises:
      InputError: the total would exceed the limit, or cannot be computed; or another
        process spends under a limit that counts the same releases.
    """
    private = [run for run in runs if run.plan.spec.private]
    for limit in _limits if private else ():
        _reserve(limit.folders)
        found = Found()
        for folder in limit.folders:
            with contextlib.suppress(validation.InputError):  # nothing released yet
                found.add(find_certificates(folder))
        for folder in limit.released:
            found.add(find_certificates(folder))
        budget.require_within(limit.epsilon, _runs_of(found), private)


def _reserve(folders: Sequence[str]) -> None:
    """Keeps others from spending what is about to be spent, and not yet released."""
    for folder in folders:
        if folder not in _reserved and os.path.isdir(folder):
            lock = contextlib.ExitStack()
            lock.enter_context(
                workdir.held(
                    folder,
                    f"another process trains under a budget that counts {folder}, "
                    "where its release is missing yet. Nothing was spent: wait until "
                    "it ends, or stop it.",
                )
            )
            _reserved[folder] = lock


def _runs_of(found: Found) -> list[budget.Run]:
    for path, why in found.refused.items():
        raise validation.InputError(f"the budget cannot be checked: {path}: {why}")
    if found.ambiguous:
        raise validation.InputError(
            f"the budget cannot be checked: {found.ambiguous[0]}"
        )
    runs: list[budget.Run] = []
    for digest, certificate in found.certificates.items():
        runs += certificates.verified_runs(certificate, found.places[digest][0])
    return runs

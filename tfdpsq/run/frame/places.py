"""Where an output goes, by one rule, and what is kept next to it.

| class     | holds for                              | goes             | mode       |
|-----------|----------------------------------------|------------------|------------|
| public    | what comes from public documents alone | anywhere         | umask      |
| certified | what carries a certificate, ε finite   | anywhere         | umask      |
| private   | all else that private queries touched  | under `private/` | 0600, 0700 |

| output                        | its private directory |
|-------------------------------|-----------------------|
| `X/release/...`, `X/NAME`     | `X/private`           |
| `X/private/...`               | `X/private`           |

    private/partial/NAME/   what is not finished; never released
    private/runs/NAME/      ledger, seeds and states of a training run
    private/logs/NAME/      progress and TensorBoard events
    private/records/NAME.json    durations, exact private counts
    private/locks/NAME      locked while the output is made
    private/private_reads.jsonl, private/fingerprint.key

Released files have constant times: real ones would show how long the private stages
before them took.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterator

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.validation import InputError

RELEASE, PRIVATE = "release", "private"
# 1980-01-01, the first day that a zip file can state; 2037-01-01, as Linux does not
# update an access time in the future (relatime).
_MODIFIED, _ACCESSED = 315_532_800, 2_114_380_800


class Privacy(enum.IntEnum):
    """The privacy class of what a stage makes; a larger one goes to fewer places."""

    PUBLIC, CERTIFIED, PRIVATE = range(3)

    @property
    def word(self) -> str:
        """The name in records."""
        return self.name.lower()


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of an output."""

    path: str  # absolute
    private: pathlib.Path  # the directory of what must not be released with it

    @classmethod
    def of(cls, path: str | os.PathLike | None) -> Place:
        """Returns the place of a path, which `--workdir` says.

        Raises:
          InputError: the path is empty, or a URL.
        """
        place = validation.local_path("--workdir", path or "")
        return cls(place, _private_of(pathlib.Path(place)))

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def partial(self) -> pathlib.Path:
        """Directory of what is not finished."""
        return self.private / "partial" / self.name

    @property
    def run(self) -> pathlib.Path:
        """Directory of the ledger, seeds and states of a training run."""
        return self.private / "runs" / self.name

    @property
    def logs(self) -> pathlib.Path:
        """Directory of the logs."""
        return self.private / "logs" / self.name

    @property
    def record(self) -> pathlib.Path:
        """File of durations and exact private counts."""
        return self.private / "records" / f"{self.name}.json"

    @property
    def lock(self) -> pathlib.Path:
        """File that is locked while the output is made."""
        return self.private / "locks" / self.name

    def require(self, privacy: Privacy, stage: str) -> None:
        """Applies the rule.

        Raises:
          InputError: a private output outside `private/`.
        """
        parts = self.path.split("/")
        if privacy < Privacy.PRIVATE or (PRIVATE in parts and RELEASE not in parts):
            return
        where = f"under {RELEASE}/" if RELEASE in parts else f"not under {PRIVATE}/"
        raise InputError(
            f"{self.path} is {where}, but what {stage} makes here is private: no "
            f"epsilon covers it. Use --workdir={self.private / self.name}."
        )


def _private_of(place: pathlib.Path) -> pathlib.Path:
    if RELEASE in place.parts:
        return pathlib.Path(*place.parts[: place.parts.index(RELEASE)], PRIVATE)
    # The nearest directory of this name above, or one beside the output.
    found = (above for above in place.parents if above.name == PRIVATE)
    return next(found, place.parent / PRIVATE)


@contextlib.contextmanager
def owner_only() -> Iterator[int]:
    """Makes files that are created inside readable by their owner alone.

    Yields:
      The umask of before.
    """
    before = os.umask(0o077)
    try:
        yield before
    finally:
        os.umask(before)


def open_private(directory: pathlib.Path) -> pathlib.Path:
    """Makes a private directory, 0700, and takes the rights of others from it."""
    with io.explained(directory, any_error=True):
        for above in reversed(directory.parents):
            if PRIVATE not in above.parts:
                above.mkdir(exist_ok=True)
        with owner_only():
            directory.mkdir(parents=True, exist_ok=True)
        if directory.name == PRIVATE:
            directory.chmod(0o700)
    return directory


@contextlib.contextmanager
def appearing(place: Place, privacy: Privacy, umask: int) -> Iterator[pathlib.Path]:
    """Yields a directory to fill, which is an output's once the block has ended.

    It is then renamed, with the modes and times of its class.
    """
    out = place.partial / "out"
    shutil.rmtree(out, ignore_errors=True)  # of a try that was killed
    with io.explained(open_private(out), "Finished shards and paid steps are kept."):
        yield out
    outside = 0o077 if privacy == Privacy.PRIVATE else umask
    for each in [*sorted(out.rglob("*"), reverse=True), out]:  # directories last
        each.chmod((0o777 if each.is_dir() else 0o666) & ~outside)
        if privacy < Privacy.PRIVATE:
            os.utime(each, (_ACCESSED, _MODIFIED))
        io.flush(each)
    above = pathlib.Path(place.path).parent
    if privacy == Privacy.PRIVATE:
        open_private(above)
    else:
        os.umask(umask)  # as if the user had made the directory
        above.mkdir(parents=True, exist_ok=True)
        os.umask(0o077)
    os.rename(out, place.path)  # also replaces an empty directory
    io.flush(above)


def settle(place: str) -> None:
    """Resets the times, which renaming changed, of directories from `release` down."""
    for above in pathlib.PurePath(place).parents:
        if RELEASE in above.parts:
            with contextlib.suppress(OSError):  # missing, or another user's
                os.utime(above, (_ACCESSED, _MODIFIED))


@contextlib.contextmanager
def locked(place: Place) -> Iterator[None]:
    """Keeps other processes of this machine from making the same output.

    Raises:
      InputError: another process makes it.
    """
    open_private(place.private)
    with owner_only():
        place.lock.parent.mkdir(exist_ok=True)
        file = open(place.lock, "a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{place.path} is being made by process {place.lock.read_text()}. "
                "Wait until it ends, or stop it."
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def holder(place: Place) -> str:
    """Returns the id of the process that makes an output, or ""."""
    if not place.lock.is_file():
        return ""
    with open(place.lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read() or "?"
    return ""

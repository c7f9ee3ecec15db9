"""Saved states, from which a killed run goes on as if nothing had happened.

    DIRECTORY/ledger.jsonl            the steps paid for; see `ledger`
    DIRECTORY/state/secrets.json      the seed of samples, noise and dropout, its run,
                                      and the settings that it was begun with
    DIRECTORY/state/step-00000025.npz weights and optimizer after 25 steps

Ledger, seeds and states name one run, at random: a state of another run, from a backup
say, is refused. Until a step is paid for, every start makes new seeds and weights.

Who has the seeds can subtract the noise: the directory is never released, and `discard`
removes the state once the result is safe. The ledger stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import secrets as system_secrets
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy.proof.ledger import flush_folder
from tfdpsq.privacy.randomness.sampling import fresh_seed

STATE = "state"
SECRETS = "secrets.json"
_STATES = f"step-{'[0-9]' * 8}.npz"  # not copies of them


@dataclasses.dataclass(frozen=True)
class Secrets:
    """The seed of a run's `RunKey`, which no `repr` shows, and its `Ledger.run`."""

    run: str
    seed: int = dataclasses.field(repr=False)


def run_directory(directory: str | os.PathLike) -> str:
    """Returns the absolute path of a run's directory.

    Raises:
      InputError: the path is not on this machine, or is inside a folder "release".
    """
    path = validation.local_path("directory", directory)
    if "release" in pathlib.PurePath(path).parts:
        raise validation.InputError(
            f"directory is {path}, and would release the noise's seeds. Give another."
        )
    return path


def open_secrets(
    directory: str | os.PathLike,
    run: str,
    steps_paid: int,
    settings: Mapping[str, str],
    secure: bool = False,
) -> Secrets:
    """Returns the seeds of the run in `directory`, new ones if no step is paid for.

    Seeds and states found there are then removed: a copy of them may have gone on as
    another run, and with the same noise both together reveal what it hides.

    Args:
      directory: the run's private directory.
      run: `Ledger.run`.
      steps_paid: `Ledger.steps_paid`.
      settings: name and value of all that a repeated step depends on.
      secure: whether new seeds are keys of a cryptographic generator.

    Raises:
      InputError: steps were paid for, and the seeds are gone, damaged, of another run
        or of other settings.
    """
    path = pathlib.Path(directory) / STATE / SECRETS
    if not steps_paid:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in _states(directory):
            old.unlink()
        made = Secrets(run, fresh_seed(secure))
        content = {**dataclasses.asdict(made), "settings": dict(settings)}
        with _written(path) as file:
            file.write(json.dumps(content).encode())
        return made
    if not path.is_file():
        raise _spent(steps_paid, f"{path} is not there")
    try:
        found = json.loads(path.read_bytes())
        kept, before = Secrets(found["run"], int(found["seed"])), found["settings"]
    except (ValueError, KeyError, TypeError) as error:
        problem = f"it does not hold the run's seed ({error})"
        raise validation.DataError(path, problem, "Restore a backup.") from error
    if kept.run != run:
        problem = f"not the seeds of the {steps_paid} steps that the ledger pays for"
        raise validation.DataError(path, problem, "Restore both from one backup.")
    for name in sorted({*before, *settings}):
        was, now = before.get(name), settings.get(name)
        if was != now:
            raise validation.InputError(
                f"{directory}: {name} changed since the run began (from "
                f"{validation.shown(was)} to {validation.shown(now)}). Restore it, or "
                "use another directory."
            )
    return kept


def is_open(directory: str | os.PathLike) -> bool:
    """Returns whether the directory holds the seeds of a run not yet discarded."""
    return (pathlib.Path(directory) / STATE / SECRETS).is_file()


def steps_taken(directory: str | os.PathLike) -> int:
    """Returns the steps of the last saved state, or 0."""
    files = _states(directory)
    return int(files[-1].stem.split("-")[1]) if files else 0


def save(
    directory: str | os.PathLike, step: int, variables: Sequence[tf.Variable], run: str
) -> None:
    """Writes the variables after `step` steps, and removes all but the last two states.

    Raises:
      InputError: the disk is full or the place cannot be written.
    """
    folder = pathlib.Path(directory) / STATE
    path = folder / f"step-{step:08d}.npz"
    values = (v.numpy().view(_stored_type(v)) for v in variables)
    try:
        # Array by array; savez would hold all of them, and leaves an archive open where
        # the disk is full.
        with _written(path) as file, zipfile.ZipFile(file, "w") as archive:
            for number, array in enumerate(itertools.chain([np.array(run)], values)):
                with archive.open(f"{number:05d}.npy", "w", force_zip64=True) as one:
                    np.lib.format.write_array(one, np.asanyarray(array))
    except OSError as error:
        raise validation.InputError(
            f"{path}: the state after step {step} could not be written "
            f"({error.strerror}). Make room and resume."
        ) from error
    for old in _states(directory)[:-2]:
        old.unlink()
    for left in folder.glob(".*.partial"):  # of a process that was killed
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def restore(
    directory: str | os.PathLike,
    variables: Sequence[tf.Variable],
    steps_paid: int,
    run: str,
) -> int | None:
    """Sets the variables to the last state; returns its steps, `None` if there is none.

    Raises:
      InputError: the state is damaged, of another run or of other variables; or there
        is none, and steps were paid for.
    """
    files = _states(directory)
    if not files:
        if steps_paid:
            raise _spent(steps_paid, f"there is no saved state in {directory}")
        return None
    path = files[-1]
    try:
        with np.load(path) as saved:
            stated, *values = [saved[name] for name in sorted(saved.files)]
    except Exception as error:  # of a flipped byte NumPy and zip make any kind
        problem = f"it cannot be read ({error})"
        raise validation.DataError(path, problem, "Move it away.") from error
    if str(stated) != run:
        problem = "it is the state of another run than the ledger's"
        raise validation.DataError(path, problem, "Restore both from one backup.")
    shapes = [(_stored_type(v), tuple(v.shape)) for v in variables]
    if [(value.dtype.type, value.shape) for value in values] != shapes:
        raise validation.InputError(
            f"{path} is of another model or optimizer. Restore their settings."
        )
    for variable, value in zip(variables, values):
        variable.assign(value.view(variable.dtype.as_numpy_dtype))
    return steps_taken(directory)


def discard(directory: str | os.PathLike) -> None:
    """Removes seeds and weights of a run whose result is safe; the ledger stays."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(pathlib.Path(directory) / STATE)


def _spent(steps_paid: int, why: str) -> validation.InputError:
    return validation.InputError(
        f"{steps_paid} steps are paid for, but {why}. Training again would spend the "
        "budget a second time. Restore the state."
    )


def _stored_type(variable: tf.Variable) -> type:
    # NumPy's files know no bfloat16: its bits are kept as they are.
    return np.uint16 if variable.dtype == tf.bfloat16 else variable.dtype.as_numpy_dtype


def _states(directory: str | os.PathLike) -> list[pathlib.Path]:
    """Lists the saved states in order."""
    return sorted((pathlib.Path(directory) / STATE).glob(_STATES))


@contextlib.contextmanager
def _written(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Opens a file that has its name only once all of it is on the device."""
    partial = path.with_name(f".{system_secrets.token_hex(4)}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    flush_folder(path.parent)

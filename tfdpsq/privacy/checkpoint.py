"""Saved states, from which a killed run goes on as if nothing had happened.

    DIRECTORY/ledger.jsonl            the steps paid for; see `ledger`
    DIRECTORY/state/secrets.json      the seed of samples, noise and dropout, the run it
                                      belongs to, and what that was begun with
    DIRECTORY/state/step-00000025.npz weights and optimizer after 25 steps

Ledger, seeds and states name one run, at random: a state of another run, from a backup
say, is refused. Until a step is paid for, seeds and weights are made again every time.

The seeds are as secret as the data: anyone who has them can subtract the noise. So
none of this is in a directory meant for release, and `discard` removes the state
once the result is safe. The ledger stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import secrets as system_secrets
import shutil
import zipfile
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy.randomness.sampling import fresh_seed
from tfdpsq.privacy.randomness.secure import KEY_BITS

STATE = "state"
# A folder of this name holds what may be published.
_RELEASED = "release"
SECRETS = "secrets.json"
_KEPT = 2
# As `save` names a state; other files there, such as copies, are not ours.
_STATE_NAME = re.compile("step-[0-9]{8,}\\.npz")
# Longer settings, and digests, are not quoted.
_QUOTED = 120


@dataclasses.dataclass(frozen=True)
class Secrets:
    """The seed of one run, which no `repr` shows.

    Attributes:
      run: name of the run, as its ledger has it.
      seed: of its `RunKey`: samples, noise and dropout. 128 bits; 256 where the spec
        is secure.
    """

    run: str
    seed: int = dataclasses.field(repr=False)


def run_directory(directory: str | os.PathLike) -> str:
    """Returns the absolute path of a run's directory, which holds its seeds.

    Raises:
      InputError: the path is not on this machine, or is inside a folder "release".
    """
    path = validation.local_path("directory", directory)
    if _RELEASED in pathlib.PurePath(path).parts:
        raise validation.InputError(
            f"directory is {path}, in a folder {_RELEASED!r}, and would hold the seeds "
            "of the noise, with which anyone can subtract it. Give a private directory."
        )
    return path


def open_secrets(
    directory: str | os.PathLike,
    run: str,
    steps_paid: int,
    settings: Mapping[str, str],
    secure: bool = False,
) -> Secrets:
    """The seeds of the run in `directory`, made and written if no step is paid for.

    Seeds and states found there are then removed: a copy of them may have gone on as
    another run, and with the same noise both together reveal what it hides.

    Args:
      directory: the run's private directory.
      run: `Ledger.run` of its ledger.
      steps_paid: what the ledger says.
      settings: what must be as it was for a step to be the same step, by name.
      secure: whether new seeds are keys of a cryptographic generator.

    Raises:
      InputError: steps were paid for but the seeds are gone, so that no replay can
        be the same step; or with other settings.
      DataError: the file is damaged, or of another run.
    """
    path = pathlib.Path(directory) / STATE / SECRETS
    if not steps_paid:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in _files(path.parent):
            left.unlink()
        made = Secrets(run, fresh_seed(secure))
        content = {**dataclasses.asdict(made), "settings": dict(settings)}
        _write(path, json.dumps(content).encode())
        return made
    if not path.is_file():
        raise spent(directory, steps_paid, f"{path} is not there")
    try:
        found = validation.parse_json(path.read_text("utf-8"))
        kept = Secrets(found["run"], _seed(found["seed"], secure))
        before = {str(k): str(v) for k, v in found["settings"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise validation.DataError(
            path,
            f"it does not hold the run's seed ({error})",
            "Restore it from a backup: without it the run cannot go on.",
        ) from error
    if kept.run != run:
        raise validation.DataError(
            path,
            f"these are not the seeds of the {steps_paid} steps that the ledger pays "
            "for, which would be taken again as other steps",
            f"Restore the {STATE} that belongs to this ledger, or use another "
            "directory: a new run spends a budget of its own, and both add up.",
        )
    for name in sorted({*before, *settings}):
        was, now = before.get(name), settings.get(name)
        if was == now:
            continue
        quoted = ""
        if was and now and len(was) + len(now) <= _QUOTED:
            quoted = f": {was} then, {now} now"
        raise validation.InputError(
            f"{name} changed since the run in {directory} began{quoted}. The "
            f"{steps_paid} steps it paid for would be other steps: go on as it began, "
            "or use another directory."
        )
    return kept


def _seed(value: object, secure: bool) -> int:
    """Checks a seed that was read; raises `ValueError`."""
    bits = KEY_BITS if secure else 128  # as `fresh_seed` draws them
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise ValueError(f"a seed is not a number of at most {bits} bits")
    return value


def is_open(directory: str | os.PathLike) -> bool:
    """Returns whether the directory holds the seeds of a run not yet discarded."""
    return (pathlib.Path(directory) / STATE / SECRETS).is_file()


def steps_taken(directory: str | os.PathLike) -> int:
    """Returns the steps executed in the last saved state; 0 where there is none."""
    files = _files(pathlib.Path(directory) / STATE)
    return _step(files[-1]) if files else 0


def save(
    directory: str | os.PathLike,
    step: int,
    variables: Sequence[tf.Variable],
    run: str,
) -> None:
    """Writes the values after `step` steps, and removes all but the last two files.

    `variables` are weights and optimizer, always in the same order.

    Raises:
      InputError: the disk is full or the place cannot be written.
    """
    folder = pathlib.Path(directory) / STATE
    partial = folder / f".{system_secrets.token_hex(4)}.partial"
    try:
        with open(partial, "wb", opener=_owner_only) as file:
            # Not savez: where the disk is full, it leaves an archive open.
            with zipfile.ZipFile(file, "w") as archive:
                _put(archive, "run", np.array(run))
                for number, variable in enumerate(variables):
                    _put(archive, f"{number:05d}", _plain(variable))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / f"step-{step:08d}.npz")
        _flush_directory(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise validation.InputError(
            f"the state after step {step} could not be written to {folder} "
            f"({error.strerror}). Make room there and start the same command again: "
            "it goes on from the state before, and pays for no step twice."
        ) from error
    for old in _files(folder)[:-_KEPT]:
        old.unlink()
    for left in folder.glob(".*.partial"):
        if left.is_dir():  # rows, of a process that was killed while it wrote them
            shutil.rmtree(left)
        else:
            left.unlink()


def restore(
    directory: str | os.PathLike,
    variables: Sequence[tf.Variable],
    steps_paid: int,
    run: str,
    trained: int = 0,
) -> int | None:
    """Sets the variables to the last state saved.

    They are those given to `save`. The first `trained` of them must be finite: what is
    trained, as it is in every state of a run that ends if it diverges.

    Returns:
      Steps executed in that state; `None` where the run is new.

    Raises:
      InputError: the state is of other variables; or steps were paid for and there
        is no state.
      DataError: the file is damaged, or what is trained is not finite there.
    """
    files = _files(pathlib.Path(directory) / STATE)
    if not files:
        if steps_paid:
            raise spent(directory, steps_paid, "there is no saved state")
        return None
    path = files[-1]
    try:
        with np.load(path) as saved:
            stated = str(saved["run"])
            names = sorted(name for name in saved.files if name != "run")
            values = [saved[name] for name in names]
    except Exception as error:  # of a flipped byte NumPy and zip make any kind
        raise validation.DataError(
            path,
            f"it cannot be read ({error})",
            "Move it away: training goes on from the state before it, if there is one, "
            "and repeats steps that are paid already.",
        ) from error
    if stated != run:
        raise validation.DataError(
            path,
            "it is the state of another run than the ledger's",
            "Restore both from one backup: with other seeds the steps that are paid "
            "would be other steps.",
        )
    shapes = [(_stored_type(v), tuple(v.shape)) for v in variables]
    if [(value.dtype.type, value.shape) for value in values] != shapes:
        raise validation.InputError(
            f"{path} is the state of another model or optimizer: its {len(values)} "
            f"arrays do not have the types and shapes of the {len(shapes)} variables. "
            "Use the settings it was made with, or another directory."
        )
    values = [v.view(x.dtype.as_numpy_dtype) for v, x in zip(values, variables)]
    for variable, value in zip(variables[:trained], values):
        if not np.isfinite(value).all():
            raise validation.DataError(
                path,
                f"{variable.name} holds NaN or infinite values, which no run saves",
                "Restore the file from a backup: training would diverge.",
            )
    for variable, value in zip(variables, values):
        variable.assign(value)
    return _step(path)


def discard(directory: str | os.PathLike) -> None:
    """Removes seeds and weights of a run whose result is safe; the ledger stays.

    Args:
      directory: the run's private directory; one without a state is left as it is.
    """
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(pathlib.Path(directory) / STATE)


def spent(
    directory: str | os.PathLike, steps_paid: int, why: str
) -> validation.InputError:
    """The error for a budget that was spent on a run which cannot be continued."""
    return validation.InputError(
        f"the ledger in {directory} says that {steps_paid} steps were paid for, but "
        f"{why}, so they cannot be repeated as the same steps. Training again would "
        "spend the budget a second time: restore the state from a backup, or, to "
        "spend again knowingly, move the ledger away and add up both certificates."
    )


def _stored_type(variable: tf.Variable) -> type:
    # numpy's files know no bfloat16: its bits are kept as they are.
    if variable.dtype == tf.bfloat16:
        return np.uint16
    return variable.dtype.as_numpy_dtype


def _put(archive: zipfile.ZipFile, name: str, values: np.ndarray) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.asanyarray(values))


def _plain(variable: tf.Variable) -> np.ndarray:
    return variable.numpy().view(_stored_type(variable))


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Lists the states that `save` wrote, in the order of their steps."""
    found = folder.glob("step-*.npz")
    return sorted((p for p in found if _STATE_NAME.fullmatch(p.name)), key=_step)


def _step(path: pathlib.Path) -> int:
    return int(path.stem.split("-")[1])


def _write(path: pathlib.Path, content: bytes) -> None:
    partial = path.with_name(f".{system_secrets.token_hex(4)}.partial")
    with open(partial, "wb", opener=_owner_only) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    _flush_directory(path.parent)


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _flush_directory(folder: pathlib.Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

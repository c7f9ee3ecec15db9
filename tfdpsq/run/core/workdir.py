"""Stages and their directories: made whole or not at all, never made twice.

A stage fills a temporary sibling directory, which is renamed into place when it is
complete. Its `stage.json` holds the config, the fingerprints of the inputs, the
guarantee (see `releases`) and a random id of the run, which reveals outputs made from
an earlier run. It does not hold the duration, which depends on the private data. An
existing directory is therefore finished and not made again; one made from another
config or other inputs is refused, since mixed numbers would belong to neither.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import math
import numbers
import os
import pathlib
import platform
import resource
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_collections
import numpy as np
from absl import logging

import tfdpsq
from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run.core import layout, outputs, releases, used_parts

STAGE_FILE = releases.STAGE_FILE
CONFIG_FILE = "config.json"
_STAGE_ENTRIES = {
    **{"config": dict, "inputs": dict, "result": dict},
    **{"fingerprint": str, "run": str},
}
# Nothing is to be deleted that may have cost budget.
_REMEDIES = {
    STAGE_FILE: "Restore it, or move the directory it is in away to make it again.",
    CONFIG_FILE: "Restore it, or copy the one that the same command writes into an "
    "empty --workdir.",
}
# Key of the version that made something, in every record of how it was made.
MADE_BY = "made_by"
_BEFORE_IT_WAS_WRITTEN = "tfdpsq 0.1.0"
# Folder of a private directory: ledgers, secrets and states of training runs.
RUNS = layout.RUNS
# A setting that says where something is kept, and nothing of the result.
_PLACE = "private_directory"
# Where this package has the T5s that it ships, wherever it is installed.
_SHIPPED = "/tfdpsq/generator/presets/"
# Key of the directory of a record, in it.
WRITTEN_IN = "written_in"


def differences(
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    place: str | os.PathLike | None = None,
) -> list[str]:
    """Returns what differs, in words, of configs and inputs that results depend on.

    A workdir may be moved, copied, or given by another path. So it is left out where
    private things are kept; and where `place` is given, of which `found` says where it
    was then, so are paths that are the same from both. What they lead to is compared by
    its fingerprint, among the inputs.
    """
    before, now = found.get(WRITTEN_IN), None
    if place is not None and isinstance(before, str):
        now = os.path.abspath(place)
    known = {name: value for name, value in found.items() if name != WRITTEN_IN}

    def as_wanted(old: Any, new: Any) -> Any:
        """Copies the old values without places; the new one of a path that moved."""
        if isinstance(old, Mapping):
            other = new if isinstance(new, Mapping) else {}
            return {
                name: as_wanted(value, other.get(name))
                for name, value in old.items()
                if name != _PLACE
            }
        if isinstance(old, (list, tuple)):
            others = list(new) if isinstance(new, (list, tuple)) else []
            others += [None] * (len(old) - len(others))
            return [as_wanted(*both) for both in zip(old, others)]
        paths = isinstance(old, str) and isinstance(new, str)
        if paths and _shipped(new) and _shipped(new) == _shipped(old):
            return new
        if now is None or now == before or not paths:
            return old
        if not (os.path.isabs(old) and os.path.isabs(new)):
            return old
        is_moved = os.path.relpath(old, before) == os.path.relpath(new, now)
        return new if is_moved else old

    old = as_wanted(_with_equal_contents(known, wanted), wanted)
    return changed_values(old, as_wanted(wanted, wanted))


def changed_values(old: Any, new: Any, where: str = "") -> list[str]:
    """Lists up to five paths at which two JSON values differ, each with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            path = f"{where}.{key}" if where else key
            found += changed_values(old.get(key), new.get(key), path)
        return found[:5]
    # Compared as JSON: a tuple equals the list it was written as.
    if json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True):
        return []
    return [f"{where}: {validation.shown(old)} there, {validation.shown(new)} now"]


def _shipped(path: str) -> str:
    """Returns where a file of a shipped T5 is below all of them; "" for another."""
    return path.partition(_SHIPPED)[2]


def _with_equal_contents(
    found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns a record with the new path of every input whose fingerprint is equal.

    Data, a T5 or a vocabulary may be elsewhere: what they hold is what counts.
    """
    config: Any = found.get("config")
    inputs: Any = found.get("inputs")
    new: Any = wanted.get("config")
    read: Any = wanted.get("inputs")
    if not all(isinstance(each, Mapping) for each in (config, inputs, new, read)):
        return found
    same = {
        name: new[name]
        for name, fingerprint in read.items()
        if inputs.get(name) == fingerprint
        and isinstance(config.get(name), str)
        and isinstance(new.get(name), str)
    }
    return {**found, "config": {**config, **same}}


def written_in(place: str | os.PathLike) -> dict[str, str]:
    """Returns the entry of a record that says where it was written; see `differences`.

    `place` is the directory that the output of a stage, or a run, has in the end.
    """
    return {WRITTEN_IN: os.path.abspath(place)}


_PACKAGES = (
    "tensorflow",
    "tensorflow-text",
    "tensorflow-privacy",
    "dp-accounting",
    "keras-nlp",
    "tensorflow-datasets",
    "tensorflow-recommenders",
    "scann",
    "sacrebleu",
    "pytrec-eval-terrier",
    "numpy",
)


def plain(config: Any) -> Any:
    """Converts a config to JSON values; infinity becomes "inf"."""
    if isinstance(config, (ml_collections.ConfigDict, Mapping)):
        return {str(key): plain(value) for key, value in sorted(config.items())}
    if isinstance(config, (list, tuple)):
        return [plain(value) for value in config]
    # Before the numbers of NumPy and others, which JSON does not know: True is one.
    if isinstance(config, (bool, np.bool_)):
        return bool(config)
    if isinstance(config, numbers.Integral):
        return int(config)
    if isinstance(config, numbers.Real):
        number = float(config)
        return number if math.isfinite(number) else str(number)
    if isinstance(config, pathlib.Path):
        return str(config)
    return config


def made_by() -> dict[str, str]:
    """Returns the entry that names the running version."""
    return {MADE_BY: f"tfdpsq {tfdpsq.__version__}"}


def other_version(found: Mapping[str, Any]) -> str:
    """Returns a sentence about another version that made something, or "".

    Returns:
      The sentence with a space before it.
    """
    maker, ours = found.get(MADE_BY, _BEFORE_IT_WAS_WRITTEN), made_by()[MADE_BY]
    if maker == ours:
        return ""
    return (
        f" It was made by {maker}, and this is {ours}: go on with {maker}, whose "
        "settings it was made with."
    )


def open_workdir(
    workdir: str | pathlib.Path, config: Any, parts: used_parts.Parts | None = None
) -> pathlib.Path:
    """Creates a workdir, or reopens one that was made with the same config.

    The resolved config is written before anything runs. A workdir holds `private/` and
    a report that shows private queries, so it cannot be released; a new one is its
    owner's alone. Copy what is released out of its `release/`.

    Of an existing one, those `parts` of the config may change that no output or run
    was begun with: what a late stage refuses is corrected, and what was paid is kept.

    Raises:
      InputError: no path, a released place, not writable, disk full, or made with
        another config.
    """
    wanted = plain(config)
    opened, maker = _opened(workdir, wanted, parts or {})
    written = {**wanted, **maker}
    path = opened / CONFIG_FILE
    with outputs.owner_only():
        io.atomic_write(path, json.dumps(written, indent=2, sort_keys=True) + "\n")
    return opened


def reserve_workdir(
    workdir: str | pathlib.Path, config: Any, parts: used_parts.Parts | None = None
) -> pathlib.Path:
    """Does what `open_workdir` does, without writing the config.

    For what runs before the rest of the config can be checked, and so corrected.
    """
    return _opened(workdir, plain(config), parts or {})[0]


def _opened(
    workdir: str | pathlib.Path, wanted: Mapping[str, Any], parts: used_parts.Parts
) -> tuple[pathlib.Path, dict[str, str]]:
    """Returns a workdir of this config or of none, and what made it."""
    if not workdir:
        raise validation.InputError(
            "no workdir was given. Pass --workdir=DIRECTORY for the output."
        )
    holds = "a whole job, with private queries in its report"
    output = releases.Output(workdir, releases.PRIVATE, holds)
    path = output.directory / CONFIG_FILE
    maker = {**made_by(), **written_in(path.parent)}
    _hold(path.parent)
    if path.is_file():
        found = read_json(path)
        kept, used = used_parts.with_unused(found, wanted, parts, path.parent)
        changed = differences({**kept, MADE_BY: None}, wanted, path.parent)
        if changed:
            remedy = used_parts.remedy(used, changed, path.parent)
            raise validation.InputError(
                f"{path} was written by a run with another config "
                f"({'; '.join(changed)}).{other_version(found)} {remedy}"
            )
        here = {WRITTEN_IN: maker[WRITTEN_IN]} if WRITTEN_IN in found else {}
        maker = {key: found[key] for key in (MADE_BY,) if key in found} | here
    else:
        _require_unused(path.parent)
    opened = outputs.open_directory(output)
    _hold(opened)
    with outputs.owner_only():
        io.check_writable(opened)
    return opened, maker


@dataclasses.dataclass(frozen=True)
class _Holding:
    """Locks of a block, and the workdirs that it or one around it holds."""

    locks: contextlib.ExitStack
    workdirs: set[str]


_HOLDING: contextvars.ContextVar[_Holding | None] = contextvars.ContextVar(
    "holding", default=None
)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keeps other jobs out of the workdirs that the block opens, until it ends.

    Another config would replace that of a job that is about to pay for it.
    """
    outer = _HOLDING.get()
    with contextlib.ExitStack() as locks:
        held_outside = outer.workdirs if outer is not None else ()
        token = _HOLDING.set(_Holding(locks, set(held_outside)))
        try:
            yield
        finally:
            _HOLDING.reset(token)


def _hold(directory: pathlib.Path) -> None:
    """Locks a workdir once it exists, inside `alone`; refuses one that is in use."""
    holding, name = _HOLDING.get(), os.path.realpath(directory)
    if holding is None or name in holding.workdirs or not directory.is_dir():
        return
    message = f"{directory} is in use by another job. Wait until it ends, or stop it."
    holding.locks.enter_context(held(directory, message))
    holding.workdirs.add(name)


def _require_unused(directory: pathlib.Path) -> None:
    """Refuses outputs where no job has begun: a stage would be refused their place."""
    for folder in (releases.RELEASE_FOLDER, "private"):
        here = directory / folder
        for found in sorted(here.iterdir()) if here.is_dir() else ():
            # Also pairs that were being imported when the command was killed.
            imported = found.name.lstrip(".").startswith(layout.IMPORTED)
            if found.is_dir() and not imported:
                raise validation.InputError(
                    f"{found} exists, but no job has begun in {directory}, which has "
                    f"no {CONFIG_FILE}. Use another --workdir."
                )


def run_stage(
    output: releases.Output,
    config: Any,
    inputs: Mapping[str, str],
    make: Callable[[pathlib.Path], dict[str, Any] | None],
    since: float | None = None,
) -> dict[str, Any]:
    """Runs a stage unless its finished output is there already.

    `config` and `inputs`, fingerprints of what it reads, are what the result depends
    on. `make` fills the directory it is given and may return JSON values to record.
    `since` is the start, by `time.monotonic`, where `make` only finishes the stage.

    Returns:
      The content of `stage.json`: "config", "inputs", "fingerprint", "guarantee", "run"
      and "result"; "certificate_digest" where there is one; "seconds" if it ran now.

    Raises:
      InputError: the directory holds the result of another config or input; or the
        result does not have the guarantee that was stated.
    """
    directory = output.directory
    finished = finished_stage(directory, config, inputs)
    if finished is not None:
        logging.info("%s: finished before, not redone", directory.name)
        outputs.settle(directory)  # in case the command was killed before it could
        return finished
    releases.check_lineage(output, plain(config))
    wanted = {"config": plain(config), "inputs": dict(inputs)}
    started = since
    if started is None:
        logging.info("%s: started", directory.name)
        started = time.monotonic()
    with new_directory(output) as temporary:
        result = make(temporary)
        stage = write_stage(temporary, output, wanted, result)
    seconds = round(time.monotonic() - started, 2)
    logging.info("%s: finished in %.0f s", directory.name, seconds)
    return {**stage, "seconds": seconds}


def write_stage(
    directory: pathlib.Path,
    output: releases.Output,
    wanted: Mapping[str, Any],
    result: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes `stage.json`, last, into a directory that is to be `output`; returns it.

    `wanted` has the config and the fingerprints of the inputs, as JSON values.
    """
    path, mark = directory / certificates.FILE_NAME, {}
    if path.is_file():
        mark = {certificates.MARK: certificates.load_certificate(path)["digest"]}
    stage = {
        **wanted,
        "fingerprint": _fingerprint(wanted),
        certificates.GUARANTEE: output.guarantee,
        **written_in(output.place),
        "run": secrets.token_hex(8),
        "result": plain(result or {}),
        **made_by(),
        **mark,
    }
    io.write_json(directory / STAGE_FILE, stage)
    return stage


def finished_stage(
    directory: str | pathlib.Path, config: Any, inputs: Mapping[str, str]
) -> dict[str, Any] | None:
    """Returns `stage.json` of a finished stage; `None` where it is not finished.

    Arguments are those of `run_stage`; `directory` may be on another file system.

    Raises:
      InputError: the directory holds the result of another config or input.
    """
    path = f"{os.fspath(directory).rstrip('/')}/{STAGE_FILE}"
    if not io.gfile().exists(path):
        return None
    wanted = {"config": plain(config), "inputs": dict(inputs)}
    found = read_json(path)
    if found["fingerprint"] != _fingerprint(wanted):
        of = {"config": found["config"], "inputs": found["inputs"]}
        place = {WRITTEN_IN: found.get(WRITTEN_IN)}
        changed = differences({**of, **place}, wanted, directory)
        if not changed and found["fingerprint"] == _fingerprint(of):
            return found
        raise validation.InputError(
            f"{directory} is finished, but was made with another config or "
            f"from other inputs ({'; '.join(changed) or f'{STAGE_FILE} was edited'})."
            f"{other_version(found)} Use "
            "another directory, or move this one away to make it again."
        )
    return found


def _fingerprint(wanted: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()


class Held(validation.InputError):
    """Another process holds a directory's lock."""


@contextlib.contextmanager
def held(directory: str | os.PathLike, message: str) -> Iterator[None]:
    """Locks a directory against other processes, until the block or the process ends.

    Raises:
      Held: with `message`.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Held(message) from error
        except OSError as error:
            raise validation.InputError(
                f"{directory} cannot be locked ({error.strerror}). Put it on a file "
                "system with locks."
            ) from error
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_directory(output: releases.Output) -> Iterator[pathlib.Path]:
    """Yields a directory to fill, which then appears whole as the output.

    Unfinished directories of commands that were killed are removed first.

    Raises:
      InputError: the output exists, or is being made by another process; or what
        `outputs.filled` raises.
    """
    directory = output.directory
    busy = (
        f"{directory} is being made by another process. Wait until it is finished, "
        "stop it, or use another directory."
    )
    # Locked, so that no process takes it for abandoned.
    for left in directory.parent.glob(io.partial_pattern(directory.name)):
        with held(left, busy):
            shutil.rmtree(left)  # of a run that was killed; it was never released
    with outputs.filled(output) as temporary, held(temporary, busy):
        yield temporary


def stage_fingerprint(directory: str | pathlib.Path) -> str:
    """Returns the id of a finished stage and of this run of it.

    Raises:
      InputError: the directory is not a finished stage.
    """
    path = pathlib.Path(directory) / STAGE_FILE
    if not path.is_file():
        raise validation.InputError(
            f"{directory} is not a finished stage: it has no {STAGE_FILE}. "
            "Run the stage that makes it first."
        )
    stage = read_json(path)
    return f"{stage['fingerprint']}/{stage['run']}"


def model_fingerprint(directory: str | pathlib.Path) -> str:
    """Returns the id of a model: a finished stage, or a directory from elsewhere.

    The latter is the SHA-256 over the names and bytes of all files except its
    descriptions, the card (`*.md`) and `pretraining.json`, and a downloader's notes in
    `.cache`.

    Raises:
      InputError: the directory is missing or empty.
    """
    directory = pathlib.Path(directory)
    if (directory / STAGE_FILE).is_file():
        return stage_fingerprint(directory)
    paths = sorted(
        path
        for path in directory.rglob("*")
        if path.is_file()
        and path.suffix != ".md"
        and path.name != "pretraining.json"
        and path.relative_to(directory).parts[0] != ".cache"
    )
    if not paths:
        raise validation.InputError(
            f"{directory} holds no files. Give the directory of a model: what "
            "finetune or convert wrote, or a T5 checkpoint."
        )
    digest = hashlib.sha256()
    for path in paths:
        name = path.relative_to(directory).as_posix()
        digest.update(f"{name}\0{io.sha256_of_file(path)}\0".encode())
    return f"files:{digest.hexdigest()}"


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def peak_memory_gib() -> float:
    """Returns the largest resident set of this process or of a child, in GiB."""
    kib = max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return kib / 2**20


def read_json(path: str | os.PathLike, **entries: Any) -> dict[str, Any]:
    """Reads the object in a JSON file, local or of another file system.

    `entries` must be in it, with these types, and what every `stage.json` has; one
    without "result" has an empty one.

    Raises:
      DataError: it is damaged.
    """
    with io.open_binary(path) as file:
        data = file.read()
    name = pathlib.Path(path).name
    if name == STAGE_FILE:
        entries = {**_STAGE_ENTRIES, **entries}
    try:
        found = validation.parse_json(data)
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
        if name == STAGE_FILE:
            found.setdefault("result", {})
        for key, kind in entries.items():
            if not isinstance(found.get(key), kind):
                raise ValueError(f"it has no sound entry {key!r}")
    except ValueError as error:
        raise validation.DataError(
            path,
            f"it is damaged: {error}",
            _REMEDIES.get(name, "Restore it, or make it again."),
        ) from error
    return found

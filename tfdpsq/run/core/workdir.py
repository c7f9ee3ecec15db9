"""Stages and their directories: made whole or not at all, never made twice.

A stage is a function that fills a directory. It runs in a temporary sibling that
is renamed into place when it is complete, together with `stage.json`: the config
it ran with, the fingerprint of its inputs, its guarantee (see `releases`), and a
number of its own, so that what was made from an earlier run of it is noticed. How
long it took is not written there, as the time depends on the private data. A
directory that is there is therefore finished, and is not made again; one that was
made from another config or other inputs is refused, as silently mixing the two would
give numbers that belong to neither.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
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
from absl import logging

import tfdpsq
from tfdpsq import validation
from tfdpsq.data import any_files, files
from tfdpsq.privacy import certificate_files
from tfdpsq.run.core import outputs, releases

STAGE_FILE = releases.STAGE_FILE
CONFIG_FILE = "config.json"
# In all that says what something was made with: by which version.
MADE_BY = "made_by"
_BEFORE_IT_WAS_WRITTEN = "tfdpsq 0.1.0"
# Under a private directory: ledgers, secrets and states of training runs.
RUNS = "runs"
# Of two JSON values, for every file that says what it was made with.
differences = validation.differences
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
    """A config as JSON values: dicts, lists, numbers; infinity as "inf"."""
    if isinstance(config, (ml_collections.ConfigDict, Mapping)):
        return {str(key): plain(value) for key, value in sorted(config.items())}
    if isinstance(config, (list, tuple)):
        return [plain(value) for value in config]
    if isinstance(config, float) and config in (float("inf"), float("-inf")):
        return "inf" if config > 0 else "-inf"
    if isinstance(config, pathlib.Path):
        return str(config)
    return config


def made_by() -> dict[str, str]:
    """Returns the entry that names the running version."""
    return {MADE_BY: f"tfdpsq {tfdpsq.__version__}"}


def other_version(found: Mapping[str, Any]) -> str:
    """Returns a sentence on what another version made, with a space before it, or "".

    Args:
      found: content of `stage.json`, of a workdir's config or of a run's description.
    """
    maker, ours = found.get(MADE_BY, _BEFORE_IT_WAS_WRITTEN), made_by()[MADE_BY]
    if maker == ours:
        return ""
    return (
        f" It was made by {maker}, and this is {ours}: go on with {maker}, whose "
        "settings it was made with."
    )


def open_workdir(workdir: str | pathlib.Path, config: Any) -> pathlib.Path:
    """Creates a workdir, or reopens one that was made with the same config.

    The resolved config is written before anything runs. A workdir holds `private/`, and
    a report that shows private queries, so it cannot be in a released place; a new one
    is its owner's alone. What lies in its `release/` is to be copied from there.

    Args:
      workdir: where all output goes.
      config: the resolved config.

    Raises:
      InputError: no path, in a released place, not writable, disk full, or made with
        another config.
    """
    if not workdir:
        raise validation.InputError(
            "no workdir was given. Pass --workdir=DIRECTORY for the output."
        )
    holds = "a whole job, with private queries in its report"
    output = releases.Output(workdir, releases.PRIVATE, holds)
    path = output.directory / CONFIG_FILE
    wanted = plain(config)
    maker = made_by()
    if path.is_file():
        found = read_json(path)
        changed = differences({**found, MADE_BY: None}, wanted)
        if changed:
            raise validation.InputError(
                f"{path} was written by a run with another config "
                f"({'; '.join(changed)}).{other_version(found)} Use another --workdir, "
                "or delete this one to start again."
            )
        maker = {key: found[key] for key in maker if key in found}
    workdir = outputs.open_directory(output)
    written = {**wanted, **maker}
    with outputs.owner_only():
        files.check_writable(workdir)
        files.atomic_write(path, json.dumps(written, indent=2, sort_keys=True) + "\n")
    return workdir


def run_stage(
    output: releases.Output,
    config: Any,
    inputs: Mapping[str, str],
    make: Callable[[pathlib.Path], dict[str, Any] | None],
    since: float | None = None,
) -> dict[str, Any]:
    """Runs a stage unless its finished output is there already.

    Args:
      output: the stage's output directory, and the guarantee of what will be there.
      config: what the stage's result depends on.
      inputs: fingerprints of what it reads.
      make: fills the directory it is given; may return JSON values to record.
      since: when the stage was begun, by `time.monotonic`, where `make` only ends it.

    Returns:
      The content of `stage.json`: "config", "inputs", "fingerprint", "guarantee", "run"
      and "result"; "certificate_digest" where there is one; "seconds" if it was run
      now.

    Raises:
      InputError: the directory holds the result of another config or input; or what is
        made has not the guarantee that was stated.
    """
    directory = output.directory
    finished = finished_stage(directory, config, inputs)
    if finished is not None:
        logging.info("%s: finished before, not redone", directory.name)
        outputs.settle(directory)  # of a command that was killed before it could
        return finished
    releases.check_lineage(output, plain(config))
    wanted = {"config": plain(config), "inputs": dict(inputs)}
    started = since
    if started is None:
        logging.info("%s: started", directory.name)
        started = time.monotonic()
    for left in directory.parent.glob(f".{directory.name}.*.partial"):
        with _held(left, directory):
            shutil.rmtree(left)  # of a run that was killed; it was never released
    with outputs.filled(output) as temporary, _held(temporary, directory):
        result = make(temporary)
        stage = {
            **wanted,
            "fingerprint": _fingerprint(wanted),
            certificate_files.GUARANTEE: output.guarantee,
            "run": secrets.token_hex(8),
            "result": plain(result or {}),
            **made_by(),
            **certificate_files.digest_beside(temporary),
        }
        files.atomic_write(
            temporary / STAGE_FILE,
            json.dumps(stage, indent=2, sort_keys=True, allow_nan=False) + "\n",
        )
    seconds = round(time.monotonic() - started, 2)
    logging.info("%s: finished in %.0f s", directory.name, seconds)
    return {**stage, "seconds": seconds}


def finished_stage(
    directory: str | pathlib.Path, config: Any, inputs: Mapping[str, str]
) -> dict[str, Any] | None:
    """What `stage.json` of a finished stage holds; `None` where it is not finished.

    Args:
      directory: as in `run_stage`, or of another file system.
      config: as in `run_stage`.
      inputs: as in `run_stage`.

    Raises:
      InputError: the directory holds the result of another config or input.
    """
    path = f"{os.fspath(directory).rstrip('/')}/{STAGE_FILE}"
    if not any_files.exists(path):
        return None
    wanted = {"config": plain(config), "inputs": dict(inputs)}
    found = read_json(path)
    if found["fingerprint"] != _fingerprint(wanted):
        changed = differences(
            {"config": found["config"], "inputs": found["inputs"]}, wanted
        )
        raise validation.InputError(
            f"{directory} is finished, but was made with another config or "
            f"from other inputs ({'; '.join(changed)}).{other_version(found)} Delete "
            "it to make it again, or use another directory."
        )
    return found


def _fingerprint(wanted: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _held(partial: pathlib.Path, directory: pathlib.Path) -> Iterator[None]:
    """Keeps other processes from taking an unfinished directory for a left one."""
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise validation.InputError(
            f"{directory} is being made by another process. Wait until it is finished, "
            "stop it, or use another directory."
        ) from error
    finally:
        os.close(descriptor)


def stage_fingerprint(directory: str | pathlib.Path) -> str:
    """What identifies a finished stage, and this run of it.

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
    """What identifies a model: a finished stage, or a directory from elsewhere.

    The latter is known by the SHA-256 over the names and bytes of all its files but
    those that only tell of it: its card (`*.md`) and `pretraining.json`.

    Raises:
      InputError: no such directory, or it is empty.
    """
    directory = pathlib.Path(directory)
    if (directory / STAGE_FILE).is_file():
        return stage_fingerprint(directory)
    paths = sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".md" and path.name != "pretraining.json"
    )
    if not paths:
        raise validation.InputError(
            f"{directory} holds no files. Give the directory of a model: what "
            "finetune or convert wrote, or a T5 checkpoint."
        )
    digest = hashlib.sha256()
    for path in paths:
        name = path.relative_to(directory).as_posix()
        digest.update(f"{name}\0{files.sha256_of_file(path)}\0".encode())
    return f"files:{digest.hexdigest()}"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def code_fingerprint() -> str:
    """Returns the SHA-256 over all sources of the package `tfdpsq`."""
    # From the package itself: this file's own path would cover less after a move.
    root = pathlib.Path(tfdpsq.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def peak_memory_gib() -> float:
    """The largest resident set of this process or of one it waited for, in GiB."""
    kib = max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return kib / 2**20


def read_json(path: str | pathlib.Path) -> Any:
    """The content of a JSON file, local or of another file system.

    Raises:
      DataError: it is damaged.
    """
    with any_files.open_binary(path) as file:
        data = file.read()
    try:
        return validation.parse_json(data)
    except ValueError as error:
        ours = pathlib.Path(path).name in (STAGE_FILE, CONFIG_FILE)
        remedy = "Restore it, or make it again."
        if ours:
            remedy = "Restore it, or delete the directory it is in to make it again."
        raise validation.DataError(
            path, f"it is not valid JSON ({error})", remedy
        ) from error

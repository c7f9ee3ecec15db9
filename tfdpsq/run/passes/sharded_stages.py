"""Stages that are a pass over shards, which several commands share and one merges.

The shards are stored next to the stage's output, in `.NAME.shards/`, until they are
merged into it. A command makes all missing shards, or its part of them; the command
that finds all shards finished merges them. One command, several on one disk, workers of
Apache Beam, and any of these after a kill all end with the same output.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.run.core import outputs, releases, workdir
from tfdpsq.run.passes import passes
from tfdpsq.run.passes.shards import DamagedShard, PassSpec, ShardDirectory

GUARANTEE_FILE = "guarantee.json"
# A shard is made again so many times before the disk is to blame.
_TIMES_DAMAGED = 3

Place = releases.Place
Merge = Callable[[pathlib.Path, ShardDirectory], Mapping[str, Any]]


def pass_directory(directory: Place) -> str:
    """Returns the directory of a stage's shards before they are merged."""
    parent, slash, name = os.fspath(directory).rstrip("/").rpartition("/")
    return f"{parent}{slash}.{name}.shards"


def guarantee(certificate: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Returns the file for `run_stage` to keep next to shards, given a certificate.

    An unfinished pass must not be released; if it is, the certificate applies to it.
    """
    if certificate is None:
        return {}
    return {GUARANTEE_FILE: {"certificate": certificate}}


def run_stage(
    output: releases.Output,
    config: Any,
    inputs: Mapping[str, str],
    work: passes.Work,
    merge: Merge,
    launch: passes.Launch,
    also_keeps: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any] | None:
    """Runs a stage that is a pass, as `workdir.run_stage` runs any other.

    For an object store the output is made in a local temporary directory and copied,
    `stage.json` last: an output without it is not finished.

    `work` makes every shard; `merge` fills the directory it is given from the shards,
    read by `ShardDirectory.reading`, and returns JSON values to record.
    `also_keeps` maps file names to JSON objects to keep next to the shards, for other
    commands.

    Returns:
      As `workdir.run_stage`; `None` if other commands have shards left, or merge.

    Raises:
      InputError: the directory, or its shards, are of another config or input; what the
        work or the merge raises.
    """
    started = time.monotonic()
    directory = output.place
    releases.check_lineage(output, workdir.plain(config))
    name = os.path.basename(os.fspath(directory).rstrip("/"))
    spec = PassSpec(work.name, work.shards, workdir.plain(config), dict(inputs))
    shards = ShardDirectory(pass_directory(directory), spec)

    def finished() -> dict[str, Any] | None:
        stage = workdir.finished_stage(directory, config, inputs)
        if stage is not None:
            logging.info("%s: finished before, not redone", name)
            _remove(shards)  # in case a command was killed after its merge
        return stage

    def passed() -> dict[str, Any] | None:
        shards.open()
        # Another command may have merged and removed the shards meanwhile.
        stage = finished()
        if stage is not None:
            return stage
        for file, value in (also_keeps or {}).items():
            if shards.read_json(file) != value:
                shards.write_json(file, value)
        logging.info("%s: %d shards, in %s", name, work.shards, shards.directory)
        maker = passes.Maker(shards, work)
        _make(shards, work, maker, launch)
        missing = shards.missing()
        if missing and not launch.alone:
            listed = ", ".join(map(str, missing[:10]))
            logging.info(
                "%s: %d of %d shards are still to be made by others: %s%s",
                name,
                len(missing),
                work.shards,
                listed,
                ", ..." if len(missing) > 10 else "",
            )
            return None
        with shards.lock(None, wait=launch.alone) as held:
            if not held:
                logging.info("%s: is being merged by another process", name)
                return None
            stage = _merged(output, config, inputs, merge, shards, maker, started)
        _remove(shards)
        return stage

    try:
        stage = finished()
        if stage is not None:
            return stage
        if io.is_local(directory):
            outputs.make_parents(pathlib.Path(directory))
        with outputs.owner_only():
            return passed()
    except (OSError, tf.errors.OpError, validation.InputError):
        # A shard disappeared while it was being read: another command has merged.
        stage = finished()
        if stage is None:
            raise
        return stage
    finally:
        outputs.settle(directory)


def _make(
    shards: ShardDirectory,
    work: passes.Work,
    maker: passes.Maker,
    launch: passes.Launch,
) -> None:
    """Makes the shards of this command."""
    if launch.beam is None:
        maker.make_all(range(launch.shard_index, work.shards, launch.num_shards))
        return
    missing = shards.missing()
    if missing:
        try:
            from tfdpsq.run.passes import beam
        except ImportError as error:
            raise validation.InputError(
                f"Apache Beam cannot be imported ({error}). Run: pip install "
                "'tfdpsq[beam]'"
            ) from error
        beam.run(shards, work, missing, launch.beam)
        left = shards.missing()
        if len(left) == len(missing):
            raise validation.InputError(
                f"Beam's workers made {len(missing)} shards, none of them in "
                f"{shards.directory}. Give a workdir that they share with this "
                "command, such as a path on a shared disk."
            )


def _merged(
    output: releases.Output,
    config: Any,
    inputs: Mapping[str, str],
    merge: Merge,
    shards: ShardDirectory,
    maker: passes.Maker,
    started: float,
) -> dict[str, Any]:
    """Merges the shards; makes those that prove to be damaged again."""
    damaged: collections.Counter[int] = collections.Counter()
    while True:
        maker.make_all(shards.missing())
        logging.info("%s: merging %d shards", shards.spec.name, shards.spec.shards)
        try:
            return _made(
                output, config, inputs, lambda out: dict(merge(out, shards)), started
            )
        except DamagedShard as error:
            damaged[error.index] += 1
            if damaged[error.index] == _TIMES_DAMAGED:
                raise
            logging.warning("%s", error)
            shards.discard(error.index)


def _made(
    output: releases.Output,
    config: Any,
    inputs: Mapping[str, str],
    make: Callable[[pathlib.Path], dict[str, Any]],
    started: float,
) -> dict[str, Any]:
    """Makes the output as `workdir.run_stage` does, on any file system."""
    if io.is_local(output.place):
        return workdir.run_stage(output, config, inputs, make, started)
    place = os.fspath(output.place)
    with tempfile.TemporaryDirectory(prefix="tfdpsq-") as folder:
        local = pathlib.Path(folder, os.path.basename(place.rstrip("/")))
        made = dataclasses.replace(output, place=local)
        stage = workdir.run_stage(made, config, inputs, make, started)
        io.copy_tree(str(local), place, last=workdir.STAGE_FILE)
    logging.info("%s: copied to %s", local.name, place)
    return {**stage, "seconds": round(time.monotonic() - started, 2)}


def _remove(shards: ShardDirectory) -> None:
    try:
        shards.remove()
    except tf.errors.OpError as error:
        logging.warning("%s: could not be removed (%s)", shards.directory, error)

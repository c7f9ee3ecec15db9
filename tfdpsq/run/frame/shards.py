"""Shards of a pass, in one directory; made in one process, or on Apache Beam.

    partial/NAME/shards/DIGEST/    of the settings and inputs of the pass
        00003.EXT      what shard 3 holds: a file, or several
        00003.json     its mark, written last: {"count": rows, "result": {...}}

A shard exists if its mark does: a killed pass loses only the shard it was making.
Changed settings start a new directory; all of them are removed when a pass finishes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.run.frame import places, records, runner

Make = Callable[[int, "ShardWriter"], None]


class ShardWriter:
    """The files of a shard that is being written."""

    def __init__(self, final: str, files: contextlib.ExitStack):
        """Takes the path of the shard's files, without their extension."""
        self.count = 0  # rows in it; its maker sets it
        self.result: dict[str, Any] = {}  # what else is to be known of it, as JSON
        self._final, self._files = final, files

    def path(self, extension: str) -> str:
        """Returns a file to write; it is renamed when the shard is whole."""
        file = io.atomic_file(f"{self._final}.{extension}")
        return str(self._files.enter_context(file))


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a pass in a directory."""

    directory: str
    total: int

    def path(self, index: int, extension: str) -> str:
        """Returns the path of a shard's file."""
        return f"{self.directory}/{index:05d}.{extension}"

    def mark(self, index: int) -> dict[str, Any] | None:
        """Returns the mark of a shard; `None` if it has to be made."""
        path = self.path(index, "json")
        if not os.path.exists(path):
            return None
        return io.read_json(path, "Remove it, and the shard is made again")

    def missing(self) -> list[int]:
        """Returns the numbers of the shards that have to be made."""
        return [index for index in range(self.total) if self.mark(index) is None]

    def paths(self, extension: str) -> list[str]:
        """Returns the file of every shard, in order."""
        return [self.path(index, extension) for index in range(self.total)]

    @contextlib.contextmanager
    def writing(self, index: int) -> Iterator[ShardWriter]:
        """Makes a shard: its files first, its mark last, each renamed when whole."""
        with contextlib.ExitStack() as files:
            writer = ShardWriter(f"{self.directory}/{index:05d}", files)
            yield writer
        mark = {"count": writer.count, "result": writer.result}
        io.write_json(self.path(index, "json"), mark)


def make_all(stage: runner.ShardedStage, c: runner.Context) -> Shards:
    """Makes the missing shards of a pass; returns all."""
    total, size = len(c.parts), getattr(c.settings, "shard_documents", None)
    made_of = {**c.depends, "shards": total, "shard_documents": size}
    directory = c.place.partial / "shards" / records.digest(made_of)[:16]
    shards = Shards(str(places.open_private(directory)), total)
    missing = shards.missing()
    said = c.place.name, len(missing), shards.total
    logging.info("%s: %d of %d shards to make", *said)
    if missing and c.beam is not None:
        remedy = "Apache Beam is not installed. Run: pip install 'tfdpsq[beam]'"
        validation.library("apache_beam", remedy)
        from tfdpsq.run.frame import beam

        beam.run(stage, c, shards, c.beam)
    elif missing:
        make = stage.start(c)
        for index in missing:
            make_one(make, shards, index, c.place)
    return shards


def make_one(make: Make, shards: Shards, index: int, place: places.Place) -> None:
    """Makes a shard unless it is there."""
    if shards.mark(index) is None:
        with places.owner_only(), shards.writing(index) as out:
            make(index, out)
        said = place.name, index, shards.total, out.count
        logging.info("%s: shard %d of %d: %d rows", *said)

"""Makes the shards of a pass in this process, next to any other processes.

See `shards` for the files, `sharded_stages` for a stage that is a pass, and `beam`
for workers of Apache Beam.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable

from absl import logging

from tfdpsq import validation
from tfdpsq.run.core import outputs
from tfdpsq.run.passes import pass_progress
from tfdpsq.run.passes.shards import ShardDirectory, ShardWriter

# Makes a shard: takes its number and its writer.
MakeShard = Callable[[int, ShardWriter], None]


@dataclasses.dataclass(frozen=True)
class Launch:
    """The division of shards among commands.

    Attributes:
      num_shards: number of commands that share the work. Command i makes shards i,
        i + num_shards, i + 2 · num_shards, …
      shard_index: index of this command, from 0.
      beam: flags for Apache Beam, whose workers then make all shards; or `None`.

    Raises:
      InputError: no such command.
    """

    num_shards: int = 1
    shard_index: int = 0
    beam: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Checks every value."""
        validation.positive_integer("num_shards", self.num_shards)
        if not 0 <= self.shard_index < self.num_shards:
            raise validation.InputError(
                f"shard_index is {self.shard_index}; with num_shards = "
                f"{self.num_shards} it must be an integer from 0 to "
                f"{self.num_shards - 1}."
            )
        if self.beam is not None and self.num_shards > 1:
            raise validation.InputError(
                f"num_shards is {self.num_shards}, with Beam, whose runner shares the "
                "work itself. Leave out num_shards, or beam."
            )

    @property
    def alone(self) -> bool:
        """True if this command is responsible for all shards."""
        return self.num_shards == 1


# One command for all shards.
ALONE = Launch()


@dataclasses.dataclass(frozen=True)
class Work:
    """The work for every shard; can be pickled for workers elsewhere.

    Attributes:
      name: names the shards and the log.
      shards: number of shards.
      start: loads models and vocabularies once per process, and returns the function
        that makes a shard. A function of a module, or a `functools.partial` of one,
        with arguments that can be pickled.
    """

    name: str
    shards: int
    start: Callable[[], MakeShard]


class Maker:
    """Makes shards in this process; loads the models for the first one it makes."""

    def __init__(self, shards: ShardDirectory, work: Work):
        """Loads nothing yet."""
        self._shards, self._work = shards, work
        self._loading = threading.Lock()
        self._make: MakeShard | None = None

    def load(self) -> MakeShard:
        """Returns the function that makes a shard; loads the models on first use."""
        with self._loading:
            if self._make is None:
                self._make = self._work.start()
            return self._make

    def make_all(self, indices: Iterable[int]) -> None:
        """Makes missing shards.

        Skips those that another process is making, and checks them again at the end,
        since that process may have died.

        Raises:
          InputError: what the work raises; the disk is full.
        """
        missing = self._shards.missing(indices)
        for index in [index for index in missing if not self.make(index, wait=False)]:
            logging.info(
                "%s: shard %d of %d is being made by another process; waiting",
                self._work.name,
                index,
                self._work.shards,
            )
            self.make(index, wait=True)

    def make(self, index: int, wait: bool) -> bool:
        """Makes a shard unless it exists.

        With `wait`, waits for another process that is making it.

        Returns:
          Whether it exists now; if not, another process is making it.

        Raises:
          FileNotFoundError: the directory was removed, as after a merge.
        """
        with self._shards.lock(index, wait) as held:
            if self._shards.finished(index) is not None:
                return True
            if not held:
                return False
            if not self._shards.is_open():  # another command has merged
                raise FileNotFoundError(f"{self._shards.directory} was removed")
            make = self.load()
            started = time.monotonic()
            # Applies in remote workers too, where the stage sets no umask.
            with outputs.owner_only(), self._shards.writing(index) as out:
                make(index, out)
            seconds = time.monotonic() - started
            self._record(index, out.count, seconds)
        return True

    def _record(self, index: int, rows: int, seconds: float) -> None:
        """Logs a finished shard."""
        logging.info(
            "%s: shard %d of %d: %d rows in %.1f s",
            self._work.name,
            index,
            self._work.shards,
            rows,
            seconds,
        )
        logs = pass_progress.log_of(self._shards.directory)
        with outputs.owner_only():
            pass_progress.finished(logs, index, self._work.shards, rows, seconds)

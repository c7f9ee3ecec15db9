"""Shards of a pass over a corpus, on disk, and their integrity checks.

A pass is work on a corpus that is cut into shards, so that one that dies loses no more
than a shard. Its directory, on any file system that TensorFlow knows, holds

    pass.json                       what is made of what, see `PassSpec`
    NAME-00003-of-00016.EXT         what shard 3 holds: a file, or several
    NAME-00003-of-00016.json        its mark, written last
    .NAME-00003-of-00016.lock       held by the process that makes it (local disks)

A shard is there if its mark is, and its files have the sizes that it names; `verify`
compares their bytes, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.run.core import workdir

PASS_FILE = "pass.json"
MARK = "json"
_GO_ON = "Run the same command again: finished shards are kept."
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclasses.dataclass(frozen=True)
class PassSpec:
    """The identity of a pass: processes that differ in it make different outputs.

    Attributes:
      name: what its files are called by.
      shards: how many there are, whatever the number of workers.
      settings: JSON values that decide what a shard holds.
      inputs: fingerprints of what is read.
    """

    name: str
    shards: int
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]

    def content(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self), allow_nan=False))

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all of it."""
        text = json.dumps(self.content(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def file(self, index: int, extension: str) -> str:
        """Returns the name of a shard's file."""
        return f"{self.name}-{index:05d}-of-{self.shards:05d}.{extension}"


@dataclasses.dataclass(frozen=True)
class Mark:
    """The mark of a finished shard.

    Attributes:
      index: which, from 0.
      count: how many rows it holds.
      result: what else its maker wants to be known; JSON values.
      files: extension -> {"bytes": size, "sha256": in hex}.
    """

    index: int
    count: int
    result: dict[str, Any]
    files: dict[str, dict[str, Any]]


class DamagedShard(validation.DataError):
    """A shard that is not what its mark says; making it again cures it.

    Attributes:
      index: which, from 0.
    """

    def __init__(self, index: int, path: str, problem: str):
        """Makes the message."""
        super().__init__(path, problem, f"Shard {index} has to be made again.")
        self.index = index


class ShardWriter:
    """The files of a shard that is being written.

    Attributes:
      index: which shard.
      count: how many rows it holds; to be set by its maker.
      result: what else is to be known of it, JSON values; to be filled by its maker.
      partials: extension -> the file that is written.
    """

    def __init__(self, index: int, final: str):
        """Takes the shard's number and the path of its files, less their extension."""
        self.index, self.count = index, 0
        self.result: dict[str, Any] = {}
        self.partials: dict[str, str] = {}
        self._final = final

    def path(self, extension: str) -> str:
        """Returns a file to write, by `tf.io.gfile` or whatever takes its paths."""
        folder, _, name = f"{self._final}{extension}".rpartition("/")
        return self.partials.setdefault(extension, f"{folder}/{io.partial_name(name)}")


class ShardDirectory:
    """The shards of one pass. Several processes may have it open.

    Attributes:
      directory: its path.
      spec: what is made of what.
    """

    def __init__(self, directory: str | os.PathLike, spec: PassSpec):
        """Looks at nothing yet; see `open`."""
        self.directory = os.fspath(directory).rstrip("/")
        self.spec = spec

    def open(self) -> None:
        """Makes the directory, or takes up what the same pass left there.

        Raises:
          InputError: shards of another pass are there, or the place cannot be written.
        """
        with io.explained(self.directory, _GO_ON, any_error=True):
            tf.io.gfile.makedirs(self.directory)
        wanted, found = self.spec.content(), self.read_json(PASS_FILE)
        if found == wanted:
            return
        names = tf.io.gfile.listdir(self.directory)
        if found is not None and any(re.search(r"-of-\d+\.json$", n) for n in names):
            changed = "; ".join(workdir.changed_values(found, wanted))
            raise validation.InputError(
                f"{self.directory}/{PASS_FILE} is of another pass ({changed}). Move "
                f"{self.directory} away to begin again, or use another directory."
            )
        self.write_json(PASS_FILE, wanted)

    def finished(self, index: int) -> Mark | None:
        """Returns a shard's mark; `None` if it is missing, or damaged (logged)."""
        try:
            return self._mark(index)
        except DamagedShard as error:
            logging.warning("%s", error)
            return None

    def missing(self, among: Iterable[int] | None = None) -> list[int]:
        """Returns the shards that are not there, or damaged; `None` looks at all."""
        asked = range(self.spec.shards) if among is None else among
        return [index for index in asked if self.finished(index) is None]

    def verify(self, index: int) -> Mark:
        """Returns a shard's mark, after all bytes of its files were compared with it.

        Raises:
          DamagedShard: it is not there, or differs; names the file.
        """
        mark = self._mark(index)
        if mark is None:
            raise DamagedShard(index, self.path(index, MARK), "is not there")
        for extension, held in mark.files.items():
            path = self.path(index, extension)
            if io.sha256_of_file(path) != held["sha256"]:
                raise DamagedShard(index, path, "SHA-256 is not that of its mark")
        return mark

    @contextlib.contextmanager
    def reading(self, index: int) -> Iterator[Mark]:
        """Verifies a shard; what then goes wrong in reading its files is its damage.

        Raises:
          DamagedShard: as `verify`, or the body failed to read.
        """
        try:
            yield self.verify(index)
        except (OSError, tf.errors.OpError) as error:
            path = self.path(index, "*")
            problem = f"cannot be read ({type(error).__name__})"
            raise DamagedShard(index, path, problem) from error

    @contextlib.contextmanager
    def writing(self, index: int) -> Iterator[ShardWriter]:
        """Makes a shard: files first, its mark last, each renamed when it is whole.

        Raises:
          InputError: the disk is full, or cannot be written. The shard is as before.
        """
        writer = ShardWriter(index, self.path(index, ""))
        try:
            with io.explained(self.directory, _GO_ON):
                yield writer
                files = {
                    extension: {
                        "bytes": tf.io.gfile.stat(partial).length,
                        "sha256": io.sha256_of_file(partial),
                    }
                    for extension, partial in writer.partials.items()
                }
                for extension, partial in writer.partials.items():
                    if io.is_local(partial):
                        io.flush(partial)
                    path = self.path(index, extension)
                    tf.io.gfile.rename(partial, path, overwrite=True)
                mark = Mark(index, writer.count, writer.result, files)
                self.write_json(self.spec.file(index, MARK), dataclasses.asdict(mark))
        except BaseException:
            for partial in writer.partials.values():
                with contextlib.suppress(tf.errors.OpError):
                    tf.io.gfile.remove(partial)
            raise

    @contextlib.contextmanager
    def lock(self, index: int | None, wait: bool) -> Iterator[bool]:
        """Keeps a shard, or the merge, from other processes of this machine.

        The lock is the operating system's and ends with its process.

        Args:
          index: the shard; `None` for the merge of all.
          wait: until another process lets go of it.

        Yields:
          Whether it is held now; on a file system without locks, always.

        Raises:
          FileNotFoundError: the directory was removed, as after a merge.
        """
        if not io.is_local(self.directory):
            yield True
            return
        name = "merge.lock" if index is None else self.spec.file(index, "lock")
        with open(f"{self.directory}/.{name}", "a") as file:
            held = True
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                held = False
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            if held and not self.is_open():
                raise FileNotFoundError(f"{self.directory} was removed")
            yield held

    def discard(self, index: int) -> None:
        """Takes a shard's mark away, so that it is made again."""
        self._remove(self.path(index, MARK))

    def remove(self) -> None:
        """Removes everything, once the shards are merged.

        What says that there is a pass goes first: of shards that vanish one by one
        another command would think that they are to be made.
        """
        self._remove(f"{self.directory}/{PASS_FILE}")
        with contextlib.suppress(tf.errors.NotFoundError):
            tf.io.gfile.rmtree(self.directory)

    def is_open(self) -> bool:
        """Returns whether it was opened and is not being removed."""
        return tf.io.gfile.exists(f"{self.directory}/{PASS_FILE}")

    def path(self, index: int, extension: str) -> str:
        """Returns the path of a shard's file."""
        return f"{self.directory}/{self.spec.file(index, extension)}"

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON object next to the shards, whole or not at all."""
        with io.explained(self.directory, _GO_ON):
            io.write_json(f"{self.directory}/{name}", value)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Reads what `write_json` wrote; `None` if missing, or damaged (logged)."""
        path = f"{self.directory}/{name}"
        if not tf.io.gfile.exists(path):
            return None
        try:
            return io.read_json(path, "It is made again")
        except validation.DataError as error:
            logging.warning("%s", error)
            return None

    def _mark(self, index: int) -> Mark | None:
        found = self.read_json(self.spec.file(index, MARK))
        if found is None:
            return None
        for extension, held in found["files"].items():
            path = self.path(index, extension)
            if not tf.io.gfile.exists(path):
                raise DamagedShard(index, path, "is missing")
            size = tf.io.gfile.stat(path).length
            if size != held["bytes"]:
                problem = f"has {size} bytes, its mark says {held['bytes']}"
                raise DamagedShard(index, path, problem)
        return Mark(**found)

    @staticmethod
    def _remove(path: str) -> None:
        with contextlib.suppress(tf.errors.NotFoundError):
            tf.io.gfile.remove(path)

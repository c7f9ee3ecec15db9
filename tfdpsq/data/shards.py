"""Shards of a pass over a corpus, on disk, and their integrity checks.

A pass is work on a corpus that is cut into shards, so that many processes can share it
and one that dies loses no more than a shard. Its directory holds

    pass.json                       what is made of what, see `PassSpec`
    NAME-00003-of-00016.EXT         what shard 3 holds: a file, or several
    NAME-00003-of-00016.json        its mark, written last
    .NAME-00003-of-00016.lock       held by the process that makes it (local disks)

| what is there                                     | the shard              |
|----------------------------------------------------|------------------------|
| no mark                                            | is not there           |
| a mark at odds with itself, or with its files      | is damaged: made again |
| a sound mark of another pass                       | is refused             |
| a sound mark, and files of the sizes that it names | is there               |

`verify` reads the bytes of its files, too. A path may be local, `gs://`, or of any
other file system that TensorFlow knows. Where there are no locks, two processes that
make one shard write the same bytes under names of their own, and whichever renames
last, the files are whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent import futures
from typing import Any

import tensorflow as tf
from absl import logging

from tfdpsq import validation
from tfdpsq.data import any_files

FORMAT = "tfdpsq-pass/1"
PASS_FILE = "pass.json"
MARK = "json"
# So many marks are read at a time: on a remote disk each waits for several answers.
_AT_ONCE = 16
_GO_ON = "and run the same command again: finished shards are kept."


@dataclasses.dataclass(frozen=True)
class PassSpec:
    """The identity of a pass: processes that differ in it make different outputs.

    Attributes:
      name: what its files are called by.
      shards: how many there are, whatever the number of workers.
      settings: JSON values that decide what a shard holds.
      inputs: fingerprints of what is read.

    Raises:
      InputError: no name for a file, or no shard.
    """

    name: str
    shards: int
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]

    def __post_init__(self) -> None:
        """Checks every value."""
        if not re.fullmatch(r"\w+", self.name):
            raise validation.InputError(
                f"name is {self.name!r}; it must be letters, digits and '_'."
            )
        validation.positive_integer("shards", self.shards)

    def content(self) -> dict[str, Any]:
        """All of it as JSON values."""
        values = {
            "format": FORMAT,
            "name": self.name,
            "shards": self.shards,
            "settings": dict(self.settings),
            "inputs": dict(self.inputs),
        }
        return json.loads(json.dumps(values, allow_nan=False))

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all of it."""
        return any_files.seal_of(self.content())

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
        """Makes the message.

        Args:
          index: which shard.
          path: the file.
          problem: what is wrong with it.
        """
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

    def __init__(self, index: int, directory: str, spec: PassSpec):
        """Writes nothing.

        Args:
          index: which shard.
          directory: of the pass.
          spec: of the pass.
        """
        self.index, self.count = index, 0
        self.result: dict[str, Any] = {}
        self.partials: dict[str, str] = {}
        self._directory, self._spec = directory, spec

    def path(self, extension: str) -> str:
        """A file to write, by `tf.io.gfile` or whatever takes its paths.

        Args:
          extension: of the shard's file, without the dot; not "json", the mark's.
        """
        if extension == MARK or not re.fullmatch(r"[a-z0-9_]+", extension):
            raise validation.InputError(
                f"extension is {extension!r}; it must be lower-case letters and "
                f"digits, and not {MARK!r}."
            )
        final = f"{self._directory}/{self._spec.file(self.index, extension)}"
        return self.partials.setdefault(extension, any_files.partial_name(final))


class ShardDirectory:
    """The shards of one pass. Several processes may have it open.

    Attributes:
      directory: its path.
      spec: what is made of what.
    """

    def __init__(self, directory: str | os.PathLike, spec: PassSpec):
        """Looks at nothing yet; see `open`.

        Args:
          directory: where the shards go.
          spec: what they are to hold.
        """
        self.directory = os.fspath(directory).rstrip("/")
        self.spec = spec
        self._fingerprint = spec.fingerprint
        self._told: set[str] = set()  # of damage, what the log has

    def open(self) -> None:
        """Makes the directory, or takes up what the same pass left there.

        What another pass left before it had a shard is written over.

        Raises:
          InputError: another pass is there, or the place cannot be written.
        """
        with any_files.explained(self.directory, _GO_ON):
            tf.io.gfile.makedirs(self.directory)
        wanted = self.spec.content()
        found = self.read_json(PASS_FILE)
        if found == wanted:
            return
        if found is not None and self._is_begun():
            changed = validation.differences(found, wanted)
            raise validation.InputError(
                f"{self.directory}/{PASS_FILE} is of another pass, fingerprint "
                f"{any_files.seal_of(found)}, and this one's is {self._fingerprint} "
                f"({'; '.join(changed)}). Move {self.directory} away to begin again, "
                "or use another directory."
            )
        self.write_json(PASS_FILE, wanted)

    def finished(self, index: int) -> Mark | None:
        """A shard's mark if it is there; reads the mark and the sizes of its files.

        Returns:
          `None` if it is not there, or damaged, of which the log then tells.

        Raises:
          InputError: it is another pass's.
        """
        return self._sound(self._judged(index))

    def missing(self, among: Iterable[int] | None = None) -> list[int]:
        """The shards that are not there, or damaged.

        The directory is listed once; marks that it has are read, with the sizes of
        their files, several at a time.

        Args:
          among: which shards to consider; `None` means all.

        Raises:
          InputError: one is another pass's.
        """
        try:
            names = set(tf.io.gfile.listdir(self.directory))
        except any_files.gone():
            names = set()
        asked = range(self.spec.shards) if among is None else list(among)
        marked = [index for index in asked if self.spec.file(index, MARK) in names]
        with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            found = dict(zip(marked, pool.map(self._judged, marked)))
        sound = {index for index, judged in found.items() if self._sound(judged)}
        return [index for index in asked if index not in sound]

    def verify(self, index: int) -> Mark:
        """A shard's mark, after all bytes of its files were compared with it.

        Raises:
          DamagedShard: it is not there, or differs; names the file.
        """
        mark = self._checked(index)
        if mark is None:
            raise DamagedShard(index, self.path(index, MARK), "is not there")
        for extension, held in mark.files.items():
            path = self.path(index, extension)
            try:
                found = any_files.sha256(path)
            except any_files.gone() as error:
                raise DamagedShard(index, path, "has vanished") from error
            if found != held["sha256"]:
                raise DamagedShard(
                    index,
                    path,
                    f"SHA-256 is {found[:12]}..., its mark says "
                    f"{held['sha256'][:12]}...",
                )
        return mark

    @contextlib.contextmanager
    def reading(self, index: int) -> Iterator[Mark]:
        """Verifies a shard; what then goes wrong in reading its files is its damage.

        Raises:
          DamagedShard: as `verify`, or the body failed to read.
        """
        mark = self.verify(index)
        try:
            yield mark
        except (OSError, tf.errors.OpError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            path = self.path(index, "*")
            raise DamagedShard(index, path, f"cannot be read ({reason})") from error

    @contextlib.contextmanager
    def writing(self, index: int) -> Iterator[ShardWriter]:
        """Makes a shard: files first, its mark last, each renamed when it is whole.

        | the body        | the shard afterwards                  |
        |-----------------|---------------------------------------|
        | returns         | is there, and flushed to a local disk |
        | raises anything | is as before; what it wrote is gone   |

        Raises:
          InputError: the disk is full, or cannot be written.
        """
        writer = ShardWriter(index, self.directory, self.spec)
        try:
            with any_files.explained(self.directory, _GO_ON):
                yield writer
                self._commit(writer)
        except BaseException:
            for partial in writer.partials.values():
                with contextlib.suppress(tf.errors.OpError):
                    any_files.discard(partial)
            raise

    @contextlib.contextmanager
    def lock(self, index: int | None, wait: bool) -> Iterator[bool]:
        """Keeps a shard, or the merge, from other processes of this machine.

        What a process that died left half-written of the shard is removed.

        Args:
          index: the shard; `None` for the merge of all.
          wait: until another process lets go of it.

        Yields:
          Whether it is held now; see `any_files.locked`.

        Raises:
          FileNotFoundError: the directory was removed, as after a merge.
        """
        name = "merge.lock" if index is None else self.spec.file(index, "lock")
        with any_files.locked(f"{self.directory}/.{name}", wait) as held:
            alone = held and any_files.is_locked(f"{self.directory}/.{name}")
            if alone and index is not None and any_files.is_local(self.directory):
                start = "." + self.spec.file(index, "")
                for left in os.listdir(self.directory):
                    if left.startswith(start) and left.endswith(".partial"):
                        os.unlink(f"{self.directory}/{left}")
            yield held

    def discard(self, index: int) -> None:
        """Takes a shard's mark away, so that it is made again."""
        any_files.discard(self.path(index, MARK))

    def remove(self) -> None:
        """Removes everything, once the shards are merged.

        What says that there is a pass goes first, see `is_open`: of shards that vanish
        one by one another command would think that they are to be made.
        """
        any_files.discard(f"{self.directory}/{PASS_FILE}")
        with contextlib.suppress(*any_files.gone()):
            tf.io.gfile.rmtree(self.directory)

    def is_open(self) -> bool:
        """Returns whether it was opened and is not being removed."""
        return tf.io.gfile.exists(f"{self.directory}/{PASS_FILE}")

    def path(self, index: int, extension: str) -> str:
        """Returns the path of a shard's file."""
        return f"{self.directory}/{self.spec.file(index, extension)}"

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON object next to the shards, under a seal, whole or not at all.

        Raises:
          InputError: the disk is full, or cannot be written.
        """
        with any_files.explained(self.directory, _GO_ON):
            any_files.write_sealed(f"{self.directory}/{name}", value)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Reads what `write_json` wrote; returns `None` if it is missing.

        A damaged or edited file counts as missing; the log says so.
        """
        return any_files.read_or_warn(f"{self.directory}/{name}")

    def _is_begun(self) -> bool:
        """Returns whether a pass has a shard here, or is writing one."""
        for name in tf.io.gfile.listdir(self.directory):
            if re.search(r"-\d{5,}-of-\d{5,}\.json$", name):
                return True
            if name.endswith(".lock"):
                with any_files.locked(f"{self.directory}/{name}", False) as free:
                    if not free:
                        return True
        return False

    def _judged(self, index: int) -> Mark | DamagedShard | None:
        try:
            return self._checked(index)
        except DamagedShard as error:
            return error

    def _sound(self, judged: Mark | DamagedShard | None) -> Mark | None:
        """The mark, if the shard is there; tells of damage, each once."""
        if isinstance(judged, DamagedShard):
            if str(judged) not in self._told:
                self._told.add(str(judged))
                logging.warning("%s", judged)
            return None
        return judged

    def _checked(self, index: int) -> Mark | None:
        path = self.path(index, MARK)
        try:
            found = any_files.read_sealed(path)
        except any_files.gone():
            return None
        except ValueError as error:
            raise DamagedShard(index, path, str(error)) from error
        if found["pass"] != self._fingerprint:
            raise validation.InputError(
                f"{path} is of another pass, fingerprint {found['pass']}; this one's "
                f"is {self._fingerprint}. Move {self.directory} away to begin again, "
                "or use another directory."
            )
        if found["shard"] != index:
            raise DamagedShard(index, path, f"is the mark of shard {found['shard']}")
        for extension, held in found["files"].items():
            file = self.path(index, extension)
            try:
                size = any_files.size(file)
            except any_files.gone() as error:
                raise DamagedShard(index, file, "is missing") from error
            if size != held["bytes"]:
                raise DamagedShard(
                    index, file, f"has {size} bytes, its mark says {held['bytes']}"
                )
        return Mark(index, found["count"], found["result"], found["files"])

    def _commit(self, writer: ShardWriter) -> None:
        files = {
            extension: {
                "bytes": any_files.size(partial),
                "sha256": any_files.sha256(partial),
            }
            for extension, partial in writer.partials.items()
        }
        for extension, partial in writer.partials.items():
            any_files.put(partial, self.path(writer.index, extension))
        mark = {
            "pass": self._fingerprint,
            "shard": writer.index,
            "count": writer.count,
            "result": writer.result,
            "files": files,
        }
        self.write_json(self.spec.file(writer.index, MARK), mark)

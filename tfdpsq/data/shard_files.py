"""The identity of a pass, the marks of its shards, and their file names.

See `shards`, which reads and writes them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from tfdpsq import validation
from tfdpsq.data import any_files

FORMAT = "tfdpsq-pass/1"
MARK = "json"


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

    def __post_init__(self):
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

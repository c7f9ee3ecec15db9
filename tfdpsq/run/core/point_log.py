"""What a run says of itself, point by point: JSON Lines for programs, and TensorBoard.

    DIRECTORY/log.jsonl            one line a point, the last one that of the last point
    DIRECTORY/events.out.tfevents  the same points

Lines are appended and handed to the operating system at once, so `kill -9` loses none.
A run that goes on after one cuts off what it is going to repeat: lines from its first
step on, and a torn one. TensorBoard is told the same by the event that it has for this
(a session's start), and shows every step once.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import summary_ops_v2

from tfdpsq import validation

FILE_NAME = "log.jsonl"


class PointLog:
    """The points of one run, which is told once where it begins or goes on.

    Attributes:
      directory: where they go; the file appears with the first of them.
      last: the last point there is, or an empty dict.
    """

    def __init__(self, directory: pathlib.Path, key: str, timed: bool = True):
        """Writes nothing yet.

        Args:
          directory: where they go; TensorBoard reads it.
          key: what points are ordered by, a whole number in each.
          timed: whether TensorBoard is told when a point was added; if not, each has
            the time at which this log was opened.
        """
        self._time = None if timed else time.time()
        self.directory = directory
        self.last: dict[str, Any] = {}
        self._key = key
        self._file: io.FileIO | None = None
        self._writer: Any = None

    def begin(self, first: int) -> None:
        """Cuts off what is there from `first` on, as all that is to come again.

        Raises:
          InputError: the place cannot be written.
        """
        path = self.directory / FILE_NAME
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            size = 0
            for point, end in _lines(path):
                if point.get(self._key, first) >= first:
                    break
                self.last, size = point, end
            self._file = open(path, "ab", buffering=0)
            self._file.truncate(size)
        except OSError as error:
            raise _unwritable(path, error) from error
        self._writer = tf.summary.create_file_writer(str(self.directory))
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        begun = tf.compat.v1.Event(step=first, session_log=start)
        _send(self._writer, begun, self._time)

    def add(self, at: int, values: Mapping[str, Any]) -> None:
        """Appends a point.

        Args:
          at: its place, beyond that of the last one.
          values: numbers or text by name. What is not finite becomes text, as JSON has
            no word for it, and is not shown by TensorBoard.

        Raises:
          InputError: the file cannot be written.
        """
        if self._file is None:
            raise ValueError("begin was not called")
        line = _line({self._key: at, **values})
        point = json.loads(line)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise _unwritable(self.directory / FILE_NAME, error) from error
        self.last = point
        shown = {k: v for k, v in point.items() if k != self._key}
        show(self._writer, at, shown, self._time)

    def close(self) -> None:
        """Closes both files; does nothing where nothing was begun."""
        if self._file is not None:
            self._writer.close()
            self._file.close()
            self._file = None


def append(path: pathlib.Path, point: Mapping[str, Any]) -> None:
    """Appends a point to a log that several processes share, in one piece.

    Raises:
      OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        file.write(_line(point))


def show(
    writer: tf.summary.SummaryWriter,
    at: int,
    values: Mapping[str, Any],
    when: float | None = None,
) -> None:
    """Gives TensorBoard the numbers of a point, all in one event.

    Args:
      writer: of the run.
      at: the point's place.
      values: by name. Those that are no text and no whole number, of which some say how
        many there are, are shown.
      when: in seconds since 1970; `None` for now.
    """
    shown = tf.compat.v1.Summary()
    for name, value in values.items():
        if isinstance(value, float):
            shown.value.add(tag=name, simple_value=value)
    _send(writer, tf.compat.v1.Event(step=at, summary=shown), when)
    writer.flush()


def read_points(path: pathlib.Path) -> list[dict[str, Any]]:
    """The points of a log, which may be in use; none where there is no file.

    What follows a line that is torn or damaged is left out: the run that wrote it cuts
    it off when it goes on.
    """
    return [point for point, _ in _lines(path)]


def _lines(path: pathlib.Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Points, and where in the file each one ends, up to the first that is none."""
    if not path.is_file():
        return
    end = 0
    with open(path, "rb") as file:
        for raw in file:
            try:
                point = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:
                return
            if not isinstance(point, dict):
                return
            end += len(raw)
            yield point, end


def _send(writer: tf.summary.SummaryWriter, event: Any, when: float | None) -> None:
    event.wall_time = time.time() if when is None else when
    with writer.as_default(step=event.step):
        summary_ops_v2.import_event(event.SerializeToString())


def _line(point: Mapping[str, Any]) -> bytes:
    plain = {name: _plain(value) for name, value in point.items()}
    return json.dumps(plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int)):
        return value
    value = float(value)
    # Seven digits say all that is in a float32.
    return float(f"{value:.7g}") if math.isfinite(value) else str(value)


def _unwritable(path: pathlib.Path, error: OSError) -> validation.InputError:
    return validation.InputError(
        f"{path}: cannot be written ({error.strerror}). Make room there, or let it be "
        "written, and start the same command again."
    )

"""Logs the points of a run: JSON Lines for programs, and TensorBoard events.

    DIRECTORY/log.jsonl            one line per point
    DIRECTORY/events.out.tfevents  the same points

Each line goes to the operating system at once, so `kill -9` loses none. A run that
resumes cuts off a torn line and the lines from its first step on, which it repeats. A
session-start event makes TensorBoard drop them too, so it shows every step once.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdpsq import validation

FILE_NAME = "log.jsonl"


class PointLog:
    """The points of one run.

    Attributes:
      directory: output directory; the file appears with the first point.
      last: the last point, or an empty dict.
    """

    def __init__(self, directory: pathlib.Path, key: str, timed: bool = True):
        """Stores the arguments; writes nothing yet.

        `key` is the name of the integer in each point that orders them. Unless `timed`,
        events carry not the time of their point but that at which this log was opened.
        """
        self._time = None if timed else time.time()
        self.directory = directory
        self.last: dict[str, Any] = {}
        self._key = key
        self._file: io.FileIO | None = None
        self._writer: Any = None

    def begin(self, first: int) -> None:
        """Cuts off the points from `first` on, which the run is about to repeat.

        Raises:
          InputError: the file cannot be written.
        """
        path = self.directory / FILE_NAME
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            size = 0
            for point, end in _lines(path):
                at = point.get(self._key)
                if not isinstance(at, int) or at >= first:
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

        `at` is its key, larger than that of the last point. NaN and infinity become
        text, because JSON has neither, and TensorBoard does not show them.

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
        """Closes both files; does nothing before `begin`."""
        if self._file is not None:
            self._writer.close()
            self._file.close()
            self._file = None


def require_writable(directory: pathlib.Path, *names: str) -> None:
    """Tries the place of a log and of other files, before a step is paid for.

    Raises:
      InputError: the directory cannot be made or written, or one of the `names` is
        there and is not a file that can be written.
    """
    path = directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        for path in (directory / name for name in names):
            # Opening a pipe would wait for its reader.
            if path.exists() and not path.is_file():
                raise validation.InputError(
                    f"{path}: is not a file, and the run writes one there. Move it "
                    "away and start the same command again."
                )
            if path.exists():
                open(path, "ab").close()
    except OSError as error:
        raise _unwritable(path, error) from error


def append(path: pathlib.Path, point: Mapping[str, Any]) -> None:
    """Appends a point, in one write, to a log that several processes share."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        file.write(_line(point))


def show(
    writer: tf.summary.SummaryWriter,
    at: int,
    values: Mapping[str, Any],
    when: float | None = None,
) -> None:
    """Sends the numbers of a point to TensorBoard in one event.

    Shows only floats, as integers may be counts of rows. `when`: seconds since 1970.
    """
    shown = tf.compat.v1.Summary()
    for name, value in values.items():
        if isinstance(value, float):
            shown.value.add(tag=name, simple_value=value)
    _send(writer, tf.compat.v1.Event(step=at, summary=shown), when)
    writer.flush()


def read_points(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the points of a log, which may be in use; none without a file.

    Stops at a torn or damaged line: the run that wrote it cuts it off when it resumes.
    """
    return [point for point, _ in _lines(path)]


def _lines(path: pathlib.Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields each point and its end in the file, up to the first damaged line."""
    if not path.is_file():
        return
    end = 0
    with open(path, "rb") as file:
        for raw in file:
            try:
                point = validation.parse_json(raw) if raw.endswith(b"\n") else None
            except ValueError:
                return
            # Values are as `_line` writes them.
            if not isinstance(point, dict) or not point:
                return
            if not all(map(_is_plain, point.values())):
                return
            end += len(raw)
            yield point, end


def _send(writer: tf.summary.SummaryWriter, event: Any, when: float | None) -> None:
    from tensorflow.python.ops import summary_ops_v2

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
    # Seven digits represent a float32.
    return float(f"{value:.7g}") if math.isfinite(value) else str(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, int):  # an int of 400 digits is not a float
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


def is_number(value: Any) -> bool:
    """Returns whether a value of a point is a number, as written: "nan" is one."""
    try:
        float(value)
    except ValueError:
        return False
    return True


def _unwritable(path: pathlib.Path, error: OSError) -> validation.InputError:
    return validation.InputError(
        f"{path}: cannot be written ({error.strerror}). Make room there, or let it be "
        "written, and start the same command again."
    )

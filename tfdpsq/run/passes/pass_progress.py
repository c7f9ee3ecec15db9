"""Progress of a pass over a corpus, logged by all processes that make its shards.

All append to one log, a line at a time. The last line about a shard counts, so a shard
that is made again after a kill counts once:

    {"shard": 3, "of": 16, "queries": 512, "total": 8192, "queries_per_second": …, …}
    {"shard": 3, "of": 16, "rows": 8192, "seconds": …, "finished": 1, …}

TensorBoard finds the same in a folder per process. Shards and their marks never hold a
time, so they do not depend on the process that made them. A worker that cannot write
the log (on another machine, without the disk) warns once and goes on.
"""

from __future__ import annotations

import functools
import os
import pathlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
import tqdm
from absl import logging

from tfdpsq.data import io
from tfdpsq.run.core import layout, point_log
from tfdpsq.run.core.progress import SECONDS, log_directory


def log_of(shards: str) -> pathlib.Path | None:
    """Returns the log directory of a pass; `None` where there is none.

    `shards` is their directory, `.NAME.shards` next to the stage's output; one that is
    not local, or has another name, has no log.
    """
    folder, name = os.path.split(shards)
    if not io.is_local(shards) or not name.endswith(".shards"):
        return None
    return log_directory(pathlib.Path(folder) / name[1 : -len(".shards")])


def finished(
    logs: pathlib.Path | None, shard: int, of: int, rows: int, seconds: float
) -> None:
    """Logs that a shard was made."""
    rate = rows / max(seconds, 1e-9)
    values = {"rows": rows, "seconds": seconds, "rows_per_second": rate, "finished": 1}
    _say(logs, shard, of, shard, values)


class PassProgress:
    """The progress bar of one shard, with points in the log.

    The rate counts from the first items, since loading and tracing would make the first
    shard of a process look slow. As a context manager it closes itself.
    """

    def __init__(
        self,
        logs: pathlib.Path | None,
        unit: str,
        shard: tuple[int, int],
        total: int,
        first: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts the bar.

        `shard` is its number and the number of shards; `first` the number of items
        before it; `clock` returns seconds.
        """
        self._logs, self._unit, self._shard = logs, unit, shard
        self._total, self._first = total, first
        self._bar = tqdm.tqdm(
            total=total,
            desc=f"shard {shard[0]} of {shard[1]}",
            unit=f" {unit}",
            mininterval=1.0,
        )
        self._clock = clock
        self._started = self._said_at = clock()
        self._since: tuple[float, int, int] | None = None
        self._done = self._tokens = self._said = 0

    def add(self, items: int, tokens: int = 0) -> None:
        """Counts the items since the last call.

        `tokens` excludes padding, and is 0 where it is not known.
        """
        now = self._clock()
        self._done += items
        self._tokens += tokens
        self._bar.update(items)
        if self._since is None:
            self._since = now, self._done, self._tokens
        if now - self._said_at >= SECONDS:
            self._point(now)

    def _point(self, now: float) -> None:
        values: dict[str, Any] = {
            self._unit: self._done,
            "total": self._total,
            "seconds": now - self._started,
        }
        since, done, tokens = self._since or (now, self._done, self._tokens)
        if self._done > done and now > since:
            elapsed = now - since
            values[f"{self._unit}_per_second"] = (self._done - done) / elapsed
            if self._tokens > tokens:
                values["tokens_per_second"] = (self._tokens - tokens) / elapsed
        _say(self._logs, *self._shard, self._first + self._done, values)
        self._said, self._said_at = self._done, now

    def close(self) -> None:
        """Ends the bar."""
        if self._done > self._said:
            self._point(self._clock())
        self._bar.close()

    def __enter__(self) -> PassProgress:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()


def _say(
    logs: pathlib.Path | None, shard: int, of: int, at: int, values: Mapping[str, Any]
) -> None:
    if logs is None:
        return
    process = os.getpid()
    point = {
        "shard": shard,
        "of": of,
        **values,
        "process": process,
        "host": socket.gethostname(),
        "time": int(time.time()),
    }
    try:
        point_log.append(logs / point_log.FILE_NAME, point)
        point_log.show(_writer(logs / f"{layout.PROCESS}{process}"), at, values)
    except (OSError, tf.errors.OpError) as error:
        _warn_once(str(logs), str(error))


@functools.lru_cache(maxsize=8)
def _writer(directory: pathlib.Path) -> tf.summary.SummaryWriter:
    return tf.summary.create_file_writer(str(directory))


@functools.lru_cache(maxsize=8)
def _warn_once(logs: str, reason: str) -> None:
    logging.warning("%s: rates cannot be logged there (%s)", logs, reason)

"""How fast a pass over a corpus goes, by whoever does its shards.

All processes of a pass append to one log, a line at a time; of several lines about one
shard the last one counts, so a shard that is made again after a kill is in it once:

    {"shard": 3, "of": 16, "queries": 512, "total": 8192, "queries_per_second": …, …}
    {"shard": 3, "of": 16, "rows": 8192, "seconds": …, "finished": 1, …}

TensorBoard finds the same in a folder of each process. Shards and their marks never
hold a time: they are the same whoever made them. Where a worker cannot write the log
(one on another machine, without the disk), it says so once and goes on.
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

from tfdpsq.data import any_files
from tfdpsq.run.core import point_log
from tfdpsq.run.core.progress import SECONDS, log_directory


def log_of(shards: str) -> pathlib.Path | None:
    """The log directory of a pass; `None` where there is none.

    Args:
      shards: the directory of its shards, `.NAME.shards` beside the stage's output. One
        that is not local, or called otherwise, has no log.
    """
    folder, name = os.path.split(shards)
    if not any_files.is_local(shards) or not name.endswith(".shards"):
        return None
    return log_directory(pathlib.Path(folder) / name[1 : -len(".shards")])


def finished(
    logs: pathlib.Path | None, shard: int, of: int, rows: int, seconds: float
) -> None:
    """Says that a shard was made.

    Args:
      logs: the pass's, see `log_of`.
      shard: which.
      of: how many there are.
      rows: that it holds.
      seconds: that it took.
    """
    rate = rows / max(seconds, 1e-9)
    values = {"rows": rows, "seconds": seconds, "rows_per_second": rate, "finished": 1}
    _say(logs, shard, of, shard, values)


class PassProgress:
    """The progress bar of one shard, with points of the log on the way.

    The rate is that since the first items came: loading and tracing, of which a process
    has to do a part only once, would make its first shard look slow.

    Also a context manager, which closes it.
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

        Args:
          logs: the pass's, see `log_of`.
          unit: what is counted, in the plural.
          shard: which one, and of how many.
          total: how many items the shard will have.
          first: how many of the whole lie before it.
          clock: seconds.
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
        """Counts what was done since the last call.

        Args:
          items: how many.
          tokens: how many they have, without padding, where that is known.
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
        point_log.show(_writer(logs / f"process-{process}"), at, values)
    except (OSError, tf.errors.OpError) as error:
        _warn_once(str(logs), str(error))


@functools.lru_cache(maxsize=8)
def _writer(directory: pathlib.Path) -> tf.summary.SummaryWriter:
    return tf.summary.create_file_writer(str(directory))


@functools.lru_cache(maxsize=8)
def _warn_once(logs: str, reason: str) -> None:
    logging.warning("%s: rates cannot be logged there (%s)", logs, reason)

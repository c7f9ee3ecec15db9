"""Progress of a running stage, for the terminal, TensorBoard and `status`.

    private/logs/NAME/log.jsonl            one line per point
    private/logs/NAME/events.out.tfevents  the same points, for TensorBoard

Losses and step times measure private queries: a loss is a mean over the rows that a
step drew, and the time of a step shows how many those were, since empty microbatches
are skipped. That number is a secret on which amplification by sampling rests. No ε
covers either, so both are recorded as reads and kept under `private/`. Strict mode
leaves them out: its log has steps and ε alone, which follow from the public plan.
Examples and tokens per second are the expected numbers per step over its time.

(Anybody who can watch the process can time it. This module only controls what is
written to the terminal and the logs.)
"""

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tqdm
from absl import logging

from tfdpsq.data import io
from tfdpsq.run.frame import places
from tfdpsq.validation import InputError

LOG_FILE = "log.jsonl"
_POINTS = 200  # draw a smooth curve
_SECONDS = 10.0  # longest time between two points
_STEPS_TIMED = 1000
_PERCENTILES = (50, 90, 99)


class Progress:
    """Progress bar, log and TensorBoard scalars of one training run.

    A point of the log is the mean over the steps since the point before. Every saved
    state has a point, so a run that was killed goes on from one, and every step is in
    exactly one. As a context manager it closes itself.

    Attributes:
      epsilon: maps steps executed to ε so far; `None` where training spends none.
    """

    def __init__(
        self,
        logs: pathlib.Path,
        steps: int,
        *,
        measured: bool = True,
        batch_size: int = 0,
        tokens: int = 0,
        save_every: int = 0,
        epsilon: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts the bar.

        Args:
          logs: directory of the points, see `Place.logs`.
          steps: of the whole run.
          measured: whether losses and times are shown and kept; else steps and ε alone.
          batch_size: examples that are expected in a step.
          tokens: tokens of an example, padding included.
          save_every: steps between two saved states; 0 where none is saved.
          epsilon: see the attribute.
          clock: returns seconds.

        Raises:
          OSError: the log cannot be written; before a step is paid for.
        """
        self.epsilon = epsilon
        self._steps, self._measured = steps, measured
        # Times of events would show how long steps took.
        self._log = _Log(logs, None if measured else time.time())
        bare = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"
        form = None if measured else bare
        self._bar = tqdm.tqdm(
            total=steps, desc=logs.name, unit="step", mininterval=1, bar_format=form
        )
        every = {"steps": 1, "examples": batch_size, "tokens": batch_size * tokens}
        self._per_step = {name: count for name, count in every.items() if count}
        self._every, self._save_every = max(1, steps // _POINTS), save_every
        self._times: collections.deque[float] = collections.deque(maxlen=_STEPS_TIMED)
        self._sum, self._count, self._step = 0.0, 0, 0
        self._clock = clock
        self._started = self._pointed = self._stepped = clock()
        self._before: float | None = None  # seconds of earlier processes

    def __call__(self, step: int, loss: float) -> None:
        """Records that `step` steps have been executed, the last with `loss`."""
        now = self._clock()
        if self._before is None:
            last = self._log.begin(step)
            self._before = float(last.get("seconds", 0.0))
            # The bar's rate counts the steps of this process only.
            self._bar.n = self._bar.initial = self._bar.last_print_n = step - 1
            self._pointed = now
        else:  # the first step of a process includes tracing, so it is not timed
            self._times.append(now - self._stepped)
        self._step, self._stepped = step, now
        self._bar.update(step - self._bar.n)
        self._sum, self._count = self._sum + loss, self._count + 1
        waited = self._measured and now - self._pointed >= _SECONDS
        saved = self._save_every and step % self._save_every == 0
        if step % self._every == 0 or step == self._steps or saved or waited:
            self._point(now)

    def _point(self, now: float) -> None:
        values: dict[str, Any] = {"of": self._steps}
        if self.epsilon is not None:
            values["epsilon"] = float(self.epsilon(self._step))
        if self._measured:
            values["loss"] = self._sum / self._count
            values["seconds"] = (self._before or 0.0) + now - self._started
            times = np.array(self._times or [math.nan])
            for name, count in self._per_step.items():
                values[f"{name}_per_second"] = float(count / times.mean())
            for share in _PERCENTILES:
                values[f"step_seconds_p{share}"] = float(np.percentile(times, share))
            self._bar.set_postfix(loss=f"{values['loss']:.3f}", refresh=False)
        self._log.add("step", self._step, values)
        self._sum, self._count, self._pointed = 0.0, 0, now

    def __enter__(self) -> Progress:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the bar and the log."""
        if self._count:  # stopped between two points
            self._point(self._clock())
        self._bar.close()
        self._log.close()


class ShardProgress:
    """Progress bar of one shard, with points in the log that all processes share.

    The rate counts from the first items, since loading and tracing would make the first
    shard of a process look slow. A worker that cannot write the log, on another machine
    without the disk, says so and goes on. As a context manager it closes itself.
    """

    def __init__(
        self, logs: pathlib.Path, unit: str, index: int, total: int, first: int = 0
    ):
        """Starts the bar.

        Args:
          logs: directory of the points, see `Place.logs`.
          unit: what is counted, such as "queries".
          index: number of the shard.
          total: expected number of items.
          first: number of items in the shards before.
        """
        self._unit, self._index, self._first, self._total = unit, index, first, total
        self._bar = tqdm.tqdm(
            total=total, desc=f"shard {index}", unit=f" {unit}", mininterval=1
        )
        self._log: _Log | None = None
        try:
            self._log = _Log(logs, None)
        except (OSError, InputError) as error:
            logging.warning("progress is not logged: %s", error)
        self._started = self._said = time.monotonic()
        self._since: tuple[float, int, int] | None = None
        self._done = self._tokens = 0

    def add(self, items: int, tokens: int = 0) -> None:
        """Counts the items since the last call; `tokens` are without padding."""
        self._bar.update(items)
        self._done, self._tokens = self._done + items, self._tokens + tokens
        now = time.monotonic()
        self._since = self._since or (now, self._done, self._tokens)
        if now - self._said >= _SECONDS:
            self._point(now)

    def _point(self, now: float) -> None:
        since, items, tokens = self._since or (now, self._done, self._tokens)
        values: dict[str, Any] = {"shard": self._index, "of": self._total}
        values[self._unit] = self._done
        values["seconds"] = now - self._started
        counted = {self._unit: self._done - items, "tokens": self._tokens - tokens}
        for name, count in counted.items():
            if count and now > since:
                values[f"{name}_per_second"] = count / (now - since)
        if self._log is not None:
            self._log.add("at", self._first + self._done, values)
        self._said = now

    def __enter__(self) -> ShardProgress:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the bar."""
        if self._done:
            self._point(time.monotonic())
        self._bar.close()
        if self._log is not None:
            self._log.close()


class _Log:
    """Points as JSON Lines and as TensorBoard events.

    Each line goes to the operating system at once, so `kill -9` loses none.
    """

    def __init__(self, directory: pathlib.Path, when: float | None):
        """Opens the file; `when` is the time of all events, `None` for their own."""
        self._path, self._when = places.open_private(directory) / LOG_FILE, when
        self._file = open(self._path, "ab", buffering=0)
        self._writer: Any = None

    def begin(self, first: int) -> dict[str, Any]:
        """Cuts off the points from step `first` on, which the run is about to repeat.

        Returns:
          The last point that is left, or an empty dict.
        """
        kept = [
            point
            for point in read_points(self._path)
            if point.get("step", first) < first
        ]
        self._file.close()
        lines = "".join(json.dumps(point) + "\n" for point in kept)
        io.atomic_write(self._path, lines)
        self._file = open(self._path, "ab", buffering=0)
        # TensorBoard then drops them as well.
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        self._send(tf.compat.v1.Event(step=first, session_log=start))
        return kept[-1] if kept else {}

    def add(self, key: str, at: int, values: Mapping[str, Any]) -> None:
        """Appends a point; TensorBoard shows floats, as integers may count rows."""
        # JSON has neither NaN nor infinity; seven digits represent a float32.
        finite = {
            name: float(f"{value:.7g}") if isinstance(value, float) else value
            for name, value in values.items()
            if math.isfinite(value)
        }
        self._file.write(json.dumps({key: at, **finite}).encode() + b"\n")
        shown = tf.compat.v1.Summary()
        for name, value in finite.items():
            if isinstance(value, float):
                shown.value.add(tag=name, simple_value=value)
        self._send(tf.compat.v1.Event(step=at, summary=shown))

    def _send(self, event: Any) -> None:
        from tensorflow.python.ops import summary_ops_v2

        if self._writer is None:
            self._writer = tf.summary.create_file_writer(os.fspath(self._path.parent))
        event.wall_time = time.time() if self._when is None else self._when
        with self._writer.as_default(step=event.step):
            summary_ops_v2.import_event(event.SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        """Closes both files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def read_points(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the points of a log, which may be in use; none without a file.

    Stops at a torn line: the run that wrote it cuts it off when it goes on.
    """
    found = []
    if path.is_file():
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            found.append(json.loads(line))
    return found

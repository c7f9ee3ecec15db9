"""Progress of a running stage, for the terminal, TensorBoard and `status`.

    private/logs/NAME/log.jsonl            one line per point
    private/logs/NAME/events.out.tfevents  the same points, for TensorBoard

Losses and step times measure private queries: a loss is a mean over the rows that a
step drew, and the time of a step shows how many those were, since empty microbatches
are skipped. That number is a secret on which amplification by sampling rests. No ε
covers either, so both are recorded as reads and kept under `private/`. Strict mode
leaves them out: its log has steps and ε alone, which follow from the public plan.

(Anybody who can watch the process can time it. This module only controls what is
written to the terminal and the logs.)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
import tqdm

from tfdpsq.data import io
from tfdpsq.run.frame import places
from tfdpsq.validation import InputError

LOG_FILE = "log.jsonl"
_POINTS = 200  # draw a smooth curve


class Progress:
    """Progress bar, log and TensorBoard scalars of one training run.

    A point of the log is the mean over the steps since the point before. Every saved
    state has a point, so a run that was killed goes on from one, and every step is in
    exactly one. As a context manager it closes itself.
    """

    def __init__(
        self,
        logs: pathlib.Path,
        steps: int,
        *,
        measured: bool = True,
        save_every: int = 0,
        epsilon: Callable[[int], float] | None = None,
    ):
        """Starts the bar.

        Args:
          logs: directory of the points, see `Place.logs`.
          steps: of the whole run.
          measured: whether losses and times are shown and kept; else steps and ε alone.
          save_every: steps between two saved states; 0 where none is saved.
          epsilon: maps steps executed to ε so far; `None` where training spends none.

        Raises:
          OSError: the log cannot be written; before a step is paid for.
        """
        self._steps, self._measured, self._epsilon = steps, measured, epsilon
        # Times of events would show how long steps took.
        self._log = _Log(logs, None if measured else time.time())
        bare = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"
        form = None if measured else bare
        self._bar = tqdm.tqdm(
            total=steps, desc=logs.name, unit="step", mininterval=1, bar_format=form
        )
        self._every, self._save_every = max(1, steps // _POINTS), save_every or steps
        self._sum, self._count, self._step = 0.0, 0, 0
        self._started = self._pointed = time.monotonic()
        self._before: float | None = None  # seconds of earlier processes

    def __call__(self, step: int, loss: float) -> None:
        """Records that `step` steps have been executed, the last with `loss`."""
        if self._before is None:
            self._before = float(self._log.begin(step).get("seconds", 0.0))
            # The bar's rate counts the steps of this process only.
            self._bar.n = self._bar.initial = self._bar.last_print_n = step - 1
        self._step = step
        self._bar.update(step - self._bar.n)
        self._sum, self._count = self._sum + loss, self._count + 1
        if step % self._every == 0 or step % self._save_every == 0:
            self._point()

    def _point(self) -> None:
        values: dict[str, Any] = {"of": self._steps}
        if self._epsilon is not None:
            values["epsilon"] = float(self._epsilon(self._step))
        if self._measured:
            now = time.monotonic()
            values["loss"] = self._sum / self._count
            values["seconds"] = (self._before or 0.0) + now - self._started
            values["steps_per_second"] = self._count / max(now - self._pointed, 1e-9)
            self._bar.set_postfix(loss=f"{values['loss']:.3f}", refresh=False)
            self._pointed = now
        self._log.add("step", self._step, values)
        self._sum, self._count = 0.0, 0

    def __enter__(self) -> Progress:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the bar and the log."""
        if self._count:  # ended between two points
            self._point()
        self._bar.close()
        self._log.close()


@contextlib.contextmanager
def shard_progress(
    logs: pathlib.Path, unit: str, index: int, total: int, first: int = 0
) -> Iterator[Callable[..., None]]:
    """Shows the progress bar of a shard; a finished one has a point in the log.

    Args:
      logs: directory of the points, see `Place.logs`, which all processes share.
      unit: what is counted, such as "queries".
      index: number of the shard.
      total: expected number of items.
      first: number of items in the shards before.

    Yields:
      A function that counts items, and their tokens, since the last call.
    """
    started, done, all_tokens = time.monotonic(), 0, 0

    def add(items: int, tokens: int = 0) -> None:
        nonlocal done, all_tokens
        done, all_tokens = done + items, all_tokens + tokens
        bar.update(items)

    name = f"shard {index}"
    with tqdm.tqdm(total=total, desc=name, unit=f" {unit}", mininterval=1) as bar:
        yield add
    values: dict[str, Any] = {"shard": index, "of": total, unit: done}
    values.update(tokens=all_tokens, seconds=time.monotonic() - started)
    # A worker of Beam on another machine may not have the directory.
    with contextlib.suppress(OSError, InputError):
        log = _Log(logs)
        log.add("at", first + done, values)
        log.close()


class _Log:
    """Points as JSON Lines and as TensorBoard events.

    Each line goes to the operating system at once, so `kill -9` loses none.
    """

    def __init__(self, directory: pathlib.Path, when: float | None = None):
        """Opens the file; `when` is the time of all events, `None` for their own."""
        self._path, self._when = places.open_private(directory) / LOG_FILE, when
        self._file = open(self._path, "ab", buffering=0)
        self._writer: Any = None

    def begin(self, first: int) -> dict[str, Any]:
        """Cuts off the points from step `first` on; returns the last one left, or {}.

        The run is about to repeat them.
        """
        found = read_points(self._path)
        kept = [point for point in found if point.get("step", first) < first]
        self._file.close()
        io.atomic_write(self._path, "".join(json.dumps(p) + "\n" for p in kept))
        self._file = open(self._path, "ab", buffering=0)
        # TensorBoard then drops them as well.
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        self._send(tf.compat.v1.Event(step=first, session_log=start))
        return kept[-1] if kept else {}

    def add(self, key: str, at: int, values: Mapping[str, Any]) -> None:
        """Appends a point; TensorBoard shows floats, as integers may count rows."""
        # JSON has neither NaN nor infinity.
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
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
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]

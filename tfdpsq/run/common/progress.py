"""Progress of a running stage, for the terminal, TensorBoard and `status`.

    private/logs/NAME/log.jsonl            one line per point
    private/logs/NAME/events.out.tfevents  the same points, for TensorBoard

Losses and step times measure private queries: a loss is a mean over the rows that a
step drew, and the time of a step shows how many those were, since empty microbatches
are skipped. That number is a secret on which amplification by sampling rests. No ε
covers either, so both are recorded as reads and kept under `private/`. Strict mode
leaves them out: its log has steps and ε alone, which follow from the public plan, and
TensorBoard gets nothing, as its events hold the time of each.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tqdm

from tfdpsq.data import io
from tfdpsq.run.frame import places

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
        self._path = places.open_private(logs) / LOG_FILE
        # Unbuffered: each line is the system's at once, so `kill -9` loses none.
        self._file = open(self._path, "ab", buffering=0)
        self._events: Any = None
        bare = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"
        form = None if measured else bare
        self._bar = tqdm.tqdm(
            total=steps, desc=logs.name, unit="step", mininterval=1, bar_format=form
        )
        self._every, self._save_every = max(1, steps // _POINTS), save_every or steps
        self._sum, self._count, self._step = 0.0, 0, 0
        self._pointed = time.monotonic()

    def __call__(self, step: int, loss: float) -> None:
        """Records that `step` steps have been executed, the last with `loss`."""
        if not self._step:
            self._begin(step)
        self._step = step
        self._bar.update(step - self._bar.n)
        self._sum, self._count = self._sum + loss, self._count + 1
        if step % self._every == 0 or step % self._save_every == 0:
            self._point()

    def _begin(self, first: int) -> None:
        """Cuts off the points from step `first` on, which the run is to repeat."""
        kept = [point for point in read_points(self._path) if point["step"] < first]
        self._file.close()
        io.atomic_write(self._path, "".join(json.dumps(p) + "\n" for p in kept))
        self._file = open(self._path, "ab", buffering=0)
        if self._measured:
            for old in self._path.parent.glob("events.*"):
                old.unlink()
            self._events = tf.summary.create_file_writer(os.fspath(self._path.parent))
            for point in kept:
                self._show(point)
        # The bar's rate counts the steps of this process only.
        self._bar.n = self._bar.initial = self._bar.last_print_n = first - 1

    def _point(self) -> None:
        point: dict[str, Any] = {"step": self._step, "of": self._steps}
        if self._epsilon is not None:
            point["epsilon"] = float(self._epsilon(self._step))
        if self._measured:
            now = time.monotonic()
            point["loss"] = self._sum / self._count
            point["steps_per_second"] = self._count / max(now - self._pointed, 1e-9)
            self._bar.set_postfix(loss=f"{point['loss']:.3f}", refresh=False)
            self._pointed = now
        # JSON has neither NaN nor infinity.
        point = {name: value for name, value in point.items() if math.isfinite(value)}
        self._file.write(json.dumps(point).encode() + b"\n")
        if self._measured:
            self._show(point)
        self._sum, self._count = 0.0, 0

    def _show(self, point: dict[str, Any]) -> None:
        with self._events.as_default(step=point["step"]):
            for name, value in point.items():
                if isinstance(value, float):
                    tf.summary.scalar(name, value)
        self._events.flush()

    def __enter__(self) -> Progress:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the bar and the log."""
        if self._count:  # ended between two points
            self._point()
        self._bar.close()
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_points(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the points of a log, which may be in use; none without a file.

    Stops at a torn line: the run that wrote it cuts it off when it goes on.
    """
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]

"""Progress of a running stage, for the terminal, TensorBoard and `status`.

Losses and step times measure private queries: a loss is a mean over the rows that a
step drew, and the time of a step shows how many rows it drew, since empty microbatches
are skipped. That number is a secret on which amplification by sampling rests, and where
only a bound on n is public it gives n away. No ε covers either measurement, so both are
recorded as reads and kept under `private/`. Strict mode leaves them out: its log has
steps and ε alone, which follow from the public plan. Examples and tokens per second are
the expected numbers per step over its time; tokens include padding.

(Anybody who can watch the process can time it. This module only controls what is
written to the terminal and the logs.)
"""

from __future__ import annotations

import collections
import contextlib
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tqdm

from tfdpsq.data import io
from tfdpsq.run.core import layout, point_log, releases

PERCENTILES = (50, 90, 99)
# About two hundred points draw a smooth curve.
_POINTS = 200
# Longest time between two points, in seconds.
SECONDS = 10.0
# Number of most recent steps whose times are kept.
_STEPS_TIMED = 1000


def log_directory(
    directory: pathlib.Path, private: pathlib.Path | str = ""
) -> pathlib.Path:
    """Returns the directory for a stage's logs, which is never released.

    `private` is the stage's own private directory; by default that of its workdir.
    """
    private = releases.private_directory(directory, str(private))
    return private / layout.LOGS / directory.name


class Progress:
    """Progress bar, log, TensorBoard scalars and a curve file for one training run.

    A point of the log is the mean over the steps since the point before. Every saved
    state has a point, so a run that was killed resumes from a point and every step is
    in exactly one. A point takes about half a millisecond, other steps microseconds.

    As a context manager it closes itself.

    Attributes:
      epsilon: maps steps executed to ε so far; `None` where training spends none.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        steps: int,
        measured: bool = True,
        examples: float = 0,
        tokens: float = 0,
        save_every: int = 0,
        epsilon: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts the bar.

        `directory` is where points and curve go, under `private/` for private queries.
        `measured` says whether to show and keep losses and times; else steps and ε
        alone. `examples` and `tokens` are expected numbers per step, padding included.
        `save_every` is the number of steps between two saved states, 0 where none is
        saved.

        Raises:
          InputError: points or curve could not be written.
        """
        point_log.require_writable(directory, point_log.FILE_NAME, layout.CURVE_FILE)
        self.epsilon = epsilon
        self._steps, self._measured = steps, measured
        # Times of events would show how long steps took.
        self._log = point_log.PointLog(directory, "step", timed=measured)
        bare = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"
        self._bar = tqdm.tqdm(
            total=steps,
            desc=directory.name,
            unit="step",
            mininterval=1.0,
            bar_format=None if measured else bare,
        )
        self._per_step = {"steps": 1.0, "examples": examples, "tokens": tokens}
        self._every = max(1, steps // _POINTS)
        self._save_every = save_every
        self._times: collections.deque[float] = collections.deque(maxlen=_STEPS_TIMED)
        self._sum, self._count = 0.0, 0
        self._clock = clock
        self._started = self._pointed = self._stepped = clock()
        self._before: float | None = None  # seconds of earlier processes
        self._step = 0

    def __call__(self, step: int, loss: float) -> None:
        """Records that `step` steps have been executed, the last with `loss`.

        Raises:
          InputError: the log cannot be written.
        """
        now = self._clock()
        if self._before is None:
            self._begin(step, now)
        else:  # the first step of a process includes tracing, so it is not timed
            self._times.append(now - self._stepped)
        self._step, self._stepped = step, now
        self._bar.update(step - self._bar.n)
        self._sum += loss
        self._count += 1
        waited = self._measured and now - self._pointed >= SECONDS
        saved = self._save_every and step % self._save_every == 0
        if step % self._every == 0 or step == self._steps or saved or waited:
            self._point(now)

    def _begin(self, step: int, now: float) -> None:
        self._log.begin(step)
        before = self._log.last.get("seconds")
        self._before = float(before) if isinstance(before, (int, float)) else 0.0
        # The bar's rate counts the steps of this process only.
        self._bar.n = self._bar.initial = self._bar.last_print_n = step - 1
        self._pointed = now

    def _point(self, now: float) -> None:
        values: dict[str, Any] = {"of": self._steps}
        if self.epsilon is not None:
            values["epsilon"] = self.epsilon(self._step)
        if self._measured:
            values["loss"] = self._sum / self._count
            values["seconds"] = (self._before or 0.0) + now - self._started
            values["time"] = int(time.time())
            if self._times:
                values.update(self._rates())
            self._bar.set_postfix(loss=f"{values['loss']:.3f}", refresh=False)
        self._log.add(self._step, values)
        self._sum, self._count = 0.0, 0
        self._pointed = now

    def _rates(self) -> dict[str, float]:
        times = np.array(self._times)
        per_second = len(times) / max(float(times.sum()), 1e-9)
        found = {
            f"{name}_per_second": count * per_second
            for name, count in self._per_step.items()
            if count
        }
        for share in PERCENTILES:
            found[f"step_seconds_p{share}"] = float(np.percentile(times, share))
        return found

    def close(self) -> dict[str, list[float]]:
        """Ends the bar and the log, writes `curve.json` and returns its content.

        Raises:
          InputError: the log cannot be written.
        """
        if self._count:  # stopped between two points
            self._point(self._clock())
        self._bar.close()
        self._log.close()
        points = point_log.read_points(self._log.directory / point_log.FILE_NAME)
        keys = ("step", "loss", "seconds")
        whole = [
            point
            for point in points
            if set(keys) <= set(point)
            # A damaged line must not end a run whose steps are paid.
            and all(point_log.is_number(point[key]) for key in keys)
        ]
        curve = {key: [float(point[key]) for point in whole] for key in keys}
        self._log.directory.mkdir(parents=True, exist_ok=True)
        path = self._log.directory / layout.CURVE_FILE
        io.atomic_write(path, json.dumps(curve))
        return curve

    def __enter__(self) -> Progress:
        """Returns itself."""
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        """Closes it; writes nothing if an error came before the first step."""
        if kind is None or self._before is not None:
            self.close()
        else:
            self._bar.close()
            with contextlib.suppress(OSError):  # it was made to try the place
                self._log.directory.rmdir()


def duration(seconds: float, digits: int = 0) -> str:
    """Formats seconds in the largest unit that gives at least 2.

    Below 2 minutes they have so many `digits`.
    """
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.{digits}f} s"

"""What a person, TensorBoard and `run.status` see of a running stage.

Training on private queries measures them: a loss is a mean over the rows that a step
drew, and how long the step took tells how many they were, as microbatches without a
row are skipped. How many rows a step drew is a secret that the amplification by
sampling rests on, and where only a bound on n is public it gives n away. No ε covers
either, so both are recorded as reads, kept under `private/`, and left out in strict
mode, whose log has steps and ε alone: these follow from the plan, which is public.
Examples and tokens per second are never those drawn: they are what a step is expected
to draw, over the time it took, and tokens are places, padding included.

(Whoever sees a process work can time it by a clock of their own. What is written down
here, or not, concerns who gets to see the terminal and the logs.)
"""

from __future__ import annotations

import collections
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tqdm

from tfdpsq.run.core import point_log, releases

LOGS = "logs"
PERCENTILES = (50, 90, 99)
# About two hundred points draw any curve.
_POINTS = 200
# At least every so many seconds, for whoever waits.
SECONDS = 10.0
# Of how many last steps times are kept.
_STEPS_TIMED = 1000


def log_directory(
    directory: pathlib.Path, private: pathlib.Path | str = ""
) -> pathlib.Path:
    """Where the logs of a stage go: never to what may be released.

    Args:
      directory: the stage's output.
      private: the private directory, if the stage has one of its own; by default that
        of the workdir which the output lies in.
    """
    private = releases.private_directory(directory, str(private))
    return private / LOGS / directory.name


class Progress:
    """Progress bar, log, TensorBoard scalars and a curve file for one training run.

    A point of the log is the mean over the steps since the one before it. There is one
    after every step that a state is saved after, so that a run that was killed goes on
    from a point, and every step is in exactly one. Logging a point takes about half a
    millisecond, a step without one some microseconds.

    Also a context manager, which closes it.

    Attributes:
      epsilon: a function from steps executed to ε so far; `None` where training
        spends none.
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
        steps_per_loop: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts the bar.

        Args:
          directory: where points and curve go, under `private/` where queries are
            private.
          steps: how many steps there will be.
          measured: whether to show and keep losses and times; else steps and ε alone.
          examples: how many a step is expected to draw.
          tokens: how many places these have, padding included.
          save_every: steps between two saved states; 0 where none is saved.
          epsilon: see the class.
          steps_per_loop: steps that are taken in one call, and then told of one after
            another; each is taken to have had its share of the time.
          clock: seconds.
        """
        self.epsilon = epsilon
        self._steps, self._measured = steps, measured
        # When a step ended would tell how long it took.
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
        # Times of steps whose loop is not told of to its end.
        self._loop: list[float] = []
        self._steps_per_loop = steps_per_loop
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
        else:  # the first step of a process is traced, too, and says nothing
            self._loop.append(now - self._stepped)
        if len(self._loop) == self._steps_per_loop:
            mean = sum(self._loop) / len(self._loop)
            self._times.extend([mean] * len(self._loop))
            self._loop.clear()
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
        self._before = float(self._log.last.get("seconds", 0.0))
        # The bar's rate is that of this process.
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
        curve = {
            key: [float(point[key]) for point in points if "loss" in point]
            for key in ("step", "loss", "seconds")
        }
        self._log.directory.mkdir(parents=True, exist_ok=True)
        (self._log.directory / "curve.json").write_text(json.dumps(curve))
        return curve

    def __enter__(self) -> Progress:
        """Returns itself."""
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        """Closes it; leaves nothing behind where no step was taken before an error."""
        if kind is None or self._before is not None:
            self.close()
        else:
            self._bar.close()


def duration(seconds: float) -> str:
    """Seconds in the unit that people would say them in."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"

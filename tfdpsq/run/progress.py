"""What a person and TensorBoard see of a running stage."""

from __future__ import annotations

import json
import pathlib
import time

import tensorflow as tf
import tqdm


class Progress:
    """Progress bar, TensorBoard scalars and a curve file for one training run.

    The loss of a private run is a private measurement that no ε covers, so the
    directory belongs under `private/`.
    """

    def __init__(
        self, directory: pathlib.Path, name: str, steps: int, losses: bool = True
    ):
        """Starts the bar.

        Args:
          directory: where curves go; TensorBoard reads it.
          name: what the run is called.
          steps: how many steps there will be.
          losses: whether to show and keep losses; else only how far it is.
        """
        self._losses = losses
        self._directory = directory / name
        self._directory.mkdir(parents=True, exist_ok=True)
        self._writer = tf.summary.create_file_writer(str(self._directory))
        self._bar = tqdm.tqdm(total=steps, desc=name, unit="step", mininterval=1.0)
        self._curve: dict[str, list[float]] = {"step": [], "loss": [], "seconds": []}
        self._started = time.monotonic()
        # About two hundred points draw any curve.
        self._every = max(1, steps // 200)
        self._sum, self._count = 0.0, 0

    def __call__(self, step: int, loss: float) -> None:
        """Records that `step` steps have been executed, the last with `loss`."""
        self._bar.update(step - self._bar.n)
        if not self._losses:
            return
        self._sum += loss
        self._count += 1
        if step % self._every and step != self._bar.total:
            return
        mean = self._sum / self._count
        self._sum, self._count = 0.0, 0
        seconds = time.monotonic() - self._started
        for key, value in (("step", step), ("loss", mean), ("seconds", seconds)):
            self._curve[key].append(value)
        self._bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
        with self._writer.as_default(step=step):
            tf.summary.scalar("loss", mean)
            tf.summary.scalar("steps_per_second", step / seconds)

    def close(self) -> dict[str, list[float]]:
        """Ends the bar, writes `curve.json` and returns its content."""
        self._bar.close()
        self._writer.close()
        (self._directory / "curve.json").write_text(json.dumps(self._curve))
        return self._curve

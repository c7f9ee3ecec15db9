"""Learning rate schedules."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf


class WarmupCosine(tf.keras.optimizers.schedules.LearningRateSchedule):
    """Linear warmup, then a cosine down to a twentieth."""

    def __init__(self, peak: float, warmup: int, steps: int):
        """Takes its three numbers.

        Args:
          peak: the highest rate, reached after the warmup.
          warmup: steps of the rise.
          steps: all steps; from then on the rate stays at peak / 20.
        """
        self._peak, self._warmup, self._steps = peak, max(1, warmup), steps

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """The rate of a step, counted from 0; a float32 scalar."""
        step = tf.cast(step, tf.float32)
        rising = (step + 1) / self._warmup
        share = (step - self._warmup) / max(1, self._steps - self._warmup)
        falling = 0.05 + 0.95 * 0.5 * (
            1 + tf.cos(math.pi * tf.clip_by_value(share, 0.0, 1.0))
        )
        return self._peak * tf.minimum(rising, falling)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {"peak": self._peak, "warmup": self._warmup, "steps": self._steps}

"""The secret key of a run, which samples, noise and dropout follow from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdpsq.privacy import workers
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.randomness.noise import DRAWS, as_words
from tfdpsq.privacy.randomness.sampling import fresh_seed
from tfdpsq.privacy.randomness.secure import SecureSource, derived_seed, drawn


class StepKeys(NamedTuple):
    """Arguments of a compiled step: dumps of its graph and profiles show constants."""

    number: tf.Tensor  # scalar int64, new for every step
    noise: tf.Tensor  # [DRAWS, 2] int64; [0] where the plan is secure
    dropout: tf.Tensor  # [2] int64


class RunKey:
    """One secret key for all that a run draws at random.

    Attributes:
      sampler: what the plan's sampler draws rows with.
      process: below 2^63, for TensorFlow's global generator.
    """

    def __init__(self, plan: PrivacyPlan, seed: int | None = None):
        """Derives the keys of a run of `plan`; all workers take the chief's.

        `seed`, 128 secret bits or 256 where the plan is secure, is fresh by default.
        """
        self._plan, secure = plan, plan.spec.secure
        seed = workers.chiefs_number(fresh_seed(secure) if seed is None else seed)
        # Derived, so that small seeds, which only tests use, share no keys either.
        noise = [] if secure else [f"noise {draw}" for draw in range(DRAWS)]
        self._noise = [as_words(derived_seed(seed, purpose)) for purpose in noise]
        self._dropout = as_words(derived_seed(seed, "dropout"))
        self.process, _ = as_words(derived_seed(seed, "global"))
        self.sampler: int | SecureSource
        self.sampler = SecureSource(seed) if secure else derived_seed(seed, "sampler")

    def step_keys(self, number: tf.Tensor | int) -> StepKeys:
        """The keys of one logical step."""
        return StepKeys(
            tf.cast(number, tf.int64),
            tf.constant(self._noise, tf.int64),
            tf.constant(self._dropout, tf.int64),
        )

    def secure_noise(
        self, step: int, variables: Sequence[tf.Variable]
    ) -> list[np.ndarray]:
        """The noise of one logical step, drawn on the host; none without secure mode.

        An int64 array per variable, shaped like it, in steps of the plan's grid.
        """
        if self._plan.grid_step is None or isinstance(self.sampler, int):
            return []
        deviation = self._plan.noise_stddev / self._plan.grid_step
        shapes = [variable.shape.as_list() for variable in variables]
        return drawn(self.sampler, deviation, step, shapes)

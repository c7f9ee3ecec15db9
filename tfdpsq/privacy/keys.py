"""The secret key of a run, which samples, noise and dropout follow from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdpsq.privacy import workers
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.randomness import grid
from tfdpsq.privacy.randomness.noise import DRAWS, as_words, derived_seed
from tfdpsq.privacy.randomness.sampling import fresh_seed
from tfdpsq.privacy.randomness.secure import SecureSource


class StepKeys(NamedTuple):
    """Number and keys of one logical step.

    Given to a compiled step as arguments: constants of a graph are in its dumps, and in
    the profiles of TensorBoard.

    Attributes:
      number: scalar int64, new for every step.
      noise: [DRAWS, 2] int64; [0] where the plan is secure.
      dropout: [2] int64.
    """

    number: tf.Tensor
    noise: tf.Tensor
    dropout: tf.Tensor


class RunKey:
    """One secret key for all that a run draws at random.

    Attributes:
      is_given: whether somebody chose the seed, so that the noise can be subtracted.
      sampler: what the plan's sampler draws rows with.
    """

    def __init__(self, plan: PrivacyPlan, seed: int | None = None):
        """Derives the keys of samples, noise and dropout.

        Args:
          plan: what runs.
          seed: 128 secret bits, 256 where the plan is secure; `None` takes fresh
            entropy. Only tests fix it. Of several workers, the chief's counts.
        """
        self._plan = plan
        self.is_given = seed is not None
        seed = workers.chiefs_number(
            fresh_seed(plan.spec.secure) if seed is None else seed
        )
        self.sampler: int | SecureSource
        self._noise: tuple[tuple[int, int], ...] = ()
        if plan.spec.secure:
            self._source = self.sampler = SecureSource(seed)
            self._dropout = as_words(self._source.seed("dropout"))
            self.process = self._source.seed("global") % (1 << 63)
            return
        # Derived, so that small seeds, which only tests use, share no keys either.
        self.sampler = derived_seed(seed, "sampler")
        self._noise = tuple(
            as_words(derived_seed(seed, f"noise {draw}")) for draw in range(DRAWS)
        )
        self._dropout = as_words(derived_seed(seed, "dropout"))
        self.process = derived_seed(seed, "global") % (1 << 63)

    def step_keys(self, number: tf.Tensor | int) -> StepKeys:
        """Returns what the noise and the dropout of a logical step follow from.

        Args:
          number: of the step, new for every one.
        """
        return StepKeys(
            tf.cast(number, tf.int64),
            tf.constant(self._noise, tf.int64),
            tf.constant(self._dropout, tf.int64),
        )

    def secure_noise(
        self, step: int, variables: Sequence[tf.Variable]
    ) -> list[np.ndarray]:
        """The noise of one logical step of a secure plan; see `grid`.

        Drawn on the host: a compiled step has no cryptographic generator.

        Args:
          step: the logical step, new for every one.
          variables: what is trained.

        Returns:
          One int64 array per variable, shaped like it, in steps of the plan's grid;
          none where the plan is not secure, or without noise.
        """
        if self._plan.grid_step is None:
            return []
        deviation = self._plan.noise_stddev / self._plan.grid_step
        shapes = [variable.shape.as_list() for variable in variables]
        return grid.drawn(self._source, deviation, step, shapes)

"""Noise that cancels over the steps of a window: the square root of the prefix sums.

Training adds up the noised sums of its steps, more or less, so what matters is the
noise in the sums of the first t of them. Independent noise of T steps adds up to √T
times that of one. Take the matrix C whose square has all ones on and below the diagonal
(its square times a vector are the vector's prefix sums), scaled to columns of norm 1 at
most, and let the noise of m steps be C⁻¹ times independent noise: each step then takes
back a part of what the steps before it have added, and the sum has about 1 + ln(m)/π
times the noise of one step, at the same cost (`accounting` has the proof; the matrix is
Fichtenberger, Henzinger & Upadhyay's, 2022, arXiv:2202.11205).

C is Toeplitz, with the power series of (1 - x)^(-1/2) in its first column, and C⁻¹ with
that of (1 - x)^(1/2): 1, -1/2, -1/8, -1/16, …
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfdpsq import validation


@dataclasses.dataclass(frozen=True)
class NoiseWindow:
    """The steps over which noise cancels.

    Attributes:
      steps: m, of a window; the last of an epoch may have fewer.
      steps_per_epoch: an epoch begins a window.

    Raises:
      InputError: a number below 1, or a window that is longer than an epoch.
    """

    steps: int
    steps_per_epoch: int

    def __post_init__(self) -> None:
        """Checks that a window is part of an epoch."""
        validation.positive_integer("steps", self.steps)
        validation.positive_integer("steps_per_epoch", self.steps_per_epoch)
        if self.steps > self.steps_per_epoch:
            raise validation.InputError(
                f"steps is {self.steps}, but an epoch has {self.steps_per_epoch}: a "
                "unit could be in two steps of a window. Lower it."
            )

    def position(self, step: Any) -> Any:
        """Returns how many steps of its window come before a step.

        Args:
          step: its number, from 0: an integer, or a scalar tensor.
        """
        return step % self.steps_per_epoch % self.steps

    def shares(self) -> np.ndarray:
        """Returns d, the first column of C⁻¹, [steps] float64.

        The noise of a step is d_0 times its own draw, d_1 times that of the step before
        it, and so on to the first of its window.
        """
        return _series(self.steps, 0.5) * np.linalg.norm(_series(self.steps, -0.5))


def _series(terms: int, power: float) -> np.ndarray:
    """Returns the first coefficients of (1 - x)^power, [terms] float64."""
    index = np.arange(1, terms)
    return np.cumprod(np.concatenate([[1.0], (index - 1 - power) / index]))

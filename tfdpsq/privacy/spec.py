"""What the user asks of a private training run, checked before anything runs."""

from __future__ import annotations

import dataclasses
import math

from absl import logging

from tfdpsq import validation

ACCOUNTANTS = ("pld", "rdp")
SAMPLERS = ("poisson",)
UNITS = ("query",)


@dataclasses.dataclass(frozen=True)
class PrivacySpec:
    """A target guarantee and the training run that must stay within it.

    Attributes:
      epsilon: target ε at `delta`; `math.inf` trains without clipping and noise.
      clip_norm: bound C on the L2 norm of one example's gradient.
      n: number of privacy units in the data (each owns exactly one example).
        It is treated as public: it enters δ and the sampling probability.
      batch_size: expected number of examples in one logical step, B.
      steps: logical steps that the budget must cover.
      delta: target δ; `None` takes 1/(2n) (Carranza et al. 2024, section 5).
      unit: what a neighbouring data set adds or removes one of.
      sampler: how logical batches are drawn; accounting follows it.
      accountant: "pld" or "rdp", the one that calibrates the noise.
      max_batch_size: static number of rows M of a logical batch; a larger draw
        is truncated. `None` chooses the smallest M whose cost in δ is
        negligible (see `accounting.truncation_delta`).
      sensitivity_multiplier: by how many clip norms adding or removing one unit
        moves the sum of clipped gradients. 1 when each example's loss depends on
        that example alone; the caller derives any other value.

    Raises:
      InputError: a value out of range, a batch larger than the data, δ ≥ 1/n.
    """

    epsilon: float
    clip_norm: float
    n: int
    batch_size: int
    steps: int
    delta: float | None = None
    unit: str = "query"
    sampler: str = "poisson"
    accountant: str = "pld"
    max_batch_size: int | None = None
    sensitivity_multiplier: float = 1.0

    def __post_init__(self):
        """Checks every value."""
        if not _is_positive(self.epsilon):
            raise validation.InputError(
                f"epsilon is {self.epsilon!r}; it must be above 0. "
                'Use math.inf ("inf" in a config) to train without privacy.'
            )
        validation.positive("clip_norm", self.clip_norm)
        validation.positive_integer("n", self.n)
        validation.positive_integer("batch_size", self.batch_size)
        validation.positive_integer("steps", self.steps)
        validation.one_of("unit", self.unit, UNITS)
        validation.one_of("sampler", self.sampler, SAMPLERS)
        validation.one_of("accountant", self.accountant, ACCOUNTANTS)
        validation.positive("sensitivity_multiplier", self.sensitivity_multiplier)
        if self.batch_size > self.n:
            raise validation.InputError(
                f"batch_size {self.batch_size} is larger than the data: n is "
                f"{self.n}. Lower batch_size to at most {self.n}."
            )
        if self.max_batch_size is not None:
            validation.positive_integer("max_batch_size", self.max_batch_size)
            if self.max_batch_size < self.batch_size:
                raise validation.InputError(
                    f"max_batch_size {self.max_batch_size} is below the expected "
                    f"batch_size {self.batch_size}: about half of all draws would "
                    "be truncated. Raise max_batch_size or leave it unset."
                )
        if self.delta is not None:
            validation.in_range(
                "delta", self.delta, 0.0, 1.0, low_open=True, high_open=True
            )
            if self.delta >= 1 / self.n:
                raise validation.InputError(
                    f"delta is {self.delta!r}, but n is {self.n}: at 1/n = "
                    f"{1 / self.n:.3g} or above, releasing one whole record would "
                    f"count as private. Use 1/(2n) = {0.5 / self.n:.3g} or less."
                )
            if self.delta > 0.5 / self.n:
                logging.warning("%s", self.delta_warning)

    @property
    def target_delta(self) -> float:
        """δ as given, or 1/(2n)."""
        return 0.5 / self.n if self.delta is None else self.delta

    @property
    def private(self) -> bool:
        """Whether the run clips and adds noise: ε is finite."""
        return math.isfinite(self.epsilon)

    @property
    def delta_warning(self) -> str | None:
        """What a reader must know of a δ between 1/(2n) and 1/n, else `None`."""
        if self.target_delta <= 0.5 / self.n:
            return None
        return (
            f"delta {self.target_delta:.3g} is above 1/(2n) = {0.5 / self.n:.3g}, "
            "the value of the paper this follows."
        )


def _is_positive(value) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and not math.isnan(value)
        and value > 0
    )

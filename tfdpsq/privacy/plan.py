"""A spec made executable: sampler, noise scale and accounting as one object.

Because all three come from one plan, what runs is what is accounted for.
"""

from __future__ import annotations

import dataclasses

import dp_accounting

from tfdpsq import validation
from tfdpsq.privacy import accounting
from tfdpsq.privacy.sampling import PoissonSampler
from tfdpsq.privacy.spec import PrivacySpec


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """How to run what a `PrivacySpec` asks for. Made by `make_plan`.

    Attributes:
      spec: what was asked for.
      max_batch_size: M, rows of a padded logical batch.
      noise_multiplier: σ, noise deviation over sensitivity; 0 for ε = ∞.
    """

    spec: PrivacySpec
    max_batch_size: int
    noise_multiplier: float

    @property
    def sampling_probability(self) -> float:
        """Each unit's chance to be in one logical step, q = B/n."""
        return self.spec.batch_size / self.spec.n

    @property
    def sensitivity(self) -> float:
        """Δ: how far one unit can move the sum of clipped gradients, in L2."""
        return self.spec.sensitivity_multiplier * self.spec.clip_norm

    @property
    def noise_stddev(self) -> float:
        """σΔ: deviation of the noise on each coordinate of the summed gradient."""
        return self.noise_multiplier * self.sensitivity

    def sampler(self, seed: int | None = None) -> PoissonSampler:
        """The sampler that the accounting assumes; see `PoissonSampler`."""
        return PoissonSampler(
            self.spec.n, self.sampling_probability, self.max_batch_size, seed
        )

    def event(self, steps: int) -> dp_accounting.DpEvent:
        """The event of `steps` executed logical steps, truncation apart."""
        if not self.spec.private and steps:
            return dp_accounting.NonPrivateDpEvent()
        return accounting.training_event(
            self.noise_multiplier, self.sampling_probability, steps
        )

    def truncation_delta(self, steps: int) -> float:
        """The part of δ that truncating `steps` batches uses up."""
        if not self.spec.private:
            return 0.0
        return accounting.truncation_delta(
            self.spec.n,
            self.sampling_probability,
            self.max_batch_size,
            steps,
            self.spec.epsilon,
        )

    def epsilon(self, steps: int, accountant: str | None = None) -> float:
        """ε spent by `steps` executed logical steps, at the spec's δ.

        Args:
          steps: logical steps executed so far.
          accountant: "pld" or "rdp"; `None` takes the spec's.

        Raises:
          InputError: more steps than the plan covers.
        """
        if steps > self.spec.steps:
            raise validation.InputError(
                f"{steps} steps were executed but the plan covers "
                f"{self.spec.steps}: more would spend more than epsilon = "
                f"{self.spec.epsilon}. Make a plan for {steps} steps instead."
            )
        if steps == 0:
            return 0.0
        if not self.spec.private:
            return float("inf")
        return accounting.epsilon_of(
            self.noise_multiplier,
            self.sampling_probability,
            steps,
            self.spec.target_delta - self.truncation_delta(self.spec.steps),
            accountant or self.spec.accountant,
        )


def make_plan(spec: PrivacySpec) -> PrivacyPlan:
    """Calibrates the noise so that all of `spec.steps` stay within (ε, δ).

    Raises:
      InputError: no noise reaches the target, or truncation alone uses up δ.
    """
    maximum = spec.max_batch_size or accounting.choose_max_batch_size(
        spec.n, spec.batch_size, spec.steps, spec.epsilon, spec.target_delta
    )
    plan = PrivacyPlan(spec, maximum, 0.0)
    if not spec.private:
        return plan
    left = spec.target_delta - plan.truncation_delta(spec.steps)
    if left <= 0:
        raise validation.InputError(
            f"max_batch_size {maximum} truncates so often that it costs "
            f"{plan.truncation_delta(spec.steps):.3g} of delta, which is "
            f"{spec.target_delta:.3g}. Raise max_batch_size or leave it unset."
        )
    sigma = accounting.calibrate_noise_multiplier(
        spec.epsilon, left, plan.sampling_probability, spec.steps, spec.accountant
    )
    plan = dataclasses.replace(plan, noise_multiplier=sigma)
    spent = plan.epsilon(spec.steps)
    if spent > spec.epsilon:  # a guarantee that is not true must never leave here
        raise AssertionError(f"calibrated to {spent} > {spec.epsilon}: {spec}")
    return plan

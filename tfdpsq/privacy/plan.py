"""A spec made executable: sampler, noise scale and accounting as one object.

Because all three come from one plan, what runs is what is accounted for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence

import dp_accounting

from tfdpsq import validation
from tfdpsq.privacy import accounting
from tfdpsq.privacy.randomness import sampling, secure
from tfdpsq.privacy.spec import ACCOUNTANTS, PrivacySpec

# Changes whenever a plan of the same numbers would run or be accounted otherwise.
_LAW = "tfdpsq-plan/3"


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """The way to run what a `PrivacySpec` asks for. Made by `make_plan`.

    Attributes:
      spec: what was asked for.
      max_batch_size: M, units in a padded logical batch.
      noise_multiplier: σ, noise deviation over sensitivity; 0 for ε = ∞.
    """

    spec: PrivacySpec
    max_batch_size: int
    noise_multiplier: float

    @property
    def max_rows(self) -> int:
        """R, rows of a padded logical batch: M·k, or all places to deal rows to."""
        units = self.spec.num_microbatches or self.max_batch_size
        return units * self.rows_clipped_together

    @property
    def group_capacity(self) -> int:
        """Rows that one of the spec's `num_microbatches` can hold.

        Two deviations above the λ = B/G rows expected. Rows beyond it are left out of
        the step: for λ = 1, 2.3 % of the rows, for λ above 2, at most 1.4 %.
        """
        expected = self.spec.batch_size / (self.spec.num_microbatches or 1)
        capacity = math.ceil(expected + 2 * math.sqrt(expected))
        return min(self.max_batch_size, capacity)

    @property
    def rows_clipped_together(self) -> int:
        """Neighbouring rows of a batch whose summed gradient is clipped to C."""
        dealt = self.spec.num_microbatches is not None
        return self.group_capacity if dealt else self.spec.rows_per_unit

    @property
    def sampling_probability(self) -> float:
        """Each unit's chance to be in a step, q = B/n; not accounted if shuffled."""
        return self.spec.batch_size / self.spec.num_units

    @property
    def sensitivity(self) -> float:
        """Δ: how far one unit can move the sum (on its grid, with `secure`), in L2."""
        of_sum = self.spec.sensitivity_multiplier * self.spec.clip_norm
        return of_sum if self.grid_step is None else of_sum * (1 + secure.ROUNDING)

    @property
    def grid_step(self) -> float | None:
        """γ, of which sums and noise are multiples; `None` without `secure`."""
        if not (self.spec.secure and self.spec.private):
            return None
        return secure.grid_step(self.spec.sensitivity_multiplier * self.spec.clip_norm)

    @property
    def noise_stddev(self) -> float:
        """σΔ: deviation of the noise on each coordinate of the summed gradient."""
        return self.noise_multiplier * self.sensitivity

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of everything that decides what runs and what it costs."""
        content = {
            **self.spec.recorded(),
            "delta": self.spec.target_delta,
            "max_batch_size": self.max_batch_size,
            "noise_multiplier": self.noise_multiplier,
            "law": _LAW,
        }
        # NumPy's numbers count as what they are equal to.
        text = json.dumps(content, sort_keys=True, default=lambda value: value.item())
        return hashlib.sha256(text.encode()).hexdigest()

    def sampler(
        self,
        units: int | None = None,
        seed: int | secure.SecureSource | None = None,
        groups: sampling.Groups | None = None,
    ) -> sampling.Sampler:
        """The sampler that the accounting assumes.

        Args:
          units: how many units the data have; `None` takes n, and `groups` their own.
          seed: secret; fresh unless a test fixes it.
          groups: the rows of each user; for unit "user" and only for that.

        Raises:
          InputError: more units than n, or another number than an exact n; `groups`
            without unit "user", or the reverse.
        """
        spec = self.spec
        if (groups is None) == (spec.unit == "user"):
            raise validation.InputError(
                f"unit is {spec.unit!r} and groups {'' if groups is None else 'not '}"
                "None. Give Groups.of(labels) with unit 'user', and only with it."
            )
        if groups is not None:
            units = len(groups)
        units = spec.num_units if units is None else units
        if units > spec.num_units or (spec.n_is_public and units != spec.num_units):
            # A number that is not public is not quoted.
            found = f"{units} units" if spec.n_is_public else "more units than that"
            exact = "the exact number" if spec.n_is_public else "a bound"
            raise validation.InputError(
                f"num_units is {spec.num_units}, {exact}, but the data have {found}. "
                "Make a plan whose num_units fits the data."
            )
        seed = sampling.fresh_seed(spec.secure) if seed is None else seed
        if spec.secure and not isinstance(seed, secure.SecureSource):
            seed = secure.SecureSource(seed)
        poisson = sampling.PoissonSampler(
            units, self.sampling_probability, self.max_batch_size, seed
        )
        if dealt := spec.num_microbatches:  # the spec's sampler is "poisson"
            return sampling.DealtSampler(poisson, dealt, self.group_capacity)
        chosen: sampling.UnitSampler = poisson
        if spec.sampler == "shuffled":
            chosen = sampling.ShuffledSampler(units, spec.batch_size, seed)
        if groups is None:
            return chosen
        return sampling.UserSampler(chosen, groups, spec.rows_per_unit)

    def event(self, steps: int) -> dp_accounting.DpEvent:
        """The event of `steps` executed logical steps, truncation apart."""
        if not self.spec.private and steps:
            return dp_accounting.NonPrivateDpEvent()
        return accounting.training_event(self.noise_multiplier, *self.releases(steps))

    def releases(self, steps: int) -> tuple[float, int]:
        """With which probability, and how often, `steps` steps can show a unit.

        Returns:
          (q, `steps`) for Poisson batches; (1, epochs touched) for shuffled ones.
        """
        if self.spec.sampler == "poisson":
            return self.sampling_probability, steps
        steps_per_epoch = self.spec.num_units // self.spec.batch_size
        return 1.0, -(-steps // steps_per_epoch)  # an epoch begun counts in full

    def truncation_delta(self, steps: int) -> float:
        """The part of δ that truncating `steps` batches uses up."""
        if not self.spec.private or self.spec.sampler == "shuffled":
            return 0.0
        return accounting.truncation_delta(
            self.spec.num_units, self.sampling_probability, self.max_batch_size, steps
        )

    def epsilon(self, steps: int, accountant: str | None = None) -> float:
        """ε spent by `steps` executed logical steps, at the spec's δ.

        What truncating these steps costs is taken off δ first. It does not depend
        on ε, so both accountants are left with the same δ.

        Raises:
          InputError: more steps than the plan covers; an unknown accountant.
        """
        if steps > self.spec.steps:
            raise validation.InputError(
                f"{steps} steps were executed but the plan covers {self.spec.steps}. "
                f"Make a plan for {steps} steps instead."
            )
        accountant = validation.one_of(
            "accountant", accountant or self.spec.accountant, ACCOUNTANTS
        )
        runs = [(self, steps)] if steps else []
        return epsilon_of_runs(runs, self.spec.target_delta, accountant)

    def epsilon_so_far(self, steps: int) -> float:
        """A bound on `epsilon(steps)` in about a millisecond, as training goes on.

        ε by RDP, or that of all steps where that is less; both bound what is spent.
        """
        if not 0 < steps < self.spec.steps:
            return self.epsilon(steps)
        return min(self.epsilon(steps, "rdp"), self.epsilon(self.spec.steps))


def epsilon_of_runs(
    runs: Sequence[tuple[PrivacyPlan, int]], delta: float, accountant: str
) -> float:
    """ε at δ of several runs on the same units, by composing their events.

    Infinite for a run without privacy, or where truncation uses up δ.

    Args:
      runs: (plan, logical steps executed) of each.
      delta: δ of all together; what truncating their batches costs is taken off it.
      accountant: "pld" or "rdp".
    """
    if not all(plan.spec.private for plan, _ in runs):
        return math.inf
    left = delta - sum(plan.truncation_delta(steps) for plan, steps in runs)
    if left <= 0:  # not so in what `make_plan` makes
        return math.inf
    events = sorted((plan.noise_multiplier, *plan.releases(n)) for plan, n in runs)
    return accounting.composed_epsilon(tuple(events), left, accountant)


# By the spec's accountant, and by RDP. A larger ε promises nothing, takes PLD minutes
# and gigabytes, and so could not be verified.
MOST_EPSILON, LARGEST_EPSILON = 300.0, 500.0


def make_plan(spec: PrivacySpec) -> PrivacyPlan:
    """Calibrates the noise so that all of `spec.steps` stay within (ε, δ).

    Raises:
      InputError: no noise reaches the target, which may be MOST_EPSILON at most, and
        LARGEST_EPSILON by RDP; or truncation alone uses up δ.
    """
    plan = PrivacyPlan(spec, max_batch_size_of(spec), 0.0)
    if not spec.private:
        return plan
    too_much = (
        f"epsilon is {spec.epsilon:g}, which protects nothing and could not be "
        f"verified. Lower it to at most {MOST_EPSILON:g}, and {LARGEST_EPSILON:g} by "
        "RDP, or set it to math.inf to train without privacy."
    )
    if spec.epsilon > MOST_EPSILON:
        raise validation.InputError(too_much)
    price = plan.truncation_delta(spec.steps)
    if price >= spec.target_delta:
        raise validation.InputError(
            f"max_batch_size {plan.max_batch_size} truncates so often that it costs "
            f"{price:.3g} of delta, which is {spec.target_delta:.3g}. Raise "
            "max_batch_size or leave it unset."
        )
    sigma = accounting.calibrate_noise_multiplier(
        spec.epsilon,
        spec.target_delta - price,
        *plan.releases(spec.steps),
        spec.accountant,
    )
    plan = dataclasses.replace(plan, noise_multiplier=sigma)
    if not plan.epsilon(spec.steps, "rdp") <= LARGEST_EPSILON:
        raise validation.InputError(too_much)
    spent = plan.epsilon(spec.steps)
    if spent > spec.epsilon:  # a guarantee that is not true must never leave here
        raise AssertionError(f"calibrated to {spent} > {spec.epsilon}: {spec}")
    return plan


def max_batch_size_of(spec: PrivacySpec) -> int:
    """M, units in a padded logical batch, that a plan for `spec` has."""
    if spec.sampler == "shuffled":
        return spec.batch_size
    return spec.max_batch_size or accounting.choose_max_batch_size(
        spec.num_units, spec.batch_size, spec.steps, spec.target_delta
    )

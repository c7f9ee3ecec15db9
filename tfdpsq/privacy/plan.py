"""A spec made executable: sampler, noise and accounting are one object.

So what runs is what is accounted for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence

from tfdpsq import validation
from tfdpsq.privacy import accounting
from tfdpsq.privacy.randomness import sampling, secure
from tfdpsq.privacy.spec import PrivacySpec

# Changes whenever a plan of the same numbers would run or be accounted otherwise.
_LAW = "tfdpsq-plan/3"


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """An executable `PrivacySpec`, made by `make_plan`.

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
            **dataclasses.asdict(self.spec),
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
          groups: the rows of each user, for unit "user" and only for that.

        Raises:
          InputError: the data do not fit n or the unit.
        """
        spec = self.spec
        if (groups is None) == (spec.unit == "user"):
            raise validation.InputError(
                f"unit is {spec.unit!r}; 'user' needs Groups.of(labels), others none."
            )
        if groups is not None:
            units = len(groups)
        units = spec.num_units if units is None else units
        if units > spec.num_units or (spec.n_is_public and units != spec.num_units):
            found = units if spec.n_is_public else "more"  # no private number
            raise validation.InputError(
                f"num_units is {spec.num_units}, but the data have {found} units. Make "
                "another plan."
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

    def releases(self, steps: int) -> tuple[float, int]:
        """(q, `steps`) for Poisson batches; (1, epochs touched) for shuffled ones."""
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

        Raises:
          InputError: more steps than the plan covers; an unknown accountant.
        """
        if steps > self.spec.steps:
            raise validation.InputError(
                f"{steps} steps were executed, but the plan covers {self.spec.steps}. "
                f"Make a plan for {steps}."
            )
        runs = [(self, steps)] if steps else []
        accountant = accountant or self.spec.accountant
        return epsilon_of_runs(runs, self.spec.target_delta, accountant)

    def epsilon_so_far(self, steps: int) -> float:
        """A bound on `epsilon(steps)`, in a millisecond: by RDP, or of all steps."""
        if not 0 < steps < self.spec.steps:
            return self.epsilon(steps)
        return min(self.epsilon(steps, "rdp"), self.epsilon(self.spec.steps))


def epsilon_of_runs(
    runs: Sequence[tuple[PrivacyPlan, int]], delta: float, accountant: str
) -> float:
    """ε at δ of several runs on the same units, by composing their events.

    What truncating their batches costs is taken off δ. ε is infinite where that uses δ
    up, or for a run without privacy. `runs` are (plan, logical steps executed).
    """
    if not all(plan.spec.private for plan, _ in runs):
        return math.inf
    left = delta - sum(plan.truncation_delta(steps) for plan, steps in runs)
    if left <= 0:
        return math.inf
    events = sorted((plan.noise_multiplier, *plan.releases(n)) for plan, n in runs)
    return accounting.composed_epsilon(tuple(events), left, accountant)


# By the spec's accountant, and by RDP: PLD takes minutes and gigabytes to verify more.
MOST_EPSILON, LARGEST_EPSILON = 300.0, 500.0


def make_plan(spec: PrivacySpec) -> PrivacyPlan:
    """Calibrates the noise so that all of `spec.steps` stay within (ε, δ).

    Raises:
      InputError: ε is above MOST_EPSILON, or LARGEST_EPSILON by RDP; no noise reaches
        it; or truncation alone uses up δ.
    """
    plan = PrivacyPlan(spec, max_batch_size_of(spec), 0.0)
    if not spec.private:
        return plan
    too_much = (
        f"epsilon is {spec.epsilon:g}; at most {MOST_EPSILON:g}, and "
        f"{LARGEST_EPSILON:g} by RDP, can be verified. Lower it, or set it to math.inf."
    )
    if spec.epsilon > MOST_EPSILON:
        raise validation.InputError(too_much)
    price = plan.truncation_delta(spec.steps)
    if price >= spec.target_delta:
        raise validation.InputError(
            f"max_batch_size {plan.max_batch_size} costs {price:.3g} of delta "
            f"{spec.target_delta:.3g}. Raise it or leave it unset."
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
    """The `max_batch_size` of a plan for `spec`."""
    if spec.sampler == "shuffled":
        return spec.batch_size
    return spec.max_batch_size or accounting.choose_max_batch_size(
        spec.num_units, spec.batch_size, spec.steps, spec.target_delta
    )

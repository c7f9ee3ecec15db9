"""A spec made executable: sampler, noise scale and accounting as one object.

Because all three come from one plan, what runs is what is accounted for.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import cast

import dp_accounting

from tfdpsq import validation
from tfdpsq.privacy import accounting
from tfdpsq.privacy.randomness import grid
from tfdpsq.privacy.randomness.correlation import NoiseWindow
from tfdpsq.privacy.randomness.sampling import (
    DealtSampler,
    Groups,
    PoissonSampler,
    Sampler,
    ShuffledSampler,
    UserSampler,
    fresh_seed,
)
from tfdpsq.privacy.randomness.secure import SecureSource
from tfdpsq.privacy.spec import PrivacySpec

# Changes whenever a plan of the same numbers would run or be accounted otherwise.
_LAW = "tfdpsq-plan/2"


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
        """R, rows of a padded logical batch: M·k, or those of all groups."""
        if self.spec.clip_groups is not None:
            return self.spec.clip_groups * self.group_capacity
        return self.max_batch_size * self.spec.rows_per_unit

    @property
    def group_capacity(self) -> int:
        """Rows that one of the spec's `clip_groups` can hold.

        Two deviations above the λ = B/G rows that are expected. Rows beyond it are left
        out of the step: of λ = 1, 2.3 % of the rows, of λ above 2, at most 1.4 %.
        """
        expected = self.spec.batch_size / (self.spec.clip_groups or 1)
        capacity = math.ceil(expected + 2 * math.sqrt(expected))
        return min(self.max_batch_size, capacity)

    @property
    def rows_clipped_together(self) -> int:
        """Neighbouring rows of a batch whose summed gradient is clipped to C."""
        if self.spec.clip_groups is not None:
            return self.group_capacity
        return self.spec.rows_per_unit

    @property
    def sampling_probability(self) -> float:
        """Each unit's chance to be in one logical step, q = B/n.

        With sampler "shuffled" these chances depend on each other from step to
        step, and no accounting uses them: see `event`.
        """
        return self.spec.batch_size / self.spec.num_units

    @property
    def sensitivity(self) -> float:
        """Δ: how far one unit can move the sum of clipped gradients, in L2.

        With `secure` of the sum on its grid, which rounding can move a little further.
        """
        of_sum = self.spec.sensitivity_multiplier * self.spec.clip_norm
        return of_sum if self.grid_step is None else of_sum * (1 + grid.ROUNDING)

    @property
    def grid_step(self) -> float | None:
        """γ, of which sums and noise are multiples; `None` without `secure`."""
        if not (self.spec.secure and self.spec.private):
            return None
        return grid.grid_step(self.spec.sensitivity_multiplier * self.spec.clip_norm)

    @property
    def noise_stddev(self) -> float:
        """σΔ: deviation of the noise on each coordinate of the summed gradient.

        Of noise that cancels over steps, that of the independent noise it is made of.
        """
        return self.noise_multiplier * self.sensitivity

    @property
    def noise_window(self) -> NoiseWindow | None:
        """Where noise cancels over steps; `None` for independent noise."""
        if self.spec.noise_window is None or not self.spec.private:
            return None
        epoch = self.spec.num_units // self.spec.batch_size
        return NoiseWindow(min(self.spec.noise_window, epoch), epoch)

    @property
    def untaken_step(self) -> int:
        """The number of a step that shares no draw of noise with those of the plan."""
        if self.noise_window is None:
            return self.spec.steps
        epoch = self.noise_window.steps_per_epoch
        touched = accounting.epochs_touched(
            self.spec.num_units, self.spec.batch_size, self.spec.steps
        )
        return epoch * (touched + 1) - 1

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
        # Numbers of numpy count as what they are equal to.
        text = json.dumps(content, sort_keys=True, default=lambda value: value.item())
        return hashlib.sha256(text.encode()).hexdigest()

    def sampler(
        self,
        units: int | None = None,
        seed: int | SecureSource | None = None,
        groups: Groups | None = None,
    ) -> Sampler:
        """The sampler that the accounting assumes.

        Args:
          units: how many units the data have; `None` takes the number of groups,
            or n.
          seed: secret; `None` takes fresh entropy. Only tests fix it.
          groups: the rows of each user; for unit "user" and only for that.

        Raises:
          InputError: more units than n, or another number where n is declared to
            be exact; groups that are missing, or of another number of units.
        """
        spec = self.spec
        if (groups is None) == (spec.unit == "user"):
            raise validation.InputError(
                f"unit is {spec.unit!r}, but groups "
                + (
                    "is None: give the rows of each user, as by Groups.of(labels)."
                    if groups is None
                    else "were given: leave them out, or set unit to 'user'."
                )
            )
        if groups is not None and units not in (None, len(groups)):
            raise validation.InputError(
                f"units is {units}, but groups has {len(groups)}. Leave units out."
            )
        if units is None:
            units = spec.num_units if groups is None else len(groups)
        if units > spec.num_units or (spec.n_is_public and units != spec.num_units):
            raise validation.InputError(
                (
                    f"the data have {units} units, but num_units is {spec.num_units}, "
                    "declared to be exact by n_is_public."
                    if spec.n_is_public  # else their number is not released
                    else "the data have more units than num_units, a bound of "
                    f"{spec.num_units}."
                )
                + " Make a plan whose num_units fits the data."
            )
        if spec.secure and not isinstance(seed, SecureSource):
            seed = SecureSource(fresh_seed(secure=True) if seed is None else seed)
        chosen: PoissonSampler | ShuffledSampler
        if spec.sampler == "shuffled":
            chosen = ShuffledSampler(units, spec.batch_size, seed)
        else:
            chosen = PoissonSampler(
                units, self.sampling_probability, self.max_batch_size, seed
            )
        if spec.clip_groups is not None:  # the spec lets it be for Poisson draws only
            return DealtSampler(
                cast(PoissonSampler, chosen), spec.clip_groups, self.group_capacity
            )
        if groups is None:
            return chosen
        return UserSampler(chosen, groups, spec.rows_per_unit)

    def event(self, steps: int) -> dp_accounting.DpEvent:
        """The event of `steps` executed logical steps, truncation apart.

        For Poisson batches that many Poisson-subsampled Gaussian releases; for
        shuffled ones a Gaussian release for every epoch they touch.
        """
        if not self.spec.private and steps:
            return dp_accounting.NonPrivateDpEvent()
        return accounting.training_event(self.noise_multiplier, *self.releases(steps))

    def releases(self, steps: int) -> tuple[float, int]:
        """With which probability, and how often, `steps` steps can show a unit.

        Returns:
          (q, `steps`) for Poisson batches, and for shuffled ones (1, E), with E
          the number of epochs touched.
        """
        if self.spec.sampler == "poisson":
            return self.sampling_probability, steps
        return 1.0, accounting.epochs_touched(
            self.spec.num_units, self.spec.batch_size, steps
        )

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

        Args:
          steps: logical steps executed so far.
          accountant: "pld" or "rdp"; `None` takes the spec's.

        Raises:
          InputError: more steps than the plan covers, or another accountant.
        """
        if accountant is not None:
            validation.one_of("accountant", accountant, accounting.ACCOUNTANTS)
        if steps > self.spec.steps:
            raise validation.InputError(
                f"{steps} steps were executed but the plan covers "
                f"{self.spec.steps}: more would spend more than epsilon = "
                f"{self.spec.epsilon}. Make a plan for {steps} steps instead."
            )
        if steps == 0:
            return 0.0
        return epsilon_of_runs(
            [(self, steps)],
            self.spec.target_delta,
            accountant or self.spec.accountant,
        )

    def epsilon_so_far(self, steps: int) -> float:
        """A bound on `epsilon(steps)`, cheap enough to be asked for during training.

        | steps        | what it is                                                |
        |--------------|-----------------------------------------------------------|
        | 0            | 0                                                         |
        | all          | `epsilon(steps)`, by the spec's accountant                |
        | in between   | ε by RDP, or that of all steps where that is less         |

        Either is never less than what is spent: RDP is a bound by itself, whichever
        accountant the spec names, and ε of a part is at most that of the whole. A
        call takes below a millisecond, the first one up to a second.

        Args:
          steps: logical steps executed so far.

        Raises:
          InputError: more steps than the plan covers.
        """
        everything = self.spec.steps
        if not 0 < steps < everything or not self.spec.private:
            return self.epsilon(steps)
        whole = self.epsilon(everything)
        left = self.spec.target_delta - self.truncation_delta(steps)
        if left <= 0:  # as in `epsilon_of_runs`
            return whole
        probability, releases = self.releases(everything)
        part = accounting.epsilon_of_first(
            self.noise_multiplier, probability, releases, self.releases(steps)[1], left
        )
        return min(part, whole)


def epsilon_of_runs(
    runs: Sequence[tuple[PrivacyPlan, int]], delta: float, accountant: str
) -> float:
    """ε at δ of several runs on the same units, by composing their events.

    Args:
      runs: (plan, logical steps executed) of each.
      delta: δ of all together; what truncating their batches costs is taken off it.
      accountant: "pld" or "rdp".

    Returns:
      ε; infinite for a run without privacy, or where truncation uses up δ.
    """
    if not all(plan.spec.private for plan, _ in runs):
        return math.inf
    left = delta - sum(plan.truncation_delta(steps) for plan, steps in runs)
    if left <= 0:  # not so in what `make_plan` makes
        return math.inf
    times: collections.Counter[tuple[float, float]] = collections.Counter()
    for plan, steps in runs:
        probability, releases = plan.releases(steps)
        times[plan.noise_multiplier, probability] += releases
    events = tuple(sorted((*event, count) for event, count in times.items()))
    return accounting.composed_epsilon(events, left, accountant)


# Of more, accounting takes minutes, and `verify` takes no certificate: see
# `proof.verification`.
MOST_EPSILON = 300.0
# By RDP. Such an ε promises nothing, and PLD of many such releases takes gigabytes.
LARGEST_EPSILON = 500.0


def make_plan(spec: PrivacySpec) -> PrivacyPlan:
    """Calibrates the noise so that all of `spec.steps` stay within (ε, δ).

    Raises:
      InputError: no noise reaches the target, which may be MOST_EPSILON at most, and
        LARGEST_EPSILON by RDP; or truncation alone uses up δ.
    """
    if spec.private and spec.epsilon > MOST_EPSILON:
        raise validation.InputError(
            f"epsilon is {spec.epsilon:g}; it may be {MOST_EPSILON:g} at most, as more "
            "protects nothing and its certificate could not be verified. Lower it, or "
            "use math.inf to train without privacy."
        )
    plan = PrivacyPlan(spec, max_batch_size_of(spec), 0.0)
    if not spec.private:
        return plan
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
    by_rdp = plan.epsilon(spec.steps, "rdp")
    if not by_rdp <= LARGEST_EPSILON:
        raise validation.InputError(
            f"epsilon is {spec.epsilon:g}, which by RDP is {by_rdp:.3g}; it may be "
            f"{LARGEST_EPSILON:g} at most by that, as more protects nothing and its "
            "certificate could not be verified. Lower it, or use math.inf to train "
            "without privacy."
        )
    spent = plan.epsilon(spec.steps)
    if spent > spec.epsilon:  # a guarantee that is not true must never leave here
        raise AssertionError(f"calibrated to {spent} > {spec.epsilon}: {spec}")
    return plan


def max_batch_size_of(spec: PrivacySpec) -> int:
    """M, units in a padded logical batch, that a plan for `spec` has."""
    if spec.sampler == "shuffled":
        return spec.batch_size
    return spec.max_batch_size or accounting.choose_max_batch_size(
        spec.num_units, spec.batch_size, spec.steps, spec.epsilon, spec.target_delta
    )

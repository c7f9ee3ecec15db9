"""The user's request for a private training run, checked before anything runs."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

from absl import logging

from tfdpsq import validation
from tfdpsq.privacy.randomness import grid

ACCOUNTANTS = ("pld", "rdp")
SAMPLERS = ("poisson", "shuffled")
ENGINES = ("fast", "rowwise", "vectorized", "dpkeras")
# The keys of `optimizers.OPTIMIZERS`, which takes seconds to import.
OPTIMIZERS = ("adam", "adafactor", "t5x_adafactor", "sgd")
UNITS = ("query", "pair", "user")
# Fields that are recorded only where they are set.
OPTIONAL = ("clip_groups", "secure", "noise_window")


@dataclasses.dataclass(frozen=True)
class PrivacySpec:
    """A target guarantee and the training run that must stay within it.

    Attributes:
      epsilon: target ε at `delta`; `math.inf` trains without clipping and noise,
        and everything else may stay as it is, so that only ε tells a private run
        from its baseline.
      clip_norm: bound C on the L2 norm of one unit's gradient; tensorflow-privacy
        calls it `l2_norm_clip`.
      num_units: n, a public number of privacy units. With `n_is_public` it is the exact
        count; without, an upper bound that anybody may know, and the count appears in
        nothing that is released. It enters δ and the sampling probability.
      batch_size: expected number of units in one logical step, B.
      steps: logical steps that the budget must cover.
      delta: target δ; `None` takes 1/(2n) (Carranza et al. 2024, section 5).
      unit: what neighbouring data sets differ in one of (added or removed, or with
        shuffled batches replaced by nothing): "query", which owns
        exactly one row; "pair", a row by itself, of which a query may have several;
        or "user", who owns any number of rows.
      sampler: how logical batches are drawn, "poisson" or "shuffled"; accounting
        follows it.
      accountant: "pld" or "rdp", the one that calibrates the noise; "pld" needs a δ
        of at least 1e-13 times the steps.
      max_batch_size: static number M of units in a logical batch; a larger draw
        is truncated. `None` chooses the smallest M whose cost in δ is
        negligible (see `accounting.truncation_delta`).
      sensitivity_multiplier: by how many clip norms adding or removing one unit
        moves the sum of clipped gradients. 1 when each unit's loss depends on
        that unit alone; the caller derives any other value.
      n_is_public: declares that n is the exact count and may be known to all.
      rows_per_unit: k, rows of a sampled user that take part in one step, clipped
        together.
      clip_groups: G: the rows drawn are dealt to G groups, each row independently and
        uniformly, and what is clipped is the gradient of a group, whose rows may
        depend on each other. One unit then moves one group's clipped gradient, by up
        to 2C, which `sensitivity_multiplier` must say. `None`: no groups.
      secure: draw sampling, dealing and noise from a cryptographic generator (see
        `secure`), and add noise that is safe in floating point (see `grid`).
      noise_window: m, for shuffled batches: the noise of every m steps of an epoch is
        correlated, so that most of it cancels in their sum, at the same ε (see
        `accounting`). At most an epoch counts. `None`: independent noise.

    Raises:
      InputError: a value out of range, or two values that contradict each other;
        the message names both, and what to change.
    """

    epsilon: float
    clip_norm: float
    num_units: int
    batch_size: int
    steps: int
    delta: float | None = None
    unit: str = "query"
    sampler: str = "poisson"
    accountant: str = "pld"
    max_batch_size: int | None = None
    sensitivity_multiplier: float = 1.0
    n_is_public: bool = False
    rows_per_unit: int = 1
    clip_groups: int | None = None
    secure: bool = False
    noise_window: int | None = None

    def __post_init__(self) -> None:
        """Checks every value, then those that must fit each other."""
        if not _is_positive(self.epsilon):
            raise validation.InputError(
                f"epsilon is {self.epsilon!r}; it must be above 0. "
                'Use math.inf ("inf" in a config) to train without privacy.'
            )
        validation.positive("clip_norm", self.clip_norm)
        validation.positive_integer("num_units", self.num_units)
        validation.positive_integer("batch_size", self.batch_size)
        validation.positive_integer("steps", self.steps)
        validation.one_of("unit", self.unit, UNITS)
        validation.one_of("sampler", self.sampler, SAMPLERS)
        validation.one_of("accountant", self.accountant, ACCOUNTANTS)
        validation.positive("sensitivity_multiplier", self.sensitivity_multiplier)
        validation.positive_integer("rows_per_unit", self.rows_per_unit)
        if self.clip_groups is not None:
            validation.positive_integer("clip_groups", self.clip_groups)
        if self.noise_window is not None:
            validation.positive_integer("noise_window", self.noise_window)
        for field in ("n_is_public", "secure"):
            if not isinstance(getattr(self, field), bool):
                raise validation.InputError(
                    f"{field} is {getattr(self, field)!r}; say True or False."
                )
        if self.max_batch_size is not None:
            validation.positive_integer("max_batch_size", self.max_batch_size)
        if self.delta is not None:
            validation.in_range(
                "delta", self.delta, 0.0, 1.0, low_open=True, high_open=True
            )
        for clash in self._clashes():
            raise validation.InputError(clash)
        if self.delta_warning:
            logging.warning("%s", self.delta_warning)

    def _clashes(self) -> Any:
        """Yields, for each two values that contradict each other, both and a way out.

        Which values are fine by themselves, and why not together:
        - a batch cannot exceed the data, nor its expectation its maximum;
        - δ ≥ 1/n lets a mechanism publish one whole record;
        - a query, or a pair, owns one row, so no k of them;
        - a shuffled batch is never truncated, having a fixed size, and its places
          can only be dealt out when the exact number of units is known, which the
          number of steps in an epoch then gives away;
        - one unit's clipped gradient has norm up to C, so no sum of such gradients
          moves by less than C; and a group's, with the unit and without it, may
          point in opposite directions;
        - rows are dealt to groups one by one, and independently of how many others
          were drawn, which is derived for Poisson draws of units of one row;
        - noise that cancels over steps is derived where a unit is in one of them, and
          its shares are not whole steps of a grid.
        """
        if self.batch_size > self.num_units:
            yield (
                f"batch_size {self.batch_size} is larger than the data: num_units is "
                f"{self.num_units}. Lower batch_size to at most {self.num_units}."
            )
        if self.max_batch_size is not None and self.max_batch_size < self.batch_size:
            yield (
                f"max_batch_size {self.max_batch_size} is below the expected "
                f"batch_size {self.batch_size}: about half of all draws would "
                "be truncated. Raise max_batch_size or leave it unset."
            )
        if self.delta is not None and self.delta >= 1 / self.num_units:
            yield (
                f"delta is {self.delta!r}, but num_units is {self.num_units}: at 1/n = "
                f"{1 / self.num_units:.3g} or above, releasing one whole record would "
                f"count as private. Use 1/(2n) = {0.5 / self.num_units:.3g} or less."
            )
        if self.rows_per_unit > 1 and self.unit != "user":
            yield (
                f"rows_per_unit is {self.rows_per_unit}, but unit is {self.unit!r}, "
                f"and a {self.unit} owns exactly one row. Set rows_per_unit to 1, or "
                "unit to 'user'."
            )
        if self.sampler == "shuffled" and self.max_batch_size is not None:
            yield (
                f"sampler is 'shuffled', but max_batch_size is {self.max_batch_size}: "
                f"shuffled batches all have batch_size {self.batch_size} units. Leave "
                "max_batch_size unset, or set sampler to 'poisson'."
            )
        if self.sampler == "shuffled" and not self.n_is_public:
            yield (
                "sampler is 'shuffled', but n_is_public is False: the places of a "
                f"permutation need the exact number of units, and num_units "
                f"{self.num_units} would be a bound only. Set n_is_public to "
                "True if the exact count may be known to all, or sampler to 'poisson'."
            )
        if self.sensitivity_multiplier < 1:
            yield (
                f"sensitivity_multiplier is {self.sensitivity_multiplier!r}, but "
                f"clip_norm is {self.clip_norm!r}: one unit's clipped gradient alone "
                "moves the sum by up to clip_norm. Set sensitivity_multiplier to 1 or "
                "more, and lower clip_norm if gradients are smaller."
            )
        if self.clip_groups is not None:
            yield from self._clashes_of_groups(self.clip_groups)
        if self.noise_window is not None:
            yield from self._clashes_of_window(self.noise_window)
        moved = self.sensitivity_multiplier * self.clip_norm
        if self.private and not grid.SMALLEST <= moved <= grid.LARGEST:
            yield (
                f"{'secure is True and ' if self.secure else ''}clip_norm "
                f"{self.clip_norm!r}: the sums and their noise would leave the range "
                "of float32, in which noise below 1e-38 is 0. Set clip_norm between "
                "1e-18 and 1e18 over sensitivity_multiplier."
            )

    def _clashes_of_groups(self, groups: int) -> Any:
        for field, derived in (("sampler", ("poisson",)), ("unit", ("query", "pair"))):
            if getattr(self, field) not in derived:
                yield (
                    f"clip_groups is {self.clip_groups} and {field} "
                    f"{getattr(self, field)!r}, for which the sensitivity of groups is "
                    f"not derived. Set {field} to {' or '.join(map(repr, derived))}, "
                    "or leave clip_groups out."
                )
        if groups > self.batch_size:
            yield (
                f"clip_groups is {self.clip_groups}, but batch_size {self.batch_size}: "
                "most groups would be empty. Lower clip_groups."
            )
        if self.sensitivity_multiplier < 2:
            yield (
                f"clip_groups is {self.clip_groups} and sensitivity_multiplier "
                f"{self.sensitivity_multiplier!r}: a unit more can turn its group's "
                "clipped gradient around, which moves the sum by 2 clip norms. Set "
                "sensitivity_multiplier to 2."
            )

    def _clashes_of_window(self, window: int) -> Any:
        if self.sampler != "shuffled":
            yield (
                f"noise_window is {window} and sampler {self.sampler!r}, with which a "
                "unit may be in several steps of a window. Set sampler to 'shuffled', "
                "or leave noise_window unset."
            )
        if self.secure:
            yield (
                f"noise_window is {window} and secure is True, which adds noise in "
                "whole steps of a grid; shares of it would not be whole. Leave one of "
                "the two unset."
            )
        if min(window, self.num_units // self.batch_size) < 2:
            yield (
                f"noise_window is {window}, and an epoch of {self.num_units} units has "
                f"{self.num_units // self.batch_size} batches of {self.batch_size}: "
                "noise can cancel over 2 steps or more. Raise noise_window and lower "
                "batch_size so far, or leave noise_window unset."
            )

    def recorded(self) -> dict[str, Any]:
        """The fields as certificates and fingerprints have them.

        `num_units` is called n there. Fields of `OPTIONAL` stand there only where they
        are set, so that what was recorded before there were any stays true.
        """
        fields = {
            "n" if field == "num_units" else field: value
            for field, value in dataclasses.asdict(self).items()
        }
        for field in OPTIONAL:
            if not fields[field]:
                del fields[field]
        return fields

    @classmethod
    def from_recorded(cls, fields: Any) -> PrivacySpec:
        """The spec that a certificate records.

        Raises:
          InputError: an entry is missing, too many or out of range.
        """
        own = [field.name for field in dataclasses.fields(cls)]
        names = ["n" if name == "num_units" else name for name in own]
        if not isinstance(fields, Mapping) or {*fields, *OPTIONAL} != set(names):
            raise validation.InputError(
                f"spec must have exactly these entries: {', '.join(sorted(names))}"
            )
        fields = dict(
            fields,
            epsilon=math.inf if fields["epsilon"] == "inf" else fields["epsilon"],
        )
        fields["num_units"] = fields.pop("n")
        return cls(**fields)

    @property
    def target_delta(self) -> float:
        """δ as given, or 1/(2n)."""
        return 0.5 / self.num_units if self.delta is None else self.delta

    @property
    def private(self) -> bool:
        """True if the run clips and adds noise: ε is finite."""
        return math.isfinite(self.epsilon)

    @property
    def delta_warning(self) -> str | None:
        """A warning for a δ between 1/(2n) and 1/n, else `None`."""
        if self.target_delta <= 0.5 / self.num_units:
            return None
        return (
            f"delta {self.target_delta:.3g} is above 1/(2n) = "
            f"{0.5 / self.num_units:.3g}, the value of the paper this follows."
        )


def _is_positive(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (0 < value <= sys.float_info.max or value == math.inf)
    )

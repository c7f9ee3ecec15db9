"""The user's request for a private training run, checked before anything runs."""

from __future__ import annotations

import dataclasses
import math

from absl import logging

from tfdpsq import validation
from tfdpsq.privacy.randomness import secure

ACCOUNTANTS = ("pld", "rdp")
SAMPLERS = ("poisson", "shuffled")
ENGINES = ("fast", "rowwise", "vectorized", "dpkeras")
# The keys of `optimizers.OPTIMIZERS`, which takes seconds to import.
OPTIMIZERS = ("adam", "adafactor", "t5x_adafactor", "sgd")
UNITS = ("query", "pair", "user")


@dataclasses.dataclass(frozen=True)
class PrivacySpec:
    """A target guarantee and the training run that must stay within it.

    Attributes:
      epsilon: target ε at `delta`; `math.inf` trains without clipping and noise.
      clip_norm: bound C on the L2 norm of one unit's gradient.
      num_units: n, public: the exact number of units with `n_is_public`, else an upper
        bound that anybody may know, and no release holds the number.
      batch_size: expected number of units in one logical step, B.
      steps: logical steps that the budget must cover.
      delta: target δ; `None` takes 1/(2n) (Carranza et al. 2024, section 5).
      unit: what neighbouring data sets (see `accounting`) differ in one of: "query",
        which owns exactly one row; "pair", a row by itself, of which a query may have
        several; or "user", who owns any number of rows.
      sampler: how logical batches are drawn, and accounted: "poisson" or "shuffled".
      accountant: what calibrates the noise: "pld", which needs a δ of at least 1e-13
        times the steps, or "rdp".
      max_batch_size: static number M of units in a logical batch; a larger draw is
        truncated. `None` chooses the smallest M whose cost in δ is negligible.
      sensitivity_multiplier: by how many clip norms one unit moves the sum of clipped
        gradients: 1 if each loss depends on its unit alone, else for you to derive.
      n_is_public: declares that n is the exact count and may be known to all.
      rows_per_unit: k, rows of a sampled user in one step, clipped together.
      num_microbatches: G, as in tensorflow-privacy: each row drawn is dealt to one of
        G microbatches, uniformly and independently, which are clipped as one, as their
        rows may depend on each other. One unit then moves the sum by up to 2C, which
        `sensitivity_multiplier` must say. `None` clips each unit by itself.
      secure: draw samples and noise from a cryptographic generator, and add noise that
        is safe in floating point (see `randomness.secure`).

    Raises:
      InputError: a value out of range, or two values that contradict each other.
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
    num_microbatches: int | None = None
    secure: bool = False

    def __post_init__(self) -> None:
        """Checks every value, then those that must fit each other."""
        if self.epsilon != math.inf:
            validation.positive("epsilon", self.epsilon)
        for name in ("clip_norm", "sensitivity_multiplier"):
            validation.positive(name, getattr(self, name))
        for name in ("num_units", "batch_size", "steps", "rows_per_unit"):
            validation.positive_integer(name, getattr(self, name))
        for name in ("max_batch_size", "num_microbatches"):
            if getattr(self, name) is not None:
                validation.positive_integer(name, getattr(self, name))
        for name, choices in (
            ("unit", UNITS),
            ("sampler", SAMPLERS),
            ("accountant", ACCOUNTANTS),
            ("n_is_public", (False, True)),
            ("secure", (False, True)),
        ):
            validation.one_of(name, getattr(self, name), choices)
        if self.delta is not None:
            validation.in_range(
                "delta", self.delta, 0.0, 1.0, low_open=True, high_open=True
            )
        for clash, message in self._clashes():
            if clash:
                raise validation.InputError(message)
        if self.delta_warning:
            logging.warning("%s", self.delta_warning)

    def _clashes(self) -> list[tuple[bool, str]]:
        """Values that contradict each other: whether they do, and the message."""
        n, batch, maximum = self.num_units, self.batch_size, self.max_batch_size
        shuffled, multiplier = self.sampler == "shuffled", self.sensitivity_multiplier
        dealt, moved = self.num_microbatches, multiplier * self.clip_norm
        least = 1 if dealt is None else 2  # it can turn its microbatch's gradient
        return [
            (
                batch > n,
                f"batch_size {batch} is larger than the data: num_units is {n}. Lower "
                f"batch_size to at most {n}.",
            ),
            (
                maximum is not None and (shuffled or maximum < batch),
                f"max_batch_size {maximum} does not fit {self.sampler} batches of "
                f"{batch}. Leave it unset.",
            ),
            (
                self.delta is not None and self.delta >= 1 / n,
                f"delta is {self.delta}: at 1/num_units, publishing one whole record "
                f"would be private. Use 1/(2n) = {0.5 / n:.3g} or less.",
            ),
            (
                self.rows_per_unit > 1 and self.unit != "user",
                f"rows_per_unit is {self.rows_per_unit}, but unit is {self.unit!r}. "
                "Set unit to 'user', or rows_per_unit to 1.",
            ),
            (
                shuffled and not self.n_is_public,
                "sampler is 'shuffled', but n_is_public is False: an epoch's length "
                "tells n. Set n_is_public to True, or sampler to 'poisson'.",
            ),
            (
                multiplier < least,
                f"sensitivity_multiplier is {multiplier}, but one unit can move the "
                f"sum by {least} clip norms. Set sensitivity_multiplier to {least}.",
            ),
            (
                dealt is not None and (shuffled or self.unit == "user"),
                f"num_microbatches is {dealt} with sampler {self.sampler!r} and unit "
                f"{self.unit!r}. Use 'poisson' and 'query' or 'pair', or leave it out.",
            ),
            (
                dealt is not None and dealt > batch,
                f"num_microbatches is {dealt}, above batch_size {batch}. Lower it.",
            ),
            (
                self.private and not secure.SMALLEST <= moved <= secure.LARGEST,
                f"clip_norm is {self.clip_norm}: sums and noise would leave the range "
                "of float32. Set sensitivity_multiplier * clip_norm to 1e-18 to 1e18.",
            ),
        ]

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
        usual = 0.5 / self.num_units
        if self.target_delta <= usual:
            return None
        return f"delta {self.target_delta:.3g} is above the paper's 1/(2n), {usual:.3g}"

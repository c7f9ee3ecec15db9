"""The noise that a target needs: the search for σ.

An evaluation of ε takes up to seconds, so the search begins with cheap relatives of
the accountants, and asks the accountant itself only at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from tfdpsq import validation
from tfdpsq.privacy import accounting

# How far below its target a calibrated ε may stay, as a share of it; and how far
# it must, so that no rounding error carries it across.
_EPSILON_TOLERANCE = 3e-3
_EPSILON_MARGIN = 1e-6
_SIGMA_DIGITS = 6
_MAX_NOISE_MULTIPLIER = 1e6
# PLD leaves out tails, which it adds to δ, as it does its rounding errors: of a δ of
# their size nothing is left, and its ε falls for absurd noise only. Without that it
# needs less noise than RDP does; it is asked where δ is small, and may need a little
# more.
_SMALL_DELTA = 1e-10
_NOISE_OF_RDP = 1.1


@functools.lru_cache(maxsize=256)
def calibrate_noise_multiplier(
    epsilon: float,
    delta: float,
    sampling_probability: float,
    steps: int,
    accountant: str,
) -> float:
    """A σ whose ε at δ does not exceed `epsilon` and is within 1 % of it.

    It has six digits, rounded up: the last bits of a search differ from machine to
    machine, and a run that is resumed elsewhere must find the plan it had.

    Args:
      epsilon: target ε, finite.
      delta: δ left after truncation's cost.
      sampling_probability: q; see `accounting.training_event`.
      steps: releases.
      accountant: "pld" or "rdp".

    Raises:
      InputError: no noise multiplier below a million reaches the target; or δ is too
        small for the accountant.
    """

    def spent_by(name: str) -> Callable[[float], float]:
        return lambda sigma: accounting.epsilon_of(
            _rounded_up(sigma), sampling_probability, steps, delta, name
        )

    first = spent_by("first_rdp")
    sigma = _bisect(lambda s: first(s) <= epsilon, 0.05, 1.0, 0.05)
    if accountant == "pld":
        least = accounting.LEAST_DELTA_IN_ROUNDING * accounting.pld_rounding(steps)
        small = max(least, _SMALL_DELTA)
        if delta < small and spent_by("pld")(_NOISE_OF_RDP * sigma) > epsilon:
            raise validation.InputError(
                f"delta is {delta:.3g}, too small for accountant 'pld': its rounding "
                "errors alone reach it, and noise would drown what is learnt. Set "
                "accountant to 'rdp', or raise delta."
            )
        sigma = secant(spent_by("first_pld"), epsilon, sigma)
    return _rounded_up(secant(spent_by(accountant), epsilon, sigma))


def _rounded_up(sigma: float) -> float:
    """The next number of `_SIGMA_DIGITS` digits that is not below `sigma`."""
    scale = 10.0 ** (_SIGMA_DIGITS - 1 - math.floor(math.log10(sigma)))
    return math.ceil(sigma * scale) / scale


def _bisect(
    satisfied: Callable[[float], bool], low: float, high: float, tolerance: float
) -> float:
    """A value that satisfies the predicate, at most `tolerance` above one that fails.

    `satisfied` must be monotone, false for small values. Should it hold at `low`
    already, `low` is halved first; where it does not hold at `high`, `high` is
    doubled. `tolerance` is a share of the value.
    """
    while not satisfied(high):
        low, high = high, 2 * high
        if high > _MAX_NOISE_MULTIPLIER:
            raise validation.InputError(
                "no noise multiplier below 1e6 reaches the target epsilon and "
                "delta. Raise epsilon, lower the number of steps, or lower the "
                "batch size."
            )
    while satisfied(low):
        low, high = low / 2, low
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if satisfied(middle) else (middle, high)
    return high


def secant(spent: Callable[[float], float], epsilon: float, start: float) -> float:
    """A σ that spends at most `epsilon`, and at least 99.7 % of it.

    ε falls nearly as a power of σ, so the secant in logarithms needs a handful
    of evaluations (of a second or so) where bisection needs a dozen, and only one
    when `start` will do. Aiming at the middle of the allowed band keeps the answer
    on the safe side of ε.

    Args:
      spent: ε by σ, or by whatever else it falls with.
      epsilon: target ε.
      start: where to begin.
    """
    least = epsilon * (1 - _EPSILON_TOLERANCE)
    most = epsilon * (1 - _EPSILON_MARGIN)
    aim = math.log(epsilon * (1 - _EPSILON_TOLERANCE / 2))
    sigma, old, slope = start, None, -1.0
    for _ in range(30):
        new = spent(sigma)
        if least <= new <= most:
            return sigma
        if not 0 < new < math.inf:  # only the direction is known
            old, sigma = None, sigma * (1.3 if new else 1 / 1.3)
            continue
        if old is not None and new != old[1]:
            slope = math.log(new / old[1]) / math.log(sigma / old[0])
        old = (sigma, new)
        move = (aim - math.log(new)) / min(slope, -0.1)
        sigma *= math.exp(max(-0.5, min(0.5, move)))
    # PLD's grid can make ε jump where σ hardly moves: fall back on certainty.
    return _bisect(lambda s: spent(s) <= most, sigma / 2, sigma, _EPSILON_TOLERANCE / 4)

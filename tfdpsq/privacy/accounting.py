r"""The cost of a run: its event, ε at δ by two accountants, and σ for an ε.

Each step releases the sum of a batch's clipped contributions plus N(0, (σΔ)²) noise,
where Δ bounds by how much one unit moves the sum. There are two ways to draw batches
(`sampling`).

**Truncated Poisson.** A step draws every unit independently with probability q and
keeps at most M of those drawn, a uniformly random subset when there are more.
Neighbours: one unit is added or removed.

The price of truncation. Let D and D' differ in one unit x that D has and D' lacks,
n ≥ |D|. Show the observer, besides what is released, which of the *other* units each
step drew before truncation, U_1 … U_T; who sees more can tell the two apart no worse.
These draws depend neither on x nor on anything released, and have one law under D
and D'. While all |U_t| < M nothing is cut off, with x or without. Given such U, the
T steps are T Poisson-subsampled Gaussian mechanisms, in which x joins a known set
with probability q: δ* at ε, both ways. Some |U_t| ≥ M has probability at most
τ = T·Pr[Bin(n - 1, q) ≥ M]. So for every event S

    P(S) ≤ P(S, all |U_t| < M) + τ ≤ e^ε Q(S) + δ* + τ,

and likewise with P and Q exchanged: δ ≤ δ* + τ. (Truncated batches are due to Chua
et al. 2024, arXiv:2411.04205, whose argument by total variation pays (1 + e^ε)·τ;
given the draws, the factor is not needed.) M is chosen so that τ is a thousandth
of δ. A bound n in place of the number of units only raises τ; q is B over that bound.

**Shuffled.** An epoch cuts a permutation of n places into n // B batches of B units.
Neighbours: one unit's rows are replaced by nothing and all places stay (zero-out),
for which n must be exact. Fix the permutations, which do not depend on the data
(averaging over them cannot raise δ at ε, which is jointly convex). Within an epoch x
is in at most one batch; given what was released before, every other step has one law
with and without x and costs nothing (parallel composition). The step with x is a
Gaussian mechanism with sensitivity Δ. T steps touch E = ⌈T / (n // B)⌉ epochs, so
they cost at most what E Gaussian mechanisms cost. No amplification by sampling is
claimed: that the observer does not know the permutation lowers ε, but not to the
figure for Poisson batches, which Chua et al. 2024 show to be too low for shuffled ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import dp_accounting
import numpy as np

from tfdpsq import validation
from tfdpsq.privacy.spec import ACCOUNTANTS

# ε is flat around its best order: steps of 5 % above 64 lose less than 0.05 %, and take
# a fifth of the time of every integer. Few orders do for a rough ε.
_ORDERS = (
    *(1 + x / 10 for x in range(1, 100)),
    *range(11, 64),
    *(math.ceil(64 * 1.05**i) for i in range(58)),
)
_ROUGH_ORDERS = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 1024, 8192)
_ROUGH_INTERVAL = 10  # times `pld_interval`
# Bound on PLD's rounding error in δ per release, without which it understates ε for a
# small δ. dp-accounting takes the T-th power of a Fourier transform in 64-bit floats,
# with errors of at most 3.6e-16 T against 80-bit floats in 30 cases (σ .4 to 50, q 1e-4
# to 1, T 100 to a million).
PLD_ROUNDING = 1e-15
# Below this many times that error PLD's ε would differ by more than some thousandth
# between machines; below _SMALL_DELTA, PLD may need more noise than RDP does.
LEAST_DELTA_IN_ROUNDING, _SMALL_DELTA, _NOISE_OF_RDP = 100, 1e-10, 1.1
# Bound on the error of order - 1 times a release's Rényi divergence. dp-accounting cuts
# a series at e^-30, and takes logarithms near 1: at most 1.8e-13 too small against 40
# digits in 704 cases (σ .4 to 500, q 1e-8 to .9, orders 1.1 to 1033).
_RDP_ROUNDING = 1e-12
# How far below its target a calibrated ε may stay, as a share of it.
_TOLERANCE = 3e-3
_LARGEST_SIGMA = 1e6


def training_event(
    noise_multiplier: float, sampling_probability: float, steps: int
) -> dp_accounting.DpEvent:
    """The event of `steps` releases, each of which has a unit with probability q.

    `noise_multiplier` is σ, the noise's deviation over the sum's sensitivity. Shuffled
    batches have q = 1, and a release for every epoch touched.
    """
    one: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(noise_multiplier)
    if sampling_probability < 1:
        one = dp_accounting.PoissonSampledDpEvent(sampling_probability, one)
    return dp_accounting.SelfComposedDpEvent(one, steps)


@functools.lru_cache(maxsize=1024)
def composed_epsilon(
    events: tuple[tuple[float, float, int], ...],
    delta: float,
    accountant: str,
    rough: bool = False,
) -> float:
    """ε at `delta` of several runs on the same units, *without* truncation's cost.

    Infinity where the accountant cannot tell. PLD's rounding error is taken off δ, and
    RDP's added to the divergences, so that no ε is below about log(1/δ) / 1000. Units
    are added or removed; for a plain Gaussian, zeroing one out costs the same.

    Args:
      events: (σ, q, releases) of each, as for `training_event`, fixed beforehand.
      delta: δ, or what the truncation of all of them leaves of it.
      accountant: "pld" or "rdp".
      rough: whether a cheaper and larger ε will do.

    Raises:
      InputError: δ is not in (0, 1), or another accountant.
    """
    validation.one_of("accountant", accountant, ACCOUNTANTS)
    validation.in_range("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    events = tuple(event for event in events if event[2])
    if not events:
        return 0.0
    if accountant == "rdp":
        orders = _ROUGH_ORDERS if rough else _ORDERS
        total = sum(count * _divergences(*one, orders) for *one, count in events)
        return float(dp_accounting.rdp.compute_epsilon(orders, total, delta)[0])
    rounding = PLD_ROUNDING * sum(count for _, _, count in events)
    if delta < LEAST_DELTA_IN_ROUNDING * rounding:
        return math.inf
    # The grid that PLD rounds losses up to, in nats; ε is a bound whatever the grid. A
    # release's losses are of the order of 1/σ²: where σ is small the grid is coarser,
    # or it would have 10⁵ points. All runs share the finest that any needs.
    largest_sigma = max(sigma for sigma, _, _ in events)
    interval = 1e-4 * min(10.0, max(1.0, largest_sigma**-2))
    interval *= _ROUGH_INTERVAL if rough else 1
    ledger = dp_accounting.pld.PLDAccountant(value_discretization_interval=interval)
    try:
        for event in events:
            ledger.compose(training_event(*event))
        return float(ledger.get_epsilon(delta - rounding))
    except ValueError:
        return math.inf  # ε in the hundreds: PLD's sums round into no distribution


@functools.lru_cache(maxsize=256)
def _divergences(
    noise_multiplier: float, sampling_probability: float, orders: tuple[float, ...]
) -> np.ndarray:
    """The Rényi divergence of one release at each order, with its rounding error."""
    ledger = dp_accounting.rdp.RdpAccountant(orders)
    ledger.compose(training_event(noise_multiplier, sampling_probability, 1))
    computed = np.array(ledger.rdp)
    known = np.where(np.isnan(computed), np.inf, np.maximum(computed, 0))
    # Without sampling it is order / 2σ², which is not computed as a logarithm.
    rounding = _RDP_ROUNDING if sampling_probability < 1 else 0.0
    return known + rounding / (np.array(orders) - 1)


def truncation_delta(
    n: int, sampling_probability: float, max_batch_size: int, steps: int
) -> float:
    """τ = T·Pr[Bin(n - 1, q) ≥ M], what truncation adds to δ; n may be a bound."""
    import scipy.stats  # a second to import

    tail = scipy.stats.binom.sf(max_batch_size - 1, n - 1, sampling_probability)
    return steps * float(tail)


def choose_max_batch_size(n: int, batch_size: int, steps: int, delta: float) -> int:
    """M, the smallest static batch whose truncation costs a thousandth of δ."""
    low, high = batch_size, n
    while low < high:  # the cost falls as M grows
        middle = (low + high) // 2
        if truncation_delta(n, batch_size / n, middle, steps) <= 1e-3 * delta:
            high = middle
        else:
            low = middle + 1
    return low


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
    machine, and a run that is resumed elsewhere must find the plan it had. `delta` is
    what truncation leaves of it; q and `steps` are as in `training_event`.

    Raises:
      InputError: σ would be above a million, or δ is too small for the accountant.
    """

    def spent_by(name: str, rough: bool = False) -> Callable[[float], float]:
        return lambda sigma: composed_epsilon(
            ((_rounded_up(sigma), sampling_probability, steps),), delta, name, rough
        )

    # A precise ε can take seconds, so rough ones say where to begin.
    first = spent_by("rdp", rough=True)
    sigma = _bisect(lambda s: first(s) <= epsilon, 0.05, 1.0, 0.05)
    if accountant == "pld":
        # Rounding errors and tails count in δ: nothing is left of a δ of their size.
        small = max(LEAST_DELTA_IN_ROUNDING * PLD_ROUNDING * steps, _SMALL_DELTA)
        if delta < small and spent_by("pld")(_NOISE_OF_RDP * sigma) > epsilon:
            raise validation.InputError(
                f"delta is {delta:.3g}, as small as the rounding errors of accountant "
                "'pld'. Set accountant to 'rdp', or raise delta."
            )
        sigma = _secant(spent_by("pld", rough=True), epsilon, sigma)
    return _rounded_up(_secant(spent_by(accountant), epsilon, sigma))


def _rounded_up(sigma: float) -> float:
    """The smallest number of six digits that is not below `sigma`."""
    scale = 10.0 ** (5 - math.floor(math.log10(sigma)))
    return math.ceil(sigma * scale) / scale


def _bisect(
    satisfied: Callable[[float], bool], low: float, high: float, tolerance: float
) -> float:
    """A σ that satisfies a monotone predicate, up to `tolerance` above the least."""
    while not satisfied(high):
        low, high = high, 2 * high
        if high > _LARGEST_SIGMA:
            raise validation.InputError(
                f"no noise multiplier below {_LARGEST_SIGMA:g} reaches epsilon at "
                "delta. Raise epsilon, take fewer steps, or lower batch_size."
            )
    while satisfied(low):
        low, high = low / 2, low
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if satisfied(middle) else (middle, high)
    return high


def _secant(spent: Callable[[float], float], epsilon: float, start: float) -> float:
    """A σ that spends at most `epsilon`, and at least 99.7 % of it.

    ε falls nearly as a power of σ, so the secant in logarithms takes a handful of
    evaluations, of a second each.
    """
    least, most = epsilon * (1 - _TOLERANCE), epsilon * (1 - 1e-6)
    aim = math.log(epsilon * (1 - _TOLERANCE / 2))
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
    # ε can jump where σ hardly moves, by PLD's grid.
    return _bisect(lambda s: spent(s) <= most, sigma / 2, sigma, _TOLERANCE / 4)

r"""The cost of a run: its event, ε at δ by two accountants, and σ for an ε.

Both mechanisms accounted for release, step by step, the sum of the clipped
contributions of a batch plus N(0, (σΔ)²) noise, where Δ bounds by how much one unit
moves the sum. They differ in how batches are drawn (`sampling`).

**Truncated Poisson.** One logical step draws every unit independently with
probability q and keeps at most M of those drawn, a uniformly random subset when
there are more. Neighbours: one unit is added or removed.

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

**Shuffled.** An epoch cuts a permutation of n places into n // B batches of exactly
B units. Neighbours: one unit's rows are replaced by nothing and all places stay
where they are (zero-out), for which n must be exact. The permutations do not depend
on the data, so fix them (averaging over them cannot raise δ at ε, which is jointly
convex). Within an epoch x is in at most one batch. Given what was released before,
every other step has the same distribution with and without x and costs nothing:
parallel composition. The one step that has x is a Gaussian mechanism with
sensitivity Δ. T steps touch E = ⌈T / (n // B)⌉ epochs, so they cost what E Gaussian
mechanisms cost, and no more. No amplification by sampling is claimed: that the
observer does not know the permutation would lower ε, but not to the figure for
Poisson batches, which Chua et al. 2024 show to be too low for shuffled ones.

**Shuffled, with noise that cancels** (`noise_window`). The steps of an epoch are cut
into windows of m steps, the last of an epoch being shorter where m does not divide it.
Let g_1 … g_m be the sums of clipped gradients of a window and z_1 … z_m independent
noise, N(0, (σΔ)²) on each weight. Step t releases ĝ_t = g_t + Σ_{j≤t} d_{t-j}·z_j,
where d is the first column of D = C⁻¹, and C a lower triangular Toeplitz matrix whose
first column c has norm 1 (see `correlation`). So

    M_t := Σ_{j≤t} c_{t-j}·ĝ_j = Σ_{j≤t} c_{t-j}·g_j + z_t,

and for every t, M_1 … M_t determine ĝ_1 … ĝ_t and the reverse, so we may as well
release M. Fix the permutations as above. x is in one batch of the epoch, so in one step
s of one window; in all other windows nothing differs. Given what was released before
step s, x moves g_s by some v with ‖v‖ ≤ Δ. Every other g_t is the same function of the
releases before it, with x or without. So for t ≥ s, x moves the mean of M_t, given
M_1 … M_{t-1}, by c_{t-s}·v, and its noise z_t is fresh. Subtract the mean without x:
(M_s, …, M_m) is a Gaussian mechanism whose mean moves by (Σ_i c_i²)^½·‖v‖ ≤ Δ. Again an
epoch costs one Gaussian mechanism, so a run costs what it would with independent noise,
whatever m is. A run that stops inside a window shows fewer of the M_t. (Denisov et al.
2022, arXiv:2202.08312; of several epochs, Choquette-Choo et al. 2023, arXiv:2211.06530
and 2306.08153, whose windows reach over epochs.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import dp_accounting
import numpy as np

from tfdpsq import validation
from tfdpsq.privacy.spec import ACCOUNTANTS

# Share of δ that truncating the batch may cost.
_TRUNCATION_SHARE = 1e-3

# Every integer above 64 would cost five times as much. ε as a function of the order
# is flat where it is least: a step of 5 % between orders loses less than 0.05 %.
_ORDERS = (
    *(1 + x / 10 for x in range(1, 100)),
    *range(11, 64),
    *(math.ceil(64 * 1.05**i) for i in range(58)),
)
# Where the search for σ begins: cheap relatives of the accountants, whose σ is some
# thousandth off and some ten percent off.
_FIRST = ("first_pld", "first_rdp")
_FIRST_ORDERS = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 1024, 8192)
_FIRST_INTERVAL = 10  # times `pld_interval`
# What a release adds at most to the rounding errors of PLD in δ. dp-accounting takes
# the T-th power of a Fourier transform in 64-bit floats, and the errors grow as T does:
# beside 80-bit floats by at most 3.6e-16 T in 30 measured cases (σ from 0.4 to 50,
# q from 1e-4 to 1, T from 100 to a million).
_ROUNDING = 1e-15
# By how much the logarithm of a release's moment, order - 1 times its Rényi divergence,
# may be too small. dp-accounting cuts a series at e^-30, and takes the logarithm of a
# sum near 1 in 64-bit floats: of a divergence of 1e-15 it finds 0, or less. Beside 40
# digits it was too small by at most 1.8e-13 in 704 cases (σ from .4 to 500, q from 1e-8
# to .9, orders from 1.1 to 1033).
_RDP_ROUNDING = 1e-12
# At a δ below so many times these errors PLD tells nothing: ε would differ by more than
# some thousandth from one machine to another.
LEAST_DELTA_IN_ROUNDING = 100
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


def training_event(
    noise_multiplier: float, sampling_probability: float, steps: int
) -> dp_accounting.DpEvent:
    """The event of `steps` Poisson-subsampled Gaussian releases.

    Args:
      noise_multiplier: σ, the noise's deviation over the sum's sensitivity.
      sampling_probability: q, each unit's chance to be in one release; with 1 it is
        the Gaussian mechanism itself.
      steps: releases; 0 shows nothing. For shuffled batches, with q = 1, the
        number of epochs touched.
    """
    if steps == 0:
        return dp_accounting.NoOpDpEvent()
    one: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(noise_multiplier)
    if sampling_probability < 1:
        one = dp_accounting.PoissonSampledDpEvent(sampling_probability, one)
    return dp_accounting.SelfComposedDpEvent(one, steps)


def epochs_touched(n: int, batch_size: int, steps: int) -> int:
    """E, in how many epochs of ⌊n/B⌋ shuffled batches `steps` steps begin or go on."""
    return -(-steps // (n // batch_size))


def pld_interval(noise_multiplier: float) -> float:
    """The grid of privacy losses that PLD rounds to, upwards, in nats.

    One release has losses of the order of 1/σ², so the grid is that much coarser
    where σ is small, or it would take 10⁵ points and seconds. ε rises by some
    thousandth of a percent; whatever the grid, it stays a bound.
    """
    return 1e-4 * min(10.0, max(1.0, noise_multiplier**-2))


def pld_rounding(releases: int) -> float:
    """An allowance for the rounding errors of PLD in δ, for so many releases composed.

    It is about three times the largest that was measured (see `_ROUNDING`). They can
    have either sign, so ε may be understated by PLD where δ is of their size.
    """
    return _ROUNDING * releases


def epsilon_of(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    accountant: str,
) -> float:
    """ε at `delta`, *without* truncation's cost.

    Args:
      noise_multiplier: σ; see `training_event`, also for the next two.
      sampling_probability: q.
      steps: releases.
      delta: δ, or what truncation leaves of it.
      accountant: "pld" or "rdp".

    Raises:
      InputError: δ is not in (0, 1), or another accountant.
    """
    if accountant not in _FIRST:
        validation.one_of("accountant", accountant, ACCOUNTANTS)
    event = (noise_multiplier, sampling_probability, steps)
    return composed_epsilon((event,), delta, accountant)


@functools.lru_cache(maxsize=1024)
def composed_epsilon(
    events: tuple[tuple[float, float, int], ...], delta: float, accountant: str
) -> float:
    """ε at `delta` of several runs on the same units, *without* truncation's cost.

    Infinity where the accountant cannot tell, which promises nothing. By PLD, what its
    sums may be rounded down by is taken off δ: see `pld_rounding`. By RDP, it is added
    to the divergences, so that no ε is below about log(1/δ) / 1000.

    Args:
      events: (σ, q, releases) of each, see `training_event`; fixed beforehand, while
        what is released may depend on what was released before.
      delta: δ, or what the truncation of all of them leaves of it.
      accountant: "pld" or "rdp".

    Raises:
      InputError: δ is not in (0, 1).
    """
    validation.in_range("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    events = tuple(event for event in events if event[2])
    if not events:
        return 0.0
    if accountant in ("pld", "first_pld"):
        rounding = pld_rounding(sum(event[2] for event in events))
        if delta < LEAST_DELTA_IN_ROUNDING * rounding:
            return math.inf
        delta -= rounding
    try:
        if accountant == "rdp":
            return _epsilon_by_rdp(_divergences(events), delta)
        return float(_accountant(events, accountant).get_epsilon(delta))
    except ValueError:
        # Of an epsilon in the hundreds, PLD's sums can round into no distribution.
        return math.inf


def epsilon_of_first(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    first: int,
    delta: float,
) -> float:
    """ε at `delta` by RDP of the first of several releases, in well under 1 ms.

    The Rényi divergence of k releases is k times that of one, at every order. So what
    is slow is done once for all of them, and each part takes its share of it.

    Args:
      noise_multiplier: σ; see `training_event`, also for the next two.
      sampling_probability: q.
      steps: releases in all, at least one.
      first: how many of them are meant, up to all.
      delta: δ, or what truncation leaves of it.

    Raises:
      InputError: δ is not in (0, 1).
    """
    validation.in_range("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    whole = _divergences(((noise_multiplier, sampling_probability, steps),))
    # Rounding must not make it less than what `epsilon_of` says of as many releases.
    return _epsilon_by_rdp(whole * (first / steps * (1 + 1e-12)), delta)


def _divergences(events: tuple[tuple[float, float, int], ...]) -> np.ndarray:
    """The Rényi divergence of all events at each of `_ORDERS`, with rounding errors."""
    rounding = _RDP_ROUNDING / (np.array(_ORDERS) - 1)
    # Without sampling it is order / 2σ², which is not computed as a logarithm.
    sampled = sum(releases for _, probability, releases in events if probability < 1)
    computed = np.array(_accountant(events, "rdp").rdp)
    known = np.where(np.isnan(computed), np.inf, np.maximum(computed, 0))
    return known + sampled * rounding


def _epsilon_by_rdp(divergences: np.ndarray, delta: float) -> float:
    return float(dp_accounting.rdp.compute_epsilon(_ORDERS, divergences, delta)[0])


@functools.lru_cache(maxsize=16)
def _accountant(
    events: tuple[tuple[float, float, int], ...], accountant: str
) -> dp_accounting.PrivacyAccountant:
    """An accountant that has composed the events: what is slow, kept for any δ."""
    # Of a plain Gaussian, removing a unit and zeroing it out are the same.
    one = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if accountant in ("pld", "first_pld"):
        # One grid for all: the finest that any of them needs.
        interval = min(pld_interval(sigma) for sigma, _, _ in events)
        if accountant == "first_pld":
            interval *= _FIRST_INTERVAL
        ledger = dp_accounting.pld.PLDAccountant(
            one, value_discretization_interval=interval
        )
    else:
        orders = _ORDERS if accountant == "rdp" else _FIRST_ORDERS
        ledger = dp_accounting.rdp.RdpAccountant(orders, one)
    for event in events:
        ledger.compose(training_event(*event))
    return ledger


def truncation_delta(
    n: int, sampling_probability: float, max_batch_size: int, steps: int
) -> float:
    """τ, what truncating batches at `max_batch_size` adds to δ; see the module.

    Args:
      n: units in the larger of two neighbouring data sets, or a bound on it.
      sampling_probability: q.
      max_batch_size: M.
      steps: logical steps, T.

    Returns:
      T·Pr[Bin(n - 1, q) ≥ M].
    """
    import scipy.stats  # a second to import

    return steps * float(
        scipy.stats.binom.sf(max_batch_size - 1, n - 1, sampling_probability)
    )


def choose_max_batch_size(
    n: int, batch_size: int, steps: int, epsilon: float, delta: float
) -> int:
    """The smallest static batch whose truncation costs a thousandth of δ.

    Args:
      n: units in the data, or a bound on it.
      batch_size: expected batch, B; q = B/n.
      steps: logical steps.
      epsilon: target ε; ∞ counts as no privacy, where only time is at stake.
      delta: target δ.

    Returns:
      M ≥ `batch_size`; at most n, which never truncates.
    """
    import scipy.stats

    probability = batch_size / n
    if not math.isfinite(epsilon):
        return int(scipy.stats.binom.ppf(1 - 1e-9, n, probability)) + 1
    low, high = batch_size, n
    while low < high:  # the cost falls as M grows
        middle = (low + high) // 2
        cost = truncation_delta(n, probability, middle, steps)
        if cost <= _TRUNCATION_SHARE * delta:
            high = middle
        else:
            low = middle + 1
    return low


# -- The noise that a target needs -----------------------------------------------
#
# An evaluation of ε takes up to seconds, so the search for σ begins with cheap
# relatives of the accountants, and asks the accountant itself only at the end.


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
      sampling_probability: q; see `training_event`.
      steps: releases.
      accountant: "pld" or "rdp".

    Raises:
      InputError: no noise multiplier below a million reaches the target; or δ is too
        small for the accountant.
    """

    def spent_by(name: str) -> Callable[[float], float]:
        return lambda sigma: epsilon_of(
            _rounded_up(sigma), sampling_probability, steps, delta, name
        )

    first = spent_by("first_rdp")
    sigma = _bisect(lambda s: first(s) <= epsilon, 0.05, 1.0, 0.05)
    if accountant == "pld":
        least = LEAST_DELTA_IN_ROUNDING * pld_rounding(steps)
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


def rounded_down(value: float, digits: int) -> float:
    """The next number of so many digits that is not above `value`, which is above 0."""
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.floor(value * scale) / scale


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

r"""What a run costs: events, ε at δ by two accountants, noise calibration.

The mechanism accounted for is truncated Poisson DP-SGD. One logical step draws
every unit independently with probability q, keeps at most M of those drawn (a
uniformly random subset when there are more), and releases the sum of their
clipped contributions plus N(0, (σΔ)²) noise, where Δ is the sum's sensitivity.

**Truncation** (after Chua et al. 2024, arXiv:2411.04205, section 3). Let D and D'
differ in one unit x that D has and D' lacks, n = |D|. Compare D's mechanism with
one that drops x in any step where the other n-1 units already fill the batch;
that one is, step by step, exactly the Poisson-subsampled Gaussian mechanism with
sensitivity Δ against D' (truncated alike on both sides). The two differ only if
x is drawn *and* at least M others are, in some of T steps, so their total
variation distance is at most τ = T·Pr[Bin(n, q) ≥ M]. Hence, from
P(S) ≤ P*(S) + τ and P*(S) ≤ e^ε Q(S) + δ*, and likewise the other way round,

    δ ≤ δ* + (1 + e^ε)·τ,

which `truncation_delta` adds. M is chosen so that this is a thousandth of δ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import dp_accounting
import scipy.stats

from tfdpsq import validation

# Share of δ that truncating the batch may cost.
_TRUNCATION_SHARE = 1e-3
# RDP, which is fast, is solved for σ; PLD, which is slow, until ε is near enough.
_SIGMA_TOLERANCE = 1e-3
_EPSILON_TOLERANCE = 3e-3
_MAX_NOISE_MULTIPLIER = 1e6
_PLD_INTERVAL = 1e-4
_LARGEST_EXPONENT = 700.0  # exp of more is no float64

_ORDERS = tuple(1 + x / 10 for x in range(1, 100)) + tuple(range(11, 512))


def training_event(
    noise_multiplier: float, sampling_probability: float, steps: int
) -> dp_accounting.DpEvent:
    """The event of `steps` Poisson-subsampled Gaussian releases.

    Args:
      noise_multiplier: σ, the noise's deviation over the sum's sensitivity.
      sampling_probability: q, each unit's chance to be in one step.
      steps: logical steps; 0 releases nothing.
    """
    if steps == 0:
        return dp_accounting.NoOpDpEvent()
    return dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
            sampling_probability, dp_accounting.GaussianDpEvent(noise_multiplier)
        ),
        steps,
    )


@functools.lru_cache(maxsize=1024)
def epsilon_of(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    accountant: str,
) -> float:
    """ε at `delta`, add-or-remove-one neighbours, *without* truncation's cost.

    Args:
      noise_multiplier: σ; see `training_event`.
      sampling_probability: q.
      steps: logical steps executed.
      delta: δ left after truncation's cost.
      accountant: "pld" or "rdp".

    Raises:
      InputError: δ is not in (0, 1).
    """
    validation.in_range("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    if steps == 0:
        return 0.0
    one = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if accountant == "pld":
        ledger = dp_accounting.pld.PLDAccountant(
            one, value_discretization_interval=_PLD_INTERVAL
        )
    else:
        ledger = dp_accounting.rdp.RdpAccountant(_ORDERS, one)
    ledger.compose(training_event(noise_multiplier, sampling_probability, steps))
    return float(ledger.get_epsilon(delta))


def truncation_delta(
    n: int, sampling_probability: float, max_batch_size: int, steps: int, epsilon: float
) -> float:
    """What truncating batches at `max_batch_size` adds to δ; see the module.

    Args:
      n: units in the larger of two neighbouring data sets.
      sampling_probability: q.
      max_batch_size: M.
      steps: logical steps, T.
      epsilon: the ε that δ belongs to.

    Returns:
      (1 + e^ε)·T·Pr[Bin(n, q) ≥ M]; 0 when M > n, as nothing is ever cut.
    """
    if max_batch_size > n:
        return 0.0
    tail = scipy.stats.binom.sf(max_batch_size - 1, n, sampling_probability)
    if tail == 0:
        return 0.0
    return float((1 + math.exp(min(epsilon, _LARGEST_EXPONENT))) * steps * tail)


def choose_max_batch_size(
    n: int, batch_size: int, steps: int, epsilon: float, delta: float
) -> int:
    """The smallest static batch whose truncation costs a thousandth of δ.

    Args:
      n: units in the data.
      batch_size: expected batch, B; q = B/n.
      steps: logical steps.
      epsilon: target ε; ∞ counts as no privacy, where only time is at stake.
      delta: target δ.

    Returns:
      M ≥ `batch_size`; at most n + 1, which never truncates.
    """
    probability = batch_size / n
    if not math.isfinite(epsilon):
        return int(scipy.stats.binom.ppf(1 - 1e-9, n, probability)) + 1
    low, high = batch_size, n + 1
    while low < high:  # the cost falls as M grows
        middle = (low + high) // 2
        cost = truncation_delta(n, probability, middle, steps, epsilon)
        if cost <= _TRUNCATION_SHARE * delta:
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

    A PLD evaluation takes seconds, so its search starts from RDP's answer.

    Args:
      epsilon: target ε, finite.
      delta: δ left after truncation's cost.
      sampling_probability: q.
      steps: logical steps.
      accountant: "pld" or "rdp".

    Raises:
      InputError: no noise multiplier below a million reaches the target.
    """

    def spent(sigma: float, by: str) -> float:
        return epsilon_of(sigma, sampling_probability, steps, delta, by)

    by_rdp = _bisect(lambda s: spent(s, "rdp") <= epsilon, 0.05, 1.0)
    if accountant == "rdp":
        return by_rdp
    return _secant(lambda s: spent(s, "pld"), epsilon, by_rdp)


def _bisect(satisfied: Callable[[float], bool], low: float, high: float) -> float:
    """A value that satisfies the predicate, at most 0.1 % above one that fails.

    `satisfied` must be monotone, false for small values. Should it hold at `low`
    already, `low` is halved first; where it does not hold at `high`, `high` is
    doubled.
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
    while high / low > 1 + _SIGMA_TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if satisfied(middle) else (middle, high)
    return high


def _secant(spent: Callable[[float], float], epsilon: float, start: float) -> float:
    """A σ that spends at most `epsilon`, and at least 99.7 % of it.

    ε falls nearly as a power of σ, so the secant in logarithms needs a handful
    of evaluations (each a second or so) where bisection needs a dozen. Aiming
    at the middle of the allowed band keeps the answer on the safe side of ε.
    """
    aim = math.log(epsilon * (1 - _EPSILON_TOLERANCE / 2))
    old, new = start, start * 0.97
    old_log, new_log = math.log(spent(old)), math.log(spent(new))
    for _ in range(50):
        if epsilon * (1 - _EPSILON_TOLERANCE) <= math.exp(new_log) <= epsilon:
            return new
        slope = (new_log - old_log) / (math.log(new) - math.log(old))
        old, old_log = new, new_log
        move = (aim - new_log) / slope if slope else 0.1
        new *= math.exp(max(-0.5, min(0.5, move)))
        new_log = math.log(spent(new))
    # PLD's grid can make ε jump where σ hardly moves: fall back on certainty.
    while math.exp(new_log) > epsilon:
        new *= 1 + _SIGMA_TOLERANCE
        new_log = math.log(spent(new))
    return new

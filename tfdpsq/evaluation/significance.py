"""Intervals and tests of means over queries, by scipy's bootstrap and permutation test.

Queries are resampled with replacement; a *paired* comparison takes the same
resample of both systems, so that the difficulty of queries cancels. Sampling
covers the queries only, not the randomness of training: that takes seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Union

import numpy as np
import scipy.stats

from tfdpsq.validation import InputError, in_range, positive_integer

# Numbers drawn at once: 32 MiB.
_DRAWS = 1 << 22

# Python 3.9 has no | of these at run time.
Values = Union[Sequence[float], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its percentile bootstrap interval."""

    mean: float
    low: float
    high: float
    confidence: float  # coverage aimed at, such as 0.95


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean of a − b over the same queries, with its percentile bootstrap interval."""

    difference: float
    low: float
    high: float
    p_value: float  # see `randomization_p_value`
    confidence: float


def bootstrap_interval(
    values: Values, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of a mean of one value per query, [queries]."""
    return macro_interval([values], confidence, resamples, seed)


def macro_interval(
    groups: Sequence[Values],
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of a mean of means, such as CQADupStack's.

    Args:
      groups: of each group (a forum), one value per query. Queries are resampled
        within their group; every group counts the same, whatever its size.
      confidence: coverage, in (0, 1).
      resamples: bootstrap samples.
      seed: of numpy's PCG64; the same seed gives the same interval.
    """
    if not len(groups):
        raise InputError("no group of values was given; give at least one.")
    arrays = [checked_values("values", values) for values in groups]
    in_range("confidence", confidence, 0, 1, low_open=True, high_open=True)
    positive_integer("resamples", resamples)

    def mean_of_means(*samples: np.ndarray, axis: int = -1) -> Any:
        return np.mean([sample.mean(axis=axis) for sample in samples], axis=0)

    found = scipy.stats.bootstrap(
        # scipy takes two values or more; one, written twice, resamples to itself.
        [np.repeat(values, 2) if len(values) == 1 else values for values in arrays],
        mean_of_means,
        n_resamples=resamples,
        batch=max(1, _DRAWS // sum(map(len, arrays))),
        vectorized=True,
        confidence_level=confidence,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    mean = float(mean_of_means(*arrays))
    return Interval(mean, float(found.low), float(found.high), confidence)


def paired_bootstrap(
    a: Values,
    b: Values,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Difference:
    """Compares two systems on the same queries.

    Args:
      a: [queries], one value per query.
      b: [queries], the other system's in the same order.
      confidence: coverage of the interval, in (0, 1).
      resamples: bootstrap samples, and random signs of the test.
      seed: of numpy's PCG64; the same seed gives the same answer.
    """
    difference = _paired(a, b)
    found = bootstrap_interval(difference, confidence, resamples, seed)
    p_value = randomization_p_value(difference, resamples, seed)
    return Difference(found.mean, found.low, found.high, p_value, confidence)


def randomization_p_value(
    differences: Values, resamples: int = 10_000, seed: int = 0
) -> float:
    """The chance of a mean as far from 0 if every sign were a coin.

    If two systems were equal, either could have had each query's two values (Fisher
    1935; for retrieval, Smucker, Allan and Carterette 2007). All 2^n signs are tried
    where they are at most `resamples`, else that many random ones, and the observed.

    Args:
      differences: [queries] a − b.
      resamples: most assignments of signs to try.
      seed: of numpy's PCG64; the same seed gives the same answer.

    Returns:
      The two-sided p value, above 0.
    """
    array = checked_values("differences", differences)
    positive_integer("resamples", resamples)
    # scipy takes two values or more; a difference of 0 more changes nothing.
    array = np.append(array, 0.0) if len(array) == 1 else array
    # Sums of the same numbers in another order are ties: equal to 12 digits.
    digits = 12 - int(np.ceil(np.log10(np.abs(array).max() or 1)))

    def mean(sample: np.ndarray, axis: int = -1) -> Any:
        return np.round(sample.mean(axis=axis), digits)

    found = scipy.stats.permutation_test(
        [array],
        mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, _DRAWS // len(array)),
        random_state=np.random.default_rng(seed),
    )
    return float(found.pvalue)


def _paired(a: Values, b: Values) -> np.ndarray:
    first, second = checked_values("a", a), checked_values("b", b)
    if len(first) != len(second):
        raise InputError(
            f"a has {len(first)} values and b {len(second)}; evaluate both on the same "
            "queries."
        )
    return first - second


def checked_values(name: str, values: Any) -> np.ndarray:
    """Returns a vector of at least one finite number, float64."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise InputError(
            f"{name} has shape {array.shape}; give a vector of at least one number."
        )
    if not np.isfinite(array).all():
        where = int(np.argmin(np.isfinite(array)))
        raise InputError(f"{name}[{where}] is {array[where]}; it must be finite.")
    return array

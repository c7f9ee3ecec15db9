"""Bootstrap intervals: the part of a difference that the choice of queries explains.

Queries are resampled with replacement; a *paired* comparison takes the same
resample of both systems, so that the difficulty of queries cancels. Sampling
covers the queries only, not the randomness of training: that takes seeds. The other
test, by randomisation, and the correction for many comparisons: `comparisons.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tfdpsq.validation import InputError, in_range, positive_integer

# Indices drawn at once: 32 MiB, whatever the number of queries and resamples.
_DRAWS = 1 << 22


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its percentile bootstrap interval.

    Attributes:
      mean: mean of the values themselves.
      low: lower end of the interval.
      high: upper end of the interval.
      confidence: coverage aimed at, such as 0.95.
    """

    mean: float
    low: float
    high: float
    confidence: float


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean of a − b over the same queries.

    Attributes:
      difference: mean(a) − mean(b).
      low: lower end of the bootstrap interval of the difference.
      high: upper end of it.
      p_value: two-sided, of the hypothesis that the true difference is 0.
      confidence: coverage aimed at by the interval.
    """

    difference: float
    low: float
    high: float
    p_value: float
    confidence: float


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of a mean over queries.

    Args:
      values: [queries] one value per query.
      confidence: coverage, in (0, 1).
      resamples: bootstrap samples.
      seed: of numpy's PCG64; the same seed gives the same interval.

    Returns:
      The mean and its interval.

    Raises:
      InputError: no values, a value that is not finite, or a setting out of range.
    """
    return macro_interval([values], confidence, resamples, seed)


def macro_interval(
    groups: Sequence[Sequence[float] | np.ndarray],
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
      seed: of numpy's PCG64; of one group, the interval is `bootstrap_interval`'s.

    Returns:
      The mean of the groups' means, and its interval.

    Raises:
      InputError: no group, or as in `bootstrap_interval`.
    """
    if not len(groups):
        raise InputError("no group of values was given; give at least one.")
    arrays = [checked_values("values", values) for values in groups]
    _check_settings(confidence, resamples)
    generator = np.random.default_rng(seed)
    means = np.zeros(resamples)
    for values in arrays:
        means += _resampled_means(values, resamples, generator)
    low, high = _percentiles(means / len(arrays), confidence)
    mean = float(np.mean([values.mean() for values in arrays]))
    return Interval(mean, low, high, confidence)


def paired_bootstrap(
    a: Sequence[float] | np.ndarray | Mapping[str, float],
    b: Sequence[float] | np.ndarray | Mapping[str, float],
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Difference:
    """Compares two systems on the same queries by the paired bootstrap.

    Args:
      a: one value per query: [queries] in one order, or {query id: value}.
      b: the other system's, of the same kind and over the same queries.
      confidence: coverage of the interval, in (0, 1).
      resamples: bootstrap samples.
      seed: of numpy's PCG64; the same seed gives the same answer.

    Returns:
      The difference a − b, its percentile interval, and a two-sided p value by the
      shift method: the share of resampled differences, moved to mean 0, that are at
      least as far from 0 as the one observed, counting the observed one itself
      (Smucker, Allan and Carterette 2007; Davison and Hinkley 1997, section 4.2).

    Raises:
      InputError: different queries or lengths, or as in `bootstrap_interval`.
    """
    first, second = paired_values(a, b)
    _check_settings(confidence, resamples)
    differences = first - second
    observed = float(differences.mean())
    means = _resampled_means(differences, resamples, np.random.default_rng(seed))
    low, high = _percentiles(means, confidence)
    # A constant difference resamples to itself up to rounding: let that not count.
    slack = 1e-12 * max(1.0, float(np.abs(differences).max()))
    as_far = int(np.sum(np.abs(means - observed) >= abs(observed) - slack))
    return Difference(observed, low, high, (1 + as_far) / (1 + resamples), confidence)


def paired_values(
    a: Sequence[float] | np.ndarray | Mapping[str, float],
    b: Sequence[float] | np.ndarray | Mapping[str, float],
) -> tuple[np.ndarray, np.ndarray]:
    """Two systems' values, [queries] float64 each, aligned by query.

    Raises:
      InputError: different queries or lengths, or a value that is not finite.
    """
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
            raise InputError("a and b must both be mappings or both be sequences.")
        if a.keys() != b.keys():
            odd = min(a.keys() ^ b.keys())
            raise InputError(
                f"a and b differ in queries: {odd!r} is in one only; evaluate both on "
                "the same qrels."
            )
        order = sorted(a)
        a, b = [a[query] for query in order], [b[query] for query in order]
    first, second = checked_values("a", a), checked_values("b", b)
    if len(first) != len(second):
        raise InputError(
            f"a has {len(first)} values and b {len(second)}; evaluate both on the same "
            "queries."
        )
    return first, second


def checked_values(
    name: str,
    values: Sequence[float] | np.ndarray,
    wanted: str = "one value per query, of at least one query",
) -> np.ndarray:
    """The values as a vector, [queries] float64; `wanted` says in words what it is.

    Raises:
      InputError: none at all, more than one per query, or one that is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise InputError(f"{name} has shape {array.shape}; it must be {wanted}.")
    if not np.isfinite(array).all():
        where = int(np.flatnonzero(~np.isfinite(array))[0])
        raise InputError(f"{name}[{where}] is {array[where]}; it must be finite.")
    return array


def _check_settings(confidence: float, resamples: int) -> None:
    in_range("confidence", confidence, 0, 1, low_open=True, high_open=True)
    positive_integer("resamples", resamples)


def _resampled_means(
    values: np.ndarray, resamples: int, generator: np.random.Generator
) -> np.ndarray:
    return np.concatenate(list(_chunks_of_means(values, resamples, generator)))


def _chunks_of_means(
    values: np.ndarray, resamples: int, generator: np.random.Generator
) -> Iterator[np.ndarray]:
    at_once = max(1, _DRAWS // len(values))
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        drawn = generator.integers(0, len(values), size=(rows, len(values)))
        yield values[drawn].mean(axis=1)


def _percentiles(means: np.ndarray, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    return float(np.quantile(means, tail)), float(np.quantile(means, 1 - tail))

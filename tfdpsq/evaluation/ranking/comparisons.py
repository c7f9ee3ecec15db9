"""Paired randomisation tests of differences between systems, for one pair or all.

If two systems were equal, either could have had each query's two values: the sign of
every per-query difference would be a fair coin. The test (Fisher 1935; Pitman 1937; for
retrieval, Smucker, Allan and Carterette 2007) asks how often coins alone give a mean
difference at least as far from 0 as the one observed. It assumes nothing of the values'
distribution, and it says nothing of how the difference varies: for intervals see
`significance.py`.

| differences that are not 0 | signs that are tried        | p value           |
|----------------------------|-----------------------------|-------------------|
| none                       | none                        | 1                 |
| n up to 20                 | all 2^n: exact              | far / 2^n         |
| more                       | m = `resamples` random ones | (far + 1)/(m + 1) |

where *far* counts those whose mean is at least as far from 0 as the one observed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from tfdpsq.evaluation.ranking.significance import paired_values
from tfdpsq.validation import InputError, positive_integer

# All 2^20 assignments, half of them by symmetry: 4 MiB of sums.
_EXACT = 20
# Signs drawn at once: 16 MiB as float64, whatever the number of queries and resamples.
_DRAWS = 1 << 21
# Two sums this close, in units of the largest possible, are one sum rounded twice.
_ROUNDING = 1e-11


@dataclasses.dataclass(frozen=True)
class Randomization:
    """The result of `paired_randomization`.

    Attributes:
      difference: mean(a) − mean(b).
      p_value: two-sided, of the hypothesis that a and b are exchangeable.
      exact: whether all signs were tried, rather than random ones.
    """

    difference: float
    p_value: float
    exact: bool


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two systems of several.

    Attributes:
      first: name of a system.
      second: name of the other.
      difference: mean of the first − mean of the second.
      p_value: of this comparison alone; see `Randomization`.
      adjusted_p_value: corrected for all comparisons made together, by Holm.
      exact: see `Randomization`.
    """

    first: str
    second: str
    difference: float
    p_value: float
    adjusted_p_value: float
    exact: bool


def paired_randomization(
    a: Sequence[float] | np.ndarray | Mapping[str, float],
    b: Sequence[float] | np.ndarray | Mapping[str, float],
    resamples: int = 10_000,
    seed: int = 0,
) -> Randomization:
    """Compares two systems on the same queries by flipping signs.

    Args:
      a: one value per query: [queries] in one order, or {query id: value}. Queries
        that are to weigh more or less in the mean have their values scaled, in both.
      b: the other system's, of the same kind and over the same queries.
      resamples: random assignments of signs, where all of them would be too many.
      seed: of numpy's PCG64; the same seed gives the same answer.

    Returns:
      The difference a − b and its p value, by the module's table.

    Raises:
      InputError: different queries or lengths, a value that is not finite, or
        resamples below 1.
    """
    first, second = paired_values(a, b)
    (found,) = _randomizations((first - second)[:, None], resamples, seed)
    return found


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Adjusts p values for their number by Holm's step-down rule (1979).

    Rejecting what is adjusted to at most α keeps the chance of any false rejection
    below α, however the tests depend on each other.

    Args:
      p_values: [tests] in any order.

    Returns:
      [tests] float64: in ascending order the i-th of m is multiplied by m − i + 1, is
      at least the one before it, and at most 1.

    Raises:
      InputError: a value outside [0, 1], or not one value per test.
    """
    p = np.asarray(p_values, np.float64)
    if p.ndim != 1:
        raise InputError(f"p values have shape {p.shape}; give one per test.")
    wrong = np.flatnonzero(~((p >= 0) & (p <= 1)))
    if len(wrong):
        raise InputError(
            f"p_values[{wrong[0]}] is {p[wrong[0]]}; it must be in [0, 1]."
        )
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(
        1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    )
    return adjusted


def compare_systems(
    values: Mapping[str, Sequence[float] | np.ndarray | Mapping[str, float]],
    resamples: int = 10_000,
    seed: int = 0,
) -> list[Comparison]:
    """Compares every two of several systems on the same queries.

    All comparisons share their random signs, so each p value is that of
    `paired_randomization` at the same seed; Holm's rule needs no independence.

    Args:
      values: system -> one value per query; see `paired_randomization`.
      resamples: random assignments of signs.
      seed: of numpy's PCG64.

    Returns:
      For s systems s·(s − 1)/2 comparisons, pairs in the order of `values`.

    Raises:
      InputError: as in `paired_randomization`, naming the systems.
    """
    pairs = list(itertools.combinations(values, 2))
    if not pairs:
        return []
    columns = []
    for first, second in pairs:
        try:
            a, b = paired_values(values[first], values[second])
        except InputError as error:
            raise InputError(f"a is {first!r} and b {second!r}: {error}") from error
        columns.append(a - b)
    found = _randomizations(np.stack(columns, axis=1), resamples, seed)
    adjusted = holm([result.p_value for result in found])
    return [
        Comparison(
            first, second, one.difference, one.p_value, float(corrected), one.exact
        )
        for (first, second), one, corrected in zip(pairs, found, adjusted)
    ]


def _randomizations(
    differences: np.ndarray, resamples: int, seed: int
) -> list[Randomization]:
    """The test of every column of [queries, pairs], under the same random signs."""
    positive_integer("resamples", resamples)
    sums = np.abs(differences.sum(axis=0))
    least = sums - _ROUNDING * np.abs(differences).sum(axis=0)
    exact = np.count_nonzero(differences, axis=0) <= _EXACT
    p_values = np.empty(len(sums))
    for pair in np.flatnonzero(exact):
        p_values[pair] = _exact_p_value(differences[:, pair], least[pair])
    drawn = np.flatnonzero(~exact)
    as_far = _count_as_far(differences[:, drawn], least[drawn], resamples, seed)
    p_values[drawn] = (as_far + 1) / (resamples + 1)
    return [
        Randomization(float(column.mean()), float(p), bool(all_signs))
        for column, p, all_signs in zip(differences.T, p_values, exact)
    ]


def _exact_p_value(differences: np.ndarray, least: float) -> float:
    """The share of all assignments of signs whose sum is `least` from 0 or more."""
    signed = differences[differences != 0]
    # The first sign is kept: turning all signs turns the sum's sign alone.
    sums = signed[:1] if len(signed) else np.zeros(1)
    for difference in signed[1:]:
        sums = np.concatenate([sums + difference, sums - difference])
    return float(np.mean(np.abs(sums) >= least))


def _count_as_far(
    differences: np.ndarray, least: np.ndarray, resamples: int, seed: int
) -> np.ndarray:
    """Counts the random assignments that give each column a sum as far from 0."""
    as_far = np.zeros(differences.shape[1], np.int64)
    if not len(as_far):
        return as_far
    generator = np.random.default_rng(seed)
    queries = len(differences)
    totals = differences.sum(axis=0)
    # Whole words, so that the signs do not depend on how many are drawn at once.
    words = -(-queries // 64)
    most = np.iinfo(np.uint64).max
    at_once = max(1, _DRAWS // max(differences.shape))
    for start in range(0, resamples, at_once):
        shape = (min(at_once, resamples - start), words)
        drawn = generator.integers(0, most, shape, np.uint64, endpoint=True)
        heads = np.unpackbits(drawn.view(np.uint8), axis=1, count=queries)
        # Heads keep their sign, tails turn: twice the sum of heads, less all.
        sums = 2 * (heads.astype(np.float64) @ differences) - totals
        as_far += np.count_nonzero(np.abs(sums) >= least, axis=0)
    return as_far

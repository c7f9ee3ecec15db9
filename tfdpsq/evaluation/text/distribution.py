"""Distributions of a number, such as a length or a distance, in a few figures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdpsq.validation import InputError

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A sample in a few figures.

    Attributes:
      count: values in the sample.
      mean: their mean.
      deviation: their standard deviation (divided by the count).
      quantiles: of `QUANTILES`, by their names, such as "0.05"; linear between values.
    """

    count: int
    mean: float
    deviation: float
    quantiles: Mapping[str, float]


def describe(values: Sequence[float] | np.ndarray) -> Distribution:
    """A sample's count, mean, deviation and quantiles.

    Args:
      values: [n] finite numbers, at least one.

    Raises:
      InputError: there is none, or one is not finite.
    """
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise InputError(
            f"values has shape {array.shape}; give a vector of finite numbers, at "
            "least one."
        )
    return Distribution(
        count=len(array),
        mean=float(array.mean()),
        deviation=float(array.std()),
        quantiles={
            f"{level:g}": float(np.quantile(array, level)) for level in QUANTILES
        },
    )


def shares(counts: Mapping[Any, int], keys: Sequence[Hashable]) -> np.ndarray:
    """[len(keys)] what share of all that is counted falls to each key."""
    return np.array([counts.get(key, 0) for key in keys]) / sum(counts.values())


def total_variation(
    first: Sequence[Hashable] | np.ndarray, second: Sequence[Hashable] | np.ndarray
) -> float:
    """Half the sum of the differences of two histograms, in [0, 1].

    Two samples of one distribution differ by chance, and the more the smaller they are:
    about √(k / (π·n)) for n values each in k about equally frequent bins.

    Args:
      first: values that can be counted, at least one.
      second: the same of the other set.

    Raises:
      InputError: one of them is empty.
    """
    counts = Counter(first), Counter(second)
    if not all(counts):
        raise InputError("there is nothing to compare; give at least one value each.")
    keys = list(counts[0].keys() | counts[1].keys())
    a, b = (shares(c, keys) for c in counts)
    return float(np.abs(a - b).sum() / 2)

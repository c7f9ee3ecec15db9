"""Compares a table of the paper with ours: orderings, and Kendall's τ.

Takes numbers and returns verdicts; trains nothing and reads no private data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.stats

from tfdpsq import evaluation, validation

HOLDS, OPEN, FAILS = "holds", "undecided", "does not hold"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One of our numbers.

    Attributes:
      value: the number.
      queries: the values of single queries that it is the mean of, [queries] per set,
        in an order shared by all cells of a column; empty for any other number.
      note: remark printed next to it.
    """

    value: float
    queries: tuple[np.ndarray, ...] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The check of one of the paper's orderings in our table.

    Attributes:
      above: the row that is above in the paper.
      below: the other row.
      column: name of the numbers.
      difference: ours of `above` minus ours of `below`; negated where less is better.
      low: lower end of the 95 % interval over queries, or `None` without queries.
      high: upper end of it.
      paper: the paper's difference, in the same sense.
      verdict: HOLDS where the difference and its interval are above 0, OPEN where the
        interval holds 0, FAILS otherwise.
    """

    above: str
    below: str
    column: str
    difference: float
    low: float | None
    high: float | None
    paper: float
    verdict: str


def judge(
    claim: tuple[str, str, str],
    ours: Mapping[str, Mapping[str, Cell]],
    paper: Mapping[str, Mapping[str, float]],
    lower: Sequence[str] = (),
    resamples: int = 10_000,
) -> Verdict:
    """Checks whether one of the paper's orderings holds in our numbers.

    `claim` is (row above, row below, column); `lower` are the columns in which less is
    better.

    Returns:
      The verdict; its interval is over queries, drawn within each set.

    Raises:
      InputError: the two rows were measured on different queries.
    """
    above, below, column = claim
    sign = -1.0 if column in lower else 1.0
    a, b = ours[above][column], ours[below][column]
    low = high = None
    if a.queries:
        if [len(q) for q in a.queries] != [len(q) for q in b.queries]:
            raise validation.InputError(
                f"rows {above!r} and {below!r} were measured on different queries in "
                f"{column!r}. Measure them on the same."
            )
        interval = evaluation.macro_interval(
            [sign * (x - y) for x, y in zip(a.queries, b.queries)], resamples=resamples
        )
        low, high = interval.low, interval.high
    difference = sign * (a.value - b.value)
    if low is not None and high is not None and low <= 0 <= high:
        verdict = OPEN
    else:
        verdict = HOLDS if difference > 0 else FAILS
    theirs = sign * (paper[above][column] - paper[below][column])
    return Verdict(above, below, column, difference, low, high, theirs, verdict)


def kendall(ours: Sequence[float], paper: Sequence[float]) -> dict[str, float]:
    """Computes Kendall's τ-b between our ordering of rows and the paper's.

    Returns:
      "tau": 1 for the same order, −1 for the reverse, NaN where all rows of one
      ordering are equal; "p_value": probability of a τ at least as far from 0 if all
      orders were equally likely; "rows": their number.
    """
    if len(ours) < 2:
        return {"tau": math.nan, "p_value": math.nan, "rows": len(ours)}
    tau, p_value = scipy.stats.kendalltau(ours, paper)
    return {"tau": float(tau), "p_value": float(p_value), "rows": len(ours)}


def why(verdict: Verdict, queries: int, seeds: int) -> str:
    """Explains, in sentences, why an ordering was not found.

    `verdict` is not HOLDS; `queries` is 0 for numbers that are no means over queries.
    """
    if verdict.low is None or verdict.high is None:
        return "Equal, or in the opposite order; these numbers have no interval."
    if verdict.verdict == OPEN:
        half = (verdict.high - verdict.low) / 2
        return f"{queries:,} queries resolve differences from about {half:.4f} on."
    text = (
        f"The opposite order, by more than the choice of {queries:,} queries explains."
    )
    if seeds == 1:
        text += " Training and its noise vary as well: there was one run of each row."
    return text

"""A table of the paper and ours: which of its orderings hold, and Kendall's τ.

Numbers in, verdicts out: nothing here trains or reads private data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.stats

from tfdpsq import evaluation, validation

HOLDS, OPEN, FAILS = "holds", "cannot be told", "does not hold"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One of our numbers.

    Attributes:
      value: the number.
      queries: the values of single queries that it is the mean of, [queries] for each
        set, in an order that all cells of a column share; empty where it is no such
        mean.
      note: what is to be said beside it.
    """

    value: float
    queries: tuple[np.ndarray, ...] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether one row is above another in our table as it is in the paper's.

    Attributes:
      above: the row that the paper has above.
      below: the other.
      column: in which numbers.
      difference: ours of `above` less ours of `below`; where less is better, the other
        way round.
      low: lower end of the 95 % interval over queries, or `None` without queries.
      high: upper end of it.
      paper: the paper's difference, in the same sense.
      verdict: HOLDS where the difference is above 0 and so is its interval, OPEN where
        the interval holds 0, FAILS otherwise.
    """

    above: str
    below: str
    column: str
    difference: float
    low: float | None
    high: float | None
    paper: float
    verdict: str


@dataclasses.dataclass(frozen=True)
class Tau:
    """How far two orderings of the same rows agree.

    Attributes:
      tau: Kendall's τ-b: 1 the same order, −1 the reverse; NaN where one of them has
        all rows equal.
      p_value: of τ as far from 0 or farther if all orders were equally likely.
      rows: how many rows are ordered.
    """

    tau: float
    p_value: float
    rows: int


def judge(
    claim: tuple[str, str, str],
    ours: Mapping[str, Mapping[str, Cell]],
    paper: Mapping[str, Mapping[str, float]],
    lower: Sequence[str] = (),
    resamples: int = 10_000,
) -> Verdict:
    """Says whether one of the paper's orderings holds in our numbers.

    Args:
      claim: (row above, row below, column).
      ours: {row: {column: cell}}.
      paper: {row: {column: number}}.
      lower: columns in which less is better.
      resamples: of the bootstrap.

    Returns:
      The verdict; its interval is over queries, those of each set by themselves.

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


def kendall(ours: Sequence[float], paper: Sequence[float]) -> Tau:
    """Kendall's τ-b between our ordering of rows and the paper's.

    Args:
      ours: [rows] our numbers.
      paper: [rows] the paper's.

    Raises:
      InputError: different numbers of rows.
    """
    if len(ours) != len(paper):
        raise validation.InputError(
            f"{len(ours)} numbers of ours and {len(paper)} of the paper's; there must "
            "be one of each for every row."
        )
    if len(ours) < 2:
        return Tau(math.nan, math.nan, len(ours))
    found = scipy.stats.kendalltau(ours, paper)
    return Tau(float(found.statistic), float(found.pvalue), len(ours))


def why(verdict: Verdict, queries: int, seeds: int) -> str:
    """Says of an ordering that was not found what the numbers tell of the reason.

    Args:
      verdict: not HOLDS.
      queries: how many the numbers are means over, 0 where they are none.
      seeds: how often every row was made.

    Returns:
      Sentences.
    """
    if verdict.low is None or verdict.high is None:
        return "Equal, or the other way round; of these numbers no interval is known."
    if verdict.verdict == OPEN:
        half = (verdict.high - verdict.low) / 2
        return f"{queries:,} queries tell differences from about {half:.4f} on."
    text = f"The other way round, by more than the choice of {queries:,} queries makes."
    if seeds == 1:
        text += " Training and its noise vary, too: there was one run of each row."
    return text

"""Membership inference: telling training queries from others by their scores.

An attacker who can score texts says "member" where the score is high. Members and
non-members must be drawn from the same law: where they differ in time, source or topic,
the attack separates the two distributions, and its success is not a leak.

What counts is the rate of members found at a *low* rate of false alarms (Carlini et
al. 2022, arXiv:2112.03570, section 3): an attack that is sure of a few members is worse
than one that is slightly better than a coin on all. Nothing here is a bound on ε; that
takes canaries put in by coins (`auditing`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.optimize
import scipy.stats

from tfdpsq.evaluation.significance import Interval, checked_values
from tfdpsq.validation import InputError, in_range


@dataclasses.dataclass(frozen=True)
class MembershipAttack:
    """The success of scores at separating members from non-members."""

    # probability that a member scores above a non-member, ties counted half, with its
    # interval; 0.5 is chance
    auc: Interval
    # false-positive rate -> the share of members found at it, with its interval
    true_positive_rates: dict[float, Interval]
    members: int  # how many members were scored
    others: int  # how many non-members were scored


def attack_membership(
    members: np.ndarray,
    others: np.ndarray,
    false_positive_rates: Sequence[float] = (0.001, 0.01, 0.1),
    confidence: float = 0.95,
) -> MembershipAttack:
    """Measures an attack by its scores.

    The AUC's interval is Newcombe's fifth (2006): all true values from which the one
    found is at most a normal quantile away, in deviations as Hanley and McNeil (1982)
    have them for exponential scores of that value. So scores that separate a few
    examples wholly are not taken for certain. A false-positive rate of a takes the
    threshold exceeded by at most floor(a·[others]) non-members; the interval of members
    found is Clopper and Pearson's, for that threshold. Where a·[others] < 1 no false
    alarm is allowed.

    Args:
      members: [m] float, scores of training examples; higher means "member".
      others: [n] float, the same of examples that were not trained on.
      false_positive_rates: each in (0, 1).
      confidence: of the intervals, in (0.5, 1).
    """
    members = checked_values("members", members)
    others = checked_values("others", others)
    in_range("confidence", confidence, 0.5, 1, low_open=True, high_open=True)
    for rate in false_positive_rates:
        in_range("false_positive_rates", rate, 0, 1, low_open=True, high_open=True)
    m, n = len(members), len(others)
    if min(m, n) < 2:
        raise InputError(
            f"there are {m} members and {n} others; an interval takes at least 2 of "
            "each."
        )
    auc = float(scipy.stats.mannwhitneyu(members, others).statistic / (m * n))
    low = _lowest_auc(auc, m, n, confidence)
    high = 1 - _lowest_auc(1 - auc, m, n, confidence)
    falling = np.sort(others)[::-1]
    rates = {}
    for rate in false_positive_rates:
        # The first non-member that may not be taken for a member. The small amount
        # keeps 0.1 times 30 from being 2.9999….
        threshold = falling[int(rate * n + 1e-9)]
        count = int((members > threshold).sum())
        ends = scipy.stats.binomtest(count, m).proportion_ci(confidence, "exact")
        rates[rate] = Interval(count / m, float(ends.low), float(ends.high), confidence)
    return MembershipAttack(Interval(auc, low, high, confidence), rates, m, n)


def _lowest_auc(found: float, members: int, others: int, confidence: float) -> float:
    quantile = float(scipy.stats.norm.ppf((1 + confidence) / 2))
    pairs = (members + others) / 2 - 1

    def outside(x: float) -> float:
        spread = 1 + pairs * ((1 - x) / (2 - x) + x / (1 + x))
        variance = x * (1 - x) * spread / (members * others)
        return (found - x) ** 2 - quantile**2 * variance

    # Short of 1, which is a root itself.
    end = found * (1 - 1e-12)
    return float(scipy.optimize.brentq(outside, 0.0, end)) if found else 0.0

"""Choosing one of several candidates by private scores: the exponential mechanism.

Query j gives candidate i a score s_ij in [0, 1] that depends on this query and this
candidate alone. What is shown is one candidate, i with probability

    p_i = exp(ε·S_i) / Σ_l exp(ε·S_l),    S_i = Σ_j s_ij.

**What it costs.** Neighbours: one query x is added, so that S'_i = S_i + s_ix. Then

    p'_i / p_i = exp(ε·s_ix) / Σ_l p_l·exp(ε·s_lx).

With all s_ix in [0, 1], the numerator is in [1, e^ε], and so is the denominator, a mean
of such numbers. The quotient is in [e^-ε, e^ε], whether x is added or taken away: ε at
δ = 0, for any number of candidates. In general the mechanism costs 2ε, as scores of one
candidate may rise by 1 while those of another fall (McSherry and Talwar 2007). Here one
query moves all sums the same way, so nothing is doubled (monotonic scores: Dwork and
Roth 2014, section 3.4). The sum is never divided by the number of queries, which is
private: a mean's sensitivity would depend on it.

**How it is drawn.** The largest of ε·S_i + G_i, with independent standard Gumbel noise
G_i, is that of i with probability p_i. The noise comes from 256 bits of the
operating system's entropy for each candidate, so that what is unlikely keeps its chance
far below the 2^-53 at which the usual draw makes it nothing. Scores are whole multiples
of `SCORE_UNIT`, rounded down, and so their sum is exact.

**What float64 adds.** With |G| below 180, product, noise and sum are each off by a few
2^-53 of their size, together by at most η = 2^-52·(ε·S + 400), S the largest sum. Were
each of two compared numbers off by η, i would be drawn as if ε·S_i were off by at most
2η, so every p_i is right within a factor of e^(2η) and the quotient above within
e^(4η): ε + 4η, which is below ε + 1e-9 while ε·S is below a million. That U is one of
2^256 numbers moves G by less than 2^-57 for U between 2^-200 and 1 - 2^-200; elsewhere
it lies, for any of k candidates, with probability k·2^-199. That, doubled, stands in
the place of δ = 0.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence

from tfdpsq import validation

# Sums of fewer than 2^33 scores are exact in float64.
SCORE_UNIT = 2.0**-20
# By how much one query more can move a candidate's sum.
SENSITIVITY = 1.0
_BITS = 256


def sum_of_scores(scores: Iterable[float]) -> float:
    """S, the sum of a candidate's scores: a multiple of `SCORE_UNIT`, exact.

    Args:
      scores: one for each query. What is outside of [0, 1] counts as the nearer of the
        two, and NaN as 0, so that no score can move the sum by more than 1.
    """
    units = 0
    for score in scores:
        bounded = min(max(float(score), 0.0), 1.0) if score == score else 0.0
        units += math.floor(bounded / SCORE_UNIT)
    return units * SCORE_UNIT


def choose(sums: Sequence[float], epsilon: float) -> int:
    """Draws a candidate with the probabilities of the exponential mechanism.

    Every call is a mechanism of its own and costs ε: draw once, and keep the result.

    Args:
      sums: S of each candidate, by `sum_of_scores`.
      epsilon: ε of the choice.

    Returns:
      The candidate's number, from 0.

    Raises:
      InputError: no candidate, or an ε that is not above 0 and finite.
    """
    validation.positive("epsilon of the choice", epsilon)
    if not len(sums) or not all(map(math.isfinite, sums)):
        raise validation.InputError(
            f"there are {len(sums)} candidates; give at least one, each with a finite "
            "sum of scores."
        )
    noisy = [epsilon * value / SENSITIVITY + _gumbel() for value in sums]
    return max(range(len(noisy)), key=noisy.__getitem__)


def _gumbel() -> float:
    """A draw of the standard Gumbel distribution, -log(-log U) for U uniform."""
    whole = 1 << (_BITS + 1)
    odd = 2 * secrets.randbits(_BITS) + 1  # U = odd / whole is neither 0 nor 1
    # -log U, with all digits that a float has both near 0 and near 1.
    if odd < whole // 2:
        exponential = -math.log(odd / whole)
    else:
        exponential = -math.log1p(-((whole - odd) / whole))
    return -math.log(exponential)

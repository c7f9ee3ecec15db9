"""Empirical privacy audits: lower bounds on the ε that a run really had.

An accountant proves an upper bound on ε for the mechanism as designed. An audit
attacks the mechanism as built, and turns the attack's success into a lower bound:
canaries, or one target, are put in or left out by a coin, a score is read off what
was released, and the guesses that the scores allow are counted.

**What a bound at confidence c means**: a mechanism that is (ε, δ)-DP yields a bound
above ε with probability at most 1 - c, over its own noise and the coins. A bound
above the certified ε thus refutes the certificate: something in sampling, clipping,
noise or accounting is not as stated. What is left out must be so as the certificate's
neighbours are: where those replace a unit by nothing (shuffled batches), by a row of
weight 0 in its place. Left out of the data, its place goes to another unit, which can
move the sum by twice as much, and a bound above ε refutes nothing.

**What it does not mean.** A bound below the certified ε confirms nothing: the attack
may be weak, and even the best attack leaves slack (on the Gaussian mechanism the
one-run bound reaches half of ε or so). It is not an estimate of ε. It speaks of the
mechanism and the canaries that were run, not of other data, other code paths or
hyperparameters chosen on private data. And of many audits at confidence c a share
of 1 - c may be wrong by chance: who repeats them, and reports the best, has to
divide 1 - c among them.

Here: `audit_one_run`, many canaries in a single run (Steinke, Nasr and Jagielski
2023, arXiv:2305.08846). Its sibling `two_hypotheses` has one target and many runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import scipy.special
import scipy.stats

from tfdpsq.evaluation.significance import checked_values
from tfdpsq.validation import InputError, in_range

# So unlikely a number of included canaries that the coins were not fair.
_UNFAIR = 1e-9
# The theorem is neither monotone nor needed for p-values above this.
_USELESS = 0.5


@dataclasses.dataclass(frozen=True)
class OneRunAudit:
    """The result of `audit_one_run`."""

    epsilon: float  # lower bound on ε at `delta`; 0 where nothing was shown
    delta: float
    confidence: float  # probability that a bound like this holds
    canaries: int  # m
    guesses: tuple[int, int]  # (k+, k-), the declared pair of the best bound
    correct: int  # how many of these k+ + k- guesses were right
    declared: int  # pairs, among which 1 - confidence is divided


def audit_one_run(
    scores: np.ndarray,
    included: np.ndarray,
    delta: float,
    guesses: Sequence[tuple[int, int]],
    confidence: float = 0.95,
    seed: int = 0,
) -> OneRunAudit:
    """Lower bound on ε from one run with many canaries.

    Each canary must have been included **by a fair coin of its own**: not exactly
    half of them, not in blocks. The mechanism's neighbours must be data sets that
    differ in one canary's presence, and the score may use everything released, but
    not the coins. The k+ canaries of highest score are guessed to be in, the k- of
    lowest score to be out, and the rest is left open; `one_run_p_value` says how
    likely this many right guesses are under (ε, δ)-DP.

    How many guesses to make must not depend on how they turn out. So `guesses` is
    declared beforehand: one pair, or several, of which the best bound is returned
    after each was tested at (1 - confidence)/len(guesses) (Bonferroni).

    Args:
      scores: [m] float, higher for canaries that look included. Ties are broken at
        random: an order by position would reveal which example is which.
      included: [m] bool, the coins.
      delta: δ of the claim under audit, in [0, 1).
      guesses: (k+, k-) pairs, each with 1 ≤ k+ + k- ≤ m.
      confidence: probability that the bound holds, in (0.5, 1).
      seed: of the random order of ties; public.
    """
    scores, included = checked_values("scores", scores), np.asarray(included)
    canaries = len(scores)
    if included.dtype != np.bool_ or included.shape != scores.shape:
        raise InputError(
            f"included is {included.dtype} of shape {included.shape}; it must be bool, "
            f"one for each of the {canaries} scores."
        )
    check_settings(delta, confidence)
    count = int(included.sum())
    if scipy.stats.binomtest(count, canaries).pvalue < _UNFAIR:
        raise InputError(
            f"{count} of {canaries} canaries are included, which fair coins do not "
            "give. Include each one with probability 1/2, independently."
        )
    if not guesses or not all(
        min(pair) >= 0 and 1 <= sum(pair) <= canaries for pair in guesses
    ):
        raise InputError(
            f"guesses are {list(guesses)}; declare (k+, k-) pairs, not negative, of a "
            f"sum from 1 to the {canaries} canaries."
        )
    # A stream of its own: the coins may well come from default_rng(seed).
    shuffled = np.random.default_rng([seed, canaries]).permutation(canaries)
    ranked = included[shuffled[np.argsort(scores[shuffled], kind="stable")]]
    level = (1 - confidence) / len(guesses)
    found = []
    for most, least in guesses:
        correct = int(ranked[canaries - most :].sum() + (~ranked[:least]).sum())
        made = most + least

        def holds(epsilon: float, made: int = made, right: int = correct) -> bool:
            return one_run_p_value(canaries, made, right, epsilon, delta) <= level

        found.append((_largest(holds), correct, (most, least)))
    epsilon, correct, pair = max(found, key=lambda each: each[0])
    return OneRunAudit(
        epsilon, delta, confidence, canaries, pair, correct, len(guesses)
    )


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    r"""The chance of this many right guesses under (ε, δ)-DP, bounded from above.

    Steinke et al. 2023, Theorem 5.2, as computed in their Appendix D. With m
    canaries, r guesses, v of them right, and W ~ Binomial(r, e^ε/(1 + e^ε)),

        P[V ≥ v] ≤ P[W ≥ v] + 2mδ · max_{1 ≤ i ≤ v} P[v > W ≥ v - i] / i.

    *δ = 0.* Fix the released output and hence the guesses. Given the coins of the
    canaries before i, those after it averaged out, the output's likelihood changes
    by a factor within e^{±ε} as canary i comes or goes, and its coin was fair: by
    Bayes' rule, a guess about it is right with probability at most e^ε/(1 + e^ε),
    whatever became of the earlier guesses. So W dominates V, the number of right
    guesses, and randomized response attains equality.

    *δ > 0.* The factor may be exceeded on events of small probability. Let every
    canary to which that happens count as guessed right. Their number F has
    E[F] ≤ 2mδ, and were F independent of W,

        P[W + F ≥ v] = P[W ≥ v] + Σ_i P[F = i] · P[v > W ≥ v - i]

    where Σ_i i·P[F = i] ≤ 2mδ: the sum is largest with all of F at the one i that
    pays most, and from i = v on the probability grows no more.

    **Values above 1/2 are returned as 1.** An F that looks at earlier guesses can
    beat an independent one: for two canaries, both guessed, some (3, δ)-DP mechanism
    has P[V ≥ 1] = P[W ≥ 1] + 0.048δ, where the formula adds 0.009δ. This happens at
    right-hand sides near 1 only, which no audit uses; the tests hold values up to
    1/2 against the worst (ε, δ)-DP mechanism, by linear programming, and against a
    bound proved there for any size. Up to 1/2 it also **grows with ε**, as a bound
    found from it requires. For in p = e^ε/(1 + e^ε) the term of i is
    (1 - c)·P[W ≥ v] + c·P[W ≥ v - i] with c = 2mδ/i: growing if c ≤ 1. If c > 1, a
    term of at most 1/2 has P[W ≥ v - i] ≤ 1/2, so v - i - 1 is not below the mode of
    U ~ Binomial(r - 1, p), P[U = v - i - 1] ≥ P[U = v - 1], and the derivative
    r·(c·P[U = v - i - 1] - (c - 1)·P[U = v - 1]) is not negative.

    Args:
      canaries: m, at least 1.
      guesses: r, at most m: guesses made, in number fixed beforehand.
      correct: v, at most r.
      epsilon: the hypothesis, at least 0.
      delta: δ, in [0, 1).

    Returns:
      The right-hand side above where it is at most 1/2, else 1.
    """
    # By wrong guesses, r - W ~ Binomial(r, 1 - p): 1 - p is exact where p rounds to 1.
    wrong, chance = guesses - correct, scipy.special.expit(-epsilon)
    total = float(scipy.special.bdtr(wrong, guesses, chance))
    if delta and correct and total <= _USELESS:
        set_aside = np.arange(1, correct + 1)
        law = scipy.stats.binom
        mass = np.cumsum(law.pmf(wrong + set_aside, guesses, chance))
        total += float(2 * canaries * delta * (mass / set_aside).max())
    return total if total <= _USELESS else 1.0


def _largest(holds: Callable[[float], bool]) -> float:
    """The largest x ≥ 0 up to which something holds, rounded down; 0 if for none."""
    low, high = 0.0, 1.0
    if not holds(low):
        return low
    while holds(high):
        low, high = high, 2 * high
    for _ in range(42):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def check_settings(delta: float, confidence: float) -> None:
    """Requires δ in [0, 1) and a confidence in (0.5, 1)."""
    in_range("delta", delta, 0, 1, high_open=True)
    in_range("confidence", confidence, 0.5, 1, low_open=True, high_open=True)

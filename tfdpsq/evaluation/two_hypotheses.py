"""Audit of one target by many runs: with it, without it, and how well they differ.

What the bounds mean and do not mean, and what "without" is: `auditing`. Against one
target in the worst case this is the sharper audit, and the dearer one, as every run
gives one score.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import scipy.special

from tfdpsq.evaluation.auditing import check_settings
from tfdpsq.evaluation.significance import checked_values
from tfdpsq.validation import InputError


@dataclasses.dataclass(frozen=True)
class TwoHypothesesAudit:
    """The result of `audit_two_hypotheses`.

    Each of the two bounds holds with probability `confidence`; both together with
    2·confidence - 1.
    """

    epsilon: float  # lower bound on ε at `delta`, whatever the mechanism
    mu: float  # lower bound on μ of μ-Gaussian DP
    delta: float  # the δ that `epsilon` belongs to
    confidence: float  # probability that each bound holds
    # runs with and without the target that the bounds are computed from; the others
    # chose the thresholds
    runs: tuple[int, int]
    epsilon_threshold: float  # scores from here on were taken for "with", for `epsilon`
    mu_threshold: float  # the same for `mu`


def audit_two_hypotheses(
    with_target: np.ndarray,
    without_target: np.ndarray,
    delta: float,
    confidence: float = 0.95,
) -> TwoHypothesesAudit:
    """Lower bounds on ε and μ from many runs with and without one target.

    "With" is guessed where the score reaches a threshold. Every second run serves to
    choose the threshold, the others to count: a threshold chosen on the runs that it
    is then judged by would look better than it is. Clopper-Pearson gives upper bounds
    on both error rates, each at (1 - confidence)/2, so that both hold at `confidence`:

    - (ε, δ)-DP demands 1 - FNR ≤ e^ε·FPR + δ and 1 - FPR ≤ e^ε·FNR + δ, hence

        ε ≥ max(ln((1 - δ - FNR)/FPR), ln((1 - δ - FPR)/FNR)).

      N runs counted show at most ln(N/3.7) at 95 %: an ε of 8 takes 11,000 of them,
      and several times as many where a few errors remain.
    - μ-Gaussian DP demands FNR ≥ Φ(Φ⁻¹(1 - FPR) - μ) (Dong, Roth and Su 2019), hence

        μ ≥ Φ⁻¹(1 - FPR) - Φ⁻¹(FNR)

      (Nasr et al. 2023, arXiv:2302.07956). It refutes a claim of μ-Gaussian DP, with
      some hundred runs. Noise on a sum that the target always joins (q = 1) is
      Gaussian over several steps too, with μ = √steps/σ; subsampled steps (q < 1) are
      not.

    Args:
      with_target: [runs] scores of independent runs with the target, higher where
        it shows.
      without_target: [runs] the same without; the number may differ.
      delta: δ of the claim under audit, in [0, 1).
      confidence: probability that each bound holds, in (0.5, 1).
    """
    present = checked_values("with_target", with_target)
    absent = checked_values("without_target", without_target)
    check_settings(delta, confidence)
    for name, values in (("with_target", present), ("without_target", absent)):
        if len(values) < 4:
            raise InputError(
                f"{name} has {len(values)} runs; half of them choose the threshold, so "
                "at least 4 are needed, and thousands to show much."
            )
    level = (1 - confidence) / 2
    candidates = np.unique(np.concatenate([present[::2], absent[::2]]))
    # At `level` some threshold far out, judged by a handful of runs, would nearly
    # always look best by luck, and disappoint on the other half.
    wary = level / len(candidates)
    chosen = _error_bounds(present[::2], absent[::2], candidates, wary)
    by_epsilon = candidates[np.argmax(_odds(*chosen, delta))]
    by_mu = candidates[np.argmax(_separations(*chosen))]
    counted = _error_bounds(
        present[1::2], absent[1::2], np.array([by_epsilon, by_mu]), level
    )
    return TwoHypothesesAudit(
        epsilon=math.log(max(float(_odds(*counted, delta)[0]), 1.0)),
        mu=max(float(_separations(*counted)[1]), 0.0),
        delta=delta,
        confidence=confidence,
        runs=(len(present) // 2, len(absent) // 2),
        epsilon_threshold=float(by_epsilon),
        mu_threshold=float(by_mu),
    )


def _error_bounds(
    present: np.ndarray, absent: np.ndarray, thresholds: np.ndarray, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds on FPR and FNR of each threshold, each wrong at most `level`."""
    false_positives = len(absent) - np.searchsorted(np.sort(absent), thresholds)
    false_negatives = np.searchsorted(np.sort(present), thresholds)
    return (
        _clopper_pearson(np.asarray(false_positives), len(absent), level),
        _clopper_pearson(np.asarray(false_negatives), len(present), level),
    )


def _clopper_pearson(count: np.ndarray, trials: int, level: float) -> np.ndarray:
    """The rate at which so few of the trials would have probability `level`."""
    some = np.minimum(count, trials - 1)
    upper = scipy.special.betaincinv(some + 1, trials - some, 1 - level)
    return np.where(count < trials, upper, 1.0)


def _odds(fpr: np.ndarray, fnr: np.ndarray, delta: float) -> np.ndarray:
    """Returns the least e^ε for these error rates; arbitrary where it is below 1."""
    return np.maximum((1 - delta - fnr) / fpr, (1 - delta - fpr) / fnr)


def _separations(fpr: np.ndarray, fnr: np.ndarray) -> np.ndarray:
    """Returns the least μ for these error rates; below 0 where guessing does better."""
    return -scipy.special.ndtri(fpr) - scipy.special.ndtri(fnr)

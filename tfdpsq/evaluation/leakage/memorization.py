"""Memorisation of secrets that were put into the training data.

A *canary* is a training example that holds a secret drawn at random (Carlini et al.
2019, *The Secret Sharer*). Each secret has *candidates*, drawn from the same
law but never trained on. Under a model that learnt nothing of the secret, it is one
of them: its rank among all of them is uniform. That is exact, whatever the model, and
is what every number here is compared with.

A secret that occurs in r training examples is r units of a guarantee for one example:
(ε, δ) for one becomes (rε, δ·(e^{rε} - 1)/(e^ε - 1)) for the secret. No ε promises
that a secret repeated 100 times stays hidden, so finding that it does is a
measurement, never a proof.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
import scipy.stats

from tfdpsq.validation import InputError, in_range, positive_integer

_ALL_BUT_DIGITS = re.compile(r"\D+")


def canary_ranks(
    secret_scores: np.ndarray, candidate_scores: np.ndarray, seed: int = 0
) -> np.ndarray:
    """Ranks each secret among its candidates and itself.

    Args:
      secret_scores: [canaries] float, higher where the model finds the secret more
        likely, such as log-likelihoods in nats.
      candidate_scores: [canaries, candidates - 1] float, of those not trained on.
      seed: of the order among equal scores. A fixed rule would favour the secret or
        its candidates, and the rank would not be uniform by chance.

    Returns:
      [canaries] int64, from 1, the most likely, to the number of candidates.

    Raises:
      InputError: shapes that do not fit, or a score that is not finite.
    """
    secrets = np.asarray(secret_scores, np.float64)
    others = np.asarray(candidate_scores, np.float64)
    if secrets.ndim != 1 or not len(secrets):
        raise InputError(
            f"secret_scores has shape {secrets.shape}; give one score per canary."
        )
    if others.ndim != 2 or len(others) != len(secrets) or not others.shape[1]:
        raise InputError(
            f"candidate_scores has shape {others.shape}; there are {len(secrets)} "
            "canaries, each of which needs the scores of one other candidate or more."
        )
    for name, scores in (("secret_scores", secrets), ("candidate_scores", others)):
        if not np.isfinite(scores).all():
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(scores))[0])
            raise InputError(
                f"{name}{list(where)} is {scores[where]}; it is not a score."
            )
    higher = (others > secrets[:, None]).sum(axis=1)
    equal = (others == secrets[:, None]).sum(axis=1)
    # Ties: 0 to e of e equal candidates rank before the secret, with equal probability.
    return 1 + higher + np.random.default_rng(seed).integers(0, equal, endpoint=True)


def exposure(ranks: np.ndarray, candidates: int) -> np.ndarray:
    """Bits that the model saves who guesses the secret.

    Carlini et al. 2019, definition 5, over the candidates that were scored: from 0
    to log2(candidates), which a secret that ranks first reaches; it may be exposed
    further than so few candidates can show (see `extrapolated_exposure`).

    Args:
      ranks: [canaries] int, from 1 to `candidates`.
      candidates: how many were ranked, the secret among them.

    Returns:
      [canaries] float64, log2(candidates) - log2(rank), in bits.

    Raises:
      InputError: a rank outside 1 to `candidates`.
    """
    return np.log2(candidates) - np.log2(_checked_ranks(ranks, candidates))


def extrapolated_exposure(
    secret_scores: np.ndarray, candidate_scores: np.ndarray
) -> np.ndarray:
    """Exposure beyond what the candidates can show, by a fitted distribution.

    A skew normal distribution is fitted to each secret's candidates, and the exposure
    is -log2 of the probability that it gives to scores at least as high as the
    secret's (Carlini et al. 2019, section 6.2). It rests on the shape of a tail that
    was not seen: an estimate, no bound.

    Args:
      secret_scores: as for `canary_ranks`.
      candidate_scores: as for `canary_ranks`; at least 10 of each canary, not all the
        same.

    Returns:
      [canaries] float64, in bits.

    Raises:
      InputError: as `canary_ranks`, or too few candidates to fit.
    """
    canary_ranks(secret_scores, candidate_scores)  # which checks them
    others = np.asarray(candidate_scores, np.float64)
    if others.shape[1] < 10 or (np.ptp(others, axis=1) == 0).any():
        raise InputError(
            f"candidate_scores has shape {others.shape}; to fit a distribution takes "
            "at least 10 candidates of each canary, not all of the same score."
        )
    found = []
    for secret, candidates in zip(np.asarray(secret_scores, np.float64), others):
        shape, location, scale = scipy.stats.skewnorm.fit(candidates)
        tail = _log_tail((secret - location) / scale, shape)
        found.append(-tail / math.log(2))
    return np.array(found)


def _log_tail(place: float, shape: float) -> float:
    """Log of the probability above a place, of a standard skew normal distribution.

    Far out, where scipy's rounds to log 0, by the tail's leading term (Capitanio 2010):
    twice the normal's for a shape above 0, else 2·φ(z)·Φ(shape·z)/(z·(1 + shape²)).
    """
    tail = float(scipy.stats.skewnorm.logsf(place, shape))
    if math.isfinite(tail):
        return tail
    normal = scipy.stats.norm
    if shape > 0:
        return float(math.log(2) + normal.logsf(place))
    density = normal.logpdf(place) + normal.logcdf(shape * place)
    return float(math.log(2) + density - math.log(place * (1 + shape**2)))


@dataclasses.dataclass(frozen=True)
class RankTest:
    """A test of whether secrets rank higher than by chance.

    Attributes:
      mean_rank: of the canaries.
      chance: the mean rank of secrets nobody trained on, (candidates + 1)/2.
      p_value: probability that chance gives a mean rank as low, exact.
      canaries: how many there are.
    """

    mean_rank: float
    chance: float
    p_value: float
    canaries: int


def rank_test(ranks: np.ndarray, candidates: int) -> RankTest:
    """Tests the hypothesis that the model learnt nothing of the secrets.

    Under it the ranks are independent and uniform on 1 to `candidates`: each secret
    was drawn independently, from the same law as its candidates. The distribution of
    their sum is computed by convolution, so the p-value is exact for any number of
    canaries. One-sided: secrets that rank *low* are no leak.

    Args:
      ranks: [canaries] int, from 1 to `candidates`.
      candidates: how many were ranked, the secret among them.

    Raises:
      InputError: a rank outside 1 to `candidates`.
    """
    ranks = _checked_ranks(ranks, candidates)
    mass = np.ones(1)
    for _ in ranks:
        mass = np.convolve(mass, np.full(candidates, 1 / candidates))
    # mass[s] is the probability that the ranks, each counted from 0, add up to s.
    p_value = mass[: int((ranks - 1).sum()) + 1].sum()
    return RankTest(
        float(ranks.mean()), (candidates + 1) / 2, min(1.0, float(p_value)), len(ranks)
    )


def pure_epsilon_bound(
    ranks: np.ndarray,
    candidates: int,
    repetitions: int,
    top: int = 1,
    confidence: float = 0.95,
) -> float:
    r"""Lower bound on the ε of pure DP that the ranks of canaries show.

    Of the kind that the paper reads off its canaries (section 6.3; Stock et al.
    2022), with the derivation given here. Let a canary's secret be drawn uniformly
    from its m candidates and occur in r training examples, each protected with
    (ε, 0). Going from one secret to none changes the likelihood of what was released
    by at most e^{±rε}. So, given the release and all other secrets, the candidates'
    posterior probabilities are likelihoods p_a/Σp_b, all p within e^{±rε} of one
    number. The secret is among the k that rank highest with probability at most

        p(ε) = k / (k + (m - k)·e^{-2rε}),

    whatever became of other canaries. The number of canaries that do rank so high is
    thus at most Binomial(canaries, p(ε)) in stochastic order, and the bound is the
    ε at which seeing so many has probability 1 - confidence.

    It refutes pure ε-DP. It does **not** refute (ε, δ)-DP of the same ε: for that see
    `audit_one_run`, whose theorem covers δ. Where all canaries rank first it is near
    ln(canaries·(m - k)/3k)/2r: repetitions make a leak likelier, and show less.

    Args:
      ranks: [canaries] int, from 1 to `candidates`.
      candidates: m, how many were ranked, the secret among them.
      repetitions: r, the number of examples that hold each secret.
      top: k; must be chosen before the ranks are seen.
      confidence: that the bound holds, in (0.5, 1).

    Returns:
      The bound per example; 0 where the ranks show nothing.

    Raises:
      InputError: a rank or a setting out of range.
    """
    ranks = _checked_ranks(ranks, candidates)
    positive_integer("repetitions", repetitions)
    in_range("confidence", confidence, 0.5, 1, low_open=True, high_open=True)
    positive_integer("top", top)
    if top >= candidates:
        raise InputError(
            f"top is {top} of {candidates} candidates, which all secrets are among; "
            "it must be smaller."
        )
    hits = int((ranks <= top).sum())
    if not hits:
        return 0.0
    # Clopper and Pearson's lower end: P[Binomial(n, p) ≥ hits] = 1 - confidence.
    p = float(scipy.stats.beta.ppf(1 - confidence, hits, len(ranks) - hits + 1))
    odds = p / (1 - p) * (candidates - top) / top
    return max(0.0, math.log(odds) / (2 * repetitions))


def least_mean_rank(epsilon: float, candidates: int) -> float:
    r"""The lowest mean rank of secrets that pure ε-DP for the secret still allows.

    The p(ε) of `pure_epsilon_bound` bounds the chance that the secret ranks k or
    better, for any attack, with ε that of the secret. A mean rank is the sum over
    k = 0 … m - 1 of the chances to rank worse than k, so it is at least

        1 + Σ_{k=1}^{m-1} (1 - p_k(ε)).

    At ε = 0 that is chance, (m + 1)/2. Among 100 candidates it is 6.3 at ε = 2 and
    1.00 at ε = 8: who reads such an ε as a promise about ranks is promised nothing.
    (ε, δ)-DP promises less still. What a mechanism really shows may be far less than
    its ε allows, and is measured.

    Args:
      epsilon: of the secret, at least 0: of a secret in r examples, r times that of
        one; infinity allows rank 1.
      candidates: m, how many are ranked, the secret among them.

    Raises:
      InputError: ε below 0, or no candidates.
    """
    positive_integer("candidates", candidates)
    in_range("epsilon", epsilon, 0, math.inf)
    top = np.arange(1, candidates)
    others = (candidates - top) * math.exp(-2 * epsilon)
    return 1 + float((others / (top + others)).sum())


@dataclasses.dataclass(frozen=True)
class Leaked:
    """The secrets found in a set of texts.

    Attributes:
      found: [secrets] bool.
      texts: how many texts were looked at.
    """

    found: tuple[bool, ...]
    texts: int

    @property
    def share(self) -> float:
        """Secrets found, of all."""
        return sum(self.found) / len(self.found)


def leaked_secrets(secrets: Sequence[str], texts: Iterable[str]) -> Leaked:
    """Looks for secrets of digits in texts, whatever characters separate the digits.

    Spaces, hyphens and letters between digits are left out on both sides: a generator
    may well break a number up. For a short secret in long texts with many numbers this
    finds it by chance as well; ten digits are long enough for queries.

    Args:
      secrets: strings that hold at least 6 digits each.
      texts: any number, read once.

    Raises:
      InputError: no secret, or one with fewer digits.
    """
    digits = [_ALL_BUT_DIGITS.sub("", secret) for secret in secrets]
    if not digits:
        raise InputError("secrets is empty; there is nothing to look for.")
    for secret, each in zip(secrets, digits):
        if len(each) < 6:
            raise InputError(
                f"the secret {secret!r} holds {len(each)} digits; with fewer than 6 it "
                "would be found by chance."
            )
    found = [False] * len(digits)
    count = 0
    for text in texts:
        count += 1
        shown = _ALL_BUT_DIGITS.sub("", text)
        if len(shown) >= 6:
            for number, each in enumerate(digits):
                if each in shown:
                    found[number] = True
    return Leaked(tuple(found), count)


def _checked_ranks(ranks: np.ndarray, candidates: int) -> np.ndarray:
    positive_integer("candidates", candidates)
    ranks = np.asarray(ranks)
    if ranks.ndim != 1 or not len(ranks) or not np.issubdtype(ranks.dtype, np.integer):
        raise InputError(
            f"ranks is {ranks.dtype} of shape {ranks.shape}; give one integer for each "
            "canary."
        )
    if ranks.min() < 1 or ranks.max() > candidates:
        raise InputError(
            f"ranks reach from {ranks.min()} to {ranks.max()}; among {candidates} "
            f"candidates they must be in 1 to {candidates}."
        )
    return ranks

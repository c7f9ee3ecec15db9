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

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
import scipy.stats

from tfdpsq.evaluation.significance import checked_values
from tfdpsq.validation import InputError, in_range, positive_integer, shown


def canary_ranks(
    secret_scores: np.ndarray, candidate_scores: np.ndarray, seed: int = 0
) -> np.ndarray:
    """Ranks each secret among its candidates and itself.

    Args:
      secret_scores: [canaries] float, higher where the model finds the secret more
        likely, such as log-likelihoods in nats.
      candidate_scores: [canaries, candidates - 1] float, of those not trained on.
      seed: of the order among equal scores; a fixed rule would favour one of them.

    Returns:
      [canaries] int64, from 1, the most likely, to the number of candidates.
    """
    secrets = checked_values("secret_scores", secret_scores)
    others = np.asarray(candidate_scores, np.float64)
    if others.shape != (len(secrets), others.shape[-1]) or not others.size:
        raise InputError(
            f"secret_scores has shape {secrets.shape}, candidate_scores "
            f"{others.shape}; give [canaries] and [canaries, candidates - 1]."
        )
    checked_values("candidate_scores", others.ravel())
    higher = (others > secrets[:, None]).sum(axis=1)
    equal = (others == secrets[:, None]).sum(axis=1)
    # Ties: 0 to e of e equal candidates rank before the secret, with equal probability.
    return 1 + higher + np.random.default_rng(seed).integers(0, equal, endpoint=True)


def exposure(ranks: np.ndarray, candidates: int) -> np.ndarray:
    """Bits of guessing the secret that the model saves an attacker.

    Carlini et al. 2019, definition 5, over the candidates that were scored: from 0
    to log2(candidates), which a secret that ranks first reaches; it may be exposed
    further than so few candidates can show.

    Args:
      ranks: [canaries] int, from 1 to `candidates`.
      candidates: how many were ranked, the secret among them.

    Returns:
      [canaries] float64, log2(candidates) - log2(rank), in bits.
    """
    return np.log2(candidates) - np.log2(_checked_ranks(ranks, candidates))


def rank_p_value(ranks: np.ndarray, candidates: int) -> float:
    """The chance of a mean rank as low if the model learnt nothing of the secrets.

    Under it the ranks are independent and uniform on 1 to `candidates`: each secret
    was drawn independently, from the same law as its candidates. The distribution of
    their sum is computed by convolution, so the p-value is exact for any number of
    canaries. One-sided: secrets that rank *low* are no leak.

    Args:
      ranks: [canaries] int, from 1 to `candidates`.
      candidates: how many were ranked, the secret among them.
    """
    ranks = _checked_ranks(ranks, candidates)
    mass = np.ones(1)
    for _ in ranks:
        mass = np.convolve(mass, np.full(candidates, 1 / candidates))
    # mass[s] is the probability that the ranks, each counted from 0, add up to s.
    return min(1.0, float(mass[: int((ranks - 1).sum()) + 1].sum()))


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
    ε at which seeing this many has probability 1 - confidence.

    It refutes pure ε-DP. It does **not** refute (ε, δ)-DP of the same ε: for that see
    `audit_one_run`, whose theorem covers δ. Where all canaries rank first it is near
    ln(canaries·(m - k)/3k)/2r: repetitions make a leak likelier, and show less.

    Args:
      ranks: [canaries] int, from 1 to `candidates`.
      candidates: m, how many were ranked, the secret among them.
      repetitions: r, the number of examples that hold each secret.
      top: k below m; must be chosen before the ranks are seen.
      confidence: that the bound holds, in (0.5, 1).

    Returns:
      The bound per example; 0 where the ranks show nothing.
    """
    ranks = _checked_ranks(ranks, candidates)
    positive_integer("repetitions", repetitions)
    in_range("confidence", confidence, 0.5, 1, low_open=True, high_open=True)
    in_range("top", top, 1, candidates, high_open=True)
    hits = int((ranks <= top).sum())
    if not hits:
        return 0.0
    # Clopper and Pearson's lower end: P[Binomial(n, p) ≥ hits] = 1 - confidence.
    p = float(scipy.stats.beta.ppf(1 - confidence, hits, len(ranks) - hits + 1))
    odds = p / (1 - p) * (candidates - top) / top
    return max(0.0, math.log(odds) / (2 * repetitions))


def leaked_secrets(secrets: Sequence[str], texts: Iterable[str]) -> tuple[bool, ...]:
    """Looks for secrets of digits in texts, whatever characters separate the digits.

    A generator may break a number up. A short secret is found by chance as well; ten
    digits are long enough for queries.

    Args:
      secrets: strings that hold at least 6 digits each.
      texts: any number, read once.

    Returns:
      Whether each secret was found.
    """
    digits = [re.sub(r"\D", "", secret) for secret in secrets]
    if short := [secret for secret, each in zip(secrets, digits) if len(each) < 6]:
        raise InputError(
            f"the secret {short[0]!r} holds fewer than 6 digits, which would be found "
            "by chance."
        )
    found = [False] * len(digits)
    for text in texts:
        held = re.sub(r"\D", "", text)
        if len(held) >= 6:
            found = [each or own in held for each, own in zip(found, digits)]
    return tuple(found)


def _checked_ranks(ranks: np.ndarray, candidates: int) -> np.ndarray:
    ranks = np.asarray(ranks)
    whole = ranks.ndim == 1 and len(ranks) and np.issubdtype(ranks.dtype, np.integer)
    if not whole or ranks.min() < 1 or ranks.max() > candidates:
        raise InputError(
            f"ranks are {shown(ranks)}; give an integer from 1 to {candidates} for "
            "each canary."
        )
    return ranks

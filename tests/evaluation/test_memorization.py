"""Ranks and exposure of canaries, on models whose likelihoods are known."""

import itertools
import math

import numpy as np
import pytest

from tfdpsq.evaluation import memorization
from tfdpsq.validation import InputError


def test_rank_counts_higher_scoring_candidates():
    ranks = memorization.canary_ranks(
        np.array([-5.0, -1.0, -9.0]),
        np.array([[-6.0, -4.0, -7.0], [-2.0, -3.0, -4.0], [-1.0, -2.0, -3.0]]),
    )
    assert ranks.tolist() == [2, 1, 4]


def test_chance_ranks_are_uniform_even_with_ties():
    """A model that gives few different scores favours neither secret nor candidate."""
    random = np.random.default_rng(5)
    scores = random.integers(0, 3, (40_000, 8)).astype(float)
    ranks = memorization.canary_ranks(scores[:, 0], scores[:, 1:], seed=3)
    counts = np.bincount(ranks, minlength=9)[1:]
    # Chi-squared with 7 degrees of freedom: above 24.3 once in a thousand.
    assert ((counts - 5000) ** 2 / 5000).sum() < 24.3
    # The rule "equal is better" fails the same test by far.
    biased = 1 + (scores[:, 1:] >= scores[:, :1]).sum(axis=1)
    counts = np.bincount(biased, minlength=9)[1:]
    assert ((counts - 5000) ** 2 / 5000).sum() > 1000


def test_exposure_equals_the_guessing_saved():
    """Of 2^b candidates the first has b bits, the last none."""
    found = memorization.exposure(np.array([1, 2, 64]), 64)
    np.testing.assert_allclose(found, [6, 5, 0], atol=1e-12)
    # Chance: the mean of log2(m/rank) nears log2(e) = 1.4427 bits.
    every = memorization.exposure(np.arange(1, 100_001), 100_000).mean()
    assert abs(every - math.log2(math.e)) < 1e-3


def test_rank_test_is_exact():
    """Against counting all outcomes of three ranks among five candidates."""
    outcomes = list(itertools.product(range(1, 6), repeat=3))
    for ranks in [(1, 1, 1), (2, 1, 4), (3, 3, 3), (5, 5, 5)]:
        expected = np.mean([sum(o) <= sum(ranks) for o in outcomes])
        found = memorization.rank_p_value(np.array(ranks), 5)
        assert abs(found - expected) < 1e-12


def _ranks_of_randomized_response(random, epsilon, canaries, candidates, repetitions):
    """The ranks of a mechanism in which replacing r copies costs all of 2rε.

    It names one candidate: the secret with e^{2rε} times the probability of another.
    """
    odds = math.exp(2 * repetitions * epsilon) / (candidates - 1)
    named = random.random(canaries) < odds / (1 + odds)
    ranks = random.integers(2, candidates + 1, canaries)
    ranks[named] = 1
    return ranks


@pytest.mark.parametrize("repetitions", [1, 4])
def test_pure_epsilon_bound_holds_and_is_sharp(repetitions):
    """On mechanisms of known ε: above it in 5 % of runs, and near it."""
    random = np.random.default_rng(repetitions)
    for epsilon in (0.3, 1.0):
        bounds = np.array(
            [
                memorization.pure_epsilon_bound(
                    _ranks_of_randomized_response(
                        random, epsilon, 2000, 10, repetitions
                    ),
                    10,
                    repetitions,
                )
                for _ in range(400)
            ]
        )
        # Binomial(400, .05): more than 35 above once in a thousand sets.
        assert (bounds > epsilon).sum() <= 35
        # A bound that forgot the repetitions, or the 2, would be far off.
        assert epsilon * 0.75 < np.median(bounds) < epsilon


def test_pure_epsilon_bound_of_nothing_is_zero():
    assert memorization.pure_epsilon_bound(np.full(20, 50), 100, 10) == 0.0
    assert memorization.pure_epsilon_bound(np.arange(1, 101), 100, 1, top=50) == 0.0


def test_leaked_secrets_are_found_in_any_spelling():
    """Digits count, whatever stands between them; part of a secret does not."""
    texts = ["call 012-345 6789 now", "9876543210", "11111", "5555 555 55", ""]
    found = memorization.leaked_secrets(
        ["0123456789", "98765 43210", "5555555555", "1111111111"], iter(texts)
    )
    assert found == (True, True, False, False)


def test_bad_input_is_named():
    with pytest.raises(InputError, match=r"shape \(2,\), candidate_scores \(3, 3\)"):
        memorization.canary_ranks(np.zeros(2), np.zeros((3, 3)))
    with pytest.raises(InputError, match="must be finite"):
        memorization.canary_ranks(np.zeros(1), np.array([[0, np.nan]]))
    with pytest.raises(InputError, match="an integer from 1 to 10"):
        memorization.exposure(np.array([11]), 10)
    with pytest.raises(InputError, match="fewer than 6 digits"):
        memorization.leaked_secrets(["12345"], [])

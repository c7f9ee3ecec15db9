"""The exponential mechanism: its ε over neighbours, and that draws follow it."""

import decimal
import math
import random

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpsq.privacy.proof import choice
from tfdpsq.validation import InputError

_SCORES = st.floats(0, 1)


@st.composite
def _neighbours(draw):
    """Scores [queries, candidates], and one query more."""
    candidates = draw(st.integers(2, 6))
    row = st.lists(_SCORES, min_size=candidates, max_size=candidates)
    return np.array(draw(st.lists(row, min_size=1, max_size=6))), np.array(draw(row))


def _probabilities(sums, epsilon):
    """The chances that `choice` states, as its formula has them."""
    weights = [math.exp(epsilon * value) for value in sums]
    return np.array(weights) / math.fsum(weights)


@settings(deadline=None)
@given(_neighbours(), st.floats(0.05, 8.0))
def test_one_query_more_or_less_moves_no_probability_by_more_than_e_to_the_epsilon(
    scores, epsilon
):
    before, added = scores
    both = [
        _probabilities([choice.sum_of_scores(column) for column in rows.T], epsilon)
        for rows in (before, np.vstack([before, added]))
    ]
    ratios = both[1] / both[0]
    assert ratios.max() <= math.exp(epsilon) * (1 + 1e-9)
    assert ratios.min() >= math.exp(-epsilon) * (1 - 1e-9)


def test_the_bound_is_reached_and_a_doubled_scale_breaks_it():
    """A query that helps one candidate alone, which was unlikely before."""
    epsilon, sums, more = 1.0, [0.0, 30.0], [1.0, 30.0]
    ratio = _probabilities(more, epsilon) / _probabilities(sums, epsilon)
    assert ratio[0] == pytest.approx(math.e, rel=1e-6)
    doubled = [_probabilities(values, 2 * epsilon) for values in (sums, more)]
    assert (doubled[1] / doubled[0])[0] > 2 * math.exp(epsilon)


def test_scores_that_move_against_each_other_would_cost_twice_as_much():
    """Why what a query adds must be at least 0 for every candidate."""
    before, after = (_probabilities(s, 1.0) for s in ([1, 0], [0, 1]))
    assert (after / before)[1] == pytest.approx(math.e)  # (e/(1+e)) / (1/(1+e))
    many = (_probabilities(s, 1.0) for s in ([9, *[10] * 99], [10, *[9] * 99]))
    before, after = many
    assert (after / before)[0] > 1.8 * math.e


def test_draws_follow_the_probabilities_and_no_other_scale():
    epsilon, sums, draws = 0.7, [0.0, 1.0, 2.5, 3.0, 0.5], 60_000
    counts = np.bincount(
        [choice.choose(sums, epsilon) for _ in range(draws)], minlength=len(sums)
    )

    def p_value(scale):
        expected = draws * _probabilities(sums, scale * epsilon)
        return scipy.stats.chisquare(counts, expected).pvalue

    assert p_value(1.0) > 1e-6
    for wrong in (0.5, 2.0, 0.9, 1.1):
        assert p_value(wrong) < 1e-9, wrong


def test_gumbel_noise_has_its_distribution_and_its_far_tail(monkeypatch):
    draws = [choice._gumbel() for _ in range(100_000)]
    assert scipy.stats.kstest(draws, "gumbel_r").pvalue > 1e-6
    assert scipy.stats.kstest(np.multiply(draws, 1.1), "gumbel_r").pvalue < 1e-9
    # U one step below 1, and one above 0: quantiles that 53 bits do not reach.
    monkeypatch.setattr(choice.secrets, "randbits", lambda bits: (1 << bits) - 1)
    assert choice._gumbel() == pytest.approx(257 * math.log(2))
    monkeypatch.setattr(choice.secrets, "randbits", lambda bits: 0)
    assert choice._gumbel() == pytest.approx(-math.log(257 * math.log(2)))


def test_noise_is_off_by_no_more_than_the_stated_rounding(monkeypatch):
    """Against logarithms of 120 digits: 2^-52·(|G| + 2), and |G| stays below 180."""
    draws = random.Random(5)
    many = [draws.getrandbits(256) >> shift for shift in range(0, 256, 2)]
    many += [(1 << 256) - 1 - value for value in many]
    for bits in [*many, *(draws.getrandbits(256) for _ in range(100))]:
        monkeypatch.setattr(choice.secrets, "randbits", lambda _, bits=bits: bits)
        with decimal.localcontext() as context:
            context.prec = 120
            exact = -(-(decimal.Decimal(2 * bits + 1) / (1 << 257)).ln()).ln()
        off = abs(float(decimal.Decimal(choice._gumbel()) - exact))
        assert off <= 2.0**-52 * (abs(float(exact)) + 2)
        assert abs(exact) < 180


def test_noise_is_fresh():
    assert len({choice._gumbel() for _ in range(100)}) == 100


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=8),
    st.floats(allow_nan=True, allow_infinity=True),
)
def test_no_score_moves_a_sum_by_more_than_1(scores, added):
    moved = choice.sum_of_scores([*scores, added]) - choice.sum_of_scores(scores)
    assert 0 <= moved <= choice.SENSITIVITY


def test_sums_are_exact_in_any_order():
    scores = np.random.default_rng(0).random(1000)
    total = choice.sum_of_scores(scores)
    assert total == choice.sum_of_scores(scores[::-1])
    assert total == pytest.approx(scores.sum(), abs=1000 * choice.SCORE_UNIT)
    assert (total / choice.SCORE_UNIT).is_integer()


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_an_epsilon_that_is_none_is_refused(epsilon):
    with pytest.raises(InputError, match="epsilon of the choice is"):
        choice.choose([1.0, 2.0], epsilon)


@pytest.mark.parametrize("sums", [[], [math.nan, 1.0]])
def test_no_candidates_or_no_sums_are_refused(sums):
    with pytest.raises(InputError, match="give at least one, each with a finite"):
        choice.choose(sums, 1.0)

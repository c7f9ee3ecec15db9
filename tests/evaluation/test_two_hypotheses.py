"""The audit of many runs: its bounds on mechanisms whose ε and μ are known."""

import math

import numpy as np
import pytest
import scipy.stats

from tfdpsq.evaluation import audit_two_hypotheses
from tfdpsq.validation import InputError


def _audits(draw, repeats, delta, **options):
    """The audits of `repeats` experiments; draw gives scores (with, without)."""
    return [audit_two_hypotheses(*draw(), delta, **options) for _ in range(repeats)]


def test_bounds_equal_a_naive_count():
    random = np.random.default_rng(0)
    present, absent = random.normal(1.0, 1, 301), random.normal(0, 1, 400)
    got = audit_two_hypotheses(present, absent, 1e-3, confidence=0.9)

    def upper(wrong, runs, level):  # the rate at which so few have this probability
        test = scipy.stats.binomtest(int(wrong), runs)
        return test.proportion_ci(1 - 2 * level, "exact").high

    def rates(threshold, start, level=0.05):  # runs start, start + 2, …
        return (
            upper((absent[start::2] >= threshold).sum(), 200, level),
            upper((present[start::2] < threshold).sum(), 151 - start, level),
        )

    def epsilon(fpr, fnr):
        return math.log(max((0.999 - fnr) / fpr, (0.999 - fpr) / fnr, 1e-9))

    def mu(fpr, fnr):
        return scipy.stats.norm.ppf(1 - fpr) - scipy.stats.norm.ppf(fnr)

    assert got.runs == (150, 200)
    assert got.epsilon == pytest.approx(epsilon(*rates(got.epsilon_threshold, 1)))
    assert got.mu == pytest.approx(mu(*rates(got.mu_threshold, 1)))
    # No threshold is better on the runs that choose it, all 351 of them allowed for.
    tried = np.linspace(-2, 3, 60)
    wary = 0.05 / 351
    assert mu(*rates(got.mu_threshold, 0, wary)) >= max(
        mu(*rates(x, 0, wary)) for x in tried
    )
    assert epsilon(*rates(got.epsilon_threshold, 0, wary)) >= max(
        epsilon(*rates(x, 0, wary)) for x in tried
    )


def test_randomized_response_is_bounded_nearly_at_its_epsilon():
    random = np.random.default_rng(1)
    flip = 1 / (1 + math.e)  # ε = 1

    def draw():
        present = np.where(random.random(4000) < flip, -1.0, 1.0)
        return present, np.where(random.random(4000) < flip, 1.0, -1.0)

    bounds = np.array([found.epsilon for found in _audits(draw, 300, 0.0)])
    # 2,000 runs counted: upper bounds 0.269 + 1.96·0.0099 = 0.288 on both error
    # rates on average, so ln(0.712/0.288) = 0.904, and a little more, as it is the
    # better of two directions.
    assert 0.90 < bounds.mean() < 0.93
    assert np.mean(bounds > 1) <= 0.05


def test_gaussian_mu_is_bounded_nearly_at_its_value():
    random = np.random.default_rng(2)
    mu = 1.5

    def draw():
        return random.normal(mu, 1, 2000), random.normal(0, 1, 2000)

    bounds = np.array([each.mu for each in _audits(draw, 300, 1e-5)])
    # Counted 1,000 a side at rates near 0.227: two half widths of 1.96·0.01325 over
    # the density φ(0.75) = 0.301 are 0.17, so 1.33 at the best threshold.
    assert bounds.mean() == pytest.approx(1.33, abs=0.03)
    assert np.mean(bounds > mu) <= 0.05
    halved = audit_two_hypotheses(
        random.normal(2 * mu, 1, 2000), random.normal(0, 1, 2000), 1e-5
    )
    assert mu < halved.mu < 2 * mu


def test_thresholds_need_held_out_runs():
    """With the same runs twice, as if none were held out, nothing becomes something."""
    random = np.random.default_rng(3)

    def alike():
        return random.normal(size=1000), random.normal(size=1000)

    def twice():
        return [np.repeat(scores, 2) for scores in alike()]

    def share_above_zero(draw):
        return np.mean([e.mu > 0 for e in _audits(draw, 300, 0.0, confidence=0.6)])

    assert share_above_zero(alike) < 0.4
    assert share_above_zero(twice) > 0.4 + 4 * math.sqrt(0.4 * 0.6 / 300)


def test_many_thresholds_cost_little():
    """A threshold that a few lucky runs make look best would waste the others."""
    random = np.random.default_rng(5)

    def draw():
        return random.normal(0.5, 1, 20_000), random.normal(0, 1, 20_000)

    # Counted 10,000 a side at rates near 0.40: 2·1.96·0.0049/φ(0.25) = 0.05 lost.
    bounds = [each.mu for each in _audits(draw, 12, 1e-5)]
    assert np.mean(bounds) == pytest.approx(0.45, abs=0.01)
    assert min(bounds) > 0.40


def test_delta_pays_for_chance_revelations():
    """Who tells all in a tenth of the runs and nothing else is (0, 0.1)-DP."""
    random = np.random.default_rng(4)

    def draw():
        tells = random.random((2, 4000)) < 0.1
        return np.where(tells, [[1.0], [-1.0]], 0.0)

    assert np.mean([each.epsilon > 0 for each in _audits(draw, 200, 0.1)]) <= 0.05
    # At δ = 0 none of 2,000 runs without is taken for one with: FPR ≤ 3.69/2000, and
    # 0.1 - 1.96·0.0067 = 0.087 or so of the others are known: ln(0.087/0.00184).
    bounds = [each.epsilon for each in _audits(draw, 20, 0.0)]
    assert np.mean(bounds) == pytest.approx(3.86, abs=0.06)


def test_bad_audits_are_refused():
    with pytest.raises(InputError, match="with_target has 3 runs"):
        audit_two_hypotheses([1.0, 2.0, 3.0], np.arange(8.0), 1e-3)
    with pytest.raises(InputError, match=r"without_target\[7\] is inf"):
        audit_two_hypotheses(np.arange(8.0), [0.0] * 7 + [math.inf], 1e-3)
    with pytest.raises(InputError, match="delta is -1e-09"):
        audit_two_hypotheses(np.arange(8.0), np.arange(8.0), -1e-9)

"""Membership inference, on scores whose laws are known."""

import numpy as np
import pytest
import scipy.stats
from sklearn import metrics

from tfdpsq.evaluation.membership import (
    attack_membership,
)
from tfdpsq.validation import InputError


def test_auc_and_rates_equal_scikit_learn():
    random = np.random.default_rng(1)
    members = np.round(random.normal(0.7, 1, 300), 1)
    others = np.round(random.normal(0, 1, 400), 1)
    found = attack_membership(members, others, (0.01, 0.05, 0.3))
    labels = np.r_[np.ones(300), np.zeros(400)]
    scores = np.r_[members, others]
    assert found.auc.mean == pytest.approx(metrics.roc_auc_score(labels, scores))
    false, true, _ = metrics.roc_curve(labels, scores, drop_intermediate=False)
    for rate, interval in found.true_positive_rates.items():
        assert interval.mean == pytest.approx(true[false <= rate + 1e-12].max())
        assert interval.low < interval.mean < interval.high


def test_intervals_cover_at_their_level():
    """Normal scores one apart: AUC = Φ(1/√2) = .7602. A wrong variance fails."""
    truth = scipy.stats.norm.cdf(1 / np.sqrt(2))
    random = np.random.default_rng(2)
    covered = narrow = 0
    for _ in range(600):
        found = attack_membership(
            random.normal(1, 1, 60), random.normal(0, 1, 40), (0.1,), 0.9
        ).auc
        covered += found.low <= truth <= found.high
        middle, half = found.mean, (found.high - found.low) / 2
        narrow += abs(middle - truth) <= half * 2 / 3
    # 600 draws at 0.9: deviation .012.
    assert 0.86 < covered / 600 < 0.935
    assert narrow / 600 < 0.80


def test_intervals_of_few_well_separated_scores_cover():
    """From the spread of the placements alone, .95 covered .61: often it is 0."""
    truth = scipy.stats.norm.cdf(3 / np.sqrt(2))
    random = np.random.default_rng(5)
    covered = 0
    for _ in range(600):
        scores = random.normal(3, 1, 12), random.normal(0, 1, 12)
        found = attack_membership(*scores, (0.1,)).auc
        covered += found.low <= truth <= found.high
    assert covered / 600 > 0.92


def test_an_interval_is_where_its_own_score_test_ends():
    """Its deviation is exact for exponential scores, as many of each kind."""
    for members, others in ((2, 2), (12, 12), (500, 40)):
        apart = np.arange(members) + 10.0, np.arange(others) / others
        found = attack_membership(*apart, (0.1,)).auc
        assert found.high == 1 and found.mean == 1 and found.low < 0.99
        low = found.low
        if members == 12:  # a law of that AUC: members are the largest of odds draws
            random = np.random.default_rng(6)
            odds = low / (1 - low)
            means = [
                (
                    random.exponential(odds, (members, 1))
                    > random.exponential(1, (1, others))
                ).mean()
                for _ in range(4000)
            ]
            assert np.mean(means) == pytest.approx(low, abs=0.01)
            # The AUC of 1 is 1.96 deviations from it.
            assert (1 - low) / np.std(means) == pytest.approx(1.96, rel=0.06)
    mirrored = attack_membership(apart[1], apart[0], (0.1,)).auc
    assert mirrored.low == 0 and mirrored.high == pytest.approx(1 - found.low)


def test_bad_scores_are_named():
    with pytest.raises(InputError, match="1 members and 5"):
        attack_membership(np.zeros(1), np.zeros(5))
    with pytest.raises(InputError, match=r"others\[1\] is inf"):
        attack_membership(np.zeros(3), np.array([0, np.inf, 0]))

"""Intervals and tests: coverage, alignment, naive implementations."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tfdpsq.evaluation.significance import (
    bootstrap_interval,
    macro_interval,
    paired_bootstrap,
    randomization_p_value,
)
from tfdpsq.validation import InputError


def test_bootstrap_equals_a_naive_loop():
    values = np.random.default_rng(1).random(37)
    got = bootstrap_interval(values, resamples=500, seed=3)
    draw = np.random.default_rng(3)  # the documented generator, one row at a time
    means = sorted(
        sum(values[i] for i in draw.integers(0, 37, 37)) / 37 for _ in range(500)
    )
    # 95 %: linear interpolation at 0.025 * 499 = 12.475 and 486.525.
    assert got.low == pytest.approx(means[12] + 0.475 * (means[13] - means[12]))
    assert got.high == pytest.approx(means[486] + 0.525 * (means[487] - means[486]))
    assert got.mean == pytest.approx(values.mean())
    assert bootstrap_interval([0.5]).low == 0.5


def test_95_percent_intervals_cover_95_percent():
    draw = np.random.default_rng(5)
    covered = 0
    for trial in range(400):
        got = bootstrap_interval(draw.exponential(size=100), resamples=400, seed=trial)
        covered += got.low <= 1.0 <= got.high
    # Binomial(400, 0.93 to 0.95): the percentile method undercovers skewed data a
    # little. 4 deviations are 18; a 90 % or a 99 % interval falls outside.
    assert 364 <= covered <= 391


def test_pairing_removes_what_queries_share():
    draw = np.random.default_rng(0)
    difficulty = draw.random(500)
    a = difficulty + 0.01 + draw.normal(0, 0.01, 500)
    b = difficulty
    got = paired_bootstrap(a, b, resamples=2000)
    assert got.difference == pytest.approx((a - b).mean())
    # Deviation of a - b is 0.01: half width near 1.96 * 0.01 / sqrt(500) = 0.00088;
    # unpaired it would be near 0.036.
    assert got.high - got.low == pytest.approx(2 * 0.00088, rel=0.15)
    assert got.low > 0
    assert got.p_value == 2 / 2001  # of either side: the observed one, of 2001


def test_p_value_is_uniform_where_nothing_differs():
    draw = np.random.default_rng(2)
    p = [
        paired_bootstrap(
            draw.normal(size=200), draw.normal(size=200), resamples=300, seed=trial
        ).p_value
        for trial in range(300)
    ]
    # Kolmogorov-Smirnov at 300 draws: 1.63/sqrt(300) = 0.094 is its 1 % point.
    gap = np.abs(np.sort(p) - np.arange(1, 301) / 300).max()
    assert gap < 0.094


def test_bad_values_and_settings_are_refused():
    for values, message in (
        ([], "at least one number"),
        ([1.0, np.nan], r"values\[1\]"),
    ):
        with pytest.raises(InputError, match=message):
            bootstrap_interval(values)
    with pytest.raises(InputError, match="2 values and b 3"):
        paired_bootstrap([1, 2], [1, 2, 3])
    with pytest.raises(InputError, match="confidence is 95"):
        bootstrap_interval([1, 2], confidence=95)
    with pytest.raises(InputError, match="resamples is 0"):
        bootstrap_interval([1, 2], resamples=0)


# -- Tests of differences ---------------------------------------------------------


def _brute_force(a, b):
    """All assignments of signs, in exact integer arithmetic where values allow it."""
    differences = [x - y for x, y in zip(a, b)]
    observed = abs(sum(differences))
    assignments = list(itertools.product((1, -1), repeat=len(differences)))
    as_far = sum(
        abs(sum(sign * d for sign, d in zip(signs, differences))) >= observed
        for signs in assignments
    )
    return as_far / len(assignments)


@given(st.lists(st.tuples(*[st.integers(-3, 3)] * 2), min_size=1, max_size=9))
@settings(max_examples=30, deadline=None)
def test_few_queries_equal_brute_force(pairs):
    # Small integers: many ties between sums, many differences of 0.
    a, b = zip(*pairs)
    got = paired_bootstrap(a, b, resamples=512)
    assert got.p_value == pytest.approx(_brute_force(a, b))
    assert got.difference == pytest.approx(np.mean(a) - np.mean(b))


def test_sums_equal_up_to_rounding_are_ties():
    # In tenths many sums are equal, but 0.1 + 0.2 is not 0.3 in floating point: what
    # whole numbers say is what must come out.
    draw = np.random.default_rng(0)
    for tenths in draw.integers(-6, 7, size=(60, 9)):
        expected = _brute_force(tenths.tolist(), [0] * 9)
        assert randomization_p_value(tenths / 10) == pytest.approx(expected)
    many = np.array([1, 2, -3] * 8)  # of sum 0: any signs go as far
    assert randomization_p_value(many / 10, 500) > 0.9


def _p_values(test, trials=2000, queries=25):
    """Of systems that share the queries' difficulty, which is all that matters."""
    draw = np.random.default_rng(11)
    found = []
    for trial in range(trials):
        difficulty = draw.exponential(size=queries)
        a, b = difficulty + draw.standard_t(3, size=(2, queries)) * 0.3
        found.append(test(a, b, trial))
    return np.array(found)


def _chi_square(p_values):
    """The p value of p values in 10ths being uniform; 0 where one is below 1/10."""
    cells = np.rint(p_values * 10).astype(int)
    if cells.min() < 1:
        return 0.0
    return stats.chisquare(np.bincount(cells, minlength=11)[1:]).pvalue


def test_p_values_are_uniform_where_systems_are_exchangeable():
    # With 19 draws a one-sided p value (b + 1)/(19 + 1) is exactly uniform on 20ths, as
    # the observed sum is one of 20 exchangeable ones.
    # scipy doubles the smaller side: uniform on 10ths.
    ours = _p_values(lambda a, b, seed: randomization_p_value(a - b, 19, seed))
    assert _chi_square(ours) > 0.01


def test_uniformity_check_rejects_wrong_tests():
    def counted_without_the_observed(a, b, seed):
        return randomization_p_value(a - b, 19, seed) - 0.1

    def one_sided(a, b, seed):
        ours = randomization_p_value(a - b, 19, seed)
        return ours / 2 if a.mean() > b.mean() else 1.0

    def unpaired(a, b, seed):
        draw, both = np.random.default_rng(seed), np.concatenate([a, b])
        observed = abs(a.mean() - b.mean())
        means = [
            abs(np.diff(draw.permutation(both).reshape(2, -1).mean(axis=1))[0])
            for _ in range(19)
        ]
        return np.ceil((1 + np.sum(np.array(means) >= observed)) / 2) / 10

    for wrong in (counted_without_the_observed, one_sided, unpaired):
        assert _chi_square(_p_values(wrong, trials=800)) < 1e-6, wrong.__name__


def test_macro_interval_resamples_within_groups():
    draw = np.random.default_rng(0)
    large, small = draw.normal(0, 1, 2000), draw.normal(10, 2, 50)
    got = macro_interval([large, small], resamples=4000)
    assert got.mean == pytest.approx((large.mean() + small.mean()) / 2)
    # Variance of the mean of two means: a quarter of the sum of theirs. Resampled as
    # one set of 2050, the mean would be near 0.2 instead of 5.
    deviation = np.sqrt(large.var() / 2000 + small.var() / 50) / 2
    assert (got.high - got.low) / 2 == pytest.approx(1.96 * deviation, rel=0.08)
    assert macro_interval([small], seed=3) == bootstrap_interval(small, seed=3)
    with pytest.raises(InputError, match="no group"):
        macro_interval([])

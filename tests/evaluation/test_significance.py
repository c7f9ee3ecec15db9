"""Bootstrap intervals: coverage, alignment, and a naive implementation."""

import numpy as np
import pytest

from tfdpsq.evaluation import bootstrap_interval, paired_bootstrap
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
    assert got.p_value == 1 / 2001  # none of 2000, and the observed one


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


def test_mappings_are_aligned_by_query_not_by_order():
    a, b = {"x": 1.0, "y": 0.0}, {"y": 0.0, "x": 1.0}
    assert paired_bootstrap(a, b, resamples=10).difference == 0
    with pytest.raises(InputError, match="'y' is in one only"):
        paired_bootstrap(a, {"x": 1.0, "z": 0.0})
    with pytest.raises(InputError, match="both be mappings"):
        paired_bootstrap(a, [1.0, 0.0])


def test_bad_values_and_settings_are_refused():
    for values, message in (
        ([], "at least one query"),
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

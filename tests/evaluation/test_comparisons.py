"""Sign flips against brute force, scipy and the null; Holm against worked steps."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tfdpsq.evaluation import (
    bootstrap_interval,
    compare_systems,
    holm,
    macro_interval,
    paired_randomization,
)
from tfdpsq.evaluation.ranking.comparisons import Comparison
from tfdpsq.validation import InputError


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
    got = paired_randomization(a, b, resamples=1)
    assert got.exact and got.p_value == _brute_force(a, b)
    assert got.difference == pytest.approx(np.mean(a) - np.mean(b))


def test_sums_equal_up_to_rounding_are_ties():
    # In tenths many sums are equal, but 0.1 + 0.2 is not 0.3 in floating point: what
    # whole numbers say is what must come out.
    draw = np.random.default_rng(0)
    for tenths in draw.integers(-6, 7, size=(60, 9)):
        expected = _brute_force(tenths.tolist(), [0] * 9)
        assert paired_randomization(tenths / 10, np.zeros(9)).p_value == expected
    many = np.array([1, 2, -3] * 8)  # of sum 0: any signs go as far
    assert paired_randomization(many / 10, np.zeros(24), 500).p_value == 1


def test_sampled_p_value_is_close_to_the_exact_one():
    a, b = np.random.default_rng(3).random((2, 20))
    exact = paired_randomization(a, b)
    # The 21st difference is too small to matter, and makes the signs random.
    sampled = paired_randomization([*a, 1e-9], [*b, 0], resamples=40_000)
    assert exact.exact and not sampled.exact and 0.1 < exact.p_value < 0.9
    # Its deviation is sqrt(p (1 - p) / 40,000), at most 0.0025.
    assert abs(sampled.p_value - exact.p_value) < 0.01


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
    """The p value of p values in 20ths being uniform; inf where one is below 1/20."""
    cells = np.rint(p_values * 20).astype(int)
    if cells.min() < 1:
        return 0.0
    return stats.chisquare(np.bincount(cells, minlength=21)[1:]).pvalue


def test_p_values_are_uniform_where_systems_are_exchangeable():
    # With 19 draws the p value (b + 1)/(19 + 1) is exactly uniform on 20ths, as the
    # observed sum is one of 20 exchangeable ones.
    ours = _p_values(lambda a, b, seed: paired_randomization(a, b, 19, seed).p_value)
    assert _chi_square(ours) > 0.01


def test_uniformity_check_rejects_wrong_tests():
    def counted_without_the_observed(a, b, seed):
        ours = paired_randomization(a, b, 19, seed).p_value
        return (ours * 20 - 1) / 19

    def one_sided(a, b, seed):
        ours = paired_randomization(a, b, 19, seed)
        return np.ceil(ours.p_value * 10) / 20 if ours.difference > 0 else 1.0

    def unpaired(a, b, seed):
        draw, both = np.random.default_rng(seed), np.concatenate([a, b])
        observed = abs(a.mean() - b.mean())
        means = [
            abs(np.diff(draw.permutation(both).reshape(2, -1).mean(axis=1))[0])
            for _ in range(19)
        ]
        return (1 + np.sum(np.array(means) >= observed)) / 20

    for wrong in (counted_without_the_observed, one_sided, unpaired):
        assert _chi_square(_p_values(wrong, trials=800)) < 1e-6, wrong.__name__


def test_holm_equals_hand_worked_steps():
    # Ascending .01 .02 .03 .04 times 4 3 2 1: .04 .06 .06 .04; the last is raised to
    # the one before it.
    np.testing.assert_allclose(
        holm([0.03, 0.01, 0.04, 0.02]), [0.06, 0.04, 0.06, 0.06], rtol=1e-12
    )
    # .2 .5 .5 times 3 2 1: .6, 1, and .5 raised to 1.
    np.testing.assert_allclose(holm([0.5, 0.2, 0.5]), [1, 0.6, 1], rtol=1e-12)
    np.testing.assert_allclose(holm([0.9, 0.8]), [1, 1])
    assert holm([0.3]) == [0.3] and len(holm([])) == 0


def test_holm_controls_false_rejections():
    # 10 true hypotheses of independent uniform p values: at 5 % the chance is 1 -
    # 0.995^10 = 0.0489, deviation 0.0034 at 4,000 trials; uncorrected it is 0.40.
    p = np.random.default_rng(0).random((4000, 10))
    rejected = np.mean([holm(row).min() <= 0.05 for row in p])
    assert 0.035 < rejected < 0.063


def test_all_pairs_of_systems_are_compared_and_corrected():
    draw = np.random.default_rng(0)
    base = draw.random(80)
    systems = {
        "better": base + 0.5 + draw.normal(0, 0.1, 80),
        "a": base + draw.normal(0, 0.1, 80),
        "b": base + draw.normal(0, 0.1, 80),
        "copy": base,
    }
    found = compare_systems(systems, resamples=500, seed=7)
    names = list(itertools.combinations(systems, 2))
    assert [(one.first, one.second) for one in found] == names
    alone = [
        paired_randomization(systems[a], systems[b], 500, seed=7) for a, b in names
    ]
    corrected = holm([one.p_value for one in alone])
    assert found == [
        Comparison(a, b, one.difference, one.p_value, adjusted, one.exact)
        for (a, b), one, adjusted in zip(names, alone, corrected)
    ]
    assert [one.adjusted_p_value < 0.05 for one in found] == [True] * 3 + [False] * 3
    assert compare_systems({"alone": base}) == []


def test_systems_are_aligned_by_query():
    found = compare_systems({"a": {"x": 1.0, "y": 0.0}, "b": {"y": 0.0, "x": 1.0}})
    assert (found[0].difference, found[0].p_value) == (0, 1)
    with pytest.raises(InputError, match="a is 'm' and b 'n': .* 'z' is in one only"):
        compare_systems({"m": {"x": 1.0}, "n": {"x": 1.0, "z": 0.0}})
    with pytest.raises(InputError, match="a is 'm' and b 'n': a has 1 values and b 2"):
        compare_systems({"m": [1.0], "n": [1.0, 0.0]})


def test_bad_values_and_settings_are_refused():
    with pytest.raises(InputError, match="resamples is 0"):
        paired_randomization([1.0], [2.0], resamples=0)
    with pytest.raises(InputError, match=r"b\[1\] is nan"):
        paired_randomization([1, 2], [1, np.nan])
    with pytest.raises(InputError, match=r"p_values\[0\] is 1.5"):
        holm([1.5])


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

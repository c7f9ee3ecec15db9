"""The law of the truncated Poisson sampler."""

import numpy as np
import pytest
import scipy.stats

from tfdpsq.privacy.sampling import PoissonSampler

_DRAWS = 4000


@pytest.fixture(scope="module")
def draws():
    sampler = PoissonSampler(40, 0.2, 40, seed=7)
    included = np.zeros((_DRAWS, 40), bool)
    for step in range(_DRAWS):
        draw = sampler.draw(step)
        included[step, draw.indices[: draw.count]] = True
    return included


def test_every_row_is_drawn_with_the_stated_probability(draws):
    # Deviation of a mean of 4000 Bernoulli(0.2): 0.0063; 4.5 of them, 40 rows.
    assert np.abs(draws.mean(axis=0) - 0.2).max() < 4.5 * np.sqrt(0.16 / _DRAWS)


def test_rows_are_drawn_independently_of_each_other(draws):
    together = (draws.T.astype(float) @ draws) / _DRAWS
    pairs = together[np.triu_indices(40, 1)]
    deviation = np.sqrt(0.04 * 0.96 / _DRAWS)
    assert np.abs(pairs - 0.04).max() < 5 * deviation
    # Sampling eight of forty without replacement would give 0.0359 on average.
    assert abs(pairs.mean() - 0.04) < 0.001


def test_batch_sizes_are_binomial_and_not_fixed(draws):
    sizes = draws.sum(axis=1)
    edges = [0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 41]
    observed, _ = np.histogram(sizes, edges)
    law = scipy.stats.binom(40, 0.2).pmf(np.arange(41))
    expected = [law[a:b].sum() * _DRAWS for a, b in zip(edges[:-1], edges[1:])]
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-4


def test_truncation_keeps_a_uniformly_random_subset():
    sampler = PoissonSampler(10, 0.9, 3, seed=1)
    counts = np.zeros(10)
    for step in range(3000):
        draw = sampler.draw(step)
        assert draw.count == 3
        assert len(set(draw.indices[:3].tolist())) == 3
        counts[draw.indices[:3]] += 1
    # Each row is kept 900 times on average; deviation below 25.1.
    assert np.abs(counts - 900).max() < 4.5 * np.sqrt(3000 * 0.3 * 0.7)


def test_a_step_is_the_same_whenever_it_is_asked_for():
    one, other = (
        PoissonSampler(50, 0.3, 50, seed=5),
        PoissonSampler(50, 0.3, 50, seed=5),
    )
    later = one.draw(17)
    for step in range(17):
        other.draw(step)
    np.testing.assert_array_equal(later.indices, other.draw(17).indices)
    assert not np.array_equal(later.indices, one.draw(18).indices)


def test_padding_has_weight_zero_and_an_empty_draw_is_a_draw():
    draw = PoissonSampler(5, 1e-9, 4, seed=0).draw(0)
    assert draw.count == 0
    np.testing.assert_array_equal(draw.weights, np.zeros(4))
    draw = PoissonSampler(5, 0.5, 5, seed=3).draw(0)
    np.testing.assert_array_equal(draw.weights, np.arange(5) < draw.count)


def test_two_samplers_without_a_seed_differ():
    a, b = (PoissonSampler(1000, 0.5, 1000).draw(0).indices for _ in range(2))
    assert not np.array_equal(a, b)


@pytest.mark.parametrize("probability", [0.0, -0.1, 1.1, float("nan")])
def test_a_sampling_probability_that_is_none_is_refused(probability):
    with pytest.raises(ValueError, match="sampling_probability"):
        PoissonSampler(5, probability, 4)

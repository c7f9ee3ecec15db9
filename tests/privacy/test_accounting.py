"""Noise calibration, and the price of truncating a Poisson batch."""

import itertools
import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from tfdpsq.privacy import accounting, make_plan
from tfdpsq.privacy.spec import PrivacySpec


def _random_spec(seed):
    random = np.random.default_rng(seed)
    n = int(random.integers(500, 200_000))
    return PrivacySpec(
        epsilon=float(np.exp(random.uniform(np.log(0.5), np.log(16)))),
        clip_norm=float(random.uniform(0.01, 2)),
        n=n,
        batch_size=int(random.integers(1, max(2, n // 10))),
        steps=int(random.integers(1, 400)),
        accountant="rdp" if seed % 4 else "pld",
        sensitivity_multiplier=float(random.choice([1.0, 2.0, 63.0])),
    )


def _check(spec):
    plan = make_plan(spec)
    spent = plan.epsilon(spec.steps)
    assert spent <= spec.epsilon
    assert spent >= 0.99 * spec.epsilon
    # RDP never certifies less than PLD, up to PLD's grid, for what ran.
    assert plan.epsilon(spec.steps, "pld") <= plan.epsilon(spec.steps, "rdp") * 1.01
    assert plan.epsilon(0) == 0
    assert plan.truncation_delta(spec.steps) <= 1e-3 * spec.target_delta
    assert plan.noise_stddev == pytest.approx(
        plan.noise_multiplier * spec.sensitivity_multiplier * spec.clip_norm
    )


@pytest.mark.parametrize("seed", range(6))
def test_calibration_reaches_the_target_and_never_exceeds_it(seed):
    _check(_random_spec(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 60))
def test_calibration_on_many_random_specs(seed):
    _check(_random_spec(seed))


def test_epsilon_grows_with_the_steps_that_ran():
    plan = make_plan(
        PrivacySpec(
            epsilon=3.0,
            clip_norm=1.0,
            n=1000,
            batch_size=50,
            steps=100,
            accountant="rdp",
        )
    )
    spent = [plan.epsilon(steps) for steps in (1, 10, 50, 100)]
    assert spent == sorted(spent) and spent[0] < spent[-1] <= 3.0
    with pytest.raises(ValueError, match="101 steps .* plan covers 100"):
        plan.epsilon(101)


def test_one_gaussian_release_against_the_closed_form():
    """Balle & Wang 2018, theorem 8: δ(ε) of the Gaussian mechanism, exactly."""
    sigma, delta = 1.3, 1e-5
    epsilon = accounting.epsilon_of(sigma, 1.0, 1, delta, "pld")
    phi = scipy.stats.norm.cdf
    exact = phi(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * phi(
        -0.5 / sigma - epsilon * sigma
    )
    assert exact == pytest.approx(delta, rel=5e-3)


def test_truncation_delta_is_the_binomial_tail_by_hand():
    # n = 4, q = 1/4, M = 3: Pr[Bin ≥ 3] = 4·(1/4)³·(3/4) + (1/4)⁴ = 13/256.
    expected = (1 + math.e) * 5 * 13 / 256
    assert accounting.truncation_delta(4, 0.25, 3, 5, 1.0) == pytest.approx(expected)
    assert accounting.truncation_delta(4, 0.25, 5, 5, 1.0) == 0


def _output_density(values, kept, probability, sigma):
    """Density of one truncated step on real data: a mixture of Gaussians.

    Written from the definition: every subset is drawn with its Poisson
    probability, and every way of keeping `kept` of it is equally likely.
    """
    components = []
    for size in range(len(values) + 1):
        for drawn in itertools.combinations(values, size):
            chance = probability**size * (1 - probability) ** (len(values) - size)
            ways = list(itertools.combinations(drawn, min(size, kept)))
            components += [(chance / len(ways), sum(way)) for way in ways]
    return lambda y: sum(
        weight * scipy.stats.norm.pdf(y, mean, sigma) for weight, mean in components
    )


def _hockey_stick(p, q, epsilon):
    """∫ max(p - e^ε q, 0), the exact δ at ε."""
    grid = np.linspace(-30, 30, 60_001)
    return scipy.integrate.simpson(
        np.maximum(p(grid) - math.exp(epsilon) * q(grid), 0), x=grid
    )


@pytest.mark.parametrize("others", [(1.0, -1.0), (-1.0, -1.0), (1.0, 1.0), (-1.0,)])
@pytest.mark.parametrize("probability, epsilon", [(0.3, 0.1), (0.3, 0.5), (0.95, 2.0)])
def test_truncated_batches_stay_within_delta_plus_its_price(
    others, probability, epsilon
):
    """The claim of accounting.py's docstring, checked by exact integration.

    Contributions are bounded by C = 1, and x = 1 is the unit that differs. With
    the other units against x, truncation moves the output by 2C: leaving the
    price out is wrong in the last of these cases.
    """
    kept, sigma = 1, 0.6
    with_x = _output_density((1.0, *others), kept, probability, sigma)
    without = _output_density(others, kept, probability, sigma)
    exact = max(
        _hockey_stick(with_x, without, epsilon), _hockey_stick(without, with_x, epsilon)
    )
    # δ* of the untruncated step: mixture (1-q)·N(0) + q·N(1) against N(0).
    mixed = _output_density((1.0,), 1, probability, sigma)
    alone = _output_density((), 1, probability, sigma)
    untruncated = max(
        _hockey_stick(mixed, alone, epsilon), _hockey_stick(alone, mixed, epsilon)
    )
    price = accounting.truncation_delta(1 + len(others), probability, kept, 1, epsilon)
    assert exact <= untruncated + price + 1e-9
    if others == (-1.0,) and probability == 0.95:
        assert exact > untruncated  # the price is not idle


def test_maximum_batch_is_the_smallest_that_is_cheap_enough():
    n, batch, steps, epsilon, delta = 10_000, 64, 200, 8.0, 5e-5
    chosen = accounting.choose_max_batch_size(n, batch, steps, epsilon, delta)

    def cost(m):
        return accounting.truncation_delta(n, batch / n, m, steps, epsilon)

    assert cost(chosen) <= 1e-3 * delta < cost(chosen - 1)

"""What batches cost: Poisson ones, truncation's price, and shuffled ones."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from tfdpsq.privacy import accounting


def _gaussian_delta(sensitivity, epsilon):
    """Balle & Wang 2018, theorem 8: δ(ε) of the Gaussian mechanism, exactly.

    `sensitivity` is in units of the noise's deviation.
    """
    phi = scipy.stats.norm.cdf
    return phi(sensitivity / 2 - epsilon / sensitivity) - math.exp(epsilon) * phi(
        -sensitivity / 2 - epsilon / sensitivity
    )


@pytest.mark.parametrize("sigma, releases", [(1.3, 1), (2.0, 3), (5.0, 40)])
def test_gaussian_epsilon_equals_the_closed_form(sigma, releases):
    """k Gaussian releases are one with deviation σ/√k."""
    delta = 1e-5
    epsilon = accounting.composed_epsilon(((sigma, 1.0, releases),), delta, "pld")
    exact = _gaussian_delta(math.sqrt(releases) / sigma, epsilon)
    assert exact == pytest.approx(delta, rel=5e-3)
    assert exact <= delta
    # RDP is no exact accountant, but must be a true one.
    by_rdp = accounting.composed_epsilon(((sigma, 1.0, releases),), delta, "rdp")
    assert epsilon < by_rdp < 1.15 * epsilon


@pytest.mark.parametrize(
    "sigma, releases, delta",
    [(100 / 3, 10**4, 1e-9), (100 / 3, 10**4, 1e-12), (10.0, 1000, 1e-11)],
)
def test_rounding_never_makes_epsilon_by_pld_too_small(sigma, releases, delta):
    """At 1e-12 dp-accounting's own figure is .12 % too small, at 1e-9 1.3e-6.

    Drawn with probability one but for rounding, so that it does not know the closed
    form.
    """
    one = (sigma, 1 - 2e-16, releases)
    epsilon = accounting.composed_epsilon((one,), delta, "pld")
    if math.isfinite(epsilon):
        assert delta > 1e-10
        exact = _gaussian_delta(math.sqrt(releases) / sigma, epsilon)
        assert 0.99 * delta < exact <= delta
    else:
        assert delta < 1e-10
    by_rdp = accounting.composed_epsilon((one,), delta, "rdp")
    assert _gaussian_delta(math.sqrt(releases) / sigma, by_rdp) <= delta


def _sampled_delta(sigma, probability, epsilon):
    """The δ of one Poisson-sampled Gaussian release at ε, a unit removed."""
    excess = math.expm1(epsilon) / probability  # of the likelihood ratio above 1
    threshold = sigma**2 * math.log1p(excess) + 0.5
    with_unit, without = scipy.stats.norm.sf(
        np.array([threshold - 1, threshold]) / sigma
    )
    return probability * (with_unit - without) - math.expm1(epsilon) * without


@pytest.mark.parametrize("sigma, probability", [(20.0, 1e-6), (5.0, 1e-8), (0.4, 1e-4)])
@pytest.mark.parametrize("delta", [1e-16, 1e-12, 1e-9])
def test_rounding_never_makes_epsilon_by_rdp_too_small(sigma, probability, delta):
    """dp-accounting computes a divergence of 1e-15 as 0: ε was 0 for any steps."""
    epsilon = accounting.composed_epsilon(((sigma, probability, 1),), delta, "rdp")
    assert _sampled_delta(sigma, probability, epsilon) <= delta


def test_truncation_delta_is_the_binomial_tail_by_hand():
    # The three others of n = 4, q = 1/4: Pr[Bin ≥ 2] = 3·(1/4)²·(3/4) + (1/4)³ = 10/64.
    assert accounting.truncation_delta(4, 0.25, 2, 5) == pytest.approx(5 * 10 / 64)
    assert accounting.truncation_delta(4, 0.25, 4, 5) == 0


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
@pytest.mark.parametrize(
    "probability, epsilon", [(0.3, 0.1), (0.3, 0.5), (0.95, 2.0), (0.5, 4.0)]
)
def test_one_truncated_step_stays_within_delta_plus_truncation_delta(
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
    price = accounting.truncation_delta(1 + len(others), probability, kept, 1)
    assert exact <= untruncated + price + 1e-9
    if others == (-1.0,) and probability == 0.95:
        assert exact > untruncated  # the price is not idle


_GRID = np.linspace(-5, 5, 501)


def _two_step_delta(p, q, sigma, epsilon):
    """Exact δ at ε of two-step outputs, mixtures of (weight, mean, mean), both ways."""

    def density(mixture):
        return sum(
            weight
            * np.multiply.outer(
                scipy.stats.norm.pdf(_GRID, first, sigma),
                scipy.stats.norm.pdf(_GRID, second, sigma),
            )
            for weight, first, second in mixture
        )

    p, q = density(p), density(q)

    def integral(excess):
        inner = scipy.integrate.simpson(np.maximum(excess, 0), x=_GRID)
        return scipy.integrate.simpson(inner, x=_GRID)

    return max(integral(p - math.exp(epsilon) * q), integral(q - math.exp(epsilon) * p))


def _twice(step):
    return [(a * b, x, y) for a, x in step for b, y in step]


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("other", [-1.0, 1.0])
@pytest.mark.parametrize("replaced", [False, True])
def test_two_truncated_steps_stay_within_delta_plus_truncation_delta(
    replaced, other, epsilon
):
    """The price does not grow with e^ε, and adds up over steps.

    A unit that is replaced by nothing keeps its place, which cuts off the other unit as
    often as before.
    """
    probability, sigma = 0.6, 0.5
    none, one = (1 - probability), probability
    # x = 1 and `other`, at most one of them kept, whichever it is.
    taken, cut = one * none + one * one / 2, none * one + one * one / 2
    with_x = [(none * none, 0.0), (taken, 1.0), (cut, other)]
    without = [(none, 0.0), (one, other)]
    if replaced:
        without = [(none * none + taken, 0.0), (cut, other)]
    exact = _two_step_delta(_twice(with_x), _twice(without), sigma, epsilon)
    alone = _two_step_delta(
        _twice([(none, 0.0), (one, 1.0)]), _twice([(1.0, 0.0)]), sigma, epsilon
    )
    assert exact <= alone + accounting.truncation_delta(2, probability, 1, 2) + 1e-6


@pytest.mark.parametrize("other", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("sigma", [0.4, 0.9])
def test_shuffled_epoch_costs_one_gaussian_release_and_more_than_poisson(
    other, epsilon, sigma
):
    """The claim of accounting.py's docstring, checked by exact integration.

    Two units in batches of one: x gives 1, or nothing, and the other unit gives
    `other`; which comes first is a coin's choice. The observer sees both steps.
    """
    with_x = [(0.5, 1.0, other), (0.5, other, 1.0)]
    zeroed = [(0.5, 0.0, other), (0.5, other, 0.0)]
    exact = _two_step_delta(with_x, zeroed, sigma, epsilon)
    accounted = _gaussian_delta(1 / sigma, epsilon)
    assert exact <= accounted * (1 + 1e-6)
    if other == -1.0 and sigma == 0.4:
        # The other unit gives the order away, so the bound is all but reached, and
        # two Poisson steps at q = 1/2 would claim less than what is true.
        assert exact > 0.9 * accounted
        pld = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
        pld.compose(accounting.training_event(sigma, 0.5, 2))
        if epsilon == 4.0:
            assert pld.get_delta(epsilon) < 0.95 * exact

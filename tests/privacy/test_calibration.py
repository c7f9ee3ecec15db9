"""Calibrated noise reaches its target and never exceeds it, on random specs.

What "never exceeds, by both accountants" can mean: each accountant bounds the true ε
from above, and RDP's bound is the looser one. So a plan calibrated with RDP keeps the
target by both. One calibrated with PLD keeps it by PLD, and RDP's bound on it lies
higher, which is no spending beyond the target but what RDP fails to show. Hence for
every spec, with each accountant as the one that calibrates:

- ε by the calibrating accountant is within 1 % below the target, never above;
- ε by PLD never exceeds the target, whoever calibrated;
- ε by PLD never exceeds ε by RDP;
- fewer steps executed never cost more, by either.
"""

import dataclasses
import math

import numpy as np
import pytest
from helpers import plans

from tfdpsq.privacy import accounting, make_plan, verify_certificate
from tfdpsq.privacy.accounting import calibrate_noise_multiplier, epsilon_of
from tfdpsq.privacy.spec import PrivacySpec
from tfdpsq.validation import InputError


def _random_spec(seed):
    """A valid spec; every field takes part."""
    random = np.random.default_rng(seed)
    n = int(np.exp(random.uniform(np.log(200), np.log(1_000_000))))
    shuffled = bool(random.random() < 0.3)
    user = bool(random.random() < 0.3)
    return PrivacySpec(
        epsilon=float(np.exp(random.uniform(np.log(0.3), np.log(16)))),
        clip_norm=float(random.uniform(0.01, 2)),
        num_units=n,
        batch_size=int(random.integers(max(1, n // 500), max(2, n // 4))),
        steps=int(random.integers(1, 1000)),
        delta=None if random.random() < 0.5 else float(random.uniform(0.01, 0.9) / n),
        unit="user" if user else "query",
        sampler="shuffled" if shuffled else "poisson",
        sensitivity_multiplier=float(random.choice([1.0, 2.0, 63.0])),
        n_is_public=shuffled or bool(random.random() < 0.5),
        rows_per_unit=int(random.integers(1, 5)) if user else 1,
    )


def _check(seed):
    spec, random = _random_spec(seed), np.random.default_rng([seed])
    sigma = {}
    for accountant in ("pld", "rdp"):
        plan = make_plan(dataclasses.replace(spec, accountant=accountant))
        sigma[accountant] = plan.noise_multiplier
        spent = {name: plan.epsilon(spec.steps, name) for name in ("pld", "rdp")}
        assert 0.99 * spec.epsilon <= spent[accountant] <= spec.epsilon
        assert spent["pld"] <= spec.epsilon
        assert spent["pld"] <= spent["rdp"]
        executed = int(random.integers(spec.steps + 1))
        assert 0 <= plan.epsilon(executed) <= spent[accountant]
        assert plan.epsilon(0) == 0
        assert plan.truncation_delta(spec.steps) <= 1e-3 * spec.target_delta
        assert plan.noise_stddev == pytest.approx(
            plan.noise_multiplier * spec.sensitivity_multiplier * spec.clip_norm
        )
    # The tighter accountant asks for no more noise, but for what the search leaves.
    assert sigma["pld"] <= 1.005 * sigma["rdp"]


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 8))]
)
def test_calibration_reaches_the_target_and_never_exceeds_it(seed):
    _check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 300))
def test_calibration_on_many_random_specs(seed):
    _check(seed)


def test_a_batch_size_of_the_users_choice_is_calibrated_for():
    """Truncation may cost a large part of δ: the rest must do."""
    spec = PrivacySpec(
        epsilon=4.0,
        clip_norm=1.0,
        num_units=500,
        batch_size=50,
        steps=20,
        max_batch_size=80,
        accountant="rdp",
    )
    plan = make_plan(spec)
    assert plan.truncation_delta(20) > 0.1 * spec.target_delta
    assert 0.98 * 4 <= plan.epsilon(20) <= 4
    free = make_plan(dataclasses.replace(spec, max_batch_size=None))
    assert free.noise_multiplier < plan.noise_multiplier


@pytest.mark.parametrize("epsilon", [0.02, 60.0])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_extreme_targets_are_reached_too(epsilon, accountant):
    sigma = calibrate_noise_multiplier(epsilon, 1e-6, 1.0, 3, accountant)
    assert epsilon_of(sigma, 1.0, 3, 1e-6, accountant) <= epsilon
    assert epsilon_of(0.99 * sigma, 1.0, 3, 1e-6, accountant) > epsilon


def test_a_target_out_of_reach_is_refused():
    with pytest.raises(InputError, match="no noise multiplier below 1e6 reaches"):
        calibrate_noise_multiplier(1e-7, 1e-9, 1.0, 10**9, "rdp")


@pytest.mark.parametrize("delta", [1e-16, 1e-20])
def test_a_delta_below_the_rounding_errors_of_pld_is_refused(delta):
    """It was reached, or not even that, with a noise multiplier of thousands."""
    batches = (8.0, delta, 256 / 20000, 50)
    assert calibrate_noise_multiplier(*batches, "rdp") < 1
    with pytest.raises(InputError, match="delta is 1e-(16|20), too small .*'rdp'"):
        calibrate_noise_multiplier(*batches, "pld")


def test_a_delta_that_only_many_steps_round_away_is_refused():
    """Verified, ε by PLD was 2.018 here, where it had to be 2."""
    many = (2.0, 1e-13, 1000 / 500000, 30000)
    assert calibrate_noise_multiplier(*many, "rdp") < 3
    with pytest.raises(InputError, match="delta is 1e-13, too small .*'rdp'"):
        calibrate_noise_multiplier(*many, "pld")
    delta = 1.5 * accounting.LEAST_DELTA_IN_ROUNDING * accounting.pld_rounding(30000)
    sigma = calibrate_noise_multiplier(2.0, delta, *many[2:], "pld")
    assert sigma < calibrate_noise_multiplier(2.0, delta, *many[2:], "rdp")


def test_a_plan_whose_certificate_would_not_verify_is_refused():
    spec = PrivacySpec(
        epsilon=250.0, clip_norm=1.0, num_units=1000, batch_size=10, steps=100
    )
    with pytest.raises(InputError, match="epsilon is 250, which by RDP is 8"):
        make_plan(spec)


def test_no_steps_are_too_few_to_be_planned_for():
    plan = make_plan(
        PrivacySpec(epsilon=1.0, clip_norm=1.0, num_units=100, batch_size=1, steps=1)
    )
    assert math.isfinite(plan.noise_stddev)
    assert 0.99 <= plan.epsilon(1) <= 1


def test_an_epsilon_in_the_hundreds_is_planned_by_pld():
    """Its sums round into no distribution for some noise on the way there."""
    spec = PrivacySpec(
        epsilon=300.0,
        clip_norm=1.0,
        num_units=200,
        n_is_public=True,
        batch_size=40,
        steps=4,
        accountant="pld",
    )
    plan = make_plan(spec)
    assert 0.9 * 300 < plan.epsilon(4) <= 300
    stated = plans.certificate(plan)
    assert verify_certificate(stated).problems == ()
    more = dataclasses.replace(spec, epsilon=301.0)
    with pytest.raises(InputError, match="epsilon is 301; it may be 300 at most"):
        make_plan(more)

"""A plan: one object for the batches that run and for what they cost."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
import scipy.stats

from tfdpsq.privacy import Groups, PrivacySpec, make_plan
from tfdpsq.privacy import plan as plans
from tfdpsq.privacy.accounting import training_event
from tfdpsq.privacy.randomness.sampling import (
    PoissonSampler,
    ShuffledSampler,
    UserSampler,
)
from tfdpsq.validation import InputError

_GOOD = dict(
    epsilon=2.0, clip_norm=0.5, num_units=60, batch_size=6, steps=25, accountant="rdp"
)
_SHUFFLED = dict(sampler="shuffled", n_is_public=True)
# Thirty users: user u owns the rows u, u + 30 and, if u is even, u + 60.
_GROUPS = Groups.of([row % 30 for row in range(90) if row < 60 or row % 2 == 0])


def _plan(**changes):
    return make_plan(PrivacySpec(**{**_GOOD, **changes}))


def test_poisson_batches_are_accounted_for_as_poisson_samples():
    plan = _plan()
    sampler = plan.sampler(seed=1)
    assert isinstance(sampler, PoissonSampler)
    assert sampler.sampling_probability == plan.sampling_probability == 0.1
    assert sampler.max_batch_size == plan.max_batch_size == plan.max_rows
    assert plan.releases(7) == (0.1, 7)


def test_shuffled_batches_cost_every_epoch_without_amplification():
    plan = _plan(**_SHUFFLED)
    sampler = plan.sampler(seed=1)
    assert isinstance(sampler, ShuffledSampler)
    assert sampler.max_batch_size == plan.max_batch_size == 6
    # 60 // 6 = 10 steps an epoch: 25 steps touch 3 epochs.
    for steps, epochs in ((1, 1), (10, 1), (11, 2), (20, 2), (25, 3)):
        assert plan.releases(steps) == (1.0, epochs)
    assert plan.truncation_delta(25) == 0
    assert plan.epsilon(1) == plan.epsilon(10) < plan.epsilon(11)
    with pytest.raises(InputError, match="accountant is 'bogus'; choose one of"):
        plan.epsilon(1, "bogus")
    # What Poisson accounting would say of the same noise is lower, and not said.
    poisson = dataclasses.replace(_plan(), noise_multiplier=plan.noise_multiplier)
    assert poisson.epsilon(25) < 0.7 * plan.epsilon(25)


def test_unit_is_drawn_once_an_epoch_and_in_no_more_epochs_than_counted():
    """`releases` rests on this: count a unit's batches, epoch by epoch and in all."""
    plan = _plan(
        num_units=61, batch_size=7, **_SHUFFLED
    )  # 8 steps an epoch, 5 units left
    sampler = plan.sampler(seed=3)
    seen = np.zeros((4, 61), int)
    for step in range(25):
        draw = sampler.draw(step)
        seen[step // 8, draw.indices[draw.weights > 0]] += 1
    assert seen.max() == 1
    assert seen.sum(axis=0).max() <= plan.releases(25)[1] == 4


def test_a_plan_for_users_draws_users_and_rows_of_each():
    plan = _plan(num_units=30, unit="user", rows_per_unit=3, epsilon=math.inf)
    assert plan.max_rows == 3 * plan.max_batch_size
    draw = plan.sampler(seed=1, groups=_GROUPS).draw(0)
    assert len(draw.indices) == len(draw.weights) == plan.max_rows
    shuffled = _plan(num_units=30, unit="user", **_SHUFFLED).sampler(groups=_GROUPS)
    assert isinstance(shuffled, UserSampler)
    assert isinstance(shuffled.units, ShuffledSampler)


def test_fewer_units_than_the_bound_are_sampled_with_its_probability():
    """Else the sampling probability would give away how many there are."""
    sampler = _plan(epsilon=math.inf).sampler(units=45)
    assert sampler.n == 45
    assert sampler.sampling_probability == 0.1
    assert max(sampler.draw(step).indices.max() for step in range(50)) <= 44


@pytest.mark.parametrize(
    "spec, options, message",
    [
        ({}, dict(units=61), "is 60, but the data have more units"),
        (dict(n_is_public=True), dict(units=59), "have 59 units"),
        ({}, dict(groups=_GROUPS), "unit is 'query'"),
        (dict(unit="user"), {}, "'user' needs Groups"),
        (dict(unit="user", num_units=20), dict(groups=_GROUPS), "is 20, but"),
    ],
)
def test_data_that_do_not_fit_the_plan_are_refused(spec, options, message):
    plan = _plan(epsilon=math.inf, **spec)  # saves the search for noise
    with pytest.raises(InputError, match=message):
        plan.sampler(**options)


def test_every_field_that_decides_what_runs_changes_the_fingerprint():
    plan = _plan()
    assert plan.fingerprint == _plan().fingerprint
    assert len(plan.fingerprint) == 64
    # The same number as another type is the same plan.
    assert _plan(num_units=np.int64(60), delta=1 / 120).fingerprint == plan.fingerprint
    changes = [
        dict(epsilon=2.5),
        dict(clip_norm=0.4),
        dict(num_units=61),
        dict(batch_size=7),
        dict(steps=26),
        dict(delta=1e-3),
        dict(unit="user"),
        dict(unit="user", rows_per_unit=2),
        dict(n_is_public=True),
        _SHUFFLED,
        dict(accountant="pld"),
        dict(sensitivity_multiplier=2.0),
        dict(sensitivity_multiplier=2.0, num_microbatches=3),
        dict(secure=True),
    ]
    # Of the largest batch, what counts is the one that runs.
    fields = {field.name for field in dataclasses.fields(PrivacySpec)}
    assert set().union(*changes) == fields - {"max_batch_size"}
    others = [
        dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, **change))
        for change in changes
    ]
    more = math.nextafter(plan.noise_multiplier, 9)
    others.append(dataclasses.replace(plan, max_batch_size=plan.max_batch_size + 1))
    others.append(dataclasses.replace(plan, noise_multiplier=more))
    prints = {plan.fingerprint} | {one.fingerprint for one in others}
    assert len(prints) == len(others) + 1


def test_epsilon_by_rdp_that_verify_would_not_compute_is_refused(monkeypatch):
    """Where δ is nearly q, an ε of 300 by PLD is above 500 by RDP."""
    monkeypatch.setattr(plans, "LARGEST_EPSILON", 2.05)
    assert _plan().epsilon(25) <= 2.0
    with pytest.raises(InputError, match="epsilon is 2; .* 2.05 by RDP"):
        _plan(accountant="pld")


def test_noise_multiplier_has_six_digits_on_every_machine():
    sigma = _plan().noise_multiplier
    assert sigma == float(f"{sigma:.6g}")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_is_at_the_delta_that_truncation_leaves(accountant):
    """At the stated ε, what dp-accounting says of δ and truncation's τ are δ.

    M is so small that cutting batches off costs a fifth of δ or more.
    """
    plan = _plan(
        num_units=400,
        batch_size=40,
        steps=30,
        max_batch_size=67,
        accountant=accountant,
    )
    target = plan.spec.target_delta
    assert 0.2 < plan.truncation_delta(30) / target < 0.8
    assert 0.98 * 2 <= plan.epsilon(30) <= 2
    for steps in (1, 30):
        event = training_event(plan.noise_multiplier, 0.1, steps)
        library = dp_accounting.rdp.RdpAccountant()
        if accountant == "pld":
            library = dp_accounting.pld.PLDAccountant()
        spent = library.compose(event).get_delta
        tail = steps * scipy.stats.binom.sf(66, 399, 0.1)  # T·Pr[Bin(n - 1, q) >= M]
        epsilon = plan.epsilon(steps)
        # What is stated holds, and hardly anything less would.
        assert spent(epsilon) + tail <= target * (1 + 1e-9)
        assert spent(epsilon - 1e-3) + tail > target
        assert plan.epsilon_so_far(steps) >= (1 - 1e-9) * epsilon

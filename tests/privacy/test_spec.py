"""Which specs are refused, and what a spec decides."""

import math

import pytest

from tfdpsq.privacy import PrivacySpec, make_plan
from tfdpsq.validation import InputError

_GOOD = dict(epsilon=8.0, clip_norm=0.1, num_units=1000, batch_size=32, steps=10)
_SHUFFLED = dict(sampler="shuffled", n_is_public=True)
_DEALT = dict(num_microbatches=4, sensitivity_multiplier=2.0)


def _spec(**changes):
    return PrivacySpec(**{**_GOOD, **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(epsilon=0.0), "epsilon is 0.0"),
        (dict(epsilon=math.nan), "epsilon is nan"),
        (dict(clip_norm=10**400), "clip_norm is 1000"),
        (dict(clip_norm="8"), "clip_norm is '8'"),
        (dict(steps=0), "steps is 0"),
        (dict(delta=0.0), "delta is 0.0"),
        (dict(unit="household"), "'query', 'pair', 'user'"),
        (dict(sampler="shuffle"), "'poisson', 'shuffled'"),
        (dict(accountant="moments"), "accountant is 'moments'"),
        (dict(max_batch_size=0), "max_batch_size is 0"),
        (dict(n_is_public="yes"), "n_is_public is 'yes'"),
        (dict(secure="yes"), "secure is 'yes'"),
        (dict(batch_size=1001), "batch_size to at most 1000"),
        (dict(max_batch_size=16), "max_batch_size 16"),
        (dict(delta=0.001), "0.0005"),
        (dict(rows_per_unit=3), "rows_per_unit is 3.*unit is 'query'"),
        (dict(unit="user", rows_per_unit=0), "rows_per_unit is 0"),
        (dict(max_batch_size=32, **_SHUFFLED), "max_batch_size"),
        (dict(sampler="shuffled"), "n_is_public is False"),
        (dict(sensitivity_multiplier=0.5), "sensitivity_multiplier is 0.5"),
        (dict(num_microbatches=4), "sensitivity_multiplier to 2"),
        (dict(**_DEALT, **_SHUFFLED), "sampler"),
        (dict(unit="user", **_DEALT), "unit 'user'"),
        (dict(_DEALT, num_microbatches=33), "num_microbatches is 33"),
    ],
)
def test_bad_or_clashing_values_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        _spec(**changes)


@pytest.mark.parametrize("clip_norm", [2e-38, 1e30])
def test_noise_outside_the_range_of_float32_is_refused(clip_norm):
    """At a clip norm of 2e-38 all noise was 0, and the clipped gradients were not."""
    import tensorflow as tf

    with pytest.raises(InputError, match="noise would leave the range of float32"):
        _spec(clip_norm=clip_norm)
    _spec(clip_norm=clip_norm, epsilon=math.inf)  # neither clipped nor noised
    plan = make_plan(_spec(clip_norm=1e-18))
    draw = tf.function(
        lambda: tf.random.stateless_normal([10_000], [1, 2], stddev=plan.noise_stddev)
    )()
    assert float(tf.math.reduce_std(draw)) == pytest.approx(plan.noise_stddev, rel=0.05)


def test_delta_defaults_to_half_of_one_over_n_and_more_is_warned_of():
    assert _spec().target_delta == 1 / 2000
    assert _spec().delta_warning is None
    assert _spec(delta=5e-4).delta_warning is None
    assert "0.0009" in _spec(delta=9e-4).delta_warning


def test_truncation_that_uses_up_delta_is_refused():
    with pytest.raises(ValueError, match="max_batch_size 32"):
        make_plan(_spec(max_batch_size=32, accountant="rdp"))


def test_infinite_epsilon_is_a_plan_without_noise():
    plan = make_plan(_spec(epsilon=math.inf))
    assert plan.noise_stddev == 0
    assert plan.epsilon(10) == math.inf
    assert plan.epsilon(0) == 0

"""What a spec refuses, and what it says."""

import math

import pytest
from absl import logging

from tfdpsq.privacy import PrivacySpec, make_plan
from tfdpsq.validation import InputError

_GOOD = dict(epsilon=8.0, clip_norm=0.1, num_units=1000, batch_size=32, steps=10)
_SHUFFLED = dict(sampler="shuffled", n_is_public=True)


def _spec(**changes):
    return PrivacySpec(**{**_GOOD, **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(epsilon=0.0), "epsilon is 0.0"),
        (dict(epsilon=-1.0), "epsilon is -1.0"),
        (dict(epsilon=math.nan), "epsilon is nan"),
        (dict(epsilon=10**400), "epsilon is 1000"),
        (dict(clip_norm=10**400), "clip_norm is 1000"),
        (dict(epsilon="8"), "epsilon is '8'"),
        (dict(clip_norm=0.0), "clip_norm is 0.0"),
        (dict(steps=0), "steps is 0"),
        (dict(num_units=0), "num_units is 0"),
        (dict(delta=0.0), "delta is 0.0"),
        (
            dict(unit="household"),
            "unit is 'household'; choose one of 'query', 'pair', 'user'",
        ),
        (dict(sampler="shuffle"), "sampler is 'shuffle'; .*'poisson', 'shuffled'"),
        (dict(accountant="moments"), "accountant is 'moments'"),
        (dict(max_batch_size=0), "max_batch_size is 0"),
        (dict(sensitivity_multiplier=0.0), "sensitivity_multiplier is 0.0"),
        (dict(unit="user", rows_per_unit=0), "rows_per_unit is 0"),
        (dict(n_is_public=1), "n_is_public is 1; say True or False"),
    ],
)
def test_bad_values_are_named_with_a_remedy(changes, message):
    with pytest.raises(InputError, match=message):
        _spec(**changes)


@pytest.mark.parametrize(
    "changes, both, remedy",
    [
        (
            dict(batch_size=1001),
            ("batch_size 1001", "num_units is 1000"),
            "Lower batch_size to at most 1000",
        ),
        (
            dict(max_batch_size=16),
            ("max_batch_size 16", "batch_size 32"),
            "Raise max_batch_size",
        ),
        (
            dict(delta=0.001),
            ("delta is 0.001", "num_units is 1000"),
            "Use 1/(2n) = 0.0005",
        ),
        (
            dict(rows_per_unit=3),
            ("rows_per_unit is 3", "unit is 'query'"),
            "Set rows_per_unit to 1, or unit to 'user'",
        ),
        (
            dict(max_batch_size=32, **_SHUFFLED),
            ("sampler is 'shuffled'", "max_batch_size is 32"),
            "Leave max_batch_size unset, or set sampler to 'poisson'",
        ),
        (
            dict(sampler="shuffled"),
            ("sampler is 'shuffled'", "n_is_public is False"),
            "Set n_is_public to True",
        ),
        (
            dict(sensitivity_multiplier=0.5),
            ("sensitivity_multiplier is 0.5", "clip_norm is 0.1"),
            "Set sensitivity_multiplier to 1 or more",
        ),
        (
            dict(clip_groups=4),
            ("clip_groups is 4", "sensitivity_multiplier 1.0"),
            "Set sensitivity_multiplier to 2",
        ),
        (
            dict(clip_groups=4, sensitivity_multiplier=2.0, **_SHUFFLED),
            ("clip_groups is 4", "sampler 'shuffled'"),
            "Set sampler to 'poisson'",
        ),
        (
            dict(clip_groups=4, sensitivity_multiplier=2.0, unit="user"),
            ("clip_groups is 4", "unit 'user'"),
            "Set unit to 'query'",
        ),
        (
            dict(clip_groups=33, sensitivity_multiplier=2.0),
            ("clip_groups is 33", "batch_size 32"),
            "Lower clip_groups",
        ),
    ],
)
def test_two_values_that_clash_are_both_named_with_a_way_out(changes, both, remedy):
    with pytest.raises(InputError) as caught:
        _spec(**changes)
    for named in (*both, remedy):
        assert named in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        dict(batch_size=1000),
        dict(max_batch_size=32),
        dict(unit="user", rows_per_unit=3),
        dict(unit="pair"),
        dict(unit="pair", clip_groups=4, sensitivity_multiplier=2.0),
        dict(unit="user", rows_per_unit=3, **_SHUFFLED),
        dict(n_is_public=True),
        dict(sensitivity_multiplier=63.0, **_SHUFFLED),
        # The baseline differs from a private run by ε alone.
        dict(epsilon=math.inf, delta=1e-4, max_batch_size=80, accountant="rdp"),
    ],
)
def test_what_is_consistent_is_taken(changes):
    _spec(**changes)


@pytest.mark.parametrize("clip_norm", [2e-38, 1e-300, 1e30])
def test_noise_that_float32_does_not_have_is_refused(clip_norm):
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


def test_delta_defaults_to_half_of_one_over_n():
    assert _spec().target_delta == 1 / 2000
    assert _spec().delta_warning is None
    assert _spec(delta=5e-4).delta_warning is None


def test_a_delta_above_one_over_2n_is_warned_of(monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda form, text: said.append(text))
    spec = _spec(delta=9e-4)
    assert said == [spec.delta_warning]
    assert "delta 0.0009 is above 1/(2n) = 0.0005" in spec.delta_warning


def test_truncation_that_uses_up_delta_is_refused():
    with pytest.raises(ValueError, match="max_batch_size 33 truncates so often"):
        make_plan(_spec(max_batch_size=33, accountant="rdp"))


def test_infinite_epsilon_is_a_plan_without_noise():
    plan = make_plan(_spec(epsilon=math.inf))
    assert plan.noise_stddev == 0
    assert plan.epsilon(10) == math.inf
    assert plan.epsilon(0) == 0

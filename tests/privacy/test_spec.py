"""What a spec refuses, and what it says."""

import math

import pytest

from tfdpsq.privacy import PrivacySpec, make_plan

_GOOD = dict(epsilon=8.0, clip_norm=0.1, n=1000, batch_size=32, steps=10)


def _spec(**changes):
    return PrivacySpec(**{**_GOOD, **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(epsilon=0.0), "epsilon is 0.0"),
        (dict(epsilon=-1.0), "epsilon is -1.0"),
        (dict(epsilon=math.nan), "epsilon is nan"),
        (dict(epsilon="8"), "epsilon is '8'"),
        (dict(clip_norm=0.0), "clip_norm is 0.0"),
        (dict(batch_size=1001), "batch_size 1001 is larger than the data: n is 1000"),
        (dict(steps=0), "steps is 0"),
        (dict(n=0), "n is 0"),
        (dict(delta=0.001), r"delta is 0.001, but n is 1000.*Use 1/\(2n\) = 0.0005"),
        (dict(delta=0.0), "delta is 0.0"),
        (dict(unit="household"), "unit is 'household'; choose one of 'query'"),
        (dict(sampler="shuffle"), "sampler is 'shuffle'"),
        (dict(accountant="moments"), "accountant is 'moments'"),
        (dict(max_batch_size=16), "max_batch_size 16 is below the expected"),
        (dict(sensitivity_multiplier=0.0), "sensitivity_multiplier is 0.0"),
    ],
)
def test_bad_values_are_named_with_a_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        _spec(**changes)


def test_delta_defaults_to_half_of_one_over_n():
    assert _spec().target_delta == 1 / 2000
    assert _spec().delta_warning is None
    assert "above 1/(2n)" in _spec(delta=9e-4).delta_warning


def test_truncation_that_uses_up_delta_is_refused():
    with pytest.raises(ValueError, match="max_batch_size 33 truncates so often"):
        make_plan(_spec(max_batch_size=33, accountant="rdp"))


def test_infinite_epsilon_is_a_plan_without_noise():
    plan = make_plan(_spec(epsilon=math.inf))
    assert plan.noise_stddev == 0
    assert plan.epsilon(10) == math.inf
    assert plan.epsilon(0) == 0

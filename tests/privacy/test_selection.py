"""A run chosen among several: the exponential mechanism, and what all runs cost."""

import math

import dp_accounting
import numpy as np
import pytest
import scipy.stats
from helpers import plans as helper
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpsq.privacy import (
    PrivacySpec,
    Selection,
    TrainedRun,
    make_plan,
    make_selection_certificate,
    share_epsilon,
    verify_certificate,
)
from tfdpsq.privacy.proof import choice
from tfdpsq.privacy.proof.certificate import digest_of
from tfdpsq.validation import InputError


def _probabilities(sums, epsilon):
    """The chances that `choice` states, as its formula has them."""
    weights = [math.exp(epsilon * value) for value in sums]
    return np.array(weights) / math.fsum(weights)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(), min_size=3, max_size=3), min_size=2, max_size=6),
    st.floats(0.05, 8.0),
)
def test_one_query_moves_no_probability_by_more_than_e_to_the_epsilon(scores, epsilon):
    """Whatever its scores are: those outside of [0, 1] count as the nearer of both."""
    before, after = (
        _probabilities([choice.sum_of_scores(column) for column in zip(*rows)], epsilon)
        for rows in (scores[1:], scores)
    )
    assert (after / before).max() <= math.exp(epsilon) * (1 + 1e-9)
    assert (after / before).min() >= math.exp(-epsilon) * (1 - 1e-9)


def test_draws_follow_the_probabilities_and_no_other_scale():
    epsilon, sums, draws = 0.7, [0.0, 1.0, 2.5, 3.0, 0.5], 60_000
    counts = np.bincount(
        [choice.choose(sums, epsilon) for _ in range(draws)], minlength=len(sums)
    )

    def p_value(scale):
        expected = draws * _probabilities(sums, scale * epsilon)
        return scipy.stats.chisquare(counts, expected).pvalue

    assert p_value(1.0) > 1e-6
    for wrong in (0.5, 2.0, 0.9, 1.1):
        assert p_value(wrong) < 1e-9, wrong
    for none in ((sums, math.nan), ([], 1.0)):
        with pytest.raises(InputError):
            choice.choose(*none)


_EPSILON, _DELTA, _N = 1.0, 2.5e-4, 2000
# Runs of different batches and lengths, three of which cost the same.
_SHAPES = {"a": (100, 8), "b": (50, 16), "c": (100, 8), "d": (100, 8)}


@pytest.fixture(scope="module")
def plans():
    specs = [
        PrivacySpec(9.0, 0.5, _N, size, steps, accountant="rdp")
        for size, steps in _SHAPES.values()
    ]
    shared = share_epsilon(specs, _EPSILON, _DELTA)
    return dict(zip(_SHAPES, map(make_plan, shared)))


def _selection(plans, **changes):
    values = dict(
        runs={
            name: TrainedRun(plan, {"learning_rate": 0.1 * i}, f"{i}" * 64, name == "d")
            for i, (name, plan) in enumerate(plans.items())
        },
        chosen="b",
        target_epsilon=_EPSILON,
        delta=_DELTA,
        choice_epsilon=_EPSILON,
        score="sentence BLEU",
    )
    return Selection(**{**values, **changes})


@pytest.mark.parametrize("choice_epsilon", [0.2, 3.0, None])
def test_certificate_states_the_larger_epsilon_of_training_and_choice(
    plans, choice_epsilon
):
    selection = _selection(plans, choice_epsilon=choice_epsilon)
    own = helper.certificate(plans["b"], ledger_head=selection.runs["b"].ledger_head)
    certificate = make_selection_certificate(selection, own, ())
    trained = selection.epsilon_of_training()
    library = dp_accounting.rdp.RdpAccountant()
    for plan in plans.values():
        one = dp_accounting.GaussianDpEvent(plan.noise_multiplier)
        sampled = dp_accounting.PoissonSampledDpEvent(plan.spec.batch_size / _N, one)
        library.compose(sampled, plan.spec.steps)
    truncation = sum(p.truncation_delta(p.spec.steps) for p in plans.values())
    assert trained == pytest.approx(library.get_epsilon(_DELTA - truncation), rel=1e-3)
    assert 0.99 * _EPSILON <= trained <= _EPSILON
    assert certificate["guarantee"]["epsilon"] == max(trained, choice_epsilon or 0)
    assert certificate["guarantee"]["delta"] == _DELTA
    assert certificate["accounting"]["steps_executed"] == 8 + 16 + 8 + 8
    assert verify_certificate(certificate).problems == ()
    # A run that is left out shows in the share of δ that each of the others has.
    del certificate["selection"]["runs"]["d"]
    certificate["digest"] = digest_of(certificate)
    assert verify_certificate(certificate).problems

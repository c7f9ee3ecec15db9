"""Runs that start from released weights: what all of them guarantee together.

Every batch is the whole log, so that ε has a closed form.
"""

import dataclasses
import math

import pytest
import scipy.optimize
import scipy.stats
from helpers import plans

from tfdpsq.privacy import PrivacySpec, make_plan, verify_certificate
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof.certificate import verified_runs
from tfdpsq.validation import InputError

_WHOLE = PrivacySpec(
    epsilon=2.0,
    clip_norm=0.5,
    num_units=500,
    batch_size=500,
    max_batch_size=600,
    steps=4,
    delta=1e-5,
)
_SPECS = tuple(
    dataclasses.replace(_WHOLE, epsilon=epsilon, steps=steps)
    for epsilon, steps in ((2.0, 4), (1.0, 7), (1.5, 3))
)
_LARGER = dataclasses.replace(_WHOLE, epsilon=3.0)
_BY_RDP = dataclasses.replace(_WHOLE, accountant="rdp")


def _first(spec=_SPECS[0], head="h1", pairs="p1", steps=None, **stated):
    fingerprints = {"pairs": pairs} if pairs else {}
    return plans.certificate(
        make_plan(spec), steps, fingerprints=fingerprints, run_id=head, **stated
    )


def _next(parent, spec=_SPECS[1], disjoint=None, head="h2", pairs="p2", steps=None):
    return _first(spec, head, pairs, steps, earlier=parent, disjoint=disjoint)


def _gaussian(specs, delta=1e-5, steps=None):
    """ε of Gaussian mechanisms on whole logs (Balle and Wang 2018, theorem 8)."""
    counts = steps or [spec.steps for spec in specs]
    sigmas = [make_plan(spec).noise_multiplier for spec in specs]
    mu = math.sqrt(sum(n / sigma**2 for n, sigma in zip(counts, sigmas)))
    cdf = scipy.stats.norm.cdf

    def excess(epsilon):
        return (
            cdf(mu / 2 - epsilon / mu)
            - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)
            - delta
        )

    return scipy.optimize.brentq(excess, 0.0, 100.0)


def _stated(certificate):
    return certificate["guarantee"]["epsilon"]


@pytest.fixture(scope="module")
def kinds():
    """Certificates of a composed and of a disjoint continuation."""
    parent = _first()
    return {"composed": _next(parent), "time": _next(parent, disjoint="time")}


# -- Certificates of runs that continue others -----------------------------------


def test_one_log_costs_the_composition_and_disjoint_logs_the_larger(kinds):
    first, composed = _first(), kinds["composed"]
    assert _stated(composed) == pytest.approx(_gaussian(_SPECS[:2]), rel=1e-3)
    assert _stated(first) < _stated(composed) < _stated(first) + 1.0
    for disjoint in ("time", "user"):
        apart = _next(first, disjoint=disjoint)
        assert _stated(apart) == _stated(first)
        assert apart["continuation"]["epsilon_of_this_run"] < _stated(apart)
        larger = _next(first, _LARGER, disjoint)
        assert _stated(larger) == larger["continuation"]["epsilon_of_this_run"]
        assert _stated(larger) == pytest.approx(_gaussian([_LARGER]), rel=1e-3)
    for certificate in (composed, apart, larger):
        assert verify_certificate(certificate).problems == ()


def test_delta_is_the_largest_of_disjoint_logs_and_the_smallest_of_one():
    finer = dataclasses.replace(_SPECS[1], delta=1e-6)
    first = _first()
    assert _next(first, finer, "time")["guarantee"]["delta"] == 1e-5
    composed = _next(first, finer)
    assert composed["guarantee"]["delta"] == 1e-6
    whole = _gaussian([_SPECS[0], finer], delta=1e-6)
    assert _stated(composed) == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(
    "second, pairs, third, groups",
    [
        ("time", "p2", "time", [(0,), (1,), (2,)]),
        # The third log shares no query with the first two, which are one.
        (None, "p1", "time", [(0, 1), (2,)]),
        # Where only some are declared disjoint, a bound: all of them.
        (None, "p2", "time", [(0, 1, 2)]),
        ("time", "p2", None, [(0, 1, 2)]),
    ],
)
def test_of_three_runs_those_compose_that_one_unit_can_be_in(
    second, pairs, third, groups
):
    parent = _next(_first(), disjoint=second, pairs=pairs)
    last = _next(parent, _SPECS[2], third, "h3", "p3")
    wanted = max(_gaussian([_SPECS[i] for i in group]) for group in groups)
    assert _stated(last) == pytest.approx(wanted, rel=1e-3)
    assert last["continuation"]["runs_counted"] == 3
    assert verify_certificate(last).problems == ()


def test_epsilon_counts_executed_steps_and_the_sum_counts_planned_ones():
    first, second = _SPECS[:2]
    found = _next(_first(steps=2), steps=5)
    assert _stated(found) == pytest.approx(
        _gaussian([first, second], steps=[2, 5]), rel=1e-3
    )
    summed = _gaussian([first]) + _gaussian([second])
    assert found["continuation"]["epsilon_sum"] == pytest.approx(summed, rel=1e-3)
    assert found["continuation"]["delta_sum"] == pytest.approx(2e-5)
    (warning,) = found["warnings"]
    assert "epsilon_sum" in warning
    assert verify_certificate(found).problems == ()


def test_verification_recomputes_the_total_of_both_runs(kinds):
    for certificate in kinds.values():
        (parent,) = certificate["earlier"]
        lower = {**certificate["guarantee"], "epsilon": 0.9 * _stated(certificate)}
        assert verify_certificate({**certificate, "guarantee": lower}).problems
        lower = {**parent["guarantee"], "epsilon": 0.9 * _stated(parent)}
        drifted = {**certificate, "earlier": [{**parent, "guarantee": lower}]}
        assert verify_certificate(drifted).problems
        with pytest.raises(InputError, match="does not hold"):
            verified_runs(drifted)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"disjoint": "space"}, "disjoint is 'space'"),
        ({"spec": dataclasses.replace(_WHOLE, unit="user")}, "unit"),
        ({"spec": dataclasses.replace(_WHOLE, epsilon=math.inf)}, "epsilon inf"),
        ({"disjoint": "time", "pairs": "p1"}, "p1"),
        ({"disjoint": "time", "pairs": None}, "do not tell the logs apart"),
        ({"head": "h1"}, "two certificates state the run h1"),
    ],
)
def test_runs_that_cannot_continue_another_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        _next(_first(), **changes)


def test_warnings_and_reads_of_earlier_runs_stand_in_the_last_certificate():
    rough = dataclasses.replace(_SPECS[0], num_units=450, batch_size=450, delta=2e-3)
    reads = [{"what": "losses", "where": "terminal"}]
    first = _first(rough, steps=2, private_reads=reads)
    last = _next(
        _next(first, disjoint="time"), _SPECS[2], "time", head="h3", pairs="p3"
    )
    said = " ".join(last["warnings"])
    assert said.count("Training stopped") == 1  # of all runs, not of one alone
    assert "0.002" in said
    assert "losses" in last["private_reads"][0]["what"]
    assert verify_certificate(last).problems == ()


# -- Totals with other releases --------------------------------------------------


def test_plan_within_leaves_what_was_released_before_its_share():
    """Of one ε for both, by the spec's accountant; little of it may be spent before."""
    small = dataclasses.replace(_BY_RDP, epsilon=0.3)
    earlier = verified_runs(_first(small))
    plan = budget.plan_within(_BY_RDP, earlier)
    assert plan.noise_multiplier > make_plan(_BY_RDP).noise_multiplier
    # Four significant digits: all machines find the same plan.
    assert plan.spec.epsilon == float(f"{plan.spec.epsilon:.4g}") < _BY_RDP.epsilon
    own = budget.follow(plan, plan.spec.steps, "p2", earlier)
    total = budget.compose([[own, *earlier]])
    assert 0.98 * _BY_RDP.epsilon < total.epsilon_rdp <= _BY_RDP.epsilon
    for spent in (_SPECS[1], dataclasses.replace(small, epsilon=9.0)):  # most, or more
        with pytest.raises(InputError, match="less than 95%"):
            budget.plan_within(_BY_RDP, verified_runs(_first(spent)))

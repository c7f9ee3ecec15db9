"""Composition of certificates, against dp-accounting and by what it must refuse."""

import dataclasses

import dp_accounting
import pytest
import scipy.stats
from helpers import plans

from tfdpsq.privacy import make_plan
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof.certificate import runs_of, verified_runs
from tfdpsq.validation import InputError

_SPEC = plans.spec(epsilon=1.0, num_units=2000, batch_size=100, steps=20)
# Other noise, sampling, clipping, steps and truncation; the last one stops early.
_SPECS = (
    _SPEC,
    dataclasses.replace(_SPEC, epsilon=3.0, batch_size=200, max_batch_size=262),
    dataclasses.replace(_SPEC, epsilon=2.0, num_units=2500, clip_norm=3.0, steps=30),
)
_EXECUTED = (20, 20, 11)


def _certificate(spec, steps=None, run="0", pairs="keyed:1", rate=0.1, **inputs):
    return plans.certificate(
        make_plan(spec),
        steps,
        training={"learning_rate": rate},
        fingerprints={"pairs": pairs, **inputs},
        run_id=run,
    )


def _run(*arguments, **options):
    """The run of a certificate."""
    (run,) = runs_of(_certificate(*arguments, **options))
    return run


@pytest.fixture(scope="module")
def three():
    """Certificates of three runs, and their runs."""
    made = [
        _certificate(spec, steps, run=str(number))
        for number, (spec, steps) in enumerate(zip(_SPECS, _EXECUTED))
    ]
    return made, [run for each in made for run in verified_runs(each)]


def _by_hand(certificates, *deltas):
    """ε of all certificates at each δ by dp-accounting, from what the files state."""
    accountant = dp_accounting.pld.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    truncation = 0.0
    for certificate in certificates:
        sampler, steps = (
            certificate["sampler"],
            certificate["accounting"]["steps_executed"],
        )
        accountant.compose(
            dp_accounting.PoissonSampledDpEvent(
                sampler["sampling_probability"],
                dp_accounting.GaussianDpEvent(
                    certificate["mechanism"]["noise_multiplier"]
                ),
            ),
            steps,
        )
        # A unit is cut off where as many others were drawn as a batch can hold.
        truncation += steps * scipy.stats.binom.sf(
            sampler["max_batch_size"] - 1,
            sampler["n"] - 1,
            sampler["sampling_probability"],
        )
    return [accountant.get_epsilon(delta - truncation) for delta in deltas]


def test_runs_cost_what_dp_accounting_composes(three):
    made, runs = three
    total = budget.compose([runs])
    # The smallest δ, 1 / (2 · 2500), at which no ε is below a stated one.
    assert (total.runs, total.delta) == (3, 2e-4)
    whole, less = _by_hand(made, 2e-4, 1.2e-4)
    assert total.epsilon_pld == pytest.approx(whole, rel=1e-3)
    for name, found in (("pld", total.epsilon_pld), ("rdp", total.epsilon_rdp)):
        stated = [certificate["accounting"][f"epsilon_{name}"] for certificate in made]
        assert max(stated) < found < sum(stated)
    assert total.epsilon_pld < total.epsilon_rdp
    at = budget.compose([runs], delta=1.2e-4)
    assert at.epsilon_pld == pytest.approx(less, rel=1e-3)


def test_run_that_stopped_early_counts_whole_in_the_sum():
    """Its certificate says so; a total without the condition was told as all of it."""
    early, whole = (_run(_SPEC, steps) for steps in (3, _SPEC.steps))
    found, full = budget.compose([[early]]), budget.compose([[whole]])
    assert (found.stopped_early, full.stopped_early) == (1, 0)
    assert found.epsilon_pld < 0.9 * full.epsilon_pld
    assert found.epsilon_sum == full.epsilon_sum == full.epsilon_pld


def test_post_processing_costs_nothing_and_a_second_run_does(three):
    made, runs = three
    one = budget.compose([runs[:1]])
    assert one.epsilon_pld == pytest.approx(
        made[0]["accounting"]["epsilon_pld"], rel=1e-9
    )
    # A set has the certificate of its generator: the same run, the same steps.
    both = budget.compose([[runs[0], runs[0]]])
    assert (both.runs, both.epsilon_pld) == (1, one.epsilon_pld)
    twice = budget.compose([[runs[0], _run(_SPEC, run="another")]])
    assert (twice.runs, twice.epsilon_pld > 1.2 * one.epsilon_pld) == (2, True)


_SHUFFLED = dataclasses.replace(_SPEC, sampler="shuffled", n_is_public=True)


def test_poisson_and_shuffled_runs_compose_for_zero_out_neighbours(three):
    _, runs = three
    shuffled = _run(_SHUFFLED, run="shuffled")
    total = budget.compose([[runs[0], shuffled]])
    other = budget.compose([[shuffled, runs[0]]])
    for found in (total, other):
        assert found.runs == 2
    assert "(zero-out)" in budget.adjacency_of([runs[0], shuffled])
    assert budget.adjacency_of(runs[:2]) == "add or remove one unit"
    accountant = dp_accounting.pld.PLDAccountant()
    plan, truncation = make_plan(_SPEC), make_plan(_SPEC).truncation_delta(20)
    one = dp_accounting.GaussianDpEvent(plan.noise_multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.05, one), 20)
    # An epoch of 20 steps: one Gaussian release.
    accountant.compose(
        dp_accounting.GaussianDpEvent(make_plan(_SHUFFLED).noise_multiplier)
    )
    by_hand = accountant.get_epsilon(total.delta - truncation)
    assert total.epsilon_pld == other.epsilon_pld == pytest.approx(by_hand, rel=1e-3)


def test_disjoint_logs_cost_the_largest_and_users_are_in_all_logs_of_time(three):
    _, runs = three
    january, other = runs[:2], dataclasses.replace(runs[2], pairs="keyed:2")
    one, two = budget.compose([january]), budget.compose([[other]])
    total = budget.compose([january, [other]])
    assert (total.runs, total.runs_of_one_unit) == (3, 2)
    assert total.epsilon_pld == max(one.epsilon_pld, two.epsilon_pld)
    assert total.delta == one.delta > two.delta
    assert total.epsilon_sum == max(one.epsilon_sum, two.epsilon_sum)
    users = dataclasses.replace(_SPEC, unit="user")
    first = _run(users, run="first", pairs="january")
    for how, groups in (("user", 2), ("time", 1), (None, 1)):
        own = budget.follow(make_plan(users), users.steps, "february", [first], how)
        assert len(budget.sharing([own, first])) == groups
    shared = budget.compose([[own, first]]).epsilon_pld
    apart = budget.compose([[own], [first]]).epsilon_pld
    assert apart == budget.compose([[first]]).epsilon_pld < shared / 1.2
    with pytest.raises(InputError, match="the units are query and user"):
        budget.compose([january, [first]])
    with pytest.raises(InputError, match="do not tell the logs apart"):
        budget.follow(make_plan(_SPEC), 20, "keyed:1", january, "time")


def test_sum_counts_each_run_once_to_its_last_planned_step(three):
    """For settings chosen after looking at earlier releases."""
    _, runs = three
    total = budget.compose([[*runs, runs[0]]])
    # The last one, which stopped early, as if it had not. Stated by each run's own
    # accountant, RDP here; the sum is by PLD.
    tight = [budget.compose([[_run(spec)]]).epsilon_pld for spec in _SPECS]
    assert total.epsilon_sum == pytest.approx(sum(tight), rel=1e-9)
    deltas = [spec.target_delta for spec in _SPECS]
    assert total.delta_sum == pytest.approx(sum(deltas))
    assert total.epsilon_sum > total.epsilon_pld


def test_one_run_has_one_plan_and_number_of_steps():
    one, again = (_run(_SPEC, code=f"of version {n}") for n in (1, 2))
    assert budget.compose([[one, again]]).runs == 1
    for other in (_run(_SPECS[1]), _run(_SPEC, steps=19)):
        for groups in ([[one, other]], [[one], [other]]):
            with pytest.raises(InputError, match="two certificates state the run"):
                budget.compose(groups)


def test_other_neighbours_or_units_are_not_composed(three):
    _, runs = three
    assert budget.difference(runs) is None
    others = [_run(_SPEC, run="x", pairs="keyed:2")]
    users = [_run(dataclasses.replace(_SPEC, unit="user"), run="y")]
    shuffled = [_run(_SHUFFLED, run="shuffled")]
    dealt = dataclasses.replace(_SPEC, num_microbatches=4, sensitivity_multiplier=2.0)
    for ours, theirs, message in (
        (runs, users, "the units are"),
        (shuffled, [_run(dealt, run="dealt")], "have other neighbours"),
    ):
        assert message in budget.difference([*ours, *theirs])
        with pytest.raises(InputError, match="cannot be composed"):
            budget.compose([[*ours, *theirs]])
    # Other pairs: declared to be one log, they cost what both do.
    assert budget.compose([[runs[0], *others]]).runs == 2
    unprotected = _certificate(dataclasses.replace(_SPEC, epsilon=float("inf")))
    with pytest.raises(InputError, match="without privacy"):
        verified_runs(unprotected)


def test_delta_must_be_above_what_truncation_costs(three):
    _, runs = three
    stated = sum(run.plan.spec.target_delta for run in runs)
    assert budget.compose([runs], delta=stated).delta == stated
    with pytest.raises(InputError, match="truncating the batches"):
        budget.compose([runs], delta=1e-12)
    with pytest.raises(InputError, match="there is none"):
        budget.compose([])

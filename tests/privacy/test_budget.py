"""Composition of certificates, against dp-accounting and by what it must refuse."""

import dataclasses

import dp_accounting
import pytest
import scipy.stats
from helpers import plans

from tfdpsq.privacy import (
    PrivacySpec,
    make_plan,
)
from tfdpsq.privacy.proof import budget, composition
from tfdpsq.validation import InputError

_SPEC = PrivacySpec(
    epsilon=1.0,
    clip_norm=0.5,
    num_units=2000,
    batch_size=100,
    steps=20,
    accountant="rdp",
)
# Other noise, sampling, clipping, steps and truncation; the last one stops early.
_SPECS = (
    _SPEC,
    dataclasses.replace(_SPEC, epsilon=3.0, batch_size=200, max_batch_size=262),
    dataclasses.replace(_SPEC, epsilon=2.0, num_units=2500, clip_norm=3.0, steps=30),
)
_EXECUTED = (20, 20, 11)


def _certificate(spec, steps=None, head="0", pairs="keyed:1", rate=0.1, **inputs):
    return plans.certificate(
        make_plan(spec),
        steps,
        training={"learning_rate": rate},
        fingerprints={"pairs": pairs, **inputs},
        ledger_head=head,
    )


@pytest.fixture(scope="module")
def three():
    """Certificates of three runs, and their releases."""
    made = [
        _certificate(spec, steps, head=str(number))
        for number, (spec, steps) in enumerate(zip(_SPECS, _EXECUTED))
    ]
    return made, {str(i): budget.release_of(c) for i, c in enumerate(made)}


@pytest.fixture(scope="module")
def chosen():
    """Two runs by the heads of their ledgers, and the release of one of them."""
    specs = (_SPEC, dataclasses.replace(_SPEC, steps=40))
    runs = {
        composition.run_key(f"head{i}", ""): (make_plan(spec), spec.steps)
        for i, spec in enumerate(specs)
    }
    return runs, composition.Release(runs, 0.7, "keyed:1", 2.5e-4)


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
    made, releases = three
    total = composition.compose(releases)
    # The smallest δ, 1 / (2 · 2500), at which no ε is below a stated one.
    assert (total.runs, total.delta) == (3, 2e-4)
    whole, less = _by_hand(made, 2e-4, 1.2e-4)
    assert total.epsilon_pld == pytest.approx(whole, rel=1e-3)
    stated = [certificate["accounting"]["epsilon_pld"] for certificate in made]
    assert max(stated) < total.epsilon_pld < sum(stated)
    assert total.epsilon_pld < total.epsilon_rdp
    at = composition.compose(releases, delta=1.2e-4)
    assert at.epsilon_pld == pytest.approx(less, rel=1e-3)


def test_run_that_stopped_early_counts_whole_in_the_sum_and_the_budget():
    """Its certificate says so; a total without the condition was told as all of it."""
    plan = make_plan(_SPEC)
    early, whole = (
        {"a": budget.release_of(_certificate(_SPEC, steps))}
        for steps in (3, _SPEC.steps)
    )
    found, full = composition.compose(early), composition.compose(whole)
    assert (found.stopped_early, full.stopped_early) == (1, 0)
    assert found.epsilon_pld < 0.9 * full.epsilon_pld
    assert found.epsilon_sum == full.epsilon_sum == full.epsilon_pld
    planned = {"next": budget.planned_release({"next": plan}, "keyed:1")}
    total = composition.compose({**whole, **planned}).epsilon_pld
    assert budget.require_within(total + 1e-9, early, planned).epsilon_pld == total
    with pytest.raises(InputError, match=f"spent {full.epsilon_pld:.4g}"):
        budget.require_within(total - 1e-6, early, planned)


def test_post_processing_costs_nothing_and_a_second_run_does(three):
    made, releases = three
    one = composition.compose({"generator": releases["0"]})
    assert one.epsilon_pld == pytest.approx(
        made[0]["accounting"]["epsilon_pld"], rel=1e-9
    )
    # A set has the certificate of its generator: the same ledger, the same steps.
    both = composition.compose({"generator": releases["0"], "set": releases["0"]})
    assert (both.runs, both.epsilon_pld) == (1, one.epsilon_pld)
    again = budget.release_of(_certificate(_SPEC, head="another"))
    twice = composition.compose({"generator": releases["0"], "again": again})
    assert (twice.runs, twice.epsilon_pld > 1.2 * one.epsilon_pld) == (2, True)


_SHUFFLED = dataclasses.replace(
    _SPEC, sampler="shuffled", n_is_public=True, noise_window=5
)


def test_poisson_and_shuffled_runs_compose_for_zero_out_neighbours(three):
    _, releases = three
    shuffled = budget.release_of(_certificate(_SHUFFLED, head="shuffled"))
    total = composition.compose({"0": releases["0"], "there": shuffled})
    other = composition.compose({"there": shuffled, "0": releases["0"]})
    for found in (total, other):
        assert "(zero-out)" in found.adjacency
        assert (found.runs, found.unit) == (2, "query")
    both = composition.compose({"a": releases["0"], "b": releases["1"]})
    assert both.adjacency == "add or remove one unit"
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
    _, releases = three
    january = composition.compose({"a": releases["0"], "b": releases["1"]})
    other = dataclasses.replace(releases["2"], pairs="keyed:2")
    february = composition.compose({"c": other})
    for disjoint in composition.DISJOINT:
        total = composition.in_parallel({"1": january, "2": february}, disjoint)
        assert total.epsilon_pld == max(january.epsilon_pld, february.epsilon_pld)
        assert total.delta == january.delta > february.delta
        assert total.epsilon_sum == max(january.epsilon_sum, february.epsilon_sum)
    users = {}
    for name in ("january", "february"):
        spec = dataclasses.replace(_SPEC, unit="user")
        made = _certificate(spec, head=name, pairs=name)
        users[name] = composition.compose({name: budget.release_of(made)})
    apart = composition.in_parallel(users, "user").epsilon_pld
    assert apart == users["january"].epsilon_pld
    assert composition.in_parallel(users, "time").epsilon_pld > 1.2 * apart
    with pytest.raises(InputError, match="'query' and the other a unit 'user'"):
        composition.in_parallel({"1": january, "2": users["february"]}, "user")
    same = composition.compose({"d": releases["0"]})
    with pytest.raises(InputError, match="releases of the same pairs"):
        composition.in_parallel({"1": january, "2": same}, "time")


def test_sum_counts_each_run_once_to_its_last_planned_step(three):
    """For settings chosen after looking at earlier releases."""
    _, releases = three
    total = composition.compose({**releases, "again": releases["0"]})
    # The last one, which stopped early, as if it had not.
    made = [_certificate(spec, head=str(n)) for n, spec in enumerate(_SPECS)]
    # Stated by each run's own accountant, RDP here; the sum is by PLD.
    tight = [composition.compose({"": budget.release_of(c)}).epsilon_pld for c in made]
    assert total.epsilon_sum == pytest.approx(sum(tight), rel=1e-9)
    deltas = [certificate["guarantee"]["delta"] for certificate in made]
    assert total.delta_sum == pytest.approx(sum(deltas))
    assert total.epsilon_sum > total.epsilon_pld


def test_one_ledger_head_with_two_trainings_is_not_one_run():
    """A ledger was copied before step 0, and a setting changed: two runs, one price."""
    one = budget.release_of(_certificate(_SPEC, code="of version 1"))
    again = budget.release_of(_certificate(_SPEC, code="of version 2"))
    assert composition.compose({"one": one, "again": again}).runs == 1
    other = budget.release_of(_certificate(_SPEC, rate=0.2))
    with pytest.raises(InputError, match="one and other"):
        composition.compose({"one": one, "other": other})


def test_other_pairs_or_another_unit_are_not_composed(three, chosen):
    _, releases = three
    other_pairs = budget.release_of(_certificate(_SPEC, head="x", pairs="keyed:2"))
    users = dataclasses.replace(_SPEC, unit="user")
    no_pairs = dataclasses.replace(releases["0"], pairs=None)
    shuffled = budget.release_of(_certificate(_SHUFFLED, head="shuffled"))
    for one, two, message in (
        (releases["0"], other_pairs, "keyed:1 and keyed:2"),
        (releases["0"], budget.release_of(_certificate(users, head="y")), "'user'"),
        (no_pairs, no_pairs, "None and None"),
        (chosen[1], shuffled, "a choice"),
    ):
        with pytest.raises(InputError, match="here and there") as caught:
            composition.compose({"here": one, "there": two})
        assert message in str(caught.value)
    # Declared to be one log, they cost what both do.
    named = {"here": releases["0"], "there": other_pairs}
    assert composition.compose(named, one_log=True).runs == 2
    unprotected = _certificate(dataclasses.replace(_SPEC, epsilon=float("inf")))
    with pytest.raises(InputError, match="without privacy"):
        budget.release_of(unprotected)


def test_chosen_run_costs_all_runs_or_the_choice(chosen):
    runs, release = chosen
    single = {
        key: composition.Release({key: run}, None, "keyed:1", 2.5e-4)
        for key, run in runs.items()
    }
    alone, together = composition.compose({"": release}), composition.compose(single)
    assert alone.runs == 2
    assert alone.epsilon_pld == pytest.approx(together.epsilon_pld, rel=1e-12)
    # Who was held out in the choice may have been trained on by the others.
    with_runs = composition.compose({"chosen": release, **single})
    held_out = together.epsilon_pld + 0.7
    assert with_runs.epsilon_pld == pytest.approx(held_out, rel=1e-12)


def test_run_is_refused_exactly_where_the_total_would_exceed_the_budget(three):
    _, releases = three
    plan = make_plan(_SPEC)
    planned = {"0": budget.planned_release({"0": plan}, "keyed:9")}  # an earlier name
    # The one that stopped early counts whole.
    (key,) = releases["2"].runs
    last = dataclasses.replace(
        releases["2"], runs={key: (make_plan(_SPECS[2]), _SPECS[2].steps)}
    )
    whole = {"next": planned["0"], **releases, "2": last}
    total = composition.compose(whole, one_log=True).epsilon_pld
    assert total > composition.compose(releases).epsilon_pld
    kept = budget.require_within(total * (1 + 1e-9), releases, planned)
    assert kept.epsilon_pld == total and kept.runs == 4
    with pytest.raises(InputError, match="Nothing more was spent"):
        budget.require_within(total * (1 - 1e-9), releases, planned)
    # The first run of all, too.
    with pytest.raises(InputError, match="0 earlier releases spent 0"):
        budget.require_within(0.5, {}, planned)
    assert budget.require_within(1.0, {}, planned).epsilon_pld <= 1.0


def test_delta_must_lie_between_truncation_and_the_releases_sum(three):
    """ε falls as δ grows: 2e-4 or more each, and all of them may say the sum."""
    _, releases = three
    stated = sum(release.delta for release in releases.values())
    assert composition.compose(releases, delta=stated).delta == stated
    with pytest.raises(InputError, match="the sum"):
        composition.compose(releases, delta=stated * 1.001)
    with pytest.raises(InputError, match="truncating the batches"):
        composition.compose(releases, delta=1e-12)
    with pytest.raises(InputError, match="no release"):
        composition.compose({})

"""Composition of certificates, against dp-accounting and by what it must refuse."""

import dataclasses
import itertools

import dp_accounting
import pytest
import scipy.stats
from helpers import plans

from tfdpsq.privacy import (
    PrivacySpec,
    Selection,
    TrainedRun,
    make_plan,
    make_selection_certificate,
    share_epsilon,
)
from tfdpsq.privacy.proof import budget, composition
from tfdpsq.privacy.proof.certificate import digest_of
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
    dataclasses.replace(_SPEC, epsilon=0.5, batch_size=40, steps=60),
    dataclasses.replace(_SPEC, epsilon=2.0, num_units=2500, clip_norm=3.0),
    dataclasses.replace(_SPEC, epsilon=3.0, batch_size=200, max_batch_size=262),
    dataclasses.replace(_SPEC, epsilon=2.0, steps=100),
)
_EXECUTED = (20, 60, 20, 20, 31)


def _certificate(spec, steps=None, head="0", pairs="keyed:1", rate=0.1, **inputs):
    return plans.certificate(
        make_plan(spec),
        steps,
        training={"learning_rate": rate},
        fingerprints={"pairs": pairs, **inputs},
        ledger_head=head,
    )


def _chosen(specs, choice_epsilon, pairs="keyed:1", draw=None, heads=(0, 1)):
    runs = {
        f"run{i}": TrainedRun(make_plan(spec), {}, f"head{heads[i]}")
        for i, spec in enumerate(specs)
    }
    selection = Selection(runs, "run1", 2.0, 2e-4, choice_epsilon, "BLEU", draw)
    own = _certificate(specs[1], head=f"head{heads[1]}", pairs=pairs)
    return make_selection_certificate(selection, own, [])


@pytest.fixture(scope="module")
def five():
    """Certificates of five runs, and their releases."""
    made = [
        _certificate(spec, steps, head=str(number))
        for number, (spec, steps) in enumerate(zip(_SPECS, _EXECUTED))
    ]
    return made, {str(i): budget.release_of(c) for i, c in enumerate(made)}


@pytest.fixture(scope="module")
def chosen():
    """The specs of a selection's two runs, and its release."""
    specs = share_epsilon([_SPEC, dataclasses.replace(_SPEC, steps=40)], 2.0, 2e-4)
    return specs, budget.release_of(_chosen(specs, 1.5))


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


def test_five_certificates_cost_what_dp_accounting_composes(five):
    made, releases = five
    total = composition.compose(releases)
    # The smallest δ, 1 / (2 · 2500), at which no ε is below a stated one.
    assert (total.runs, total.delta) == (5, 2e-4)
    whole, less = _by_hand(made, 2e-4, 1.2e-4)
    assert total.epsilon_pld == pytest.approx(whole, rel=1e-3)
    stated = [certificate["guarantee"]["epsilon"] for certificate in made]
    assert max(stated) < total.epsilon_pld < sum(stated)
    assert total.epsilon_pld < total.epsilon_rdp
    at = composition.compose(releases, delta=1.2e-4)
    assert at.epsilon_pld == pytest.approx(less, rel=1e-3)


def test_the_sum_for_settings_chosen_in_between_is_that_of_all_runs_once(five):
    _, releases = five
    total = composition.compose({**releases, "again": releases["0"]})
    # The last one, which stopped early, as if it had not: see the next test.
    made = [_certificate(spec, head=str(n)) for n, spec in enumerate(_SPECS)]
    stated = [certificate["guarantee"] for certificate in made]
    # Stated by each run's own accountant, RDP here; the sum is by PLD.
    tight = [composition.compose({"": budget.release_of(c)}).epsilon_pld for c in made]
    assert total.epsilon_sum == pytest.approx(sum(tight), rel=1e-9)
    assert total.epsilon_sum <= sum(g["epsilon"] for g in stated)
    assert total.delta_sum == pytest.approx(sum(g["delta"] for g in stated))
    assert total.epsilon_sum > total.epsilon_pld
    apart = {
        name: composition.compose(
            {name: dataclasses.replace(releases[name], pairs=name)}
        )
        for name in ("0", "4")
    }
    parallel = composition.in_parallel(apart, "user")
    assert parallel.epsilon_sum == max(log.epsilon_sum for log in apart.values())


def test_a_run_that_stopped_early_counts_whole_unless_nobody_looked():
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


def test_what_is_made_from_a_release_costs_nothing_and_a_second_run_does(five):
    made, releases = five
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


def test_runs_without_a_ledger_are_told_apart_by_their_certificates(five):
    made, _ = five
    alone = budget.release_of(_certificate(_SPEC, head=None))
    other = dataclasses.replace(_SPEC, clip_norm=0.25)  # of the same cost
    total = composition.compose(
        {"one": alone, "two": budget.release_of(_certificate(other, head=None))}
    )
    assert total.runs == 2
    # A second run of the same settings has an equal certificate, as a copy would.
    with pytest.raises(InputError, match="one and again hold equal certificates"):
        composition.compose({"one": alone, "again": alone})


@pytest.mark.parametrize(
    "changes, pairs, message",
    [
        ({}, "keyed:2", "the fingerprints keyed:1 and keyed:2: other pairs"),
        ({"unit": "user"}, "keyed:1", "a unit 'query' and the other a unit 'user'"),
    ],
)
def test_what_cannot_be_composed_is_refused_by_name(five, changes, pairs, message):
    _, releases = five
    spec = dataclasses.replace(_SPEC, **changes)
    release = budget.release_of(_certificate(spec, head="other", pairs=pairs))
    for named in (
        {"here": releases["0"], "there": release},
        {"a": releases["1"], "here": releases["0"], "there": release},
    ):
        with pytest.raises(InputError, match="and there cannot be composed") as caught:
            composition.compose(named)
        assert message in str(caught.value)
    if pairs == "keyed:2":  # declared to be one log, they cost what both do
        named = {"here": releases["0"], "there": release}
        assert composition.compose(named, one_log=True).runs == 2


_SHUFFLED = dataclasses.replace(
    _SPEC, sampler="shuffled", n_is_public=True, noise_window=5
)


def test_poisson_and_shuffled_releases_compose_for_units_that_are_replaced(five):
    _, releases = five
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


def test_choices_and_groups_are_not_composed_with_replaced_units(chosen):
    shuffled = budget.release_of(_certificate(_SHUFFLED, head="shuffled"))
    specs, release = chosen
    dealt = dataclasses.replace(_SPEC, clip_groups=10, sensitivity_multiplier=2.0)
    plain = budget.release_of(_certificate(_SPEC, head="plain"))
    for kind, other in (
        ("a choice among", release),
        ("a choice among", budget.release_of(_chosen(specs, None))),
        ("a run with clip_groups", budget.release_of(_certificate(dealt, head="d"))),
    ):
        # A Poisson run that goes with either does not make them go with each other.
        for order in itertools.permutations(
            {"other": other, "there": shuffled, "plain": plain}.items()
        ):
            with pytest.raises(InputError, match=f"their neighbours differ.* {kind}"):
                composition.compose(dict(order))
        assert composition.compose({"other": other, "plain": plain}).runs > 1


def test_pairs_without_a_fingerprint_are_not_taken_for_the_same(five):
    unknown = dataclasses.replace(five[1]["0"], pairs=None)
    with pytest.raises(InputError, match="fingerprints None and None"):
        composition.compose({"one": unknown, "two": unknown})


def test_forged_and_unprotected_certificates_are_refused(five):
    made, _ = five
    for section, key, value in (
        ("guarantee", "epsilon", 0.1),
        ("accounting", "steps_executed", 5),
        ("mechanism", "noise_multiplier", 9.0),
        ("sampler", "n", 4000),
    ):
        edited = {**made[0], section: {**made[0][section], key: value}}
        for forged in (edited, {**edited, "digest": digest_of(edited)}):
            with pytest.raises(InputError, match="here does not hold"):
                budget.release_of(forged, "here")
    unprotected = _certificate(dataclasses.replace(_SPEC, epsilon=float("inf")))
    with pytest.raises(InputError, match="without privacy"):
        budget.release_of(unprotected)


def test_a_ledger_head_stands_for_one_run(five):
    """A forger who copies a head would have two runs counted as one."""
    _, releases = five
    (key,), (own,) = releases["0"].runs, releases["4"].runs.values()
    copied = dataclasses.replace(releases["4"], runs={key: own})
    with pytest.raises(InputError, match="one of them was forged"):
        composition.compose({"true": releases["0"], "copy": copied})


def test_one_head_with_two_trainings_is_not_one_run():
    """A ledger was copied before step 0, and a setting changed: two runs, one price."""
    one = budget.release_of(_certificate(_SPEC, code="of version 1"))
    again = budget.release_of(_certificate(_SPEC, code="of version 2"))
    assert composition.compose({"one": one, "again": again}).runs == 1
    for change in ({"rate": 0.2}, {"init": "other weights"}):
        other = budget.release_of(_certificate(_SPEC, **change))
        with pytest.raises(InputError, match="one and other state the same ledger hea"):
            composition.compose({"one": one, "other": other})


def test_a_chosen_run_costs_all_runs_or_the_choice(five, chosen):
    specs, release = chosen
    heads = ("head0", "head1")
    runs = {
        head: budget.release_of(_certificate(spec, head=head))
        for head, spec in zip(heads, specs)
    }
    alone = composition.compose({"chosen": release})
    together = composition.compose(runs, delta=2e-4)
    assert alone.runs == 2
    assert alone.epsilon_pld == pytest.approx(together.epsilon_pld, rel=1e-12)
    # Showing the runs of the grid as well costs those who were trained on no more.
    with_runs = composition.compose({"chosen": release, **runs}, delta=2e-4)
    # Who was held out in the choice may have been trained on by the others.
    held_out = together.epsilon_pld + 1.5
    assert with_runs.epsilon_pld == pytest.approx(held_out, rel=1e-12)
    # An expensive choice: held-out units pay its ε in addition to all other runs.
    dear = dataclasses.replace(release, choice_epsilon=7.0)
    first = composition.compose({"first": five[1]["0"]}, delta=2e-4)
    total = composition.compose({"first": five[1]["0"], "chosen": dear}, delta=2e-4)
    assert total.epsilon_pld == pytest.approx(first.epsilon_pld + 7.0, rel=1e-12)


def test_two_draws_among_the_same_runs_cost_two_choices(chosen):
    """A held-out unit took part in both; the runs were paid for once."""
    specs, _ = chosen
    made = [_chosen(specs, 2.0, draw=f"{number}" * 32) for number in (1, 2)]
    assert made[0]["digest"] != made[1]["digest"]
    assert made[0]["selection"]["draw"] == "1" * 32
    releases = {str(i): budget.release_of(each) for i, each in enumerate(made)}
    one = composition.compose({"0": releases["0"]})
    both = composition.compose(releases)
    assert one.epsilon_pld == pytest.approx(2.0, rel=0.02)
    assert both.epsilon_pld == pytest.approx(4.0, rel=1e-12) and both.runs == 2


def test_a_choice_without_noise_is_told_with_every_total(five, chosen):
    specs, covered = chosen
    declared = budget.release_of(_chosen(specs, None))
    first = five[1]["0"]
    for release, words in (
        (covered, None),
        (declared, "held out to choose among runs"),
    ):
        log = composition.compose({"first": first, "chosen": release}, delta=2e-4)
        said = log.not_for or ""
        assert (said == "") if words is None else words in said
        whole = composition.in_parallel({"own": log}, "time")
        assert whole.not_for == log.not_for


def test_disjoint_logs_cost_the_largest_and_users_are_in_all_logs_of_time(five):
    _, releases = five
    january = composition.compose({"a": releases["0"], "b": releases["1"]})
    other = dataclasses.replace(releases["2"], pairs="keyed:2")
    february = composition.compose({"c": other})
    logs = {"january": january, "february": february}
    for disjoint in composition.DISJOINT:
        total = composition.in_parallel(logs, disjoint)
        assert total.epsilon_pld == max(january.epsilon_pld, february.epsilon_pld)
        assert total.delta == january.delta == 2.5e-4 > february.delta
        assert total.delta_sum == january.delta_sum > february.delta_sum
        assert total.epsilon_rdp == february.epsilon_rdp > january.epsilon_rdp
    users = {}
    for name in ("january", "february"):
        certificate = _certificate(
            dataclasses.replace(_SPEC, unit="user"), head=name, pairs=name
        )
        users[name] = composition.compose({name: budget.release_of(certificate)})
    apart = composition.in_parallel(users, "user").epsilon_pld
    assert apart == users["january"].epsilon_pld
    assert composition.in_parallel(users, "time").epsilon_pld > 1.2 * apart
    with pytest.raises(InputError, match="a unit 'query' and the other a unit 'user'"):
        composition.in_parallel(
            {"january": january, "february": users["february"]}, "user"
        )


def test_logs_of_the_same_pairs_are_not_disjoint(five):
    _, releases = five
    same = {n: composition.compose({n: releases[n]}) for n in ("0", "1")}
    with pytest.raises(InputError, match="releases of the same pairs: give them one"):
        composition.in_parallel(same, "time")
    # The same run, whose pairs somebody called otherwise.
    copied = dataclasses.replace(releases["0"], pairs="keyed:2")
    with pytest.raises(InputError, match="releases of the same pairs"):
        composition.in_parallel(
            {"0": same["0"], "1": composition.compose({"1": copied})}, "time"
        )


def test_a_run_is_refused_exactly_where_the_total_would_exceed_the_budget(five):
    _, releases = five
    plan = make_plan(_SPEC)
    planned = {"next": budget.planned_release({"next": plan}, "keyed:9")}
    # The one that stopped early counts whole.
    last = budget.release_of(_certificate(_SPECS[4], head="4"))
    whole = {**planned, **releases, "4": last}
    total = composition.compose(whole, one_log=True).epsilon_pld
    assert total > composition.compose(releases).epsilon_pld
    kept = budget.require_within(total * (1 + 1e-9), releases, planned)
    assert kept.epsilon_pld == total
    with pytest.raises(InputError, match="with next it would be") as caught:
        budget.require_within(total * (1 - 1e-9), releases, planned)
    assert "Nothing more was spent" in str(caught.value)
    # The first run of all, too.
    with pytest.raises(InputError, match="0 earlier releases spent 0"):
        budget.require_within(0.5, {}, planned)
    assert budget.require_within(1.0, {}, planned).epsilon_pld <= 1.0


def test_a_delta_that_truncation_uses_up_is_refused(five):
    with pytest.raises(InputError, match="truncating the batches of these releases"):
        composition.compose(five[1], delta=1e-12)
    with pytest.raises(InputError, match="no release"):
        composition.compose({})


def test_a_delta_above_what_releases_state_is_refused(five):
    """ε falls as δ grows: 2e-4 each, and four of them may say 8e-4 together."""
    releases = {name: five[1][name] for name in "0123"}
    stated = sum(release.delta for release in releases.values())
    assert composition.compose(releases, delta=stated).delta == stated
    with pytest.raises(InputError, match="what releases state that one"):
        composition.compose(releases, delta=stated * 1.001)


def test_a_selection_is_nameless_if_one_of_its_runs_is(chosen):
    specs, _ = chosen
    runs = {
        f"run{i}": TrainedRun(make_plan(spec), {}, head)
        for i, (spec, head) in enumerate(zip(specs, (None, "head1")))
    }
    own = _certificate(specs[1], head="head1")
    selection = Selection(runs, "run1", 2.0, 2e-4, 1.5, "BLEU", None)
    made = make_selection_certificate(selection, own, [])
    assert budget.release_of(made).nameless
    assert not budget.release_of(_chosen(specs, 1.5)).nameless


def test_basic_composition_counts_every_private_choice(chosen):
    """Runs once, choices each: who was held out took part in all of them."""
    specs, _ = chosen
    made = [
        budget.release_of(_chosen(specs, 2.0, draw=f"{number}" * 32))
        for number in (1, 2)
    ]
    one, two = composition._summed(made[:1]), composition._summed(made)
    assert two == pytest.approx([2 * value for value in one], rel=1e-12)


def test_selections_that_share_a_run_cost_what_either_has_alone(chosen):
    """Settings of the second were fixed after the first: its new run counts as well."""
    specs, _ = chosen
    first = budget.release_of(_chosen(specs, None, heads=(0, 1)))
    second = budget.release_of(_chosen(specs, None, heads=(2, 1)))
    made = composition.compose({"first": first, "second": second})
    assert made.runs == 3
    # Both have the same two settings, so the same ε of their own.
    alone = composition.compose({"first": first}).epsilon_pld
    assert made.epsilon_sum == pytest.approx(2 * alone, rel=1e-9)
    assert made.epsilon_sum > made.epsilon_pld > 1.1 * alone


def test_an_earlier_release_may_have_the_name_of_the_run(five):
    _, releases = five
    planned = budget.planned_release({"run": make_plan(_SPEC)}, "keyed:1")
    alone = budget.require_within(99, {}, {"generator": planned})
    both = budget.require_within(
        99, {"generator": releases["0"]}, {"generator": planned}
    )
    assert both.runs == 2 and both.epsilon_pld > alone.epsilon_pld

"""Runs that start from released weights: what all of them guarantee together."""

import copy
import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from tfdpsq.privacy import (
    Continuation,
    PrivacySpec,
    Selection,
    TrainedRun,
    make_certificate,
    make_continuation_certificate,
    make_plan,
    make_selection_certificate,
    share_epsilon,
    verify_certificate,
)
from tfdpsq.privacy.proof import budget, composition
from tfdpsq.privacy.proof.certificate import (
    MOST_EARLIER,
    digest_of,
    inherited_certificate,
)
from tfdpsq.privacy.proof.ledger import LedgerSummary
from tfdpsq.privacy.proof.verification import ledger_problems
from tfdpsq.validation import InputError

# Every batch is the whole log, so that ε has a closed form.
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
_WHOLE_LARGER = dataclasses.replace(_WHOLE, epsilon=3.0)
_WORDS = {
    "description": "A model.",
    "sensitivity_argument": "Each loss depends on one unit alone.",
    "training": {"learning_rate": 0.1},
}


def _first(spec=_SPECS[0], head="h1", pairs="p1", steps=None):
    return make_certificate(
        make_plan(spec),
        spec.steps if steps is None else steps,
        fingerprints={"pairs": pairs} if pairs else {},
        ledger_head=head,
        **_WORDS,
    )


def _continuation(parent, spec, disjoint, head, pairs, steps=None):
    return Continuation(
        make_plan(spec),
        spec.steps if steps is None else steps,
        pairs,
        parent,
        budget.release_of(parent),
        disjoint,
        head,
    )


def _next(parent, spec=_SPECS[1], disjoint=None, head="h2", pairs="p2", steps=None):
    return make_continuation_certificate(
        _continuation(parent, spec, disjoint, head, pairs, steps),
        fingerprints={"pairs": pairs} if pairs else {},
        **_WORDS,
    )


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


def test_one_log_costs_the_composition_and_disjoint_logs_the_larger():
    first = _first()
    composed = _next(first)
    assert _stated(composed) == pytest.approx(_gaussian(_SPECS[:2]), rel=1e-3)
    assert _stated(first) < _stated(composed) < _stated(first) + 1.0
    assert "epsilon composes all 2 runs" in composed["continuation"]["in_words"]
    for disjoint in ("time", "user"):
        apart = _next(first, disjoint=disjoint)
        assert _stated(apart) == _stated(first)
        assert apart["continuation"]["epsilon_of_this_run"] < _stated(apart)
        larger = _next(first, _WHOLE_LARGER, disjoint)
        assert _stated(larger) == larger["continuation"]["epsilon_of_this_run"]
        assert _stated(larger) == pytest.approx(_gaussian([_WHOLE_LARGER]), rel=1e-3)
        assert any("which nothing here checks" in n for n in apart["not_covered"])
    for certificate in (composed, apart, larger):
        assert verify_certificate(certificate).problems == ()


def test_a_user_is_in_all_logs_of_time_but_in_one_log_of_users():
    first, second = (
        dataclasses.replace(spec, unit="user", rows_per_unit=2) for spec in _SPECS[:2]
    )
    parent = _first(first)
    composed = _next(parent, second)
    assert _stated(_next(parent, second, "time")) == _stated(composed)
    assert _stated(_next(parent, second, "user")) == _stated(parent)
    assert _stated(parent) < _stated(composed)


def test_delta_is_the_largest_of_disjoint_logs_and_the_smallest_of_one():
    finer = dataclasses.replace(_SPECS[1], delta=1e-6)
    first = _first()
    assert _next(first, finer, "time")["guarantee"]["delta"] == 1e-5
    composed = _next(first, finer)
    assert composed["guarantee"]["delta"] == 1e-6
    whole = _gaussian([_SPECS[0], finer], delta=1e-6)
    assert _stated(composed) == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(
    "second, third, groups",
    [
        (None, None, [(0, 1, 2)]),
        ("time", "time", [(0,), (1,), (2,)]),
        # The third log shares no query with the first two, which are one.
        (None, "time", [(0, 1), (2,)]),
        # It may share queries with each of the first two, which share none.
        ("time", None, [(0, 2), (1, 2)]),
    ],
)
def test_of_three_runs_those_compose_that_one_unit_can_be_in(second, third, groups):
    parent = _next(_first(), disjoint=second)
    last = _next(parent, _SPECS[2], third, "h3", "p3")
    wanted = max(_gaussian([_SPECS[i] for i in group]) for group in groups)
    assert _stated(last) == pytest.approx(wanted, rel=1e-3)
    assert last["continuation"]["runs_counted"] == 3
    assert verify_certificate(last).problems == ()


def test_only_steps_that_ran_count_and_the_sum_counts_all_that_were_planned():
    first, second = _SPECS[:2]
    found = _next(_first(steps=2), steps=5)
    assert _stated(found) == pytest.approx(
        _gaussian([first, second], steps=[2, 5]), rel=1e-3
    )
    summed = _gaussian([first]) + _gaussian([second])
    assert found["continuation"]["epsilon_sum"] == pytest.approx(summed, rel=1e-3)
    assert found["continuation"]["delta_sum"] == pytest.approx(2e-5)
    assert verify_certificate(found).problems == ()


def test_a_run_chosen_among_several_can_be_continued():
    base = PrivacySpec(
        epsilon=1.0,
        clip_norm=0.5,
        num_units=2000,
        batch_size=100,
        steps=20,
        accountant="rdp",
    )
    specs = share_epsilon([base, dataclasses.replace(base, steps=40)], 2.0, 2e-4)
    runs = {f"r{i}": TrainedRun(make_plan(s), {}, f"g{i}") for i, s in enumerate(specs)}
    own = _first(specs[1], head="g1")
    found = {}
    for choice in (0.5, None):
        selection = Selection(runs, "r1", 2.0, 2e-4, choice, "BLEU")
        chosen = make_selection_certificate(selection, own, [])
        found[choice] = _next(chosen, base, head="h9", pairs="p1")
        assert verify_certificate(found[choice]).problems == ()
        assert found[choice]["continuation"]["runs_counted"] == 3
    assert _stated(found[0.5]) > 2.0
    assert "but not for units held out" in found[None]["guarantee"]["unit_in_words"]


def _forged(certificate, path, value):
    copied = copy.deepcopy(certificate)
    *above, last = path.split(".")
    holder = copied
    for name in above:
        holder = holder[name]
    holder[last] = value
    return {**copied, "digest": digest_of(copied)}


@pytest.fixture(scope="module")
def kinds():
    """Certificates of a composed and of a disjoint continuation."""
    first = _first()
    return {"composed": _next(first), "time": _next(first, disjoint="time")}


def _paths(value, path=""):
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, inner in value.items():
        yield from _paths(inner, f"{path}.{key}" if path else key)


def _other(value):
    if isinstance(value, str):
        return value + " forged"
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 0.9 if value else 0.1
    return "forged"


@pytest.mark.parametrize("kind", ["composed", "time"])
def test_every_edit_of_what_follows_is_found(kinds, kind):
    certificate = kinds[kind]
    assert verify_certificate(certificate).problems == ()
    word_of_the_maker = tuple(
        "description mechanism.sensitivity_argument accounting.library_version "
        "training fingerprints private_reads ledger_head".split()
    )
    for path, value in _paths(certificate):
        if path == "digest" or path.startswith(word_of_the_maker):
            continue
        forged = _forged(certificate, path, _other(value))
        try:
            assert verify_certificate(forged).problems, path
        except InputError as error:  # of another format
            assert path in str(error) or path == "format"


def test_a_forged_relation_or_parent_is_found(kinds):
    composed, apart = kinds["composed"], kinds["time"]
    wrong = "guarantee.epsilon is"
    for forged, found in (
        (_forged(composed, "continuation.disjoint", "time"), wrong),
        (_forged(apart, "continuation.disjoint", None), wrong),
        # A cheaper parent, and one that costs nothing.
        (_forged(composed, "continuation.parent", _first(_SPECS[1])), wrong),
        (_forged(composed, "continuation.parent", {}), "what was run cannot be told"),
        (_forged(composed, "continuation.parent", None), "which is no certificate"),
        (_forged(apart, "fingerprints", {"pairs": "p1"}), "these very pairs"),
        (_forged(apart, "fingerprints", {}), "states the fingerprint of its pairs"),
        (_forged(composed, "ledger_head", "h1"), "a ledger of its own"),
    ):
        assert any(found in problem for problem in verify_certificate(forged).problems)
        with pytest.raises(InputError, match="does not hold"):
            budget.release_of(forged)
    # The parent's own steps, with both digests made anew.
    parent = _forged(composed["continuation"]["parent"], "accounting.steps_executed", 1)
    forged = _forged(composed, "continuation.parent", parent)
    problems = verify_certificate(forged).problems
    assert any("the certificate of its parent" in problem for problem in problems)


def test_without_the_parent_it_is_another_claim(kinds):
    """What is left is the certificate of the last run alone, which states too much."""
    left = {k: v for k, v in kinds["composed"].items() if k != "continuation"}
    problems = verify_certificate({**left, "digest": digest_of(left)}).problems
    assert any("guarantee.epsilon is" in problem for problem in problems)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"disjoint": "space"}, "disjoint is 'space'"),
        ({"spec": dataclasses.replace(_WHOLE, unit="user")}, "the same unit and"),
        ({"spec": dataclasses.replace(_WHOLE, epsilon=math.inf)}, "with epsilon inf"),
        ({"disjoint": "time", "pairs": "p1"}, "on these very pairs"),
        ({"disjoint": "time", "pairs": None}, "states the fingerprint of its pairs"),
        ({"head": "h1"}, "ledger of its own"),
    ],
)
def test_what_cannot_be_continued_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        _next(_first(), **changes)


def test_unprotected_weights_and_damaged_certificates_are_not_continued():
    unprotected = _first(dataclasses.replace(_WHOLE, epsilon=math.inf))
    with pytest.raises(InputError, match="run without privacy"):
        _next(unprotected)
    with pytest.raises(InputError, match="does not hold"):
        _next({**_first(), "private_reads": ["none"]})
    first = _first()
    continuation = _continuation(first, _SPECS[1], None, "h2", "p2")
    with pytest.raises(InputError, match="the continuation's pairs are 'p2'"):
        make_continuation_certificate(
            continuation, fingerprints={"pairs": "p3"}, **_WORDS
        )


def test_a_parent_without_privacy_has_no_total():
    spec = dataclasses.replace(_WHOLE, epsilon=math.inf)
    release = budget.release_of(_first())
    with pytest.raises(InputError, match="no total is finite with it"):
        Continuation(make_plan(_WHOLE), 4, "p2", _first(spec), release, None)


def test_a_chain_has_an_end():
    """Each link verifies all before it; a longer file is refused before it is read."""
    spec = dataclasses.replace(_WHOLE, accountant="rdp", steps=1)
    release = budget.release_of(_first(spec))
    ancestors = tuple(
        dataclasses.replace(release, pairs=f"p{i}", digest=f"{i}")
        for i in range(MOST_EARLIER)
    )
    long = dataclasses.replace(release, before=ancestors)
    with pytest.raises(InputError, match="Start from public weights"):
        Continuation(make_plan(spec), 1, "q", _first(spec), long, "time")
    nested = _first(spec)
    for _ in range(3000):
        nested = {"continuation": {"parent": nested}}
    with pytest.raises(InputError, match="continues more than 12 certificates"):
        verify_certificate(nested)


def test_what_is_made_from_parent_and_child_has_the_guarantee_of_the_child(kinds):
    child = kinds["composed"]
    parent = child["continuation"]["parent"]
    grandchild = _next(child, _SPECS[2], head="h3", pairs="p3")
    assert inherited_certificate(parent, child) == child
    assert inherited_certificate(None, grandchild, parent, child) == grandchild
    with pytest.raises(InputError, match="epsilons would add up"):
        inherited_certificate(child, kinds["time"])


# -- With other releases ------------------------------------------------------------


def _releases(**certificates):
    return {name: budget.release_of(made) for name, made in certificates.items()}


def test_a_parent_released_besides_costs_nothing_more(kinds):
    for child in kinds.values():
        parent = child["continuation"]["parent"]
        found = composition.compose(_releases(child=child, parent=parent))
        assert found.epsilon_pld == pytest.approx(_stated(child), rel=1e-9)
        assert (found.runs, found.delta) == (2, 1e-5)
    with pytest.raises(InputError, match="cannot be composed: their pairs have"):
        composition.compose(_releases(child=child, other=_first(head="x", pairs="px")))


def test_a_second_release_of_the_first_log_adds_to_that_log_only(kinds):
    """Whether its parent is given by itself or known from the child alone."""
    again = _first(_SPECS[2], head="h3")
    first_log = _gaussian([_SPECS[0], _SPECS[2]])
    child = kinds["time"]
    parent = child["continuation"]["parent"]
    for given in ({"child": child}, {"child": child, "parent": parent}):
        found = composition.compose(_releases(**given, again=again))
        assert found.epsilon_pld == pytest.approx(first_log, rel=1e-3)
        assert (found.runs, found.runs_of_one_unit) == (3, 2)
    # Declared by name, the parent counts to the log of its own pairs.
    logs = {
        "january": composition.compose(_releases(again=again)),
        "february": composition.compose(_releases(child=child)),
    }
    total = composition.in_parallel(logs, "time")
    assert total.epsilon_pld == pytest.approx(first_log, rel=1e-3)
    # In one log, all count.
    whole = composition.compose(_releases(child=kinds["composed"], again=again))
    assert whole.epsilon_pld == pytest.approx(_gaussian(_SPECS), rel=1e-3)


def test_branches_whose_logs_nobody_related_count_together(kinds):
    parent = kinds["time"]["continuation"]["parent"]
    other = _next(parent, _WHOLE_LARGER, "time", head="h3", pairs="p3")
    found = composition.compose(_releases(one=kinds["time"], other=other))
    both = _gaussian([_SPECS[1], _WHOLE_LARGER])
    assert found.epsilon_pld == pytest.approx(both, rel=1e-3)
    logs = {
        "one": composition.compose(_releases(one=kinds["time"])),
        "other": composition.compose(_releases(other=other)),
    }
    total = composition.in_parallel(logs, "time")
    assert total.epsilon_pld == pytest.approx(_gaussian([_WHOLE_LARGER]), rel=1e-3)


def test_a_planned_continuation_counts_with_all_its_steps():
    first = _first()
    released = _releases(first=first)
    plans = {"next": make_plan(_SPECS[1])}
    apart, shared = (
        budget.planned_release(
            plans,
            "p2",
            continuation=_continuation(first, _SPECS[1], how, None, "p2"),
        )
        for how in ("time", None)
    )
    total = budget.require_within(2.0, released, {"next": apart})
    assert total.epsilon_pld == pytest.approx(_gaussian(_SPECS[:1]), rel=1e-3)
    with pytest.raises(InputError, match="the budget is epsilon 2, of which 1"):
        budget.require_within(2.0, released, {"next": shared})


def test_a_budget_counts_all_planned_steps_of_a_parent():
    """Why it stopped early is not known: maybe for what its weights showed."""
    child = _next(_first(steps=1))
    planned = {"next": budget.planned_release({"next": make_plan(_SPECS[2])}, "p1")}
    found = budget.require_within(9.0, _releases(child=child), planned)
    assert found.epsilon_pld == pytest.approx(_gaussian(_SPECS), rel=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_the_sets_that_compose_are_all_maximal_ones(seed):
    """Against all subsets of seven logs, of which some are declared disjoint."""
    random = np.random.default_rng(seed)
    release = budget.release_of(_first(dataclasses.replace(_WHOLE, accountant="rdp")))
    names = [f"p{i}" for i in range(7)]
    parts = [dataclasses.replace(release, pairs=name, digest=name) for name in names]
    couples = map(frozenset, itertools.combinations(names, 2))
    apart = {couple for couple in couples if random.random() < seed / 5}

    def can_share(subset):
        return not any(
            frozenset(couple) in apart for couple in itertools.combinations(subset, 2)
        )

    subsets = [
        set(subset)
        for size in range(1, 8)
        for subset in itertools.combinations(names, size)
        if can_share(subset)
    ]
    wanted = [a for a in subsets if not any(a < b for b in subsets)]
    found = [{p.pairs for p in each} for each in composition._sharing(parts, apart)]
    assert sorted(map(sorted, found)) == sorted(map(sorted, wanted))


def test_a_thousand_logs_are_composed_at_once():
    """In one clique, apart from each other, and apart from one."""
    release = budget.release_of(_first(dataclasses.replace(_WHOLE, accountant="rdp")))
    names = [f"p{i}" for i in range(1000)]
    parts = [dataclasses.replace(release, pairs=name, digest=name) for name in names]
    for apart, sizes in (
        ([], [1000]),
        (itertools.combinations(names, 2), [1] * 1000),
        ([(names[0], name) for name in names[1:]], [1, 999]),
    ):
        found = composition._sharing(parts, list(map(frozenset, apart)))
        assert sorted(map(len, found)) == sizes


def _sealed(certificate, **entries):
    changed = {**certificate, **entries}
    return {**changed, "digest": digest_of(changed)}


def test_a_head_that_reads_like_another_run_s_name_is_another_run():
    """Heads are free text: runs without one must not be counted as a forged head's."""
    names = ["this run", "that is certified", "run that is certified", "planned next"]
    nameless = _next(_first(), spec=_SPECS[0], head=None)
    names.append(nameless["digest"])
    both = _gaussian([_SPECS[0]] * 2)
    for head in names:
        parent = _first(head=head)
        child = _next(parent, spec=_SPECS[0], head=None)
        assert _stated(child) == pytest.approx(both, rel=1e-3)
        released = _releases(parent=parent)
        plans = {"next": make_plan(_SPECS[0])}
        planned = {"next": budget.planned_release(plans, "p1")}
        total = budget.require_within(9.0, released, planned)
        assert total.epsilon_pld == pytest.approx(both, rel=1e-3)
    one = _first(head=None)
    other = _first(head=one["digest"])
    for order in ((one, other), (other, one)):
        found = composition.compose(_releases(**dict(zip("ab", order))))
        assert found.epsilon_pld == pytest.approx(both, rel=1e-3)


def test_a_selection_cannot_bring_a_parent_along(kinds):
    base = dataclasses.replace(_WHOLE, accountant="rdp")
    specs = share_epsilon([base, dataclasses.replace(base, steps=5)], 2.0, 1e-5)
    runs = {f"r{i}": TrainedRun(make_plan(s), {}, f"g{i}") for i, s in enumerate(specs)}
    selection = Selection(runs, "r1", 2.0, 1e-5, 0.5, "BLEU")
    own = make_selection_certificate(selection, _first(specs[1], head="g1"), [])
    first = _first()
    for parent in ({"a": 1}, {"digest": first["digest"]}, first):
        forged = _sealed(own, continuation={"parent": parent})
        assert verify_certificate(own).problems == ()
        assert verify_certificate(forged).problems
        with pytest.raises(InputError):
            inherited_certificate(first, forged)
    # Nor is a parent believed that states another's digest.
    forged = _sealed(own, digest="")
    child = {**_next(_first(head="x")), "continuation": {"parent": {**forged}}}
    child["continuation"]["parent"]["digest"] = first["digest"]
    with pytest.raises(InputError, match="would add up"):
        inherited_certificate(first, child)


def test_what_earlier_certificates_warn_of_stands_in_the_last_one():
    rough = dataclasses.replace(_SPECS[0], num_units=450, batch_size=450, delta=2e-3)
    first = make_certificate(
        make_plan(rough),
        2,
        fingerprints={"pairs": "p1"},
        ledger_head="h1",
        private_reads=[{"what": "losses", "where": "terminal"}],
        **_WORDS,
    )
    secure = dataclasses.replace(_SPECS[1], secure=True, n_is_public=True)
    child = _next(first, secure, "time")
    last = _next(child, _SPECS[2], "time", head="h3", pairs="p3")
    for certificate in (child, last):
        said = " ".join(certificate["warnings"])
        assert "before this one: Training stopped after 2 of 4" in said
        assert "above 1/(2n) = 0.001 for the log of this one" in said
        limits = " ".join(certificate["not_covered"])
        assert "Of the runs before this one: The upper bound n" in limits
        assert "before this one: losses" in certificate["private_reads"][0]["what"]
        assert verify_certificate(certificate).problems == ()
    insecure = [line for line in first["not_covered"] if "floating" in line]
    limits = " ".join(child["not_covered"])
    assert insecure and all(line in limits for line in insecure)
    text = json.dumps(last)
    assert "one: Of the runs before this one" not in text


def test_an_early_stop_is_warned_of_with_the_epsilon_of_all_planned_steps():
    found = _next(_first(), steps=3)
    (warning,) = found["warnings"]
    assert "epsilon_sum at delta_sum" in warning and "the target" not in warning
    whole = _gaussian(_SPECS[:1]) + _gaussian(_SPECS[1:2])
    assert found["continuation"]["epsilon_sum"] == pytest.approx(whole, rel=1e-3)


def test_an_unconditional_maximum_is_not_claimed_of_logs_that_composed_before():
    composed = _next(_first())
    last = _next(composed, _SPECS[2], "time", head="h3", pairs="p3")
    words = last["continuation"]["in_words"]
    assert "That holds if the settings of runs on one log were fixed" in words
    apart = _next(_first(), disjoint="time")
    assert "That holds if" not in apart["continuation"]["in_words"]


def test_two_relations_of_the_same_logs_count_as_one_log(kinds):
    """A run certified twice is refused; two runs share a log if one says so."""
    with pytest.raises(InputError, match="state the same ledger head and another"):
        composition.compose(_releases(**kinds))
    parent = kinds["time"]["continuation"]["parent"]
    other = _next(parent, _SPECS[2], None, head="h3")
    found = composition.compose(_releases(time=kinds["time"], other=other))
    assert found.epsilon_pld == pytest.approx(_gaussian(_SPECS), rel=1e-3)
    assert not found.rests_on_declarations
    assert composition.compose(_releases(time=kinds["time"])).rests_on_declarations


def test_words_do_not_change_with_the_accountant_s_version(kinds):
    """ε may be one percent higher by an older accountant, and the file still holds."""
    for certificate in kinds.values():
        older = copy.deepcopy(certificate)
        older["accounting"]["library_version"] = "0.4.2"
        for section, name in (
            ("guarantee", "epsilon"),
            ("accounting", "epsilon_pld"),
            ("accounting", "epsilon_rdp"),
            ("continuation", "epsilon_sum"),
            ("continuation", "epsilon_of_this_run"),
        ):
            older[section][name] *= 1.003
        assert verify_certificate(_sealed(older)).problems == ()


def test_a_ledger_is_compared_with_the_run_that_states_its_head(kinds):
    child = kinds["composed"]
    for spec, head in ((_SPECS[0], "h1"), (_SPECS[1], "h2")):
        plan = make_plan(spec)
        ledger = LedgerSummary(plan.fingerprint, "", spec.steps, spec.steps, head)
        assert ledger_problems(child, ledger) == ()
        fewer = dataclasses.replace(ledger, steps_paid=spec.steps - 1)
        assert ledger_problems(child, fewer)
    assert ledger_problems(child, dataclasses.replace(ledger, head="h9"))

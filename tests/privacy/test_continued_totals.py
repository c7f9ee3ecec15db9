"""Totals of releases that continue others, together with other releases."""

import dataclasses
import itertools

import numpy as np
import pytest
from helpers.continued import SPECS as _SPECS
from helpers.continued import WHOLE as _WHOLE
from helpers.continued import WHOLE_LARGER as _WHOLE_LARGER
from helpers.continued import continuation as _continuation
from helpers.continued import first as _first
from helpers.continued import following as _next
from helpers.continued import gaussian as _gaussian
from helpers.continued import kinds as _kinds
from helpers.continued import releases as _releases
from helpers.continued import stated as _stated

from tfdpsq.privacy import make_plan
from tfdpsq.privacy.proof import budget, composition
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def kinds():
    """Certificates of a composed and of a disjoint continuation."""
    return _kinds()


def test_a_parent_released_besides_costs_nothing_more(kinds):
    for child in kinds.values():
        parent = child["continuation"]["parent"]
        found = composition.compose(_releases(child=child, parent=parent))
        assert found.epsilon_pld == pytest.approx(_stated(child), rel=1e-9)
        assert (found.runs, found.delta) == (2, 1e-5)
    with pytest.raises(InputError, match="cannot be composed: their pairs have"):
        composition.compose(_releases(child=child, other=_first(head="x", pairs="px")))


def test_a_second_release_of_the_first_log_adds_to_that_log_only(kinds):
    """The parent may be given by itself, or be known from the child alone."""
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


def test_of_too_many_sets_of_logs_the_bound_is_of_all_releases(monkeypatch):
    """Any set left out could be the dearest."""
    spent = [_SPECS[0], _SPECS[0], _SPECS[2]]
    releases = _releases(
        **{f"r{i}": _first(s, head=f"g{i}", pairs=f"q{i}") for i, s in enumerate(spent)}
    )
    apart = [frozenset((f"q{a}", f"q{b}")) for a in range(3) for b in range(a)]
    monkeypatch.setattr(composition, "_MOST_GROUPS", 1)
    found = composition.compose(releases, one_log=True, apart=apart)
    whole = composition.compose(releases, one_log=True)
    assert found.epsilon_pld == whole.epsilon_pld
    assert found.epsilon_pld == pytest.approx(_gaussian(spent), rel=1e-3)

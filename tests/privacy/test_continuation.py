"""Runs that start from released weights: what all of them guarantee together."""

import copy
import dataclasses
import json
import math

import pytest
from helpers.continued import SPECS as _SPECS
from helpers.continued import WHOLE as _WHOLE
from helpers.continued import WHOLE_LARGER as _WHOLE_LARGER
from helpers.continued import WORDS as _WORDS
from helpers.continued import continuation as _continuation
from helpers.continued import first as _first
from helpers.continued import following as _next
from helpers.continued import gaussian as _gaussian
from helpers.continued import kinds as _kinds
from helpers.continued import releases as _releases
from helpers.continued import stated as _stated

from tfdpsq.privacy import (
    Continuation,
    Ledger,
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
from tfdpsq.run import verify
from tfdpsq.validation import InputError


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


def test_neighbours_are_those_of_all_runs():
    shuffled = dataclasses.replace(
        _WHOLE,
        sampler="shuffled",
        n_is_public=True,
        max_batch_size=None,
        batch_size=50,
        noise_window=10,
    )
    for first, second in ((shuffled, _SPECS[1]), (_SPECS[0], shuffled)):
        certificate = _next(_first(first), second)
        assert "(zero-out)" in certificate["guarantee"]["adjacency"]
        assert verify_certificate(certificate).problems == ()
        assert _stated(certificate) > _stated(_first(first))
    # The number of units, which the later run protects, is no secret of all of them.
    hidden = dataclasses.replace(_SPECS[1], n_is_public=False)
    for first, said in ((shuffled, False), (_SPECS[0], True)):
        lines = _next(_first(first), hidden)["not_covered"]
        assert any("number itself is protected" in line for line in lines) == said
    # Two runs away, too.
    dealt = dataclasses.replace(_WHOLE, clip_groups=10, sensitivity_multiplier=2.0)
    chain = _next(_first(dealt))
    with pytest.raises(InputError, match="their neighbours differ.*with clip_groups"):
        _next(chain, shuffled, head="h3", pairs="p3")
    plain = _next(_first())
    assert plain["guarantee"]["adjacency"] == "add or remove one unit"


def test_earlier_words_on_what_was_released_before_still_verify():
    """It could only be weights; any other sentence of theirs does not hold."""
    now = _next(_first())
    assert now["continuation"]["in_words"].startswith("This run came after the release")
    before = "Training started from released weights, whose certificate is given as "
    now_rest = now["continuation"]["in_words"].partition(".")[2]
    for start, rest, holds in (
        (f"{before}parent.", now_rest, True),
        (f"{before}parent.", now_rest.replace("all 2 runs", "1 run"), False),
        (f"{before}a joke.", now_rest, False),
        ("Training took place.", now_rest, False),
    ):
        older = copy.deepcopy(now)
        older["continuation"]["in_words"] = f"{start}{rest}"
        older["digest"] = digest_of(older)
        assert (verify_certificate(older).problems == ()) == holds, start


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
    return _kinds()


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
        (_forged(composed, "continuation.parent", {}), "what was run is unknown"),
        (_forged(composed, "continuation.parent", None), "which is not a certificate"),
        (_forged(apart, "fingerprints", {"pairs": "p1"}), "these very pairs"),
        (_forged(apart, "fingerprints", {}), "states the fingerprint of its pairs"),
        (_forged(composed, "ledger_head", "h1"), "a ledger of its own"),
    ):
        assert any(found in problem for problem in verify_certificate(forged).problems)
        with pytest.raises(InputError, match="does not hold"):
            budget.release_of(forged)
    # Fewer steps in the parent, with both digests recomputed.
    parent = _forged(composed["continuation"]["parent"], "accounting.steps_executed", 1)
    forged = _forged(composed, "continuation.parent", parent)
    problems = verify_certificate(forged).problems
    assert any("the certificate of its parent" in problem for problem in problems)


def test_without_the_parent_it_is_another_claim(kinds):
    """The rest is a certificate of the last run alone, whose ε is not its own."""
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
    with pytest.raises(InputError, match="earlier is not what parent says"):
        other = _first(_SPECS[1])
        Continuation(make_plan(_WHOLE), 4, "p2", other, release, None)
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
        assert said.count("Training stopped") == 1  # of all runs, not of one alone
        assert "1 of all" in said and "epsilon_sum at delta_sum" in said
        assert "Of the runs before this one: delta 0.002 is above 1/(2n)" in said
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


def test_a_delta_that_is_large_for_the_log_is_warned_of():
    first = _first()
    loose = dataclasses.replace(_SPECS[1], delta=1.5e-3)  # above 1/(2n)
    told = [w for w in _next(first, loose)["warnings"] if "delta" in w]
    assert told and told[0] == loose.delta_warning
    assert not any("delta" in w for w in _next(first)["warnings"])


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


def test_a_chain_that_protects_nothing_is_refused_before_it_costs_memory():
    """Each run is within the limit of ε by RDP, and all together are not."""
    spec = dataclasses.replace(_WHOLE, epsilon=300.0, accountant="rdp")
    with pytest.raises(InputError, match="for all releases together, which protects"):
        _next(_first(spec), spec)


def test_no_fingerprint_and_an_empty_one_are_the_same():
    with pytest.raises(InputError, match="states the fingerprint of its pairs"):
        _next(_first(pairs=""), disjoint="time")


def test_odd_heads_of_a_parent_are_problems_of_the_certificate(kinds, tmp_path, capsys):
    forged = copy.deepcopy(kinds["composed"])
    for entry, value in (("ledger_head", []), ("selection", {})):
        forged["continuation"]["parent"][entry] = value
        (tmp_path / "certificate.json").write_text(json.dumps(_sealed(forged)))
        ledger = tmp_path / "ledger.jsonl"
        plan = make_plan(_SPECS[0])
        Ledger.open(ledger, plan.fingerprint, "data", plan.spec.steps).close()
        words = ["verify", str(tmp_path / "certificate.json"), f"--ledger={ledger}"]
        with pytest.raises(SystemExit) as caught:
            verify.main(words)
        assert caught.value.code == 1 and "DOES NOT HOLD" in capsys.readouterr().out


def test_a_declaration_that_lowers_nothing_is_not_named(kinds):
    """Users share logs of time, and going back to a log composes all."""
    users = [dataclasses.replace(s, unit="user", rows_per_unit=2) for s in _SPECS[:2]]
    shared = _next(_first(users[0]), users[1], "time")
    back = _next(kinds["time"], _SPECS[2], None, head="h3", pairs="p1")
    for certificate, said in ((shared, []), (back, []), (kinds["time"], ["query"])):
        lines = verify._declared(certificate)
        assert len(lines) == len(said)

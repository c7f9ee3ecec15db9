"""A run chosen among several: what all of them cost, and a certificate that says so."""

import copy
import dataclasses
import math

import dp_accounting
import pytest

from tfdpsq import privacy
from tfdpsq.privacy import (
    PrivacySpec,
    Selection,
    TrainedRun,
    accounting,
    make_plan,
    make_selection_certificate,
    share_epsilon,
    verify_certificate,
)
from tfdpsq.privacy.proof.certificate import digest_of
from tfdpsq.privacy.proof.certified import selection_of
from tfdpsq.privacy.proof.verification import ledger_problems
from tfdpsq.validation import InputError

_EPSILON, _DELTA, _N = 1.0, 2.5e-4, 2000
# Runs of different batches and lengths, three of which cost the same.
_SHAPES = {"a": (100, 8), "b": (50, 16), "c": (100, 8), "d": (100, 8)}


def _specs(**changes):
    values = dict(epsilon=9.0, clip_norm=0.5, num_units=_N, accountant="rdp")
    return [
        PrivacySpec(**{**values, "batch_size": size, "steps": steps, **changes})
        for size, steps in _SHAPES.values()
    ]


@pytest.fixture(scope="module")
def plans():
    return {
        name: make_plan(spec)
        for name, spec in zip(_SHAPES, share_epsilon(_specs(), _EPSILON, _DELTA))
    }


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


def _certificate(selection, reads=()):
    chosen = selection.runs[selection.chosen]
    own = privacy.make_certificate(
        chosen.plan,
        chosen.plan.spec.steps,
        description="A generator.",
        sensitivity_argument="Each loss depends on one query.",
        training={"learning_rate": 0.1},
        fingerprints={"code": "ab"},
        ledger_head=chosen.ledger_head,
    )
    return make_selection_certificate(selection, own, reads)


@pytest.fixture(scope="module", params=["accounted", "declared"])
def certificate(plans, request):
    choice_epsilon = _EPSILON if request.param == "accounted" else None
    return _certificate(_selection(plans, choice_epsilon=choice_epsilon))


def _composed_by_dp_accounting(plans, accountant):
    """ε of all runs by the library's own composition, in one event."""
    event = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(
                    plan.spec.batch_size / _N,
                    dp_accounting.GaussianDpEvent(plan.noise_multiplier),
                ),
                plan.spec.steps,
            )
            for plan in plans
        ]
    )
    one = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    book = (
        dp_accounting.rdp.RdpAccountant(neighboring_relation=one)
        if accountant == "rdp"
        else dp_accounting.pld.PLDAccountant(one, 1e-4)
    )
    book.compose(event)
    return book.get_epsilon(
        _DELTA - sum(p.truncation_delta(p.spec.steps) for p in plans)
    )


@pytest.mark.parametrize(
    "accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)]
)
def test_the_runs_cost_what_the_library_composes(plans, accountant):
    selection = _selection(plans)
    expected = _composed_by_dp_accounting(plans.values(), accountant)
    assert selection.epsilon_of_training(accountant) == pytest.approx(
        expected, rel=1e-3
    )
    # And nothing less than each of them alone, at the same δ.
    for plan in plans.values():
        alone = privacy.epsilon_of(
            plan.noise_multiplier, *plan.releases(plan.spec.steps), _DELTA, accountant
        )
        assert alone < expected


def test_the_shares_use_up_the_target_and_do_not_exceed_it(plans):
    spent = _selection(plans).epsilon_of_training()
    assert 0.99 * _EPSILON <= spent <= _EPSILON
    (each,) = {plan.spec.epsilon for plan in plans.values()}
    # More than an even part of ε; less than the whole of it.
    assert _EPSILON / 4 < each < _EPSILON
    assert {plan.spec.delta for plan in plans.values()} == {_DELTA / 4}
    assert all(plan.epsilon(plan.spec.steps) <= each for plan in plans.values())


@pytest.mark.slow
def test_shares_by_pld_use_up_the_target_and_do_not_exceed_it():
    plans = list(map(make_plan, share_epsilon(_specs(accountant="pld"), 2.0, _DELTA)))
    by_name = dict(zip(_SHAPES, plans))
    selection = _selection(by_name, target_epsilon=2.0, choice_epsilon=2.0)
    assert 0.99 * 2 <= selection.epsilon_of_training() <= 2
    finer = _composed_by_dp_accounting(plans, "pld")
    assert selection.epsilon_of_training() == pytest.approx(finer, rel=2e-3)


def test_a_query_has_the_larger_epsilon_of_training_and_choice(plans):
    trained = _selection(plans).epsilon_of_training()
    for choice_epsilon, expected in ((0.2, trained), (3.0, 3.0), (None, trained)):
        selection = _selection(plans, choice_epsilon=choice_epsilon)
        assert selection.epsilon() == expected
        guarantee = _certificate(selection)["guarantee"]
        assert guarantee["epsilon"] == expected and guarantee["delta"] == _DELTA


def test_the_certificate_says_what_ran_and_how_it_was_chosen(certificate, plans):
    found = certificate["selection"]
    assert found["runs_counted"] == 4 and found["candidates"] == 3
    assert certificate["accounting"]["steps_executed"] == 8 + 16 + 8 + 8
    assert certificate["accounting"]["target_epsilon"] == _EPSILON
    assert certificate["plan"] == plans["b"].fingerprint
    assert certificate["ledger_head"] == "1" * 64
    for name, (size, steps) in _SHAPES.items():
        run, plan = found["runs"][name], plans[name]
        assert run["sampling_probability"] == size / _N
        assert run["steps_executed"] == steps
        assert run["noise_multiplier"] == plan.noise_multiplier
        assert run["spec"]["clip_norm"] == 0.5 and run["spec"]["n"] == _N
    uncovered = " ".join(certificate["not_covered"])
    if found["epsilon_of_choice"] is None:
        assert "were read without noise" in uncovered
        assert "none of those that chose" in certificate["guarantee"]["unit_in_words"]
        assert "nothing is guaranteed" in found["in_words"]
    else:
        assert found["noise_scale"] == 1 / _EPSILON and found["sensitivity"] == 1
        assert "read without noise" not in uncovered
        assert "exponential mechanism" in found["in_words"]
    assert verify_certificate(certificate).problems == ()


def test_a_delta_that_is_large_for_the_log_is_warned_of(certificate):
    delta = 1.5 * _DELTA  # which is 1/(2n)
    plans = {
        name: make_plan(spec)
        for name, spec in zip(_SHAPES, share_epsilon(_specs(), _EPSILON, delta))
    }
    told = _certificate(_selection(plans, delta=delta))["warnings"]
    assert any(f"delta {delta:.3g}" in warning for warning in told), told
    assert not any("delta" in warning for warning in certificate["warnings"])


def test_what_it_was_made_from_can_be_told(certificate, plans):
    choice_epsilon = certificate["selection"]["epsilon_of_choice"]
    assert selection_of(certificate) == _selection(plans, choice_epsilon=choice_epsilon)


def _edited(certificate, *edits):
    copied = copy.deepcopy(certificate)
    for path, value in edits:
        *above, last = path.split("/")
        holder = copied
        for key in above:
            holder = holder[key]
        if value is _GONE:
            del holder[last]
        else:
            holder[last] = value(holder[last]) if callable(value) else value
    return {**copied, "digest": digest_of(copied)}


_GONE = object()


def _lowered(value):
    return 0.8 * value


@pytest.mark.parametrize(
    "edits, message",
    [
        # ε of one run passed off as that of the chosen one.
        ([("guarantee/epsilon", 0.4)], "guarantee.epsilon is 0.4"),
        (
            [
                ("guarantee/epsilon", 0.4),
                ("accounting/epsilon_pld", 0.4),
                ("accounting/epsilon_rdp", 0.4),
                ("accounting/target_epsilon", 0.4),
                ("selection/epsilon_of_training", 0.4),
            ],
            "planned to spend 0.4: a run is left out",
        ),
        # Fewer runs than there were.
        ([("selection/runs_counted", 3)], "selection.runs_counted is 3"),
        ([("selection/runs/d", _GONE)], "the share of one of 3 runs"),
        (
            [("selection/runs/d", _GONE), ("selection/runs_counted", 3)],
            "the share of one of 3 runs",
        ),
        ([("selection/runs", {})], "a selection has 0 runs"),
        ([("selection/runs", None)], "which are no runs"),
        ([("selection/runs/a", None)], "must have exactly these entries"),
        ([("selection", _GONE)], "accounting.steps_executed"),
        ([("selection", None)], "which are no runs"),
        # Fewer steps, more noise, smaller batches of one run.
        ([("selection/runs/a/steps_executed", 4)], "'a' has 4 steps of 8"),
        (
            [
                ("selection/runs/a/steps_executed", 4),
                ("selection/runs/a/spec/steps", 4),
                ("accounting/steps_executed", 36),
                ("accounting/steps_planned", 36),
                ("accounting/releases_counted", 36),
            ],
            "selection.runs.a.plan is",
        ),
        # These take new compositions by PLD.
        pytest.param(
            [("selection/runs/a/noise_multiplier", lambda sigma: 3 * sigma)],
            "selection.runs.a.plan is",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [("selection/runs/a/noise_multiplier", _lowered)],
            "run 'a': mechanism.noise_multiplier is",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [("selection/runs/a/spec/batch_size", 50)],
            "run 'a': sampler.max_batch_size is",
            marks=pytest.mark.slow,
        ),
        ([("selection/runs/a/spec/n", 4000)], "of the selection has n"),
        ([("selection/runs/a/spec/epsilon", 0.1)], "of the selection has epsilon"),
        ([("selection/runs/a/spec/unit", "user")], "has unit 'user'"),
        ([("selection/runs/a/plan", "0" * 64)], "selection.runs.a.plan is"),
        ([("selection/runs/a/diverged", True)], "selection.candidates is 3"),
        ([("selection/runs/a/diverged", None)], "diverged None, which they cannot be"),
        ([("selection/runs/a/settings", None)], "settings None"),
        ([("selection/runs/a/extra", 1)], "selection.runs.a.extra is there"),
        # A run that could not be chosen, or another one.
        ([("selection/chosen", "d")], "the chosen run is 'd'"),
        ([("selection/chosen", "a")], "ledger_head is"),
        ([("selection/chosen", 1)], "both must be texts"),
        ([("selection/score", None)], "both must be texts"),
        # More δ for the runs, or less.
        ([("guarantee/delta", 1e-4)], "of the selection has delta"),
        # What would be guaranteed of held-out queries.
        ([("guarantee/unit_in_words", "one query")], "guarantee.unit_in_words is"),
        ([("selection/method", "none")], "selection.method is"),
        ([("not_covered", lambda lines: lines[:-1])], "not_covered is"),
        ([("selection/in_words", "")], "selection.in_words is"),
        ([("ledger_head", "a" * 64)], "ledger_head is"),
        ([("selection/note", 1)], "selection.note is there"),
    ],
)
def test_forgeries_with_a_new_digest_are_found(certificate, edits, message):
    problems = verify_certificate(_edited(certificate, *edits)).problems
    assert any(message in problem for problem in problems), problems
    assert not any(problem.startswith("digest") for problem in problems)


@pytest.mark.parametrize(
    "edits, message",
    [
        ([("selection/epsilon_of_choice", 0.1)], "selection.noise_scale is 1.0"),
        (
            [("selection/epsilon_of_choice", 0.1), ("selection/noise_scale", 10.0)],
            "selection.in_words is",
        ),
        ([("selection/epsilon_of_choice", None)], "selection.method is"),
        ([("selection/epsilon_of_choice", "x")], "the epsilon of the choice is 'x'"),
        ([("selection/epsilon_of_choice", -1)], "the epsilon of the choice is -1"),
        ([("selection/noise_scale", 2.0)], "selection.noise_scale is 2.0"),
        ([("selection/sensitivity", 0.5)], "selection.sensitivity is 0.5"),
        (
            [("selection/epsilon_of_choice", 3.0), ("selection/noise_scale", 1 / 3)],
            "guarantee.epsilon is",
        ),
    ],
)
def test_forgeries_of_the_choice_are_found(plans, edits, message):
    forged = _edited(_certificate(_selection(plans)), *edits)
    problems = verify_certificate(forged).problems
    assert any(message in problem for problem in problems), problems


def test_a_declared_choice_cannot_be_passed_off_as_a_private_one(plans):
    declared = _certificate(_selection(plans, choice_epsilon=None))
    forged = _edited(declared, ("selection/epsilon_of_choice", 1.0))
    assert len(verify_certificate(forged).problems) >= 5


def test_a_run_left_out_consistently_is_found_by_its_share_of_delta(plans):
    """The forger has the true code, and three of four runs."""
    runs = _selection(plans).runs
    with pytest.raises(InputError, match="the share of one of 3 runs is"):
        _selection(plans, runs={name: runs[name] for name in "abc"})


def test_the_grid_of_all_runs_is_the_finest_that_one_of_them_needs(plans):
    """Losses of one release are of the order of 1/σ²: the more noise, the finer."""
    sigmas = dict(zip("abcd", (0.5, 0.4, 0.8, 0.6)))
    runs = {
        name: dataclasses.replace(
            run, plan=dataclasses.replace(run.plan, noise_multiplier=sigmas[name])
        )
        for name, run in _selection(plans).runs.items()
    }
    found = _selection(plans, runs=runs).pld_interval
    assert found == pytest.approx(1e-4 / 0.8**2)


def test_a_run_left_out_with_its_share_of_delta_shows_in_what_was_spent():
    """The forger shows nine of ten equal runs, with the δ of nine.

    Nothing contradicts itself then, but that nine spend less than the target.
    """
    spec = PrivacySpec(
        epsilon=1.0,
        clip_norm=1.0,
        num_units=_N,
        batch_size=200,
        steps=2,
        accountant="rdp",
    )
    plan = make_plan(share_epsilon([spec] * 10, _EPSILON, _DELTA)[0])
    shown = {f"run {i}": TrainedRun(plan, {}, f"{i}" * 64) for i in range(9)}
    selection = _selection({}, runs=shown, chosen="run 0", delta=0.9 * _DELTA)
    (problem,) = verify_certificate(_certificate(selection)).problems
    assert "all 9 runs together spend epsilon" in problem
    assert "a run is left out, or another one added" in problem


def test_a_ledger_is_compared_with_the_run_it_is_of(plans, certificate, tmp_path):
    heads = {}
    for name, plan in plans.items():
        path = tmp_path / f"{name}.jsonl"
        with privacy.Ledger.open(
            path, plan.fingerprint, "data", plan.spec.steps
        ) as ledger:
            for step in range(plan.spec.steps):
                ledger.pay(step)
            heads[name] = ledger.summary
    runs = {
        name: dataclasses.replace(run, ledger_head=heads[name].head)
        for name, run in _selection(plans).runs.items()
    }
    made = _certificate(_selection(plans, runs=runs))
    for summary in heads.values():
        assert ledger_problems(made, summary) == ()
    (problem,) = ledger_problems(certificate, heads["a"])
    assert "no run of the selection has a ledger" in problem
    other = dataclasses.replace(heads["a"], steps_paid=7)
    (problem,) = ledger_problems(made, other)
    assert problem == "accounting.steps_executed is 8, but the steps paid for are 7."


def test_without_privacy_it_guarantees_nothing():
    specs = _specs(epsilon=math.inf)
    plans = dict(zip(_SHAPES, map(make_plan, specs)))
    selection = _selection(plans, target_epsilon=math.inf, choice_epsilon=None)
    made = _certificate(selection)
    assert made["private"] is False and made["guarantee"]["epsilon"] == "inf"
    assert made["selection"]["epsilon_of_training"] == "inf"
    assert verify_certificate(made).problems == ()
    with pytest.raises(InputError, match="a private choice protects nothing"):
        _selection(plans, target_epsilon=math.inf)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(unit="user"), "has unit 'user'"),
        # For one query with several pairs, another guarantee than the chosen run's.
        (dict(unit="pair"), "has unit 'pair', and another one 'query'"),
        (dict(secure=True), "has secure True, and another one False"),
        (dict(n_is_public=True), "has n_is_public True, and another one False"),
        (dict(epsilon=3.0), "has epsilon 3.0, and another one"),
        (dict(sampler="shuffled", n_is_public=True), "has sampler 'shuffled'"),
        (dict(num_units=1999), "has num_units 1999"),
        (dict(accountant="pld"), "has accountant 'pld'"),
        (dict(delta=_DELTA), "has delta 0.00025, and another one 6.25e-05"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(plans, changes, message):
    runs = dict(_selection(plans).runs)
    spec = dataclasses.replace(plans["b"].spec, **changes)
    runs["b"] = TrainedRun(dataclasses.replace(plans["b"], spec=spec), {}, None)
    with pytest.raises(InputError, match=message):
        _selection(plans, runs=runs)


def test_one_run_is_no_selection(plans):
    runs = _selection(plans).runs
    with pytest.raises(InputError, match="a selection has 1 runs"):
        _selection(plans, runs={"b": runs["b"]})


def test_runs_that_were_not_planned_together_get_no_certificate(plans):
    """Each planned as if it were the only one."""
    selection = _selection(plans, target_epsilon=0.9)
    with pytest.raises(InputError, match="above their target 0.9"):
        _certificate(selection)


def test_the_truncation_of_every_run_is_taken_off_delta(plans):
    """Batches cut off so often that two runs use up most of δ."""
    spec = dataclasses.replace(plans["a"].spec, delta=_DELTA / 2)
    plan = dataclasses.replace(plans["a"], spec=spec)
    plan = next(
        cut
        for cut in (
            dataclasses.replace(plan, max_batch_size=m) for m in range(100, 200)
        )
        if cut.truncation_delta(spec.steps) < 0.4 * _DELTA
    )
    tau = plan.truncation_delta(spec.steps)
    assert 0.2 * _DELTA < tau
    runs = {name: TrainedRun(plan, {}, None) for name in "ab"}
    selection = _selection(plans, runs=runs)
    assert selection.truncation_delta == pytest.approx(2 * tau)

    def spent(left):
        events = ((plan.noise_multiplier, plan.sampling_probability, 2 * spec.steps),)
        return accounting.composed_epsilon(events, left, "rdp")

    found = selection.epsilon_of_training()
    assert found == pytest.approx(spent(_DELTA - 2 * tau), rel=1e-9)
    assert spent(_DELTA) < spent(_DELTA - tau) < 0.99 * found


def test_two_runs_of_one_ledger_are_no_selection(plans, certificate):
    """Composition counts a ledger's run once, so that ε would look smaller."""
    runs = _selection(plans).runs
    runs["a"] = dataclasses.replace(runs["a"], ledger_head=runs["b"].ledger_head)
    with pytest.raises(InputError, match="'a' and 'b' .* one ledger head"):
        _selection(plans, runs=runs)
    forged = copy.deepcopy(certificate)
    for entry in forged["selection"]["runs"].values():
        entry["ledger_head"] = forged["ledger_head"]
    forged["digest"] = digest_of(forged)
    assert any("one ledger head" in p for p in verify_certificate(forged).problems)


@pytest.mark.parametrize("draw", ["", "0", "g" * 32, 7])
def test_a_draw_that_is_no_name_is_refused(plans, draw):
    forged = _certificate(_selection(plans, draw="0" * 32))
    assert verify_certificate(forged).problems == ()
    forged["selection"]["draw"] = draw
    forged["digest"] = digest_of(forged)
    assert any("draw is" in p for p in verify_certificate(forged).problems)

"""A certificate that was edited anywhere is found out, and by what.

The digest finds every edit. Behind it, what follows from other entries is found even
by those who make the digest anew; `_WORD_OF_THE_MAKER` lists all that is not.
"""

import copy
import dataclasses
import math

import pytest
from helpers import plans

from tfdpsq.privacy import (
    Ledger,
    PrivacySpec,
    make_plan,
    read_ledger,
    verify_certificate,
)
from tfdpsq.privacy.proof.certificate import digest_of
from tfdpsq.privacy.proof.verification import ledger_problems, plan_of
from tfdpsq.validation import InputError

_KINDS = {
    "poisson": dict(delta=4e-4, max_batch_size=160),
    "shuffled users": dict(
        sampler="shuffled",
        n_is_public=True,
        unit="user",
        rows_per_unit=3,
        accountant="rdp",
    ),
    "without privacy": dict(epsilon=math.inf),
}
# Entries nothing else follows from. An edit of them with a new digest goes unseen.
_WORD_OF_THE_MAKER = (
    "description",
    "mechanism.sensitivity_argument",
    "accounting.library_version",
    "ledger_head",
    "training",
    "fingerprints",
    "private_reads",
)


def _plan(kind):
    values = dict(
        epsilon=0.5,
        clip_norm=0.5,
        num_units=2000,
        batch_size=100,
        steps=12,
        sensitivity_multiplier=2.0,
    )
    return make_plan(PrivacySpec(**{**values, **_KINDS[kind]}))


def _certificate(kind, steps=None, ledger_head="ab" * 32):
    if steps is None:  # as many as planned, which saves one evaluation by PLD
        steps = 12 if kind == "poisson" else 10
    return plans.certificate(
        _plan(kind),
        steps,
        training={"engine": "fast", "learning_rate": 0.001, "jit": False},
        fingerprints={"code": "cd" * 32},
        private_reads=[{"what": "losses", "where": "terminal"}],
        ledger_head=ledger_head,
    )


@pytest.fixture(scope="module", params=sorted(_KINDS))
def certificate(request):
    return _certificate(request.param)


def _leaves(value, path=()):
    """Paths to all that is neither an object nor a list, list entries included."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, (dict, list)):
            yield from _leaves(inner, (*path, key))
        else:
            yield (*path, key)


def _edited(certificate, *edits):
    """A copy with each (path, value) put in; a value may be made from the old one."""
    copied = copy.deepcopy(certificate)
    for path, value in edits:
        path = path.split(".") if isinstance(path, str) else path
        holder = copied
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value(holder[path[-1]]) if callable(value) else value
    return copied


def _sealed(certificate):
    """The certificate with its digest made anew, as a careful forger would."""
    return {**certificate, "digest": digest_of(certificate)}


def _others(value):
    """Values beside this one that an edit might put there."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value - 1, 2 * value + 1]
    if isinstance(value, float):
        return [0.999 * value, 2 * value]
    if value is None:
        return [0.0001, "x"]
    return [value + " ", "inf"]


def _is_word_of_the_maker(path):
    dotted = ".".join(str(key) for key in path) + "."
    return any(dotted.startswith(f"{word}.") for word in _WORD_OF_THE_MAKER)


def _about_the_digest(problem):
    return problem.startswith("digest is")


def test_an_untouched_certificate_holds(certificate):
    result = verify_certificate(certificate)
    assert result.problems == ()
    accounts = certificate["accounting"]
    assert result.epsilon_pld == float(accounts["epsilon_pld"])
    assert result.epsilon_rdp == float(accounts["epsilon_rdp"])


def test_every_edit_of_any_entry_is_found_and_nearly_all_without_the_digest(
    certificate,
):
    seen = 0
    for path in _leaves(certificate):
        original = certificate
        for key in path:
            original = original[key]
        for value in _others(original):
            if value == original or path in (("digest",), ("format",)):
                continue
            seen += 1
            problems = verify_certificate(_edited(certificate, (path, value))).problems
            assert any(map(_about_the_digest, problems)), (path, value)
            inner = [p for p in problems if not _about_the_digest(p)]
            if _is_word_of_the_maker(path):
                assert not inner or path[-1] == "library_version", (path, value, inner)
            else:
                assert inner, (path, value)
    assert seen > 90


def test_every_entry_that_is_left_out_or_added_is_found(certificate):
    paths = [(key,) for key in certificate if key not in ("digest", "format")]
    paths += [
        (section, key)
        for section in ("spec", "guarantee", "mechanism", "sampler", "accounting")
        for key in certificate[section]
    ]
    for path in paths:
        left_out = copy.deepcopy(certificate)
        holder = left_out if len(path) == 1 else left_out[path[0]]
        del holder[path[-1]]
        assert verify_certificate(_sealed(left_out)).problems, path
    for path in ("note", "guarantee.note", "spec.note", "sampler.note"):
        *above, name = path.split(".")
        added = copy.deepcopy(certificate)
        (added[above[0]] if above else added)[name] = 1
        assert verify_certificate(_sealed(added)).problems, path


def test_a_digest_that_was_edited_is_found(certificate):
    (problem,) = verify_certificate({**certificate, "digest": "0" * 64}).problems
    assert "the file was changed after it was made" in problem
    without = {key: value for key, value in certificate.items() if key != "digest"}
    assert verify_certificate(without).problems


def _times(factor):
    return lambda value: value * factor


@pytest.mark.parametrize(
    "junk", [None, "", "x", -1, 0, 1.5, 1e308, 10**400, [], {}, [1], {"a": 1}, True]
)
def test_junk_in_any_place_is_a_problem_and_no_crash(junk):
    certificate = _certificate("shuffled users")
    places = [(key,) for key in certificate if key != "format"]
    places += [path for path in _leaves(certificate) if len(path) > 1]
    for path in places:
        found = certificate
        for key in path:
            found = found[key]
        if junk == found or _is_word_of_the_maker(path):
            continue
        # 3 for True in rows_per_unit is no problem of type, but of value.
        result = verify_certificate(_sealed(_edited(certificate, (path, junk))))
        if path != ("digest",):
            assert result.problems, (path, junk)


@pytest.mark.parametrize("secure", [False, True])
def test_a_new_certificate_with_a_withdrawn_sentence_is_refused_or_warned_of(secure):
    """Ten queries of one person do not have "about" ten times ε at the same delta.

    No version that drew noise with 128 bits wrote it. Of a secure plan the entries do
    not tell the version, so its sentence may be an honest one: told with what is true.
    """
    spec = _plan("poisson").spec
    plan = make_plan(dataclasses.replace(spec, secure=secure))
    made = plans.certificate(plan)
    assert verify_certificate(made).warnings == ()
    (place,) = (
        i for i, line in enumerate(made["not_covered"]) if "wrote several" in line
    )
    made["not_covered"][place] = (
        "A person who wrote several queries: each query is protected by itself, and k "
        "of them together by about k times epsilon."
    )
    found = verify_certificate(_sealed(made))
    (warning,) = found.warnings
    assert "True is:" in warning and "can have far more" in warning
    if secure:
        assert found.problems == ()
    else:
        (problem,) = found.problems
        assert problem.startswith("not_covered is")


@pytest.mark.parametrize("sigma", [1e-9, 1e-4, 0.01])
def test_absurdly_little_noise_is_told_and_not_computed_with(sigma):
    """PLD would need gigabytes for it."""
    forged = _edited(_certificate("poisson"), ("mechanism.noise_multiplier", sigma))
    result = verify_certificate(forged)
    assert any("protects nothing" in problem for problem in result.problems)


def test_a_value_json_cannot_hold_is_a_problem():
    certificate = _edited(_certificate("poisson"), ("guarantee.epsilon", math.nan))
    (problem,) = verify_certificate(certificate).problems
    assert "this is no JSON" in problem


@pytest.mark.parametrize(
    "value, message",
    [
        ({"format": "tfdpsq-certificate/1"}, "held too little to be verified"),
        ({"format": "other"}, "format is 'other'"),
        ({}, "this is no tfdpsq-certificate/2 file"),
        ([], "this is no tfdpsq-certificate/2 file"),
    ],
)
def test_other_formats_are_refused(value, message):
    with pytest.raises(InputError, match=message):
        verify_certificate(value)


def test_a_higher_epsilon_is_taken_from_an_older_accountant_only():
    """It is still true, and a finer grid makes it so."""
    certificate = _certificate("poisson")
    slightly = [
        ("guarantee.epsilon", _times(1.002)),
        ("accounting.epsilon_pld", _times(1.002)),
    ]
    assert verify_certificate(_sealed(_edited(certificate, *slightly))).problems
    older = ("accounting.library_version", "0.4.0")
    sealed = _sealed(_edited(certificate, older, *slightly))
    assert verify_certificate(sealed).problems == ()
    lower = _edited(certificate, older, ("guarantee.epsilon", _times(0.998)))
    (problem,) = verify_certificate(_sealed(lower)).problems
    assert "the file was made with 0.4.0" in problem


def test_rounding_of_another_machine_is_taken_and_no_more():
    """PLD's rounding of 20,000 steps is 2e-5 of a δ of 1e-6."""
    spec = PrivacySpec(
        epsilon=4.0, clip_norm=1.0, num_units=500_000, batch_size=500, steps=20_000
    )
    true = plans.certificate(make_plan(spec))
    for share, verifies in ((1 - 1e-5, True), (1 - 1e-4, False), (1 + 1e-4, False)):
        names = ("guarantee.epsilon", "accounting.epsilon_pld")
        edited = _edited(true, *((name, _times(share)) for name in names))
        assert (verify_certificate(_sealed(edited)).problems == ()) is verifies
    # RDP has no such rounding.
    edited = _edited(true, ("accounting.epsilon_rdp", _times(1 - 1e-5)))
    assert verify_certificate(_sealed(edited)).problems
    by_rdp = make_plan(dataclasses.replace(spec, accountant="rdp"))
    true = plans.certificate(by_rdp)
    edited = _edited(true, ("guarantee.epsilon", _times(1 - 1e-5)))
    assert verify_certificate(_sealed(edited)).problems


def test_the_plan_can_be_told_from_the_certificate():
    for kind in _KINDS:
        assert plan_of(_certificate(kind, 10)) == (_plan(kind), 10)


def test_only_the_ledger_tells_a_consistent_forgery(tmp_path):
    """Twelve steps ran, and a whole certificate is made for five of them."""
    plan = _plan("poisson")
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, plan.fingerprint, "data", plan.spec.steps) as ledger:
        for step in range(12):
            ledger.pay(step)
    summary = read_ledger(path)
    true = _certificate("poisson", ledger_head=summary.head)
    assert verify_certificate(true).problems == ()
    assert ledger_problems(true, summary) == ()

    forged = _certificate("poisson", 5, summary.head)
    assert verify_certificate(forged).problems == ()
    (problem,) = ledger_problems(forged, summary)
    assert problem == "accounting.steps_executed is 5, but the steps paid for are 12."
    for edit, found in (
        (("ledger_head", "0" * 64), "the ledger's last line is"),
        (("ledger_head", None), "the ledger's last line is"),
        (("plan", "0" * 64), "the ledger was opened for the plan"),
        (("accounting.steps_planned", 13), "the ledger's plan has 12"),
    ):
        (problem,) = ledger_problems(_edited(true, edit), summary)
        assert found in problem


def test_values_that_a_file_holds_are_cut_in_what_is_said_of_them(certificate):
    certificate = {**certificate, "ledger_head": ["x" * 5000], "digest": "y" * 5000}
    said = verify_certificate(certificate).problems
    assert len(said) >= 2 and all(len(line) < 400 for line in said)

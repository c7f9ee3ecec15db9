"""Verification recomputes a certificate's numbers from the few that decide them."""

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
from tfdpsq.privacy.proof.certificate import Certificate, ledger_problems

_KINDS = {
    "poisson": dict(delta=4e-4, max_batch_size=160),
    "shuffled users": dict(
        sampler="shuffled",
        n_is_public=True,
        unit="user",
        rows_per_unit=3,
        accountant="rdp",
    ),
    "pairs": dict(unit="pair", accountant="rdp"),
    "secure": dict(secure=True, accountant="rdp"),
    "without privacy": dict(epsilon=math.inf),
}


def _plan(kind):
    values = {"epsilon": 0.5, "num_units": 2000, "batch_size": 100, "steps": 12}
    values |= {"sensitivity_multiplier": 2.0, "accountant": "pld"}
    return plans.plan(**{**values, **_KINDS[kind]})


def _certificate(kind, steps=12, run_id="ab" * 16):
    return plans.certificate(_plan(kind), steps, run_id=run_id)


def _edited(certificate, *edits):
    """A copy with each (path, value) put in; a value may be made from the old one."""
    copied = copy.deepcopy(certificate)
    for path, value in edits:
        *above, last = path.split(".")
        holder = copied
        for key in above:
            holder = holder[key]
        holder[last] = value(holder[last]) if callable(value) else value
    return copied


def _times(factor):
    return lambda value: value * factor


@pytest.mark.parametrize("kind", sorted(_KINDS))
def test_untouched_certificate_holds_and_describes_its_plan(kind):
    certificate = _certificate(kind, 10 if kind == "shuffled users" else 12)
    result = verify_certificate(certificate)
    assert result.problems == ()
    accounts = certificate["accounting"]
    assert result.epsilon_pld == float(accounts["epsilon_pld"])
    assert result.epsilon_rdp == float(accounts["epsilon_rdp"])
    read = Certificate.from_json(certificate)
    assert (read.plan, read.steps) == (_plan(kind), accounts["steps_executed"])
    assert read.to_json() == certificate


@pytest.mark.parametrize(
    "edits",
    [
        [
            ("guarantee.epsilon", _times(1 - 1e-5)),
            ("accounting.epsilon_pld", _times(1 - 1e-5)),
        ],
        [
            ("mechanism.noise_multiplier", _times(2)),
            ("mechanism.noise_stddev", _times(2)),
        ],
        [("mechanism.noise_multiplier", _times(0.5))],
        [("spec.num_units", 4000), ("sampler.n", 4000)],
        [("accounting.steps_executed", 5), ("accounting.releases_counted", 5)],
        [("guarantee.delta", 1e-6), ("spec.delta", 1e-6)],
        [("spec.max_batch_size", 200), ("sampler.max_batch_size", 200)],
        [("sampler", lambda held: {k: v for k, v in held.items() if k != "n"})],
        [("mechanism.sensitivity", None)],
        [("spec", [])],
        [("guarantee.unit", "user")],
    ],
)
def test_verification_recomputes_the_numbers(edits):
    assert verify_certificate(_edited(_certificate("poisson"), *edits)).problems


def test_words_are_not_compared():
    """Another version may say them better."""
    words = ("description", "guarantee.adjacency", "sampler.in_words", "warnings")
    changed = _edited(_certificate("poisson"), *((path, "other") for path in words))
    assert verify_certificate(changed).problems == ()


def test_higher_epsilon_of_a_coarser_accountant_is_taken():
    """It is still true."""
    for factor, problems in ((1.002, 0), (0.998, 2), (1.02, 2)):
        names = ("guarantee.epsilon", "accounting.epsilon_pld")
        edits = ((name, _times(factor)) for name in names)
        found = verify_certificate(_edited(_certificate("poisson"), *edits))
        assert len(found.problems) == problems


def test_rounding_of_another_machine_is_taken_and_no_more():
    """PLD's rounding of 20,000 steps is 2e-5 of a δ of 1e-6."""
    spec = PrivacySpec(
        epsilon=4.0, clip_norm=1.0, num_units=500_000, batch_size=500, steps=20_000
    )
    true = plans.certificate(make_plan(spec))
    for share, verifies in ((1 - 1e-5, True), (1 - 1e-4, False)):
        names = ("guarantee.epsilon", "accounting.epsilon_pld")
        edited = _edited(true, *((name, _times(share)) for name in names))
        assert (verify_certificate(edited).problems == ()) is verifies
    # RDP has no such rounding.
    true = plans.certificate(make_plan(dataclasses.replace(spec, accountant="rdp")))
    edited = _edited(true, ("guarantee.epsilon", _times(1 - 1e-5)))
    assert verify_certificate(edited).problems


def test_ledger_tells_how_many_steps_were_paid(tmp_path):
    plan = _plan("poisson")
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, plan.fingerprint, "data", plan.spec.steps) as ledger:
        for step in range(12):
            ledger.pay(step)
    summary = read_ledger(path)
    true = _certificate("poisson", run_id=summary.run)
    assert ledger_problems(true, summary) == ()
    fewer = _certificate("poisson", 5, summary.run)
    assert verify_certificate(fewer).problems == ()
    (problem,) = ledger_problems(fewer, summary)
    assert "12" in problem
    assert len(ledger_problems(_certificate("poisson"), summary)) == 1

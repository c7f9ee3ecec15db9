"""What a certificate says, and that a file which was touched is not taken for one."""

import functools
import json
import math

import numpy as np
import pytest
import scipy.stats
from helpers import plans

from tfdpsq.privacy import (
    read_certificate,
    verify_certificate,
)
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof.certificate_files import MARK
from tfdpsq.validation import DataError, InputError

_plan = functools.partial(plans.plan, num_units=2000, batch_size=100, steps=20)


def _certificate(steps=20, changes=(), **options):
    values = dict(
        description="T5 fine-tuned on pairs",
        sensitivity_argument="each loss depends on one query",
        training={"optimizer": "adam", "learning_rate": 1e-3},
        fingerprints={"code": "ab12"},
    )
    return plans.certificate(_plan(**dict(changes)), steps, **{**values, **options})


def test_it_says_what_was_guaranteed_and_by_what():
    plan, certificate = _plan(), _certificate(ledger_head="f" * 64)
    assert certificate["format"] == "tfdpsq-certificate/2"
    assert certificate["private"] is True
    assert certificate["plan"] == plan.fingerprint
    assert certificate["ledger_head"] == "f" * 64
    guarantee, mechanism = certificate["guarantee"], certificate["mechanism"]
    assert guarantee["epsilon"] == plan.epsilon(20) <= 2
    assert guarantee["delta"] == 1 / 4000
    assert guarantee["unit"] == "query"
    assert "one query, together with the document" in guarantee["unit_in_words"]
    assert guarantee["adjacency"] == "add or remove one unit"
    assert mechanism["name"].startswith("Poisson-subsampled Gaussian mechanism")
    assert mechanism["noise_stddev"] == mechanism["noise_multiplier"] * 0.5
    assert mechanism["sensitivity_argument"] == "each loss depends on one query"
    sampler, accounts = certificate["sampler"], certificate["accounting"]
    assert (sampler["n"], sampler["expected_batch_size"]) == (2000, 100)
    assert sampler["sampling_probability"] == 0.05
    assert "a public upper bound" in sampler["n_in_words"]
    assert "probability 100/2000" in sampler["in_words"]
    assert accounts["epsilon_rdp"] == guarantee["epsilon"]
    assert accounts["epsilon_pld"] == plan.epsilon(20, "pld") < guarantee["epsilon"]
    assert accounts["delta_for_truncation"] == plan.truncation_delta(20) > 0
    assert accounts["library_version"].startswith("0.4")
    assert certificate["warnings"] == []
    assert any("wrote several queries" in line for line in certificate["not_covered"])


def test_epsilon_is_of_the_steps_that_ran_and_stopping_early_is_warned_of():
    certificate = _certificate(steps=5)
    assert certificate["guarantee"]["epsilon"] == _plan().epsilon(5) < 1.5
    assert certificate["accounting"]["target_epsilon"] == 2.0
    (warning,) = certificate["warnings"]
    assert "stopped after 5 of 20 planned steps" in warning
    assert _certificate(steps=0)["guarantee"]["epsilon"] == 0
    with pytest.raises(InputError, match="21 steps were executed but the plan covers"):
        _certificate(steps=21)


def test_shuffled_batches_are_labelled_and_claim_no_amplification():
    certificate = _certificate(changes=dict(sampler="shuffled", n_is_public=True))
    assert certificate["guarantee"]["adjacency"].startswith("replace all that one unit")
    assert "zero-out" in certificate["guarantee"]["adjacency"]
    assert certificate["mechanism"]["name"].startswith("Gaussian mechanism on shuffled")
    sampler = certificate["sampler"]
    assert sampler["sampling_probability"] is None
    assert sampler["max_batch_size"] == 100
    assert "not Poisson samples" in sampler["in_words"]
    assert "no amplification by sampling was claimed" in sampler["in_words"]
    assert "the exact number of units, declared to be public" == sampler["n_in_words"]
    assert certificate["accounting"]["releases_counted"] == 1  # 20 steps an epoch


@pytest.mark.parametrize("public", [True, False])
def test_the_number_of_units_is_said_to_be_protected_unless_it_was_declared(public):
    lines = _certificate(changes=dict(n_is_public=public))["not_covered"]
    bound = ["the number itself is protected" in line for line in lines]
    declared = ["which was declared to be public" in line for line in lines]
    assert any(declared) is public and any(bound) is not public


def test_users_are_named_as_what_is_protected():
    certificate = _certificate(changes=dict(unit="user", rows_per_unit=4))
    assert "all of that user's queries" in certificate["guarantee"]["unit_in_words"]
    assert "up to 4 of its rows" in certificate["sampler"]["in_words"]
    assert any("group of users" in line for line in certificate["not_covered"])


def test_pairs_are_named_as_what_is_protected_and_queries_as_what_is_not():
    certificate = _certificate(changes=dict(unit="pair"))
    assert certificate["guarantee"]["unit"] == certificate["spec"]["unit"] == "pair"
    assert "is as many units" in certificate["guarantee"]["unit_in_words"]
    (line,) = (line for line in certificate["not_covered"] if "each pair" in line)
    assert line.startswith("A query with several documents")
    assert "not the query that it is of" in line
    assert verify_certificate(certificate).problems == ()
    query = _certificate()
    assert not any("several documents" in line for line in query["not_covered"])


@pytest.mark.parametrize("k, epsilon", [(2, 1.0), (10, 8.0)])
def test_what_it_says_of_several_units_is_true_of_gaussian_noise(k, epsilon):
    """k units in every batch move the sum k times as far, which is σ/k for one.

    By the closed form for Gaussian noise (Balle and Wang 2018, theorem 8), at the
    delta that is stated k times epsilon holds, and at the same delta it does not.
    """
    plan = _plan(epsilon=epsilon, batch_size=2000, n_is_public=True, steps=1)
    said = plans.certificate(plan)["not_covered"]
    assert any("k * exp((k - 1) * epsilon) times as much" in line for line in said)
    spent, delta = plan.epsilon(1, "pld"), plan.spec.target_delta
    mu = k / plan.noise_multiplier
    at = [side * mu / 2 - k * spent / mu for side in (1, -1)]
    needed = scipy.stats.norm.cdf(at[0]) - math.exp(k * spent) * scipy.stats.norm.cdf(
        at[1]
    )
    assert delta < needed < k * math.exp((k - 1) * spent) * delta


@pytest.mark.parametrize("unit", ["query", "pair", "user"])
def test_a_certificate_in_the_words_before_holds_and_no_others(unit):
    # Secure, as its entries on random numbers are the same in every version.
    certificate = _certificate(changes=dict(unit=unit, secure=True))
    before = "by itself, and k of them together by about k times epsilon."

    def worded(change):
        lines = [
            change(line.partition("by itself")[0]) if "by itself" in line else line
            for line in certificate["not_covered"]
        ]
        assert lines != certificate["not_covered"]
        made = {**certificate, "not_covered": lines}
        return {**made, "digest": certificates.digest_of(made)}

    assert verify_certificate(certificate).problems == ()
    older = verify_certificate(worded(lambda start: start + before)).problems
    # Pairs came later, so none of theirs was ever made in those words.
    assert bool(older) == (unit == "pair")
    for other in (before[:-1], "", before.replace("about", "much less than")):
        made = worded(lambda start, other=other: start + other)
        (problem,) = verify_certificate(made).problems
        assert problem.startswith("not_covered is")


def test_a_large_delta_is_warned_of():
    (warning,) = _certificate(changes=dict(delta=4e-4, epsilon=math.inf))["warnings"]
    assert "delta 0.0004 is above 1/(2n) = 0.00025" in warning


def test_without_privacy_it_says_so():
    certificate = _certificate(changes=dict(epsilon=math.inf))
    assert certificate["private"] is False
    assert certificate["guarantee"]["epsilon"] == "inf"
    assert certificate["mechanism"]["name"] == "none: no clipping and no noise"
    assert certificate["mechanism"]["noise_stddev"] == 0


def test_it_is_plain_json_and_the_digest_is_of_all_of_it():
    certificate = _certificate(
        training={"rows": np.int64(3), "rate": np.float32(0.5), "shape": (1, 2)}
    )
    assert certificate["training"] == {"rows": 3, "rate": 0.5, "shape": [1, 2]}
    again = json.loads(json.dumps(certificate, indent=2, sort_keys=True))
    assert again == certificate
    assert certificates.digest_of(again) == certificate["digest"]
    again["training"]["rows"] = 4
    assert certificates.digest_of(again) != certificate["digest"]


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}, object()])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(InputError, match="the certificate holds what JSON cannot"):
        _certificate(training={"value": value})


@pytest.mark.parametrize("name", ["config.json", "model/config.json", "stage.json"])
def test_a_certificate_that_is_stated_has_to_be_there(tmp_path, name):
    certificate = _certificate()
    (tmp_path / "model").mkdir()
    for unmarked in ("[]", '{"certificate": 1}', "{"):
        (tmp_path / name).write_text(unmarked)
        if (name, unmarked) == ("stage.json", "{"):  # others are read by their own code
            with pytest.raises(DataError, match="stage.json: it cannot be read"):
                read_certificate(tmp_path)
        else:
            assert read_certificate(tmp_path) is None
    (tmp_path / name).write_text(json.dumps({MARK: certificate["digest"], "a": 1}))
    with pytest.raises(DataError, match="certificate.json: missing, while .*Copy that"):
        read_certificate(tmp_path)
    (tmp_path / "certificate.json").write_text(json.dumps(certificate))
    assert read_certificate(tmp_path) == certificate
    other = _certificate(training={"another": 1})
    (tmp_path / "certificate.json").write_text(json.dumps(other))
    with pytest.raises(DataError, match="certificate.json: of something else, while"):
        read_certificate(tmp_path)


def test_reading_takes_an_untouched_file_only(tmp_path):
    assert read_certificate(tmp_path) is None
    certificate = _certificate()
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(certificate, indent=1))
    assert read_certificate(tmp_path) == certificate
    certificate["guarantee"]["epsilon"] = 0.5
    path.write_text(json.dumps(certificate))
    with pytest.raises(DataError, match="certificate.json: its digest is not that"):
        read_certificate(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "is not a certificate"),
        ("[1, 2]", "this is no tfdpsq-certificate/2 file"),
        ("{}", "this is no tfdpsq-certificate/2 file"),
        ('{"format": "tfdpsq-certificate/2"', "is not a certificate"),
        ('{"format": "tfdpsq-certificate/3"}', "format is 'tfdpsq-certificate/3'"),
        (
            '{"format": "tfdpsq-certificate/1"}',
            "format is 'tfdpsq-certificate/1', which held too little to be verified",
        ),
        (
            '{"format": "tfdpsq-certificate/2", "a": {"b": 1, "b": 2}}',
            "'b' stands there twice",
        ),
        ('{"format": "tfdpsq-certificate/2", "a": NaN}', "NaN is no JSON"),
        ('{"format": "tfdpsq-certificate/2", "a": -Infinity}', "-Infinity is no JSON"),
        ("[" * 100_000, "is not a certificate"),
        (b"\xff\xfe", "is not a certificate"),
    ],
)
def test_files_that_are_no_certificates_are_refused(tmp_path, content, message):
    path = tmp_path / "certificate.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match="certificate.json") as caught:
        certificates.load_certificate(path)
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="none.json: cannot be read"):
        certificates.load_certificate(tmp_path / "none.json")


def test_guarantees_follow_and_do_not_merge():
    one, other = _certificate(), _certificate(steps=19)
    unprotected = _certificate(changes=dict(epsilon=math.inf))
    inherited = certificates.inherited_certificate
    assert inherited(None, None) is None
    assert inherited(None, one, one) == one
    assert inherited(one, unprotected) == unprotected
    # Two runs add up even if they have the same ε and the same plan.
    again = _certificate(ledger_head="a" * 64)
    for another in (other, again):
        with pytest.raises(InputError, match="their epsilons would add up"):
            inherited(one, another)
    assert inherited(None, one) == inherited(one, None) == one

"""Certificates: what they state, and which files are read as one."""

import functools
import json
import math

import numpy as np
import pytest
import scipy.stats
from helpers import plans

from tfdpsq.privacy import read_certificate
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.validation import DataError, InputError

_plan = functools.partial(plans.plan, num_units=2000, batch_size=100, steps=20)


def _certificate(steps=20, changes=(), **options):
    return plans.certificate(_plan(**dict(changes)), steps, **options)


def test_certificate_states_the_plans_numbers_and_both_accountants():
    plan, certificate = _plan(), _certificate(run_id="f" * 32)
    assert certificate["private"] is True
    assert certificate["plan"] == plan.fingerprint
    assert certificate["run_id"] == "f" * 32
    guarantee, mechanism = certificate["guarantee"], certificate["mechanism"]
    assert guarantee["epsilon"] == plan.epsilon(20) <= 2
    assert guarantee["delta"] == 1 / 4000
    assert guarantee["unit"] == "query"
    assert guarantee["adjacency"] == "add or remove one unit"
    assert mechanism["noise_stddev"] == mechanism["noise_multiplier"] * 0.5
    sampler, accounts = certificate["sampler"], certificate["accounting"]
    assert (sampler["n"], sampler["expected_batch_size"]) == (2000, 100)
    assert sampler["sampling_probability"] == 0.05
    assert accounts["epsilon_rdp"] == guarantee["epsilon"]
    assert accounts["epsilon_pld"] == plan.epsilon(20, "pld") < guarantee["epsilon"]
    assert accounts["delta_for_truncation"] == plan.truncation_delta(20) > 0
    assert certificate["warnings"] == []


def test_epsilon_is_of_the_executed_steps_and_an_early_stop_is_warned_of():
    certificate = _certificate(steps=5)
    assert certificate["guarantee"]["epsilon"] == _plan().epsilon(5) < 1.5
    assert certificate["accounting"]["target_epsilon"] == 2.0
    (warning,) = certificate["warnings"]
    assert "5 of 20" in warning
    assert _certificate(steps=0)["guarantee"]["epsilon"] == 0
    with pytest.raises(InputError, match="21"):
        _certificate(steps=21)


@pytest.mark.parametrize("k, epsilon", [(2, 1.0), (10, 8.0)])
def test_stated_group_privacy_holds_for_gaussian_noise(k, epsilon):
    """k units in every batch move the sum k times as far, which is σ/k for one.

    By the closed form for Gaussian noise (Balle and Wang 2018, theorem 8), k·ε holds
    at k·exp((k - 1)·ε)·δ, as the certificate says, and not at the same δ.
    """
    plan = _plan(epsilon=epsilon, batch_size=2000, n_is_public=True, steps=1)
    spent, delta = plan.epsilon(1, "pld"), plan.spec.target_delta
    mu = k / plan.noise_multiplier
    at = [side * mu / 2 - k * spent / mu for side in (1, -1)]
    needed = scipy.stats.norm.cdf(at[0]) - math.exp(k * spent) * scipy.stats.norm.cdf(
        at[1]
    )
    assert delta < needed < k * math.exp((k - 1) * spent) * delta
    assert any(
        "exp((k - 1) * epsilon)" in line
        for line in plans.certificate(plan)["not_covered"]
    )


def test_without_privacy_epsilon_is_infinite_and_a_large_delta_is_warned_of():
    certificate = _certificate(changes=dict(delta=4e-4, epsilon=math.inf))
    assert certificate["private"] is False
    assert certificate["guarantee"]["epsilon"] == "inf"
    assert certificate["mechanism"]["noise_stddev"] == 0
    (warning,) = certificate["warnings"]
    assert "0.0004" in warning


def test_certificate_is_plain_json_and_its_digest_covers_all_of_it():
    certificate = _certificate(
        training={"rows": np.int64(3), "rate": np.float32(0.5), "shape": (1, 2)}
    )
    assert certificate["training"] == {"rows": 3, "rate": 0.5, "shape": [1, 2]}
    again = json.loads(json.dumps(certificate, indent=2, sort_keys=True))
    assert again == certificate
    assert certificates.digest_of(again) == certificate["digest"]
    again["training"]["rows"] = 4
    assert certificates.digest_of(again) != certificate["digest"]
    with pytest.raises(KeyError, match="NaN"):
        _certificate(training={"value": math.nan})


@pytest.mark.parametrize("name", ["config.json", "model/config.json"])
def test_artefact_copied_without_its_certificate_is_refused(tmp_path, name):
    certificate = _certificate()
    (tmp_path / "model").mkdir()
    for unmarked in ("[]", '{"certificate": 1}'):
        (tmp_path / name).write_text(unmarked)
        assert read_certificate(tmp_path) is None
    (tmp_path / name).write_text(
        json.dumps({certificates.MARK: certificate["digest"], "a": 1})
    )
    with pytest.raises(DataError, match="certificate.json: missing"):
        read_certificate(tmp_path)
    (tmp_path / "certificate.json").write_text(json.dumps(certificate))
    assert read_certificate(tmp_path) == certificate
    other = _certificate(training={"another": 1})
    (tmp_path / "certificate.json").write_text(json.dumps(other))
    with pytest.raises(DataError, match="certificate.json: of something else"):
        read_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "stage.json").write_text("{")
    with pytest.raises(DataError, match="stage.json"):
        read_certificate(tmp_path / "other")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is not a certificate"),
        (b"\xff\xfe", "is not a certificate"),
        (b"[1, 2]", "it is no tfdpsq-certificate/4"),
        (b'{"format": "tfdpsq-certificate/3"}', "it is no tfdpsq-certificate/4"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_certificates_are_refused(tmp_path, content, message):
    path = tmp_path / "certificate.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="certificate.json") as caught:
        certificates.load_certificate(path)
    assert message in str(caught.value)


def test_one_guarantee_is_inherited_and_two_would_add_up():
    one, other = _certificate(), _certificate(steps=19)
    unprotected = _certificate(changes=dict(epsilon=math.inf))
    inherited = certificates.inherited_certificate
    assert inherited(None, None) is None
    assert inherited(None, one, one) == one
    assert inherited(one, None) == one
    assert inherited(one, unprotected) == unprotected
    # Two runs add up even if they have the same ε and the same plan.
    again = _certificate(run_id="a" * 32)
    for another in (other, again):
        with pytest.raises(InputError, match="add up"):
            inherited(one, another)

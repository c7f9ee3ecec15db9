"""Certificates that version 0.1.0 wrote still verify, and edited ones are refused.

Users keep a certificate for as long as the artefact, so `verify` must go on to read
what earlier versions wrote: the same ε, and no problem where there was none. When a
change to certificates breaks this test, it needs a new format number and the rules of
the old one beside it, not new fixtures; see fixtures/certificates_0.1/README.md.
"""

import copy
import json
import pathlib

import pytest

from tfdpsq.privacy.proof.certificate import digest_of
from tfdpsq.run import verify

_FOLDER = pathlib.Path(__file__).parent / "fixtures" / "certificates_0.1"
_NAMES = sorted(path.parent.name for path in _FOLDER.glob("*/certificate.json"))
_UNPROTECTED = "generator_unprotected"
# Chosen among several runs, whose steps are in each run's own entry.
_CHOSEN = [name for name in _NAMES if name.startswith("chosen")]
# Made from a generator's output: the certificate and the ledger are the generator's.
_LEDGER_OF = {
    "synthetic": "generator_pld",
    "retriever_inherited": "generator_pld",
}


def _each(*quick):
    """All artefacts; those that are not named run with the slow tests.

    Every call computes ε by Fourier transforms, which takes a second or more.
    """
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=() if name in quick else pytest.mark.slow)
            for name in _NAMES
        ],
    )


def _load(name):
    return json.loads((_FOLDER / name / "certificate.json").read_text())


def _ledgers(name):
    return sorted((_FOLDER / _LEDGER_OF.get(name, name)).glob("*.jsonl"))


def _verify(capsys, path, *ledgers):
    """Exit status of the command, and what it printed."""
    words = [f"--ledger={ledger}" for ledger in ledgers]
    with pytest.raises(SystemExit) as ended:
        verify.main(["verify", str(path), *words])
    said = capsys.readouterr()
    return ended.value.code, said.out + said.err


def _edited(directory, certificate, sealed):
    """Writes a certificate, with a digest that fits where it is `sealed`."""
    if sealed:
        certificate = {**certificate, "digest": digest_of(certificate)}
    path = directory / "edited.json"
    path.write_text(json.dumps(certificate))
    return path


def test_the_fixtures_are_one_of_each_kind():
    kinds = {
        (
            found["spec"]["unit"],
            found["spec"]["accountant"],
            found["spec"]["sampler"],
            found["training"].get("method"),
        )
        for found in map(_load, _NAMES)
        if "selection" not in found
    }
    assert kinds == {
        ("query", "pld", "poisson", None),
        ("query", "rdp", "poisson", None),
        ("query", "rdp", "shuffled", None),
        ("user", "pld", "poisson", None),
        *(
            ("query", "rdp", "poisson", method)
            for method in ("naive", "microbatch", "logit_dp", "public_negatives")
        ),
    }
    costs = [_load(name)["selection"]["epsilon_of_choice"] for name in _CHOSEN]
    assert costs == [8.0, None]  # accounted, declared
    assert {found["format"] for found in map(_load, _NAMES)} == {"tfdpsq-certificate/2"}


@_each("generator_pld", "generator_shuffled", "generator_user", "chosen_declared")
def test_it_holds_with_its_ledgers_and_the_same_epsilon(name, capsys):
    path, ledgers = _FOLDER / name / "certificate.json", _ledgers(name)
    assert len(ledgers) == (2 if name in _CHOSEN else 1)
    code, said = _verify(capsys, path, *ledgers)
    assert code == 0, said
    assert ("the maker's word" in said) == (name == "chosen_accounted")
    # "recomputed  epsilon 7.98736 by PLD, 10.2179 by RDP, …": six digits
    words = said.split("recomputed")[1].split()
    accounts = _load(name)["accounting"]
    if name != _UNPROTECTED:
        assert float(words[1]) == pytest.approx(accounts["epsilon_pld"], rel=1e-3)
        assert float(words[4]) == pytest.approx(accounts["epsilon_rdp"], rel=1e-3)
        assert "holds: it agrees with itself and with" in said
    else:
        assert "guarantees nothing" in said
    # What they say of several units of one owner was found to be too little.
    assert said.count("warning     not_covered says") == 1
    assert "at the same delta they can have far more" in said


@pytest.mark.parametrize("sealed", [False, True], ids=["old digest", "new digest"])
@_each("generator_shuffled")
def test_an_edited_one_is_refused(name, sealed, tmp_path, capsys):
    certificate = _load(name)
    # What was run is believed, and what follows from it is not what is stated.
    follows = "Training stopped after 1 of"
    if name == _UNPROTECTED:
        follows = "accounting.releases_counted is 12"
    if name in _CHOSEN:
        follows = "accounting.steps_executed is 1"
    for section, key, value, problem in (
        ("guarantee", "epsilon", 0.5, "guarantee.epsilon is 0.5"),
        ("accounting", "steps_executed", 1, follows),
    ):
        changed = copy.deepcopy(certificate)
        changed[section][key] = value
        code, said = _verify(capsys, _edited(tmp_path, changed, sealed))
        assert code == 1 and problem in said, said
        assert ("digest is" in said) == (not sealed)
    for section, key in (("guarantee", "delta"), ("sampler", None)):
        changed = copy.deepcopy(certificate)
        if key is None:
            del changed[section]
        else:
            del changed[section][key]
        code, said = _verify(capsys, _edited(tmp_path, changed, sealed))
        assert code == 1 and section in said, said


@_each("generator_shuffled")
def test_a_ledger_of_another_run_is_refused(name, tmp_path, capsys):
    path = _FOLDER / name / "certificate.json"
    others = "generator_pld" if "generator_pld" != _LEDGER_OF.get(name, name) else ""
    other = _ledgers(others or "generator_rdp")[0]
    code, said = _verify(capsys, path, other)
    assert code == 1 and str(other) in said, said
    # A step fewer than the certificate counts, in the ledger that is its own.
    own = tmp_path / "ledger.jsonl"
    own.write_text("".join(_ledgers(name)[0].read_text().splitlines(True)[:-1]))
    code, said = _verify(capsys, path, own)
    assert code == 1 and "ledger" in said, said

"""Certificates in words: what a newcomer needs to know of a guarantee."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq.run.reporting.report_html import (
    bullets,
    definitions,
    epsilon_text,
    escape,
    number_text,
)

_MISSING = "not stated"


def all_in_words(certificates: Sequence[Mapping[str, Any]]) -> str:
    """Returns the certificates as HTML: a card each, then what holds for all.

    Args:
      certificates: {name, certificate} of each training run on private queries.
        What was derived from a run without private data costs nothing more: list
        the run once.
    """
    private = [
        item["certificate"] for item in certificates if _is_private(item["certificate"])
    ]
    common = []
    if len(private) > 1:
        common = [
            line
            for line in private[0].get("not_covered", [])
            if all(line in other.get("not_covered", []) for other in private)
        ]
    cards = "".join(
        in_words(item["name"], item["certificate"], common) for item in certificates
    )
    if common:
        cards += f"<h3>Not covered by any of these guarantees</h3>{bullets(common)}"
    return cards + composition(certificates)


def in_words(
    name: str, certificate: Mapping[str, Any], said_elsewhere: Sequence[str] = ()
) -> str:
    """Returns one certificate as a card of HTML.

    Args:
      name: of the artefact that carries it.
      certificate: as `tfdpsq.privacy.make_certificate` gives it; what it leaves
        out is shown as "not stated", never guessed.
      said_elsewhere: lines of "not_covered" to leave out here.
    """
    is_private = _is_private(certificate)
    particulars = {**_particulars(certificate), **_choice(certificate)}
    if is_private:
        particulars.update(_limits(certificate, said_elsewhere))
    state = " open" if is_private else ""
    return (
        f'<div class="card"><h3>{escape(name)}</h3>'
        f'<p class="muted">{escape(_at(certificate, "description"))}</p>'
        f"<p>{escape(_promise(certificate))}</p>"
        f"<details{state}><summary>Particulars</summary>"
        f"{definitions(particulars)}</details></div>"
    )


def composition(certificates: Sequence[Mapping[str, Any]]) -> str:
    """Returns what holds for all private artefacts together, as HTML.

    Training runs on the same queries protect them by the sum of their ε and of
    their δ (basic composition, Dwork and Roth 2014, theorem 3.16).
    """
    different = [
        item["certificate"] for item in certificates if _is_private(item["certificate"])
    ]
    if len(different) < 2:
        return ""
    epsilon = sum(_epsilon(certificate) for certificate in different)
    delta = sum(float(certificate["guarantee"]["delta"]) for certificate in different)
    return (
        f"<p>Releasing what came of all {len(different)} protected runs above, where "
        "they used the same queries, protects each query only at the sum: "
        f"ε = {epsilon_text(epsilon)}, δ = {delta:.3g}.</p>"
    )


def _promise(certificate: Mapping[str, Any]) -> str:
    if not _is_private(certificate):
        return (
            "No guarantee (ε = ∞): private queries may be read off from what was "
            "trained. Do not release it."
        )
    epsilon, delta = _epsilon(certificate), _at(certificate, "guarantee.delta")
    factor = math.exp(min(epsilon, 700.0))
    unit = _at(certificate, "guarantee.unit")
    if _at(certificate, "selection.epsilon_of_choice") is None:
        unit = f"{unit} that was trained on"
    # Batches of a fixed size protect what a unit holds, among a fixed number of them.
    change = (
        f"Had any {unit} been replaced by nothing"
        if _at(certificate, "spec.sampler") == "shuffled"
        else f"Had any {unit} been left out of the private data, or one been added"
    )
    return (
        f"{change}, nobody could tell from the result but within "
        f"these limits: no outcome is more than e^ε = {factor:,.4g} times as likely "
        f"with it as without it, or the reverse (ε = {epsilon_text(epsilon)}), except "
        f"for a probability of δ = {number_text(delta)}. Smaller is safer."
    )


def _particulars(certificate: Mapping[str, Any]) -> dict[str, Any]:
    def at(key: str) -> str:
        return number_text(_at(certificate, key))

    return {
        "What is protected": at("guarantee.unit_in_words"),
        "Neighbouring data": at("guarantee.adjacency"),
        "ε and δ": f"ε = {_epsilon_at(certificate, 'guarantee.epsilon')}, "
        f"δ = {at('guarantee.delta')}; the target was ε = "
        f"{_epsilon_at(certificate, 'accounting.target_epsilon')}",
        "ε by two accountants": "PLD "
        f"{_epsilon_at(certificate, 'accounting.epsilon_pld')}, RDP "
        f"{_epsilon_at(certificate, 'accounting.epsilon_rdp')} "
        f"({at('accounting.library')} {at('accounting.library_version')})",
        "Mechanism": at("mechanism.name"),
        "Noise": f"noise multiplier {at('mechanism.noise_multiplier')}, clip norm "
        f"{at('mechanism.clip_norm')}, sensitivity {at('mechanism.sensitivity')}",
        "Why this sensitivity": at("mechanism.sensitivity_argument"),
        "Units": f"n = {at('sampler.n')}, {at('sampler.n_in_words')}; "
        f"{at('sampler.expected_batch_size')} expected and at most "
        f"{at('sampler.max_batch_size')} a step",
        "Sampler": f"{at('sampler.name')}. {at('sampler.in_words')}",
        "Steps executed": f"{at('accounting.steps_executed')} of "
        f"{at('accounting.steps_planned')} planned",
    }


def _choice(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Of a run that was chosen among several: how, and what that cost."""
    if "selection" not in certificate:
        return {}
    return {
        "Chosen among several runs": _at(certificate, "selection.in_words"),
        "Score": _at(certificate, "selection.score"),
        "ε of the runs and of the choice": f"all "
        f"{_at(certificate, 'selection.runs_counted')} runs "
        f"{_epsilon_at(certificate, 'selection.epsilon_of_training')}, the choice "
        + (
            "not covered"
            if _at(certificate, "selection.epsilon_of_choice") is None
            else _epsilon_at(certificate, "selection.epsilon_of_choice")
        ),
        "Mechanism, noise and sampler above": "of the run that was chosen",
    }


def _limits(
    certificate: Mapping[str, Any], said_elsewhere: Sequence[str]
) -> dict[str, Any]:
    reads = certificate.get("private_reads")
    limits = certificate.get("not_covered")
    shown: dict[str, Any] = {
        "Private reads that ε does not cover": _MISSING
        if reads is None
        else [": ".join(str(part) for part in read.values()) for read in reads]
    }
    if limits is None:
        shown["Not covered"] = _MISSING
    elif left := [line for line in limits if line not in said_elsewhere]:
        shown["Not covered"] = left
    if certificate.get("warnings"):
        shown["Warnings"] = certificate["warnings"]
    return shown


def _is_private(certificate: Mapping[str, Any]) -> bool:
    # The numbers decide: a certificate that lost its ε or δ promises nothing.
    delta = _at(certificate, "guarantee.delta")
    return math.isfinite(_epsilon(certificate)) and isinstance(delta, float)


def _epsilon(certificate: Mapping[str, Any]) -> float:
    value = _at(certificate, "guarantee.epsilon")
    return math.inf if value in (None, _MISSING) else float(value)


def _epsilon_at(certificate: Mapping[str, Any], key: str) -> str:
    value = _at(certificate, key)
    return _MISSING if value == _MISSING else epsilon_text(value)


def _at(certificate: Mapping[str, Any], key: str) -> Any:
    value: Any = certificate
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value

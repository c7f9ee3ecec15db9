"""Certificates in words: what a newcomer needs to know about a guarantee."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq.run.reporting.wording import epsilon_text, most_text, number_text

_MISSING = "not stated"
# What a guarantee is of, and of what it is not, for each unit.
_UNITS = {
    "query": (
        "query of the private training pairs",
        "a person who wrote several queries",
    ),
    "pair": (
        "pair of a private query and a document",
        "a query with several documents, or a person who wrote several queries,",
    ),
    "user": ("user of the private training pairs", "a group of users"),
}


def in_words(certificates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the certificates' text for the page.

    `certificates` are {name, certificate} of each training run on private queries. A
    run's derivatives without private data cost nothing more: list the run once.

    Returns:
      "cards", one for each certificate; "not_covered", the lines that all private
      ones share; "sum", the guarantee of all together, or "" for fewer than two.
      A value that a certificate lacks is "not stated", never guessed.
    """
    private = [c["certificate"] for c in certificates if _is_private(c["certificate"])]
    common: list[str] = []
    if len(private) > 1:
        limits = [certificate.get("not_covered", []) for certificate in private]
        common = [line for line in limits[0] if all(line in each for each in limits)]
    return {
        "cards": [_card(c["name"], c["certificate"], common) for c in certificates],
        "not_covered": common,
        "sum": _composition(private),
    }


def protected_units(certificates: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Returns the unit that private runs protect, and what they do not protect.

    `certificates` are as in `in_words`; where their units differ, the words fit any.
    """
    units = {
        _at(each["certificate"], "guarantee.unit")
        for each in certificates
        if _is_private(each["certificate"])
    }
    if len(units) > 1:
        return "unit named in its certificate", "a group of several units"
    return _UNITS.get(next(iter(units), "query"), _UNITS["query"])


def _card(
    name: str, certificate: Mapping[str, Any], said_elsewhere: Sequence[str]
) -> dict[str, Any]:
    private = _is_private(certificate)
    particulars = {
        **_particulars(certificate),
        **_continuation(certificate),
    }
    if private:
        particulars.update(_limits(certificate, said_elsewhere))
    return {
        "name": name,
        "private": private,
        "description": _at(certificate, "description"),
        "promise": _promise(certificate),
        "particulars": particulars,
    }


def _composition(private: Sequence[Mapping[str, Any]]) -> str:
    """Returns the guarantee of all private artefacts together.

    Training runs on the same queries protect them by the sum of their ε and of
    their δ (basic composition, Dwork and Roth 2014, theorem 3.16).
    """
    if len(private) < 2:
        return ""
    epsilon = sum(_epsilon(certificate) for certificate in private)
    delta = sum(float(certificate["guarantee"]["delta"]) for certificate in private)
    units = {_at(certificate, "guarantee.unit") for certificate in private}
    unit = units.pop() if len(units) == 1 else "unit"
    return (
        f"Releasing what came of all {len(private)} protected runs above, where they "
        f"used the same queries, protects each {unit} only at the sum: "
        f"ε = {epsilon_text(epsilon)}, δ = {most_text(delta)}. `tfdpsq verify` "
        "verifies the certificates, and gives a smaller total where all settings were "
        "fixed beforehand."
    )


def _promise(certificate: Mapping[str, Any]) -> str:
    if not _is_private(certificate):
        return (
            "No guarantee (ε = ∞): private queries may be read off from what was "
            "trained. Do not release it."
        )
    epsilon, delta = _epsilon(certificate), _at(certificate, "guarantee.delta")
    factor = float(most_text(math.exp(min(epsilon, 700.0)), 4))
    unit = _at(certificate, "guarantee.unit")
    # Batches of a fixed size protect what a unit holds, among a fixed number of them.
    change = (
        f"Had any {unit} been replaced by nothing"
        if "zero-out" in str(_at(certificate, "guarantee.adjacency"))
        else f"Had any {unit} been left out of the private data, or one been added"
    )
    return (
        f"{change}, nobody could tell from the result but within "
        f"these limits: no outcome is more than e^ε = {factor:,.4g} times as likely "
        f"with it as without it, or the reverse (ε = {epsilon_text(epsilon)}), except "
        f"for a probability of δ = {most_text(delta)}. Smaller is safer."
    )


def _particulars(certificate: Mapping[str, Any]) -> dict[str, Any]:
    def at(key: str) -> str:
        return number_text(_at(certificate, key))

    return {
        "What is protected": at("guarantee.unit_in_words"),
        "Neighbouring data": at("guarantee.adjacency"),
        "ε and δ": f"ε = {_epsilon_at(certificate, 'guarantee.epsilon')}, "
        f"δ = {_most_at(certificate, 'guarantee.delta')}; the target "
        f"{'of the last run ' if 'continuation' in certificate else ''}was ε = "
        f"{_epsilon_at(certificate, 'accounting.target_epsilon')}",
        "ε by two accountants": "PLD "
        f"{_epsilon_at(certificate, 'accounting.epsilon_pld')}, RDP "
        f"{_epsilon_at(certificate, 'accounting.epsilon_rdp')} "
        f"({at('accounting.library')})",
        "Mechanism": at("mechanism.name"),
        "Noise": f"noise multiplier {at('mechanism.noise_multiplier')}, clip norm "
        f"{at('mechanism.clip_norm')}, sensitivity {at('mechanism.sensitivity')}",
        "Why this sensitivity": at("mechanism.sensitivity_argument"),
        "Units": f"n = {at('sampler.n')}; "
        f"{at('sampler.expected_batch_size')} expected and at most "
        f"{at('sampler.max_batch_size')} a step",
        "Sampler": f"{at('sampler.name')}. {at('sampler.in_words')}",
        "Steps executed": f"{at('accounting.steps_executed')} of "
        f"{at('accounting.steps_planned')} planned",
    }


def _continuation(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Describes the released weights that training started from."""
    if "continuation" not in certificate:
        return {}
    earlier = _at(certificate["earlier"][0], "guarantee.epsilon")
    return {
        "Continued from released weights": _at(certificate, "continuation.in_words"),
        "ε of this run and of the weights": "this run "
        f"{_epsilon_at(certificate, 'continuation.epsilon_of_this_run')}, the weights "
        f"{earlier if earlier == _MISSING else epsilon_text(float(earlier))}",
        "Mechanism, noise, sampler and steps above": "of the last run",
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


def _most_at(certificate: Mapping[str, Any], key: str) -> str:
    value = _at(certificate, key)
    return most_text(value, 4) if isinstance(value, float) else number_text(value)


def _at(certificate: Mapping[str, Any], key: str) -> Any:
    value: Any = certificate
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value

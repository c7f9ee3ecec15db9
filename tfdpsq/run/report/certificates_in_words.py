"""Certificates in words: what a newcomer needs to know about a guarantee."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq.run.report.wording import epsilon_text, most_text, number_text

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

    A value that a certificate lacks is "not stated", never guessed.

    Args:
      certificates: {"name", "certificate"} of each training run on private queries,
        once: what derives from a run without private data costs nothing more.

    Returns:
      "cards", one for each certificate; "sum", the guarantee of all together, or "" for
      fewer than two; "unit" and "beyond": what is protected, and what is not.
    """
    private = [c["certificate"] for c in certificates if _protects(c["certificate"])]
    units = {_at(each, "guarantee.unit") for each in private}
    unit = _UNITS.get(next(iter(units), "query"), _UNITS["query"])
    if len(units) > 1:
        unit = "unit named in its certificate", "a group of several units"
    return {
        "cards": [_card(c["name"], c["certificate"]) for c in certificates],
        "sum": _sum(private),
        "unit": unit[0],
        "beyond": unit[1],
    }


def _card(name: str, of: Mapping[str, Any]) -> dict[str, Any]:
    private = _protects(of)
    return {
        "name": name,
        "private": private,
        "description": _at(of, "description"),
        "promise": _promise(of)
        if private
        else (
            "No guarantee (ε = ∞): private queries may be read off from what was "
            "trained. Do not release it."
        ),
        "particulars": {**_particulars(of), **(_limits(of) if private else {})},
    }


def _sum(private: Sequence[Mapping[str, Any]]) -> str:
    """Returns the guarantee of all artefacts together.

    Runs on the same queries protect them by the sums of their ε and of their δ (basic
    composition, Dwork and Roth 2014, theorem 3.16).
    """
    if len(private) < 2:
        return ""
    epsilon = sum(_epsilon(each) for each in private)
    delta = sum(float(each["guarantee"]["delta"]) for each in private)
    return (
        f"Releasing what came of all {len(private)} protected runs, where they used "
        f"the same queries, protects each unit only at the sum: ε = "
        f"{epsilon_text(epsilon)}, δ = {most_text(delta)}. `tfdpsq verify` gives a "
        "smaller total where all settings were fixed beforehand."
    )


def _promise(of: Mapping[str, Any]) -> str:
    epsilon, unit = _epsilon(of), _at(of, "guarantee.unit")
    factor = float(most_text(math.exp(min(epsilon, 700.0)), 4))
    # Batches of a fixed size protect the content of a unit, among a fixed number.
    replaced = "zero-out" in str(_at(of, "guarantee.adjacency"))
    change = (
        f"Had any {unit} been replaced by nothing"
        if replaced
        else f"Had any {unit} been left out of the private data, or one been added"
    )
    return (
        f"{change}, no outcome would be more than e^ε = {factor:,.4g} times as likely, "
        f"or the reverse (ε = {epsilon_text(epsilon)}), except for a probability of "
        f"δ = {most_text(_at(of, 'guarantee.delta'))}. Smaller is safer."
    )


def _particulars(of: Mapping[str, Any]) -> dict[str, Any]:
    def at(key: str) -> str:
        return number_text(_at(of, key))

    def epsilon(key: str) -> str:
        value = _at(of, key)
        return _MISSING if value == _MISSING else epsilon_text(value)

    earlier = {}
    if "continuation" in of:
        own = epsilon("continuation.epsilon_of_this_run")
        said = f"{at('continuation.in_words')} This run: ε = {own}."
        earlier = {"Earlier releases": said}
    return {
        "Protected": at("guarantee.unit_in_words"),
        "Neighbouring data": at("guarantee.adjacency"),
        "Accountants": f"PLD ε = {epsilon('accounting.epsilon_pld')}, RDP ε = "
        f"{epsilon('accounting.epsilon_rdp')} ({at('accounting.library')})",
        "Mechanism": f"{at('mechanism.name')}; noise multiplier "
        f"{at('mechanism.noise_multiplier')}, clip norm {at('mechanism.clip_norm')}, "
        f"sensitivity {at('mechanism.sensitivity')}",
        "Why this sensitivity": at("mechanism.sensitivity_argument"),
        "Sampler": f"{at('sampler.name')}, n = {at('sampler.n')}, "
        f"{at('sampler.expected_batch_size')} expected in a step. "
        f"{at('sampler.in_words')}",
        "Steps": f"{at('accounting.steps_executed')} of "
        f"{at('accounting.steps_planned')} planned",
        **earlier,
    }


def _limits(of: Mapping[str, Any]) -> dict[str, Any]:
    reads, limits = of.get("private_reads"), of.get("not_covered")
    shown: dict[str, Any] = {"Private reads that ε does not cover": _MISSING}
    if reads is not None:
        lines = [": ".join(map(str, read.values())) for read in reads]
        shown["Private reads that ε does not cover"] = lines
    shown["Not covered"] = _MISSING if limits is None else limits
    if of.get("warnings"):
        shown["Warnings"] = of["warnings"]
    return shown


def _protects(of: Mapping[str, Any]) -> bool:
    # A certificate that lost its ε or δ promises nothing.
    finite = math.isfinite(_epsilon(of))
    return finite and isinstance(_at(of, "guarantee.delta"), float)


def _epsilon(of: Mapping[str, Any]) -> float:
    value = _at(of, "guarantee.epsilon")
    return math.inf if value in (None, _MISSING) else float(value)


def _at(of: Mapping[str, Any], key: str) -> Any:
    value: Any = of
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value

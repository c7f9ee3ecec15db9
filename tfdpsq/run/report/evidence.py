"""The report's evidence: what leaked, and how close sets are to the private queries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tfdpsq.run.report import plots
from tfdpsq.run.report.wording import MISSING, epsilon_text, least_text, number_text

_ATTACKS = {
    "generator": "the generator's likelihoods",
    "set_language_model": "a language model of the set",
    "set_nearest": "the most similar query of the set",
    "loss": "the generator's loss",
    "likelihood_ratio": "likelihood against public weights",
}
# A mean rank this unlikely by chance is called a leak.
_LEVEL = 0.05

Audit = Mapping[str, Any]  # the content of an `audit.json`


def leakage(audits: Mapping[str, Audit]) -> dict[str, Any] | None:
    """Returns what the audits found, by audited generator; `None` without an audit."""
    if not audits:
        return None
    entries = [(name, e) for name, found in audits.items() for e in found["canaries"]]
    return {
        "verdicts": [
            v for name, found in audits.items() for v in _verdicts(name, found)
        ],
        "canaries": [
            [
                (name, f"{entry['form']}, {_repeated(entry)}"),
                (f"{entry['mean_rank']:.1f}", f"p = {entry['p_value']:.2g}"),
                f"{sum(entry['exposure']) / len(entry['exposure']):.2f} bits",
                f"{entry['leaked']:.0%}",
                _share(entry["leaked_in_set"]),
                least_text(entry["epsilon_pure"], 3),
            ]
            for name, entry in entries
            if entry["form"] != "all"
        ],
        "plot": _exposures(audits) if entries else None,
        "bounds": [
            [
                (name, f"by {_ATTACKS.get(attack, attack)}"),
                epsilon_text(found["epsilon_certified"]),
                least_text(bound["epsilon"], 3),
                f"{bound['correct']} of {sum(bound['guesses'])}",
                f"{bound['canaries']:,}",
            ]
            for name, found in audits.items()
            for attack, bound in found["one_run"].items()
        ],
        "membership": [
            [
                (name, f"by {_ATTACKS.get(attack, attack)}"),
                _interval(of["auc"], "{:.3f}"),
                _interval(list(of["true_positive_rates"].values())[0], "{:.2%}"),
            ]
            for name, found in audits.items()
            for attack, of in found["membership"].items()
        ],
    }


def _verdicts(name: str, found: Audit) -> Iterator[str]:
    """Yields an audit's findings as sentences that need no table."""
    entries = [entry for entry in found["canaries"] if entry["form"] == "all"]
    for entry in entries:
        rank = (
            f"mean rank {entry['mean_rank']:.1f}, by chance {entry['chance']:g} of "
            f"{entry['candidates']} (p = {entry['p_value']:.2g})"
        )
        learnt = entry["p_value"] < _LEVEL
        said = "were learnt" if learnt else "look like secrets that nobody trained on"
        yield (
            f"{name}: secrets {_repeated(entry)} {said}: {rank}; "
            f"{entry['leaked']:.0%} of them were written out."
        )
    certified = float(found["epsilon_certified"])
    if entries and math.isfinite(certified):
        yield _of_a_secret(name, found, max(entry["units"] for entry in entries))
    if not found["one_run"]:
        return
    strongest = max(each["epsilon"] for each in found["one_run"].values())
    if math.isinf(certified):
        verdict = "with nothing certified"
    elif strongest <= certified:
        verdict = f"below the certified {epsilon_text(certified)}, as it must be"
    elif "zero-out" in str(found.get("adjacency")):
        verdict = (
            f"above the certified {epsilon_text(certified)}, which it does not refute: "
            "that is for queries replaced by nothing, not left out as here"
        )
    else:
        verdict = "which refutes the certificate: do not release anything"
    yield (
        f"{name}: the strongest attack shows that ε is at least "
        f"{least_text(strongest, 2)} ({found['confidence']:.0%} confidence), {verdict}."
    )


def _of_a_secret(name: str, found: Audit, most: int) -> str:
    """Returns what the unit of protection means for a secret that is repeated."""
    certified = float(found["epsilon_certified"])
    said = f"{name}: ε = {epsilon_text(certified)} is for one {found['unit']}"
    if found["unit"] == "user":
        return f"{said}, and so for a secret, however often its user repeated it."
    if most == 1:
        return f"{said}."
    return (
        f"{said}. A secret in {most} queries is {most} of them: its ε is {most} times "
        f"as large, {most * certified:,.0f}, which promises nothing. If people repeat "
        "themselves, protect users: finetune.unit = 'user'."
    )


def _repeated(entry: Mapping[str, Any]) -> str:
    count = entry["repetitions"]
    return "put in once" if count == 1 else f"repeated {count} times"


def _exposures(audits: Mapping[str, Audit]) -> plots.Plot:
    every = [entry for found in audits.values() for entry in found["canaries"]]
    most = max(math.log2(entry["candidates"]) for entry in every)
    groups = {
        f"{name}, {_repeated(entry)}": list(entry["exposure"])
        for name, found in audits.items()
        for entry in found["canaries"]
        if entry["form"] == "all"
    }
    note = "Each dot is a secret. Dotted: the mean by chance."
    title = "Exposure: bits saved in guessing a secret"
    return plots.dots(groups, title, "bits", most, math.log2(math.e), note)


def similarity(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns rows and rules of what `similarity.measure` returned, by set.

    Any part of a set's values may be missing; `None` without a set.
    """
    if not scores:
        return None
    rules = {
        f"{name.replace('_', ' ')}: {rule}"
        for found in scores.values()
        for name, rule in found.get("rules", {}).items()
    }
    signed = {s["signature"] for s in scores.values() if "signature" in s}
    return {
        "rows": [[name, *_cells(found)] for name, found in scores.items()],
        "rules": [*sorted(rules), *(f"sacrebleu: {each}" for each in sorted(signed))],
    }


def _cells(found: Mapping[str, Any]) -> list[Any]:
    mauve, copies = found.get("mauve"), found.get("copies", {})
    nearest = copies.get("by_features") or copies.get("by_grams")
    return [
        f"{found['queries']:,}" if "queries" in found else MISSING,
        number_text(found.get("bleu", MISSING)),
        (f"{mauve['mean']:.3f}", f"± {mauve['deviation']:.3f}") if mauve else MISSING,
        _beside_held_out(found.get("distinct"), "2", "{:.1%}"),
        _beside_held_out(found.get("lengths"), "mean", "{:.1f}"),
        _beside_held_out(copies.get("exact"), "share", "{:.1%}"),
        _share(nearest and nearest["closer"]),
    ]


def _beside_held_out(of: Mapping[str, Any] | None, key: str, form: str) -> Any:
    """Returns the value of the synthetic queries above that of the held-out ones."""
    ours, control = (
        MISSING if not values or values.get(key) is None else form.format(values[key])
        for values in ((of or {}).get(name) for name in ("synthetic", "held_out"))
    )
    return ours if control == MISSING else (ours, f"held-out: {control}")


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0%}"


def _interval(of: list[float], form: str) -> tuple[str, str]:
    value, low, high = (form.format(each) for each in of)
    return value, f"{low} to {high}"

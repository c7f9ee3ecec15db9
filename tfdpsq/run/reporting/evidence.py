"""Text and table rows for the report's evidence: leaks, similarity, quality by ε."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq.run.reporting import plots
from tfdpsq.run.reporting.wording import (
    MISSING,
    epsilon_text,
    least_text,
    number_text,
)

_ATTACKS = {
    "generator": "the generator's likelihoods",
    "set_language_model": "a language model of the released set",
    "set_nearest": "the most similar released query",
    "loss": "the generator's loss",
    "likelihood_ratio": "the generator's likelihood against public weights'",
}
# A mean rank this unlikely by chance is called a leak.
_LEVEL = 0.05
# By the start of a row's name.
_SOURCES = {"synthetic": "Synthetic queries", "direct": "Direct DP"}
_CONTROLS = {"public_only": "public-only", "original": "original pairs, ε = ∞"}

_Audit = Mapping[str, Any]  # the content of an `audit.json`
_Rows = list[Sequence[Any]]  # cells are texts, or (text, small print below it)


def leaks(audits: Mapping[str, _Audit]) -> dict[str, Any] | None:
    """Returns what the audits found, by audited generator; None without an audit."""
    if not audits:
        return None
    canaries = _canaries(audits)
    membership = _membership(audits)
    rates = [r for _, attack in _attacks(audits) for r in attack["true_positive_rates"]]
    return {
        "in_short": [_in_short(name, found) for name, found in audits.items()],
        "verdicts": [
            v for name, found in audits.items() for v in _verdicts(name, found)
        ],
        "canaries": canaries,
        "exposure_plot": _exposure_plot(audits) if canaries else None,
        "bounds": _bounds(audits),
        "membership": membership,
        "membership_header": [
            "Attack",
            "AUC",
            *(f"Found at {float(r):.1%} false alarms" for r in dict.fromkeys(rates)),
        ],
    }


def _in_short(name: str, found: _Audit) -> str:
    """Returns one sentence on what an audit found."""
    said = []
    entries = _all_forms(found)
    if entries:
        worst = max(entries, key=lambda entry: (entry["leaked"], -entry["p_value"]))
        if any(entry["p_value"] < _LEVEL for entry in entries):
            said.append(
                f"planted secrets were learnt, and {worst['leaked']:.0%} of those "
                f"repeated {worst['repetitions']} times were written out"
            )
        else:
            written = f"but {worst['leaked']:.0%} were written out"
            said.append(
                "planted secrets cannot be distinguished from secrets that nobody "
                "trained on, "
                + (written if worst["leaked"] else "and none was written out")
            )
    if found["one_run"]:
        said.append(
            "the strongest attack shows that ε is at least "
            f"{least_text(_strongest(found), 2)} "
            f"(certified: {epsilon_text(found['epsilon_certified'])})"
        )
    if found["membership"]:
        auc = max(attack["auc"][0] for attack in found["membership"].values())
        said.append(
            f"a training query is recognized in {auc:.0%} of pairs with another "
            "(50% by guessing)"
        )
    return f"{name}: {'; '.join(said) or 'nothing was measured'}."


def _verdicts(name: str, found: _Audit) -> list[str]:
    """Returns an audit's findings as sentences that need no table."""
    sentences = []
    for entry in _all_forms(found):
        chance = f"a rank of {entry['chance']:g} among {entry['candidates']} by chance"
        if entry["p_value"] < _LEVEL:
            said = (
                f"were learnt: they rank {entry['mean_rank']:.1f} on average, against "
                f"{chance} (p = {entry['p_value']:.2g})"
            )
        else:
            said = (
                "cannot be distinguished from secrets that nobody trained on: mean "
                f"rank {entry['mean_rank']:.1f}, {chance} (p = {entry['p_value']:.2g})"
            )
        share = entry["leaked"]
        leaked = f"{share:.0%} of them were" if share else "none was"
        sentences.append(
            f"{name}: secrets {_repeated(entry)} {said}; {leaked} written out."
        )
    sentences += _epsilon_of_a_secret(name, found)
    if found["one_run"]:
        certified, strongest = float(found["epsilon_certified"]), _strongest(found)
        if math.isinf(certified):
            verdict = "with nothing certified"
        elif strongest > certified and "zero-out" in str(found.get("adjacency")):
            verdict = (
                f"above the certified {epsilon_text(certified)}, which it does not "
                "refute: that is for queries replaced by nothing, not left out as here"
            )
        elif strongest > certified:
            verdict = "which refutes the certificate: do not release anything"
        else:
            verdict = f"below the certified {epsilon_text(certified)}, as it must be"
        sentences.append(
            f"{name}: the strongest attack shows that ε is at least "
            f"{least_text(strongest, 2)} ({found['confidence']:.0%} confidence), "
            f"{verdict}."
        )
    return sentences


def _epsilon_of_a_secret(name: str, found: _Audit) -> list[str]:
    """Returns what the unit of protection means for a secret that is repeated."""
    certified = float(found["epsilon_certified"])
    entries = _all_forms(found)
    if math.isinf(certified) or not entries:
        return []
    shown = epsilon_text(certified)
    if found["unit"] == "user":
        said = (
            f"ε = {shown} is for one user, with all queries that are theirs. So it "
            "speaks of each secret as a whole, however often its user repeated it"
        )
    else:
        most = max(entry["units"] for entry in entries)
        said = f"ε = {shown} is for one {found['unit']}"
        if most > 1:
            said += (
                f". A secret in {most} queries is {most} of them: even at a far larger "
                f"δ, ε of the secret is {most} times as large, "
                f"{most * certified:,.0f}, which is no promise that it stays hidden. "
                "If people repeat themselves, protect users instead of queries: "
                "finetune.unit = 'user'"
            )
    least = min(entry["least_mean_rank"] for entry in entries)
    return [
        f"{name}: {said}. The ranks above are measured. From ε alone follows only that "
        f"no attack makes their mean lower than {least_text(least, 2)}."
    ]


def _strongest(found: _Audit) -> float:
    return max(each["epsilon"] for each in found["one_run"].values())


def _repeated(entry: Mapping[str, Any]) -> str:
    count = entry["repetitions"]
    return "put in once" if count == 1 else f"repeated {count} times"


def _all_forms(found: _Audit) -> list[Mapping[str, Any]]:
    return [entry for entry in found["canaries"] if entry["form"] == "all"]


def _canaries(audits: Mapping[str, _Audit]) -> _Rows:
    return [
        [
            (name, f"{entry['form']}, {_repeated(entry)}"),
            (f"{entry['mean_rank']:.1f}", f"p = {entry['p_value']:.2g}"),
            f"{sum(entry['exposure']) / len(entry['exposure']):.2f} bits",
            f"{entry['leaked']:.0%}",
            MISSING
            if entry["leaked_in_set"] is None
            else f"{entry['leaked_in_set']:.0%}",
            least_text(entry["epsilon_pure"], 3),
        ]
        for name, found in audits.items()
        for entry in found["canaries"]
        if entry["form"] != "all"
    ]


def _exposure_plot(audits: Mapping[str, _Audit]) -> plots.Plot:
    entries = [entry for found in audits.values() for entry in found["canaries"]]
    most = max(math.log2(entry["candidates"]) for entry in entries)
    return plots.dots(
        {
            f"{name}, {_repeated(entry)}": list(entry["exposure"])
            for name, found in audits.items()
            for entry in _all_forms(found)
        },
        "Exposure of each secret, in bits",
        "bits saved in guessing the secret",
        most,
        math.log2(math.e),
        f"Each dot is a secret; {most:.1f} bits is the most that the candidates can "
        "show. Dotted: the mean by chance.",
    )


def _bounds(audits: Mapping[str, _Audit]) -> _Rows:
    return [
        [
            (name, f"attack by {_ATTACKS.get(attack, attack)}"),
            epsilon_text(found["epsilon_certified"]),
            least_text(bound["epsilon"], 3),
            f"{bound['correct']} of {sum(bound['guesses'])}",
            f"{bound['canaries']:,}",
        ]
        for name, found in audits.items()
        for attack, bound in found["one_run"].items()
    ]


def _attacks(audits: Mapping[str, _Audit]) -> _Rows:
    """Returns ((name, attack), result) of every membership attack."""
    return [
        ((name, f"by {_ATTACKS.get(attack, attack)}"), result)
        for name, found in audits.items()
        for attack, result in found["membership"].items()
    ]


def _membership(audits: Mapping[str, _Audit]) -> _Rows:
    return [
        [
            label,
            (
                "{:.3f}".format(result["auc"][0]),
                "{1:.3f} to {2:.3f}".format(*result["auc"]),
            ),
            *(
                (f"{share:.2%}", f"{least:.2%} to {most:.2%}")
                for share, least, most in result["true_positive_rates"].values()
            ),
        ]
        for label, result in _attacks(audits)
    ]


def similarity(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns the rows and rules of what `similarity.measure` returned, by set.

    Any part of a set's values may be missing; None without a set.
    """
    if not scores:
        return None
    return {
        "rows": [[name, *_cells(found)] for name, found in scores.items()],
        "signatures": sorted(
            {s["signature"] for s in scores.values() if "signature" in s}
        ),
        "rules": sorted(
            {
                f"{name.replace('_', ' ')}: {rule}"
                for found in scores.values()
                for name, rule in found.get("rules", {}).items()
            }
        ),
    }


def _cells(found: Mapping[str, Any]) -> list[Any]:
    mauve = found.get("mauve")
    copies = found.get("copies", {})
    nearest = copies.get("by_features") or copies.get("by_grams")
    bleu = number_text(found.get("bleu", MISSING))
    return [
        (bleu, f"{found['queries']:,} queries") if "queries" in found else bleu,
        (f"{mauve['mean']:.3f}", f"± {mauve['deviation']:.3f}") if mauve else MISSING,
        _with_control(found.get("distinct"), "2", "{:.1%}"),
        _with_control(found.get("lengths"), "mean", "{:.1f}"),
        number_text(found.get("vocabulary", {}).get("jensen_shannon", MISSING)),
        _with_control(copies.get("exact"), "share", "{:.1%}"),
        f"{nearest['closer']:.1%}" if nearest else MISSING,
    ]


def _with_control(found: Mapping[str, Any] | None, key: str, text: str) -> Any:
    """Returns the value of the synthetic queries above that of the held-out ones."""
    ours, control = (
        MISSING if not values or values.get(key) is None else text.format(values[key])
        for values in ((found or {}).get(name) for name in ("synthetic", "held_out"))
    )
    return ours if control == MISSING else (ours, f"held-out: {control}")


def quality_against_epsilon(
    rows: Sequence[Mapping[str, Any]], metric: str
) -> plots.Plot | None:
    """Returns a plot of a metric, or None where no source has results at two ε."""
    series: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        source = _SOURCES.get(row["name"].split("_")[0])
        if source is not None and row["epsilon"] is not None:
            point = (float(row["epsilon"]), row[metric], *row[f"{metric}_ci"])
            series.setdefault(source, []).append(point)
    if not any(len(points) > 1 for points in series.values()):
        return None
    controls = {
        _CONTROLS[row["name"]]: row[metric] for row in rows if row["name"] in _CONTROLS
    }
    title = f"{metric} against ε, with 95 % intervals over test queries"
    return plots.against_epsilon(series, controls, title, metric)

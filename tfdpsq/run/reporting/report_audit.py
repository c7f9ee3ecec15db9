"""The report's part on what leaked: canaries, bounds on ε, membership."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq.run.reporting import report_html, report_plots
from tfdpsq.run.reporting.report_html import epsilon_text, section

_ATTACKS = {
    "generator": "the generator's likelihoods",
    "set_language_model": "a language model of the released set",
    "set_nearest": "the most similar released query",
    "loss": "the generator's loss",
    "likelihood_ratio": "the generator's likelihood against public weights'",
}
# Means of ranks this unlikely by chance are called a leak.
_LEVEL = 0.05


def leaks(audits: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the section.

    Args:
      audits: what `audit.json` holds, by the name of the generator that was audited;
        empty where none was.
    """
    if not audits:
        return ""
    verdicts = [
        sentence
        for name, found in audits.items()
        for sentence in _verdicts(name, found)
    ]
    return section(
        "What leaked",
        report_html.bullets(verdicts),
        _canaries(audits),
        _bounds(audits),
        _membership(audits),
        '<p class="muted">Mean rank: where the planted secret stands among candidates '
        "by the generator's likelihood, 1 if it was learnt. Exposure: the "
        "bits that the generator saves in guessing it. Written out, in the set: the "
        "share of secrets found in queries written for the audit, and in the synthetic "
        "set. ε at least: what an attack proves, with the confidence stated; pure: for "
        "δ = 0.</p>",
        '<p class="muted">Canaries are secrets of random digits that were '
        "put into training queries, repeated as often as shown; models trained on them "
        "are audited and thrown away. Each secret has a user of its own, who wrote all "
        "the queries that hold it. No audit proves that nothing leaks; a lower bound "
        "above the certified ε would show that the certificate is wrong.</p>",
    )


def in_short(name: str, found: Mapping[str, Any]) -> str:
    """Returns one sentence on what an audit found."""
    said = []
    entries = _of_all_forms(found)
    if entries:
        worst = max(entries, key=lambda entry: (entry["leaked"], -entry["p_value"]))
        learnt = [entry for entry in entries if entry["p_value"] < _LEVEL]
        said.append(
            "planted secrets were learnt, and "
            f"{worst['leaked']:.0%} of those repeated {worst['repetitions']} times "
            "were written out"
            if learnt
            else "planted secrets cannot be told from secrets that nobody trained on"
            + (
                f", but {worst['leaked']:.0%} were written out"
                if worst["leaked"]
                else ", and none was written out"
            )
        )
    bounds = [each["epsilon"] for each in found["one_run"].values()]
    if bounds:
        certified = epsilon_text(found["epsilon_certified"])
        said.append(
            f"the strongest attack shows that ε is at least {max(bounds):.2f} "
            f"(certified: {certified})"
        )
    aucs = [shown["auc"][0] for shown in found["membership"].values()]
    if aucs:
        said.append(
            f"a training query is told from another in {max(aucs):.0%} of such pairs "
            "(50% by guessing)"
        )
    return f"{name}: {'; '.join(said) or 'nothing was measured'}."


def _verdicts(name: str, found: Mapping[str, Any]) -> list[str]:
    """What an audit found, in sentences for people who read nothing else."""
    sentences = []
    for entry in _of_all_forms(found):
        chance = f"a rank of {entry['chance']:g} among {entry['candidates']} by chance"
        if entry["p_value"] < _LEVEL:
            said = (
                f"learnt: they rank {entry['mean_rank']:.1f} on average, against "
                f"{chance} (p = {entry['p_value']:.2g})"
            )
        else:
            said = (
                f"cannot be told from secrets that nobody trained on: mean rank "
                f"{entry['mean_rank']:.1f}, {chance} (p = {entry['p_value']:.2g})"
            )
        told = entry["leaked"]
        leaked = (
            f"{told:.0%} of them were written out" if told else "none was written out"
        )
        sentences.append(
            f"{name}: secrets {_repeated(entry)} "
            f"{'were ' if entry['p_value'] < _LEVEL else ''}{said}; {leaked}."
        )
    sentences += _what_epsilon_is_for(name, found)
    bounds = [each["epsilon"] for each in found["one_run"].values()]
    if bounds:
        certified = float(found["epsilon_certified"])
        strongest = max(bounds)
        verdict = (
            "which refutes the certificate: do not release anything"
            if strongest > certified
            else f"below the certified {epsilon_text(certified)}, as it must be"
        )
        if math.isinf(certified):
            verdict = "with nothing certified"
        sentences.append(
            f"{name}: the strongest attack shows that ε is at least "
            f"{strongest:.2f} ({found['confidence']:.0%} confidence), {verdict}."
        )
    return sentences


def _what_epsilon_is_for(name: str, found: Mapping[str, Any]) -> list[str]:
    """Whose the guarantee is, and what that makes of secrets that are repeated."""
    certified = float(found["epsilon_certified"])
    entries = _of_all_forms(found)
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
        said = f"ε = {shown} is for one query"
        if most > 1:
            said += (
                f". A secret in {most} queries is {most} of them: ε of the secret is "
                f"{most} times as large, {most * certified:,.0f}, which is no promise "
                "that it stays hidden. If people repeat themselves, protect users "
                "instead of queries: finetune.unit = 'user'"
            )
    least = min(entry["least_mean_rank"] for entry in entries)
    return [
        f"{name}: {said}. The ranks above are measured. From ε alone follows only that "
        f"no attack makes their mean lower than {least:.2f}."
    ]


def _repeated(entry: Mapping[str, Any]) -> str:
    count = entry["repetitions"]
    return "put in once" if count == 1 else f"repeated {count} times"


def _of_all_forms(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in found["canaries"] if entry["form"] == "all"]


def _canaries(audits: Mapping[str, Mapping[str, Any]]) -> str:
    rows: list[Sequence[Any]] = []
    dots: dict[str, list[float]] = {}
    for name, found in audits.items():
        for entry in found["canaries"]:
            if entry["form"] == "all":
                label = f"{name}, {_repeated(entry)}"
                dots[label] = list(entry["exposure"])
                continue
            in_set = entry["leaked_in_set"]
            rows.append(
                [
                    (name, f"{entry['form']}, {_repeated(entry)}"),
                    (f"{entry['mean_rank']:.1f}", f"p = {entry['p_value']:.2g}"),
                    f"{sum(entry['exposure']) / len(entry['exposure']):.2f} bits",
                    f"{entry['leaked']:.0%}",
                    "–" if in_set is None else f"{in_set:.0%}",
                    f"{entry['epsilon_pure']:.3f}",
                ]
            )
    if not rows:
        return ""
    header = [
        "Canaries",
        "Mean rank",
        "Exposure",
        "Written out",
        "In the set",
        "Pure ε at least",
    ]
    most = max(
        math.log2(entry["candidates"])
        for found in audits.values()
        for entry in found["canaries"]
    )
    return report_html.table(header, rows, stacked=True) + report_plots.dots(
        dots,
        "Exposure of each secret, in bits",
        "bits saved in guessing the secret",
        most,
        math.log2(math.e),
        f"Each dot is a secret; {most:.1f} bits is the most that the candidates can "
        "show. Dotted: the mean by chance.",
    )


def _bounds(audits: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [
            (name, f"attack by {_ATTACKS.get(attack, attack)}"),
            epsilon_text(found["epsilon_certified"]),
            f"{bound['epsilon']:.3f}",
            f"{bound['correct']} of {sum(bound['guesses'])}",
            f"{bound['canaries']:,}",
        ]
        for name, found in audits.items()
        for attack, bound in found["one_run"].items()
    ]
    if not rows:
        return ""
    header = ["Attack", "ε certified", "ε at least", "Right guesses", "Canaries"]
    return "<h3>Lower bounds on ε</h3>" + report_html.table(header, rows, stacked=True)


def _membership(audits: Mapping[str, Mapping[str, Any]]) -> str:
    rows: list[Sequence[Any]] = []
    rates: list[str] = []
    for name, found in audits.items():
        for attack, shown in found["membership"].items():
            auc, low, high = shown["auc"]
            rates = list(shown["true_positive_rates"])
            rows.append(
                [
                    (name, f"by {_ATTACKS.get(attack, attack)}"),
                    (f"{auc:.3f}", f"{low:.3f} to {high:.3f}"),
                    *(
                        (f"{share:.2%}", f"{least:.2%} to {most:.2%}")
                        for share, least, most in shown["true_positive_rates"].values()
                    ),
                ]
            )
    if not rows:
        return ""
    header = [
        "Attack",
        "AUC",
        *(f"Found at {float(r):.1%} false alarms" for r in rates),
    ]
    return (
        "<h3>Telling training queries from held-out ones</h3>"
        + report_html.table(header, rows, stacked=True)
        + '<p class="muted">AUC: of a training query and a held-out one, how often the '
        "attack takes the right one for the training query; 0.5 by chance. Found: the "
        "share of training queries that an attack names, where it may name so many "
        "held-out ones; the same share by chance.</p>"
    )

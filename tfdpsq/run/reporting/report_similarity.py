"""The report's part on how close synthetic queries are to the private ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdpsq.run.reporting import report_html
from tfdpsq.run.reporting.report_html import escape, section


def similarity(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the section, or nothing without scores.

    Args:
      scores: what `run.similarity` measured, by the set's name; any part of a set's
        values may be missing.
    """
    if not scores:
        return ""
    rows = [[name, *_cells(found)] for name, found in scores.items()]
    header = [
        "Queries",
        "BLEU",
        "MAUVE",
        "Distinct pairs of words",
        "Words a query",
        "Vocabularies differ by",
        "Equal to a training query",
        "Closer than held-out",
    ]
    signatures = sorted({s["signature"] for s in scores.values() if "signature" in s})
    rules = sorted(
        {
            f"{name.replace('_', ' ')}: {rule}"
            for found in scores.values()
            for name, rule in found.get("rules", {}).items()
        }
    )
    return section(
        "How close synthetic queries are to the originals",
        report_html.table(header, rows, stacked=True),
        '<p class="muted">Small print below a number: the same of held-out private '
        "queries, or its deviation. BLEU: 0 to 100, against the private query of the "
        "same document. MAUVE: 1 for the same distribution. Vocabularies: distance of "
        "Jensen and Shannon, 0 to 1. Closer than held-out: how often a synthetic query "
        "is closer to some training query than a held-out private one is; above 50 % "
        "it may be copying.</p>",
        report_html.bullets(rules) if rules else "",
        *(
            f'<p class="muted">sacrebleu: <code>{escape(signature)}</code></p>'
            for signature in signatures
        ),
    )


def _cells(found: Mapping[str, Any]) -> list[Any]:
    mauve = found.get("mauve")
    distinct = found.get("distinct", {})
    lengths = found.get("lengths", {})
    copies = found.get("copies", {})
    exact = copies.get("exact")
    nearest = copies.get("by_features") or copies.get("by_grams")
    both = ("synthetic", "held_out")
    bleu = report_html.number_text(found.get("bleu") if "bleu" in found else "–")
    return [
        (bleu, f"{found['queries']:,} queries") if "queries" in found else bleu,
        (f"{mauve['mean']:.3f}", f"± {mauve['deviation']:.3f}") if mauve else "–",
        _with_control(*(_share(distinct.get(name, {}).get("2")) for name in both)),
        _with_control(*(_mean(lengths.get(name)) for name in both)),
        report_html.number_text(found.get("vocabulary", {}).get("jensen_shannon", "–")),
        _with_control(*(_share(exact[name]["share"]) for name in both))
        if exact
        else "–",
        _share(nearest["closer"]) if nearest else "–",
    ]


def _with_control(value: str, control: str) -> Any:
    return value if control == "–" else (value, f"held-out: {control}")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _mean(lengths: Mapping[str, Any] | None) -> str:
    return "–" if lengths is None else f"{lengths['mean']:.1f}"

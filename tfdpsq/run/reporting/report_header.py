"""The top of the report: what was protected, at what ε, what it cost, what leaked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq.run.reporting import report_audit, report_names
from tfdpsq.run.reporting.report_html import (
    bullets,
    duration_text,
    epsilon_text,
    escape,
)

_LEAD = (
    "A language model learnt from private queries, each paired with a public document, "
    "to write queries for documents. What it wrote trains search models (retrievers) "
    "in place of the private queries. This page says what that protects, and at what "
    "cost."
)
_EPSILON = (
    "ε bounds what can be told of any one query from what was made: whether it was "
    "among the private ones changes the probability of any outcome by a factor of e^ε "
    "at most, but for a rare exception, δ. Smaller is safer. ε = ∞: nothing is "
    "protected."
)
_METRIC = (
    "ndcg@10 is how high the right documents stand among the first ten that a "
    "retriever finds for a test query: 1 is best, 0 is none of them. Test queries were "
    "not trained on."
)


def header(
    report: Mapping[str, Any],
    protected: Sequence[Mapping[str, Any]],
    costs: Sequence[str],
) -> str:
    """Returns the title, four answers, and a warning, as HTML.

    Args:
      report: see `run.report`.
      protected: its rows of finite ε.
      costs: a sentence on each of them.
    """
    answers = {
        "What was protected": _protected(protected),
        "At what ε": _at_epsilon(protected),
        "What it cost in quality": bullets(costs) + _small(_METRIC) if costs else "",
        "What it cost in time": _time(report),
        "What leaked": _leaks(report.get("audits", {})),
    }
    parts = "".join(
        f"<dt>{escape(question)}</dt><dd>{answer}</dd>"
        for question, answer in answers.items()
        if answer
    )
    return (
        f"<h1>{escape(report['title'])}</h1>"
        f'<p class="muted">Made {escape(report["created"])}</p>'
        f'<p class="lead">{escape(_LEAD)}</p>'
        f'<dl class="answers">{parts}</dl>'
        '<div class="warning"><strong>Internal: this report is not covered by the '
        "guarantee.</strong> It shows private queries as they are, and curves and "
        "metrics computed on private queries. Keep it with those who may read the "
        "private queries. What may be shared is a model or a set that lies beside a "
        "<code>certificate.json</code> of finite ε, at the ε stated in it; several "
        "that are shared add up their ε.</div>"
    )


def _protected(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return _paragraph("Nothing in this run is protected: no row has a finite ε.")
    return _paragraph(
        "Every single query of the private training pairs is protected by "
        "differential privacy in what the rows below name. Documents are public and "
        "are not protected, and a person who wrote several queries is not protected as "
        "a whole, unless a certificate says so."
    )


def _at_epsilon(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    spent = [
        f"{row.get('label') or row['name']} (ε spent: {epsilon_text(row['epsilon'])}). "
        f"{row.get('description', '')}".strip()
        for row in rows
    ]
    return bullets(spent) + _small(_EPSILON)


def _time(report: Mapping[str, Any]) -> str:
    seconds = report.get("seconds", {})
    if not seconds:
        return ""
    longest = max(seconds, key=lambda stage: seconds[stage])
    total = sum(seconds.values())
    said = f"{duration_text(total)} for all stages"
    if report.get("peak_memory_gib") is not None:
        said += f", {report['peak_memory_gib']:.2f} GiB of memory at most"
    share = seconds[longest] / total if total else 0
    return _paragraph(
        f"{said}. Longest: {report_names.run_label(longest)}, "
        f"{duration_text(seconds[longest])} ({share:.0%})."
    )


def _leaks(audits: Mapping[str, Mapping[str, Any]]) -> str:
    if not audits:
        return _paragraph(
            "Not measured: no generator was trained on planted secrets and attacked. "
            "Set audit_epsilons to have that done."
        )
    found = [report_audit.in_short(name, audit) for name, audit in audits.items()]
    return bullets(found) + _small(
        "Measured on generators of their own, trained as the others are but with "
        "secrets among their queries. That nothing got out in an attack does not prove "
        "that nothing can; ε does."
    )


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _small(text: str) -> str:
    return f'<p class="muted">{escape(text)}</p>'

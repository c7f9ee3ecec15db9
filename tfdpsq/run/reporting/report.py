"""What a pipeline run ends in: `report.html` for people, `results.json` for code.

Both are written from one dict, whose values may be numpy scalars and whose
infinite ε may be a float or "inf". Required:

- `title`, `created`, `command`: str
- `rows`: list of {name, label, description, private_data: str; epsilon: float, or
  None when no private query was used; for both METRICS m: m, m_ci: [low, high];
  difference_to_public_only: {difference, ci, p} or None}

May be left out:

- `reference_rows`: {"public_only": row name, "unprotected": row name}; these are
  "public_only" and "original" unless given
- `curves`: {run: {step, loss: lists; chart, unit: str}}; `chart` names the plot
  that a run is drawn in, `unit` is "nats per example" unless given
- `epsilon_curves`: {run: {step, epsilon: lists}}, ε spent so far
- `examples`: list of {document_id, document, original_query: str; synthetic: {run:
  list of queries}}
- `certificates`: list of {name, certificate: of `tfdpsq.privacy`}, one for each
  training run on private queries
- `similarity`: {run: {bleu, signature, …}}, see `run.similarity`
- `audits`: {generator: what the stage `audit` wrote}
- `wins_and_losses`: see `report_comparison`; `label`, `against_label` if any
- `seconds`: {stage: seconds}, `peak_memory_gib`: float
- `versions`, `fingerprints`: {name: str}, `notes`: list of str
"""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq.run.core import outputs, releases
from tfdpsq.run.reporting import (
    report_audit,
    report_certificates,
    report_comparison,
    report_header,
    report_html,
    report_names,
    report_plots,
    report_similarity,
)
from tfdpsq.run.reporting.report_html import epsilon_text, escape, section
from tfdpsq.validation import InputError

METRICS = ("ndcg@10", "recall@10")
RESULT_KEYS = ("rows", "seconds", "peak_memory_gib", "fingerprints", "versions")
ROW_KEYS = ("name", "epsilon", *METRICS, *(f"{m}_ci" for m in METRICS))
MAX_DOCUMENT_CHARACTERS = 1200

_HOLDS = "private queries and what was measured on them"
# Colours of the plot of results, by what the row's training saw.
_PROTECTED, _UNPROTECTED, _NO_PRIVATE_DATA = 0, 1, 2


def write_report(path: str | os.PathLike, report: Mapping[str, Any]) -> None:
    """Writes one HTML file that needs no other file, no network and no script.

    Args:
      path: the file to write; it appears whole or not at all.
      report: as the module's table says.

    Raises:
      InputError: a key or a row's value is missing, or a number is NaN.
    """
    report = plain_values(report)
    _check(report)
    body = "".join(
        [
            _header(report),
            _results(report),
            report_comparison.wins_and_losses_html(report.get("wins_and_losses")),
            report_audit.leaks(report.get("audits", {})),
            _certificates(report),
            _examples(report),
            _training(report),
            report_similarity.similarity(report.get("similarity", {})),
            _stages(report),
            _running(report),
        ]
    )
    page = report_html.page(report["title"], body)
    outputs.write_file(path, page, releases.PRIVATE, _HOLDS)


def write_results(path: str | os.PathLike, report: Mapping[str, Any]) -> None:
    """Writes the report's numbers as strict JSON: infinite ε is "inf".

    Args:
      path: the file to write.
      report: as for `write_report`; RESULT_KEYS of it are written, and of each
        row ROW_KEYS and its difference to the public-only row.

    Raises:
      InputError: a key or a row's value is missing, or a number is NaN.
    """
    report = plain_values(report)
    _check(report)
    results = {key: report.get(key) for key in RESULT_KEYS}
    results["rows"] = [
        {key: row.get(key) for key in (*ROW_KEYS, "difference_to_public_only")}
        for row in report["rows"]
    ]
    text = json.dumps(results, indent=2, allow_nan=False, ensure_ascii=False)
    outputs.write_file(path, text + "\n", releases.PRIVATE, _HOLDS)


def plain_values(value: Any, where: str = "report") -> Any:
    """Returns nested dicts, lists and numbers as plain JSON values.

    Infinite numbers become "inf" and "-inf", numpy's numbers Python's. NaN is
    kept out of everything but training curves, whose losses can truly be NaN:
    there it becomes "nan".

    Raises:
      InputError: a NaN elsewhere, or a value that JSON has no place for.
    """
    if isinstance(value, Mapping):
        return {str(k): plain_values(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)) or hasattr(value, "tolist"):
        items = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(items, list) or isinstance(value, (list, tuple)):
            return [plain_values(v, f"{where}[{i}]") for i, v in enumerate(items)]
        return plain_values(items, where)
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        value = float(value)
        if math.isnan(value):
            if where.startswith("report.curves."):
                return "nan"
            raise InputError(
                f"{where} is NaN, which is no result. Look at the stage that made it."
            )
        return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    raise InputError(
        f"{where} is {value!r} of type {type(value).__name__}; give a number, a "
        "string, a list or a dict."
    )


def _check(report: Mapping[str, Any]) -> None:
    for key in ("title", "created", "command", "rows"):
        if key not in report:
            raise InputError(f"report has no {key!r}; see tfdpsq.run.reporting.report.")
    for i, row in enumerate(report["rows"]):
        for key in ROW_KEYS:
            if key not in row:
                raise InputError(
                    f"report.rows[{i}] ({row.get('name', 'no name')}) has no {key!r}."
                )


def _label(row: Mapping[str, Any]) -> str:
    return row.get("label") or row["name"]


def _kind(row: Mapping[str, Any]) -> int:
    if row["epsilon"] is None:
        return _NO_PRIVATE_DATA
    return _UNPROTECTED if math.isinf(float(row["epsilon"])) else _PROTECTED


def _reference(report: Mapping[str, Any], which: str) -> Mapping[str, Any] | None:
    default = {"public_only": "public_only", "unprotected": "original"}[which]
    name = report.get("reference_rows", {}).get(which, default)
    return next((row for row in report["rows"] if row["name"] == name), None)


def _header(report: Mapping[str, Any]) -> str:
    protected = [row for row in report["rows"] if _kind(row) == _PROTECTED]
    costs = [_cost(row, report) for row in protected]
    return report_header.header(report, protected, costs)


def _cost(row: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Returns what a protected row reaches against its two controls, in words."""
    metric = METRICS[0]
    text = f"{_label(row)}: {metric} {row[metric]:.4f}"
    unprotected = _reference(report, "unprotected")
    if unprotected is not None:
        text += f", against {unprotected[metric]:.4f} for training without protection"
        if unprotected[metric] > 0:
            share = row[metric] / unprotected[metric]
            text += f" ({share:.0%} of it)"
    public = _reference(report, "public_only")
    if public is not None:
        text += f" and {public[metric]:.4f} for using no private query at all"
    difference = row.get("difference_to_public_only")
    if difference:
        low, high = difference["ci"]
        if low > 0:
            verdict = "It is better than using no private query: it has earned its ε"
        elif high < 0:
            verdict = "It is worse than using no private query: its ε bought nothing"
        else:
            verdict = "It cannot be told from using no private query"
        text += (
            f". {verdict} (difference {difference['difference']:+.4f}, "
            f"95 % interval {low:+.4f} to {high:+.4f})"
        )
    return text + "."


def _results(report: Mapping[str, Any]) -> str:
    rows = []
    for row in report["rows"]:
        cells: list[Any] = [(_label(row), row.get("description", ""))]
        cells.append(row.get("private_data", ""))
        cells.append(epsilon_text(row["epsilon"]))
        for metric in METRICS:
            low, high = row[f"{metric}_ci"]
            cells.append((f"{row[metric]:.4f}", f"{low:.4f} to {high:.4f}"))
        difference = row.get("difference_to_public_only")
        if difference:
            low, high = difference["ci"]
            note = f"{low:+.4f} to {high:+.4f}, p = {difference['p']:.2g}"
            cells.append((f"{difference['difference']:+.4f}", note))
        else:
            cells.append("–")
        rows.append(cells)
    header = ["Method", "Private data used", "ε", *METRICS, "Over public-only"]
    public = _reference(report, "public_only")
    legend = (
        "Blue: protected (finite ε). Orange: trained on private queries without "
        "protection (ε = ∞), not to be released. Green: no private query used."
    )
    dotted = " Dotted: the public-only row, which a protected row must beat."
    return section(
        "Results",
        report_html.table(header, rows, stacked=True),
        f'<p class="muted">{escape(METRICS[0])}: how high the right documents stand '
        f"among the first ten found, 0 to 1. {escape(METRICS[1])}: the share of them "
        "that is found there. Small print: 95 % bootstrap intervals over test queries. "
        "ε = ∞: no protection. ε –: no private query was used. Over public-only: "
        f"difference in {escape(METRICS[0])} to the row trained on sentences cut from "
        "public documents, paired by query; p: how often so large a difference would "
        "come by chance.</p>",
        report_plots.intervals(
            [
                {**row, "label": _label(row), "series": _kind(row)}
                for row in report["rows"]
            ],
            METRICS[0],
            f"{METRICS[0]} on the test queries, with 95 % intervals",
            None if public is None else public[METRICS[0]],
        ),
        f'<p class="muted">{escape(legend + (dotted if public else ""))}</p>',
        report_comparison.quality_against_epsilon(report["rows"], METRICS[0]),
    )


def _certificates(report: Mapping[str, Any]) -> str:
    shown = report_certificates.all_in_words(report.get("certificates", []))
    return section("The guarantee, in words", shown)


def _examples(report: Mapping[str, Any]) -> str:
    cards = []
    for example in report.get("examples", []):
        document = example["document"]
        if len(document) > MAX_DOCUMENT_CHARACTERS:
            document = document[:MAX_DOCUMENT_CHARACTERS].rstrip() + " […]"
        queries = (
            "<h3>Original query (private)</h3>"
            f'<div class="query original">{escape(example["original_query"])}</div>'
        )
        for run, synthetic in example["synthetic"].items():
            queries += f"<h3>{escape(run)}</h3>"
            for query in synthetic or ["(nothing was generated)"]:
                shown = escape(query) if query.strip() else "(an empty query)"
                queries += f'<div class="query synthetic">{shown}</div>'
        title = escape(f"Document {example['document_id']}")
        cards.append(
            f'<div class="card example"><div><h3>{title}</h3>'
            f'<div class="document">{escape(document)}</div></div>'
            f"<div>{queries}</div></div>"
        )
    return section("Original and synthetic queries, side by side", *cards)


def _training(report: Mapping[str, Any]) -> str:
    charts: dict[str, dict[str, Mapping[str, Any]]] = {}
    for run, curve in report.get("curves", {}).items():
        charts.setdefault(curve.get("chart", "Training loss"), {})[run] = curve
    figures = []
    for chart, curves in charts.items():
        units = sorted({c.get("unit", "nats per example") for c in curves.values()})
        series = {run: (c["step"], _floats(c["loss"])) for run, c in curves.items()}
        figures.append(report_plots.lines(series, chart, f"loss ({', '.join(units)})"))
    spent = report.get("epsilon_curves", {})
    finite = {
        run: (curve["step"], _floats(curve["epsilon"]))
        for run, curve in spent.items()
        if all(math.isfinite(value) for value in _floats(curve["epsilon"]))
    }
    unprotected = [run for run in spent if run not in finite]
    if finite:
        figures.append(
            report_plots.lines(finite, "ε spent, by step", "ε", accumulates=True)
        )
    note = ""
    if unprotected:
        names = escape(", ".join(unprotected))
        note = f'<p class="muted">ε is ∞ from the first step on: {names}.</p>'
    grid = f'<div class="grid">{"".join(figures)}</div>' if figures else ""
    return section("Training", grid, note)


def _floats(values: Sequence[Any]) -> list[float]:
    return [float(value) for value in values]


def _stages(report: Mapping[str, Any]) -> str:
    """Returns what each stage took."""
    seconds = report.get("seconds", {})
    if not seconds:
        return ""
    total = sum(seconds.values())
    rows = [
        [
            (report_names.run_label(stage), report_names.run_note(stage)),
            report_html.duration_text(taken),
            f"{taken / total:.1%}" if total else "–",
        ]
        for stage, taken in seconds.items()
    ]
    rows.append([("All stages", ""), report_html.duration_text(total), "100%"])
    note = "Of a stage that was interrupted, the time of the run that finished it."
    if report.get("peak_memory_gib") is not None:
        note += f" Peak memory: {report['peak_memory_gib']:.2f} GiB."
    return section(
        "What each stage took",
        report_html.table(["Stage", "Time", "Share"], rows),
        f'<p class="muted">{escape(note)}</p>',
    )


def _running(report: Mapping[str, Any]) -> str:
    notes = report.get("notes", [])
    versions = report.get("versions", {})
    return section(
        "How this was made",
        f"<pre>{escape(report['command'])}</pre>",
        report_html.bullets(notes) if notes else "",
        report_html.definitions(
            {
                f"Fingerprint of the {name}": value
                for name, value in report.get("fingerprints", {}).items()
            }
        ),
        "<details><summary>Versions</summary>"
        f"{report_html.definitions(versions)}</details>"
        if versions
        else "",
    )

"""Renders a pipeline run's results: `report.html` and `results.json`.

Both are written from the dict that `content.gather` makes. Its values may be numpy
scalars, and an infinite ε may be a float or "inf".
"""

from __future__ import annotations

import functools
import json
import math
import numbers
import os
from collections.abc import Mapping
from typing import Any

import jinja2

from tfdpsq.run.core import outputs, releases
from tfdpsq.run.reporting import certificates_in_words, evidence, plots, wording
from tfdpsq.run.reporting.wording import MISSING, epsilon_text
from tfdpsq.validation import InputError

METRICS = ("ndcg@10", "recall@10")
RESULT_KEYS = ("rows", "seconds", "peak_memory_gib", "fingerprints", "versions")
FUSED = ("fused_ndcg@10", "fused_ndcg@10_ci", "fused_weight", "fused_over_public_only")
ROW_KEYS = ("name", "epsilon", *METRICS, *(f"{m}_ci" for m in METRICS))
MAX_DOCUMENT_CHARACTERS = 1200

_HOLDS = "private queries and what was measured on them"
# Colours of the plot of results, by what the row's training saw.
_PROTECTED, _UNPROTECTED, _NO_PRIVATE_DATA = 0, 1, 2


def write_report(path: str | os.PathLike, report: Mapping[str, Any]) -> None:
    """Writes one HTML file that needs no other file, no network and no script.

    `report` is what `content.gather` returns. The file appears whole or not at all.

    Raises:
      InputError: a number is NaN.
    """
    write_file(path, render("report.html.j2", _view(plain_values(report))))


def write_results(path: str | os.PathLike, report: Mapping[str, Any]) -> None:
    """Writes RESULT_KEYS of the report as strict JSON: infinite ε is "inf".

    Rows keep ROW_KEYS and their difference to the public-only row.

    Raises:
      InputError: a number is NaN.
    """
    report = plain_values(report)
    results = {key: report.get(key) for key in RESULT_KEYS}
    results["rows"] = [
        {
            **{key: row.get(key) for key in (*ROW_KEYS, "difference_to_public_only")},
            **{key: row[key] for key in (*FUSED, "rerank_weight") if key in row},
        }
        for row in report["rows"]
    ]
    text = json.dumps(results, indent=2, allow_nan=False, ensure_ascii=False)
    write_file(path, text + "\n")


def write_file(path: str | os.PathLike, text: str) -> None:
    """Writes a page or its numbers, for its owner's eyes alone."""
    outputs.write_file(path, text, releases.PRIVATE, _HOLDS)


def render(template: str, values: Mapping[str, Any]) -> str:
    """Renders a template of this package; every text in `values` is escaped."""
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfdpsq.run.reporting"),
        autoescape=True,  # queries and documents may contain markup
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        epsilon=epsilon_text, duration=wording.duration_text, shorten=wording.shorten
    )
    return environment


def plain_values(value: Any, where: str = "report") -> Any:
    """Returns nested dicts, lists and numbers as plain JSON values.

    Infinite numbers become "inf" and "-inf", numpy's numbers Python's. NaN is
    refused everywhere but in training curves, whose losses can be NaN: there it
    becomes "nan".

    Raises:
      InputError: a NaN elsewhere, or a value that JSON cannot represent.
    """
    if isinstance(value, Mapping):
        return {str(k): plain_values(v, f"{where}.{k}") for k, v in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain_values(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        value = float(value)
        if math.isfinite(value):
            return value
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        if where.startswith("report.curves."):
            return "nan"
        raise InputError(
            f"{where} is NaN, which is not a result. Look at the stage that made it."
        )
    raise InputError(
        f"{where} is {value!r} of type {type(value).__name__}; give a number, a "
        "string, a list or a dict."
    )


def _view(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of `report.html.j2`."""
    rows = [
        {
            **row,
            "label": row.get("label") or row["name"],
            "description": row.get("description", ""),
            "series": _series(row["epsilon"]),
        }
        for row in report["rows"]
    ]
    named = {row["name"]: row for row in rows}
    public = named.get("public_only")
    protected = [row for row in rows if row["series"] == _PROTECTED]
    metric = METRICS[0]
    return {
        "title": report["title"],
        "created": report["created"],
        "command": report["command"],
        "protected": protected,
        "costs": [_cost(row, *_references(row, named)) for row in protected],
        "results": [_result(row) for row in rows],
        "has_public_only": public is not None,
        "fused_plot": _fused_plot(rows, public),
        "interval_plot": plots.intervals(
            rows,
            metric,
            f"{metric} on the test queries, with 95 % intervals",
            None if public is None else public[metric],
        ),
        "epsilon_plot": evidence.quality_against_epsilon(rows, metric),
        "wins_and_losses": report.get("wins_and_losses"),
        "leaks": evidence.leaks(report.get("audits", {})),
        "guarantee": certificates_in_words.in_words(report.get("certificates", [])),
        "units": certificates_in_words.protected_units(report.get("certificates", [])),
        "examples": report.get("examples", []),
        "max_document_characters": MAX_DOCUMENT_CHARACTERS,
        "training": _training(
            report.get("curves", {}), report.get("epsilon_curves", {})
        ),
        "similarity": evidence.similarity(report.get("similarity", {})),
        "peak_memory_gib": report.get("peak_memory_gib"),
        **_stages(report.get("seconds", {})),
        "notes": report.get("notes", []),
        "fingerprints": {
            f"Fingerprint of the {name}": value
            for name, value in report.get("fingerprints", {}).items()
        },
        "versions": report.get("versions", {}),
    }


def _references(
    row: Mapping[str, Any], named: Mapping[str, Mapping[str, Any]]
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Returns the unprotected and the public-only row that a row is compared with."""
    names = row.get("reference_rows", {})
    return (
        named.get(names.get("unprotected", "original")),
        named.get(names.get("public_only", "public_only")),
    )


def _fused_plot(
    rows: list[dict[str, Any]], public: Mapping[str, Any] | None
) -> plots.Plot | None:
    """Returns the plot of BM25 alone, with and reranked by rows; None without such."""
    metric = FUSED[0]
    shown = [
        {**row, "label": f"BM25 + {row['label']}"} for row in rows if metric in row
    ]
    alone, reranked = (
        [
            {**row, metric: row[METRICS[0]], f"{metric}_ci": row[f"{METRICS[0]}_ci"]}
            for row in chosen
        ]
        for chosen in (
            [row for row in rows if row["name"] == "bm25"],
            [row for row in rows if row["name"].startswith("reranked_")],
        )
    )
    if not shown and not reranked:
        return None
    return plots.intervals(
        [*alone, *reranked, *shown],
        metric,
        f"{METRICS[0]} together with BM25, with 95 % intervals",
        public.get(metric) if public is not None else None,
    )


def _series(epsilon: float | str | None) -> int:
    if epsilon is None:
        return _NO_PRIVATE_DATA
    return _UNPROTECTED if math.isinf(float(epsilon)) else _PROTECTED


def _cost(
    row: Mapping[str, Any],
    unprotected: Mapping[str, Any] | None,
    public: Mapping[str, Any] | None,
) -> str:
    """Compares a protected row with its two controls, in words."""
    metric = METRICS[0]
    text = f"{row['label']}: {metric} {row[metric]:.4f}"
    if unprotected is not None:
        text += f", against {unprotected[metric]:.4f} for training without protection"
        if unprotected[metric] > 0:
            text += f" ({row[metric] / unprotected[metric]:.0%} of it)"
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
            verdict = "It is not significantly different from using no private query"
        text += (
            f". {verdict} (difference {difference['difference']:+.4f}, "
            f"95 % interval {low:+.4f} to {high:+.4f})"
        )
    gain = row.get("fused_over_public_only")
    if gain:
        text += (
            f". Together with BM25: {row['fused_ndcg@10']:.4f}, {gain['mean']:+.4f} "
            "over BM25 with the public-only row (95 % interval "
            f"{gain['low']:+.4f} to {gain['high']:+.4f})"
        )
    return text + "."


def _result(row: Mapping[str, Any]) -> list[Any]:
    """Returns the cells of a row of the table of results."""
    difference = row.get("difference_to_public_only")
    over: Any = MISSING
    if difference:
        low, high = difference["ci"]
        over = (
            f"{difference['difference']:+.4f}",
            f"{low:+.4f} to {high:+.4f}, p = {difference['p']:.2g}",
        )
    return [
        (row["label"], row["description"]),
        row.get("private_data", ""),
        epsilon_text(row["epsilon"]),
        *(
            (f"{row[metric]:.4f}", "{:.4f} to {:.4f}".format(*row[f"{metric}_ci"]))
            for metric in METRICS
        ),
        over,
        _with_bm25(row),
    ]


def _with_bm25(row: Mapping[str, Any]) -> Any:
    if FUSED[0] not in row:
        return MISSING
    gain, over = row["fused_over_public_only"], ""
    if gain:
        over = "{mean:+.4f}, {low:+.4f} to {high:+.4f}".format(**gain)
    return f"{row[FUSED[0]]:.4f}", over


def _training(curves: Mapping[str, Any], spent: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plots of losses and of ε, and the runs whose ε is infinite."""
    charts: dict[str, dict[str, Any]] = {}
    for run, curve in curves.items():
        charts.setdefault(curve.get("chart", "Training loss"), {})[run] = curve
    figures = []
    for chart, of_chart in charts.items():
        units = sorted({c.get("unit", "nats per example") for c in of_chart.values()})
        losses = {
            run: (c["step"], list(map(float, c["loss"]))) for run, c in of_chart.items()
        }
        figures.append(plots.lines(losses, chart, f"loss ({', '.join(units)})"))
    epsilons = {
        run: (c["step"], list(map(float, c["epsilon"]))) for run, c in spent.items()
    }
    finite = {
        run: curve
        for run, curve in epsilons.items()
        if all(map(math.isfinite, curve[1]))
    }
    if finite:
        figures.append(plots.lines(finite, "ε spent, by step", "ε", accumulates=True))
    return {
        "plots": figures,
        "unprotected": [run for run in spent if run not in finite],
    }


def _stages(seconds: Mapping[str, float]) -> dict[str, Any]:
    """Returns the duration of each stage, the longest one, and their sum."""
    if not seconds:
        return {"stages": []}
    total = sum(seconds.values())
    rows: list[list[Any]] = [
        [
            (wording.run_label(stage), wording.run_note(stage)),
            wording.duration_text(taken),
            f"{taken / total:.1%}" if total else MISSING,
        ]
        for stage, taken in seconds.items()
    ]
    longest = max(seconds, key=lambda stage: seconds[stage])
    return {
        "stages": [*rows, [("All stages", ""), wording.duration_text(total), "100%"]],
        "total_seconds": total,
        "longest": {
            "label": wording.run_label(longest),
            "seconds": seconds[longest],
            "share": seconds[longest] / total if total else 0.0,
        },
    }

"""Renders a job's results: `report.html` and `results.json`, for their owner's eyes."""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jinja2

from tfdpsq.data import io
from tfdpsq.run.frame.places import open_private, owner_only
from tfdpsq.run.report import plots, wording

RESULT_KEYS = ("rows", "seconds", "peak_memory_gib", "fingerprints", "versions")

_COLORS = {"protected": 0, "unprotected": 1, "none": 2}  # of rows
_BESIDE = ("bm25", "public_only", "original", "encoder", "reranked_public_only")
_UNITS = {"Generator": "nats per token", "Retriever": "nats per query"}


def write_report(path: str | os.PathLike, report: Mapping[str, Any]) -> None:
    """Writes what `content.gather` returns as one HTML file without any script."""
    rows, spent = report["rows"], report["spent"]
    beside = [row for row in rows if row["name"] in _BESIDE]
    protected = _protected(report)
    values = {
        **report,
        "beside": beside,
        "best": protected[0] if protected else None,
        "chart": _chart([row for row in rows if row in beside or row in protected]),
        "spent": plots.lines(spent, "ε spent, by step", "ε") if spent else None,
        "losses": [
            plots.lines(curves, f"{kind}s: training loss", _UNITS[kind])
            for kind, curves in report["losses"].items()
        ],
    }
    write_file(path, render("report.html.j2", values))


def _protected(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the rows with a finite ε, the best first."""
    rows = [row for row in report["rows"] if row["private_data"] == "protected"]
    return sorted(rows, key=lambda row: -row["ndcg@10"])


def _chart(rows: list[Mapping[str, Any]]) -> plots.Plot:
    """Returns the plot of protected rows and what they are beside."""
    reference = [row["ndcg@10"] for row in rows if row["name"] == "public_only"]
    return plots.intervals(
        [
            (r["label"], r["ndcg@10"], r["ndcg@10_ci"], _COLORS[r["private_data"]])
            for r in rows
        ],
        "NDCG@10 on the test queries",
        "NDCG@10",
        reference[0] if reference else None,
        "95 % intervals. Blue: protected; orange: private data without "
        "protection; green: no private data. Dotted: public-only.",
    )


def write_results(path: str | os.PathLike, report: Mapping[str, Any]) -> None:
    """Writes RESULT_KEYS of the report as strict JSON: infinite ε is "inf".

    Raises:
      ValueError: a number is NaN.
    """
    results = {key: report[key] for key in RESULT_KEYS}
    text = json.dumps(results, indent=2, allow_nan=False, ensure_ascii=False)
    write_file(path, text + "\n")


def in_lines(report: Mapping[str, Any]) -> str:
    """Returns ε and NDCG@10 of every row, then the best, for the terminal."""
    lines = [f"{'row':28} {'ε spent':>8}  NDCG@10"]
    for row in report["rows"]:
        spent = wording.epsilon_text(row["epsilon"])
        lines.append(f"{row['label']:28} {spent:>8}  {row['ndcg@10']:.4f}")
    for row in _protected(report)[:1]:
        lines += ["", f"Best within an ε: {row['label']}, NDCG@10 {row['ndcg@10']:.4f}"]
        if over := row["difference_to_public_only"]:
            found = "{difference:+.4f} ({low:+.4f} to {high:+.4f})".format(**over)
            lines[-1] += f", {found} by the private pairs"
    return "\n".join(lines)


def write_file(path: str | os.PathLike, text: str) -> None:
    """Writes a file for its owner's eyes alone; it appears whole or not at all."""
    with owner_only():
        open_private(pathlib.Path(path).parent)
        io.atomic_write(pathlib.Path(path), text)


def render(template: str, values: Mapping[str, Any]) -> str:
    """Renders a template of this package; every text in `values` is escaped."""
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfdpsq.run.report"),
        autoescape=True,  # queries and documents may contain markup
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("epsilon", "factor", "most", "least", "number", "duration"):
        environment.filters[name] = getattr(wording, f"{name}_text")
    return environment

"""Renders a job's results: `report.html` and `results.json`, for their owner's eyes."""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from tfdpsq.data import io
from tfdpsq.run.frame.places import open_private, owner_only
from tfdpsq.run.report import plots, wording
from tfdpsq.run.report.content import METRICS
from tfdpsq.run.report.evidence import ATTACKS, verdicts
from tfdpsq.run.report.wording import MISSING, epsilon_text

RESULT_KEYS = ("rows", "seconds", "peak_memory_gib", "fingerprints", "versions")

_METRIC, _FUSED = METRICS[0], "fused_ndcg@10"
_COLORS = {"protected": 0, "unprotected": 1, "none": 2}  # of rows
_BESIDE = ("bm25", "public_only", "original")  # rows that the answer is beside
_UNITS = {"Generator": "nats per token", "Retriever": "nats per query"}
_FOOTNOTES = {
    "bm25": "Words in common; nothing is trained.",
    "untrained": "The weights that every other retriever starts from.",
    "public_only": "Trained on sentences cut from public documents.",
    "original": "Trained on the private pairs without protection.",
    "synthetic": "Trained on synthetic queries alone.",
    "direct": "Trained on the private pairs by DP-SGD.",
    "encoder": "Embeddings by an encoder that saw no private pair.",
    "adapter": "A matrix on its query embeddings, trained on private pairs; compared "
    "with the encoder as it is.",
    "reranked": "BM25's best documents, ordered by BM25 and by how likely a T5 finds "
    "the query; compared with the public T5.",
}


def write_report(path: str | os.PathLike, report: Mapping[str, Any]) -> None:
    """Writes one HTML file that needs no other file, no network and no script.

    Args:
      path: of the file, in a private directory.
      report: what `content.gather` returns.
    """
    write_file(path, render("report.html.j2", _view(report)))


def write_results(path: str | os.PathLike, report: Mapping[str, Any]) -> None:
    """Writes RESULT_KEYS of the report as strict JSON: infinite ε is "inf".

    Raises:
      ValueError: a number is NaN.
    """
    results = {key: report[key] for key in RESULT_KEYS}
    text = json.dumps(results, indent=2, allow_nan=False, ensure_ascii=False)
    write_file(path, text + "\n")


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


def table_in_markdown(report: Mapping[str, Any]) -> str:
    """Returns the rows of the table, for the terminal."""
    header = ["row", "ε spent", "NDCG@10 (95 %)", "Recall@10", "over public-only"]
    lines = [[*header, "with BM25"], ["---"] * (len(header) + 1)]
    for row in report["rows"]:
        cells = [row["name"], *_cells(row)]
        lines.append([c if isinstance(c, str) else f"{c[0]} ({c[1]})" for c in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _view(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of `report.html.j2`."""
    rows, certificates = report["rows"], report["certificates"]
    notes = list(dict.fromkeys(map(_footnote, rows)))
    spent = report["spent"]
    return {
        **report,
        "answer": _answer(rows),
        "chart": _chart(rows),
        "results": [
            [(row["label"], str(notes.index(_footnote(row)) + 1)), *_cells(row)]
            for row in rows
        ],
        "footnotes": notes,
        "verdicts": [v for a in report["audits"].items() for v in verdicts(*a)],
        "attacks": ATTACKS,
        "protected": [c for c in certificates.values() if c["private"]],
        "spent": plots.lines(spent, "ε spent, by step", "ε") if spent else None,
        "losses": [
            plots.lines(curves, f"{kind}s: training loss", _UNITS[kind])
            for kind, curves in report["losses"].items()
        ],
        "total": sum(report["seconds"].values()),
    }


def _footnote(row: Mapping[str, Any]) -> str:
    name = row["name"]
    return _FOOTNOTES[name if name in _FOOTNOTES else name.split("_")[0]]


def _answer(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns what private data added, in one sentence."""
    protected = [row for row in rows if row["private_data"] == "protected"]
    if not protected:
        return "Nothing here is protected: no row has a finite ε."
    best = max(protected, key=lambda row: row[_METRIC])
    text = f"At ε = {epsilon_text(best['epsilon'])}, {best['label']} reaches NDCG@10 "
    text += f"{best[_METRIC]:.3f}"
    if over := best["difference_to_public_only"]:
        low, high = over["ci"]
        text += f": private data added {over['difference']:+.3f} (95 % interval "
        text += f"{low:+.3f} to {high:+.3f}) to what public documents alone give"
    beside = [f"{r['label']} {r[_METRIC]:.3f}" for r in rows if r["name"] in _BESIDE]
    return f"{text} ({', '.join(beside)})."


def _chart(rows: Sequence[Mapping[str, Any]]) -> plots.Plot:
    """Returns the plot of protected rows and what they are beside."""
    shown = [
        (row["label"], row[_METRIC], row[f"{_METRIC}_ci"], _COLORS[used])
        for row in rows
        if (used := row["private_data"]) == "protected" or row["name"] in _BESIDE
    ]
    public = [row[_METRIC] for row in rows if row["name"] == "public_only"]
    return plots.intervals(
        shown,
        "NDCG@10 on the test queries",
        "NDCG@10",
        public[0] if public else None,
        "95 % intervals. Blue: protected; orange: private data without "
        "protection; green: no private data. Dotted: public-only.",
    )


def _cells(row: Mapping[str, Any]) -> list[Any]:
    """Returns ε, measures and differences of a row; (text, small print) or a text."""
    fused: Any = MISSING
    if _FUSED in row:
        over = _over(row["fused_over_public_only"])
        fused = f"{row[_FUSED]:.4f}"
        fused = fused if over == MISSING else (fused, over[0])
    return [
        epsilon_text(row["epsilon"]),
        *(
            (f"{row[metric]:.4f}", "{:.4f} to {:.4f}".format(*row[f"{metric}_ci"]))
            for metric in METRICS
        ),
        _over(row["difference_to_public_only"]),
        fused,
    ]


def _over(found: Mapping[str, Any] | None) -> Any:
    if not found:
        return MISSING
    low, high = found["ci"]
    return f"{found['difference']:+.4f}", f"{low:+.4f} to {high:+.4f}"

"""Renders a job's results: `report.html` and `results.json`, for their owner's eyes."""

from __future__ import annotations

import functools
import json
import math
import numbers
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from tfdpsq.data import io
from tfdpsq.run.frame.places import open_private, owner_only
from tfdpsq.run.report import certificates_in_words, evidence, plots, wording
from tfdpsq.run.report.content import METRICS
from tfdpsq.run.report.wording import MISSING, epsilon_text
from tfdpsq.validation import InputError

RESULT_KEYS = ("rows", "seconds", "peak_memory_gib", "fingerprints", "versions")
MAX_DOCUMENT_CHARACTERS = 1200

_METRIC, _FUSED = METRICS[0], "fused_ndcg@10"
# Colours of rows.
_COLORS = {"protected": 0, "unprotected": 1, "none": 2}
_FOOTNOTES = {
    "bm25": "Words in common; nothing is trained.",
    "untrained": "The weights that every other retriever starts from.",
    "public_only": "Trained on sentences cut from public documents.",
    "original": "Trained on the private pairs without protection.",
    "synthetic": "Trained on synthetic queries alone.",
    "direct": "Trained on the private pairs by DP-SGD.",
    "encoder": "Embeddings by an encoder that saw no private pair.",
    "adapter": "A matrix on that encoder's query embeddings, trained on private pairs.",
    "reranked": "BM25's best documents, ordered by BM25 and by how likely a T5 finds "
    "the query; compared with the public T5.",
}


def write_report(path: str | os.PathLike, report: Mapping[str, Any]) -> None:
    """Writes one HTML file that needs no other file, no network and no script.

    Args:
      path: of the file, in a private directory.
      report: what `content.gather` returns; numbers may be NumPy's.

    Raises:
      InputError: a number is NaN.
    """
    write_file(path, render("report.html.j2", _view(plain_values(report))))


def write_results(path: str | os.PathLike, report: Mapping[str, Any]) -> None:
    """Writes RESULT_KEYS of the report as strict JSON: infinite ε is "inf".

    Raises:
      InputError: a number is NaN.
    """
    report = plain_values(report)
    results = {key: report.get(key) for key in RESULT_KEYS}
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
    environment.filters["shorten"] = wording.shorten
    return environment


def plain_values(value: Any, where: str = "report") -> Any:
    """Returns nested dicts, lists and numbers as JSON values.

    Infinite numbers become "inf" and "-inf". In training curves, whose losses can be
    NaN, that becomes "nan".

    Raises:
      InputError: a NaN elsewhere.
    """
    if isinstance(value, Mapping):
        return {str(k): plain_values(v, f"{where}.{k}") for k, v in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain_values(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, (str, bool, numbers.Integral)):
        return value
    value = float(value)
    if math.isnan(value) and not where.startswith("report.curves."):
        raise InputError(
            f"{where} is NaN, which is no result. Look at the stage that made it."
        )
    return value if math.isfinite(value) else str(value)


def table_in_markdown(report: Mapping[str, Any]) -> str:
    """Returns the rows of the table, for the terminal."""
    header = ["row", "ε spent", "NDCG@10 (95 %)", "Recall@10", "over public-only"]
    lines = [[*header, "with BM25"], ["---"] * (len(header) + 1)]
    for row in plain_values(report)["rows"]:
        cells = [row["name"], *_cells(row)]
        texts = [c if isinstance(c, str) else f"{c[0]} ({c[1]})" for c in cells]
        lines.append([text.removesuffix(" ()") for text in texts])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _view(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of `report.html.j2`."""
    rows = report["rows"]
    named = {row["name"]: row for row in rows}
    protected = [row for row in rows if row["private_data"] == "protected"]
    notes = list(dict.fromkeys(_footnote(row) for row in rows))
    return {
        "title": report["title"],
        "created": report["created"],
        "answer": _answer(protected, named),
        "chart": _chart(rows, named),
        "results": [
            [(row["label"], str(notes.index(_footnote(row)) + 1)), *_cells(row)]
            for row in rows
        ],
        "footnotes": notes,
        "examples": report.get("examples", []),
        "max_document_characters": MAX_DOCUMENT_CHARACTERS,
        "similarity": evidence.similarity(report.get("similarity", {})),
        "leakage": evidence.leakage(report.get("audits", {})),
        "guarantee": certificates_in_words.in_words(report.get("certificates", [])),
        "losses": _losses(report.get("curves", {})),
        "spent": _spent(report.get("epsilon_curves", {})),
        "cost": _cost(report),
        "notes": report.get("notes", []),
        "fingerprints": report.get("fingerprints", {}),
        "versions": report.get("versions", {}),
    }


def _footnote(row: Mapping[str, Any]) -> str:
    kind = row["name"] if row["name"] in _FOOTNOTES else row["name"].split("_")[0]
    return _FOOTNOTES.get(kind, "")


def _answer(
    protected: Sequence[Mapping[str, Any]], named: Mapping[str, Mapping[str, Any]]
) -> str:
    """Returns what private data added, in one sentence."""
    if not protected:
        return "Nothing here is protected: no row has a finite ε."
    best = max(protected, key=lambda row: row[_METRIC])
    over = best["difference_to_public_only"]
    text = f"At ε = {epsilon_text(best['epsilon'])}, {best['label']} reaches {_METRIC} "
    text += f"{best[_METRIC]:.3f}"
    if over:
        low, high = over["ci"]
        text += (
            f": private data added {over['difference']:+.3f} (95 % interval "
            f"{low:+.3f} to {high:+.3f}) to what public documents alone give"
        )
    rest = [
        f"{named[name]['label']} {named[name][_METRIC]:.3f}"
        for name in ("bm25", "public_only", "original")
        if name in named
    ]
    return f"{text} ({', '.join(rest)})." if rest else f"{text}."


def _chart(
    rows: Sequence[Mapping[str, Any]], named: Mapping[str, Mapping[str, Any]]
) -> plots.Plot:
    """Returns the plot of all rows, and of public-only as a line."""
    public = named.get("public_only")
    return plots.intervals(
        [
            (
                row["label"],
                row[_METRIC],
                row[f"{_METRIC}_ci"],
                _COLORS[row["private_data"]],
            )
            for row in rows
        ],
        f"{_METRIC} on the test queries",
        _METRIC,
        public and public[_METRIC],
        "95 % intervals. Blue: protected; orange: private data without protection; "
        "green: no private data. Dotted: public-only.",
    )


def _cells(row: Mapping[str, Any]) -> list[Any]:
    """Returns ε, measures and differences of a row; (text, small print) or a text."""
    fused = f"{row[_FUSED]:.4f}" if _FUSED in row else MISSING
    return [
        epsilon_text(row["epsilon"]),
        *(
            (f"{row[metric]:.4f}", "{:.4f} to {:.4f}".format(*row[f"{metric}_ci"]))
            for metric in METRICS
        ),
        _over(row["difference_to_public_only"]),
        (fused, _over(row.get("fused_over_public_only"))[0])
        if _FUSED in row
        else fused,
    ]


def _over(found: Mapping[str, Any] | None) -> Any:
    if not found:
        return MISSING
    low, high = found["ci"]
    return f"{found['difference']:+.4f}", f"{low:+.4f} to {high:+.4f}"


def _losses(curves: Mapping[str, Any]) -> list[plots.Plot]:
    charts: dict[tuple[str, str], dict[str, Any]] = {}
    for run, curve in curves.items():
        key = curve.get("chart", "Training loss"), curve.get("unit", "nats")
        charts.setdefault(key, {})[run] = curve["step"], list(map(float, curve["loss"]))
    return [plots.lines(of, chart, unit) for (chart, unit), of in charts.items()]


def _spent(curves: Mapping[str, Any]) -> plots.Plot | None:
    """Returns the plot of finite ε by step; `None` without one."""
    finite = {
        run: (curve["step"], curve["epsilon"])
        for run, curve in curves.items()
        if all(isinstance(value, float) for value in curve["epsilon"])
    }
    return plots.lines(finite, "ε spent, by step", "ε", True) if finite else None


def _cost(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the duration of each stage, their sum, and the memory."""
    seconds = report.get("seconds", {})
    total = sum(seconds.values())
    return {
        "stages": [
            [stage, wording.duration_text(taken), f"{taken / total:.0%}"]
            for stage, taken in seconds.items()
            if total
        ],
        "total": wording.duration_text(total),
        "memory": f"{report.get('peak_memory_gib') or 0.0:.2f} GiB",
    }

"""The paper's tables and ours, side by side, as text, JSON and one HTML page."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from tfdpsq import privacy
from tfdpsq.privacy.proof.ledger import READS_FILE_NAME
from tfdpsq.run.core import layout
from tfdpsq.run.reporting import content, page
from tfdpsq.run.reproduction import reproduce_tables

RESULTS_FILE, PAGE_FILE = layout.TABLE_FILES
_CONTROL = "control, not in the paper"


def write(directory: pathlib.Path, results: Mapping[str, Any]) -> None:
    """Writes `tables.json` and `tables.html`.

    `results` is what `reproduce_numbers.compare` returned, with "seconds" by stage.
    """
    text = json.dumps(_finite(results), indent=1, allow_nan=False)
    page.write_file(directory / RESULTS_FILE, text + "\n")
    page.write_file(directory / PAGE_FILE, as_html(results))


def write_examples(
    private: pathlib.Path,
    data: str,
    split: str,
    count: int,
    made: Mapping[str, pathlib.Path],
) -> dict[str, Any]:
    """Writes queries of all rows for the same documents, under `private/`.

    `made` are the rows' synthetic sets, compared on `count` documents of `split`.

    Returns:
      The file, the names of the rows, and how many documents it shows.
    """
    table, path = (private / name for name in layout.EXAMPLE_FILES)
    reads = privacy.PrivateReads(private / READS_FILE_NAME)
    reads.record("some private queries as they are", "examples.html, examples.json")
    shown = content.examples(data, split, count, made)
    page.write_file(table, json.dumps(shown, indent=1) + "\n")
    view = {
        "title": "Queries of every generator for the same documents",
        "examples": shown,
        "max_document_characters": page.MAX_DOCUMENT_CHARACTERS,
    }
    page.write_file(path, page.render("examples.html.j2", view))
    return {"file": str(path), "rows": list(made), "documents": len(shown)}


def as_text(results: Mapping[str, Any]) -> str:
    """Formats the tables for a terminal."""
    parts = []
    for name, table in results["tables"].items():
        columns, tau = table["columns"], table["tau"]
        lines = [
            ["ours (paper)", *columns],
            *(
                [row["name"], *(_both(row, column) for column in columns)]
                for row in table["rows"]
            ),
            [
                "Kendall's τ",
                *(_number(tau[c]["tau"], 2) if c in tau else "" for c in columns),
            ],
        ]
        widths = [max(map(len, column)) for column in zip(*lines)]
        parts.append(
            "\n".join(
                [
                    f"Table {name}. {table['title']}",
                    *([table["note"]] if table["note"] else []),
                    *(
                        "  ".join(map(str.ljust, line, widths)).rstrip()
                        for line in lines
                    ),
                    *(f"- {_sentence(verdict)}" for verdict in table["verdicts"]),
                    *(f"- {text}" for text in _gains(table)),
                ]
            )
        )
    for name, each in results["examples"].items():
        parts.append(f"Table {name}. {each['title']}\n{_of_examples(each)}")
    return "\n\n".join(parts)


def _of_examples(summary: Mapping[str, Any]) -> str:
    """States where the examples are, without showing them."""
    return (
        f"{summary['documents']} documents with their private query and one of each "
        f"of {len(summary['rows'])} models: {summary['file']}"
    )


def as_html(results: Mapping[str, Any]) -> str:
    """Renders one page that needs no other file."""
    verdicts = [v for t in results["tables"].values() for v in t["verdicts"]]
    kinds = [verdict["verdict"] for verdict in verdicts]
    seconds = results["seconds"]
    total = ("all", sum(seconds.values()))
    return page.render(
        "tables.html.j2",
        {
            "title": "The paper's tables",
            "summary": {
                "orderings": len(verdicts),
                "hold": kinds.count(reproduce_tables.HOLDS),
                "open": kinds.count(reproduce_tables.OPEN),
                "fail": kinds.count(reproduce_tables.FAILS),
            },
            "tables": [_view(name, t) for name, t in results["tables"].items()],
            "examples": [
                {"title": f"Table {name}. {e['title']}", "text": _of_examples(e)}
                for name, e in results["examples"].items()
            ],
            "data": results["data"],
            "seeds": results["seeds"],
            "versions": [f"{k} {v}" for k, v in results["versions"].items()],
            "seconds": [[k, f"{v:,.0f}"] for k, v in (*seconds.items(), total)],
        },
    )


def _view(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one table's values in `tables.html.j2`."""
    columns = table["columns"]
    return {
        "title": f"Table {name}. {table['title']}",
        "note": table["note"],
        "columns": columns,
        "rows": [
            [
                (row["name"], _CONTROL if row["paper"] is None else ""),
                *(_html_cell(row, column) for column in columns),
            ]
            for row in table["rows"]
        ],
        "taus": [
            f"{column}: {_number(tau['tau'], 2)} over {tau['rows']} rows "
            f"(p = {_number(tau['p_value'], 2)})"
            for column, tau in table["tau"].items()
        ],
        "verdicts": [_judged(verdict) for verdict in table["verdicts"]],
        "gains": _gains(table),
    }


def _gains(table: Mapping[str, Any]) -> list[str]:
    """States the largest possible gain in each column."""
    return [
        f"The largest possible gain in {column} is {room:.4f}: what the private pairs "
        "add, without any protection, to the encoder that every row starts from."
        for column, room in table["room"].items()
    ]


def _judged(verdict: Mapping[str, Any]) -> list[Any]:
    ordering = f"{verdict['above']} above {verdict['below']} in {verdict['column']}"
    return [
        ordering,
        (verdict["verdict"], verdict["why"]) if verdict["why"] else verdict["verdict"],
        f"{verdict['difference']:+.4f}{_interval(verdict)}",
        f"{verdict['paper']:+.4f}",
    ]


def _interval(verdict: Mapping[str, Any]) -> str:
    if verdict["low"] is None:
        return ""
    return f" ({verdict['low']:+.4f} to {verdict['high']:+.4f})"


def _sentence(verdict: Mapping[str, Any]) -> str:
    text = (
        f"{verdict['above']} above {verdict['below']} in {verdict['column']}: "
        f"{verdict['verdict']}, {verdict['difference']:+.4f}{_interval(verdict)}; in "
        f"the paper {verdict['paper']:+.4f}."
    )
    return f"{text} {verdict['why']}".rstrip()


def _both(row: Mapping[str, Any], column: str) -> str:
    ours = row["ours"].get(column)
    text = "–" if ours is None else _number(ours["value"])
    paper = (row["paper"] or {}).get(column)
    return text if paper is None else f"{text} ({_number(paper)})"


def _html_cell(row: Mapping[str, Any], column: str) -> tuple[str, str]:
    ours = row["ours"].get(column)
    paper = (row["paper"] or {}).get(column)
    notes = [] if paper is None else [f"paper {_number(paper)}"]
    if ours is not None and ours["note"]:
        notes.append(ours["note"])
    return ("–" if ours is None else _number(ours["value"]), "; ".join(notes))


def _number(value: float, digits: int = 4) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value:.{digits}f}" if abs(value) < 1 else f"{value:g}"


def _finite(value: Any) -> Any:
    """Replaces values that are not finite by None: JSON has no NaN."""
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

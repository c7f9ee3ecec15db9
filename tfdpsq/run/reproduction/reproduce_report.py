"""The paper's tables and ours, side by side, as text, JSON and one HTML page."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from tfdpsq.run.core import outputs, releases
from tfdpsq.run.reporting import report_html
from tfdpsq.run.reproduction import reproduce_tables

RESULTS_FILE, PAGE_FILE = "tables.json", "tables.html"
_CONTROL = "control, not in the paper"


def write(directory: pathlib.Path, results: Mapping[str, Any]) -> None:
    """Writes `tables.json` and `tables.html`.

    Args:
      directory: the workdir.
      results: what `reproduce_numbers.compare` returned, with "seconds" by stage.
    """
    text = json.dumps(_finite(results), indent=1, allow_nan=False) + "\n"
    for name, content in ((RESULTS_FILE, text), (PAGE_FILE, as_html(results))):
        outputs.write_file(
            directory / name, content, releases.PRIVATE, "measures of private queries"
        )


def as_text(results: Mapping[str, Any]) -> str:
    """The tables as people read them in a terminal."""
    parts = []
    for name, table in results["tables"].items():
        columns = table["columns"]
        header = ["ours (paper)", *columns]
        lines = [
            [row["name"], *(_both(row, column) for column in columns)]
            for row in table["rows"]
        ]
        lines.append(
            [
                "Kendall's τ",
                *(
                    _number(table["tau"][column]["tau"], 2)
                    if column in table["tau"]
                    else ""
                    for column in columns
                ),
            ]
        )
        widths = [
            max(len(line[i]) for line in [header, *lines]) for i in range(len(header))
        ]
        parts.append(
            f"Table {name}. {table['title']}\n"
            + "\n".join(
                "  ".join(
                    cell.ljust(width) for cell, width in zip(line, widths)
                ).rstrip()
                for line in [header, *lines]
            )
            + "\n"
            + "\n".join(
                f"- {text}"
                for text in (*map(_sentence, table["verdicts"]), *_rooms(table))
            )
        )
    return "\n\n".join(parts)


def as_html(results: Mapping[str, Any]) -> str:
    """One page that needs nothing else."""
    body = [
        "<h1>The paper's tables, ours beside the published numbers</h1>",
        '<p class="lead">Carranza et al. 2024. Each number of ours stands above the '
        "paper's. What counts is the order of the rows: the data, the T5s and their "
        "sizes are not the paper's.</p>",
        '<p class="warning"><strong>Not to be released.</strong> These numbers are '
        "computed from private queries, and no ε covers them.</p>",
        _summary(results),
    ]
    for name, table in results["tables"].items():
        columns = table["columns"]
        rows = [
            [
                (row["name"], "" if row["paper"] else _CONTROL),
                *(_html_cell(row, column) for column in columns),
            ]
            for row in table["rows"]
        ]
        taus = [
            f"{column}: {_number(tau['tau'], 2)} over {tau['rows']} rows "
            f"(p = {_number(tau['p_value'], 2)})"
            for column, tau in table["tau"].items()
        ]
        body.append(
            report_html.section(
                f"Table {name}. {table['title']}",
                report_html.table(["row", *columns], rows, stacked=True),
                "<h3>Kendall's τ between our order and the paper's</h3>",
                report_html.bullets(taus),
                "<h3>The paper's orderings</h3>",
                report_html.table(
                    ["ordering", "here", "difference (95 %)", "in the paper"],
                    [_judged(verdict) for verdict in table["verdicts"]],
                    stacked=True,
                ),
                *(f"<p>{report_html.escape(text)}</p>" for text in _rooms(table)),
            )
        )
    body.append(
        report_html.section(
            "How it was made",
            report_html.definitions(
                {
                    "data": results["data"],
                    "seeds": ", ".join(map(str, results["seeds"])),
                    "intervals": "95 %, percentile bootstrap over queries (those of "
                    "each zero-shot set by themselves), of the means over seeds; what "
                    "training and its noise vary by is not in them",
                    "versions": [f"{k} {v}" for k, v in results["versions"].items()],
                }
            ),
            report_html.table(
                ["stage", "seconds"],
                [
                    [name, f"{seconds:,.0f}"]
                    for name, seconds in results["seconds"].items()
                ]
                + [["all", f"{sum(results['seconds'].values()):,.0f}"]],
            ),
        )
    )
    return report_html.page("The paper's tables", "".join(body))


def _summary(results: Mapping[str, Any]) -> str:
    verdicts = [v for t in results["tables"].values() for v in t["verdicts"]]
    words = ", ".join(
        f"{sum(v['verdict'] == kind for v in verdicts)} {said}"
        for kind, said in (
            (reproduce_tables.HOLDS, "hold here"),
            (reproduce_tables.OPEN, "cannot be told from no difference"),
            (reproduce_tables.FAILS, "do not hold"),
        )
    )
    return f"<p>Of {len(verdicts)} orderings that the paper reports, {words}.</p>"


def _rooms(table: Mapping[str, Any]) -> list[str]:
    """What there is to gain in each column at most, in words."""
    return [
        f"Of {column}, all that there is to gain is {room:.4f}: what the private pairs "
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
    """JSON has no NaN: what is none is null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

"""The report's comparisons: quality against ε, and queries won and lost."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq import evaluation
from tfdpsq.run.reporting import report_plots
from tfdpsq.run.reporting.report_html import escape, section

# By the start of a row's name.
_SOURCES = {"synthetic": "Synthetic queries", "direct": "Direct DP"}
_CONTROLS = {"public_only": "public-only", "original": "original pairs, ε = ∞"}


def quality_against_epsilon(rows: Sequence[Mapping[str, Any]], metric: str) -> str:
    """Returns a figure, or nothing where no source has results at two ε.

    Args:
      rows: the report's.
      metric: which of their values.
    """
    series: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        source = _SOURCES.get(row["name"].split("_")[0])
        if source is not None and row["epsilon"] is not None:
            point = (float(row["epsilon"]), row[metric], *row[f"{metric}_ci"])
            series.setdefault(source, []).append(point)
    if not any(len(points) > 1 for points in series.values()):
        return ""
    controls = {
        _CONTROLS[row["name"]]: row[metric] for row in rows if row["name"] in _CONTROLS
    }
    title = f"{metric} against ε, with 95 % intervals over test queries"
    return report_plots.against_epsilon(series, controls, title, metric)


def wins_and_losses(
    directory: pathlib.Path,
    queries: Mapping[str, str],
    documents: Mapping[str, str],
    row: str,
    against: str,
    metric: str = "ndcg@10",
    most: int = 5,
) -> dict[str, Any]:
    """The queries on which two rows differ most.

    Args:
      directory: what the stage `evaluate` wrote.
      queries: id -> text.
      documents: id -> text, at least of those judged relevant.
      row: name of a system.
      against: name of another.
      metric: what is compared.
      most: how many queries each way.

    Returns:
      "better", "equal", "worse": counts; "wins" and "losses": lists of {query,
      document, value, other}, the largest difference first.
    """
    qrels = evaluation.read_trec_qrels(directory / "qrels.trec")
    values = [
        evaluation.evaluate_run(
            qrels,
            evaluation.read_trec_run(directory / "runs" / f"{name}.trec"),
            [metric],
        ).per_query
        for name in (row, against)
    ]
    differences = sorted(
        (values[0][query][metric] - values[1][query][metric], query) for query in qrels
    )

    def shown(found: Sequence[tuple[float, str]]) -> list[dict[str, Any]]:
        return [
            {
                "query": queries[query],
                "document": documents.get(_best(qrels[query]), ""),
                "value": values[0][query][metric],
                "other": values[1][query][metric],
            }
            for difference, query in found
        ]

    wins = [each for each in differences if each[0] > 0]
    losses = [each for each in differences if each[0] < 0]
    return {
        "row": row,
        "against": against,
        "metric": metric,
        "better": len(wins),
        "equal": len(differences) - len(wins) - len(losses),
        "worse": len(losses),
        "wins": shown(wins[::-1][:most]),
        "losses": shown(losses[:most]),
    }


def _best(judgements: Mapping[str, int]) -> str:
    return max(judgements, key=lambda name: judgements[name])


def wins_and_losses_html(found: Mapping[str, Any] | None) -> str:
    """Returns the section of what `wins_and_losses` found, or nothing."""
    if not found:
        return ""
    row, against = (
        found.get("label", found["row"]),
        found.get("against_label", found["against"]),
    )
    said = (
        f"{row} is better than {against} on {found['better']} test queries, worse on "
        f"{found['worse']}, and equal on {found['equal']}."
    )
    parts = []
    for title, entries in (("Won", found["wins"]), ("Lost", found["losses"])):
        cards = "".join(
            f'<div class="card"><div class="query original">{escape(entry["query"])}'
            f'</div><p class="muted">{escape(_short(entry["document"]))}</p>'
            f'<p class="muted">{escape(found["metric"])} {entry["value"]:.3f} against '
            f"{entry['other']:.3f}</p></div>"
            for entry in entries
        )
        if cards:
            parts.append(f"<div><h3>{title}</h3>{cards}</div>")
    return section(
        "Queries won and lost",
        f"<p>{escape(said)}</p>",
        f'<div class="grid">{"".join(parts)}</div>' if parts else "",
    )


def _short(text: str, most: int = 240) -> str:
    return text if len(text) <= most else text[:most].rstrip() + " […]"

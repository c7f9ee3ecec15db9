"""Reads the rows' numbers for each of the paper's tables, and compares them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import evaluation, validation
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import layout, workdir
from tfdpsq.run.reproduction import reproduce_tables
from tfdpsq.run.reproduction.reproduce_rows import Row, row_of
from tfdpsq.run.reproduction.reproduce_tables import Cell
from tfdpsq.run.search import benchmark_sets, systems

MEAN = "mean"
EXAMPLES = "examples"
# Forms of canaries, and what is added to the names of their columns.
_FORMS = ((canary_set.PAPER_FORMS, ""), (canary_set.OUR_FORMS, ", our forms"))
_Cells = dict[str, dict[str, Cell]]


def compare(
    rows: Any,
    tables: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    resamples: int,
) -> dict[str, Any]:
    """Makes the rows of the tables and compares them with the paper's.

    `rows` makes each row's outputs on first use: `Rows` of the command `reproduce`.

    Returns:
      JSON values: "tables", each with "rows", "tau" and "verdicts"; "examples", by
      the table's name; "seeds".
    """
    made, examples = {}, {}
    for name, table in tables.items():
        if table["measure"] == EXAMPLES:
            examples[name] = {
                "title": table["title"],
                **rows.examples(_asked(table), seeds[0]),
            }
            continue
        ours = _MEASURES[table["measure"]](seeds, rows, table)
        made[name] = _set_beside(table, ours, len(seeds), resamples)
    return {
        "tables": made,
        "examples": examples,
        "seeds": list(seeds),
        "data": rows.data,
        "zero_shot_sets": dict(rows.sets),
        "versions": workdir.versions(),
    }


def check(
    config: ml_collections.ConfigDict,
    tables: Mapping[str, Mapping[str, Any]],
    sets: Mapping[str, str],
) -> None:
    """Refuses tables that could not be compared once their rows are made.

    `sets` are the zero-shot sets that are made here.
    """
    _require_one_set_of_systems(tables)
    for name, table in tables.items():
        where, measure = f"tables.{name}", table["measure"]
        validation.one_of(f"{where}.measure", measure, (*_MEASURES, EXAMPLES))
        for row, numbers in table["paper"].items():
            if len(numbers) not in (0, len(table["columns"])):
                raise validation.InputError(
                    f"{where}.paper has {len(numbers)} numbers for {row!r}; give one "
                    f"for each of the {len(table['columns'])} columns, or none."
                )
        if measure == EXAMPLES:
            continue
        made = _columns(config, table, sets, where)
        for claim in table["claims"]:
            for row in claim[:2]:
                numbered = [r for r, numbers in table["paper"].items() if numbers]
                validation.one_of(f"a row of {where}.claims", row, tuple(numbered))
        asked = [(c, "claims") for _, _, c in table["claims"]]
        rows = {row.name for row in _asked(table)}
        if {"original", "untrained"} <= rows or measure == "retrieval":
            asked += [(c, "columns") for c in table["columns"]]
        for column, entry in asked:
            if column not in made or column not in table["columns"]:
                raise validation.InputError(
                    f"{where}.{entry} holds the column {column!r}, but with these "
                    f"settings the columns are {', '.join(made)}. Change the table, or "
                    "the settings that it is made with."
                )


def _require_one_set_of_systems(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses zero-shot tables of different rows, which one search makes for all."""
    first: tuple[str, set[str]] | None = None
    for name, table in tables.items():
        if table["measure"] != "zero_shot":
            continue
        rows = {row.name for row in _asked(table)}
        if first is not None and first[1] != rows:
            raise validation.InputError(
                f"tables.{name} and tables.{first[0]} are both zero-shot, but only one "
                f"has {', '.join(sorted(rows ^ first[1]))}. Give both the same rows: "
                "one search makes both."
            )
        first = first or (name, rows)


def _columns(
    config: ml_collections.ConfigDict,
    table: Mapping[str, Any],
    sets: Mapping[str, str],
    where: str,
) -> list[str]:
    """Returns the columns that a table will have."""
    measure, made = table["measure"], config.job.canaries
    if measure == "retrieval":
        systems.check_search({}, config.job.evaluate.k, table["columns"])
        return list(table["columns"])
    if measure == "zero_shot":
        metric = table.get("metric")
        if metric not in config.zero_shot.metrics:
            raise validation.InputError(
                f"{where}.metric is {validation.shown(metric)}, which is not among "
                f"zero_shot.metrics, {tuple(config.zero_shot.metrics)}. Add it there."
            )
        return [MEAN, *(sets or config.zero_shot.sets)]
    if measure == "similarity":
        return ["bleu", "mauve"]
    return [
        f"{what}, {times}{suffix}"
        for forms, suffix in _FORMS
        if made.trials and set(forms) & set(made.forms)
        for times in made.repetitions
        for what in ("rank", "leaked")
    ]


def _set_beside(
    table: Mapping[str, Any], ours: _Cells, seeds: int, resamples: int
) -> dict[str, Any]:
    paper = {
        row: dict(zip(table["columns"], numbers))
        for row, numbers in table["paper"].items()
    }
    found = [
        reproduce_tables.judge(tuple(claim), ours, paper, table["lower"], resamples)
        for claim in table["claims"]
    ]
    shared = [
        c
        for c in table["columns"]
        if all(c in ours[r] and c in paper[r] for r in paper)
    ]
    return {
        "title": table["title"],
        "note": table.get("note", ""),
        "room": _room(table, ours),
        "columns": list(next(iter(ours.values()))),
        "rows": [
            {
                "name": row,
                "paper": paper.get(row),
                "ours": {
                    column: {"value": cell.value, "note": cell.note}
                    for column, cell in cells.items()
                },
            }
            for row, cells in ours.items()
        ],
        "tau": {
            column: reproduce_tables.kendall(
                [ours[row][column].value for row in paper],
                [paper[row][column] for row in paper],
            )
            for column in shared
        },
        "verdicts": [
            {
                **dataclasses.asdict(verdict),
                "why": ""
                if verdict.verdict == reproduce_tables.HOLDS
                else reproduce_tables.why(
                    verdict,
                    sum(map(len, ours[verdict.above][verdict.column].queries)),
                    seeds,
                ),
            }
            for verdict in found
        ],
    }


def _room(table: Mapping[str, Any], ours: _Cells) -> dict[str, float]:
    """Returns, by column, the gain from unprotected training on the private pairs."""
    if not {"original", "untrained"} <= ours.keys():
        return {}
    return {
        column: ours["original"][column].value - ours["untrained"][column].value
        for column in table["columns"]
    }


def _asked(table: Mapping[str, Any]) -> list[Row]:
    """Returns the paper's rows, best first by its first column, and the controls."""
    paper = list(table["paper"])
    if all(table["paper"].values()):
        paper.sort(key=lambda row: table["paper"][row][0])
        if table["columns"][0] not in table["lower"]:
            paper.reverse()
    return [row_of(name) for name in (*paper, *table["controls"])]


def _retrieval(seeds: Sequence[int], rows: Any, table: Mapping[str, Any]) -> _Cells:
    """Returns means over seeds of each query's value, from the TREC files."""
    found: _Cells = {}
    for row in _asked(table):
        values: dict[str, list[np.ndarray]] = {}
        for seed in seeds:
            out = rows.retrieved(row, seed)
            result = evaluation.evaluate_run(
                evaluation.read_trec_qrels(out / layout.QRELS_FILE),
                evaluation.read_trec_run(out / "runs" / f"{row.name}.trec"),
                table["columns"],
            )
            for column in table["columns"]:
                values.setdefault(column, []).append(result.values(column))
        found[row.name] = {
            column: _cell([of_seeds]) for column, of_seeds in values.items()
        }
    return found


def _zero_shot(seeds: Sequence[int], rows: Any, table: Mapping[str, Any]) -> _Cells:
    """Returns a metric of each set and the mean; CQADupStack's forums are one set."""
    asked = _asked(table)
    runs = [rows.zero_shot(asked, seed, table["metric"]) for seed in seeds]
    found: _Cells = {}
    for row in asked:
        cells = {
            name: _cell(list(zip(*(run[name][row.name] for run in runs))))
            for name in runs[0]
        }
        # As sets of their own, the forums would weigh too much in the mean.
        whole = [benchmark_sets.as_one(cell.queries) for cell in cells.values()]
        mean = float(np.mean([cell.value for cell in cells.values()]))
        found[row.name] = {MEAN: Cell(mean, tuple(whole)), **cells}
    return found


def _cell(parts: Sequence[Sequence[np.ndarray]]) -> Cell:
    """Returns the mean over parts of the mean over queries and seeds.

    `parts` are, for each part, for each seed, [queries].
    """
    queries = tuple(np.mean(seeds, axis=0) for seeds in parts)
    by_seed = np.mean([[values.mean() for values in seeds] for seeds in parts], axis=0)
    note = ""
    if len(by_seed) > 1:
        note = "by seed " + ", ".join(f"{value:.4f}" for value in by_seed)
    return Cell(float(np.mean([q.mean() for q in queries])), queries, note)


def _similarity(seeds: Sequence[int], rows: Any, table: Mapping[str, Any]) -> _Cells:
    found: _Cells = {}
    for row in _asked(table):
        read = [_json(rows.compared(row, seed) / layout.METRICS_FILE) for seed in seeds]
        measured = [metrics["similarity"][row.name] for metrics in read]
        mauves = [each["mauve"]["mean"] for each in measured if "mauve" in each]
        found[row.name] = {
            # sacrebleu's BLEU is in per cent.
            "bleu": Cell(
                float(np.mean([(each["bleu"] or 0.0) / 100 for each in measured])),
                note=f"{measured[0]['queries']:,} queries",
            ),
            "mauve": Cell(
                float(np.mean(mauves)) if mauves else float("nan"),
                note=_mauve_note(measured[0]) if mauves else "",
            ),
        }
    return found


def _mauve_note(measured: Mapping[str, Any]) -> str:
    """States what a MAUVE was computed with."""
    mauve, rules = measured["mauve"], measured["rules"]
    points = mauve["points"]
    return (
        f"± {mauve['deviation']:.4f} over k-means seeds; "
        f"{f'{points} points' if points else 'exact area'}; features of "
        f"{rules['featurizer']}; {mauve['samples'][0]:,} queries of each"
    )


def _canaries(seeds: Sequence[int], rows: Any, table: Mapping[str, Any]) -> _Cells:
    found: _Cells = {}
    for row in _asked(table):
        entries = _json(rows.audited(row) / layout.AUDIT_FILE)["canaries"]
        cells: dict[str, Cell] = {}
        for forms, suffix in _FORMS:
            for times in sorted({entry["repetitions"] for entry in entries}):
                of_forms = [
                    entry
                    for entry in entries
                    if entry["form"] in forms and entry["repetitions"] == times
                ]
                if of_forms:
                    rank, leaked = _of_canaries(of_forms)
                    cells[f"rank, {times}{suffix}"] = rank
                    cells[f"leaked, {times}{suffix}"] = leaked
        found[row.name] = cells
    return found


def _of_canaries(entries: Sequence[Mapping[str, Any]]) -> tuple[Cell, Cell]:
    """Returns mean rank and share leaked of the secrets of several forms."""
    ranks = np.concatenate([np.array(entry["ranks"]) for entry in entries])
    candidates = entries[0]["candidates"]
    p_value = evaluation.rank_p_value(ranks, candidates)
    by_form = ", ".join(f"{e['form']} {e['mean_rank']:g}" for e in entries)
    sizes = [len(entry["ranks"]) for entry in entries]
    leaked, in_set = (
        float(np.average([entry[name] for entry in entries], weights=sizes))
        for name in ("leaked", "leaked_in_set")
    )
    return (
        Cell(
            float(ranks.mean()),
            note=f"mean of {len(ranks)} secrets ({by_form}); p = {p_value:.2g} "
            f"against chance ({(candidates + 1) / 2:g})",
        ),
        # A secret leaks where it can be read in what is released.
        Cell(
            in_set,
            note=f"in the released set; {leaked:.0%} when many queries are written for "
            "each canary's document",
        ),
    )


def _json(path: pathlib.Path) -> Any:
    return workdir.read_json(path)


_MEASURES = {
    "retrieval": _retrieval,
    "zero_shot": _zero_shot,
    "similarity": _similarity,
    "canaries": _canaries,
}

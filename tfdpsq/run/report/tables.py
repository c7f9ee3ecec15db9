"""The paper's tables next to ours: rows, numbers, and orderings."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdpsq import evaluation
from tfdpsq.data import io
from tfdpsq.run.report import page, plots
from tfdpsq.run.report.wording import step_part
from tfdpsq.validation import InputError

RETRIEVAL, ZERO_SHOT, SIMILARITY = "retrieval", "zero_shot", "similarity"
CANARIES, EXAMPLES, OVERLAP, GRID = "canaries", "examples", "overlap", "grid"
CONTROLS = ("untrained", "public-only")
TEXTS = ("documents", "queries")  # rows of an overlap
RESULTS_FILE, PAGE_FILE = "tables.json", "tables.html"
NOTHING = "nothing"  # 0, in a claim
HOLDS, OPEN, FAILS = "holds", "undecided", "does not hold"
_NUMBER = r"eps\d+(?:\.\d+)?"
_GENERATED = rf"synthetic-(\w+)-(inf|{_NUMBER})|direct-({_NUMBER})"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row: "original", "synthetic-SIZE-EPSILON", "direct-EPSILON", or a control."""

    name: str
    kind: str  # the name before the first "-"
    size: str = ""  # of the generator, if there is one
    epsilon: float = math.inf  # the target

    @classmethod
    def of(cls, name: str) -> Row:
        """Parses a row's name; refuses any other text with an InputError."""
        if name in ("original", *CONTROLS, *TEXTS):
            return cls(name, name)
        found = re.fullmatch(_GENERATED, name)
        last = "" if found is None else found[2] or found[3]
        epsilon = float(last.removeprefix("eps") or 0)
        # One spelling: outputs are named after it, and are paid for by their names.
        if found is None or last != step_part(epsilon):
            raise InputError(
                f"a table has the row {name!r}; rows are named original, "
                "synthetic-SIZE-eps8, synthetic-SIZE-inf or direct-eps8."
            )
        return cls(name, name.partition("-")[0], found[1] or "", epsilon)

    @property
    def part(self) -> str:
        """The part of steps' names for a generator of this row."""
        return f"{self.size}_{step_part(self.epsilon)}"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One of our numbers."""

    value: float
    # [queries] of each set, whose mean it is, in an order shared by a column's cells
    queries: tuple[np.ndarray, ...] = ()
    note: str = ""  # printed below it


Cells = Mapping[str, Mapping[str, Cell]]  # by row and column


def rows_of(table: Mapping[str, Any]) -> list[Row]:
    """Returns the paper's rows, best first by its first column, and the controls."""
    sign = 1 if table["lower"] else -1
    numbers = {row: [sign * n for n in own] for row, own in table["paper"].items()}
    names = sorted(numbers, key=numbers.__getitem__)
    return [Row.of(name) for name in (*names, *table["controls"])]


def compared(table: Mapping[str, Any], ours: Cells, resamples: int) -> dict[str, Any]:
    """Returns an entry of `tables` with our numbers next to the paper's, as JSON."""
    names, columns = table["columns"], list(next(iter(ours.values())))
    published = {**table["paper"], **table.get("published", {})}  # also rows not run
    paper = {row: dict(zip(names, numbers)) for row, numbers in published.items()}
    missing = {row: dict[str, Cell]() for row in paper if row not in ours}
    return {
        "title": table["title"],
        "note": table.get("note", ""),
        "columns": columns,
        "rows": [
            {
                "name": row,
                "paper": paper.get(row, {}),
                "ours": {c: cell.value for c, cell in cells.items()},
                "notes": {c: cell.note for c, cell in cells.items() if cell.note},
            }
            for row, cells in (*ours.items(), *missing.items())
        ],
        "verdicts": [
            judge(tuple(claim), ours, paper, table["lower"], resamples)
            for claim in table["claims"]
            if claim[2] in columns
        ],
    }


def judge(
    claim: tuple[str, str, str],
    ours: Cells,
    paper: Mapping[str, Mapping[str, float]],
    lower: Sequence[str] = (),
    resamples: int = 10_000,
) -> dict[str, Any]:
    """Checks whether (row above, row below, column), an ordering of the paper's, holds.

    In columns of `lower`, less is better. A row above `NOTHING` is above 0, and one
    below it is 0. OPEN is a 95 % interval over queries, within each set, that holds 0.
    """
    (above, below, column), low, high = claim, None, None
    sign = -1.0 if column in lower else 1.0
    ours = {NOTHING: {column: Cell(0.0)}, **ours}
    paper = {NOTHING: {column: 0.0}, **paper}
    a, b = ours[above][column], ours[below][column]
    difference = sign * (a.value - b.value)
    one, other = (paper.get(row, {}).get(column) for row in (above, below))
    equal = above == NOTHING and not difference
    verdict = HOLDS if difference > 0 or equal else FAILS
    if a.queries:
        gains = [sign * (x - y) for x, y in zip(a.queries, b.queries, strict=True)]
        interval = evaluation.macro_interval(gains, resamples=resamples)
        low, high = interval.low, interval.high
        verdict = OPEN if low <= 0 <= high else verdict
    return {
        **dict(zip(("above", "below", "column"), claim)),
        "difference": difference,
        "low": low,
        "high": high,
        "paper": None if one is None or other is None else sign * (one - other),
        "verdict": verdict,
    }


# -- Numbers of rows, by what a table measures -----------------------------------------


def cells(
    table: Mapping[str, Any], paths: Mapping[str, str], seeds: Sequence[int]
) -> Cells:
    """Reads our numbers of a table from the outputs of `reproduce`'s steps, by name."""
    found: dict[str, dict[str, Cell]] = {}
    measure = table["measure"]
    step = measure if measure in (ZERO_SHOT, GRID) else RETRIEVAL
    outs = [paths.get(f"seed{seed}_{step}", "") for seed in seeds]
    for row in rows_of(table):
        if measure == CANARIES:
            audits = [paths[f"seed{seed}_audit_{row.part}"] for seed in seeds]
            own = canary_cells(audits, table["forms"])
        elif measure == OVERLAP:
            share = _json(paths[OVERLAP], "overlap.json")[row.name]["contained"]
            note = f"{share['low']:.4f} to {share['high']:.4f}"
            own = {"share": Cell(share["share"], note=note)}
        elif measure == RETRIEVAL:
            own = {c: _mean(outs, [""], row, c) for c in table["columns"]}
        elif measure == ZERO_SHOT:
            own = _zero_shot(outs, row, table["metric"])
        else:
            read = [_json(out, "metrics.json")["similarity"] for out in outs]
            own = _similarity([each[row.name] for each in read])
        found[row.name] = own
    if measure == GRID:  # best first
        found = dict(sorted(found.items(), key=lambda own: -own[1]["bleu"].value))
    return found


def _json(out: str, name: str) -> dict[str, Any]:
    remedy = "Move its directory away: it is made again."
    return io.read_json(pathlib.Path(out) / name, remedy)


def _mean(outs: Sequence[str], sets: Sequence[str], row: Row, metric: str) -> Cell:
    """Returns the mean over sets of the mean over queries and seeds."""
    values = []
    for name in sets:
        seeds = []
        for out in map(pathlib.Path, outs):
            folder = out / "runs" / name
            qrels = (folder if name else out) / "qrels.trec"
            judged = evaluation.read_trec_qrels(qrels)
            run = evaluation.read_trec_run(folder / f"{row.name}.trec")
            seeds.append(evaluation.evaluate_run(judged, run, [metric]).values(metric))
        values.append(np.mean(seeds, axis=0))
    return Cell(float(np.mean([each.mean() for each in values])), tuple(values))


def _zero_shot(outs: Sequence[str], row: Row, metric: str) -> dict[str, Cell]:
    """Returns a metric of each set and the mean; CQADupStack's forums are one set."""
    cells, runs = {}, pathlib.Path(outs[0]) / "runs"
    for folder in sorted(each for each in runs.iterdir() if each.is_dir()):
        files = sorted(folder.rglob(f"{row.name}.trec"))
        names = [str(file.parent.relative_to(runs)) for file in files]
        cells[folder.name] = _mean(outs, names, row, metric)
    # As sets of their own, the forums would weigh too much in the mean.
    whole = tuple(np.concatenate(cell.queries) for cell in cells.values())
    mean = float(np.mean([cell.value for cell in cells.values()]))
    return {"mean": Cell(mean, whole), **cells}


def _similarity(measured: Sequence[Mapping[str, Any]]) -> dict[str, Cell]:
    """Returns means over seeds; MAUVE only where there are features for it."""
    # sacrebleu's BLEU is in per cent.
    bleu = float(np.mean([(each["bleu"] or 0.0) / 100 for each in measured]))
    found = {"bleu": Cell(bleu)}
    if mauves := [each["mauve"]["mean"] for each in measured if "mauve" in each]:
        note = f"features of {measured[0]['rules']['featurizer']}"
        found["mauve"] = Cell(float(np.mean(mauves)), note=note)
    return found


def canary_cells(audits: Sequence[str], forms: Sequence[str]) -> dict[str, Cell]:
    """Returns mean ranks and shares leaked of some forms, by repetitions."""
    read = [e for audit in audits for e in _json(audit, "audit.json")["canaries"]]
    found, read = {}, [entry for entry in read if entry["form"] in forms]
    for count in sorted({entry["repetitions"] for entry in read}):
        own = [entry for entry in read if entry["repetitions"] == count]
        ranks = np.concatenate([np.array(entry["ranks"]) for entry in own])
        p_value = evaluation.rank_p_value(ranks, own[0]["candidates"])
        note = f"{len(ranks)} secrets, p = {p_value:.2g}"
        # A secret leaks where it can be read in what is released.
        shares = [entry["leaked"] for entry in own]
        leaked = np.average(shares, weights=[len(entry["ranks"]) for entry in own])
        found[f"rank, {count}"] = Cell(float(ranks.mean()), note=note)
        found[f"leaked, {count}"] = Cell(float(leaked))
        bound = max(entry["epsilon_pure"] for entry in own)
        found[f"ε ≥, {count}"] = Cell(bound, note="for pure DP, by the ranks")
    return found


def write(private: pathlib.Path, found: Mapping[str, Any], examples: Any) -> str:
    """Writes the tables and any examples; returns how many orderings hold in each."""
    text = json.dumps(found, indent=1, allow_nan=False)
    page.write_file(private / RESULTS_FILE, text + "\n")
    pictures = {name: [*_plots(table)] for name, table in found["tables"].items()}
    text = page.render("tables.html.j2", {**found, "plots": pictures})
    page.write_file(private / PAGE_FILE, text)
    if examples:
        text = page.render("examples.html.j2", {"examples": examples})
        page.write_file(private / "examples.html", text)
    lines = []
    for name, table in found["tables"].items():
        verdicts = [each["verdict"] for each in table["verdicts"]]
        held = f"{verdicts.count(HOLDS)} of {len(verdicts)} orderings hold"
        held = held if verdicts else f"best is {table['rows'][0]['name']}"
        lines.append(f"Table {name}. {table['title']}: {held}.")
    return "\n".join(lines)


def _plots(table: Mapping[str, Any]) -> Iterator[plots.Plot]:
    """Yields plots of the first column, ours and the paper's, by ε and by size."""
    column = table["columns"][0]
    rows = [(Row.of(row["name"]), row) for row in table["rows"] if row["paper"]]
    rows = [(row, numbers) for row, numbers in rows if row.kind == "synthetic"]
    for by, of in (("ε", "size"), ("size", "epsilon")):
        for one in dict.fromkeys(getattr(row, of) for row, _ in rows):
            some = [each for row, each in rows if getattr(row, of) == one]
            some.sort(key=lambda each: -each["paper"][column])
            at, labels = range(len(some)), [each["name"] for each in some]
            curves = {
                whose: (at, [each[whose].get(column, math.nan) for each in some])
                for whose in ("ours", "paper")
            }
            if len(some) > 1:
                title = f"{column} by {by}, {of} {one}"
                yield plots.lines(curves, title, column, labels)

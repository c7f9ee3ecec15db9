"""The paper's tables beside ours: rows, numbers, orderings, and Kendall's τ."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

from tfdpsq import evaluation, validation
from tfdpsq.data import io
from tfdpsq.run.common import canary_set
from tfdpsq.run.frame import records
from tfdpsq.run.frame.artefacts import SET
from tfdpsq.run.frame.places import Place
from tfdpsq.run.report import content, page
from tfdpsq.run.report.wording import step_part
from tfdpsq.validation import InputError

RETRIEVAL, ZERO_SHOT, SIMILARITY = "retrieval", "zero_shot", "similarity"
CANARIES, EXAMPLES = "canaries", "examples"
CONTROLS = ("untrained", "public-only")
RESULTS_FILE, PAGE_FILE = "tables.json", "tables.html"
HOLDS, OPEN, FAILS = "holds", "undecided", "does not hold"
_REMEDY = "Move its directory away: it is made again."
# Forms of canaries, and what is added to the names of their columns.
_FORMS = ((canary_set.PAPER_FORMS, ""), (canary_set.OUR_FORMS, ", our forms"))


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
      name: "original", "synthetic-SIZE-EPSILON", "direct-EPSILON", or a control.
      kind: the part before the first "-".
      size: of the generator; "" where there is none.
      epsilon: target ε; ∞ without protection, `None` where nothing private is read.
    """

    name: str
    kind: str
    size: str
    epsilon: float | None

    @classmethod
    def of(cls, name: str) -> Row:
        """Parses a row's name; refuses any other text with an InputError."""
        if name in CONTROLS:
            return cls(name, name, "", None)
        if name == "original":
            return cls(name, name, "", math.inf)
        kind, *size, last = name.split("-") if "-" in name else (name, "")
        try:
            epsilon = float(last.removeprefix("eps"))
        except ValueError:
            epsilon = math.nan
        # One spelling: outputs are named after it, and are paid for by their names.
        spelt = "-".join([kind, *size, step_part(epsilon)])
        known = (kind, len(size)) in (("synthetic", 1), ("direct", 0)) and epsilon > 0
        if not known or name != spelt or (kind == "direct" and math.isinf(epsilon)):
            raise InputError(
                f"a table has the row {name!r}; rows are named original, "
                "synthetic-SIZE-eps8, synthetic-SIZE-inf, direct-eps8, "
                f"{' or '.join(CONTROLS)}."
            )
        return cls(name, kind, "".join(size), epsilon)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One of our numbers.

    Attributes:
      value: the number.
      queries: the values of single queries that it is the mean of, [queries] per set,
        in an order shared by all cells of a column; empty for any other number.
      note: remark printed next to it.
    """

    value: float
    queries: tuple[np.ndarray, ...] = ()
    note: str = ""


def rows_of(table: Mapping[str, Any]) -> list[Row]:
    """Returns the paper's rows, best first by its first column, and the controls."""
    paper = list(table["paper"])
    if all(table["paper"].values()):
        paper.sort(key=lambda row: table["paper"][row][0])
        if table["columns"][0] not in table["lower"]:
            paper.reverse()
    return [Row.of(name) for name in (*paper, *table["controls"])]


def check(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses rows, numbers and claims that do not fit each other."""
    for name, table in tables.items():
        validation.one_of(f"tables.{name}.measure", table["measure"], tuple(_MEASURES))
        rows = {row.name for row in rows_of(table)}
        for row, numbers in table["paper"].items():
            if len(numbers) not in (0, len(table["columns"])):
                raise InputError(
                    f"tables.{name}.paper has {len(numbers)} numbers for {row!r}; give "
                    f"one for each of the {len(table['columns'])} columns, or none."
                )
        for above, below, column in table["claims"]:
            validation.one_of(f"tables.{name}.claims", above, tuple(rows))
            validation.one_of(f"tables.{name}.claims", below, tuple(rows))
            validation.one_of(f"tables.{name}.claims", column, tuple(table["columns"]))


class Compared:
    """Reads the numbers of finished steps, and compares them with the paper's."""

    def __init__(
        self, outputs: Mapping[str, Place], seeds: Sequence[int], resamples: int
    ):
        """Takes the places of the steps of `reproduce`, by name."""
        self.outputs, self.seeds, self.resamples = outputs, seeds, resamples

    def all(
        self, tables: Mapping[str, Any], data: str, split: str, most: int
    ) -> dict[str, Any]:
        """Returns "tables", "examples", "seeds", "seconds" and "versions", as JSON."""
        found: dict[str, Any] = {"tables": {}, "examples": []}
        for name, table in tables.items():
            if table["measure"] == EXAMPLES:
                sets = {r.name: self._set(r) for r in rows_of(table)}
                found["examples"] = content.examples(data, split, most, sets)
            else:
                ours = _MEASURES[table["measure"]](self, table)
                found["tables"][name] = self._beside(table, ours)
        seconds = {n: records.seconds(place) for n, place in self.outputs.items()}
        return {
            **found,
            "seeds": list(self.seeds),
            "seconds": seconds,
            "versions": records.versions(),
        }

    def path(self, name: str) -> pathlib.Path:
        """Returns the output of a step."""
        return pathlib.Path(self.outputs[name].path)

    def metrics(self, name: str) -> dict[str, Any]:
        """Returns what `evaluate` measured in a step."""
        return io.read_json(self.path(name) / "metrics.json", _REMEDY)

    def _set(self, row: Row) -> pathlib.Path:
        part = f"{row.size}_{step_part(row.epsilon or math.inf)}"
        return self.path(f"seed{self.seeds[0]}_synthetic_{part}") / SET

    def _beside(
        self, table: Mapping[str, Any], ours: Mapping[str, Mapping[str, Cell]]
    ) -> dict[str, Any]:
        names = table["columns"]
        paper = {row: dict(zip(names, n)) for row, n in table["paper"].items()}
        shared = [
            c for c in names if all(c in ours[r] and c in paper[r] for r in paper)
        ]
        claims = [claim for claim in table["claims"] if claim[2] in shared]
        return {
            "title": table["title"],
            "note": table.get("note", ""),
            "columns": list(next(iter(ours.values()))),
            "rows": [
                {
                    "name": row,
                    "paper": paper.get(row, {}),
                    "ours": {c: cell.value for c, cell in cells.items()},
                    "notes": {c: cell.note for c, cell in cells.items() if cell.note},
                }
                for row, cells in ours.items()
            ],
            "tau": {
                column: kendall(
                    [ours[row][column].value for row in paper],
                    [paper[row][column] for row in paper],
                )
                for column in shared
            },
            "verdicts": [
                judge(tuple(claim), ours, paper, table["lower"], self.resamples)
                for claim in claims
            ],
        }


def judge(
    claim: tuple[str, str, str],
    ours: Mapping[str, Mapping[str, Cell]],
    paper: Mapping[str, Mapping[str, float]],
    lower: Sequence[str] = (),
    resamples: int = 10_000,
) -> dict[str, Any]:
    """Checks whether one of the paper's orderings holds in our numbers.

    Args:
      claim: (row above, row below, column).
      ours: our cells, by row and column.
      paper: its numbers.
      lower: columns in which less is better.
      resamples: of the interval over queries, drawn within each set.

    Returns:
      "above", "below", "column"; "difference", ours; "low" and "high" of its 95 %
      interval, `None` without queries; "paper", its difference; "verdict": HOLDS where
      difference and interval are above 0, OPEN where the interval holds 0, else FAILS.

    Raises:
      InputError: the two rows were measured on different queries.
    """
    above, below, column = claim
    sign = -1.0 if column in lower else 1.0
    a, b, low, high = ours[above][column], ours[below][column], None, None
    if [len(q) for q in a.queries] != [len(q) for q in b.queries]:
        raise InputError(
            f"rows {above!r} and {below!r} were measured on different queries in "
            f"{column!r}. Measure them on the same."
        )
    if a.queries:
        gains = [sign * (x - y) for x, y in zip(a.queries, b.queries)]
        interval = evaluation.macro_interval(gains, resamples=resamples)
        low, high = interval.low, interval.high
    difference = sign * (a.value - b.value)
    verdict = HOLDS if difference > 0 else FAILS
    if low is not None and high is not None and low <= 0 <= high:
        verdict = OPEN
    return {
        "above": above,
        "below": below,
        "column": column,
        "difference": difference,
        "low": low,
        "high": high,
        "paper": sign * (paper[above][column] - paper[below][column]),
        "verdict": verdict,
    }


def kendall(ours: Sequence[float], paper: Sequence[float]) -> dict[str, float]:
    """Computes Kendall's τ-b between our ordering of rows and the paper's.

    Returns:
      "tau": 1 for the same order, −1 for the reverse, NaN where all rows of one
      ordering are equal; "p_value": probability of a τ at least as far from 0 if all
      orders were equally likely; "rows": their number.
    """
    if len(ours) < 2:
        return {"tau": math.nan, "p_value": math.nan, "rows": len(ours)}
    tau, p_value = scipy.stats.kendalltau(ours, paper)
    return {"tau": float(tau), "p_value": float(p_value), "rows": len(ours)}


# -- Numbers of rows -------------------------------------------------------------------

_Cells = dict[str, dict[str, Cell]]


def _retrieval(of: Compared, table: Mapping[str, Any]) -> _Cells:
    """Returns means over seeds of each query's value, from the TREC files."""
    found: _Cells = {}
    for row in rows_of(table):
        values: dict[str, list[np.ndarray]] = {c: [] for c in table["columns"]}
        for seed in of.seeds:
            out = of.path(f"seed{seed}_retrieval")
            run = evaluation.read_trec_run(out / "runs" / f"{row.name}.trec")
            qrels = evaluation.read_trec_qrels(out / "qrels.trec")
            result = evaluation.evaluate_run(qrels, run, table["columns"])
            for column, each in values.items():
                each.append(result.values(column))
        found[row.name] = {c: _cell([seeds]) for c, seeds in values.items()}
    return found


def _zero_shot(of: Compared, table: Mapping[str, Any]) -> _Cells:
    """Returns a metric of each set and the mean; CQADupStack's forums are one set."""
    found: _Cells = {}
    outs = [of.path(f"seed{seed}_zero_shot") for seed in of.seeds]
    names = sorted(of.metrics(f"seed{of.seeds[0]}_zero_shot")["sets"])
    for row in rows_of(table):
        cells = {}
        for name in names:
            parts = sorted({p.parent for p in outs[0].glob(f"runs/{name}/**/*.trec")})
            values = [
                [_values(out / part.relative_to(outs[0]), row, table) for out in outs]
                for part in parts
            ]
            cells[name] = _cell(values)
        # As sets of their own, the forums would weigh too much in the mean.
        whole = [np.concatenate(cell.queries) for cell in cells.values()]
        mean = float(np.mean([cell.value for cell in cells.values()]))
        found[row.name] = {"mean": Cell(mean, tuple(whole)), **cells}
    return found


def _values(folder: pathlib.Path, row: Row, table: Mapping[str, Any]) -> np.ndarray:
    qrels = evaluation.read_trec_qrels(folder / "qrels.trec")
    run = evaluation.read_trec_run(folder / f"{row.name}.trec")
    metric = table["metric"]
    return evaluation.evaluate_run(qrels, run, [metric]).values(metric)


def _cell(parts: Sequence[Sequence[np.ndarray]]) -> Cell:
    """Returns the mean over parts of the mean over queries and seeds.

    Args:
      parts: for each part, for each seed, [queries].
    """
    queries = tuple(np.mean(seeds, axis=0) for seeds in parts)
    return Cell(float(np.mean([q.mean() for q in queries])), queries)


def _similarity(of: Compared, table: Mapping[str, Any]) -> _Cells:
    read = [of.metrics(f"seed{seed}_retrieval")["similarity"] for seed in of.seeds]
    found: _Cells = {}
    for row in rows_of(table):
        measured = [each[row.name] for each in read]
        mauves = [each["mauve"]["mean"] for each in measured if "mauve" in each]
        # sacrebleu's BLEU is in per cent.
        bleu = float(np.mean([(each["bleu"] or 0.0) / 100 for each in measured]))
        note = f"features of {measured[0]['rules']['featurizer']}" if mauves else ""
        mauve = float(np.mean(mauves)) if mauves else math.nan
        found[row.name] = {"bleu": Cell(bleu), "mauve": Cell(mauve, note=note)}
    return found


def _canaries(of: Compared, table: Mapping[str, Any]) -> _Cells:
    found: _Cells = {}
    for row in rows_of(table):
        out = of.path(f"audit_{row.size}_{step_part(row.epsilon or math.inf)}")
        entries = io.read_json(out / "audit.json", _REMEDY)["canaries"]
        cells: dict[str, Cell] = {}
        for forms, suffix in _FORMS:
            for times in sorted({entry["repetitions"] for entry in entries}):
                own = [
                    e
                    for e in entries
                    if e["form"] in forms and e["repetitions"] == times
                ]
                if not own:
                    continue
                ranks = np.concatenate([np.array(entry["ranks"]) for entry in own])
                sizes = [len(entry["ranks"]) for entry in own]
                # A secret leaks where it can be read in what is released.
                shares = [entry["leaked_in_set"] for entry in own]
                leaked = float(np.average(shares, weights=sizes))
                p_value = evaluation.rank_p_value(ranks, own[0]["candidates"])
                note = f"{len(ranks)} secrets, p = {p_value:.2g}"
                cells[f"rank, {times}{suffix}"] = Cell(float(ranks.mean()), note=note)
                cells[f"leaked, {times}{suffix}"] = Cell(leaked)
        found[row.name] = cells
    return found


_MEASURES: dict[str, Any] = {
    RETRIEVAL: _retrieval,
    ZERO_SHOT: _zero_shot,
    SIMILARITY: _similarity,
    CANARIES: _canaries,
    EXAMPLES: None,
}


# -- Pages -----------------------------------------------------------------------------


def write(private: pathlib.Path, found: Mapping[str, Any]) -> None:
    """Writes `tables.json` and `tables.html`, and `examples.html` if there are any."""
    text = json.dumps(_finite({**found, "examples": None}), indent=1, allow_nan=False)
    page.write_file(private / RESULTS_FILE, text + "\n")
    views = [_view(name, table) for name, table in found["tables"].items()]
    values = {"title": "The paper's tables", "tables": views}
    page.write_file(private / PAGE_FILE, page.render("tables.html.j2", values))
    if found["examples"]:
        values = {
            "title": "Queries of every generator for the same documents",
            "examples": found["examples"],
            "max_document_characters": page.MAX_DOCUMENT_CHARACTERS,
        }
        text = page.render("examples.html.j2", values)
        page.write_file(private / "examples.html", text)


def as_text(found: Mapping[str, Any]) -> str:
    """Formats the tables for a terminal: ours, and the paper's in brackets."""
    parts = []
    for view in (_view(name, table) for name, table in found["tables"].items()):
        flat = [
            [c if isinstance(c, str) else f"{c[0]} ({c[1]})" for c in line]
            for line in (view["header"], *view["rows"])
        ]
        widths = [max(map(len, column)) for column in zip(*flat)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in flat]
        parts.append("\n".join([view["title"], *lines, *view["sentences"]]))
    return "\n\n".join(parts)


def _view(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    columns = table["columns"]
    rows = [
        [row["name"], *(_both(row, column) for column in columns)]
        for row in table["rows"]
    ]
    taus = [
        f"Kendall's τ of {column}: {_number(tau['tau'])} over {tau['rows']} rows."
        for column, tau in table["tau"].items()
    ]
    return {
        "title": f"Table {name}. {table['title']}",
        "note": table["note"],
        "header": ["ours (paper)", *columns],
        "rows": rows,
        "sentences": [*taus, *map(_sentence, table["verdicts"])],
    }


def _sentence(verdict: Mapping[str, Any]) -> str:
    interval = ""
    if verdict["low"] is not None:
        interval = f" ({verdict['low']:+.4f} to {verdict['high']:+.4f})"
    return (
        f"{verdict['above']} above {verdict['below']} in {verdict['column']}: "
        f"{verdict['verdict']}, {verdict['difference']:+.4f}{interval}; in the paper "
        f"{verdict['paper']:+.4f}."
    )


def _both(row: Mapping[str, Any], column: str) -> Any:
    ours = _number(row["ours"].get(column, math.nan))
    paper = row["paper"].get(column)
    return ours if paper is None else (ours, _number(paper))


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value:.4f}" if abs(value) < 1 else f"{value:g}"


def _finite(value: Any) -> Any:
    """Replaces values that are not finite by `None`: JSON has no NaN."""
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

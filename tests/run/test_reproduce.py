"""The paper's tables as one command: rows, numbers, refusals, and whole runs."""

import json
import math
import re

import numpy as np
import pytest
from helpers import tiny_paper, tiny_sets

from configs.paper import tables as paper
from tfdpsq import evaluation, validation
from tfdpsq.run import jobs
from tfdpsq.run.common import benchmark_sets, canary_set
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.report import tables
from tfdpsq.run.report.tables import FAILS, HOLDS, OPEN, Cell
from tfdpsq.run.stages import reproduce


def test_every_table_is_whole():
    """A number in every column."""
    numbered = ["1", "2", "3", "4", "5", "5-recall", "6", "7", "7-literal"]
    assert list(paper.TABLES) == [*numbered, "overlap"]
    for table in paper.TABLES.values():
        for row, numbers in table["paper"].items():
            tables.Row.of(row)
            assert len(numbers) == len(table["columns"]) or table["measure"] == "grid"
    for name, above_original in (
        ("5", {"arguana", "scifact"}),
        ("5-recall", {"arguana", "scifact", "nfcorpus"}),
    ):
        table = paper.TABLES[name]
        assert table["columns"][1:] == benchmark_sets.PAPER
        best = {c for above, _, c in table["claims"] if above == "original"}
        assert set(benchmark_sets.PAPER) - best == above_original
    direct = {row for row in paper.TABLES["4"]["paper"] if row.startswith("direct")}
    assert len(direct) == 3  # the paper's table 4 is direct DP


def _compared(table, numbers):
    """Returns a table whose rows have these numbers here."""
    ours = {
        row: {column: Cell(value) for column, value in zip(table["columns"], own)}
        for row, own in numbers.items()
    }
    return tables.compared(table, ours, 1)


def test_page_has_the_papers_numbers_beside_ours(tmp_path):
    table = paper.TABLES["3"]
    ours = {row: [n / 2 for n in own] for row, own in table["paper"].items()}
    found = {"tables": {"3": _compared(table, ours)}}
    assert tables.write(tmp_path, found, ()).endswith("7 of 7 orderings hold.")
    page = (tmp_path / "tables.html").read_text()
    for text in ("by ε, size base", "by size, epsilon 3", "0.2590", "0.1295"):
        assert text in page
    assert page.count("<svg") == 2


def test_sizes_that_are_not_run_are_shown_as_published(tmp_path):
    table = paper._of_base(paper.TABLES["3"])
    found = {"tables": {"3": _compared(table, table["paper"])}}
    assert tables.write(tmp_path, found, ()).endswith("4 of 4 orderings hold.")
    page = (tmp_path / "tables.html").read_text()
    for text in ("by ε, size base", "by size, epsilon 3", "synthetic-xl-eps3"):
        assert text in page
    assert page.count("<svg") == 2


@pytest.mark.parametrize("name", [n for n, t in paper.TABLES.items() if t["claims"]])
def test_every_claim_holds_of_the_papers_numbers_and_fails_of_doctored_ones(name):
    table = paper.TABLES[name]

    def verdicts(numbers):
        return [each["verdict"] for each in _compared(table, numbers)["verdicts"]]

    assert verdicts(table["paper"]) == [HOLDS] * len(table["claims"])
    for number, (above, below, column) in enumerate(table["claims"]):
        place = table["columns"].index(column)
        doctored = {row: list(own) for row, own in table["paper"].items()}
        if tables.NOTHING in (above, below):
            row = above if below == tables.NOTHING else below
            doctored[row][place] = 0.0 if row == above else 0.1
        else:
            one, other = doctored[above], doctored[below]
            one[place], other[place] = other[place], one[place]
        assert verdicts(doctored)[number] == FAILS, (above, below, column)


@pytest.mark.parametrize(
    "scale", ["paper", pytest.param("tiny", marks=pytest.mark.slow)]
)
def test_a_scale_is_a_job_that_the_stages_take(scale, tmp_path):
    config = paper.get_config(scale)
    if scale == "paper":  # whose presets would have to be downloaded
        config.job.data = "pydocs"
        for size in config.sizes.values():
            size.init = "t5_tiny_pydocs"
        config.sets.scifact = str(tmp_path / "scifact")
        tiny_sets.write(tmp_path / "scifact", seed=0)
        config.overlap.corpus = (str(tmp_path / "scifact" / "corpus.jsonl"),)
        config.job.evaluate.similarity.init = "t5_tiny_pydocs"
    s = settings.from_config(reproduce.STAGE.Settings, config)
    planned = jobs.plan(reproduce.STAGE.steps(s, tmp_path), tmp_path)
    names = [each.step.name for each in planned]
    assert {"seed0_retrieval", "seed0_zero_shot", "seed0_audit_base_eps16"} <= set(
        names
    )
    for each in planned:
        finite = "_eps" in each.step.name or "-eps" in each.step.name
        if finite and not re.search("audit|rate0", each.step.name):
            assert each.privacy == Privacy.CERTIFIED, each.step.name


@pytest.mark.parametrize(
    "name", ["synthetic-base", "direct-eps-3", "other-eps8", "synthetic-base-eps8.0"]
)
def test_a_row_has_one_name(name):
    """Outputs are named after it: in two ways it would be trained and paid twice."""
    with pytest.raises(validation.InputError, match=name):
        tables.Row.of(name)
    row = tables.Row.of("synthetic-large-eps0.5")
    assert (row.kind, row.size, row.epsilon) == ("synthetic", "large", 0.5)


# -- Numbers: against counts by hand and other formulas ---------------------------


def _cell(*parts):
    queries = tuple(np.asarray(part, float) for part in parts)
    return Cell(float(np.mean([q.mean() for q in queries])), queries)


_PAPER = {"a": {"x": 0.5}, "b": {"x": 0.3}}


def test_an_ordering_holds_is_open_or_fails_as_the_queries_say():
    random = np.random.default_rng(0)
    base = random.uniform(0.2, 0.8, 400)
    noise = random.normal(0, 0.1, 400)
    rows = {0.1: HOLDS, -0.1: FAILS, 0.0: OPEN}  # 0.1 is 20 standard errors
    for shift, expected in rows.items():
        above = base + noise - noise.mean() + shift
        ours = {"a": {"x": _cell(above)}, "b": {"x": _cell(base)}}
        found = tables.judge(("a", "b", "x"), ours, _PAPER, resamples=2000)
        assert found["verdict"] == expected
        assert found["difference"] == pytest.approx(shift, abs=1e-12)
        # The normal approximation of the same interval.
        half = 1.96 * noise.std() / math.sqrt(400)
        assert found["low"] == pytest.approx(shift - half, abs=0.002)
        assert found["high"] == pytest.approx(shift + half, abs=0.002)
        assert found["paper"] == pytest.approx(0.2)
    # Every set counts the same: over all queries it would be 20/320.
    many, few = np.zeros(300), np.ones(20)
    ours = {"a": {"x": _cell(many, few)}, "b": {"x": _cell(many, np.zeros(20))}}
    found = tables.judge(("a", "b", "x"), ours, _PAPER, resamples=200)
    assert found["difference"] == found["low"] == found["high"] == 0.5
    # Where less is better, the lower row is above.
    ours = {"a": {"x": Cell(3.0)}, "b": {"x": Cell(40.0)}}
    numbers = {"a": {"x": 1.0}, "b": {"x": 43.0}}
    found = tables.judge(("a", "b", "x"), ours, numbers, ("x",))
    assert (found["verdict"], found["difference"]) == (HOLDS, 37.0)
    assert found["paper"] == 42.0
    assert tables.judge(("a", "b", "x"), ours, numbers)["verdict"] == FAILS


def _entry(form, times, ranks, in_set):
    return {
        "form": form,
        "repetitions": times,
        "ranks": ranks,
        "candidates": 100,
        "mean_rank": float(np.mean(ranks)),
        "leaked": in_set,
        "epsilon_pure": 1 / times,
    }


def test_a_canary_has_leaked_if_the_released_set_shows_it(tmp_path):
    """By the paper's forms; other queries of the generator do not count."""
    entries = [
        _entry("secret", 10, [50, 60], 0.0),
        _entry("own_document", 10, [1], 1.0),
        _entry("paper_own_document", 10, [4, 10, 21], 0.0),
        _entry("all", 10, [50, 60, 1, 4, 10, 21], 0.25),
        _entry("own_document", 100, [1], 1.0),
    ]
    for seed, own in enumerate((entries[:3], entries[3:])):
        (tmp_path / f"{seed}").mkdir()
        text = json.dumps({"canaries": own})
        (tmp_path / f"{seed}" / "audit.json").write_text(text)
    audits = [tmp_path / "0", tmp_path / "1"]
    cells = tables.canary_cells(audits, canary_set.PAPER_FORMS)
    assert {column: cell.value for column, cell in cells.items()} == {
        "rank, 10": 9.0,  # (1 + 4 + 10 + 21) / 4
        "leaked, 10": 0.25,  # one of four
        "ε ≥, 10": 0.1,
        "rank, 100": 1.0,
        "leaked, 100": 1.0,
        "ε ≥, 100": 0.01,
    }
    p_value = evaluation.rank_p_value(np.array([1, 4, 10, 21]), 100)
    assert f"p = {p_value:.2g}" in cells["rank, 10"].note


# -- Refusals before anything is paid ---------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny_paper.write(tmp_path_factory.mktemp("small"))


def test_bad_tables_and_sizes_are_refused_before_any_step(small, tmp_path):
    whole = paper.TABLES["3"]
    for change, message in (
        ({"tables": {"3": {**whole, "paper": {"other-eps8": ()}}}}, "row 'other-eps8'"),
        ({"table": ("9",)}, "table is '9'"),
        ({"sizes": {"base": {"init": ""}}}, "init is ''"),
    ):
        config = tiny_paper.config(small, table=("3",))
        with config.unlocked():
            for name, value in change.items():
                config[name] = value
        s = settings.from_config(reproduce.STAGE.Settings, config)
        with pytest.raises(validation.InputError, match=message) as raised:
            jobs.run(reproduce.STAGE, s, tmp_path / "work")
        assert "\n" not in str(raised.value), change
    with pytest.raises(validation.InputError, match="job.seed is 3, which this"):
        config = tiny_paper.config(small, **{"job.seed": 3})
        settings.from_config(reproduce.STAGE.Settings, config)


# -- Whole runs ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_table_is_made(small, tmp_path):
    """At the smallest size, with all rows and sets of the paper."""
    config = tiny_paper.config(small)
    s = settings.from_config(reproduce.STAGE.Settings, config)
    said = jobs.run(reproduce.STAGE, s, tmp_path)
    results = json.loads((tmp_path / "private" / "tables.json").read_text())
    assert list(results["tables"]) == [n for n in paper.TABLES if n != "2"]
    for name, table in results["tables"].items():
        rows = {row["name"] for row in table["rows"]}
        assert set(config.tables[name]["paper"]) <= rows
        assert f"Table {name}." in said
        assert len(table["verdicts"]) == len(paper.TABLES[name]["claims"])
    # What was made under a finite ε is where it may be released from, with its ε.
    release = tmp_path / "release"
    made = [p for p in release.glob("seed0_*") if "_eps" in p.name or "-eps" in p.name]
    assert len(made) >= 15
    assert all(list(path.rglob("certificate.json")) for path in made)
    assert not list(release.rglob("*inf*")) and not list(release.rglob("*original*"))
    private = tmp_path / "private"
    examples = (private / "examples.html").read_text()
    assert "who " in examples  # private queries
    assert re.search(r"number (\d+)\.", examples)[1] == "70"  # as asked for
    assert "as they are" in (private / "private_reads.jsonl").read_text()
    verdict = results["tables"]["3"]["verdicts"][0]
    assert verdict["low"] <= verdict["difference"] <= verdict["high"]
    line = f"above {verdict['below']} in ndcg@10: {verdict['verdict']}"
    assert line in (private / "tables.html").read_text()

"""Orderings, Kendall's τ and the page: against counts by hand and another formula."""

import itertools
import json
import math
import types

import numpy as np
import pytest
from helpers import tiny as _tiny

from tfdpsq import evaluation, validation
from tfdpsq.run import reproduce
from tfdpsq.run.core import layout
from tfdpsq.run.reproduction import (
    reproduce_numbers,
    reproduce_report,
    reproduce_tables,
)
from tfdpsq.run.reproduction.reproduce_tables import FAILS, HOLDS, OPEN, Cell


def _cell(*parts):
    queries = tuple(np.asarray(part, float) for part in parts)
    return Cell(float(np.mean([q.mean() for q in queries])), queries)


_PAPER = {"a": {"x": 0.5}, "b": {"x": 0.3}}


def test_an_ordering_holds_is_open_or_fails_as_the_queries_say():
    random = np.random.default_rng(0)
    base = random.uniform(0.2, 0.8, 400)
    noise = random.normal(0, 0.1, 400)
    rows = {
        0.1: HOLDS,  # 20 standard errors
        -0.1: FAILS,
        0.0: OPEN,
    }
    for shift, expected in rows.items():
        above = base + noise - noise.mean() + shift
        ours = {"a": {"x": _cell(above)}, "b": {"x": _cell(base)}}
        found = reproduce_tables.judge(("a", "b", "x"), ours, _PAPER, resamples=2000)
        assert found.verdict == expected
        assert found.difference == pytest.approx(shift, abs=1e-12)
        # The normal approximation of the same interval.
        half = 1.96 * noise.std() / math.sqrt(400)
        assert found.low == pytest.approx(shift - half, abs=0.002)
        assert found.high == pytest.approx(shift + half, abs=0.002)
        assert found.paper == pytest.approx(0.2)


def test_where_less_is_better_the_lower_row_is_above():
    ours = {"a": {"x": Cell(3.0)}, "b": {"x": Cell(40.0)}}
    paper = {"a": {"x": 1.0}, "b": {"x": 43.0}}
    found = reproduce_tables.judge(("a", "b", "x"), ours, paper, ("x",))
    assert (found.verdict, found.difference, found.paper) == (HOLDS, 37.0, 42.0)
    assert found.low is None
    turned = reproduce_tables.judge(("a", "b", "x"), ours, paper)
    assert turned.verdict == FAILS


def test_every_set_counts_the_same_however_many_queries_it_has():
    many, few = np.zeros(300), np.ones(20)
    ours = {
        "a": {"x": _cell(many, few)},
        "b": {"x": _cell(many, np.zeros(20))},
    }
    found = reproduce_tables.judge(("a", "b", "x"), ours, _PAPER, resamples=200)
    # 0 on one set, 1 on the other; over queries it would be 20/320.
    assert found.difference == found.low == found.high == 0.5


def test_rows_of_other_queries_are_refused():
    ours = {"a": {"x": _cell([1, 0])}, "b": {"x": _cell([1, 0, 1])}}
    with pytest.raises(validation.InputError, match="measured on different queries"):
        reproduce_tables.judge(("a", "b", "x"), ours, _PAPER)


def test_kendalls_tau_counts_pairs():
    random = np.random.default_rng(1)
    for size in (2, 5, 8):
        ours, paper = random.normal(size=(2, size))
        agree = [
            np.sign(ours[i] - ours[j]) * np.sign(paper[i] - paper[j])
            for i, j in itertools.combinations(range(size), 2)
        ]
        found = reproduce_tables.kendall(list(ours), list(paper))
        assert found["tau"] == pytest.approx(np.mean(agree))
        assert found["rows"] == size
    # All 4! orders are equally likely by chance: two of them agree as perfectly.
    found = reproduce_tables.kendall([1, 2, 3, 4], [5, 6, 7, 9])
    assert found["p_value"] == pytest.approx(2 / 24)
    for ours, paper in (([1, 1], [1, 2]), ([1], [2])):
        assert math.isnan(reproduce_tables.kendall(ours, paper)["tau"])


def test_a_failed_ordering_says_what_could_have_been_seen():
    verdict = reproduce_tables.Verdict("a", "b", "x", 0.001, -0.004, 0.006, 0.1, OPEN)
    text = reproduce_tables.why(verdict, 2000, 1)
    assert text == "2,000 queries resolve differences from about 0.0050 on."
    reverse = reproduce_tables.Verdict("a", "b", "x", -1, -2, -0.5, 0.1, FAILS)
    assert "one run of each row" in reproduce_tables.why(reverse, 2000, 1)
    assert "one run of each row" not in reproduce_tables.why(reverse, 2000, 3)


def test_the_page_and_the_text_show_ours_beside_the_papers(tmp_path):
    row = {
        "name": "direct-eps3",
        "paper": {"ndcg@10": 0.0234},
        "ours": {
            "ndcg@10": {"value": 0.2718, "note": "by seed <1>"},
            "more": {"value": math.nan, "note": ""},
        },
    }
    verdict = reproduce_tables.Verdict("p", "q", "x", 0.1, 0.05, 0.15, 0.2, HOLDS)
    results = {
        "tables": {
            "3": {
                "title": "Retrieval",
                "note": "A remark.",
                "room": {"ndcg@10": 0.0114},
                "columns": ["ndcg@10", "more"],
                "rows": [row, {**row, "name": "untrained", "paper": None}],
                "tau": {"ndcg@10": {"tau": 0.71, "p_value": 0.01, "rows": 8}},
                "verdicts": [{**vars(verdict), "why": ""}],
            }
        },
        "examples": {
            "1": {
                "title": "Examples",
                "file": "private/examples.html",
                "rows": ["a", "b"],
                "documents": 3,
            }
        },
        "seeds": [0],
        "data": "pydocs",
        "versions": {},
        "seconds": {"prepare": 61.0},
    }
    text = reproduce_report.as_text(results)
    assert "direct-eps3   0.2718 (0.0234)  –" in text
    assert "Kendall's τ   0.71" in text
    where = "query and one of each of 2 models: private/examples.html"
    assert f"Table 1. Examples\n3 documents with their private {where}" in text
    assert "Table 3. Retrieval\nA remark." in text
    assert "p above q in x: holds, +0.1000 (+0.0500 to +0.1500)" in text
    reproduce_report.write(tmp_path, results)
    page = (tmp_path / "tables.html").read_text()
    assert "paper 0.0234; by seed &lt;1&gt;" in page and "0.2718" in page
    assert "Of 1 orderings that the paper reports, 1 hold here, 0 cannot be" in page
    assert "is 0.0114: what the private pairs add" in page and "is 0.0114" in text
    assert "control, not in the paper" in page
    saved = json.loads((tmp_path / "tables.json").read_text())
    assert saved["tables"]["3"]["rows"][0]["ours"]["more"]["value"] is None


def _entry(form, times, ranks, leaked, in_set):
    return {
        "form": form,
        "repetitions": times,
        "ranks": ranks,
        "candidates": 100,
        "mean_rank": float(np.mean(ranks)),
        "leaked": leaked,
        "leaked_in_set": in_set,
    }


def test_a_canary_has_leaked_if_the_released_set_shows_it(tmp_path):
    """By the paper's forms and by ours; other queries of the generator do not count."""
    entries = [
        _entry("secret", 10, [50, 60], 1.0, 0.0),
        _entry("paper_query", 10, [1], 1.0, 1.0),
        _entry("paper_own_document", 10, [4, 10, 21], 1.0, 0.0),
        _entry("all", 10, [50, 60, 1, 4, 10, 21], 1.0, 0.25),
        _entry("paper_query", 100, [1], 1.0, 1.0),
    ]
    (tmp_path / layout.AUDIT_FILE).write_text(json.dumps({"canaries": entries}))
    rows = types.SimpleNamespace(audited=lambda row: tmp_path)
    columns = ("rank, 10", "leaked, 10")
    name = "synthetic-base-inf"
    table = {"paper": {name: (1, 0.67)}, "controls": (), "columns": columns}
    table["lower"] = ("rank, 10",)
    cells = reproduce_numbers._canaries((0,), rows, table)[name]
    assert {column: cell.value for column, cell in cells.items()} == {
        "rank, 10": 9.0,  # (1 + 4 + 10 + 21) / 4
        "leaked, 10": 0.25,  # one of four
        "rank, 100": 1.0,
        "leaked, 100": 1.0,
        "rank, 10, our forms": 55.0,
        "leaked, 10, our forms": 0.0,
    }
    p_value = evaluation.rank_test(np.array([1, 4, 10, 21]), 100).p_value
    assert f"p = {p_value:.2g}" in cells["rank, 10"].note
    assert "paper_own_document 11.6667" in cells["rank, 10"].note
    assert "100% when many queries" in cells["leaked, 10, our forms"].note


def test_a_table_without_published_numbers_has_ours(tmp_path):
    """Zero-shot Recall@10: of the metric that the table names, and no agreement."""
    values = {
        "ndcg@10": {"one": {"original": [np.array([0.5])]}},
        "recall@10": {
            "one": {"original": [np.array([1.0, 0.5])]},
            "forums": {"original": [np.array([0.0]), np.array([0.5])]},
        },
    }
    rows = types.SimpleNamespace(
        data="pydocs",
        sets={},
        zero_shot=lambda rows, seed, metric: values[metric],
        examples=lambda rows, seed: {"rows": [row.name for row in rows], "seed": seed},
    )
    table = {
        "title": "Zero-shot Recall@10",
        "measure": "zero_shot",
        "metric": "recall@10",
        "columns": ("mean", "one"),
        "lower": (),
        "controls": (),
        "paper": {"original": ()},
        "claims": (),
    }
    shown = {**table, "measure": "examples", "title": "Examples", "columns": ()}
    found = reproduce_numbers.compare(rows, {"5-recall": table, "1": shown}, (3,), 10)
    (row,) = found["tables"]["5-recall"]["rows"]
    ours = {column: cell["value"] for column, cell in row["ours"].items()}
    assert ours == {"mean": 0.5, "one": 0.75, "forums": 0.25}
    assert row["paper"] == {} and found["tables"]["5-recall"]["tau"] == {}
    assert found["examples"] == {
        "1": {"title": "Examples", "rows": ["original"], "seed": 3}
    }
    html = reproduce_report.as_html(
        {
            **found,
            "examples": {},
            "seconds": {},
        }
    )
    assert "Kendall" not in html and "not in the paper" not in html


def test_queries_that_are_shown_are_a_recorded_read(tmp_path):
    _tiny.write_pairs(tmp_path / "pairs")
    private = tmp_path / "private"
    private.mkdir()
    rows = types.SimpleNamespace(
        data=str(tmp_path / "pairs"),
        stages=types.SimpleNamespace(private=private),
        job=types.SimpleNamespace(
            evaluate=types.SimpleNamespace(similarity_split="train"), examples=2
        ),
    )
    found = reproduce.Rows.examples(rows, (), 0)
    shown = json.loads((private / "examples.json").read_text())
    assert found["documents"] == len(shown) == 2
    listed = private / "private_reads.jsonl"
    assert listed.is_file()
    assert "some private queries as they are" in listed.read_text()

"""The paper's tables as one command: rows, refusals, and a run that is killed."""

import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from helpers import tiny, tiny_paper

from configs.paper import tables as paper
from tfdpsq import evaluation, validation
from tfdpsq.data.pydocs import PACKAGES
from tfdpsq.run import reproduce
from tfdpsq.run.core import layout, pipeline_checks
from tfdpsq.run.reproduction import (
    reproduce_numbers,
    reproduce_rows,
    reproduce_tables,
)
from tfdpsq.run.reproduction.reproduce_tables import FAILS, HOLDS, OPEN, Cell
from tfdpsq.run.search import benchmark_sets

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_every_table_is_whole():
    """A number in every column, and claims that the paper's own numbers bear out."""
    assert list(paper.TABLES) == ["1", "2", "3", "4", "5", "5-recall", "6", "7"]
    for name, table in paper.TABLES.items():
        for row, numbers in table["paper"].items():
            reproduce_rows.row_of(row)
            published = () if name in ("1", "5-recall") else table["columns"]
            assert len(numbers) == len(published)
        for above, below, column in table["claims"]:
            place = table["columns"].index(column)
            a, b = table["paper"][above][place], table["paper"][below][place]
            # The paper's own numbers bear out what is said to be its claim.
            assert a < b if column in table["lower"] else a > b, (above, below, column)
    for name in ("5", "5-recall"):
        columns = paper.TABLES[name]["columns"][1:]
        assert set(columns) == set(benchmark_sets.PAPER)
    direct = {row for row in paper.TABLES["4"]["paper"] if row.startswith("direct")}
    assert len(direct) == 3  # the paper's table 4 is direct DP


@pytest.mark.parametrize("scale", paper.SCALES)
def test_a_scale_is_a_job_that_the_stages_take(scale):
    config = paper.get_config(scale)
    job = config.job.copy_and_resolve_references()
    # Presets that would have to be downloaded.
    job.init = "t5_tiny_pydocs"
    pipeline_checks.check_settings(job)
    if scale == "paper":
        assert set(config.sizes) == set(paper.SIZES)
    else:
        assert set(config.held_out_packages) < set(PACKAGES)
        assert len(config.held_out_packages) == len(benchmark_sets.PAPER)


@pytest.mark.parametrize(
    "name", ["synthetic-base", "direct-eps-3", "other-eps8", "synthetic-base-eps8.0"]
)
def test_a_row_has_one_name(name):
    """Outputs are named after it: in two ways it would be trained and paid twice."""
    with pytest.raises(validation.InputError, match=name):
        reproduce_rows.row_of(name)
    row = reproduce_rows.row_of("synthetic-large-eps0.5")
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
    # Every set counts the same: over all queries it would be 20/320.
    many, few = np.zeros(300), np.ones(20)
    ours = {"a": {"x": _cell(many, few)}, "b": {"x": _cell(many, np.zeros(20))}}
    found = reproduce_tables.judge(("a", "b", "x"), ours, _PAPER, resamples=200)
    assert found.difference == found.low == found.high == 0.5
    # Where less is better, the lower row is above.
    ours = {"a": {"x": Cell(3.0)}, "b": {"x": Cell(40.0)}}
    numbers = {"a": {"x": 1.0}, "b": {"x": 43.0}}
    found = reproduce_tables.judge(("a", "b", "x"), ours, numbers, ("x",))
    assert (found.verdict, found.difference, found.paper) == (HOLDS, 37.0, 42.0)
    assert reproduce_tables.judge(("a", "b", "x"), ours, numbers).verdict == FAILS
    ours = {"a": {"x": _cell([1, 0])}, "b": {"x": _cell([1, 0, 1])}}
    with pytest.raises(validation.InputError, match="different queries"):
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


def _entry(form, times, ranks, in_set):
    return {
        "form": form,
        "repetitions": times,
        "ranks": ranks,
        "candidates": 100,
        "mean_rank": float(np.mean(ranks)),
        "leaked": 1.0,
        "leaked_in_set": in_set,
    }


def test_a_canary_has_leaked_if_the_released_set_shows_it(tmp_path):
    """By the paper's forms and by ours; other queries of the generator do not count."""
    entries = [
        _entry("secret", 10, [50, 60], 0.0),
        _entry("paper_query", 10, [1], 1.0),
        _entry("paper_own_document", 10, [4, 10, 21], 0.0),
        _entry("all", 10, [50, 60, 1, 4, 10, 21], 0.25),
        _entry("paper_query", 100, [1], 1.0),
    ]
    (tmp_path / layout.AUDIT_FILE).write_text(json.dumps({"canaries": entries}))
    rows = types.SimpleNamespace(data="", sets={}, audited=lambda row: tmp_path)
    name, columns = "synthetic-base-inf", ("rank, 10", "leaked, 10")
    table = {
        **paper.TABLES["7"],
        **{"paper": {name: (1, 0.67)}, "claims": (), "columns": columns},
    }
    found = reproduce_numbers.compare(rows, {"7": table}, (0,), 10)["tables"]["7"]
    (row,) = (row for row in found["rows"] if row["name"] == name)
    assert {column: cell["value"] for column, cell in row["ours"].items()} == {
        "rank, 10": 9.0,  # (1 + 4 + 10 + 21) / 4
        "leaked, 10": 0.25,  # one of four
        "rank, 100": 1.0,
        "leaked, 100": 1.0,
        "rank, 10, our forms": 55.0,
        "leaked, 10, our forms": 0.0,
    }
    p_value = evaluation.rank_p_value(np.array([1, 4, 10, 21]), 100)
    assert f"p = {p_value:.2g}" in row["ours"]["rank, 10"]["note"]


def test_queries_that_are_shown_are_a_recorded_read(tmp_path):
    tiny.write_pairs(tmp_path / "pairs")
    private = tmp_path / "private"
    private.mkdir()
    compared = types.SimpleNamespace(similarity_split="train")
    rows = types.SimpleNamespace(
        data=str(tmp_path / "pairs"),
        stages=types.SimpleNamespace(private=private),
        job=types.SimpleNamespace(evaluate=compared, examples=2),
    )
    found = reproduce.Rows.examples(rows, (), 0)
    shown = json.loads((private / "examples.json").read_text())
    assert found["documents"] == len(shown) == 2
    reads = (private / "private_reads.jsonl").read_text()
    assert "some private queries as they are" in reads


# -- Refusals before anything is paid ---------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny_paper.write(tmp_path_factory.mktemp("small"))


def test_all_that_a_later_stage_would_refuse_is_refused_first(small, tmp_path):
    """Each in one sentence that names it, and nothing is made."""
    lora = {"lora": {"rank": 4, "targets": ("zzz",)}}
    for changes, message in (
        ({"zero_shot.root": str(tmp_path)}, "22 of 22 sets are missing: arguana"),
        ({"sizes.small.init": str(small / "other")}, "sizes.small.init is .* vocabul"),
        ({"job.seed": 3}, "job.seed is 3, which does nothing"),
        ({"job.direct.batch_size": 100}, "direct.batch_size 100 is larger than"),
        ({"job.canaries.repetitions": (5, 50)}, "'rank, 10'"),
        ({"zero_shot.metrics": ("ndcg@10",)}, "tables.5-recall.metric is 'recall@10'"),
        ({"sizes.base.finetune": lora}, "`sizes.base.finetune`: targets holds 'zzz'"),
    ):
        with pytest.raises(validation.InputError, match=message) as raised:
            reproduce.run(tiny_paper.config(small, **changes), tmp_path / "work")
        assert "\n" not in str(raised.value), changes
    assert not (tmp_path / "work").exists()


def test_tables_are_checked_before_their_rows_are_made(small, tmp_path):
    whole = paper.TABLES["2"]
    for change, message in (
        ({**whole, "paper": {}}, "tables.2.paper is {}"),
        ({**whole, "paper": {"original": ("a", "b")}}, "tables.2.paper is .*finite"),
        ({**whole, "columns": ("ndcg@10", "foo@3")}, "metric is 'foo@3'"),
        ({**whole, "paper": {"original": (0.1,)}}, "1 numbers for 'original'"),
        ({**whole, "claims": (("a", "b", "ndcg@10"),)}, "tables.2.claims is 'a'"),
    ):
        config = tiny_paper.config(small)
        with config.unlocked():
            config.tables = {"2": change}
        with pytest.raises(validation.InputError, match=message):
            reproduce.run(config, tmp_path / "work", ["2"])
        assert not (tmp_path / "work").exists()


def test_what_is_given_is_not_refused_and_only_what_the_tables_need(small, tmp_path):
    config = tiny_paper.config(small)
    wanted = {name: table.to_dict() for name, table in config.tables.items()}
    data = config.job.data
    reproduce.check(config, wanted, data, {}, pathlib.Path("none"))
    # Retrieval alone needs neither zero-shot sets nor the weights of other sizes.
    config = tiny_paper.config(
        small, **{"zero_shot.root": "", "sizes.xl.init": "nowhere"}
    )
    reproduce.check(config, {"2": wanted["2"]}, data, {}, pathlib.Path("none"))
    with pytest.raises(validation.InputError, match="nowhere does not exist"):
        reproduce.check(config, {"3": wanted["3"]}, data, {}, pathlib.Path("none"))


def test_audits_are_planned_on_their_canaries_before_anything_is_paid(small, tmp_path):
    """And secrets follow from no seed of the config."""
    config = tiny_paper.config(small, **{"audit.batch_size": 5000})
    with pytest.raises(validation.InputError, match="of `audit`: batch_size 5000 is"):
        reproduce.run(config, tmp_path / "work", ["7"])
    made = tmp_path / "work" / "private" / "canaries"
    assert json.loads((made / "stage.json").read_text())["config"]["seed"] < 0
    assert not list(tmp_path.rglob("ledger.jsonl"))


# -- Whole runs ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_that_is_killed_goes_on_and_makes_every_table(small, tmp_path):
    """As a user starts it, at the smallest size; nothing finished is redone."""
    given = tiny_paper.settings(small).items()
    command = [sys.executable, "-m", "tfdpsq.run.reproduce", "--scale=paper"]
    command += [f"--config.{name}={value}" for name, value in given]
    command += [f"--workdir={tmp_path / 'work'}"]
    work = tmp_path / "work"
    options = {"cwd": ROOT, "env": {**os.environ, "CUDA_VISIBLE_DEVICES": ""}}
    process = subprocess.Popen([*command, "--table=2"], **options)
    while not list(work.glob("release/seed0_synthetic_*/stage.json")):
        assert process.poll() is None
        time.sleep(0.2)
    process.kill()
    process.wait()
    before = {path: path.read_bytes() for path in work.rglob("stage.json")}
    assert before
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for path, content in before.items():
        assert path.read_bytes() == content
    results = json.loads((work / "tables.json").read_text())
    assert list(results["tables"]) == ["2", "3", "4", "5", "5-recall", "6", "7"]
    for name, table in results["tables"].items():
        rows = {row["name"] for row in table["rows"]}
        assert paper.TABLES[name]["paper"].keys() <= rows
        assert f"Table {name}." in done.stdout
        assert len(table["verdicts"]) == len(paper.TABLES[name]["claims"])
    # What was made under a finite ε is where it may be released from, with its ε.
    made = [p for p in (work / "release").glob("seed0_*") if "_eps" in p.name]
    made += (work / "release").glob("seed0_*-eps*")
    assert len(made) >= 15
    for path in made:
        assert list(path.rglob("certificate.json")), path
    assert not list((work / "release").rglob("*inf*"))
    assert not list((work / "release").rglob("*original*"))

"""The paper's tables as one command: rows, refusals, and a run that is killed."""

import json
import math
import os
import pathlib
import subprocess
import sys
import time
import types

import pytest
from helpers import tiny, tiny_paper

from configs.paper import tables as paper
from tfdpsq import evaluation, validation
from tfdpsq.data.pydocs import PACKAGES
from tfdpsq.run import reproduce
from tfdpsq.run.core import pipeline_checks
from tfdpsq.run.devices import strategy
from tfdpsq.run.reproduction import (
    reproduce_rows,
)
from tfdpsq.run.search import benchmark_sets

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_every_table_is_whole():
    """A number in every column, and claims about rows and columns that are there."""
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


def test_rows_that_tables_share_have_one_number_each():
    second, third, fourth = (paper.TABLES[name]["paper"] for name in "234")
    assert second.keys() & third.keys() == {"synthetic-base-eps3"}
    assert second["synthetic-base-eps3"] == third["synthetic-base-eps3"]
    shared = second.keys() & fourth.keys()
    assert len(shared) == 3
    assert all(second[row] == fourth[row] for row in shared)


@pytest.mark.parametrize("scale", paper.SCALES)
def test_a_scale_is_a_job_that_the_stages_take(scale):
    config = paper.get_config(scale)
    job = config.job.copy_and_resolve_references()
    # Presets that would have to be downloaded.
    job.init = "t5_tiny_pydocs"
    pipeline_checks.check_settings(job)
    assert set(config.sizes) == set(paper.SIZES)
    if scale == "paper":
        assert job.finetune.batch_size == 1024
        assert job.finetune.document_length == 384
        assert config.sizes["large"]["init"] == "t5_1_1_large_lm"
        # Memory decides, as in `retrieval.py`.
        assert config.sizes["xl"]["finetune"]["lora"]["rank"] == 16
        assert not job.retriever_init
    else:
        assert set(config.held_out_packages) < set(PACKAGES)
        assert len(config.held_out_packages) == len(benchmark_sets.PAPER)


@pytest.mark.parametrize(
    ("name", "kind", "size", "epsilon"),
    [
        ("original", "original", "", math.inf),
        ("synthetic-large-eps3", "synthetic", "large", 3.0),
        ("synthetic-base-inf", "synthetic", "base", math.inf),
        ("direct-eps0.5", "direct", "", 0.5),
        ("public-only", "public-only", "", None),
    ],
)
def test_a_rows_name_says_what_it_is(name, kind, size, epsilon):
    row = reproduce_rows.row_of(name)
    assert (row.kind, row.size, row.epsilon) == (kind, size, epsilon)


@pytest.mark.parametrize(
    "name",
    ["synthetic", "synthetic-base", "synthetic--eps8", "direct-eps-3", "other-eps8"],
)
def test_a_row_that_is_none_is_named(name):
    with pytest.raises(validation.InputError, match=f"the row '{name}'; rows are na"):
        reproduce_rows.row_of(name)


@pytest.mark.parametrize("epsilon", ["8", "eps8 ", "eps8.0", "eps 8", "eps+8"])
def test_a_row_is_spelt_in_one_way(epsilon):
    """Outputs are named after it: in two ways it would be trained and paid twice."""
    with pytest.raises(validation.InputError, match="Write it 'synthetic-base-eps8'"):
        reproduce_rows.row_of(f"synthetic-base-{epsilon}")


def test_a_table_that_is_none_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(validation.InputError, match="table is '9'"):
        reproduce.run(paper.get_config("tiny"), tmp_path / "work", ["9"])
    config = paper.get_config("tiny")
    del config.sizes["xl"]
    with pytest.raises(validation.InputError, match="the size of a row is 'xl'"):
        reproduce.run(config, tmp_path / "work", ["3"])
    assert not (tmp_path / "work").exists()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny_paper.write(tmp_path_factory.mktemp("small"))


@pytest.mark.slow
def test_two_devices_reproduce_what_one_does(small, tmp_path, on_two_devices):
    """Compares retrievers trained on known rows; samples are new in each run.

    The sums of two devices differ in their last digits: scores, not ranks, may follow.
    """
    config = tiny_paper.config(small, **{"job.evaluate.batch_size": 16})
    table = config.tables["2"].to_dict()
    rows = ("original", "synthetic-base-inf")
    table.update(paper={row: table["paper"][row] for row in rows}, claims=())
    with config.unlocked():
        config.tables = {"2": table}
    reproduce.run(config, tmp_path / "alone")
    with on_two_devices() as devices:
        reproduce.run(config, tmp_path / "together", (), devices)
    found, runs = [], []
    for name in ("alone", "together"):
        results = json.loads((tmp_path / name / "tables.json").read_text())
        (table,) = results["tables"].values()
        found.append({row["name"]: row["ours"] for row in table["rows"]})
        paths = (tmp_path / name).rglob("runs/*.trec")
        runs.append({path.stem: evaluation.read_trec_run(path) for path in paths})
    alone, together = found
    assert alone.keys() == together.keys() == {*rows, "untrained", "public-only"}
    for row in ("original", "untrained", "public-only"):
        assert together[row] == alone[row], row
        one, two = (run[row] for run in runs)
        assert one.keys() == two.keys()
        for query, hits in one.items():
            assert two[query] == pytest.approx(hits, abs=1e-4)
    # Training has moved the scores by much more than that.
    before, after = (runs[1][row] for row in ("untrained", "original"))
    moved = [
        abs(before[query][document] - score)
        for query, hits in after.items()
        for document, score in hits.items()
        if document in before[query]
    ]
    assert max(moved) > 1e-2
    for measure in ("ndcg@10", "recall@10"):
        assert 0 <= together["synthetic-base-inf"][measure]["value"] <= 1


def test_settings_on_the_command_line_change_the_scales_config():
    """They come after --config, wherever --scale is."""
    words = ["reproduce", "--config.seeds=(1,)", "--scale=tiny"]
    found = reproduce._default_flags(words)
    places = [
        next(i for i, word in enumerate(found) if word.startswith(start))
        for start in ("--config=", "--config.seeds")
    ]
    assert found[0] == "reproduce" and places == sorted(places)
    assert any(word.startswith("--workdir=") for word in found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_papers_scale_runs_every_table_to_its_end(small, tmp_path):
    """As a user starts it: data and weights on the command line, small T5s."""
    words = [
        f"--config.{name}={value}" for name, value in tiny_paper.settings(small).items()
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tfdpsq.run.reproduce", "--scale=paper", *words]
        + [f"--workdir={tmp_path / 'work'}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "work" / "tables.json").read_text())
    assert [*results["examples"], *results["tables"]] == list(paper.TABLES)
    (cell,) = {
        row["ours"]["mauve"]["note"].partition("; ")[2]
        for row in results["tables"]["6"]["rows"]
    }
    assert cell.startswith("25 points; features of t5 t5_tiny_pydocs;")
    shown = json.loads((tmp_path / "work" / "private" / "examples.json").read_text())
    assert len(shown) == 8
    models = set(paper.TABLES["1"]["paper"])
    assert all(set(each["synthetic"]) == models for each in shown)
    columns = results["tables"]["7"]["columns"]
    assert "leaked, 100" in columns and "rank, 10, our forms" in columns


_CONFIG = """
import runpy
import sys

sys.path.insert(0, {here!r})

from helpers.tiny import tiny_config

from tfdpsq.run import finetune, train_retriever

def get_config():
    config = runpy.run_path({tables!r})["get_config"]("tiny")
    tiny = tiny_config({data!r})
    for name in ("prepare", "finetune", "synthesize", "retriever", "direct", "evaluate",
                 "canaries", "audit"):
        config.job[name] = tiny[name]
    config.job.data = {data!r}
    # Weights and vocabulary of the package: a step or two of each.
    for stage in (config.job.finetune, config.job.retriever, config.job.direct):
        stage.steps = 2
    config.job.finetune.t5 = finetune.default_config().t5
    config.job.retriever.t5 = train_retriever.default_config().t5
    config.job.direct.t5 = train_retriever.default_config().t5
    config.job.retriever.embedding_dim = config.job.direct.embedding_dim = 192
    config.job.pretrain.update(steps=2, pair_rows=4, text_rows=4, watched_rows=8)
    config.job.pretrain.update(held_out_one_in=8, document_length=32, query_length=12)
    config.job.evaluate.similarity.update(featurizer="")
    config.job.canaries.update(repetitions=(10, 100), query_characters=8)
    config.job.canaries.update(forms=("secret", "paper_query"))
    config.held_out_packages = ()
    config.zero_shot.update(sets=("pairs",), paths={{"pairs": {data!r}}})
    config.audit.update(unit="", steps=2, batch_size=0, query_length=0)
    config.resamples = 200
    config.seeds = {seeds!r}
    return config
"""


def _command(base, seeds):
    """The command line at the smallest size, all else as it is."""
    tiny.write_pairs(base / "pairs", train=240, dev=30, test=30)
    config = base / "config.py"
    config.write_text(
        _CONFIG.format(
            tables=str(ROOT / "configs" / "paper" / "tables.py"),
            here=str(pathlib.Path(__file__).parents[1]),
            data=str(base / "pairs"),
            seeds=seeds,
        )
    )
    return [
        sys.executable,
        "-m",
        "tfdpsq.run.reproduce",
        f"--config={config}",
        f"--workdir={base / 'work'}",
    ]


def test_stages_of_rows_that_train_get_the_devices():
    rows = object.__new__(reproduce.Rows)
    rows._devices = strategy.Devices(steps_per_loop=4)
    rows.stages = types.SimpleNamespace(
        run=lambda module, config, name, free, *devices: devices
    )
    for module, steps in (
        (reproduce.finetune, [4]),
        (reproduce.pretrain, [1]),
        (reproduce.train_retriever, [1]),
        (reproduce.synthesize, []),
        (reproduce.evaluate, []),
    ):
        given = rows._run(module, module.default_config(), "name", False)
        assert [devices.steps_per_loop for devices in given] == steps


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_goes_on_and_makes_every_table(tmp_path):
    """Through the command line, at the smallest size; nothing finished is redone."""
    command, work = _command(tmp_path, (0,)), tmp_path / "work"
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_seeds_are_two_runs_of_every_row(tmp_path):
    """Each with a ledger and noise of its own; a number is the mean of both."""
    done = subprocess.run(
        [*_command(tmp_path, (0, 1)), "--table=6"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    work = tmp_path / "work"
    sets = [
        list(work.glob(f"release/seed{seed}_synthetic_base_eps3/set/certificate.json"))
        for seed in (0, 1)
    ]
    first, second = (json.loads(path.read_text()) for (path,) in sets)
    assert first["ledger_head"] != second["ledger_head"]
    results = json.loads((work / "tables.json").read_text())
    (row,) = [
        row
        for row in results["tables"]["6"]["rows"]
        if row["name"] == "synthetic-base-eps3"
    ]
    each = [
        json.loads(path.read_text())["similarity"]["synthetic-base-eps3"]["bleu"] or 0.0
        for path in sorted(
            work.glob("private/seed*_text_synthetic-base-eps3/metrics.json")
        )
    ]
    assert len(each) == 2
    assert row["ours"]["bleu"]["value"] == pytest.approx(sum(each) / 200)

"""The paper's tables as one command: rows, refusals, and a run that is killed."""

import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time
import types

import pytest
import tensorflow as tf
import tiny
import tiny_sets

from configs.paper import tables as paper
from tfdpsq import evaluation, validation
from tfdpsq.data import train_vocabulary
from tfdpsq.data.pydocs import PACKAGES
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.layers import T5Config
from tfdpsq.run import reproduce
from tfdpsq.run.core import pipeline_checks, sources
from tfdpsq.run.devices import strategy
from tfdpsq.run.reproduction import reproduce_numbers, reproduce_rows
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
    "name", ["synthetic", "synthetic-base", "direct-eps", "direct-eps-3", "other-eps8"]
)
def test_a_row_that_is_none_is_named(name):
    with pytest.raises(validation.InputError, match=f"the row '{name}'"):
        reproduce_rows.row_of(name)


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
    """The data and the T5s of scale "paper", at the smallest size."""
    base = tmp_path_factory.mktemp("small")
    tiny.write_pairs(base / "pairs", train=80, dev=16, test=8)
    texts = [d.content for d in sources.open_beir(str(base / "pairs")).documents()]
    digits = [" ".join("0123456789")] * 40
    train_vocabulary([*texts, *digits], 320, base / "spiece.model")
    train_vocabulary([*texts[:60], *digits], 300, base / "other.model")
    for name in benchmark_sets.PAPER:
        if name == benchmark_sets.CQADUPSTACK:
            for seed, forum in enumerate(benchmark_sets.FORUMS):
                tiny_sets.write(base / "beir" / name / forum, seed, queries=2)
        else:
            tiny_sets.write(base / "beir" / name, len(name))
    shape = T5Config(330, 1, 2, 8, 16, 8, "1.1", dropout=0.0)
    model = T5QueryGenerator(shape)
    for name, vocabulary in (("t5", "spiece.model"), ("other", "other.model")):
        (base / name).mkdir()
        model.save_to_preset(base / name, base / vocabulary)
    return base


def _settings(base):
    """What a user gives to scale "paper", and the smallest numbers of steps."""
    return {
        "job.data": str(base / "pairs"),
        "zero_shot.root": str(base / "beir"),
        **{f"sizes.{size}.init": str(base / "t5") for size in paper.SIZES},
        "job.finetune.batch_size": 16,
        "job.finetune.microbatch_size": 8,
        "job.finetune.epochs": 0.5,
        "job.finetune.document_length": 96,
        "job.finetune.query_length": 64,
        "job.finetune.accountant": "rdp",
        "job.synthesize.document_length": 96,
        "job.synthesize.query_length": 24,
        "job.retriever.epochs": 0.25,
        "job.retriever.batch_size": 8,
        "job.retriever.document_length": 32,
        "job.retriever.query_length": 12,
        "job.direct.batch_size": 4,
        "job.direct.document_length": 32,
        "job.direct.query_length": 12,
        "job.direct.accountant": "rdp",
        "job.canaries.trials": 1,
        "job.canaries.document_characters": 20,
        "job.canaries.query_characters": 20,
        "job.audit.members": 6,
        "job.audit.samples_per_document": 1,
        "job.evaluate.resamples": 100,
        "zero_shot.resamples": 100,
        "resamples": 100,
    }


def _paper(base, **changes):
    config = paper.get_config("paper")
    config.update_from_flattened_dict({**_settings(base), **changes})
    return config


def test_all_that_a_later_stage_would_refuse_is_refused_first(small, tmp_path):
    """Each in one sentence that names it, and nothing is made."""
    shutil.copytree(small / "pairs", tmp_path / "no_dev")
    (tmp_path / "no_dev" / "qrels" / "dev.tsv").unlink()
    shutil.copytree(small / "beir", tmp_path / "sets")
    qrels = tmp_path / "sets" / "scifact" / "qrels"
    (qrels / "test.tsv").rename(qrels / "dev.tsv")
    refused = [
        ({"zero_shot.root": str(tmp_path)}, "22 of 22 sets are missing: arguana"),
        ({"zero_shot.root": str(tmp_path / "sets")}, "split of scifact is 'test'"),
        ({"sizes.large.init": str(tmp_path / "t5")}, "t5 does not exist. Give a dir"),
        ({"sizes.xl.init": ""}, "sizes.xl.init and job.init are ''"),
        ({"sizes.small.init": str(small / "other")}, "sizes.small.init is .* vocabul"),
        ({"job.data": str(tmp_path / "no_dev")}, "evaluate.split is 'dev'; choose"),
        ({"job.seed": 3}, "job.seed is 3, which does nothing here"),
        ({"job.evaluate.fusion.weight": 0.5}, "fusion.weight is 0.5, which does noth"),
        ({"job.evaluate.rerank.depth": 7}, "rerank.depth is 7, which does nothing"),
        ({"job.fit_rerank": True}, "job.fit_rerank is True, which does nothing"),
        ({"job.direct.batch_size": 100}, "direct.batch_size 100 is larger than"),
        ({"job.canaries.trials": 20}, "settings give 240 canaries"),
        ({"job.audit.guesses": ((0.9, 0.9),)}, "nothing can be guessed both"),
        ({"audit.steps": 5}, "in the settings of `audit`: .*epochs"),
        ({"job.retriever.trained": ("zzz",)}, "trained holds 'zzz', which matches no"),
        (
            {"job.canaries.repetitions": (5, 50)},
            "the column 'rank, 10', but .* rank, 5",
        ),
        ({"job.canaries.trials": 0}, "holds the column 'rank, 10'"),
        ({"zero_shot.metrics": ("ndcg@10",)}, "tables.5-recall.metric is 'recall@10'"),
        ({"zero_shot.private": True, "zero_shot.strict": True}, "strict is True and p"),
        ({"job.audit.top": 100}, "of `job`: .*top is 100, but a canary's"),
        (
            {"sizes.base.finetune": {"lora": {"rank": 0, "alpha": 3.0}}},
            "^sizes.base.finetune.lora.alpha is 3.0, which does nothing",
        ),
        (
            {"sizes.base.finetune": {"lora": {"rank": 4, "targets": ("zzz",)}}},
            "`sizes.base.finetune`: targets holds 'zzz', which matches no Dense",
        ),
    ]
    for changes, message in refused:
        with pytest.raises(validation.InputError, match=message) as raised:
            reproduce.run(_paper(small, **changes), tmp_path / "work")
        assert "\n" not in str(raised.value), changes
    assert not (tmp_path / "work").exists()
    (tmp_path / "work").mkdir()  # a place that is there is no job that has begun
    with pytest.raises(validation.InputError, match=refused[-1][1]):
        reproduce.run(_paper(small, **refused[-1][0]), tmp_path / "work")
    assert not list((tmp_path / "work").iterdir())


def test_what_is_given_is_not_refused_and_only_what_the_tables_need(small, tmp_path):
    config = _paper(small)
    wanted = {name: table.to_dict() for name, table in config.tables.items()}
    data = config.job.data
    reproduce.check(config, wanted, data, {}, pathlib.Path("none"))
    # Retrieval alone needs neither zero-shot sets nor the weights of other sizes.
    config = _paper(small, **{"zero_shot.root": "", "sizes.xl.init": "nowhere"})
    reproduce.check(config, {"2": wanted["2"]}, data, {}, pathlib.Path("none"))
    with pytest.raises(validation.InputError, match="nowhere does not exist"):
        reproduce.check(config, {"3": wanted["3"]}, data, {}, pathlib.Path("none"))


def test_tables_are_checked_before_their_rows_are_made(small, tmp_path):
    whole = paper.TABLES["2"]
    for change, message in (
        (3, "tables.2 is 3; a table has the entries title, measure"),
        ({**whole, "paper": None}, "tables.2.paper is None; take a table"),
        ({**whole, "measure": "foo"}, "tables.2.measure is 'foo'; choose one of"),
        ({**whole, "columns": ("ndcg@10", "foo@3")}, "metric is 'foo@3'"),
        ({**whole, "controls": ("direct-inf",)}, "the row 'direct-inf'; rows are"),
        ({**whole, "paper": {"original": (0.1,)}}, "has 1 numbers for 'original'"),
        ({**whole, "claims": (("a", "b", "ndcg@10"),)}, "of tables.2.claims is 'a'"),
        ({**whole, "claims": (("original",),)}, "tables.2.claims holds"),
    ):
        config = _paper(small)
        with config.unlocked():
            config.tables = {"2": change}
        with pytest.raises(validation.InputError, match=message):
            reproduce.run(config, tmp_path / "work", ["2"])
        assert not (tmp_path / "work").exists()


def test_columns_are_those_of_the_canaries(small):
    config = _paper(small, **{"job.canaries.repetitions": (5, 50)})
    table = config.tables["7"].to_dict()
    with pytest.raises(validation.InputError, match="tables.7.claims holds the column"):
        reproduce_numbers.check(config, {"7": table}, {})
    table["claims"] = (("synthetic-base-inf", "synthetic-base-eps16", "rank, 5"),)
    table["columns"] = ("rank, 5", "leaked, 5", "rank, 50", "leaked, 50")
    reproduce_numbers.check(config, {"7": table}, {})


def test_rows_of_a_later_table_are_tried_too(small, tmp_path):
    """Only what the first table made is not tried again."""
    config = _paper(small)
    (tmp_path / "release" / "seed0_generator_base_eps3").mkdir(parents=True)
    config.sizes.small.finetune = {"lora": {"rank": 4, "targets": ("zzz",)}}
    wanted = {"3": config.tables["3"].to_dict()}
    with pytest.raises(validation.InputError, match="`sizes.small.finetune`: targets"):
        reproduce.check(config, wanted, config.job.data, {}, tmp_path)
    (tmp_path / "release" / "seed0_generator_small_eps3").mkdir()
    reproduce.check(config, wanted, config.job.data, {}, tmp_path)


def test_a_size_s_microbatches_hold_whole_users(small):
    config = _paper(small, **{"job.finetune.unit": "user"})
    config.job.finetune.rows_per_unit = 2
    config.sizes.base.finetune = {"microbatch_size": 5}
    wanted = {"2": config.tables["2"].to_dict()}
    match = "^sizes.base.finetune.microbatch_size is 5, which parts the 2 rows"
    with pytest.raises(validation.InputError, match=match):
        reproduce.check(config, wanted, config.job.data, {}, pathlib.Path("none"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"audit.batch_size": 5000}, "of `audit`: batch_size 5000 is larger than"),
        ({"job.finetune.document_length": 32}, "a canary's secret has more than docu"),
    ],
)
def test_audits_are_planned_on_their_canaries(small, tmp_path, changes, message):
    config = _paper(small, **changes)
    with pytest.raises(validation.InputError, match=message):
        reproduce.run(config, tmp_path / "work", ["7"])
    assert (tmp_path / "work" / "private" / "canaries").is_dir()
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_canaries_have_users_where_the_pairs_have_theirs(small, tmp_path):
    """And secrets that no seed tells."""
    shutil.copytree(small / "pairs", tmp_path / "pairs")
    path = tmp_path / "pairs" / "queries.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    given = ({**line, "metadata": {"author": f"a{line['_id']}"}} for line in lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in given))
    config = _paper(small, **{"job.data": str(tmp_path / "pairs")})
    config.job.finetune.user_field = "author"
    rows = reproduce.Rows(config, tmp_path / "work", config.job.data, {})
    rows.check_canaries([reproduce_rows.row_of("synthetic-base-eps16")])
    made = tmp_path / "work" / "private" / "canaries"
    canary = json.loads((made / "data" / "queries.jsonl").read_text().splitlines()[-1])
    assert set(canary["metadata"]) == {"author"}
    assert json.loads((made / "stage.json").read_text())["config"]["seed"] < 0


def test_every_replica_has_a_microbatch(small, tmp_path, logical_cpus):
    name = "sizes.base.finetune"
    config = _paper(small, **{name: {"microbatch_size": 64}})
    two = strategy.Devices(tf.distribute.MirroredStrategy(logical_cpus[:2]))
    with pytest.raises(validation.InputError, match=f"of `{name}`: microbatch_size is"):
        reproduce.run(config, tmp_path / "work", devices=two)
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_two_devices_reproduce_what_one_does(small, tmp_path, on_two_devices):
    """Compares retrievers trained on known rows; samples are new in each run.

    The sums of two devices differ in their last digits: scores, not ranks, may follow.
    """
    config = _paper(small, **{"job.evaluate.batch_size": 16})
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
    words = [f"--config.{name}={value}" for name, value in _settings(small).items()]
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

from tiny import tiny_config

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
            here=str(pathlib.Path(__file__).parent),
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

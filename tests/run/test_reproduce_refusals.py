"""Refusals of `reproduce` before anything is paid for, and what may change after."""

import json
import pathlib
import shutil

import pytest
import tensorflow as tf
from helpers import tiny_paper

from configs.paper import tables as paper
from tfdpsq import validation
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.layers import T5Config
from tfdpsq.retriever import index
from tfdpsq.run import reproduce
from tfdpsq.run.core import used_parts, workdir
from tfdpsq.run.devices import strategy
from tfdpsq.run.reproduction import (
    reproduce_models,
    reproduce_numbers,
    reproduce_rows,
)
from tfdpsq.run.training import training_settings


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny_paper.write(tmp_path_factory.mktemp("small"))


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
            reproduce.run(tiny_paper.config(small, **changes), tmp_path / "work")
        assert "\n" not in str(raised.value), changes
    assert not (tmp_path / "work").exists()
    (tmp_path / "work").mkdir()  # a place that is there is no job that has begun
    with pytest.raises(validation.InputError, match=refused[-1][1]):
        reproduce.run(tiny_paper.config(small, **refused[-1][0]), tmp_path / "work")
    assert not list((tmp_path / "work").iterdir())


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


def test_tables_are_checked_before_their_rows_are_made(small, tmp_path):
    whole = paper.TABLES["2"]
    for change, message in (
        (3, "tables.2 is 3; a table has the entries title, measure"),
        ({**whole, "paper": None}, "tables.2.paper is None; give {name of a row"),
        ({**whole, "paper": {}}, "tables.2.paper is {}; give .* one row at least"),
        ({**whole, "paper": {"original": 3}}, "tables.2.paper is .* finite numbers"),
        ({**whole, "paper": {"original": ("a", "b")}}, "tables.2.paper is .*finite"),
        ({**whole, "columns": (3, 4)}, r"tables.2.columns is \(3, 4\); give texts"),
        ({**whole, "controls": (3,)}, "tables.2.controls is .*; give names of rows"),
        ({**whole, "claims": (3,)}, r"tables.2.claims is \(3,\); give \(row above"),
        ({**whole, "measure": "foo"}, "tables.2.measure is 'foo'; choose one of"),
        ({**whole, "columns": ("ndcg@10", "foo@3")}, "metric is 'foo@3'"),
        ({**whole, "controls": ("direct-inf",)}, "the row 'direct-inf'; rows are"),
        ({**whole, "paper": {"original": (0.1,)}}, "has 1 numbers for 'original'"),
        ({**whole, "claims": (("a", "b", "ndcg@10"),)}, "of tables.2.claims is 'a'"),
        ({**whole, "claims": (("original",),)}, "tables.2.claims is"),
        ({**whole, "measure": "similarity"}, "has the row 'original', but its measure"),
    ):
        config = tiny_paper.config(small)
        with config.unlocked():
            config.tables = {"2": change}
        with pytest.raises(validation.InputError, match=message):
            reproduce.run(config, tmp_path / "work", ["2"])
        assert not (tmp_path / "work").exists()
    config = tiny_paper.config(small)
    other = {"original": (), "synthetic-base-eps8": ()}
    with config.unlocked():
        config.tables["5b"] = {**paper.TABLES["5"], "paper": other, "claims": ()}
    with pytest.raises(validation.InputError, match="tables.5b and tables.5 are both"):
        reproduce.run(config, tmp_path / "work", ["5", "5b"])
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("size", ["T5 base", "T5/base", "a\0"])
def test_a_size_has_the_name_of_a_file(small, tmp_path, size):
    config = tiny_paper.config(small)
    with config.unlocked():
        config.sizes[size] = config.sizes.base
    with pytest.raises(validation.InputError, match="a size is called .*choose a name"):
        reproduce.run(config, tmp_path / "work", ["2"])
    assert not (tmp_path / "work").exists()


def test_a_zero_shot_set_is_large_enough_for_a_tree(small, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "LEAST_OF_TREE", 31)
    config = tiny_paper.config(small, **{"zero_shot.index": "scann"})
    with pytest.raises(validation.InputError, match="index is 'scann', but 30 docume"):
        reproduce.run(config, tmp_path / "work", ["5"])
    assert not (tmp_path / "work").exists()


def test_columns_are_those_of_the_canaries(small):
    config = tiny_paper.config(small, **{"job.canaries.repetitions": (5, 50)})
    table = config.tables["7"].to_dict()
    with pytest.raises(validation.InputError, match="tables.7.claims holds the column"):
        reproduce_numbers.check(config, {"7": table}, {})
    table["claims"] = (("synthetic-base-inf", "synthetic-base-eps16", "rank, 5"),)
    table["columns"] = ("rank, 5", "leaked, 5", "rank, 50", "leaked, 50")
    reproduce_numbers.check(config, {"7": table}, {})


def test_rows_of_a_later_table_are_tried_too(small, tmp_path):
    """Only what the first table made is not tried again."""
    config = tiny_paper.config(small)
    (tmp_path / "release" / "seed0_generator_base_eps3").mkdir(parents=True)
    config.sizes.small.finetune = {"lora": {"rank": 4, "targets": ("zzz",)}}
    wanted = {"3": config.tables["3"].to_dict()}
    with pytest.raises(validation.InputError, match="`sizes.small.finetune`: targets"):
        reproduce.check(config, wanted, config.job.data, {}, tmp_path)
    (tmp_path / "release" / "seed0_generator_small_eps3").mkdir()
    reproduce.check(config, wanted, config.job.data, {}, tmp_path)


def test_a_resized_size_is_tried_before_others_are_paid(small, tmp_path):
    """The T5 has embeddings for sentinels, since another is trained from it."""
    model = T5QueryGenerator(T5Config(430, 1, 2, 8, 16, 8, "1.1", dropout=0.0))
    (tmp_path / "t5").mkdir()
    model.save_to_preset(tmp_path / "t5", small / "spiece.model")
    config = tiny_paper.config(small, **{"job.pretrain.steps": 1})
    for size in paper.SIZES:
        config.sizes[size].init = str(tmp_path / "t5")
    config.job.pretrain.update(document_length=32, query_length=12)
    config.job.pretrain.update(pair_rows=4, text_rows=4, held_out_one_in=8)
    large = {"num_layers": 2, "finetune": {"lora": {"rank": 4, "targets": ("zzz",)}}}
    with config.unlocked():
        config.sizes.large = {"init": str(tmp_path / "t5"), **large}
        rows = {f"synthetic-{size}-eps3": () for size in ("base", "large")}
        config.tables = {"3": {**paper.TABLES["3"], "paper": rows, "claims": ()}}
    with pytest.raises(validation.InputError, match="`sizes.large.finetune`: targets"):
        reproduce.run(config, tmp_path / "work", ["3"])
    assert (tmp_path / "work" / "release" / "t5_large").is_dir()
    assert not list(tmp_path.rglob("ledger.jsonl"))
    with config.unlocked():
        config.sizes.large.finetune = {"lora": {"rank": 4, "targets": ("query",)}}
    parts = reproduce_models.used_by(config)
    workdir.open_workdir(tmp_path / "work", config, parts)
    with config.unlocked():
        config.sizes.large.num_layers = 3
    in_use = "sizes.large.num_layers: 2 there, 3 now.* release/t5_large cost no budg"
    with pytest.raises(validation.InputError, match=in_use):
        workdir.open_workdir(tmp_path / "work", config, parts)


@pytest.mark.parametrize("size", ["base", "small"])
def test_each_part_of_the_config_has_its_outputs(small, tmp_path, size):
    """Other names would let it change under what was paid."""
    config = tiny_paper.config(small)
    parts = reproduce_models.used_by(config)
    work = workdir.open_workdir(tmp_path / "work", config, parts)

    def locked(made):
        (work / made).mkdir(parents=True)
        return {part for part in parts if used_parts._made_with(parts[part], work)}

    found = locked(f"release/seed0_generator_{size}_eps3")
    own = {
        f"sizes.{size}.{name}"
        for name in ("finetune", "init", *training_settings.RESIZE)
    }
    base = {f"sizes.base.{name}" for name in ("init", *training_settings.RESIZE)}
    whole = {"sizes.base", f"sizes.{size}"}
    assert found == {"job.finetune", "job.pretrain"} | own | base | whole
    with config.unlocked():  # a size that is new
        config.sizes.huge = config.sizes.xl
    parts = reproduce_models.used_by(config)
    workdir.open_workdir(work, config, parts)
    assert "job.direct" in locked("release/seed0_retriever_direct-eps8")
    assert "job.audit" not in locked(f"private/audited_{size}_eps16")
    assert "job.audit" in locked(f"private/audited_{size}_eps16_audit")


def test_a_size_s_microbatches_hold_whole_users(small):
    config = tiny_paper.config(small, **{"job.finetune.unit": "user"})
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
    config = tiny_paper.config(small, **changes)
    with pytest.raises(validation.InputError, match=message):
        reproduce.run(config, tmp_path / "work", ["7"])
    assert (tmp_path / "work" / "private" / "canaries").is_dir()
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_canaries_have_users_where_the_pairs_have_theirs(small, tmp_path):
    """Their secrets follow from no seed of the config."""
    shutil.copytree(small / "pairs", tmp_path / "pairs")
    path = tmp_path / "pairs" / "queries.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    given = ({**line, "metadata": {"author": f"a{line['_id']}"}} for line in lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in given))
    config = tiny_paper.config(small, **{"job.data": str(tmp_path / "pairs")})
    config.job.finetune.user_field = "author"
    rows = reproduce.Rows(config, tmp_path / "work", config.job.data, {})
    rows.check_canaries([reproduce_rows.row_of("synthetic-base-eps16")])
    made = tmp_path / "work" / "private" / "canaries"
    canary = json.loads((made / "data" / "queries.jsonl").read_text().splitlines()[-1])
    assert set(canary["metadata"]) == {"author"}
    assert json.loads((made / "stage.json").read_text())["config"]["seed"] < 0


def test_every_replica_has_a_microbatch(small, tmp_path, logical_cpus):
    name = "sizes.base.finetune"
    config = tiny_paper.config(small, **{name: {"microbatch_size": 64}})
    two = strategy.Devices(tf.distribute.MirroredStrategy(logical_cpus[:2]))
    with pytest.raises(validation.InputError, match=f"of `{name}`: microbatch_size is"):
        reproduce.run(config, tmp_path / "work", devices=two)
    assert not (tmp_path / "work").exists()

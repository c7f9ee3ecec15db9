"""Test sets as users have them: missing, flawed, wrong, private, ill described."""

import json
import pathlib
import runpy
import shutil

import numpy as np
import pytest
from helpers import tiny
from helpers import tiny_sets as _tiny_sets

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory, train_vocabulary
from tfdpsq.run import zero_shot
from tfdpsq.run.core import layout
from tfdpsq.run.search import benchmark_sets
from tfdpsq.validation import DataError, InputError

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Sets under BEIR's names."""
    base = tmp_path_factory.mktemp("sets")
    _tiny_sets.write_all(base / "beir")
    texts = _tiny_sets.made_up(np.random.default_rng(1), 50)
    train_vocabulary(texts, 300, base / "spiece.model")
    # What a retriever's directory looks like from outside, trained with another one.
    for name in ("tower", "no_model"):
        (base / name).mkdir()
        stage = {**tiny.STAGE, "inputs": {"vocabulary": "3"}}
        (base / name / "stage.json").write_text(json.dumps(stage))
    (base / "tower" / "model").mkdir()
    return base


def _bm25(folder):
    """What `evaluate_run` says of BM25's TREC files, read by themselves."""
    return evaluation.evaluate_run(
        evaluation.read_trec_qrels(folder / "qrels.trec"),
        evaluation.read_trec_run(folder / "bm25.trec"),
        layout.METRICS,
    )


def test_sets_that_are_not_there_are_listed_or_left_out_and_named(base, tmp_path):
    config = _tiny_sets.config_of(base, "scifact", "quora", "cqadupstack", "hotpotqa")
    shutil.copytree(base / "beir/cqadupstack", tmp_path / "cqa")
    shutil.rmtree(tmp_path / "cqa" / "tex")
    config.paths = {"cqadupstack": str(tmp_path / "cqa")}
    with pytest.raises(InputError) as refused:
        zero_shot.run(config, tmp_path / "out")
    for text in ("3 of 15 sets", "quora (", "cqadupstack/tex (", "hotpotqa (", "root"):
        assert text in str(refused.value)
    assert not (tmp_path / "out").exists()
    config.skip_missing = True
    found = zero_shot.run(config, tmp_path / "out")
    assert set(found["skipped"]) == {"quora", "cqadupstack/tex", "hotpotqa"}
    assert found["skipped"]["quora"] == str(base / "beir" / "quora")
    assert set(found["sets"]) == {"scifact", "cqadupstack"}
    assert found["sets"]["cqadupstack"]["rules"]["averaged_over"].startswith("11 ")
    config.sets, config.paths = ("quora",), {}
    with pytest.raises(InputError, match="no set to evaluate is there"):
        zero_shot.run(config, tmp_path / "other")


def test_wrong_judgements_are_named_before_anything_is_searched(
    base, tmp_path, monkeypatch
):
    shutil.copytree(base / "beir" / "nfcorpus", tmp_path / "bad")
    qrels = tmp_path / "bad" / "qrels" / "test.tsv"
    sound = qrels.read_text()
    config = _tiny_sets.config_of(base, "scifact", paths={"bad": str(tmp_path / "bad")})
    searched = _tiny_sets.searched(monkeypatch)
    for old, new, message in (
        ("q0\td0\t", "q0\tnobody\t", r"test.tsv:2: document 'nobody' is not in corpus"),
        ("q1\td1\t", "q99\td1\t", r"test.tsv:8: query 'q99' is not in queries"),
        ("q0\td0\t2", "q0\td0\t2.5", r"test.tsv:2: the score is '2.5'"),
    ):
        assert old in sound
        qrels.write_text(sound.replace(old, new))
        with pytest.raises(DataError, match=message):
            zero_shot.run(config, tmp_path / "out")
    assert searched == []


def test_known_flaws_of_published_sets_are_counted_and_others_refused(base, tmp_path):
    config = _tiny_sets.config_of(base, "fiqa")
    entry = zero_shot.run(config, tmp_path / "out")["sets"]["fiqa"]
    assert (entry["empty_documents"], entry["unknown_judgements"]) == (1, 1)
    assert entry["documents"] == 101
    # q7's answer is not there to be found: nobody can score 1.
    run = _bm25(tmp_path / "out/runs/fiqa")
    assert run.per_query["q7"]["map"] == 0 and run.per_query["q8"]["map"] == 1
    config.as_published = ()
    with pytest.raises(DataError, match=r"corpus.jsonl:101: document 'empty' is empty"):
        zero_shot.run(config, tmp_path / "strict")


def test_queries_that_no_system_answers_count_as_zero(base, tmp_path):
    shutil.copytree(base / "beir" / "scifact", tmp_path / "odd")
    queries = tmp_path / "odd" / "queries.jsonl"
    lines = queries.read_text().splitlines()
    lines[2] = '{"_id": "q2", "text": "unheard"}'
    queries.write_text("\n".join(lines))
    config = _tiny_sets.config_of(base, paths={"odd": str(tmp_path / "odd")})
    row = zero_shot.run(config, tmp_path / "out")["sets"]["odd"]["systems"]["bm25"]
    assert row["missing_queries"] == 1
    run = evaluation.read_trec_run(tmp_path / "out/runs/odd/bm25.trec")
    answered = _bm25(tmp_path / "out/runs/odd").values("map")
    assert len(run) == 5 and row["map"] == pytest.approx(answered.sum() / 6)


def test_private_queries_are_recorded_or_refused(base, tmp_path):
    config = _tiny_sets.config_of(base, "scifact", private=True)
    found = zero_shot.run(config, tmp_path / "private" / "out")
    assert found["queries_are"].startswith("private")
    reads = (tmp_path / "private" / "private_reads.jsonl").read_text()
    assert "the queries and judgements of split 'test' of scifact" in reads
    stage = tmp_path / "private/out/runs/scifact/stage.json"
    data = json.loads(stage.read_text())["inputs"]["data"]
    assert data.startswith("keyed:")
    assert BeirDirectory(base / "beir/scifact").fingerprint() not in stage.read_text()
    config.strict = True
    with pytest.raises(InputError, match="strict is True and private is True"):
        zero_shot.run(config, tmp_path / "private" / "other")
    public = _tiny_sets.config_of(base, "scifact", strict=True)
    zero_shot.run(public, tmp_path / "public" / "out")
    assert not (tmp_path / "public" / "private").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": ("ndcg@10", "mrr")}, "metric is 'mrr'"),
        ({"compared": "map@3"}, "compared is 'map@3'; choose one of 'ndcg@10'"),
        ({"metrics": ("ndcg@10", "capped_recall@100")}, "than the 20 that .* Raise k"),
        ({"k": 0}, "k is 0"),
        ({"resamples": 0}, "resamples is 0"),
        ({"index": "best"}, "index is 'best'"),
        ({"systems": {}}, "systems is empty"),
        ({"systems": {"a b": "bm25"}}, "a system is called 'a b'"),
        ({"systems": {"a/b": "bm25"}}, "a system is called 'a/b'"),
        ({"systems": {"qrels": "bm25"}}, "a system is called 'qrels'"),
        ({"systems": {"gone": "/no/such"}}, "/no/such is not a finished stage"),
        ({"systems": {"a": "{base}/no_model"}}, "'a' is .*, which holds no retriever"),
        ({"systems": {"a": "{base}/tower"}}, "system 'a' .* was trained with another"),
        (
            {"systems": {"a": "{base}/tower"}, "vocabulary": ""},
            "vocabulary is '', .* system 'a' needs",
        ),
        ({"sets": ("scifact", "scifact")}, "'scifact' twice"),
        ({"sets": ("a/b",)}, "a set is called 'a/b'"),
        ({"splits": {"scifakt": "dev"}}, "splits names 'scifakt'"),
        ({"ignore_identical_ids": {"quora": True}}, "ignore_identical_ids names 'quo"),
        ({"splits": {"scifact": "dev"}}, "dev.tsv: missing. The splits here are: test"),
    ],
)
def test_bad_settings_are_named(base, tmp_path, changes, message):
    changes = {"vocabulary": str(base / "spiece.model"), **changes}
    if "systems" in changes:
        systems = changes["systems"].items()
        changes["systems"] = {n: p.replace("{base}", str(base)) for n, p in systems}
    config = _tiny_sets.config_of(base, "scifact", **changes)
    with pytest.raises(InputError, match=message):
        zero_shot.run(config, tmp_path / "out")


def test_the_papers_sets_are_the_default_and_each_has_its_rule(tmp_path):
    config = runpy.run_path(str(ROOT / "configs/zero_shot.py"))["get_config"]()
    assert set(config.systems) == {"bm25", "mine"} and len(config.sets) == 11
    config.root = str(tmp_path)
    with config.unlocked():
        config.paths["msmarco"] = str(tmp_path / "msmarco")
    for name in (*config.sets, "msmarco"):
        (tmp_path / name).mkdir()
    for forum in benchmark_sets.FORUMS:
        (tmp_path / "cqadupstack" / forum).mkdir()
    parts, missing = benchmark_sets.locate(config)
    assert len(parts) == 10 + 12 + 1 and not missing
    ignoring = {part.of for part in parts if part.ignore_identical_ids}
    assert ignoring == {"arguana", "quora"}
    assert {part.split for part in parts if part.of == "msmarco"} == {"dev"}
    assert {part.split for part in parts if part.of != "msmarco"} == {"test"}


def test_a_set_that_changed_or_other_systems_are_refused(base):
    shutil.copytree(base / "beir/scifact", base / "moved/scifact")
    config = _tiny_sets.config_of(base, "scifact", root=str(base / "moved"))
    zero_shot.run(config, base / "then")
    with (base / "moved/scifact/queries.jsonl").open("a") as file:
        file.write('{"_id": "new", "text": "one more"}\n')
    with pytest.raises(InputError, match=r"runs/scifact is finished.*inputs\.data"):
        zero_shot.run(config, base / "then")
    other = {"bm25": "bm25", "again": "bm25"}
    config = _tiny_sets.config_of(base, "scifact", systems=other)
    zero_shot.run(config, base / "two")
    config.systems = {"bm25": "bm25"}
    with pytest.raises(InputError, match=r"scifact is finished.*config\.systems"):
        zero_shot.run(config, base / "two")

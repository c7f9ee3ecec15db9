"""The evaluation of several retrievers at once."""

import json
import shutil

import numpy as np
import pytest
from helpers import plans
from helpers import tiny as _tiny

from tfdpsq import evaluation
from tfdpsq.data import (
    BeirDirectory,
    read_synthetic,
    train_vocabulary,
    write_synthetic,
)
from tfdpsq.data.texts import Pair
from tfdpsq.evaluation import measures
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.run import evaluate
from tfdpsq.run.core import layout
from tfdpsq.run.search import retrieval, systems
from tfdpsq.validation import DataError, InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, and an untrained retriever."""
    base = tmp_path_factory.mktemp("evaluate")
    queries = _tiny.write_pairs(base / "pairs")
    train_vocabulary(queries, 320, base / "spiece.model")  # a test's made-up queries
    _tiny.write_retriever(base / "a", base, shared=False)
    return base


def _config(base, **changes):
    config = evaluate.default_config()
    config.data = str(base / "pairs")
    config.resamples = 50
    with config.unlocked():
        for name, value in changes.items():
            part, _, own = name.rpartition(".")
            (config[part] if part else config)[own] = value
    return config


def _run(config, out):
    evaluate.run(config, out)
    return json.loads((out / layout.METRICS_FILE).read_text())


def test_a_system_that_finds_nothing_leaves_the_others_their_results(base, tmp_path):
    """Queries in another language than the documents, for BM25: a job that had paid
    for its generators could never finish."""
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    path = tmp_path / "pairs" / "queries.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["text"] = "Wie sortiere ich Felder?"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    both = {"bm25": "bm25", "a": str(base / "a")}
    config = _config(base, systems=both, data=str(tmp_path / "pairs"))
    config.fusion.base = "bm25"
    metrics = _run(config, tmp_path / "out")
    found = metrics["systems"]
    assert found["bm25"]["ndcg@10"] == 0 and found["bm25"]["missing_queries"] == 12
    assert found["a"]["ndcg@10"] > 0 and found["a"]["missing_queries"] == 0
    assert metrics["fused"]["a"]["ndcg@10"] == found["a"]["ndcg@10"]


def test_queries_that_are_documents_find_k_others(base, tmp_path):
    """Their own text takes no place, and no part in the scale of scores."""
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    texts = {d.id: d.content for d in BeirDirectory(base / "pairs").documents()}
    asked = {f"d{i}": texts[f"d{i}"] for i in range(8)}
    (tmp_path / "pairs" / "queries.jsonl").write_text(
        "".join(
            json.dumps({"_id": q, "text": text}) + "\n" for q, text in asked.items()
        )
    )
    qrels = {f"d{i}": {f"d{i + 8}": 1} for i in range(8)}
    judged = "".join(f"d{i}\td{i + 8}\t1\n" for i in range(8))
    for path in (tmp_path / "pairs" / "qrels").iterdir():
        path.write_text("query-id\tcorpus-id\tscore\n" + judged)
    both = {"bm25": "bm25", "a": str(base / "a")}
    config = _config(base, systems=both, data=str(tmp_path / "pairs"), k=10)
    config.update(ignore_identical_ids=True)
    config.fusion.base = "bm25"
    metrics = _run(config, tmp_path / "out")
    runs = [
        evaluation.read_trec_run(tmp_path / "out" / "runs" / f"{name}.trec")
        for name in both
    ]
    for query in asked:
        for run in runs:
            assert query not in run[query] and len(run[query]) == 10
    fused = evaluation.fuse(runs, [0.7, 0.3], "scores", 10)
    expected = evaluation.evaluate_run(qrels, fused, ["ndcg@10", "map"]).means
    for name, value in expected.items():
        assert metrics["fused"]["a"][name] == pytest.approx(value, abs=1e-9), name


@pytest.fixture(scope="module")
def public(base):
    return _tiny.write_public_pairs(base)


def test_systems_are_fused_with_bm25_at_a_weight_fitted_on_public_queries(base, public):
    """From the run files alone, and the weight from a search of its own."""
    both = {"a": str(base / "a"), "words": "bm25"}
    config = _config(base, systems=both, baseline="a", k=20, batch_size=16)
    config.fusion.update(base="words", method="scores", fit=public, fit_queries=30)
    metrics = _run(config, base / "private" / "fused")
    runs = {
        name: evaluation.read_trec_run(
            base / "private" / "fused" / "runs" / f"{name}.trec"
        )
        for name in both
    }
    beir = BeirDirectory(base / "pairs")
    qrels = beir.qrels("test")
    assert all(set(run) <= set(qrels) for run in runs.values())
    found = metrics["fused"]["a"]
    assert list(metrics["fused"]) == ["a"]

    # Queries to fit on are spread evenly over the set, first and last included.
    rows = list(read_synthetic(public))
    picked = [rows[int(i)] for i in np.linspace(0, len(rows) - 1, 30)]
    queries = {row.query_id: row.query for row in picked}
    searched = systems.Systems.of(config)
    searches = {
        name: run for name, run, _ in retrieval.retrieve(searched, beir, queries, 20)
    }
    weight, value = evaluation.fit_weight(
        searches["words"],
        searches["a"],
        {row.query_id: {row.document_id: 1} for row in picked},
        "scores",
        k=20,
    )
    assert found["weight"] == weight and found["fitted"] == pytest.approx(value)
    weights = [1 - weight, weight]
    fused = evaluation.fuse([runs["words"], runs["a"]], weights, "scores", 20)
    expected = evaluation.evaluate_run(qrels, fused, layout.METRICS).means
    for metric in layout.METRICS:
        assert found[metric] == pytest.approx(expected[metric], abs=1e-6), metric


def test_no_weight_is_fitted_on_what_no_guarantee_covers(base, public, tmp_path):
    unprotected = base / "unprotected"
    plan = plans.plan(epsilon=float("inf"), num_units=200, batch_size=10, steps=4)
    write_synthetic(unprotected, read_synthetic(public), {}, plans.certificate(plan))
    reranked = {"rerankers": {"a": "t5_tiny_pydocs"}, "rerank.base": "words"}
    for changes, message in (
        ({"fusion.base": "words", "fusion.fit": str(base / "pairs")}, "fusion.fit"),
        ({"fusion.base": "words", "fusion.fit": str(unprotected)}, "fusion.fit"),
        ({**reranked, "rerank.fit": str(base / "pairs")}, "rerank.fit"),
        ({**reranked, "rerank.fit": str(unprotected)}, "rerank.fit"),
    ):
        config = _config(base, systems={"words": "bm25"}, **changes)
        with pytest.raises(InputError, match=message):
            evaluate.run(config, tmp_path / "private" / "never")
        assert not (tmp_path / "private" / "private_reads.jsonl").exists()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    start = tmp_path_factory.mktemp("rerank")
    _tiny.write_start(start)
    return start


def _reranked(start, **changes):
    """Reranks BM25's documents for the test queries by two generators."""
    config = _config(start)
    with config.unlocked():
        config.systems = {"words": "bm25"}
        config.rerankers = {"one": str(start / "public"), "two": str(start / "public")}
        config.rerank.update({"base": "words", "baseline": "two", **changes})
    out = start / "private" / f"depth{config.rerank.depth}"
    metrics = _run(config, out)
    runs = {
        system: evaluation.read_trec_run(out / "runs" / f"{system}.trec")
        for system in ("words", "one", "two")
    }
    return metrics, runs


def _nats(start, pairs):
    """Returns likelihoods of (document, query), without shared encodings."""
    model = T5QueryGenerator.from_preset(start / "public")
    batch = model.preprocessor.arrays(
        Pair("", query, "", document) for document, query in pairs
    )
    return -model.per_example_losses(batch).numpy() * batch["query_lengths"]


def test_rerankers_order_the_best_documents_by_both_scores(start):
    """By likelihoods that are computed pair by pair, without the shared encodings."""
    metrics, runs = _reranked(start, depth=3, weight=0.6)
    beir = BeirDirectory(start / "pairs")
    documents = {document.id: document.content for document in beir.documents()}
    ranked = measures.ranked
    first = {q: [d for d, _ in ranked(hits)] for q, hits in runs["words"].items()}
    pairs = [(q, d) for q, names in first.items() for d in names[:3]]
    nats = _nats(start, [(documents[d], beir.queries()[q]) for q, d in pairs])
    for (query, name), value in zip(pairs, nats):
        expected = 0.4 * runs["words"][query][name] + 0.6 * value
        assert runs["one"][query][name] == pytest.approx(expected, rel=1e-4)
    deeper = 0
    for query, ranked in first.items():  # the others keep their order, below
        found = [name for name, _ in measures.ranked(runs["one"][query])]
        assert found[3:] == ranked[3:] and set(found) == set(ranked)
        deeper += len(ranked) > 3
    assert deeper and runs["one"] == runs["two"]
    qrels = beir.qrels("test")
    expected = evaluation.evaluate_run(qrels, runs["one"], layout.METRICS).means
    assert metrics["settings"]["one"] == {"weight": 0.6, "depth": 3}
    metrics = metrics["systems"]
    assert metrics["one"]["ndcg@10"] == pytest.approx(expected["ndcg@10"], abs=1e-6)
    assert metrics["one"]["difference_to_baseline"]["difference"] == 0
    assert "difference_to_baseline" not in metrics["two"]
    assert "difference_to_baseline" not in metrics["words"]


def test_a_rerankers_weight_is_fitted_on_public_queries(start):
    """By a search and likelihoods of their own, and a sum over places by hand."""
    public = _tiny.write_public_pairs(start)
    metrics, runs = _reranked(start, depth=6, fit=public, fit_queries=30)
    rows = list(read_synthetic(public))
    rows = [rows[int(place)] for place in np.linspace(0, len(rows) - 1, 30)]
    beir = BeirDirectory(start / "pairs")
    documents = {document.id: document.content for document in beir.documents()}
    queries = {row.query_id: row.query for row in rows}
    found = evaluation.BM25(documents).search(queries, 6)
    all_found = evaluation.BM25(documents).search(queries, 10)
    pairs = [(row, name) for row in rows for name in found[row.query_id]]
    nats = dict(
        zip(
            ((row.query_id, name) for row, name in pairs),
            _nats(start, [(documents[name], row.query) for row, name in pairs]),
        )
    )

    def gained(weight):
        gains = []
        for row in rows:
            scores = {
                name: (1 - weight) * score + weight * nats[row.query_id, name]
                for name, score in found[row.query_id].items()
            }
            names = [name for name, _ in measures.ranked(scores)]
            # Those beyond the first 6 keep their places below.
            names += [
                name
                for name, _ in measures.ranked(all_found[row.query_id])
                if name not in scores
            ]
            there = row.document_id in names
            gains.append(1 / np.log2(names.index(row.document_id) + 2) if there else 0)
        return np.mean(gains)

    note = metrics["settings"]["two"]  # the baseline; others take its weight
    one = {"weight": note["weight"], "depth": 6}
    assert metrics["settings"]["one"] == one and note.items() > one.items()
    assert note["fitted"] == pytest.approx(gained(note["weight"]), abs=1e-6)
    values = [gained(weight) for weight in (0, 0.02, 0.05, 0.12, 0.25, 0.5, 0.8, 1)]
    assert note["fitted"] >= max(values) - 1e-6 > min(values) + 0.005
    # Of equal ones the smallest, and it is the one that documents are ordered by.
    assert note["weight"] == 0 or gained(0) < note["fitted"] - 1e-6
    assert set(runs["one"]) == set(runs["words"]) <= set(beir.qrels("test"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"systems": {"mine": "/no/such"}}, "/no/such"),
        ({"systems": {"a": "{base}/pairs"}}, "pairs is not a finished stage"),
        ({"k": 5}, "'ndcg@10' needs more documents than the 5"),
        ({"split": "tets"}, "tets.tsv"),
        ({"synthetic": {"s": "{base}/pairs"}}, "synthetic.s"),
        ({"rerankers": {"a": "{base}/pairs"}, "rerank.base": "words"}, "rerankers.a"),
        ({"rerank.depth": 9}, "rerank.depth is 9"),
    ],
)
def test_bad_settings_are_named_before_anything_is_read(
    base, tmp_path, changes, message
):
    def given(value):
        if isinstance(value, dict):
            return {name: given(one) for name, one in value.items()}
        return value.replace("{base}", str(base)) if isinstance(value, str) else value

    config = _config(base, **{"systems": {"words": "bm25"}, **given(changes)})
    with pytest.raises(InputError, match=message):
        evaluate.run(config, tmp_path / "private" / "out")
    assert not (tmp_path / "private" / "private_reads.jsonl").exists()
    assert not (tmp_path / "private" / "out").exists()


def test_wrong_judgements_are_named_before_private_queries_are_read(base, tmp_path):
    """A document that is not there would else count as one that was not found."""
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    with (tmp_path / "pairs" / "qrels" / "test.tsv").open("a") as file:
        file.write("q72\tgone\t1\n")
    config = _config(base, data=str(tmp_path / "pairs"), systems={"words": "bm25"})
    with pytest.raises(DataError, match="test.tsv:14: its document is not in"):
        evaluate.run(config, tmp_path / "private" / "out")
    assert not (tmp_path / "private" / "private_reads.jsonl").exists()

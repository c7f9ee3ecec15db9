"""Stage `evaluate`: several systems on private queries at once."""

import json
import shutil

import numpy as np
import pytest
from helpers import framed
from helpers import tiny as _tiny

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory, train_vocabulary
from tfdpsq.data.texts import Pair
from tfdpsq.evaluation import measures
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.run.common.benchmark_sets import METRICS
from tfdpsq.run.stages.evaluate import METRICS_FILE, STAGE
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, an untrained retriever, and public queries on the same documents."""
    base = tmp_path_factory.mktemp("evaluate")
    queries = _tiny.write_pairs(base / "pairs")
    train_vocabulary(queries, 320, base / "spiece.model")  # a test's made-up queries
    framed.write_retriever(base / "a", base / "spiece.model", shared=False)
    _tiny.write_public_pairs(base)
    return base


def _run(base, out, **changes):
    given = {"data": str(base / "pairs"), "resamples": 50, **changes}
    record = framed.run(STAGE, out, **given)
    metrics = json.loads((out / METRICS_FILE).read_text())
    for name, value in record["result"].items():
        assert metrics["systems"][name]["ndcg@10"] == value
    return metrics


def _runs(out, *names):
    return [evaluation.read_trec_run(out / "runs" / f"{name}.trec") for name in names]


def test_a_system_that_finds_nothing_leaves_the_others_their_results(base, tmp_path):
    """Queries in another language than the documents, for BM25: a job that had paid
    for its generators could never finish."""
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    path = tmp_path / "pairs" / "queries.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["text"] = "Wie sortiere ich Felder?"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = _run(
        base,
        tmp_path / "private" / "out",
        systems={"bm25": "bm25", "a": str(base / "a")},
        data=str(tmp_path / "pairs"),
        fusion={"base": "bm25"},
    )
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
    metrics = _run(
        base,
        tmp_path / "private" / "out",
        systems={"bm25": "bm25", "a": str(base / "a")},
        data=str(tmp_path / "pairs"),
        k=10,
        ignore_identical_ids=True,
        fusion={"base": "bm25"},
    )
    runs = _runs(tmp_path / "private" / "out", "bm25", "a")
    for query in asked:
        for run in runs:
            assert query not in run[query] and len(run[query]) == 10
    fused = evaluation.fuse(runs, [0.7, 0.3], "scores", 10)
    expected = evaluation.evaluate_run(qrels, fused, ["ndcg@10", "map"]).means
    for name, value in expected.items():
        assert metrics["fused"]["a"][name] == pytest.approx(value, abs=1e-9), name


def test_systems_are_fused_with_bm25_over_shards(base):
    """Shards give the run of the whole corpus."""
    metrics = _run(
        base,
        base / "private" / "fused",
        systems={"a": str(base / "a"), "words": "bm25"},
        baseline="a",
        k=20,
        batch_size=16,
        shard_documents=30,
        fusion={"base": "words", "weights": {"a": 0.45}},
    )
    runs = dict(zip(("a", "words"), _runs(base / "private" / "fused", "a", "words")))
    beir = BeirDirectory(base / "pairs")
    qrels = beir.qrels("test")
    assert all(set(run) <= set(qrels) for run in runs.values())
    assert list(metrics["fused"]) == ["a"]
    assert "difference_to_baseline" in metrics["systems"]["words"]
    documents = {document.id: document.content for document in beir.documents()}
    dense = _dense(base, beir.queries(), documents, 20)
    for query in qrels:
        # Rounding decides which of two equal scores is the last.
        scores = (sorted(run[query].values()) for run in (runs["a"], dense))
        np.testing.assert_allclose(*scores, rtol=0, atol=1e-5)
    fused = evaluation.fuse([runs["words"], runs["a"]], [0.55, 0.45], "scores", 20)
    expected = evaluation.evaluate_run(qrels, fused, METRICS).means
    found = metrics["fused"]["a"]
    assert found["weight"] == 0.45
    for metric in METRICS:
        assert found[metric] == pytest.approx(expected[metric], abs=1e-6), metric


def _dense(base, queries, documents, k):
    """A run of the retriever, all embeddings in memory."""
    from tfdpsq import retriever

    model = retriever.load(base / "a" / "model")
    asked, held = (
        retriever.encode_texts(model, texts.values(), kind, progress=False)
        for kind, texts in (("query", queries), ("document", documents))
    )
    scores = asked @ held.T
    run = {}
    for query, row in zip(queries, scores):
        best = np.argsort(-row, kind="stable")[:k]
        run[query] = {list(documents)[at]: float(row[at]) for at in best}
    return run


def test_embeddings_that_exist_are_searched_by_id(base, tmp_path):
    """With an adapter, whose encoder must be theirs."""
    _tiny.write_embedded(base / "embedded")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    matrix = np.random.default_rng(1).normal(size=[8, 8]).astype(np.float32)
    np.save(adapter / "adapter.npy", matrix)
    names = {"asis": "embeddings", "mapped": str(adapter)}
    held = dict.fromkeys(names, str(base / "embedded"))
    given = {"systems": names, "indexes": held, "query_embeddings": held, "k": 20}
    with pytest.raises(InputError, match="Give indexes.mapped, too"):
        few = {**given, "indexes": {"asis": held["asis"]}}
        _run(base, tmp_path / "private" / "never", **few)
    with pytest.raises(InputError, match="by None of 8 dimensions"):
        _run(base, tmp_path / "private" / "none", **given)
    from tfdpsq.run.frame import records

    depends = {"stage": "train_adapter", "settings": {}, "inputs": {}}
    result = {"encoder": "a public encoder"}
    records.write_stage(
        adapter, depends, guarantee="public", settings={}, facts={}, result=result
    )
    _run(base, tmp_path / "private" / "out", **given)
    runs = _runs(tmp_path / "private" / "out", *names)
    documents, queries = (v.astype(np.float64) for v in _tiny.vectors())
    for run, mapped in zip(runs, (queries, queries @ matrix)):
        cosines = mapped @ documents.T
        cosines /= np.linalg.norm(mapped, axis=1)[:, None]
        cosines /= np.linalg.norm(documents, axis=1)
        for query in BeirDirectory(base / "pairs").qrels("test"):
            row = cosines[int(query[1:])]
            best = np.argsort(-row)[:20]
            assert run[query] == pytest.approx(
                {f"d{at}": row[at] for at in best}, abs=1e-5
            )


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    start = tmp_path_factory.mktemp("rerank")
    _tiny.write_start(start)
    return start


def _nats(start, pairs):
    """Returns likelihoods of (document, query), without shared encodings."""
    model = T5QueryGenerator.from_preset(start / "public")
    batch = model.preprocessor.arrays(
        Pair("", query, "", document) for document, query in pairs
    )
    return -model.per_example_losses(batch).numpy() * batch["query_lengths"]


def test_rerankers_order_the_best_documents_by_both_scores(start):
    """By likelihoods that are computed pair by pair, without the shared encodings."""
    out = start / "private" / "reranked"
    metrics = _run(
        start,
        out,
        systems={"words": "bm25"},
        rerankers=dict.fromkeys(("one", "two"), str(start / "public")),
        baselines={"one": "two"},
        rerank={"base": "words", "depth": 3, "weight": 0.6},
    )
    runs = dict(zip(("words", "one", "two"), _runs(out, "words", "one", "two")))
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
    expected = evaluation.evaluate_run(qrels, runs["one"], METRICS).means
    metrics = metrics["systems"]
    assert metrics["one"]["ndcg@10"] == pytest.approx(expected["ndcg@10"], abs=1e-6)
    assert metrics["one"]["difference_to_baseline"]["difference"] == 0
    assert "difference_to_baseline" not in metrics["two"]
    assert "difference_to_baseline" not in metrics["words"]


def test_bad_settings_are_named(base, tmp_path):
    out = tmp_path / "private" / "out"
    for changes, message in (
        ({"systems": {"mine": "/no/such"}}, "/no/such"),
        ({"systems": {"mine": "embeddings"}}, "systems.mine is embeddings, which emb"),
        ({"systems": {"two words": "bm25"}}, "'two words' names"),
        ({"baseline": "mine"}, "baseline names 'mine'; there are words"),
        ({"data": str(base / "public_queries")}, "a set. Give a BEIR dir"),
        ({"split": "tets"}, "tets.tsv"),
        ({"rerankers": {"a": str(base / "pairs")}}, "rerank.base names 'bm25'"),
        ({"strict": True}, "strict mode refuses"),
    ):
        with pytest.raises(InputError, match=message):
            _run(base, out, **{"systems": {"words": "bm25"}, **changes})
        assert not out.exists()


def test_numbers_on_private_queries_are_private(base, tmp_path):
    with pytest.raises(InputError, match="out is not under private/"):
        _run(base, tmp_path / "out")
    assert not framed.reads(tmp_path / "private")
    _run(base, tmp_path / "private" / "out")
    where = "the queries and judgements of split 'test'"
    assert framed.reads(tmp_path / "private") == [where]

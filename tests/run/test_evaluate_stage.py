"""The evaluation of several retrievers at once."""

import json
import pickle
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans
from helpers import tiny as _tiny

from tfdpsq import evaluation, retriever
from tfdpsq.data import (
    BeirDirectory,
    Tokenizer,
    read_synthetic,
    train_vocabulary,
    write_synthetic,
)
from tfdpsq.data.texts import Pair
from tfdpsq.evaluation.ranking import trec
from tfdpsq.generator import T5QueryGenerator, encode_pairs
from tfdpsq.layers import T5Config
from tfdpsq.run import evaluate
from tfdpsq.run.core import layout
from tfdpsq.run.passes import passes
from tfdpsq.run.search import hybrid, retrieval, systems
from tfdpsq.validation import DataError, InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, and three retrievers: two that differ in their query towers alone."""
    base = tmp_path_factory.mktemp("evaluate")
    queries = _tiny.write_pairs(base / "pairs")
    train_vocabulary(queries, 320, base / "spiece.model")  # a test's made-up queries
    t5 = T5Config(330, 1, 2, 16, 24, 8)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        tf.keras.utils.set_random_seed(seed)
        model = retriever.TwoTower(
            retriever.RetrieverConfig(t5, 8, 20.0, 10, 24, shared=False)
        )
        if name == "b":
            for weight in model.query_tower.weights:
                weight.assign(weight[::-1])
        retriever.save(model, base / name / layout.RETRIEVER_MODEL)
        vocabulary = Tokenizer(base / "spiece.model").fingerprint
        stage = {**_tiny.STAGE, "run": name, "inputs": {"vocabulary": vocabulary}}
        (base / name / "stage.json").write_text(json.dumps(stage))
    return base


def _ndcg(base, name, systems):
    config = evaluate.default_config()
    config.data = str(base / "pairs")
    config.vocabulary = str(base / "spiece.model")
    with config.unlocked():
        config.systems = {system: str(base / system) for system in systems}
    evaluate.run(config, base / name)
    metrics = json.loads((base / name / layout.METRICS_FILE).read_text())
    return {s: values["ndcg@10"] for s, values in metrics["systems"].items()}


def test_a_system_without_a_result_leaves_the_others_theirs(base, tmp_path):
    """Queries in another language than the documents, for BM25: a job that had paid
    for its generators could never finish."""
    config = _bad(base, systems={"bm25": "bm25", "a": str(base / "a")})
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    path = tmp_path / "pairs" / "queries.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    judged = (tmp_path / "pairs" / "qrels" / "test.tsv").read_text()
    for line in lines:
        if f"{line['_id']}\t" in judged:
            line["text"] = "Wie sortiere ich Felder?"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config.data, config.vocabulary = str(tmp_path / "pairs"), str(base / "spiece.model")
    config.fusion.base, config.resamples = "bm25", 50
    evaluate.run(config, tmp_path / "out")
    metrics = json.loads((tmp_path / "out" / layout.METRICS_FILE).read_text())
    found = metrics["systems"]
    assert found["bm25"]["ndcg@10"] == 0 and found["bm25"]["missing_queries"] == 12
    assert found["a"]["ndcg@10"] > 0 and found["a"]["missing_queries"] == 0
    assert metrics["fused"]["a"]["ndcg@10"] == found["a"]["ndcg@10"]


def test_self_matches_go_before_anything_is_made_of_a_run(base, tmp_path):
    """Queries that are documents: each has k others, on a scale of their own scores."""
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    corpus = [
        json.loads(line)
        for line in (tmp_path / "pairs" / "corpus.jsonl").read_text().splitlines()
    ]
    texts = {line["_id"]: line["text"] for line in corpus}
    asked = dict(list(texts.items())[:8])
    # The tenth of the other documents, which a search for ten misses.
    best = evaluation.BM25(texts).search(asked, 11)
    right = {q: [d for d in hits if d != q][9:] for q, hits in best.items()}
    right = {q: found[0] for q, found in right.items() if found and q in best[q]}
    assert right
    queries = [{"_id": q, "text": asked[q]} for q in right]
    (tmp_path / "pairs" / "queries.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in queries)
    )
    for path in (tmp_path / "pairs" / "qrels").iterdir():
        lines = "".join(f"{q}\t{d}\t1\n" for q, d in right.items())
        path.write_text("query-id\tcorpus-id\tscore\n" + lines)
    config = _bad(base, systems={"bm25": "bm25", "a": str(base / "a")})
    config.data, config.vocabulary = str(tmp_path / "pairs"), str(base / "spiece.model")
    config.fusion.base, config.resamples, config.k = "bm25", 50, 10
    config.ignore_identical_ids = True
    evaluate.run(config, tmp_path / "out")
    metrics = json.loads((tmp_path / "out" / layout.METRICS_FILE).read_text())
    runs = [
        evaluation.read_trec_run(tmp_path / "out" / "runs" / f"{name}.trec")
        for name in ("bm25", "a")
    ]
    for query in right:
        for run in runs:
            assert query not in run[query] and len(run[query]) == 10
    assert metrics["systems"]["bm25"]["recall@10"] == 1
    qrels = {query: {document: 1} for query, document in right.items()}
    fused = evaluation.fuse(runs, [0.7, 0.3], "scores", 10)
    expected = evaluation.evaluate_run(qrels, fused, ["ndcg@10", "map"]).means
    for name, value in expected.items():
        assert metrics["fused"]["a"][name] == pytest.approx(value, abs=1e-9), name


@pytest.mark.slow
def test_systems_with_one_document_tower_share_its_embeddings(base, monkeypatch):
    monkeypatch.setattr(evaluate.workdir, "stage_fingerprint", str)
    alone = {s: _ndcg(base, f"of_{s}", [s])[s] for s in "abc"}
    made = []

    class Spy(retriever.Embedder):
        """Counts the passes over the corpus."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(arguments[2])

    monkeypatch.setattr(retrieval.retriever, "Embedder", Spy)
    together = _ndcg(base, "of_all", ["a", "b", "c"])
    assert together == pytest.approx(alone) and len(set(alone.values())) > 1
    assert made == ["document", "document"]
    assert all(np.isfinite(list(together.values())))


@pytest.mark.slow
def test_commands_that_share_a_corpus_find_what_one_does(base, monkeypatch):
    """Whatever is written, in any order; a damaged shard is searched again."""
    monkeypatch.setattr(evaluate.workdir, "stage_fingerprint", str)
    systems = {"a": str(base / "a"), "bm25": "bm25"}
    config = _bad(base, systems=systems, shard_documents=50, resamples=100)
    config.vocabulary = str(base / "spiece.model")
    config.private_directory = str(base)
    out = {name: base / "private" / name for name in ("one", "shared")}
    evaluate.run(config, out["one"])
    assert evaluate.run(config, out["shared"], passes.Launch(2, 1)) is None
    held = sorted((base / "private" / ".shared.shards").glob("*.npz"))
    assert len(held) == 1
    held[0].write_bytes(held[0].read_bytes()[:-9])
    evaluate.run(config, out["shared"])
    files = {
        name: {
            str(path.relative_to(directory)): path.read_bytes()
            for path in directory.rglob("*")
            if path.is_file() and path.name != "stage.json"
        }
        for name, directory in out.items()
    }
    assert len(files["one"]) == 4 and files["shared"] == files["one"]
    assert pickle.loads(pickle.dumps(config)) == config  # as Beam's workers need


def test_streamed_runs_are_those_of_all_embeddings_at_once(base, monkeypatch):
    """As they were found before: every document embedded, then one search."""
    monkeypatch.setattr(retrieval, "ROWS", 16)  # several chunks of 84 documents
    config = _bad(base, systems={"a": str(base / "a"), "b": str(base / "b")})
    config.vocabulary = str(base / "spiece.model")
    config.batch_size = 2
    beir = BeirDirectory(base / "pairs")
    queries = beir.queries()
    searched = systems.Systems.of(config)
    found = {
        name: run for name, run, _ in retrieval.retrieve(searched, beir, queries, 7)
    }
    tokenizer = Tokenizer(base / "spiece.model")
    documents = list(beir.documents())
    for name in "ab":
        model = retriever.load(base / name / layout.RETRIEVER_MODEL)
        asked, held = (
            retriever.encode_texts(model, texts, tokenizer, side, progress=False)
            for side, texts in (
                ("query", queries.values()),
                ("document", [d.content for d in documents]),
            )
        )
        whole = retriever.as_run(
            list(queries),
            *retriever.search(asked, held, [d.id for d in documents], 7, "brute_force"),
        )
        assert list(found[name]) == list(whole)
        for query_id, hits in whole.items():
            # Scores within rounding of each other may change places.
            np.testing.assert_allclose(
                list(found[name][query_id].values()), list(hits.values()), atol=1e-6
            )
            least = min(hits.values())
            for document, score in found[name][query_id].items():
                assert hits.get(document, least) == pytest.approx(score, abs=1e-6)


@pytest.fixture(scope="module")
def public(base):
    return _tiny.write_public_pairs(base)


def _evaluated(base, out, fusion):
    config = _bad(base, systems={"a": str(base / "a"), "words": "bm25"})
    config.vocabulary = str(base / "spiece.model")
    config.baseline = "a"
    config.k, config.resamples, config.batch_size = 20, 100, 16
    config.fusion.update(fusion)
    evaluate.run(config, base / "private" / out)
    return json.loads((base / "private" / out / layout.METRICS_FILE).read_text())


def test_two_devices_find_what_one_does(base, monkeypatch, on_two_devices):
    monkeypatch.setattr(evaluate.workdir, "stage_fingerprint", str)
    alone = _evaluated(base, "alone", {})
    with on_two_devices():
        found = _evaluated(base, "two", {})
    assert found["systems"] == alone["systems"]
    one, two = (base / "private" / out / "runs/a.trec" for out in ("alone", "two"))
    assert two.read_bytes() == one.read_bytes()


@pytest.mark.parametrize("method", ["scores", "ranks"])
def test_systems_are_measured_together_with_bm25(base, public, monkeypatch, method):
    """From the run files alone, and the weight from a search of its own."""
    monkeypatch.setattr(evaluate.workdir, "stage_fingerprint", str)
    options = {"base": "words", "method": method, "fit": public, "fit_queries": 30}
    metrics = _evaluated(base, f"fused_{method}", options)
    plain = _evaluated(base, f"plain_{method}", {})
    assert metrics["systems"] == plain["systems"] and plain["fused"] == {}
    runs = {
        name: evaluation.read_trec_run(
            base / "private" / f"fused_{method}" / "runs" / f"{name}.trec"
        )
        for name in ("a", "words")
    }
    beir = BeirDirectory(base / "pairs")
    qrels = beir.qrels("test")
    assert all(set(run) <= set(qrels) for run in runs.values())
    found = metrics["fused"]["a"]
    assert list(metrics["fused"]) == ["a"]

    # Queries to fit on are spread evenly over the set, first and last included.
    config = _bad(base, systems={"a": str(base / "a"), "words": "bm25"})
    config.vocabulary = str(base / "spiece.model")
    rows = list(read_synthetic(public))
    picked = [rows[int(i)] for i in np.linspace(0, len(rows) - 1, 30)]
    queries = {row.query_id: row.query for row in picked}
    both = {
        n: run
        for n, run, _ in retrieval.retrieve(
            systems.Systems.of(config), beir, queries, 20
        )
    }
    fitted = evaluation.fit_weight(
        both["words"],
        both["a"],
        {row.query_id: {row.document_id: 1} for row in picked},
        method,
        k=20,
    )
    assert found["weight"] == fitted.weight and found["fitted"] == fitted.value
    weights = [1 - fitted.weight, fitted.weight]
    fused = evaluation.fuse([runs["words"], runs["a"]], weights, method, 20)
    expected = evaluation.evaluate_run(qrels, fused, layout.METRICS).means
    for metric in layout.METRICS:
        assert found[metric] == pytest.approx(expected[metric], abs=1e-6), metric


def test_a_weight_is_never_fitted_on_what_a_guarantee_does_not_cover(base, public):
    unprotected = base / "unprotected"
    plan = plans.plan(epsilon=float("inf"), num_units=200, batch_size=10, steps=4)
    certificate = plans.certificate(plan)
    write_synthetic(unprotected, read_synthetic(public), {}, certificate)
    out = base / "private" / "never"
    for fusion, message in (
        ({"base": "words", "fit": str(base / "pairs")}, "tells about them"),
        ({"base": "words", "fit": "pydocs"}, "not a set of public or synthetic"),
        ({"base": "words", "fit": str(unprotected)}, "without protection"),
        ({"base": "none"}, "fusion.base is 'none', which is none of the systems"),
        ({"fit": public}, "fusion.fit is .* which does nothing here"),
        ({"rerank": public}, "rerank.fit is .* which does nothing here"),
        ({"rerank": str(base / "pairs"), "by": "a"}, "rerank.fit .* tells about them"),
        ({"rerank": str(unprotected), "by": "a"}, "rerank.fit .* without protection"),
    ):
        config = _bad(base, systems={"words": "bm25"})
        if fit := fusion.pop("rerank", None):
            config.rerank.fit = fit
            with config.unlocked():
                if fusion.pop("by", None):
                    config.rerank.base = "words"
                    config.rerankers = {"a": "t5_tiny_pydocs"}
        config.fusion.update(fusion)
        with pytest.raises(InputError, match=message):
            evaluate.run(config, out)
    assert not out.exists()


def _reranked(start, **changes):
    """Reranks BM25's documents for the test queries by two generators."""
    config = evaluate.default_config()
    config.data = str(start / "pairs")
    config.resamples = 100
    lengths = {"document_length": 20, "query_length": 6}
    with config.unlocked():
        config.systems = {"words": "bm25"}
        config.rerankers = {"one": str(start / "public"), "two": str(start / "public")}
        config.rerank.update({"base": "words", "baseline": "two", **lengths, **changes})
    out = start / "private" / "out"
    evaluate.run(config, out)
    metrics = json.loads((out / layout.METRICS_FILE).read_text())
    runs = {
        system: evaluation.read_trec_run(out / "runs" / f"{system}.trec")
        for system in ("words", "one", "two")
    }
    return metrics, runs


def _nats(start, pairs):
    """Returns likelihoods of (document, query), without shared encodings."""
    model = T5QueryGenerator.from_preset(start / "public")
    batch = encode_pairs(
        [Pair("", query, "", document) for document, query in pairs],
        Tokenizer(start / "spiece.model"),
        query_length=6,
        document_length=20,
    )
    return -model.per_example_losses(batch).numpy() * batch["query_lengths"]


def test_rerankers_order_the_best_documents_by_both_scores(tmp_path):
    """By likelihoods that are computed pair by pair, without the shared encodings."""
    _tiny.write_start(tmp_path)
    metrics, runs = _reranked(tmp_path, depth=3, weight=0.6)
    beir = BeirDirectory(tmp_path / "pairs")
    documents = {document.id: document.content for document in beir.documents()}
    first = {q: [d for d, _ in trec.ranked(hits)] for q, hits in runs["words"].items()}
    pairs = [(q, d) for q, ranked in first.items() for d in ranked[:3]]
    nats = _nats(tmp_path, [(documents[d], beir.queries()[q]) for q, d in pairs])
    for (query, name), value in zip(pairs, nats):
        expected = 0.4 * runs["words"][query][name] + 0.6 * value
        assert runs["one"][query][name] == pytest.approx(expected, rel=1e-4)
    deeper = 0
    for query, ranked in first.items():  # the others keep their order, below
        found = [name for name, _ in trec.ranked(runs["one"][query])]
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


def test_a_rerankers_weight_is_fitted_on_public_queries(tmp_path):
    """By a search and likelihoods of their own, and a sum over places by hand."""
    _tiny.write_start(tmp_path)
    public = _tiny.write_public_pairs(tmp_path)
    metrics, runs = _reranked(tmp_path, depth=6, fit=public, fit_queries=30)
    rows = list(read_synthetic(public))
    rows = [rows[int(place)] for place in np.linspace(0, len(rows) - 1, 30)]
    beir = BeirDirectory(tmp_path / "pairs")
    documents = {document.id: document.content for document in beir.documents()}
    queries = {row.query_id: row.query for row in rows}
    found = evaluation.BM25(documents).search(queries, 6)
    all_found = evaluation.BM25(documents).search(queries, 10)
    pairs = [(row, name) for row in rows for name in found[row.query_id]]
    nats = dict(
        zip(
            ((row.query_id, name) for row, name in pairs),
            _nats(tmp_path, [(documents[name], row.query) for row, name in pairs]),
        )
    )

    def gained(weight):
        gains = []
        for row in rows:
            scores = {
                name: (1 - weight) * score + weight * nats[row.query_id, name]
                for name, score in found[row.query_id].items()
            }
            names = [name for name, _ in trec.ranked(scores)]
            # Those beyond the first 6 keep their places below.
            names += [
                name
                for name, _ in trec.ranked(all_found[row.query_id])
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
    assert note["fitted"] >= max(values) - 1e-6 > min(values) + 0.02
    # Of equal ones the smallest, and it is the one that documents are ordered by.
    assert note["weight"] == 0 or gained(0) < note["fitted"] - 1e-6
    assert set(runs["one"]) == set(runs["words"]) <= set(beir.qrels("test"))
    for query, hits in runs["words"].items():
        first = [name for name, _ in trec.ranked(hits)][:6]
        own = _nats(tmp_path, [(documents[d], beir.queries()[query]) for d in first])
        for name, value in zip(first, own):
            mixed = (1 - note["weight"]) * hits[name] + note["weight"] * value
            assert runs["one"][query][name] == pytest.approx(mixed, rel=1e-4)


def test_a_weight_cannot_be_fitted_on_queries_of_another_corpus(tmp_path):
    _tiny.write_start(tmp_path)
    rows = [("no such words", "x0", "x"), ("no such words", "x1", "x")]
    others = _tiny.write_set(tmp_path / "others", rows)
    with pytest.raises(InputError, match=r"of rerank\.fit .*others has its document"):
        _reranked(tmp_path, fit=others)


def test_a_fusion_that_cannot_be_fitted_keeps_its_weight_and_warns(tmp_path, caplog):
    """It was 0 and looked fitted; in a job, an error would come after all is paid."""
    rows = [("no words", "x0", "x"), ("no words", "x1", "x")]
    others = _tiny.write_set(tmp_path / "others", rows)
    fit = hybrid.FitSet("fusion", others, 2)
    own = evaluate.default_config().fusion
    own.update({"base": "words", "fit": fit.path, "weight": 0.3})
    run = {"q": {"d1": 1.0, "d2": 0.5}}
    fusion = hybrid.Fusion(own, fit, {"q": {"d2": 1}}, 10)
    fusion.add("words", run)
    fusion.add("dense", {"q": {"d2": 1.0, "d1": 0.5}})
    assert fusion.notes["dense"] == {"weight": 0.3}
    assert "no weight could be fitted" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rerankers": {"words": "t5"}}, "rerankers.words has the name of a system"),
        ({"rerankers": {"a": ""}}, "rerankers.a is ''. Give it a generator"),
        ({"rerankers": {"a": "/no/such"}}, "/no/such"),
        ({"rerankers": {"a": "@/a"}}, "rerankers.a is .*/a, which cannot.*finetune"),
        ({"rerankers": {"a": "@/pairs"}}, "rerankers.a is .*/pairs, which cannot"),
        ({"rerank.base": "else"}, "rerank.base is 'else', which is none of"),
        ({"rerank.depth": 101}, "rerank.depth is 101, but k is 100"),
        ({"rerank.baseline": "b"}, "rerank.baseline is 'b', which is none of"),
        ({"rerank.depth": 9, "rerankers": {}}, "rerank.depth is 9, which does nothing"),
    ],
)
def test_rerankers_that_do_not_fit_are_refused(base, tmp_path, changes, message):
    config = _bad(base, systems={"words": "bm25"}, rerankers={"a": "t5_tiny_pydocs"})
    with config.unlocked():
        config.update_from_flattened_dict({"rerank.base": "words", **changes})
        if "rerankers" in changes:
            config.rerankers = {
                name: path.replace("@", str(base))
                for name, path in changes["rerankers"].items()
            }
        if not config.rerankers:
            config.rerank.base = "bm25"
    with pytest.raises(InputError, match=message):
        evaluate.run(config, tmp_path / "private" / "out")
    assert not (tmp_path / "private" / "out").exists()
    assert not (tmp_path / "private" / "private_reads.jsonl").exists()


def _bad(base, **changes):
    config = evaluate.default_config()
    config.data = str(base / "pairs")
    with config.unlocked():
        for name, value in changes.items():
            config[name] = value
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"systems": {"mine": ""}}, "systems.mine is ''. Give it the directory"),
        ({"systems": {"mine": "/no/such"}}, "/no/such is not a finished stage"),
        ({"systems": {"a/b": "bm25"}}, "a system is called 'a/b'"),
        ({"systems": {}}, "systems and synthetic are empty"),
        ({"systems": {"a": "{base}/a"}}, "vocabulary is '', but system 'a' needs"),
        ({"baseline": "else"}, "baseline is 'else', which is none of"),
        ({"k": 5}, "'ndcg@10' needs more documents than the 5"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"resamples": 0}, "resamples is 0"),
        ({"index": "faiss"}, "index is 'faiss'; choose one of"),
        ({"split": "tets"}, "tets.tsv: missing. The splits here are: dev, test"),
        ({"synthetic": {"s": ""}}, "synthetic.s is '', which holds no set of queries"),
        ({"synthetic": {"s": "{base}/pairs"}}, "synthetic.s is .*pairs', which holds"),
    ],
)
def test_bad_settings_are_named_before_anything_is_read(
    base, tmp_path, monkeypatch, changes, message
):
    changes = dict(changes)
    for field in ("systems", "synthetic"):
        if field in changes:
            items = changes[field].items()
            changes[field] = {n: p.replace("{base}", str(base)) for n, p in items}
    if "a" in changes.get("systems", {}):
        monkeypatch.setattr(evaluate.workdir, "stage_fingerprint", str)
    with pytest.raises(InputError, match=message):
        evaluate.run(_bad(base, **changes), tmp_path / "private" / "out")
    assert not (tmp_path / "private" / "private_reads.jsonl").exists()
    assert not (tmp_path / "private" / "out").exists()


def test_a_corpus_too_small_for_a_tree_is_named_before_any_search(
    base, tmp_path, monkeypatch
):
    monkeypatch.setattr(evaluate.workdir, "stage_fingerprint", str)
    monkeypatch.setattr(retrieval, "retrieve", None)
    _tiny.write_pairs(tmp_path / "pairs", train=5, dev=5, test=5)
    config = _bad(base, systems={"a": str(base / "a")}, index=systems.TREE)
    config.data, config.vocabulary = str(tmp_path / "pairs"), str(base / "spiece.model")
    with pytest.raises(InputError, match="^index is 'scann', but 15 documents are"):
        evaluate.run(config, tmp_path / "private" / "out")
    assert not (tmp_path / "private" / "private_reads.jsonl").exists()
    # BM25 alone has no tree.
    found = systems.Systems({"words": "bm25"}, "", systems.TREE, 1, "float32")
    found.require_documents(1)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("qrels/test.tsv", "q72\tgone\t1\n", r"test.tsv:14: document 'gone' is not in"),
        ("qrels/test.tsv", "gone\td1\t1\n", r"test.tsv:14: query 'gone' is not in"),
        ("qrels/test.tsv", "q72\td1\t0.5\n", r"test.tsv:14: the score is '0.5'"),
        ("qrels/test.tsv", "q72\td1\t1795473938\n", r"14: .* relevant, at most 1,000,"),
        ("qrels/test.tsv", "q72\td72\t1\n", r"test.tsv:14: .* judged on an earlier"),
        ("corpus.jsonl", '{"_id": "d0", "text": "x"}\n', r"corpus.jsonl:85: id 'd0'"),
    ],
)
def test_wrong_judgements_are_named_before_any_search(
    base, tmp_path, monkeypatch, file, change, message
):
    """A document that is not there would else count as one that was not found."""
    pairs = tmp_path / "pairs"
    shutil.copytree(base / "pairs", pairs)
    with (pairs / file).open("a") as file:
        file.write(change)
    monkeypatch.setattr(retrieval, "retrieve", None)
    config = _bad(base, data=str(pairs))
    with pytest.raises(DataError, match=message):
        evaluate.run(config, tmp_path / "private" / "out")
    assert not (tmp_path / "private" / "private_reads.jsonl").exists()

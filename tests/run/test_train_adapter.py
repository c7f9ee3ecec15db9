"""A map of query embeddings, trained on private pairs for a foreign encoder."""

import functools
import hashlib
import json
import math
import operator
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.retriever import DocumentIndex
from tfdpsq.run import encode, evaluate, mine, pipeline, train_adapter
from tfdpsq.run.core import layout, sources, spending
from tfdpsq.run.training import hard_negatives, private_training
from tfdpsq.validation import DataError, InputError

_WIDTH = 8


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, and embeddings of their documents and queries by a foreign encoder."""
    base = tmp_path_factory.mktemp("adapter")
    tiny.write_start(base)
    tiny.write_embedded(base / "embedded")
    return base


def _settings(base, **changes):
    embedded = str(base / "embedded")
    return {
        "pairs": str(base / "pairs"),
        "documents": embedded,
        "queries": embedded,
        "encoder_is_public": True,
        "n_is_public": True,
        "accountant": "rdp",
        "microbatch_size": 16,
        **changes,
    }


def _trained(base, out, **changes):
    config = train_adapter.default_config()
    mined = changes.pop("mined", None)
    config.update(_settings(base, **changes))
    if mined:
        config.hard_negatives.update(mined)
    train_adapter.run(config, out)
    return np.load(out / layout.ADAPTER_FILE)


def _oracle(base, negatives, hard=lambda query: ()):
    """The mean gradient of the loss at the identity: float64, one row after another."""
    documents, queries = (v.astype(np.float64) for v in tiny.vectors())
    matrix = tf.Variable(np.eye(_WIDTH))
    rows = []
    with tf.GradientTape() as tape:
        for pair in BeirDirectory(base / "pairs").pairs("train"):
            own = int(pair.document_id[1:])
            others = [n for n in negatives if n != own]
            others += [int(name[1:]) for name in hard(pair.query_id)]
            asked = tf.linalg.matvec(matrix, queries[int(pair.query_id[1:])], True)
            asked /= tf.norm(asked)
            scores = [
                20.0
                * tf.reduce_sum(asked * documents[n] / np.linalg.norm(documents[n]))
                for n in (own, *others)
            ]
            rows.append(tf.reduce_logsumexp(scores) - scores[0])
        loss = tf.reduce_mean(rows)
    return tape.gradient(loss, matrix).numpy()


def test_one_step_is_that_of_a_float64_oracle(base, tmp_path):
    """All pairs, all documents as negatives, each row's hard ones, rate 0.1."""
    config = tiny.config(mine, pairs=str(base / "pairs"), k=20)
    mine.run(config, tmp_path / "private" / "mined")
    run = str(tmp_path / "private" / "mined")
    found = _trained(
        base,
        tmp_path / "private" / "one",
        epsilon=math.inf,
        sampling_probability=1.0,
        steps=1,
        learning_rate=0.1,
        mined={"run": run, "count": 3},
    )
    own = train_adapter.default_config().hard_negatives
    own.update(run=run, count=3)
    source = sources.load_source(str(base / "pairs"), "train")
    table = hard_negatives.NegativeTable(own, source)
    texts = {d.id: d.content for d in BeirDirectory(base / "pairs").documents()}
    for pair in source.read():
        names = table.ids(pair.query_id)
        assert [texts[name] for name in names] == table.texts(pair.query_id)
        assert len(names) == 3 and pair.document_id not in names
    gradient = _oracle(base, range(84), table.ids)
    np.testing.assert_allclose(found, np.eye(_WIDTH) - 0.1 * gradient, atol=2e-6)
    assert np.abs(gradient - _oracle(base, range(84))).max() > 1e-2


@pytest.mark.parametrize("unit", ["query", "pair", "user"])
def test_one_unit_moves_the_step_by_the_clip_norm(unit, tmp_path):
    """At epsilon 300 and a small clip norm, every row is cut, and noise is little."""
    tiny.write_start(tmp_path)
    documents, queries = tiny.vectors()
    tiny.write_embeddings(
        tmp_path / "embedded", "documents", documents, [f"d{i}" for i in range(84)]
    )
    tiny.write_embeddings(
        tmp_path / "embedded", "queries", queries, [f"q{i}" for i in range(84)]
    )
    path = tmp_path / "pairs" / "queries.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        number = int(row["_id"][1:])
        row["user_id"] = "busy" if number < 9 else f"u{number}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if unit == "pair":
        tiny.add_answers(tmp_path)
    options = {
        "unit": unit,
        "epsilon": 300.0,
        "clip_norm": 1e-3,
        "steps": 1,
        "learning_rate": 1.0,
        "sampling_probability": 1.0,
        "n_is_public": False,
        "n_bound": 64,
        "rows_per_unit": 9 if unit == "user" else 1,
        "microbatch_size": 18,
    }
    whole = _trained(tmp_path, tmp_path / "release" / "whole", **options)
    qrels = tmp_path / "pairs" / "qrels" / "train.tsv"
    lines = qrels.read_text().splitlines(keepends=True)
    gone = tuple(f"q{n}\t" for n in (range(9) if unit == "user" else [5]))
    kept = [line for line in lines if not line.startswith(gone)]
    if unit == "pair":  # of a query's two pairs, one
        kept = [line for line in lines if line != "q5\td6\t1\n"]
    assert len(kept) < len(lines)
    qrels.write_text("".join(kept))
    less = _trained(tmp_path, tmp_path / "release" / "less", **options)
    stated = [
        read_certificate(tmp_path / "release" / name) for name in ("whole", "less")
    ]
    # What they state of the log is what was declared; the weights have their noise.
    assert len({each["training"].pop("weights") for each in stated}) == 2
    for name in ("spec", "sampler", "mechanism", "accounting", "training"):
        assert stated[0][name] == stated[1][name], name
    moved = 64 * np.linalg.norm(whole - less) / 1e-3  # in clip norms
    noise = stated[0]["mechanism"]["noise_multiplier"] * math.sqrt(2) * _WIDTH
    assert moved == pytest.approx(1.0, abs=2 * noise) and noise < 0.6, (moved, noise)


def _scores(base, out, changes=None, **systems):
    config = evaluate.default_config()
    config.data = str(base / "pairs")
    embedded = str(base / "embedded")
    config.systems = {"bm25": "bm25", **systems}
    config.indexes = dict.fromkeys(systems, embedded)
    config.query_embeddings = dict.fromkeys(systems, embedded)
    config.fusion.base = "bm25"
    config.baseline = next(iter(systems))
    config.resamples = 200
    config.update(changes or {})
    evaluate.run(config, out)
    return json.loads((out / layout.METRICS_FILE).read_text())


def test_learns_the_rotation_and_is_searched_by_the_command(base, tmp_path):
    """By the command line, with epsilon and without; scores from a plain search."""
    out = tmp_path / "release" / "eps8"
    flags = _settings(base, steps=30, learning_rate=0.5)
    words = [f"--config.{key}={value}" for key, value in flags.items()]
    command = [sys.executable, "-m", "tfdpsq.run.train_adapter", f"--workdir={out}"]
    done = subprocess.run([*command, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _trained(base, tmp_path / "private" / "inf", **{**flags, "epsilon": math.inf})
    trained = {"eps8": str(out), "inf": str(tmp_path / "private" / "inf")}
    metrics = _scores(
        base, tmp_path / "private" / "found", public="embeddings", **trained
    )
    values = {n: v["ndcg@10"] for n, v in metrics["systems"].items()}
    assert values["inf"] > 0.9 > 0.3 > values["public"]
    assert metrics["systems"]["inf"]["difference_to_baseline"]["low"] > 0.3
    assert set(metrics["fused"]) == {"public", "eps8", "inf"}
    # A naive search by the matrix that was written.
    matrix = np.load(tmp_path / "private" / "inf" / layout.ADAPTER_FILE)
    documents, queries = (v.astype(np.float64) for v in tiny.vectors())
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    gains = []
    for query in range(72, 84):
        asked = queries[query] @ matrix
        scores = documents @ (asked / np.linalg.norm(asked))
        rank = int((scores > scores[query]).sum())
        gains.append(1 / math.log2(2 + rank) if rank < 10 else 0.0)
    assert values["inf"] == pytest.approx(np.mean(gains), abs=1e-6)
    certificate = read_certificate(tmp_path / "release" / "eps8")
    assert verify_certificate(certificate).problems == ()
    assert certificate["guarantee"]["epsilon"] <= 8.0
    assert certificate["training"]["encoder"] == "a public encoder"
    assert certificate["training"]["encoder_is_public"] == "declared"
    assert certificate["fingerprints"]["queries"].startswith("keyed:")
    assert read_certificate(tmp_path / "private" / "inf")["private"] is False


def test_systems_have_a_baseline_and_a_weight_of_their_own(base, tmp_path):
    """Against a comparison and a fusion of the runs that were written."""
    turned, half = (tmp_path / "private" / name for name in ("turned", "half"))
    for out, steps, rate in ((turned, 30, 0.5), (half, 3, 0.1)):
        options = {"epsilon": math.inf, "learning_rate": rate, "steps": steps}
        _trained(base, out, **options)
    changes = {
        "baselines": {"turned": "half", "half": ""},
        "fusion": {"weights": {"turned": 0.8, "half": 1.0}},
    }
    out, systems = tmp_path / "private" / "found", {"public": "embeddings"}
    systems.update(half=str(half), turned=str(turned))
    metrics = _scores(base, out, changes, **systems)
    qrels = evaluation.read_trec_qrels(out / layout.QRELS_FILE)
    runs = {
        name: evaluation.read_trec_run(out / "runs" / f"{name}.trec")
        for name in ("bm25", "public", "half", "turned")
    }

    def compared(one, other):
        found = (
            evaluation.evaluate_run(qrels, run, ["ndcg@10"]).values("ndcg@10")
            for run in (one, other)
        )
        return np.subtract(*found).mean()

    def fused(name, weight):
        both = [runs["bm25"], runs[name]]
        return evaluation.fuse(both, [1 - weight, weight], "scores", 100)

    alone, together = metrics["systems"], metrics["fused"]
    assert "difference_to_baseline" not in alone["half"]
    assert "difference_to_baseline" not in together["half"]
    found = alone["turned"]["difference_to_baseline"]["difference"]
    assert found == pytest.approx(compared(runs["turned"], runs["half"])) and found
    of_public = compared(runs["turned"], runs["public"])
    assert abs(found - of_public) > 1e-3
    found = together["turned"]["difference_to_baseline"]["difference"]
    expected = compared(fused("turned", 0.8), fused("half", 1.0))
    assert found == pytest.approx(expected) and expected
    weights = {name: values["weight"] for name, values in together.items()}
    assert weights == {"public": 0.3, "half": 1.0, "turned": 0.8}


@pytest.mark.parametrize(
    "epsilon, rate, steps", [(8.0, 2.0, 40), (math.inf, 0.3, 80)], ids=["eps8", "inf"]
)
def test_rate_and_steps_are_those_of_the_epsilon(base, tmp_path, epsilon, rate, steps):
    """Clipped gradients are shorter; without a ledger's price steps are free."""
    out = tmp_path / "private" / "default"
    _trained(base, out, epsilon=epsilon)
    certificate = read_certificate(out)
    assert certificate["accounting"]["steps_executed"] == steps
    assert certificate["training"]["learning_rate"] == rate


def test_a_job_refuses_embeddings_before_its_first_stage(base, tmp_path):
    """Each is refused by `pipeline.open_job`, and no workdir is made."""

    def refused(match, embedded="embedded", **changes):
        config = tiny.tiny_config(base / "pairs", base / embedded)
        for name, value in changes.items():
            *settings, key = name.split("__")
            functools.reduce(operator.getitem, settings, config)[key] = value
        with pytest.raises(InputError, match=match):
            pipeline.open_job(config, tmp_path / "work")
        assert not (tmp_path / "work").exists()

    refused("^adapter_epsilons is .*only where embeddings is set", embeddings="")
    refused("^adapter.*, which does nothing", adapter_epsilons=())
    refused("^in embeddings, .*no directory 'documents'", "nowhere")
    refused("in embeddings, .*Set encoder_is_public", adapter__encoder_is_public=False)
    refused(r"adapter_epsilons\[0\] is -1.0", adapter_epsilons=(-1.0,))
    refused("of `adapter`: .*n_is_public", adapter__n_is_public=False)
    refused("mine.strict is True", mine__strict=True)
    refused("none would be left. Raise mine.k", mine__k=1)
    refused("both 'test': adapters would be", adapter__split="test")
    refused("indexes.encoder is .*yet to train", evaluate__indexes={"encoder": "x"})
    free = _public(base, tmp_path)
    refused("fit is .*, and query_embeddings", evaluate__fusion__fit=free)
    refused("weights.a is 0.5, but no", evaluate__fusion__weights={"a": 0.5})
    # Texts of the test split count, too: it is searched last.
    shutil.copytree(base / "embedded" / "documents", base / "fewer" / "documents")
    _, queries = tiny.vectors()
    ids = [f"q{i}" for i in range(83)]
    tiny.write_embeddings(base / "fewer", "queries", queries[:83], ids)
    refused("no embedding of 'q83'", "fewer")
    with spending.limited(8.0, (), tmp_path / "work"):
        refused("and adapter_eps8", audit_epsilons=())
        refused("and adapter_eps8_5", audit_epsilons=(), adapter_epsilons=(8.5,))


def test_embeddings_of_our_own_encoder_need_no_declaration(base, tmp_path):
    """`encode` wrote both; a matrix trained on them is searched among them."""
    tiny.write_retriever(tmp_path / "retriever", base)

    queries = {"texts": "queries", "split": "train"}
    both = {
        "documents": _encoded(base, tmp_path, "documents"),
        "queries": _encoded(base, tmp_path, "queries", **queries),
    }
    options = {"encoder_is_public": False, "steps": 2, **both}
    matrix = _trained(base, tmp_path / "release" / "own", **options)
    assert matrix.shape == (16, 16) and not np.array_equal(matrix, np.eye(16))
    certificate = read_certificate(tmp_path / "release" / "own")
    assert certificate["training"]["encoder"].startswith("the retriever ")
    foreign = {**options, "documents": str(base / "embedded")}
    with pytest.raises(InputError, match="they are not by one encoder"):
        _trained(base, tmp_path / "release" / "other", **foreign)


def _public(base, tmp_path):
    shutil.copytree(base / "pairs", tmp_path / "free" / "pairs")
    return tiny.write_public_pairs(tmp_path / "free")


def _refused(base, tmp_path, match, error=InputError, **changes):
    """No step is paid for, and nothing is written where it would be released."""
    with pytest.raises(error, match=match):
        _trained(base, tmp_path / "release" / "refused", **changes)
    assert not list((tmp_path / "release").glob("*"))
    assert not list((tmp_path / "private").rglob("ledger*"))


def test_refuses_what_its_guarantee_would_not_hold_for(base, tmp_path):
    _refused(base, tmp_path, "Set encoder_is_public", encoder_is_public=False)
    documents, queries = tiny.vectors()
    ids = [f"d{i}" for i in range(84)]
    # Only documents that private pairs have: drawn negatives would tell of them.
    tiny.write_embeddings(tmp_path / "some", "documents", documents[:60], ids[:60])
    _refused(base, tmp_path, "no embedding of 'd60'", documents=str(tmp_path / "some"))
    more = np.concatenate([documents, documents[:1]])
    tiny.write_embeddings(tmp_path / "more", "documents", more, [*ids, "x"])
    said = "with 85 embeddings, but .* has 84 documents"
    _refused(base, tmp_path, said, documents=str(tmp_path / "more"))
    tiny.write_embeddings(
        tmp_path / "few", "queries", queries[:59], [f"q{i}" for i in range(59)]
    )
    _refused(base, tmp_path, "no embedding of 'q59'", queries=str(tmp_path / "few"))
    tiny.write_embeddings(
        tmp_path / "wide", "queries", np.ones([84, 9], np.float32), ids
    )
    _refused(
        base,
        tmp_path,
        "8 dimensions. and .*9 dimensions.: they are not",
        queries=str(tmp_path / "wide"),
    )
    mined = {"run": "judged"}
    _refused(base, tmp_path, "unit is 'pair' and hard", unit="pair", mined=mined)
    # Its ids are the same; the embeddings are of the pairs' own documents.
    shutil.copytree(base / "pairs", tmp_path / "others")
    corpus = tmp_path / "others" / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("This function", "That method"))
    elsewhere = {**mined, "corpus": str(tmp_path / "others")}
    _refused(base, tmp_path, "hard_negatives.corpus is .*others", mined=elsewhere)
    _refused(base, tmp_path, "which has no directory 'documents'", documents="")
    free = _public(base, tmp_path)
    _refused(base, tmp_path, "a synthetic or public set", pairs=free)
    tiny.write_embeddings(tmp_path / "loose", "documents", documents, ids)
    stage = {**tiny.STAGE, "guarantee": "private"}
    (tmp_path / "loose" / "stage.json").write_text(json.dumps(stage))
    said = "its guarantee is 'private'"
    _refused(base, tmp_path, said, documents=str(tmp_path / "loose"))
    zeros = np.zeros([84, _WIDTH], np.float32)
    tiny.write_embeddings(tmp_path / "zeros", "documents", zeros, ids)
    _refused(base, tmp_path, "are all zeros", documents=str(tmp_path / "zeros"))


def _encoded(base, tmp_path, name, retriever="retriever", **changes):
    config = encode.default_config()
    config.update(
        retriever=str(tmp_path / retriever),
        vocabulary=str(base / "spiece.model"),
        **{"corpus": str(base / "pairs"), **changes},
    )
    encode.run(config, tmp_path / "private" / name)
    return str(tmp_path / "private" / name)


def test_queries_by_another_encoder_than_the_documents_are_refused(base, tmp_path):
    """The certificate would state a public encoder, and theirs may know the pairs."""
    documents, queries = tiny.vectors()
    ids = [f"q{i}" for i in range(84)]
    tiny.write_embeddings(
        tmp_path / "other", "queries", queries, ids, "one that saw the pairs"
    )
    said = "'a public encoder' .8 dim.* 'one that saw the pairs' .8 dim"
    _refused(base, tmp_path, said, queries=str(tmp_path / "other"))
    for name in ("retriever", "second"):
        tiny.write_retriever(tmp_path / name, base, seed=len(name))
    ours = _encoded(base, tmp_path, "ours")
    theirs = {"texts": "queries", "split": "train", "retriever": "second"}
    theirs = _encoded(base, tmp_path, "theirs", **theirs)
    both = {"documents": ours, "encoder_is_public": False}
    said = "they are not by one encoder"
    _refused(base, tmp_path, said, queries=theirs, **both)
    # Put next to what `encode` made of the documents, they are not its own.
    shutil.copytree(pathlib.Path(theirs) / "queries", pathlib.Path(ours) / "queries")
    _refused(base, tmp_path, said, queries=ours, **both)


def test_copies_and_links_of_our_own_embeddings_say_where_they_are_from(base, tmp_path):
    tiny.write_retriever(tmp_path / "retriever", base)
    ours = pathlib.Path(_encoded(base, tmp_path, "ours")) / "documents"
    width = DocumentIndex(ours).width
    ids = [f"q{i}" for i in range(84)]
    encoder = DocumentIndex(ours).encoder
    for place in ("copied", "linked"):
        (tmp_path / place).mkdir()
        tiny.write_embeddings(
            tmp_path / place, "queries", np.ones([84, width], "f4"), ids, encoder
        )
    shutil.copytree(ours, tmp_path / "copied" / "documents")
    both = dict.fromkeys(("documents", "queries"), str(tmp_path / "copied"))
    _refused(base, tmp_path, "without the stage.json", **both)
    # Of a retriever that private queries had a part in.
    stage = json.loads((ours.parent / "stage.json").read_text())
    stage["guarantee"] = "private"
    (ours.parent / "stage.json").write_text(json.dumps(stage))
    (tmp_path / "linked" / "documents").mkdir()
    for file in ours.iterdir():
        (tmp_path / "linked" / "documents" / file.name).symlink_to(file)
    both = dict.fromkeys(both, str(tmp_path / "linked"))
    _refused(base, tmp_path, "its guarantee is 'private'", **both)


def test_documents_of_another_corpus_are_refused(base, tmp_path):
    """Their ids are the same, and their texts others."""
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    corpus = tmp_path / "pairs" / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("This function", "That method"))
    tiny.write_retriever(tmp_path / "retriever", base)
    queries = {"texts": "queries", "split": "train"}
    both = {
        "documents": _encoded(base, tmp_path, "documents"),
        "queries": _encoded(base, tmp_path, "queries", **queries),
    }
    pairs = str(tmp_path / "pairs")
    _refused(base, tmp_path, "made of another corpus", pairs=pairs, **both)


def test_queries_of_another_log_are_refused(base, tmp_path):
    """Their ids are the same, so their cost would be counted for this one."""
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    texts = tmp_path / "pairs" / "queries.jsonl"
    texts.write_text(texts.read_text().replace("who ", "what "))
    tiny.write_retriever(tmp_path / "retriever", base)
    asked = {"texts": "queries", "corpus": str(tmp_path / "pairs")}
    other = _encoded(base, tmp_path, "other", **asked, split="train")
    both = {"documents": _encoded(base, tmp_path, "documents"), "queries": other}
    said = "not made of the queries of split 'train'"
    _refused(base, tmp_path, said, **both, encoder_is_public=False)
    config = evaluate.default_config()
    config.data, config.systems = str(base / "pairs"), {"a": "embeddings"}
    config.indexes = {"a": both["documents"]}
    other = _encoded(base, tmp_path, "found", **asked, split="test")
    config.query_embeddings = {"a": other}
    with pytest.raises(InputError, match="not made of the queries of split 'test'"):
        evaluate.run(config, tmp_path / "private" / "evaluation")
    asked["corpus"] = str(base / "pairs")
    right = _encoded(base, tmp_path, "right", **asked, split="test")
    config.query_embeddings = {"a": right}
    evaluate.run(config, tmp_path / "private" / "evaluation")


def test_indexes_that_a_certificate_or_a_search_would_choke_on(base, tmp_path):
    documents, _ = tiny.vectors()
    for bad in (384, None, "", "x" * 201):
        with pytest.raises(InputError, match="Give its name as text"):
            DocumentIndex.create(tmp_path / "bad", bad, 8)
    index = DocumentIndex.create(tmp_path / "bad" / "documents", "named", 8)
    for ids in ([0, 1], ["a", chr(0xD800)]):
        with pytest.raises(InputError, match="is not text. Give ids as strings"):
            index.add(ids, documents[:2])
    ids = [f"d{i}" for i in range(84)]
    for field, value in (("encoder", 384), ("width", 8.0), ("width", True)):
        place = tmp_path / f"{field}-{value}"
        tiny.write_embeddings(place, "documents", documents, ids)
        file = place / "documents" / "index.json"
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, field: value}))
        _refused(base, tmp_path, "no index .an? ", DataError, documents=str(place))
    place = tmp_path / "twice"
    tiny.write_embeddings(place, "documents", documents, ids)
    texts = "".join(json.dumps(name) + "\n" for name in ["d1", *ids[1:42]])
    (place / "documents" / "shard-00000.jsonl").write_text(texts)
    file = place / "documents" / "index.json"
    content = json.loads(file.read_text())
    content["shards"][0]["ids_sha256"] = hashlib.sha256(texts.encode()).hexdigest()
    file.write_text(json.dumps(content))
    _refused(base, tmp_path, "an id comes twice", DataError, documents=str(place))


def test_embeddings_of_a_certified_encoder_are_not_free(base, tmp_path):
    _trained(base, tmp_path / "release" / "made", steps=1)
    certificate = tmp_path / "release" / "made" / "certificate.json"
    documents, _ = tiny.vectors()
    place = tmp_path / "embedded"
    tiny.write_embeddings(place, "documents", documents, [f"d{i}" for i in range(84)])
    (place / "certificate.json").write_bytes(certificate.read_bytes())
    with pytest.raises(InputError, match="which carries a certificate"):
        _trained(base, tmp_path / "release" / "next", documents=str(place))


def test_what_was_read_and_spent_before_counts(base, tmp_path):
    """Metrics of an adapter are read; a second one must fit what is left."""
    _trained(base, tmp_path / "release" / "first", steps=1, strict=True)
    assert read_certificate(tmp_path / "release" / "first")["private_reads"] == []
    log = tmp_path / "private" / "logs" / "first" / "log.jsonl"
    assert "loss" not in json.loads(log.read_text().splitlines()[-1])
    first = str(tmp_path / "release" / "first")
    _scores(base, tmp_path / "private" / "found", first=first)
    with spending.limited(9.0, [], tmp_path / "release" / "second"):
        with pytest.raises(InputError, match="the budget is epsilon 9"):
            _trained(base, tmp_path / "release" / "second", steps=1)
        _trained(base, tmp_path / "release" / "second", steps=1, epsilon=0.5)
    reads = read_certificate(tmp_path / "release" / "second")["private_reads"]
    assert [read["what"] for read in reads] == [
        "the queries and judgements of split 'test'",
        private_training.LOSS_READ["what"],
    ]


def test_damaged_embeddings_are_found_before_a_step_is_paid(base, tmp_path):
    documents, _ = tiny.vectors()
    place = tmp_path / "embedded"
    tiny.write_embeddings(place, "documents", documents, [f"d{i}" for i in range(84)])
    file = place / "documents" / "shard-00001.npy"
    vectors = np.load(file)
    vectors[0, 0] += 1
    np.save(file, vectors)
    _refused(base, tmp_path, "holds other embeddings", DataError, documents=str(place))


def test_evaluate_refuses_what_is_no_system_of_embeddings(base, tmp_path):
    place = tmp_path / "private" / "found"
    embedded = str(base / "embedded")
    made = str(tmp_path / "private" / "made")
    _trained(base, pathlib.Path(made), epsilon=math.inf, steps=1)

    def refused(match, error=InputError, **changes):
        config = evaluate.default_config()
        config.data = str(base / "pairs")
        config.systems = {"a": made}
        config.indexes = config.query_embeddings = {"a": embedded}
        config.update(changes)
        with pytest.raises(error, match=match):
            evaluate.run(config, place)
        assert not place.exists()

    refused("query_embeddings.b is .*no 'b'", query_embeddings={"b": embedded})
    refused("not a finished stage", systems={"a": embedded})
    refused("indexes.a is ''", indexes={"a": ""})
    refused("index is 'scann'", index="scann")
    refused("fit is 'x', and query_embeddings", fusion={"fit": "x", "base": "a"})
    config = {"systems": {"a": "embeddings"}, "query_embeddings": {}}
    with pytest.raises(InputError, match="query_embeddings.a is not set"):
        own = evaluate.default_config()
        own.systems = config["systems"]
        evaluate.run(own, place)
    wide = tmp_path / "wide"
    for texts, letter in (("documents", "d"), ("queries", "q")):
        ids = [f"{letter}{i}" for i in range(84)]
        tiny.write_embeddings(wide, texts, np.ones([84, 9], np.float32), ids)
    both = {"indexes": {"a": str(wide)}, "query_embeddings": {"a": str(wide)}}
    refused("of 8 dimensions, but indexes.a are by .* of 9. Give", **both)
    other = tmp_path / "other"
    for texts, letter in (("documents", "d"), ("queries", "q")):
        ids = [f"{letter}{i}" for i in range(84)]
        tiny.write_embeddings(
            other, texts, np.ones([84, 8], np.float32), ids, "another encoder"
        )
    both = {"indexes": {"a": str(other)}, "query_embeddings": {"a": str(other)}}
    refused("by 'a public encoder' of 8 .* by 'another encoder'", **both)
    file = pathlib.Path(made) / layout.ADAPTER_FILE
    with open(file, "wb") as archive:
        np.savez(archive, np.eye(8))
    refused("holds no array but an archive", DataError)
    np.save(file, np.ones([8, 7], np.float32))
    refused("not a square matrix of float32", DataError)
    file.unlink()
    refused("holds no adapter.npy")

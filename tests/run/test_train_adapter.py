"""A map of query embeddings, trained on private pairs for a foreign encoder."""

import functools
import json
import math
import operator
import shutil
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import forking, killing, tiny

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.run import encode, evaluate, mine, pipeline, train_adapter
from tfdpsq.run.core import layout, sources
from tfdpsq.run.training import hard_negatives, private_training
from tfdpsq.validation import DataError, InputError

_WIDTH = 8
_IDS = {letter: [f"{letter}{i}" for i in range(84)] for letter in "dq"}


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


def test_one_step_equals_a_float64_oracle(base, tmp_path):
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


def _scores(base, out, changes=(), **systems):
    config = evaluate.default_config()
    config.data = str(base / "pairs")
    embedded = str(base / "embedded")
    config.systems = {"bm25": "bm25", **systems}
    config.indexes = dict.fromkeys(systems, embedded)
    config.query_embeddings = dict.fromkeys(systems, embedded)
    config.fusion.base = "bm25"
    config.baseline = next(iter(systems))
    config.resamples = 200
    config.update(dict(changes))
    evaluate.run(config, out)
    return json.loads((out / layout.METRICS_FILE).read_text())


@pytest.fixture(scope="module")
def found(base, tmp_path_factory):
    """Adapters with epsilon, by the command line, and without, and their scores."""
    place = tmp_path_factory.mktemp("found")
    out = place / "release" / "eps8"
    flags = _settings(base, steps=30, learning_rate=0.5)
    words = [f"--config.{key}={value}" for key, value in flags.items()]
    command = [sys.executable, "-m", "tfdpsq.run.train_adapter", f"--workdir={out}"]
    done = forking.run([*command, *words], cwd=killing.ROOT)
    assert done.returncode == 0, done.stderr
    trained = {"eps8": str(out)}
    for name, steps, rate in (("inf", 30, 0.5), ("half", 3, 0.1)):
        options = {"epsilon": math.inf, "steps": steps, "learning_rate": rate}
        _trained(base, place / "private" / name, **options)
        trained[name] = str(place / "private" / name)
    changes = {
        "baselines": {"inf": "half", "half": ""},
        "fusion": {"weights": {"inf": 0.8, "half": 1.0}},
    }
    systems = {"public": "embeddings", **trained}
    scores = _scores(base, place / "private" / "found", changes, **systems)
    return place, scores


def test_rotation_is_learnt_and_searched_as_by_hand(found):
    place, metrics = found
    values = {n: v["ndcg@10"] for n, v in metrics["systems"].items()}
    assert values["inf"] > 0.9 > 0.3 > values["public"]
    # A naive search by the matrix that was written.
    matrix = np.load(place / "private" / "inf" / layout.ADAPTER_FILE)
    documents, queries = (v.astype(np.float64) for v in tiny.vectors())
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    gains = []
    for query in range(72, 84):
        asked = queries[query] @ matrix
        scores = documents @ (asked / np.linalg.norm(asked))
        rank = int((scores > scores[query]).sum())
        gains.append(1 / math.log2(2 + rank) if rank < 10 else 0.0)
    assert values["inf"] == pytest.approx(np.mean(gains), abs=1e-6)


def test_certificate_names_the_encoder_and_keys_its_fingerprints(found):
    place, _ = found
    certificate = read_certificate(place / "release" / "eps8")
    assert verify_certificate(certificate).problems == ()
    assert certificate["guarantee"]["epsilon"] <= 8.0
    assert certificate["training"]["encoder"] == "a public encoder"
    assert certificate["training"]["encoder_is_public"] == "declared"
    assert certificate["fingerprints"]["queries"].startswith("keyed:")
    assert read_certificate(place / "private" / "inf")["private"] is False


def test_each_system_has_its_baseline_and_its_fusion_weight(found):
    """Against a comparison and a fusion of the runs that were written."""
    place, metrics = found
    out = place / "private" / "found"
    qrels = evaluation.read_trec_qrels(out / layout.QRELS_FILE)
    runs = {
        name: evaluation.read_trec_run(out / "runs" / f"{name}.trec")
        for name in ("bm25", "half", "inf")
    }

    def compared(one, other):
        values = (
            evaluation.evaluate_run(qrels, run, ["ndcg@10"]).values("ndcg@10")
            for run in (one, other)
        )
        return np.subtract(*values).mean()

    def fused(name, weight):
        both = [runs["bm25"], runs[name]]
        return evaluation.fuse(both, [1 - weight, weight], "scores", 100)

    alone, together = metrics["systems"], metrics["fused"]
    assert "difference_to_baseline" not in alone["half"]
    difference = alone["inf"]["difference_to_baseline"]["difference"]
    assert difference == pytest.approx(compared(runs["inf"], runs["half"]))
    assert difference
    difference = together["inf"]["difference_to_baseline"]["difference"]
    expected = compared(fused("inf", 0.8), fused("half", 1.0))
    assert difference == pytest.approx(expected) and expected
    weights = {name: values["weight"] for name, values in together.items()}
    assert weights == {"public": 0.3, "eps8": 0.3, "inf": 0.8, "half": 1.0}


def test_job_refuses_embeddings_before_its_first_stage(base, tmp_path):
    def refused(match, embedded="embedded", **changes):
        config = tiny.tiny_config(base / "pairs", base / embedded)
        for name, value in changes.items():
            *settings, key = name.split("__")
            functools.reduce(operator.getitem, settings, config)[key] = value
        with pytest.raises(InputError, match=match):
            pipeline.open_job(config, tmp_path / "work")
        assert not (tmp_path / "work").exists()

    refused("^adapter_epsilons is .*only where embeddings is set", embeddings="")
    refused("in embeddings, .*Set encoder_is_public", adapter__encoder_is_public=False)
    # Texts of the test split count, too: it is searched last.
    shutil.copytree(base / "embedded" / "documents", base / "fewer" / "documents")
    _, queries = tiny.vectors()
    tiny.write_embeddings(base / "fewer", "queries", queries[:83], _IDS["q"][:83])
    refused("no embedding of 'q83'", "fewer")


# -- Refused before a step is paid ----------------------------------------------------


def _refused(base, tmp_path, match, error=InputError, **changes):
    """No step is paid for, and nothing is written where it would be released."""
    with pytest.raises(error, match=match):
        _trained(base, tmp_path / "release" / "refused", **changes)
    assert not list((tmp_path / "release").glob("*"))
    assert not list((tmp_path / "private").rglob("ledger*"))


def test_inputs_outside_the_guarantee_are_refused(base, tmp_path):
    _refused(base, tmp_path, "Set encoder_is_public", encoder_is_public=False)
    documents, queries = tiny.vectors()

    def wrong(name, texts, vectors, ids, match, error=InputError):
        place = tmp_path / name
        tiny.write_embeddings(place, texts, vectors, ids)
        _refused(base, tmp_path, match, error, **{texts: str(place)})
        return place

    ids, asked = _IDS["d"], _IDS["q"]
    # Only documents that private pairs have: drawn negatives would tell of them.
    wrong("some", "documents", documents[:60], ids[:60], "no embedding of 'd60'")
    wrong("few", "queries", queries[:59], asked[:59], "no embedding of 'q59'")
    wide = np.ones([84, 9], np.float32)
    wrong("wide", "queries", wide, asked, "9 dimensions")
    wrong("zeros", "documents", 0 * documents, ids, "are all zeros")
    judged = {"run": "judged"}
    _refused(base, tmp_path, "unit is 'pair' and hard", unit="pair", mined=judged)
    shutil.copytree(base / "pairs", tmp_path / "free" / "pairs")
    free = tiny.write_public_pairs(tmp_path / "free")
    _refused(base, tmp_path, "a synthetic or public set", pairs=free)
    place = tmp_path / "loose"
    tiny.write_embeddings(place, "documents", documents, ids)
    stage = {**tiny.STAGE, "guarantee": "private"}
    (place / "stage.json").write_text(json.dumps(stage))
    said = "its guarantee is 'private'"
    _refused(base, tmp_path, said, documents=str(place))
    place = tmp_path / "damaged"
    tiny.write_embeddings(place, "documents", documents, ids)
    vectors = np.load(place / "documents" / "vectors.npy")
    np.save(place / "documents" / "vectors.npy", vectors[:80])
    said = "has 84 ids, not 80"
    _refused(base, tmp_path, said, DataError, documents=str(place))


def _encoded(base, tmp_path, name, **changes):
    config = encode.default_config()
    config.update(
        retriever=str(tmp_path / "retriever"),
        **{"corpus": str(base / "pairs"), **changes},
    )
    encode.run(config, tmp_path / "private" / name)
    return str(tmp_path / "private" / name)


def test_embeddings_of_our_own_encoder_are_known_by_their_lineage(base, tmp_path):
    """No declaration is needed, and other corpora, logs and encoders are noticed."""
    tiny.write_retriever(tmp_path / "retriever", base)
    both = {
        "encoder_is_public": False,
        "documents": _encoded(base, tmp_path, "documents"),
        "queries": _encoded(base, tmp_path, "queries", texts="queries", split="train"),
    }
    _refused(
        base,
        tmp_path,
        "they are not by one encoder",
        **{**both, "documents": str(base / "embedded")},
    )
    # The same ids, other texts.
    for file, old, match in (
        ("corpus.jsonl", "This function", "made of another corpus"),
        ("queries.jsonl", "who ", "not made of the queries of split 'train'"),
    ):
        pairs = shutil.copytree(base / "pairs", tmp_path / file)
        (pairs / file).write_text((pairs / file).read_text().replace(old, "Another "))
        _refused(base, tmp_path, match, **both, pairs=str(pairs))
    # A copy without its stage.json, of which nothing is known.
    copied = tmp_path / "copied"
    shutil.copytree(f"{both['documents']}/documents", copied / "documents")
    shutil.copytree(f"{both['queries']}/queries", copied / "queries")
    places = dict.fromkeys(("documents", "queries"), str(copied))
    _refused(base, tmp_path, "not by one encoder", **{**both, **places})
    matrix = _trained(base, tmp_path / "release" / "own", steps=2, **both)
    assert matrix.shape == (16, 16) and not np.array_equal(matrix, np.eye(16))
    certificate = read_certificate(tmp_path / "release" / "own")
    assert certificate["training"]["encoder"].startswith("the retriever ")


def test_certified_embeddings_are_not_free(base, found, tmp_path):
    documents, _ = tiny.vectors()
    place = tmp_path / "embedded"
    tiny.write_embeddings(place, "documents", documents, _IDS["d"])
    shutil.copy(found[0] / "release" / "eps8" / "certificate.json", place)
    _refused(base, tmp_path, "which carries a certificate", documents=str(place))


def test_metrics_of_an_adapter_are_reads_of_the_next(base, tmp_path):
    _trained(base, tmp_path / "release" / "first", steps=1, strict=True)
    assert read_certificate(tmp_path / "release" / "first")["private_reads"] == []
    log = tmp_path / "private" / "logs" / "first" / "log.jsonl"
    assert "loss" not in json.loads(log.read_text().splitlines()[-1])
    first = str(tmp_path / "release" / "first")
    _scores(base, tmp_path / "private" / "found", first=first)
    _trained(base, tmp_path / "release" / "second", steps=1)
    reads = read_certificate(tmp_path / "release" / "second")["private_reads"]
    assert [read["what"] for read in reads] == [
        "the queries and judgements of split 'test'",
        private_training.LOSS_READ["what"],
    ]


def test_evaluate_refuses_adapters_that_do_not_fit(base, tmp_path):
    made = tmp_path / "private" / "made"
    embedded = str(base / "embedded")
    _trained(base, made, epsilon=math.inf, steps=1)

    def refused(match, error=InputError, **changes):
        config = evaluate.default_config()
        config.data = str(base / "pairs")
        config.systems = {"a": str(made)}
        config.indexes = config.query_embeddings = {"a": embedded}
        config.update(changes)
        with pytest.raises(error, match=match):
            evaluate.run(config, tmp_path / "private" / "found")

    other = tmp_path / "other"
    for texts, letter in (("documents", "d"), ("queries", "q")):
        vectors = np.ones([84, 8], np.float32)
        tiny.write_embeddings(other, texts, vectors, _IDS[letter], "another encoder")
    both = {"indexes": {"a": str(other)}, "query_embeddings": {"a": str(other)}}
    refused("by 'a public encoder' of 8 .* by 'another encoder'", **both)
    np.save(made / layout.ADAPTER_FILE, np.ones([8, 7], np.float32))
    refused("not a square matrix of float32", DataError)

"""Synthetic queries against private ones, as `evaluate` compares and records them."""

import json

import numpy as np
import pytest
import tensorflow as tf
from helpers import framed
from helpers import tiny as _tiny
from keras_nlp import models

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory, Tokenizer
from tfdpsq.generator import checkpoints
from tfdpsq.run.common import similarity
from tfdpsq.run.stages.evaluate import METRICS_FILE, STAGE

# 60 training queries q0…, 12 of dev, 12 of test.
COPIED = 4


def _write_set(path, queries, first_document):
    rows = (
        (query, f"d{first_document + i}", f"It {i}.") for i, query in enumerate(queries)
    )
    _tiny.write_set(path, rows)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, a tiny T5, and two sets of synthetic queries.

    "near" is written for the documents of dev (d60 on), and holds training queries in
    capitals, then something like the documents' own queries; "apart" is written for
    training documents alone.
    """
    base = tmp_path_factory.mktemp("similarity")
    queries = _tiny.write_start(base, "1.1")
    near = [query.upper() for query in queries[:COPIED]]
    near += [query.replace("who", "someone") for query in queries[60 + COPIED : 80]]
    _write_set(base / "near", near, 60)
    _write_set(base / "apart", [f"send bytes {i}" for i in range(9)], 0)
    return base


def _run(base, directory, sets=("near", "apart"), strict=False, **settings):
    out = directory / "private" / "evaluation"
    framed.run(
        STAGE,
        out,
        data=str(base / "pairs"),
        resamples=100,
        synthetic={name: str(base / name) for name in sets},
        similarity={"init": str(base / "public"), **settings},
        strict=strict,
    )
    return json.loads((out / METRICS_FILE).read_text())["similarity"]


@pytest.fixture(scope="module")
def measured(base):
    return _run(base, base / "measured")


def test_bleu_is_of_the_queries_on_held_out_documents_alone(base, measured):
    near = measured["near"]
    # Of 20 documents, d60 to d79, the first twelve are of dev.
    assert near["queries"] == 12 and "tok:13a" in near["signature"]
    assert near["against"] == "private queries of split 'dev' on the same documents"
    dev = {p.document_id: p.query for p in BeirDirectory(base / "pairs").pairs("dev")}
    texts = _queries(base / "near")
    expected, _ = evaluation.corpus_bleu(
        texts[:12], [dev[f"d{60 + i}"] for i in range(12)]
    )
    assert near["bleu"] == pytest.approx(expected)
    assert near["bleu"] > 20
    # A set on other documents has none, and all the rest.
    apart = measured["apart"]
    assert (apart["bleu"], apart["queries"]) == (None, 0)
    assert apart["distinct"]["synthetic"]["1"] == (2 + 9) / 27


def _queries(path):
    return [
        json.loads(line)["text"]
        for line in (path / "beir" / "queries.jsonl").read_text().splitlines()
    ]


def test_mauve_is_of_equally_many_texts_by_the_given_t5(base, measured):
    pairs = BeirDirectory(base / "pairs").pairs("dev")
    features, drawn = similarity.load_features(str(base / "public")), {}
    for name, texts in (
        ("near", _queries(base / "near")),
        ("dev", [pair.query for pair in pairs]),
    ):
        order = np.random.default_rng(0).permutation(len(texts))[:12]
        drawn[name] = features([texts[i] for i in order])
    expected = evaluation.mauve_of_features(drawn["near"], drawn["dev"])
    found = measured["near"]["mauve"]
    assert found["scores"] == pytest.approx(expected.scores, abs=1e-6)
    assert (found["samples"], found["clusters"]) == ([12, 12], 2)
    assert found["mean"] == pytest.approx(expected.mean)


def test_features_are_the_mean_state_of_a_texts_own_tokens(base):
    """Whatever shares its batch."""
    texts = ["sorts the list", "", "a", "who reads a table and merges lists twice", "a"]
    init = str(base / "public")
    by_sizes = [similarity.load_features(init, size)(texts) for size in (3, 128)]
    np.testing.assert_array_equal(by_sizes[0][2], by_sizes[0][4])
    _, encoder = checkpoints.load_encoder(init)
    tokenizer = Tokenizer(f"{init}/spiece.model")
    for row, text in enumerate(texts):
        ids = tf.constant([[*tokenizer.pieces([text])[0], tokenizer.eos_id]], tf.int32)
        given = {"encoder_token_ids": ids, "encoder_padding_mask": tf.ones_like(ids)}
        expected = np.mean(encoder(given)[0].numpy().astype(np.float64), axis=0)
        for got in by_sizes:
            np.testing.assert_allclose(got[row], expected, atol=1e-5)


def test_features_of_gpt2_are_the_state_of_the_last_token(tmp_path):
    """MAUVE's authors take the last token's state; the preset is a directory."""
    shape = {"vocabulary_size": 5, "num_layers": 1, "num_heads": 2, "hidden_dim": 8}
    model = models.GPT2Backbone(**shape, intermediate_dim=16)
    for name, of, config in (
        ("config.json", "GPT2Backbone", model.get_config()),
        ("tokenizer.json", "GPT2Tokenizer", {"name": "t", "trainable": True}),
    ):
        kind = {"class_name": of, "registered_name": f"keras_nlp>{of}"}
        content = {"module": "keras_nlp.models", "config": config, **kind}
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "metadata.json").write_text('{"keras_version": "2.15.0"}')
    model.save_weights(tmp_path / "model.weights.h5")
    assets = tmp_path / "assets" / "tokenizer"
    assets.mkdir(parents=True)
    words = ["<|endoftext|>", "a", "b", "c", "ab"]
    vocabulary = {word: number for number, word in enumerate(words)}
    (assets / "vocabulary.json").write_text(json.dumps(vocabulary))
    (assets / "merges.txt").write_text("a b\n")
    features = similarity.load_features(str(tmp_path), 2)
    got = features(["abc", "cab", "c", "", "abc"])
    np.testing.assert_array_equal(got[0], got[4])
    for row, ids in enumerate(([4, 3], [3, 4], [3], [0])):
        given = {"token_ids": [ids], "padding_mask": [[1] * len(ids)]}
        given = {name: tf.constant(value) for name, value in given.items()}
        np.testing.assert_allclose(got[row], model(given)[0, -1], atol=1e-5)


def _control(base, places=range(12)):
    """Distances of dev queries to all training queries."""
    pairs = BeirDirectory(base / "pairs")
    training, dev = ([p.query for p in pairs.pairs(s)] for s in ("train", "dev"))
    vectors = map(evaluation.gram_vectors, ([dev[i] for i in places], training))
    return evaluation.nearest_by_cosine(*vectors)


def test_copies_of_training_queries_are_found_beside_the_control(base, measured):
    copies = measured["near"]["copies"]
    exact = {"count": COPIED, "share": COPIED / 20, "distinct": COPIED}
    assert copies["exact"]["synthetic"] == exact
    assert copies["exact"]["held_out"]["count"] == 0
    assert copies["training_queries"] == 60
    nearest, held_out = copies["by_grams"]["synthetic"], copies["by_grams"]["held_out"]
    assert (nearest["count"], held_out["count"]) == (20, 12)
    # Capitals make no difference.
    assert nearest["quantiles"]["0.05"] == pytest.approx(0, abs=1e-9)
    assert measured["apart"]["copies"]["exact"]["synthetic"]["count"] == 0
    expected = evaluation.describe(_control(base))["quantiles"]
    assert held_out["quantiles"] == pytest.approx(expected)


def test_both_splits_are_recorded_as_read(base, measured):
    recorded = framed.reads(base / "measured" / "private")
    assert recorded == [
        "the queries and judgements of split 'test'",
        "the queries of split 'dev'",
        "the queries of split 'train'",
    ]


def test_one_query_is_too_few_for_mauve_and_words_may_be_none(base, tmp_path):
    _write_set(tmp_path / "one", ["?"], 0)
    found = similarity.measure(
        similarity.SimilaritySettings(init=str(base / "public")),
        {"one": str(tmp_path / "one")},
        BeirDirectory(base / "pairs"),
        "dev",
    )["one"]
    assert "mauve" not in found and found["sizes"]["compared"] == 1
    assert found["distinct"]["synthetic"][1] is None
    assert "jensen_shannon" not in found["vocabulary"]
    json.dumps(found, allow_nan=False)


def test_samples_are_compared_and_copies_found_in_all(base, tmp_path):
    found = _run(base, tmp_path, sets=("near",), samples=5)["near"]
    assert found["sizes"]["compared"] == 5 and found["mauve"]["samples"] == [5, 5]
    assert found["copies"]["exact"]["synthetic"]["count"] == COPIED
    control = _control(base, np.random.default_rng(0).permutation(12)[:5])
    by_grams = found["copies"]["by_grams"]["held_out"]
    assert by_grams["mean"] == pytest.approx(control.mean())

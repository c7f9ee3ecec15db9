"""Synthetic queries against private ones, as `evaluate` compares and records them."""

import json

import numpy as np
import pytest
from helpers import framed
from helpers import tiny as _tiny

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory
from tfdpsq.run.common import similarity, text_features
from tfdpsq.run.stages.evaluate import METRICS_FILE, STAGE
from tfdpsq.validation import InputError

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
    drawn = {}
    for name, texts in (
        ("near", _queries(base / "near")),
        ("dev", [pair.query for pair in pairs]),
    ):
        order = np.random.default_rng(0).permutation(len(texts))[:12]
        drawn[name] = text_features.features(
            [texts[i] for i in order], "t5", str(base / "public")
        )
    expected = evaluation.mauve_of_features(drawn["near"], drawn["dev"])
    found = measured["near"]["mauve"]
    assert found["scores"] == pytest.approx(expected.scores, abs=1e-6)
    assert (found["samples"], found["clusters"]) == ([12, 12], 2)
    assert found["mean"] == pytest.approx(expected.mean)


def test_copies_of_training_queries_are_found_beside_the_control(base, measured):
    copies = measured["near"]["copies"]
    assert copies["exact"]["synthetic"] == {
        "count": COPIED,
        "share": COPIED / 20,
        "distinct": COPIED,
    }
    assert copies["exact"]["held_out"]["count"] == 0
    assert copies["training_queries"] == 60
    for measure in ("by_grams", "by_features"):
        nearest = copies[measure]["synthetic"]
        assert (nearest["count"], copies[measure]["held_out"]["count"]) == (20, 12)
        # Capitals are no difference to runs of characters, but to the T5.
        least = nearest["quantiles"]["0.05"]
        assert (least == pytest.approx(0, abs=1e-9)) == (measure == "by_grams")
    assert measured["apart"]["copies"]["exact"]["synthetic"]["count"] == 0
    pairs = BeirDirectory(base / "pairs")
    training, dev = ([p.query for p in pairs.pairs(s)] for s in ("train", "dev"))
    control = evaluation.nearest_by_cosine(
        *map(evaluation.gram_vectors, (dev, training))
    )
    expected = evaluation.describe(control)["quantiles"]
    assert copies["by_grams"]["held_out"]["quantiles"] == pytest.approx(expected)


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
        similarity.SimilaritySettings(),
        {"one": str(tmp_path / "one")},
        BeirDirectory(base / "pairs"),
        "dev",
    )["one"]
    assert "mauve" not in found and found["sizes"]["compared"] == 1
    assert found["distinct"]["synthetic"][1] is None
    assert "jensen_shannon" not in found["vocabulary"]
    json.dumps(found, allow_nan=False)


def test_features_are_made_of_samples_and_copies_found_in_all(base, tmp_path):
    found = _run(base, tmp_path, samples=5)["near"]
    assert found["sizes"]["compared"] == 5 and found["mauve"]["samples"] == [5, 5]
    assert found["copies"]["exact"]["synthetic"]["count"] == COPIED
    assert found["copies"]["training_queries"] == 60
    assert found["copies"]["training_queries_with_features"] == 5
    # Runs of characters are looked for in all training queries.
    pairs = BeirDirectory(base / "pairs")
    training, dev = ([p.query for p in pairs.pairs(s)] for s in ("train", "dev"))
    drawn = [dev[i] for i in np.random.default_rng(0).permutation(12)[:5]]
    control = evaluation.nearest_by_cosine(
        *map(evaluation.gram_vectors, (drawn, training))
    )
    assert found["copies"]["by_grams"]["held_out"]["mean"] == pytest.approx(
        control.mean()
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"featurizer": "bert"}, "similarity.featurizer is 'bert'"),
        ({"init": "/nowhere"}, "/nowhere"),
        ({"featurizer": "gpt2"}, "similarity.init is .* which does nothing where"),
        ({"sets": ("missing",)}, "synthetic.missing"),
        ({"strict": True}, "strict mode refuses"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_read(
    base, tmp_path, settings, message
):
    with pytest.raises(InputError, match=message):
        _run(base, tmp_path, **settings)
    assert not framed.reads(tmp_path / "private")

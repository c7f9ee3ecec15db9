"""Stages `encode` and `index`: embeddings, a saved search, more documents, queries."""

import json
import math
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans
from helpers import tiny as _tiny

from tfdpsq import privacy, retriever
from tfdpsq.data import BeirDirectory, Document, train_vocabulary, write_beir
from tfdpsq.run import encode, evaluate, index
from tfdpsq.run.core import layout
from tfdpsq.run.passes import (
    corpus_shards,
    embedding,
    passes,
    query_sets,
)
from tfdpsq.validation import DataError, InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, and two untrained retrievers over them."""
    base = tmp_path_factory.mktemp("index")
    queries = _tiny.write_pairs(base / "pairs")
    train_vocabulary(queries, 320, base / "spiece.model")  # a test's made-up queries
    _tiny.write_retriever(base / "retriever", base, shared=False)
    model = retriever.load(base / "retriever" / layout.RETRIEVER_MODEL)
    model.set_weights([weight[::-1] for weight in model.get_weights()])
    shutil.copytree(base / "retriever", base / "other")
    shutil.rmtree(base / "other" / layout.RETRIEVER_MODEL)
    retriever.save(model, base / "other" / layout.RETRIEVER_MODEL)
    return base


def _config(home, **changes):
    return _tiny.config(
        index,
        changes,
        retriever=str(home / "retriever"),
        corpus=str(home / "pairs"),
        shard_documents=32,
        batch_size=16,
    )


def _products(base, texts):
    """Document ids, and [texts, documents] inner products of embeddings."""
    model = retriever.load(base / "retriever" / layout.RETRIEVER_MODEL)
    lines = (base / "pairs" / "corpus.jsonl").read_text().splitlines()
    documents = [json.loads(line) for line in lines]
    queries, vectors = (
        retriever.encode_texts(model, some, side, progress=False)
        for side, some in (
            ("query", texts),
            ("document", [d["text"] for d in documents]),
        )
    )
    return [d["_id"] for d in documents], queries @ vectors.T


def _encode_config(home):
    config = encode.default_config()
    given = _config(home)
    config.update({name: given[name] for name in embedding.declared()})
    return config


def _bytes_of(directory):
    """Every file of an index: name -> content."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted((directory / embedding.DOCUMENTS).rglob("*"))
    }


@pytest.fixture(scope="module")
def encoded(base):
    """The corpus, encoded by one process."""
    stage = encode.run(_encode_config(base), base / "encoded")
    assert stage["result"] == {"documents": 84}
    return _bytes_of(base / "encoded")


def test_two_devices_embed_the_corpus_as_one_does(base, encoded, on_two_devices):
    """Each a batch at a time; of the last ones, one device has none."""
    with on_two_devices():
        encode.run(_encode_config(base), base / "together")
    assert _bytes_of(base / "together") == encoded


@pytest.fixture(scope="module")
def indexed(base):
    index.run(_config(base), base / "indexed")
    return base / "indexed"


@pytest.fixture(scope="module")
def search(indexed):
    return tf.saved_model.load(str(indexed / index.SEARCH))


def test_a_saved_search_finds_the_best_products(base, indexed, search):
    assert retriever.VectorStore(indexed / index.DOCUMENTS).size == 84
    texts = ["who sorts a table", "array reads"]
    found = search.search(tf.constant(texts), tf.constant(4))
    ids, products = _products(base, texts)
    best = -np.sort(-products, axis=1)[:, :4]
    np.testing.assert_allclose(found["scores"], best, atol=1e-5)
    for row, names in enumerate(found["ids"].numpy()):
        own = [products[row, ids.index(name.decode())] for name in names]
        np.testing.assert_allclose(own, best[row], atol=1e-5)
        assert len(set(names)) == 4
    again = search.search(tf.constant(texts), tf.constant(1000))["ids"]
    assert again.shape == (2, 84)


def test_documents_are_added_without_retraining(base, encoded, tmp_path):
    whole = list(BeirDirectory(base / "pairs").documents())
    more = [*whole, Document("new", "", "A word about graphs that is new.")]
    write_beir(tmp_path / "more", more, [("q0", "any")], {"train": [("q0", "d0", 1)]})
    adding = {"kind": "streamed", "base": str(base / "encoded")}
    config = _config(base, **adding, corpus=str(tmp_path / "more"))
    stage = index.run(config, tmp_path / "second")
    assert stage["result"] == {"documents": 85, "taken_over": 84}
    assert not (tmp_path / "second" / index.SEARCH).exists()
    first, second = (
        retriever.VectorStore(place / index.DOCUMENTS)
        for place in (base / "encoded", tmp_path / "second")
    )
    np.testing.assert_array_equal(second.vectors[:84], first.vectors)
    assert list(second.ids()) == [*first.ids(), "new"]
    for changes, message in (
        ({"retriever": str(base / "other")}, "was made by the encoder"),
        ({"dtype": "mixed_bfloat16"}, "'float32', but dtype is 'mixed_bfloat16'"),
    ):
        with pytest.raises(InputError, match=message):
            index.run(_config(base, **adding, **changes), tmp_path / "third")
    assert not (tmp_path / "third").exists()


def _evaluate_config(base, **changes):
    config = evaluate.default_config()
    config.data = str(base / "pairs")
    config.resamples = 100
    with config.unlocked():
        config.systems = {"mine": str(base / "retriever")}
        for name, value in changes.items():
            config[name] = value
    return config


def test_evaluation_takes_embeddings_that_exist_and_refuses_others(base, encoded):
    private, held = base / "private", {"mine": str(base / "encoded")}
    embedded = evaluate.run(_evaluate_config(base), private / "embedded")["result"]
    config = _evaluate_config(base, indexes=held)
    taken = evaluate.run(config, private / "taken")["result"]
    assert taken == embedded and 0 < taken["mine"] < 1
    _tiny.write_pairs(base / "fewer", dev=11)
    for changes, message in (
        ({"systems": {"mine": str(base / "other")}}, "was made by the encoder"),
        ({"data": str(base / "fewer")}, "made of another corpus"),
        ({"indexes": {"yours": str(base / "encoded")}}, "'yours'"),
        ({"dtype": "mixed_bfloat16"}, "in 'float32', but dtype is 'mixed_bfloat16'"),
    ):
        config = _evaluate_config(base, **{"indexes": held, **changes})
        with pytest.raises(InputError, match=message):
            evaluate.run(config, private / "refused")
        assert not (private / "refused").exists()


# -- Queries: those of sets carry a guarantee, private ones stay private ----------

_QUERIES = embedding.QUERIES


def _certificate(epsilon):
    plan = plans.plan(
        epsilon=epsilon, num_units=400, n_is_public=True, batch_size=8, steps=4
    )
    return plans.certificate(plan)


@pytest.fixture(scope="module")
def synthetic(base):
    """A synthetic set of 50 queries."""
    rows = ((f"sorts a list {i}", f"d{i % 20}", "text") for i in range(50))
    _tiny.write_set(base / "set", rows, _certificate(8.0), shards=2)
    return base / "set"


def _query_config(base, **changes):
    config = _encode_config(base)
    config.update({"texts": _QUERIES, "shard_documents": 20, **changes})
    return config


def _is_of(base, out, queries):
    """Compares with embeddings by the query tower, all in one go."""
    held = retriever.VectorStore(out / _QUERIES)
    assert list(held.ids()) == list(queries)
    vectors = retriever.encode_texts(
        retriever.load(base / "retriever" / layout.RETRIEVER_MODEL),
        queries.values(),
        "query",
        progress=False,
    )
    np.testing.assert_allclose(held.vectors, vectors, rtol=0, atol=1e-6)
    assert not (out / embedding.DOCUMENTS).exists()


def _reads(directory):
    path = directory / "private_reads.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def test_queries_of_a_set_carry_its_certificate(base, synthetic, tmp_path):
    certificate = privacy.read_certificate(synthetic)
    config = _query_config(base, corpus=str(synthetic))
    stage = encode.run(config, tmp_path / "out")
    assert stage["result"] == {"queries": 50, "private": False}
    assert privacy.read_certificate(tmp_path / "out") == certificate
    rows = (synthetic / "beir" / "queries.jsonl").read_text().splitlines()
    queries = {row["_id"]: row["text"] for row in map(json.loads, rows)}
    assert len(queries) == 50
    _is_of(base, tmp_path / "out", queries)
    assert not _reads(tmp_path / "private")


def test_private_queries_are_embedded_where_they_may_lie(base, tmp_path):
    out = tmp_path / "private" / "out"
    config = _query_config(base)
    stage = encode.run(config, out)
    assert encode.run(config, out)["run"] == stage["run"]
    assert stage["result"] == {"queries": 12, "private": True}
    beir = BeirDirectory(base / "pairs")
    judged = beir.qrels("test")
    queries = {name: text for name, text in beir.queries().items() if name in judged}
    assert len(queries) == 12
    _is_of(base, out, queries)
    # Recorded once, by whichever of two commands; and nothing says it is covered.
    assert _reads(out.parent) == [
        {
            "what": "the queries of split 'test'",
            "where": "out/queries, and whatever is made from it",
        }
    ]
    with pytest.raises(DataError, match="no certificate covers it"):
        privacy.read_certificate(out)
    assert out.parent.stat().st_mode & 0o077 == 0  # made by the stage, for the owner
    inputs = json.loads((out / "stage.json").read_text())["inputs"]
    assert inputs["queries"].startswith("keyed:") and "corpus" not in inputs


@pytest.mark.parametrize(
    ("out", "changes", "message"),
    [
        ("out", {}, "Write them under .*private"),
        ("private/out", {"strict": True}, "strict mode refuses .* of split 'test'"),
        ("private/out", {"split": "tets"}, "split is 'tets'"),
    ],
)
def test_private_queries_are_refused_before_they_are_read(
    base, tmp_path, out, changes, message
):
    with pytest.raises(InputError, match=message):
        encode.run(_query_config(base, **changes), tmp_path / out)
    assert not list(tmp_path.rglob("*.npy")) and not _reads(tmp_path / "private")


def test_queries_declared_public_are_no_read_and_take_the_encoder_s_guarantee(
    base, tmp_path
):
    config = _query_config(base, private=False, strict=True, split="dev")
    own = _certificate(4.0)
    found = query_sets.open_queries(config, tmp_path / "out", _QUERIES, own)
    assert found.certificate == own and not found.private
    assert not found.fingerprint.startswith("keyed:")
    judged = BeirDirectory(base / "pairs").qrels("dev")
    assert query_sets.judged_in(found) == judged.keys() and len(judged) == 12
    assert not list(tmp_path.iterdir())


def test_guarantees_of_a_set_and_of_another_retriever_do_not_add_up(
    base, synthetic, tmp_path
):
    """Neither covers both; one without any protection decides."""
    config = _query_config(base, corpus=str(synthetic))
    of_set = privacy.read_certificate(synthetic)

    def guaranteed(encoder):
        out = tmp_path / "out"
        return query_sets.open_queries(config, out, _QUERIES, encoder).certificate

    with pytest.raises(InputError, match="which would add up"):
        guaranteed(_certificate(4.0))
    assert guaranteed(None) == of_set
    assert guaranteed(of_set) == of_set  # of a retriever trained on the set
    unprotected = _certificate(math.inf)
    assert guaranteed(unprotected) == unprotected and not unprotected["private"]


def test_hashes_of_a_log_are_not_kept_where_one_split_of_it_is_public(base, tmp_path):
    """The file has the queries of all splits; half of the pass is made."""
    out = tmp_path / "release" / "queries"
    config = _query_config(base, private=False, shard_documents=30)
    assert encode.run(config, out, passes.Launch(2, 1)) is None
    kept = list((tmp_path / "release").rglob("*.json"))
    assert kept and not any(path.name == corpus_shards.PLAN_FILE for path in kept)

"""Stage `embed`: embeddings of documents and queries, and a saved search."""

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import framed, tiny

from tfdpsq import privacy, retriever
from tfdpsq.data import BeirDirectory, train_vocabulary
from tfdpsq.run.common import kinds
from tfdpsq.run.common.embeddings import (
    DOCUMENTS,
    QUERIES,
    Embeddings,
    require_one_encoder,
)
from tfdpsq.run.stages.embed import SEARCH, STAGE
from tfdpsq.run.stages.evaluate import STAGE as EVALUATE
from tfdpsq.validation import DataError, InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, a retriever, and the corpus embedded by it, with a search."""
    base = tmp_path_factory.mktemp("embed")
    queries = tiny.write_pairs(base / "pairs")
    train_vocabulary(queries, 320, base / "spiece.model")  # a test's made-up queries
    framed.write_retriever(base / "retriever", base / "spiece.model", shared=False)
    record = framed.run(STAGE, base / "embedded", **_settings(base, index="scann"))
    assert record["result"] == {"documents": 84}
    return base


def _settings(base, **changes):
    usual = {"retriever": str(base / "retriever"), "corpus": str(base / "pairs")}
    return {**usual, "shard_documents": 32, "batch_size": 16, **changes}


def _model(base):
    return retriever.load(base / "retriever" / "model")


def test_a_saved_search_finds_the_best_products(base):
    texts = ["who sorts a table", "array reads"]
    search = tf.saved_model.load(str(base / "embedded" / SEARCH))
    found = search.search(tf.constant(texts), tf.constant(4))
    documents = {d.id: d.content for d in BeirDirectory(base / "pairs").documents()}
    queries, vectors = (
        retriever.encode_texts(_model(base), some, kind, progress=False)
        for kind, some in (("query", texts), ("document", documents.values()))
    )
    store = retriever.VectorStore(base / "embedded" / DOCUMENTS)
    assert list(store.ids()) == list(documents)
    np.testing.assert_allclose(store.vectors, vectors, atol=1e-6)
    products = queries @ vectors.T
    for row, names in enumerate(found["ids"].numpy()):
        own = [products[row, list(documents).index(name.decode())] for name in names]
        np.testing.assert_allclose(found["scores"][row], own, atol=1e-5)
        assert len(set(names)) == 4


def test_evaluation_takes_embeddings_that_exist_and_refuses_others(base):
    usual = {
        "data": str(base / "pairs"),
        "systems": {"mine": str(base / "retriever")},
        "resamples": 50,
    }
    held = {"mine": str(base / "embedded")}
    embedded = framed.run(EVALUATE, base / "private" / "embedded", **usual)["result"]
    taken = framed.run(EVALUATE, base / "private" / "taken", **usual, indexes=held)
    assert taken["result"] == pytest.approx(embedded) and 0 < embedded["mine"] < 1
    tiny.write_pairs(base / "fewer", dev=11)
    framed.write_retriever(base / "other", base / "spiece.model", pooling="first")
    for number, (changes, message) in enumerate(
        (
            ({"systems": {"mine": str(base / "other")}}, "was made by the encoder"),
            ({"data": str(base / "fewer")}, "not made of the documents"),
            ({"indexes": {"yours": str(base / "embedded")}}, "indexes names 'yours'"),
        )
    ):
        out = base / "private" / f"refused{number}"
        with pytest.raises(InputError, match=message):
            framed.run(EVALUATE, out, **{**usual, "indexes": held, **changes})
        assert not out.exists()


def test_queries_of_a_set_carry_its_certificate(base, tmp_path):
    certificate = framed.certificate(8.0)
    rows = ((f"sorts a list {i}", f"d{i % 20}", "text") for i in range(50))
    made = tiny.write_set(tmp_path / "set", rows, certificate, shards=2)
    settings = {"retriever": str(base / "retriever"), "texts": QUERIES}
    record = framed.run(STAGE, tmp_path / "out", **settings, queries=made)
    assert record["result"] == {"queries": 50} and record["guarantee"] == "certified"
    assert privacy.read_certificate(tmp_path / "out") == certificate
    lines = (tmp_path / "set" / "beir" / "queries.jsonl").read_text().splitlines()
    texts = {row["_id"]: row["text"] for row in map(json.loads, lines)}
    _are_of(base, tmp_path / "out", texts)
    assert not framed.reads(tmp_path / "private")
    # Neither guarantee covers what both had a part in.
    other = tmp_path / "other"
    shutil.copytree(base / "retriever", other)
    framed.certify(other, 4.0, "two")
    with pytest.raises(InputError, match="add up"):
        given = {**settings, "retriever": str(other), "queries": made}
        framed.run(STAGE, tmp_path / "never", **given)


def _are_of(base, out, texts):
    """Compares with embeddings by the query tower, all in one go."""
    held = retriever.VectorStore(out / QUERIES)
    assert list(held.ids()) == list(texts)
    vectors = retriever.encode_texts(
        _model(base), texts.values(), "query", progress=False
    )
    np.testing.assert_allclose(held.vectors, vectors, rtol=0, atol=1e-6)


def test_private_queries_are_embedded_where_they_may_lie(base, tmp_path):
    """Recorded once; and nothing says that it is covered."""
    settings = {"retriever": str(base / "retriever"), "texts": QUERIES}
    settings["queries"] = str(base / "pairs")
    with pytest.raises(InputError, match="not under private/"):
        framed.run(STAGE, tmp_path / "out", **settings)
    out = tmp_path / "private" / "out"
    with pytest.raises(InputError, match="strict mode refuses .* of split 'test'"):
        framed.run(STAGE, out, **settings, strict=True)
    assert not list(tmp_path.rglob("*.npy")) and not framed.reads(out.parent)
    record = framed.run(STAGE, out, **settings)
    assert framed.run(STAGE, out, **settings)["run"] == record["run"]
    beir = BeirDirectory(base / "pairs")
    judged = beir.qrels("test")
    _are_of(base, out, {q: text for q, text in beir.queries().items() if q in judged})
    assert framed.reads(out.parent) == ["the queries of split 'test'"]
    with pytest.raises(DataError, match="no certificate covers it"):
        privacy.read_certificate(out)
    assert out.stat().st_mode & 0o077 == 0
    stated = json.loads((out / "stage.json").read_text())
    assert stated["depends"]["inputs"]["queries"].startswith("keyed:")
    assert "12" not in json.dumps(stated["result"])


def test_embeddings_of_other_encoders_are_found_by_id(tmp_path):
    vectors = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
    tiny.write_embeddings(tmp_path, DOCUMENTS, vectors, list("abcd"))
    tiny.write_embeddings(tmp_path, QUERIES, vectors[:, :2], list("abca"), "another")
    given = kinds.Embeddings.open(str(tmp_path), "documents")
    documents = Embeddings(given, "documents", DOCUMENTS)
    found = documents.take(["c", "a"])
    expected = vectors[[2, 0]] / np.linalg.norm(vectors[[2, 0]], axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(InputError, match="no embedding of 'e'"):
        documents.take(["a", "e"])
    with pytest.raises(InputError, match="4 embeddings, but a corpus has 3"):
        documents.require("abc", "a corpus")
    queries = Embeddings(given, "queries", QUERIES)
    with pytest.raises(InputError, match="not by one encoder"):
        require_one_encoder(documents, queries)
    with pytest.raises(DataError, match="an id comes twice"):
        queries.take(["a"])

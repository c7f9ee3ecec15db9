"""Embeddings on disk: streamed search is exact, bad input and damage are named."""

import types

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.retriever import VectorStore
from tfdpsq.retriever.store import encoder_fingerprint
from tfdpsq.validation import DataError, InputError


def _vectors(count, width=8, seed=0):
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


_EVERY = np.concatenate([_vectors(50), _vectors(2, seed=1)])


@pytest.fixture
def store(tmp_path):
    chunks = [
        ([f"d{i}" for i in range(50)], _vectors(50)),
        (["é", "d50"], _vectors(2, seed=1)),
    ]
    return VectorStore.write(tmp_path / "store", "print-a", 8, chunks)


@pytest.mark.parametrize("rows", [7, 1000])
@pytest.mark.parametrize("k", [10, 90])
def test_streamed_search_is_the_matrix_products_top_k(store, rows, k):
    queries = _vectors(9, seed=2)
    product = queries.astype(np.float64) @ _EVERY.astype(np.float64).T
    expected = np.argsort(-product, axis=1, kind="stable")[:, :k]
    scores, places = store.search(queries, k, rows)
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_allclose(
        scores, np.take_along_axis(product, expected, axis=1), rtol=1e-5, atol=1e-5
    )


def test_opened_again_it_holds_what_was_written(store):
    again = VectorStore(store.directory, "print-a")
    assert (again.size, again.width, again.encoder) == (52, 8, "print-a")
    ids = [*(f"d{i}" for i in range(50)), "é", "d50"]
    assert list(again.ids()) == ids
    np.testing.assert_array_equal(again.vectors, _EVERY)
    np.testing.assert_array_equal(np.load(store.directory / "vectors.npy"), _EVERY)
    names, vectors = zip(*again.chunks(20))
    assert [len(some) for some in names] == [20, 20, 12]
    np.testing.assert_array_equal(np.concatenate(vectors), _EVERY)
    assert again.places({"d3", "é", "none"}) == {"d3": 3, "é": 50}
    assert again.fingerprint == store.fingerprint


@pytest.mark.parametrize(
    "ids, vectors, message",
    [
        (["x"], _vectors(1, width=7), r"shape \(1, 7\) for 1 ids"),
        (["x", "y"], _vectors(1), r"shape \(1, 8\) for 2 ids"),
        (["x"], np.full([1, 8], np.nan), r"embeddings\[0\] is not finite"),
    ],
)
def test_bad_embeddings_are_refused_and_leave_nothing(tmp_path, ids, vectors, message):
    chunks = [(["a"], _vectors(1)), (ids, vectors)]
    with pytest.raises(InputError, match=message):
        VectorStore.write(tmp_path / "store", "x", 8, chunks)
    assert not list(tmp_path.iterdir())


def test_other_encoders_taken_places_and_damage_are_named(store, tmp_path):
    directory = store.directory
    with pytest.raises(InputError, match="made by the encoder print-a"):
        VectorStore(directory, "print-b")
    with pytest.raises(InputError, match="encoder is ''"):
        VectorStore.write(tmp_path / "other", "", 8, [])
    with pytest.raises(InputError, match="store"):
        VectorStore.write(directory, "print-a", 8, [])
    whole = (directory / "vectors.npy").read_bytes()
    (directory / "vectors.npy").write_bytes(whole[:-8])
    with pytest.raises(DataError, match="vectors.npy: cannot be read"):
        VectorStore(directory)
    (directory / "vectors.npy").write_bytes(whole)
    with (directory / "ids.jsonl").open("a") as file:
        file.write('"one more"\n')
    with pytest.raises(DataError, match="ids.jsonl: has 53 ids, not 52"):
        list(VectorStore(directory).ids())
    (directory / "manifest.json").write_text("{}")
    with pytest.raises(DataError):
        VectorStore(directory)


def test_trained_query_tower_keeps_the_document_fingerprint(make_model, tokenizer):
    """What decides about documents is their own tower, and what they are cut to."""
    model = make_model(tokenizer=tokenizer, shared=False)
    before = encoder_fingerprint(model)
    for weight in model.query_tower.weights:
        weight.assign(weight + 1)
    assert encoder_fingerprint(model) == before
    model.tokenizer = types.SimpleNamespace(fingerprint="other words")
    assert encoder_fingerprint(model) != before
    other = make_model(tokenizer=tokenizer, shared=False, document_length=11)
    assert encoder_fingerprint(other) != before


def test_query_and_document_fingerprints_differ(make_model, tokenizer):
    """Not even of a shared tower, and texts cut to the same length."""
    model = make_model(tokenizer=tokenizer, query_length=12, document_length=12)
    own = encoder_fingerprint(model, "query")
    assert own != encoder_fingerprint(model)
    apart = make_model(tokenizer=tokenizer, shared=False)
    own = encoder_fingerprint(apart, "query")
    for weight in apart.document_tower.weights:
        weight.assign(weight + 1)
    assert encoder_fingerprint(apart, "query") == own
    apart.query_tower.weights[-1].assign_add(
        tf.fill(apart.query_tower.weights[-1].shape, 1e-6)
    )
    assert encoder_fingerprint(apart, "query") != own

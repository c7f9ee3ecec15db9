"""Search: ScaNN brute force is a matrix product's top k, whole or in chunks."""

import gc
import resource

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs
from helpers.retrieval import search

from tfdpsq.retriever import (
    ScannBruteForce,
    as_run,
)
from tfdpsq.retriever.index import EXACT, KBest, search_chunks
from tfdpsq.validation import InputError


def _unit(draw, *shape):
    array = draw.normal(size=shape)
    return (array / np.linalg.norm(array, axis=-1, keepdims=True)).astype(np.float32)


def _product_top(queries, documents, k):
    """Top k of the full matrix product in float64: scores and rows."""
    scores = queries.astype(np.float64) @ documents.astype(np.float64).T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, axis=1), rows


@pytest.mark.parametrize("normalised", [True, False])
def test_scann_brute_force_is_the_matrix_product_top_10(normalised):
    draw = np.random.default_rng(0)
    queries, documents = _unit(draw, 50, 32), _unit(draw, 3000, 32)
    if not normalised:  # inner product, not cosine: lengths must count
        documents *= draw.uniform(0.5, 3, (3000, 1)).astype(np.float32)
    scores, rows = ScannBruteForce(k=10).index(documents)(tf.constant(queries))
    expected_scores, expected_rows = _product_top(queries, documents, 10)
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_allclose(scores, expected_scores, rtol=0, atol=2e-6)


def test_layer_agrees_with_tfrs_brute_force():
    draw = np.random.default_rng(2)
    queries, documents = _unit(draw, 3, 8), _unit(draw, 40, 8)
    ids = tf.constant([f"d{n}" for n in range(40)])
    layer = ScannBruteForce(k=5)
    theirs = tfrs.layers.factorized_top_k.BruteForce(k=5)
    assert isinstance(layer, tfrs.layers.factorized_top_k.TopK)
    assert layer.is_exact()
    data = tf.data.Dataset.from_tensor_slices((ids, documents)).batch(7)
    layer.index_from_dataset(data)
    theirs.index_from_dataset(data)
    np.testing.assert_array_equal(
        layer(tf.constant(queries), k=4)[1], theirs(tf.constant(queries), k=4)[1]
    )


def test_missing_neighbours_are_left_out_of_the_run():
    scores = np.array([[2.0, -np.inf]], np.float32)
    run = as_run(["q"], scores, np.array([["d1", ""]], dtype=object))
    assert run == {"q": {"d1": 2.0}}
    assert type(run["q"]["d1"]) is float


def test_tree_with_fewer_documents_than_asked_for():
    """Searched leaves hold fewer than all 84 documents: it was a traceback."""
    random = np.random.default_rng(2)
    documents, queries = _unit(random, 84, 8), _unit(random, 12, 8)
    ids = [str(number) for number in range(84)]
    scores, found = search(queries, documents, ids, 100, "scann")
    assert scores.shape == found.shape and len(scores) == 12
    there = np.isfinite(scores)
    assert not there.all() and there[:, :50].all()
    run = as_run([str(number) for number in range(12)], scores, found)
    for name, hits in run.items():
        assert len(hits) == there[int(name)].sum() > 50
        for document, score in hits.items():
            exact = float(queries[int(name)] @ documents[int(document)])
            assert score == pytest.approx(exact, abs=1e-3)


def test_documents_too_few_for_a_tree_are_refused():
    """ScaNN ended the process."""
    documents = _unit(np.random.default_rng(4), 16, 8)
    ids = [f"d{number}" for number in range(16)]
    assert search(documents, documents, ids, 1, "scann")[1].shape == (16, 1)
    with pytest.raises(InputError, match="15 documents are too few.*scann_brute_force"):
        search(documents, documents[:15], ids[:15], 1, "scann")


def test_bad_input_is_refused():
    one = np.ones((2, 3), np.float32)
    with pytest.raises(InputError, match="kind is 'faiss'"):
        search(one, one, ["a", "b"], 1, "faiss")
    with pytest.raises(InputError, match="for 1 ids"):
        search(one, one, ["a"], 1)
    with pytest.raises(InputError, match=r"embeddings\[1\] is not finite"):
        search(one, np.array([[1.0, 1, 1], [1, np.nan, 1]]), ["a", "b"], 1)
    with pytest.raises(InputError, match="index is empty"):
        ScannBruteForce()(tf.constant(one))


def _chunks(documents, cuts):
    for part in np.split(np.arange(len(documents)), cuts):
        if len(part):
            yield [f"d{i}" for i in part], documents[part]


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("cuts", [[], [5, 6, 300]])
def test_chunks_equal_the_search_of_all_at_once(kind, cuts):
    draw = np.random.default_rng(0)
    sets = {"one": _unit(draw, 9, 16), "other": _unit(draw, 3, 16)}
    documents = _unit(draw, 400, 16)
    for name, best in search_chunks(sets, _chunks(documents, cuts), 10, kind).items():
        scores, rows = _product_top(sets[name], documents, 10)
        np.testing.assert_array_equal(best.places, rows)
        np.testing.assert_array_equal(best.ids, np.char.add("d", rows.astype(str)))
        np.testing.assert_allclose(best.scores, scores, rtol=0, atol=1e-6)
        assert best.size == 400


def test_ties_go_to_the_earlier_document():
    documents = np.repeat(np.eye(2, dtype=np.float32), [3, 27], axis=0)
    chunks = _chunks(documents, [1, 10, 25])
    queries = {"": np.eye(2, dtype=np.float32)}
    best = search_chunks(queries, chunks, 5, "brute_force")[""]
    np.testing.assert_array_equal(best.places[1], np.arange(3, 8))
    np.testing.assert_array_equal(best.places[0], np.arange(5))


def test_results_of_parts_are_merged():
    draw = np.random.default_rng(2)
    queries, documents = {"": _unit(draw, 5, 8)}, _unit(draw, 60, 8)
    whole = search_chunks(queries, _chunks(documents, []), 7)[""]
    merged = KBest(5, 7)
    for start, end in ((0, 4), (4, 41), (41, 60)):
        part = search_chunks(queries, _chunks(documents[start:end], [2]), 7)[""]
        merged.merge(part.scores, part.places, part.ids, part.size)
    np.testing.assert_array_equal(merged.places, whole.places)
    np.testing.assert_allclose(merged.scores, whole.scores, atol=1e-6)


def _grown_mib():
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.slow
def test_index_of_a_chunk_releases_its_memory():
    """TensorFlow keeps a ScaNN searcher until it is told: all chunks would add up."""
    draw = np.random.default_rng(0)
    queries, chunk = {"": _unit(draw, 2, 64)}, _unit(draw, 16_384, 64)  # 4 MiB
    chunks = [([""] * len(chunk), chunk)]
    search_chunks(queries, chunks * 3, 5)
    before = _grown_mib()
    search_chunks(queries, chunks * 20, 5)
    assert _grown_mib() - before < 40  # and not 80, or 160 with ScaNN's copy

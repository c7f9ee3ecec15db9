"""The best of chunks are the best of all, however they are cut, in a chunk's memory."""

import gc
import resource

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.retriever import ScannBruteForce, index, nearest, search
from tfdpsq.retriever.nearest import BestDocuments
from tfdpsq.validation import InputError


def _unit(seed, *shape):
    array = np.random.default_rng(seed).normal(size=shape)
    return (array / np.linalg.norm(array, axis=-1, keepdims=True)).astype(np.float32)


def _fed(queries, documents, k, kind, cuts):
    best = BestDocuments(queries, k, kind)
    for part in np.split(np.arange(len(documents)), cuts):
        if len(part):
            best.add(documents[part], [f"d{i}" for i in part])
    return best


@pytest.mark.parametrize("kind", nearest.KINDS)
@pytest.mark.parametrize("cuts", [[], [5, 6, 300]])
def test_equals_the_search_of_all_at_once(kind, cuts, monkeypatch):
    monkeypatch.setattr(nearest, "ROWS", 128)
    queries, documents = _unit(0, 9, 16), _unit(1, 400, 16)
    ids = [f"d{i}" for i in range(400)]
    best = _fed(queries, documents, 10, kind, cuts)
    whole = "brute_force" if kind == nearest.EXACT else kind
    scores, found = search(queries, documents, ids, 10, whole)
    np.testing.assert_array_equal(best.ids, found)
    np.testing.assert_allclose(best.scores, scores, rtol=0, atol=1e-6)
    assert best.size == 400
    np.testing.assert_array_equal(best.ids, np.array(ids, object)[best.places])


@pytest.mark.parametrize("kind", ["exact", "brute_force", "streaming"])
@pytest.mark.parametrize("cuts", [[], [1, 2], [10, 20, 25]])
def test_of_equal_scores_the_earlier_document_comes_first(kind, cuts):
    documents = np.repeat(np.eye(2, dtype=np.float32), [3, 27], axis=0)
    best = _fed(np.eye(2, dtype=np.float32), documents, 5, kind, cuts)
    np.testing.assert_array_equal(best.places[1], np.arange(3, 8))
    np.testing.assert_array_equal(best.places[0], np.arange(5))
    np.testing.assert_array_equal(best.scores[0], [1, 1, 1, 0, 0])


def test_more_queries_than_are_scored_at_a_time(monkeypatch):
    monkeypatch.setattr(nearest, "_QUERIES", 4)
    queries, documents = _unit(2, 11, 8), _unit(3, 50, 8)
    best = _fed(queries, documents, 3, "exact", [20])
    products = queries.astype(np.float64) @ documents.astype(np.float64).T
    np.testing.assert_array_equal(best.places, np.argsort(-products, axis=1)[:, :3])


def test_fewer_documents_than_k_come_all(caplog):
    best = BestDocuments(_unit(0, 2, 4), 10, "scann_brute_force")
    assert best.scores.shape == best.ids.shape == (2, 0)
    with caplog.at_level("WARNING", logger="absl"):
        best.add(_unit(1, 3, 4), ["a", "b", "c"])
        best.add(_unit(2, 1, 4))
    assert sorted(best.ids[0]) == ["", "a", "b", "c"]
    assert not caplog.text  # that a chunk is smaller than k is no news


def test_what_was_found_elsewhere_is_merged():
    queries, documents = _unit(0, 5, 8), _unit(1, 60, 8)
    whole = _fed(queries, documents, 7, "exact", [])
    merged = BestDocuments(queries, 7)
    for start, end in ((0, 4), (4, 41), (41, 60)):
        part = _fed(queries, documents[start:end], 7, "exact", [2])
        ids = np.vectorize(lambda i, s=start: f"d{int(i[1:]) + s}", otypes="O")
        merged.merge(part.scores, part.places, ids(part.ids), part.size)
    np.testing.assert_array_equal(merged.places, whole.places)
    np.testing.assert_array_equal(merged.ids, whole.ids)
    np.testing.assert_allclose(merged.scores, whole.scores, atol=1e-6)


def test_bad_input_is_refused():
    best = BestDocuments(np.ones([2, 3], np.float32), 1)
    for add, message in (
        ((np.ones([2, 4]), ["a", "b"]), r"must be \[n, 3\]"),
        ((np.ones([2, 3]), ["a"]), "for 1 ids"),
        ((np.ones([0, 3]), []), r"embeddings has shape \(0, 3\)"),
        ((np.full([1, 3], np.nan), ["a"]), r"embeddings\[0\] is not finite"),
    ):
        with pytest.raises(InputError, match=message):
            best.add(*add)
    assert best.size == 0
    for arguments, message in (
        ((np.ones([2, 3]), 1, "scann"), "kind is 'scann'; choose one of 'exact', 's"),
        ((np.ones([2, 3]), 0), "k is 0"),
        ((np.ones(3), 1), r"queries has shape \(3,\)"),
    ):
        with pytest.raises(InputError, match=message):
            BestDocuments(*arguments)


def _grown_mib():
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.parametrize("kind", ["scann_brute_force", "brute_force", "exact"])
def test_a_chunks_index_gives_its_memory_back(kind):
    """TensorFlow keeps a ScaNN searcher until it is told: all chunks would add up."""
    queries, chunk = _unit(0, 2, 64), _unit(1, 16_384, 64)  # 4 MiB a chunk
    best = BestDocuments(queries, 5, kind)
    for _ in range(3):
        best.add(chunk)
    before = _grown_mib()
    for _ in range(20):
        best.add(chunk)
    assert _grown_mib() - before < 40  # and not 80, or 160 with ScaNN's copy


def test_a_released_index_is_empty_and_can_be_filled_again():
    layer = ScannBruteForce(k=1)
    layer.release()
    layer.index(np.eye(3, dtype=np.float32)).release()
    with pytest.raises(InputError, match="index is empty"):
        layer(tf.constant(np.eye(3, dtype=np.float32)))
    assert int(layer.index(np.eye(3, dtype=np.float32))(tf.eye(3))[1][2, 0]) == 2
    assert index.KINDS == ("scann_brute_force", "brute_force", "streaming", "scann")

"""The best of chunks are the best of all, however they are cut, in a chunk's memory."""

import gc
import resource

import numpy as np
import pytest

from tfdpsq.retriever import nearest, search
from tfdpsq.retriever.nearest import BestDocuments


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
def test_equals_the_search_of_all_at_once(kind, cuts):
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
@pytest.mark.parametrize("cuts", [[], [1, 10, 25]])
def test_ties_go_to_the_earlier_document(kind, cuts):
    documents = np.repeat(np.eye(2, dtype=np.float32), [3, 27], axis=0)
    best = _fed(np.eye(2, dtype=np.float32), documents, 5, kind, cuts)
    np.testing.assert_array_equal(best.places[1], np.arange(3, 8))
    np.testing.assert_array_equal(best.places[0], np.arange(5))
    np.testing.assert_array_equal(best.scores[0], [1, 1, 1, 0, 0])


def test_fewer_documents_than_k_come_all(caplog):
    best = BestDocuments(_unit(0, 2, 4), 10, "scann_brute_force")
    assert best.scores.shape == best.ids.shape == (2, 0)
    with caplog.at_level("WARNING", logger="absl"):
        best.add(_unit(1, 3, 4), ["a", "b", "c"])
        best.add(_unit(2, 1, 4))
    assert sorted(best.ids[0]) == ["", "a", "b", "c"]
    assert not caplog.text  # that a chunk is smaller than k is no news


def test_results_of_parts_are_merged():
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


def _grown_mib():
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.slow
def test_index_of_a_chunk_releases_its_memory():
    """TensorFlow keeps a ScaNN searcher until it is told: all chunks would add up."""
    queries, chunk = _unit(0, 2, 64), _unit(1, 16_384, 64)  # 4 MiB a chunk
    best = BestDocuments(queries, 5, "scann_brute_force")
    for _ in range(3):
        best.add(chunk)
    before = _grown_mib()
    for _ in range(20):
        best.add(chunk)
    assert _grown_mib() - before < 40  # and not 80, or 160 with ScaNN's copy

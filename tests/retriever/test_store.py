"""Embeddings on disk: streamed search is exact, adding is safe, damage is named."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.retriever import DocumentIndex
from tfdpsq.retriever.store import encoder_fingerprint
from tfdpsq.validation import DataError, InputError


def _vectors(count, width=8, seed=0):
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


@pytest.fixture
def index(tmp_path):
    made = DocumentIndex.create(tmp_path / "index", "print-a", 8)
    made.add([f"d{i}" for i in range(50)], _vectors(50))
    made.add(["é", "d50"], _vectors(2, seed=1))
    return made


@pytest.mark.parametrize("rows", [7, 1000])
@pytest.mark.parametrize("k", [10, 90])
def test_streamed_search_is_the_matrix_products_top_k(index, rows, k):
    queries = _vectors(9, seed=2)
    every = np.concatenate([_vectors(50), _vectors(2, seed=1)])
    product = queries.astype(np.float64) @ every.astype(np.float64).T
    expected = np.argsort(-product, axis=1, kind="stable")[:, :k]
    scores, places = DocumentIndex(index.directory).search(queries, k, rows)
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_allclose(
        scores, np.take_along_axis(product, expected, axis=1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("rows", [1000, 4])
def test_equal_scores_come_in_the_order_of_the_documents(tmp_path, rows):
    index = DocumentIndex.create(tmp_path / "index", "x", 2)
    index.add([f"d{i}" for i in range(1000)], np.ones([1000, 2], np.float32))
    _, places = index.search(np.ones([1, 2], np.float32), 10, rows)
    np.testing.assert_array_equal(places, [np.arange(10)])


def test_added_documents_are_there_when_opened_again(index):
    again = DocumentIndex(index.directory, "print-a")
    assert again.size == 52
    assert list(again.ids()) == [*(f"d{i}" for i in range(50)), "é", "d50"]
    np.testing.assert_array_equal(again.embeddings()[:50], _vectors(50))
    again.verify()
    before = [c.copy() for c in again.chunks(20)]
    again.add(["late"], _vectors(1, seed=3))
    after = list(DocumentIndex(index.directory).chunks(20))
    for one, other in zip(before, after):
        np.testing.assert_array_equal(one, other)
    assert len(after) == len(before) + 1


@pytest.mark.parametrize(
    "ids, vectors, message",
    [
        (["d3"], _vectors(1), "'d3' is there already"),
        (["x"], _vectors(1, width=7), r"shape \(1, 7\) for 1 ids"),
        (["x"], np.full([1, 8], np.nan), "embedding of 'x' is not finite"),
    ],
)
def test_refused_addition_changes_nothing(index, ids, vectors, message):
    with pytest.raises(InputError, match=message):
        index.add(ids, vectors)
    assert DocumentIndex(index.directory).size == 52


def test_index_of_another_encoder_is_refused(index):
    with pytest.raises(InputError, match="encoder print-a, but queries .* by print-b"):
        DocumentIndex(index.directory, "print-b")
    with pytest.raises(InputError, match="holds an index already"):
        DocumentIndex.create(index.directory, "print-a", 8)


def test_fingerprint_covers_weights_config_vocabulary_and_precision(make_model):
    model = make_model(0)
    again = make_model(0, dtype="float32")
    assert encoder_fingerprint(again, "v") == encoder_fingerprint(model, "v")
    prints = {
        encoder_fingerprint(model, "v"),
        encoder_fingerprint(make_model(1), "v"),
        encoder_fingerprint(model, "w"),
        encoder_fingerprint(make_model(0, document_length=13), "v"),
        encoder_fingerprint(make_model(0, dtype="mixed_bfloat16"), "v"),
    }
    assert len(prints) == 5


def test_damage_is_named(index):
    directory = index.directory
    path = directory / "shard-00000.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-16])
    with pytest.raises(DataError, match="shard-00000.npy: cannot be read"):
        DocumentIndex(directory)
    np.save(path, _vectors(50, seed=9))
    with pytest.raises(DataError, match="shard-00000.npy: holds other embeddings"):
        DocumentIndex(directory).verify()
    path.write_bytes(whole)
    ids = directory / "shard-00001.jsonl"
    ids.write_text("".join(reversed(ids.read_text().splitlines(keepends=True))))
    with pytest.raises(DataError, match="shard-00001.jsonl: holds other ids"):
        DocumentIndex(directory).verify()
    (directory / "index.json").write_text("{}")
    with pytest.raises(DataError, match="index.json: no index"):
        DocumentIndex(directory)


def test_trained_query_tower_keeps_the_document_fingerprint(make_model):
    """What decides about documents is their own tower, and what they are cut to."""
    model = make_model(shared=False)
    before = encoder_fingerprint(model, "v")
    for weight in model.query_tower.weights:
        weight.assign(weight + 1)
    assert encoder_fingerprint(model, "v") == before
    assert encoder_fingerprint(model, "w") != before
    other = make_model(shared=False, document_length=11)
    assert encoder_fingerprint(other, "v") != before


def test_query_and_document_fingerprints_differ(make_model):
    """Not even of a shared tower, and texts cut to the same length."""
    model = make_model(query_length=12, document_length=12)
    own = encoder_fingerprint(model, "v", "query")
    assert own != encoder_fingerprint(model, "v")
    apart = make_model(shared=False)
    own = encoder_fingerprint(apart, "v", "query")
    for weight in apart.document_tower.weights:
        weight.assign(weight + 1)
    assert encoder_fingerprint(apart, "v", "query") == own
    apart.query_tower.weights[-1].assign_add(
        tf.fill(apart.query_tower.weights[-1].shape, 1e-6)
    )
    assert encoder_fingerprint(apart, "v", "query") != own


@pytest.mark.parametrize("rows", [1000, 7])
def test_ranks_count_the_better_documents_of_the_whole_product(tmp_path, rows):
    """Numbers are eighths, so no sum is rounded and many are equal: none may slip."""
    draw = np.random.default_rng(4)
    every, queries = (draw.integers(-2, 3, [n, 6]) / 8 for n in (150, 40))
    index = DocumentIndex.create(tmp_path / "index", "x", 6)
    for start in range(0, 150, 60):
        part = every[start : start + 60]
        index.add([f"d{start + i}" for i in range(len(part))], part)
    places = draw.integers(0, 150, 40)
    scores = queries @ every.T
    own = scores[np.arange(40), places]
    assert ((scores == own[:, None]).sum(axis=1) > 1).sum() > 20  # ties, many
    found = index.ranks(queries.astype(np.float32), places, rows)
    assert found.tolist() == (1 + (scores > own[:, None]).sum(axis=1)).tolist()


def test_rank_of_a_missing_document_is_refused(index):
    with pytest.raises(InputError, match="positions from 0 to 51"):
        index.ranks(_vectors(2), [0, 52])

"""Embeddings on disk: streamed search is exact, adding is safe, damage is named."""

import json

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


@pytest.mark.parametrize("rows", [1, 7, 50, 1000])
@pytest.mark.parametrize("k", [1, 10, 52, 90])
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


@pytest.mark.parametrize("rows", [1000, 300, 4])
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


def test_an_interrupted_addition_leaves_the_index_as_it_was(index, monkeypatch):
    monkeypatch.setattr(
        "tfdpsq.retriever.store._write", lambda *a: pytest.fail("killed here")
    )
    with pytest.raises(pytest.fail.Exception):
        index.add(["late"], _vectors(1))
    monkeypatch.undo()
    again = DocumentIndex(index.directory)
    assert again.size == 52 and "late" not in set(again.ids())
    again.add(["late"], _vectors(1))
    assert again.size == 53
    again.verify()


@pytest.mark.parametrize(
    "ids, vectors, message",
    [
        (["d3"], _vectors(1), "'d3' is there already"),
        (["x", "x"], _vectors(2), "'x' is there already"),
        (["x"], _vectors(2), r"shape \(2, 8\) for 1 ids"),
        (["x"], _vectors(1, width=7), r"shape \(1, 7\) for 1 ids"),
        ([], _vectors(0), "one document at least"),
        (["x"], np.full([1, 8], np.nan), "embedding of 'x' is not finite"),
    ],
)
def test_what_cannot_be_added_changes_nothing(index, ids, vectors, message):
    with pytest.raises(InputError, match=message):
        index.add(ids, vectors)
    assert DocumentIndex(index.directory).size == 52


def test_another_encoders_index_is_refused_by_both_fingerprints(index):
    with pytest.raises(InputError, match="encoder print-a, but queries .* by print-b"):
        DocumentIndex(index.directory, "print-b")
    with pytest.raises(InputError, match="holds an index already"):
        DocumentIndex.create(index.directory, "print-a", 8)


def test_the_fingerprint_is_of_weights_config_vocabulary_and_precision(make_model):
    prints = {
        encoder_fingerprint(make_model(0), "v"),
        encoder_fingerprint(make_model(1), "v"),
        encoder_fingerprint(make_model(0), "w"),
        encoder_fingerprint(make_model(0, document_length=13), "v"),
        encoder_fingerprint(make_model(0, dtype="mixed_bfloat16"), "v"),
    }
    assert len(prints) == 5
    assert encoder_fingerprint(make_model(0, dtype="float32"), "v") in prints
    assert encoder_fingerprint(make_model(0), "v") in prints


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
    np.save(path, _vectors(49))
    with pytest.raises(DataError, match=r"holds float32 \(49, 8\), not float32"):
        DocumentIndex(directory)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="shard-00000.npy: cannot be read"):
        DocumentIndex(directory)
    path.write_bytes(whole)
    np.save(path, np.asfortranarray(np.load(path)))
    with pytest.raises(DataError, match="shard-00000.npy: does not hold row after"):
        DocumentIndex(directory)
    path.write_bytes(whole)
    ids = directory / "shard-00001.jsonl"
    ids.rename(directory / "gone")
    with pytest.raises(
        DataError, match="1.jsonl: cannot be read .*Embed the texts again"
    ):
        DocumentIndex(directory).verify()
    (directory / "gone").rename(ids)
    ids.write_text("".join(reversed(ids.read_text().splitlines(keepends=True))))
    with pytest.raises(DataError, match="shard-00001.jsonl: holds other ids"):
        DocumentIndex(directory).verify()
    ids.write_text('"only one"\n')
    with pytest.raises(DataError, match="shard-00001.jsonl: has 1 ids, not 2"):
        list(DocumentIndex(directory).ids())
    text = (directory / "index.json").read_text()
    (directory / "index.json").write_text(text.replace("ids_sha256", "other"))
    with pytest.raises(DataError, match="index.json: no index .'ids_sha256'"):
        DocumentIndex(directory)
    for change in (
        lambda shards: shards[0].update(count=str(shards[0]["count"])),
        lambda shards: shards[0].update(count=0),
        lambda shards: shards[0].update(count=2.0),
        lambda shards: shards.append(shards[0]),
    ):
        content = json.loads(text)
        change(content["shards"])
        (directory / "index.json").write_text(json.dumps(content))
        with pytest.raises(
            DataError, match=r"index.json: no index \((a shard of|it na)"
        ):
            DocumentIndex(directory)
    (directory / "index.json").write_text("{}")
    with pytest.raises(DataError, match="index.json: no index"):
        DocumentIndex(directory)


def test_bad_queries_are_refused(index):
    with pytest.raises(InputError, match=r"they must be \[Q, 8\]"):
        index.search(_vectors(2, width=7), 3)
    with pytest.raises(InputError, match="k is 0"):
        index.search(_vectors(2), 0)


def test_a_trained_query_tower_searches_the_index_there_is(make_model):
    """What decides about documents is their own tower, and what they are cut to."""
    model = make_model(shared=False)
    before = encoder_fingerprint(model, "v")
    for weight in model.query_tower.weights:
        weight.assign(weight + 1)
    assert encoder_fingerprint(model, "v") == before
    assert encoder_fingerprint(make_model(shared=False, scale=1.0), "v") == before
    assert encoder_fingerprint(model, "w") != before
    changes = ({"document_length": 11}, {"pooling": "first"})
    for changed in changes:
        other = make_model(shared=False, **changed)
        assert encoder_fingerprint(other, "v") != before
    model.document_tower.weights[-1].assign_add(
        tf.fill(model.document_tower.weights[-1].shape, 1e-6)
    )
    assert encoder_fingerprint(model, "v") != before


def test_embeddings_of_queries_are_never_taken_for_those_of_documents(make_model):
    """Not even of a shared tower, and texts cut to the same length."""
    model = make_model(query_length=12, document_length=12)
    own = encoder_fingerprint(model, "v", "query")
    assert own != encoder_fingerprint(model, "v")
    longer = make_model(query_length=13, document_length=12)
    assert encoder_fingerprint(longer, "v", "query") != own
    assert encoder_fingerprint(longer, "v") == encoder_fingerprint(model, "v")
    apart = make_model(shared=False)
    own = encoder_fingerprint(apart, "v", "query")
    for weight in apart.document_tower.weights:
        weight.assign(weight + 1)
    assert encoder_fingerprint(apart, "v", "query") == own
    apart.query_tower.weights[-1].assign_add(
        tf.fill(apart.query_tower.weights[-1].shape, 1e-6)
    )
    assert encoder_fingerprint(apart, "v", "query") != own
    with pytest.raises(InputError, match="kind is 'text'"):
        encoder_fingerprint(apart, "v", "text")


@pytest.mark.parametrize("rows, at_once", [(1000, 256), (7, 5), (1, 1), (64, 3)])
def test_ranks_count_the_better_documents_of_the_whole_product(
    tmp_path, monkeypatch, rows, at_once
):
    """Numbers are eighths, so no sum is rounded and many are equal: none may slip."""
    monkeypatch.setattr("tfdpsq.retriever.store._RANKED", at_once)
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


def test_places_are_those_of_the_documents_that_are_there(index):
    names = {"d3", "é", "d50", "elsewhere"}
    assert index.places(names) == {"d3": 3, "é": 50, "d50": 51}


def test_ranks_of_what_is_not_there_are_refused(index):
    for places, message in (
        ([0, 52], "positions from 0 to 51"),
        ([-1, 3], "positions from 0 to 51"),
        ([0], "there are 1 places for 2 queries"),
    ):
        with pytest.raises(InputError, match=message):
            index.ranks(_vectors(2), places)
    with pytest.raises(InputError, match=r"must be \[Q, 8\]"):
        index.ranks(_vectors(2, width=7), [0, 1])

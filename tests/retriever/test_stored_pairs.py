"""Pairs on disk are those in memory, row by row and batch by batch."""

import dataclasses
import os

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.data.rows import write_rows
from tfdpsq.layers import T5Config, train_only
from tfdpsq.retriever import (
    encode_documents,
    encode_negatives,
    encode_pairs,
    make_batches,
    stored_pairs,
    with_vectors,
)
from tfdpsq.retriever.training import content_key, encode_rows
from tfdpsq.validation import DataError, InputError

LENGTHS = {"query_length": 6, "document_length": 12}


def _positive_keys(rows, keys, positives):
    """The others of each row's query, by dicts of sets."""
    by_document, by_query = {}, {}
    for row, key in zip(rows, keys):
        by_document.setdefault(row.document_id, set()).add(key)
        by_query.setdefault(row.query_id, set()).add(key)
    for query_id, document_ids in positives.items():
        if query_id in by_query:
            for document_id in document_ids:
                by_query[query_id] |= by_document.get(document_id, set())
    others = [sorted(by_query[row.query_id] - {key}) for row, key in zip(rows, keys)]
    width = max(1, max(map(len, others)))
    return [known + [-1] * (width - len(known)) for known in others]


@pytest.fixture(scope="module")
def rows(make_rows):
    """Pairs of which some share their query, their document, or both, far apart."""
    made = make_rows(61)
    draw = np.random.default_rng(8)
    for number in draw.choice(61, 40):
        other = made[int(draw.integers(61))]
        made[number] = dataclasses.replace(
            made[number],
            **(
                {"query_id": other.query_id}
                if draw.random() < 0.6
                else {"document_id": other.document_id, "document": other.document}
            ),
        )
    return [*made, made[3], made[0]]  # two rows once more


@pytest.mark.parametrize("several", [True, False])
def test_known_answers_equal_dicts_of_sets(rows, tokenizer, several):
    """With what is known beside the rows, too; and where no query has several."""
    positives = {}
    if several:
        positives = {
            row.query_id: {rows[place].document_id, "in no row"}
            for place, row in enumerate(rows[::5])
        }
        positives["not in the rows"] = {rows[0].document_id}
    else:
        rows = [
            dataclasses.replace(row, query_id=f"own{i}") for i, row in enumerate(rows)
        ]
    arrays = encode_pairs(rows, tokenizer, **LENGTHS, positives=positives)
    keys = [content_key(row.document) for row in rows]
    expected = _positive_keys(rows, keys, positives)
    assert arrays["positive_keys"].tolist() == expected
    assert (len(expected[0]) > 2) == several
    assert (np.array(expected) >= 0).any() == several


@pytest.mark.parametrize("stays", [False, True])
def test_batches_are_those_of_memory(rows, tokenizer, make_model, tmp_path, stays):
    """To the last bit, over epochs, with documents embedded once or in each batch."""
    model = make_model(shared=False) if stays else None
    if stays:
        model.document_tower.trainable = False
    expected = make_batches(rows, tokenizer, 9, **LENGTHS, seed=4, model=model)
    stored = stored_pairs.store_pairs(
        tmp_path / "rows", iter(rows), tokenizer, **LENGTHS, model=model
    )
    assert len(stored) == len(rows)
    found = stored.batches(9, seed=4)
    for _ in range(20):  # three epochs of 7
        one, other = next(expected), next(found)
        assert one.keys() == other.keys()
        for name, values in one.items():
            assert values.dtype == other[name].dtype
            np.testing.assert_array_equal(values, other[name], strict=True)
    if stays:
        files = sorted((tmp_path / "rows" / "documents").glob("rows-*"))
        distinct = len({row.document for row in rows})
        assert sum(os.path.getsize(file) for file in files) == distinct * (12 * 4 + 8)


def test_embedded_rows_are_those_of_memory(rows, tokenizer, make_model, tmp_path):
    """With hard negatives, and documents of which some are known."""
    model = make_model(shared=False)
    model.document_tower.trainable = False
    texts = {
        r.query_id: [other.document for other in rows[i::9]]
        for i, r in enumerate(rows)
        if i % 4
    }
    negatives = encode_negatives(rows, texts, tokenizer, LENGTHS["document_length"], 3)
    arrays = {**encode_rows(rows, tokenizer, **LENGTHS), **negatives}
    texts = sorted({row.document for row in rows})[:5]
    corpus = encode_documents(texts, tokenizer, LENGTHS["document_length"])
    held = with_vectors(model, corpus)
    expected = with_vectors(model, arrays, known=held)
    chunks = ({k: v[i : i + 7] for k, v in arrays.items()} for i in range(0, 63, 7))
    store = write_rows(tmp_path / "rows", chunks)
    assert len(store) == len(rows) == 63
    found = stored_pairs.WithVectors(tmp_path / "vectors", store, model, held)
    at = np.array([62, 0, 13, 13, 7, 61])
    taken = found.take(at)
    assert taken.keys() == expected.keys() and len(found) == 63
    for name, values in expected.items():
        np.testing.assert_allclose(taken[name], values[at], atol=1e-6, err_msg=name)
    # A run that goes on after a kill reads the same vectors, and embeds nothing.
    model.document_tower.set_weights(
        [0 * weight for weight in model.document_tower.get_weights()]
    )
    again = stored_pairs.WithVectors(tmp_path / "vectors", store, model, held)
    for name, values in again.take(at).items():
        np.testing.assert_array_equal(values, taken[name], strict=True)
    files = [file for file in (tmp_path / "vectors").rglob("*") if file.is_file()]
    largest = max(files, key=os.path.getsize)
    whole = largest.read_bytes()
    largest.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    with pytest.raises(DataError, match="vectors"):
        stored_pairs.WithVectors(tmp_path / "vectors", store, model, held)
    largest.write_bytes(whole)


def test_document_vectors_are_bitwise_independent_of_other_rows(
    rows, tokenizer, make_model, tmp_path
):
    """To the last bit, whatever shares its batch, and wherever it stands in it."""
    lengths = {"query_length": 6, "document_length": 64}
    model = make_model(shared=False, **lengths)
    model.document_tower.trainable = False
    cut = [
        dataclasses.replace(row, document=" ".join(row.document.split()[: 1 + i % 8]))
        for i, row in enumerate(rows)
    ]
    arrays = encode_rows(cut, tokenizer, **lengths)
    first = encode_documents([" ".join(["w1 w2 w3"] * 9)], tokenizer, 64)
    more = {
        name: np.concatenate([first.get(name, values[:1]), values])
        for name, values in arrays.items()
    }
    found = [
        stored_pairs.WithVectors(
            tmp_path / f"vectors{number}",
            write_rows(tmp_path / f"rows{number}", [given]),
            model,
        ).take(np.arange(number, number + 63))["document_vectors"]
        for number, given in enumerate((arrays, more))
    ]
    np.testing.assert_array_equal(*found, strict=True)


def test_vectors_of_other_documents_are_not_used(rows, tokenizer, make_model, tmp_path):
    """A corpus in another order has other known documents, and as many new ones."""
    model = make_model(shared=False)
    model.document_tower.trainable = False
    store = write_rows(tmp_path / "rows", [encode_rows(rows, tokenizer, **LENGTHS)])
    texts = sorted({row.document for row in rows})
    here, there = (
        with_vectors(
            model, encode_documents(known, tokenizer, LENGTHS["document_length"])
        )
        for known in (texts[:5], texts[-5:])
    )
    place = tmp_path / "vectors"
    stored_pairs.WithVectors(place, store, model, here)
    stored_pairs.WithVectors(place, store, model, here)
    with pytest.raises(DataError, match="other documents"):
        stored_pairs.WithVectors(place, store, model, there)


def _pooling(make_model, trained=("query_tower/projection/kernel",), **changes):
    model = make_model(**{"shared": False, **changes})
    train_only(model, list(trained))
    return model


def test_pooled_queries_are_those_of_the_tower(rows, tokenizer, make_model, tmp_path):
    """To the last bit, whatever else was in a query's batch."""
    model = _pooling(make_model)
    arrays = encode_rows(rows, tokenizer, **LENGTHS)
    store = write_rows(tmp_path / "rows", [arrays])
    found = stored_pairs.PooledQueries(tmp_path / "states", store, model)
    at = np.array([62, 0, 13, 13, 7, 61])
    taken = found.take(at)
    assert len(found) == 63
    assert taken.keys() - arrays.keys() == {"query_states"}
    assert arrays.keys() - taken.keys() == {"query_ids", "query_lengths"}
    ids, lengths = arrays["query_ids"][at], arrays["query_lengths"][at]
    expected = model.encode_queries(ids, lengths)
    batch = {name: tf.constant(values) for name, values in taken.items()}
    np.testing.assert_allclose(model.embed_queries(batch), expected, atol=1e-6)
    # Another query in its batch changes no bit of a query's states.
    changed = dict(arrays, query_ids=arrays["query_ids"].copy())
    changed["query_ids"][8:16, 0] += 1
    changed["query_lengths"] = np.where(np.arange(63) == 9, 1, changed["query_lengths"])
    other = write_rows(tmp_path / "others", [changed])
    again = stored_pairs.PooledQueries(tmp_path / "again", other, model)
    same = [n for n in range(63) if not 8 <= n < 16]
    one, two = (rows.take(same)["query_states"] for rows in (found, again))
    np.testing.assert_array_equal(one, two, strict=True)
    assert (again.take([10])["query_states"] != found.take([10])["query_states"]).any()


@pytest.mark.parametrize(
    "changes",
    [
        {"shared": True, "trained": ("*projection/kernel",)},
        {"t5": T5Config(60, 1, 2, 16, 24, 8, "1.1", dropout=0.1)},
    ],
    ids=["shared", "dropout"],
)
def test_trained_queries_are_not_pooled(rows, tokenizer, make_model, tmp_path, changes):
    model = _pooling(make_model, **changes)
    assert not model.queries_pooled
    store = write_rows(tmp_path / "rows", [encode_rows(rows, tokenizer, **LENGTHS)])
    with pytest.raises(InputError, match="states of queries change"):
        stored_pairs.PooledQueries(tmp_path / "states", store, model)
    assert not (tmp_path / "states").exists()


def test_what_cannot_be_stored_is_refused(model, make_rows, tokenizer, tmp_path):
    rows = make_rows(4)
    for pairs, options, message in (
        ([], {}, "no rows were given"),
        (rows, {"model": model}, "trainable weights"),
    ):
        with pytest.raises(InputError, match=message):
            stored_pairs.store_pairs(
                tmp_path / message, pairs, tokenizer, **LENGTHS, **options
            )
    stored = stored_pairs.store_pairs(tmp_path / "rows", rows, tokenizer, **LENGTHS)
    with pytest.raises(InputError, match="batch_size is 5 but there are 4 pairs"):
        stored.batches(5, seed=0)

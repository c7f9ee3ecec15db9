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
from tfdpsq.retriever.known_answers import KnownAnswers
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


@pytest.fixture
def chunked(monkeypatch):
    """Chunks of seven pairs, so that what belongs together is in several."""
    monkeypatch.setattr(stored_pairs, "CHUNK", 7)


@pytest.mark.parametrize("several", [True, False])
def test_known_answers_are_those_of_dicts_of_sets(rows, tokenizer, several):
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


def test_answers_of_a_query_of_one_document_are_not_kept():
    """Nothing is in memory of most sets, however often a row comes."""
    draw = np.random.default_rng(1)
    queries, keys = draw.integers(0, 2**62, [2, 300])
    queries, keys = np.tile(queries, 3), np.tile(keys, 3)
    answers = KnownAnswers(queries, keys)
    assert not len(answers._keys) and answers.most == 1
    assert (answers.others(queries, keys) == -1).all()


@pytest.mark.parametrize("stays", [False, True])
def test_batches_are_those_of_memory(
    rows, tokenizer, make_model, tmp_path, chunked, stays
):
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


@pytest.mark.parametrize("known", [0, 5, None])
def test_embedded_rows_are_those_of_memory(
    rows, tokenizer, make_model, tmp_path, chunked, known
):
    """With hard negatives, and documents of which none, some or all are known."""
    model = make_model(shared=False)
    model.document_tower.trainable = False
    texts = {
        r.query_id: [other.document for other in rows[i::9]]
        for i, r in enumerate(rows)
        if i % 4
    }
    negatives = encode_negatives(rows, texts, tokenizer, LENGTHS["document_length"], 3)
    arrays = {**encode_rows(rows, tokenizer, **LENGTHS), **negatives}
    corpus = (
        encode_documents(
            sorted({row.document for row in rows})[:known],
            tokenizer,
            LENGTHS["document_length"],
        )
        if known != 0
        else None
    )
    held = None if corpus is None else with_vectors(model, corpus)
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
    if known is not None:  # else the missing negatives' text alone is stored
        other = write_rows(tmp_path / "fewer", [{k: v[:3] for k, v in arrays.items()}])
        with pytest.raises(DataError, match="vectors for"):
            stored_pairs.WithVectors(tmp_path / "vectors", other, model, held)


def test_one_row_more_changes_no_other_documents_vector(
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


def test_pooled_queries_are_those_of_the_tower(
    rows, tokenizer, make_model, tmp_path, monkeypatch
):
    """Each query's alone, to the last bit, in whatever batch it was."""
    monkeypatch.setattr(stored_pairs, "_BATCH", 8)
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
    # Nor does a row more, which moves all others by a place.
    more = {name: np.concatenate([v[5:6], v]) for name, v in arrays.items()}
    moved = stored_pairs.PooledQueries(
        tmp_path / "moved", write_rows(tmp_path / "more", [more]), model
    )
    one, two = found.take(range(63)), moved.take(range(1, 64))
    np.testing.assert_array_equal(one["query_states"], two["query_states"], strict=True)


def test_a_killed_runs_pooled_queries_are_used_again(
    rows, tokenizer, make_model, tmp_path
):
    model = _pooling(make_model)
    arrays = encode_rows(rows, tokenizer, **LENGTHS)
    store = write_rows(tmp_path / "rows", [arrays])
    place = tmp_path / "states"
    first = stored_pairs.PooledQueries(place, store, model).take(range(63))
    model.query_tower.set_weights([0 * w for w in model.query_tower.get_weights()])
    again = stored_pairs.PooledQueries(place, store, model).take(range(63))
    np.testing.assert_array_equal(again["query_states"], first["query_states"])
    fewer = write_rows(tmp_path / "fewer", [{k: v[:3] for k, v in arrays.items()}])
    with pytest.raises(DataError, match="63 vectors for 3 queries"):
        stored_pairs.PooledQueries(place, fewer, model)
    (file,) = place.glob("rows-*")
    file.write_bytes(b"\x01" + file.read_bytes()[1:])
    with pytest.raises(DataError, match="states"):
        stored_pairs.PooledQueries(place, store, model)


@pytest.mark.parametrize(
    "changes",
    [
        {"trained": ("query_tower/*",)},
        {"trained": ("*projection/kernel",)},
        {"shared": True, "trained": ("*projection/kernel",)},
        {"t5": T5Config(60, 1, 2, 16, 24, 8, "1.1", dropout=0.1)},
    ],
    ids=["layers", "documents", "shared", "dropout"],
)
def test_queries_that_change_in_training_are_not_pooled(
    rows, tokenizer, make_model, tmp_path, changes
):
    model = _pooling(make_model, **changes)
    assert not model.queries_pooled
    store = write_rows(tmp_path / "rows", [encode_rows(rows, tokenizer, **LENGTHS)])
    with pytest.raises(InputError, match="states of queries change"):
        stored_pairs.PooledQueries(tmp_path / "states", store, model)
    assert not (tmp_path / "states").exists()


def test_rows_are_taken_in_any_order(rows, tokenizer, tmp_path, chunked):
    """As `encode_pairs` has them, twice if they are wanted twice."""
    stored = stored_pairs.store_pairs(tmp_path / "rows", rows, tokenizer, **LENGTHS)
    arrays = encode_pairs(rows, tokenizer, **LENGTHS)
    at = np.array([62, 0, 13, 13, 7, 61])
    found = stored.take(at)
    assert found.keys() == arrays.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(found[name], values[at])


def test_what_cannot_be_stored_is_refused(model, make_rows, tokenizer, tmp_path):
    """A trained tower, no pairs, a length of none, a batch larger than all."""
    rows = make_rows(4)
    for number, (pairs, options, message) in enumerate(
        (
            ([], {}, "no rows were given"),
            (rows, {"query_length": 0}, "query_length is 0"),
            (rows, {"model": model}, "trainable weights"),
        )
    ):
        with pytest.raises(InputError, match=message):
            stored_pairs.store_pairs(
                tmp_path / str(number), pairs, tokenizer, **{**LENGTHS, **options}
            )
    stored = stored_pairs.store_pairs(tmp_path / "rows", rows, tokenizer, **LENGTHS)
    with pytest.raises(InputError, match="batch_size is 5 but there are 4 pairs"):
        stored.batches(5, seed=0)
    with pytest.raises(InputError, match="trainable weights"):
        with_vectors(model, encode_pairs(rows, tokenizer, **LENGTHS))

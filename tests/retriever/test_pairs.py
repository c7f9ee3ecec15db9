"""Rows and batches: static shapes, whole epochs, keys and known answers."""

import dataclasses
import itertools

import numpy as np
import pytest
from helpers.retrieval import collate

from tfdpsq import retriever
from tfdpsq.retriever import encode_pairs, shuffled_batches, store_pairs
from tfdpsq.retriever.pairs import content_key
from tfdpsq.validation import InputError

LENGTHS = {"query_length": 6, "document_length": 12}

SHAPES = {
    "query_ids": ((4, 6), np.int32),
    "query_lengths": ((4,), np.int32),
    "document_ids": ((4, 12), np.int32),
    "document_lengths": ((4,), np.int32),
    "document_key": ((4,), np.int64),
    "positive_keys": ((4, 1), np.int64),
    "weights": ((4,), np.float32),
}


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


def test_batch_holds_the_callers_rows_in_order(make_rows, tokenizer):
    rows = make_rows(5)
    arrays = encode_pairs(rows, tokenizer, **LENGTHS)
    order = [3, 1, 0, 0]
    batch = collate(arrays, np.array(order), np.array([1, 1, 0, 0]))
    assert {n: (a.shape, a.dtype) for n, a in batch.items()} == {
        n: (shape, np.dtype(dtype)) for n, (shape, dtype) in SHAPES.items()
    }
    assert batch["weights"].tolist() == [1, 1, 0, 0]
    for i, row in enumerate(rows[number] for number in order):
        assert batch["document_key"][i] == content_key(row.document)
        for name, length in (("query", 6), ("document", 12)):
            ids, lengths = tokenizer.encode([getattr(row, name)], length)
            np.testing.assert_array_equal(batch[f"{name}_ids"][i], ids[0])
            assert batch[f"{name}_lengths"][i] == int(lengths[0])


@pytest.mark.parametrize("several", [True, False])
def test_known_answers_equal_dicts_of_sets(rows, tokenizer, several):
    if not several:
        rows = [
            dataclasses.replace(row, query_id=f"q{i}") for i, row in enumerate(rows)
        ]
    found = encode_pairs(rows, tokenizer, **LENGTHS)["positive_keys"]
    keys = [content_key(row.document) for row in rows]
    by_query = {}
    for row, key in zip(rows, keys):
        by_query.setdefault(row.query_id, set()).add(key)
    others = [sorted(by_query[row.query_id] - {key}) for row, key in zip(rows, keys)]
    width = max(1, max(map(len, others)))
    assert found.tolist() == [known + [-1] * (width - len(known)) for known in others]
    assert (width > 2) == several and (found >= 0).any() == several


def test_stored_pairs_are_those_of_memory(rows, tokenizer, tmp_path):
    """With hard negatives, to the last bit."""
    texts = {r.query_id: [o.document for o in rows[i::9]] for i, r in enumerate(rows)}

    def negatives(some):
        return retriever.encode_negatives(some, texts, tokenizer, 12, 3)

    expected = {**encode_pairs(rows, tokenizer, **LENGTHS), **negatives(rows)}
    stored = store_pairs(
        tmp_path / "rows", iter(rows), tokenizer, **LENGTHS, negatives=negatives
    )
    assert len(stored) == len(rows)
    at = np.array([62, 0, 13, 13, 7, 61])
    found = stored.take(at)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values[at], strict=True)


def test_an_epoch_sees_no_row_twice_and_later_ones_differ():
    # 10 rows make 2 batches of 4; the 2 left out change from epoch to epoch.
    batches = list(itertools.islice(shuffled_batches(10, 4, seed=0), 40))
    epochs = [np.concatenate(batches[i : i + 2]).tolist() for i in range(0, 40, 2)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 20
    assert {row for epoch in epochs for row in epoch} == set(range(10))
    # A run that goes on after some steps takes the batches that come next.
    for start in (1, 4, 7):
        later = itertools.islice(shuffled_batches(10, 4, seed=0, start=start), 5)
        np.testing.assert_array_equal(list(later), batches[start : start + 5])


def test_missing_negatives_are_marked_up_to_the_count(make_rows, tokenizer):
    rows = make_rows(3)
    negatives = {
        rows[0].query_id: ["a bb", "ccc", "dddd"],
        rows[1].query_id: ["ccc"],
    }
    arrays = retriever.encode_negatives(rows, negatives, tokenizer, 4, 2)
    key = content_key
    np.testing.assert_array_equal(
        arrays["negative_keys"],
        [[key("a bb"), key("ccc")], [key("ccc"), -1], [-1, -1]],
    )
    ids, lengths = tokenizer.encode(["a bb", "ccc"], 4)
    np.testing.assert_array_equal(arrays["negative_ids"][0], ids)
    np.testing.assert_array_equal(arrays["negative_lengths"][0], lengths)
    np.testing.assert_array_equal(arrays["negative_ids"][1, 0], ids[1])


def test_bad_sizes_are_refused_at_once(make_rows, tokenizer, tmp_path):
    with pytest.raises(InputError, match="batch_size is 5 but there are 4 pairs"):
        shuffled_batches(4, 5, seed=0)
    with pytest.raises(InputError, match="no pairs"):
        encode_pairs([], tokenizer, **LENGTHS)
    with pytest.raises(InputError, match="query_length is 0"):
        encode_pairs(make_rows(4), tokenizer, query_length=0, document_length=12)
    with pytest.raises(InputError, match="no rows were given"):
        store_pairs(tmp_path / "rows", [], tokenizer, **LENGTHS)

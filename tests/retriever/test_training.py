"""Batches: static shapes, whole epochs, keys and positives worked out by hand."""

import numpy as np
import pytest

from tfdpsq.retriever import collate, encode_pairs, make_batches
from tfdpsq.retriever.training import content_key
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


def test_batches_have_one_shape_and_hold_the_pairs(make_rows, tokenizer):
    rows = make_rows(11)
    by_key = {content_key(row.document): row for row in rows}
    batches = make_batches(rows, tokenizer, 4, **LENGTHS, seed=0)
    for _ in range(6):
        batch = next(batches)
        assert {n: (a.shape, a.dtype) for n, a in batch.items()} == {
            n: (shape, np.dtype(dtype)) for n, (shape, dtype) in SHAPES.items()
        }
        assert batch["weights"].tolist() == [1, 1, 1, 1]
        for i, key in enumerate(batch["document_key"]):
            row = by_key[int(key)]
            for name, length in (("query", 6), ("document", 12)):
                ids, lengths = tokenizer.encode([getattr(row, name)], length)
                np.testing.assert_array_equal(batch[f"{name}_ids"][i], ids[0])
                assert batch[f"{name}_lengths"][i] == int(lengths[0])


def test_an_epoch_sees_no_row_twice_and_later_ones_differ(make_rows, tokenizer):
    rows = make_rows(10)
    batches = make_batches(rows, tokenizer, 4, **LENGTHS, seed=0)
    # 10 rows make 2 batches of 4; the 2 left out change from epoch to epoch.
    epochs = [
        [int(key) for _ in range(2) for key in next(batches)["document_key"]]
        for _ in range(20)
    ]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 20
    assert {key for epoch in epochs for key in epoch} == {
        content_key(row.document) for row in rows
    }


def test_batch_larger_than_the_data_is_refused_at_once(make_rows, tokenizer):
    with pytest.raises(InputError, match="batch_size is 5 but there are 4 pairs"):
        make_batches(make_rows(4), tokenizer, 5, **LENGTHS, seed=0)
    with pytest.raises(InputError, match="no pairs"):
        encode_pairs([], tokenizer, **LENGTHS)
    with pytest.raises(InputError, match="query_length is 0"):
        make_batches(
            make_rows(4), tokenizer, 2, query_length=0, document_length=12, seed=0
        )


def test_collate_takes_the_callers_rows_in_order(make_rows, tokenizer):
    arrays = encode_pairs(make_rows(5), tokenizer, **LENGTHS)
    batch = collate(arrays, np.array([3, 1, 0, 0]), np.array([1, 1, 0, 0]))
    np.testing.assert_array_equal(
        batch["document_key"], arrays["document_key"][[3, 1, 0, 0]]
    )
    assert (batch["weights"].dtype, batch["weights"].tolist()) == (
        np.float32,
        [1, 1, 0, 0],
    )
    for weights in (np.array([1, 1, 0]), np.array([1, 1, 0.5, 0])):
        with pytest.raises(InputError, match="one for each of the 4 rows"):
            collate(arrays, np.array([3, 1, 0, 0]), weights)

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


def test_seed_decides_the_batches(make_rows, tokenizer):
    def keys(seed):
        batches = make_batches(make_rows(10), tokenizer, 4, **LENGTHS, seed=seed)
        return [next(batches)["document_key"].tolist() for _ in range(5)]

    assert keys(1) == keys(1)
    assert keys(1) != keys(2)


def test_batch_larger_than_the_data_is_refused_at_once(make_rows, tokenizer):
    with pytest.raises(InputError, match="batch_size is 5 but there are 4 pairs"):
        make_batches(make_rows(4), tokenizer, 5, **LENGTHS, seed=0)
    with pytest.raises(InputError, match="no pairs"):
        encode_pairs([], tokenizer, **LENGTHS)
    with pytest.raises(InputError, match="query_length is 0"):
        make_batches(
            make_rows(4), tokenizer, 2, query_length=0, document_length=12, seed=0
        )


def test_positive_keys_are_the_querys_other_known_documents(tokenizer, make_rows):
    a, b, c, d = make_rows(4)
    same_query = type(a)(a.query_id, a.query, b.document_id, b.document)
    rows = [a, same_query, c, d]
    positives = {
        a.query_id: {d.document_id},
        c.query_id: {c.document_id, "in no row"},
        "not in the rows": {d.document_id},
    }
    key = {row.document_id: content_key(row.document) for row in (a, b, c, d)}
    expected = [
        # Query a is paired with b by its second row, and with d by `positives`.
        sorted([key[b.document_id], key[d.document_id]]),
        sorted([key[a.document_id], key[d.document_id]]),
        [-1, -1],  # its own document, and one that no row holds
        [-1, -1],
    ]
    arrays = encode_pairs(rows, tokenizer, **LENGTHS, positives=positives)
    assert arrays["positive_keys"].tolist() == expected


def test_one_document_id_with_several_contents(tokenizer, make_rows):
    # Pseudo-pairs cut another sentence out of the document each.
    a, b = make_rows(2)
    cut = type(a)("q9", "other words", a.document_id, a.document + " without")
    arrays = encode_pairs(
        [a, cut, b], tokenizer, **LENGTHS, positives={b.query_id: {a.document_id}}
    )
    assert arrays["document_key"][0] != arrays["document_key"][1]
    assert arrays["positive_keys"][2].tolist() == sorted(
        arrays["document_key"][:2].tolist()
    )


def test_content_key_is_a_63_bit_number_equal_in_every_process():
    keys = [content_key(f"text {n}") for n in range(2000)]
    assert all(0 <= key < 2**63 for key in keys)
    assert max(keys) > 2**62
    assert len(set(keys)) == 2000
    # printf 'é x' | b2sum -l 64
    assert content_key("é x") == 0x28D35A5F00EB1098 >> 1


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


def test_padding_taken_from_real_rows_changes_no_loss(model, make_rows, tokenizer):
    arrays = encode_pairs(make_rows(5), tokenizer, **LENGTHS)
    plain = model.per_example_losses(collate(arrays, np.array([3, 1, 4])))
    # The padding holds row 2, a negative of all three were it counted.
    padded = collate(arrays, np.array([3, 1, 4, 2, 2]), np.array([1, 1, 1, 0, 0]))
    got = model.per_example_losses(padded)
    np.testing.assert_allclose(got[:3], plain, rtol=0, atol=1e-5)
    assert not np.any(got[3:])

"""The map of query embeddings: its loss, its gradient and its sensitivity."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import fast_oracle as oracle

from tfdpsq.layers import QueryAdapter, sampled_softmax
from tfdpsq.privacy import fast
from tfdpsq.validation import InputError

_SCALE = 20.0


def _unit(values):
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def _vectors(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _naive(documents, queries, negatives, scale):
    """The losses in float64, a row and a negative at a time."""
    found = []
    for document, query in zip(_unit(np.float64(documents)), np.float64(queries)):
        terms = [np.exp(scale * query @ document)]
        for negative in _unit(np.float64(negatives)):
            if not np.allclose(negative, document, atol=1e-5):
                terms.append(np.exp(scale * query @ negative))
        found.append(np.log(sum(terms)) - np.log(terms[0]))
    return found


def test_loss_equals_a_naive_softmax_over_other_documents():
    documents = _vectors(0, 6, 5)
    queries = _unit(_vectors(1, 6, 5))
    # The first two are the documents of rows 2 and 4 again, longer and shorter.
    negatives = np.concatenate([3 * documents[[2]], documents[[4]] / 7])
    negatives = np.concatenate([negatives, _vectors(2, 9, 5)])
    found = sampled_softmax(negatives, _SCALE)(documents, queries)
    expected = _naive(documents, queries, negatives, _SCALE)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    # With the own documents among the negatives these rows would lose log 2 at least.
    alone = sampled_softmax(negatives[:2], _SCALE)(
        documents[[2]], _unit(documents[[2]])
    )
    assert alone.numpy()[0] < np.log(2)


def test_hard_negatives_belong_to_their_row():
    documents, queries = _vectors(0, 4, 5), _unit(_vectors(1, 4, 5))
    hard, shared = _vectors(2, 4, 3, 5), _vectors(3, 7, 5)
    hard[1, 2] = 0  # row 1 has two, row 2 none
    hard[2] = 0
    hard[3, 0] = 2 * documents[3]  # the own document again
    given = np.concatenate([documents[:, np.newaxis], hard], axis=1)
    found = sampled_softmax(shared, _SCALE)(tf.constant(given), queries).numpy()
    for row, kept in enumerate((hard[0], hard[1, :2], hard[2, :0], hard[3, 1:])):
        negatives = np.concatenate([shared, kept])
        (expected,) = _naive(documents[[row]], queries[[row]], negatives, _SCALE)
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5)


def test_own_document_is_recognized_at_any_length():
    documents = _unit(_vectors(0, 1, 384))
    loss = sampled_softmax(documents, _SCALE)  # its only negative is itself
    with tf.GradientTape() as tape:
        queries = tf.constant(_unit(_vectors(1, 1, 384)))
        tape.watch(queries)
        losses = loss(documents, queries)
    assert losses.numpy()[0] == 0
    np.testing.assert_array_equal(tape.gradient(losses, queries), np.zeros([1, 384]))
    for factor in (1e-30, 1e-8, 1.7, 1e30):
        assert loss(np.float32(factor) * documents, queries).numpy()[0] == 0
    # A cosine of .999 is of another document.
    near = _unit(documents + 0.0447 * _unit(_vectors(2, 1, 384)))
    assert 0.998 < np.sum(near * documents) < 0.9995
    assert 0.1 < sampled_softmax(near, _SCALE)(documents, queries).numpy()[0]


def test_gradient_equals_central_differences():
    documents, queries = _vectors(0, 2, 4), _unit(_vectors(1, 2, 4))
    hard, negatives = _vectors(2, 2, 3, 4), _vectors(3, 6, 4)
    given = np.concatenate([documents[:, np.newaxis], hard], axis=1)
    with tf.GradientTape() as tape:
        symbols = tf.constant(queries)
        tape.watch(symbols)
        losses = sampled_softmax(negatives, 3.0)(given, symbols)
    found = tape.gradient(losses, symbols).numpy()
    for row in range(2):
        among = np.concatenate([negatives, hard[row]])
        for at in range(4):
            moved = []
            for step in (1e-5, -1e-5):
                query = np.float64(queries[[row]])
                query[0, at] += step
                moved.append(_naive(documents[[row]], query, among, 3.0)[0])
            slope = (moved[0] - moved[1]) / 2e-5
            np.testing.assert_allclose(found[row, at], slope, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_adapter_starts_as_the_identity_with_unit_length(factor):
    vectors = _vectors(0, 7, 5)
    found = QueryAdapter()(np.float32(factor) * vectors)
    np.testing.assert_allclose(found, _unit(vectors), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(QueryAdapter()(np.zeros([2, 5])), np.zeros([2, 5]))
    layer = QueryAdapter()
    layer.build([None, 5])
    np.testing.assert_array_equal(layer.get_weights()[0], np.eye(5))
    assert tuple(layer.compute_output_shape((2, 5))) == (2, 5)


def test_rows_do_not_read_other_rows():
    loss = sampled_softmax(_vectors(0, 30, 5), _SCALE)
    documents, queries = _vectors(1, 8, 5), _unit(_vectors(2, 8, 5))
    together = loss(documents, queries).numpy()
    for row in range(8):
        alone = loss(documents[[row]], queries[[row]]).numpy()
        np.testing.assert_allclose(alone[0], together[row], rtol=1e-5)
    queries[3] = np.nan
    found = loss(documents, queries).numpy()
    assert np.isnan(found[3])
    np.testing.assert_allclose(np.delete(found, 3), np.delete(together, 3), rtol=1e-6)


def test_one_pair_moves_the_clipped_sum_by_at_most_the_clip_norm():
    """`privacy.fast` against gradients clipped one by one in float64."""
    clip, negatives = 0.7, _vectors(0, 40, 6)
    loss, layer = sampled_softmax(negatives, _SCALE), QueryAdapter()
    queries, documents = _vectors(1, 12, 6), _vectors(2, 12, 6)
    layer(queries)
    layer.set_weights([np.eye(6) + 0.1 * _vectors(3, 6, 6)])

    gradients = oracle.by_row(
        lambda rows: loss(documents[rows], layer(queries[rows])),
        layer.trainable_variables,
        12,
    )

    @tf.function
    def clipped_sum(inputs, targets):
        found = fast.clipped_sum(
            lambda: loss(targets, layer(inputs)),
            [layer],
            layer.trainable_variables,
            clip,
        )
        return found.sums[0]

    whole = clipped_sum(tf.constant(queries), tf.constant(documents)).numpy()
    (expected,) = oracle.clipped_by_hand(np.float64(gradients), clip)
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-5)
    moved = []
    for row in range(12):
        rest = np.delete(np.arange(12), row)
        fewer = clipped_sum(*map(tf.constant, (queries[rest], documents[rest])))
        moved.append(np.linalg.norm(whole - fewer.numpy()))
    assert max(moved) <= clip * (1 + 1e-5)
    assert max(moved) > 0.99 * clip  # so the bound is no larger than it must be


def test_bad_embeddings_scales_and_widths_are_refused():
    for negatives, message in (
        (np.ones([0, 4]), r"have shape \(0, 4\)"),
        (np.eye(3)[:, :2], "row 2 of negatives is zero"),
        (np.array([[1.0, 2.0], [1.0, np.inf]]), "row 1 of .*not finite"),
    ):
        with pytest.raises(InputError, match=message):
            sampled_softmax(negatives)
    with pytest.raises(InputError, match="documents have shape"):
        loss = sampled_softmax(_vectors(0, 3, 5))
        loss(tf.constant(_vectors(1, 4, 6)), tf.constant(_vectors(2, 4, 5)))
    with pytest.raises(InputError, match="scale"):
        sampled_softmax(np.ones([2, 2]), float("nan"))
    with pytest.raises(InputError, match="static width"):
        QueryAdapter().build([None, None])

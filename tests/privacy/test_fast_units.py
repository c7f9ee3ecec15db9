"""Rows grouped by unit: a user's gradients are summed before they are clipped."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import fast_oracle as oracle

from tfdpsq.privacy import fast

ROWS = oracle.ROWS
# Between them: products and their gradients, lookups merged with products, shared
# weights, direct gradients, folded time.
_NAMES = ("dense, long", "conv1d", "language", "reusing", "tied, wide", "time")


def _by_unit(gradients, size, weights=None):
    """Σ of the gradients of each unit's rows, those of weight 0 left out."""
    weights = np.ones(ROWS) if weights is None else weights
    return [
        np.tensordot(
            np.kron(np.eye(ROWS // size), np.ones(size)) * weights, gradient, axes=1
        )
        for gradient in gradients
    ]


@pytest.mark.parametrize(
    ("name", "size"), [(name, 2 + number % 2) for number, name in enumerate(_NAMES)]
)
def test_units_equal_a_naive_float64_loop(name, size):
    _, twin, x = oracle.made(name)
    rows = oracle.naive(twin, x)
    gradients = _by_unit(rows, size)
    norms = oracle.norms(gradients)
    clip_norm = float(np.sort(norms)[0] * 1.01)  # one unit is kept, others clipped
    options = {"clip_norm": clip_norm, "mode": "eager"}
    found = oracle.run(twin, x, rows_per_unit=size, **options)
    assert found.norms.shape == [ROWS // size] and found.losses.shape == [ROWS]
    np.testing.assert_allclose(found.norms, norms, rtol=1e-11)
    without = np.sqrt((oracle.norms(rows) ** 2).reshape(-1, size).sum(1))
    assert np.max(np.abs(without / norms - 1)) > 0.01
    expected = oracle.clipped_by_hand(gradients, clip_norm)
    oracle.assert_close(found.sums, expected, clip_norm, tolerance=1e-9)


@pytest.mark.parametrize(
    ("garbage", "mode"),
    [(0.0, "eager"), (1e30, "eager"), (np.nan, "xla")],
)
def test_padding_rows_inside_a_unit_change_nothing(garbage, mode):
    """Of unit 0 one row is missing, of unit 2 both; unit 1 is whole."""
    weights = np.array([1.0, 0, 1, 1, 0, 0])
    model, twin, x = oracle.made("dense, long")
    gradients = _by_unit(oracle.naive(twin, x), 2, weights)
    norms = oracle.norms(gradients)
    assert norms[2] == 0
    clip_norm = float(norms[:2].mean())
    x[weights == 0] = garbage
    found = oracle.run(
        model,
        x,
        clip_norm=clip_norm,
        mode=mode,
        weights=tf.constant(weights, tf.float32),
        rows_per_unit=2,
    )
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    scale = np.minimum(1, clip_norm / norms[:2])
    expected = [np.tensordot(scale, g[:2], 1) for g in gradients]
    # Units are clipped by a bound on their norm, a few roundings above it.
    oracle.assert_close(found.sums, expected, clip_norm, tolerance=5e-5)


@pytest.mark.parametrize(("bad", "mode"), [(np.nan, "eager"), (np.inf, "xla")])
def test_nan_row_contributes_nothing_and_costs_its_unit_alone(bad, mode):
    model, twin, x = oracle.made("nested")
    gradients = [g[[0, 2]] for g in _by_unit(oracle.naive(twin, x), 2)]
    norms = oracle.norms(gradients)
    clip_norm = float(norms.mean())
    x[3, ..., 1] = bad
    x[3, ..., 0] = -bad
    found = oracle.run(model, x, clip_norm=clip_norm, mode=mode, rows_per_unit=2)
    np.testing.assert_allclose(np.asarray(found.norms)[[0, 2]], norms, rtol=1e-5)
    assert np.isinf(found.norms[1])
    expected = oracle.clipped_by_hand(gradients, clip_norm)
    # Units are clipped by a bound on their norm, a few roundings above it.
    oracle.assert_close(found.sums, expected, clip_norm, tolerance=5e-5)
    # Alone, such a unit leaves nothing at all.
    options = {"clip_norm": clip_norm, "mode": "eager", "rows_per_unit": 2}
    alone = oracle.run(model, x[2:4], **options)
    assert all(not np.any(total) for total in alone.sums)


def test_one_unit_moves_the_sum_by_at_most_the_clip_norm():
    """Clipped row by row instead, three equal rows would move it three times that."""
    model, _, x = oracle.made("attention")
    x[3:] = x[3]
    weights = np.array([1, 1, 1, 0, 0, 0], np.float32)
    for size, moves in ((3, 1e-2), (1, 3e-2)):
        sums = [
            oracle.run(
                model,
                x,
                clip_norm=1e-2,
                mode="eager",
                weights=tf.constant(kept),
                rows_per_unit=size,
            ).sums
            for kept in (weights, np.ones_like(weights))
        ]
        moved = np.sqrt(sum(np.sum((w - o) ** 2) for w, o in zip(*sums)))
        assert moved == pytest.approx(moves, rel=1e-4)


@pytest.mark.parametrize(
    ("size", "message"),
    [(4, "6 losses make no whole units of rows_per_unit = 4"), (0, "is 0; it")],
)
def test_rows_that_make_no_whole_units_are_refused(size, message):
    model, _, x = oracle.made("dense")
    with pytest.raises(ValueError, match=message):
        oracle.run(model, x, mode="eager", rows_per_unit=size)


def test_rows_of_texts_are_clipped_though_the_layer_loses_their_number():
    """`TextVectorization` gives [None, 4]; a batch of its own for every row."""
    texts = tf.keras.layers.TextVectorization(output_sequence_length=4)
    texts.adapt(["sort a list", "open one file"])
    tf.keras.utils.set_random_seed(3)
    model = tf.keras.Sequential(
        [
            tf.keras.Input((), dtype=tf.string),
            texts,
            tf.keras.layers.Embedding(12, 5),
            tf.keras.layers.GlobalAveragePooling1D(),
            tf.keras.layers.Dense(1),
        ]
    )
    rows = np.array(["sort a file", "open", "one list a list", "sort sort"], object)
    weights = tf.constant([1.0, 1.0, 0.0, 1.0])
    found = oracle.run(model, rows, clip_norm=0.02, weights=weights)
    gradients = [g[[0, 1, 3]].astype(np.float64) for g in oracle.naive(model, rows)]
    for one, other in zip(found.sums, oracle.clipped_by_hand(gradients, 0.02)):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("identifier", [-1, 12])
def test_an_extreme_id_cannot_escape_clipping(identifier):
    """XLA reads the nearest row for it, and adds its gradient to none."""
    ids, weights = tf.constant([[1, 2], [3, identifier]]), tf.constant([0.0, 1.0])
    embedding = tf.keras.layers.Embedding(7, 3)
    embedding.build([None, 2])
    layer = tf.keras.layers.Dense(3, use_bias=False)
    layer.build([None, 3])

    @tf.function(jit_compile=True)
    def run(ids):
        return fast.clipped_sum(
            lambda: 1e3 * tf.reduce_sum(layer(embedding(ids)) ** 2, axis=[1, 2]),
            [embedding, layer],
            [embedding.embeddings, layer.kernel],
            0.5,
            weights=weights,
        )

    found = run(ids)
    contribution = tf.linalg.global_norm(found.sums)
    assert float(contribution) == pytest.approx(0.5, rel=1e-4)

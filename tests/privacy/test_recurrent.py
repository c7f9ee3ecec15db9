"""Layers for which `fast` has no rule, recurrent ones above all, trained by `fit`."""

import logging

import numpy as np
import pytest
import tensorflow as tf
from helpers import fast_oracle as oracle
from helpers import plans

from tfdpsq.privacy import PrivateModel, step

ROWS, ITEMS, LENGTH = 12, 9, 5
_LOSS = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction="none")


def _classifier(dtype, *middle):
    """Two classes of a text, from the last state of an LSTM or from other layers."""
    return tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(ITEMS, 4, mask_zero=not middle, dtype=dtype),
            *(middle or [tf.keras.layers.LSTM(3, dtype=dtype)]),
            tf.keras.layers.Dense(2, dtype=dtype),
        ]
    )


def _bidirectional(dtype):
    lstm = tf.keras.layers.LSTM(3, dtype=dtype)
    return _classifier(dtype, tf.keras.layers.Bidirectional(lstm, dtype=dtype))


def _separable(dtype):
    pooling = tf.keras.layers.GlobalAveragePooling1D(dtype=dtype)
    convolution = tf.keras.layers.SeparableConv1D(6, 3, dtype=dtype)
    return _classifier(dtype, convolution, pooling)


class _Recommender(tf.keras.Model):
    """The next item of a session, scored with the embeddings that it is read with."""

    def __init__(self, dtype):
        super().__init__()
        self.items = tf.keras.layers.Embedding(ITEMS, 4, mask_zero=True, dtype=dtype)
        self.reader = tf.keras.layers.GRU(4, dtype=dtype)

    def call(self, ids, training=None):
        state = self.reader(self.items(ids), mask=self.items.compute_mask(ids))
        return tf.matmul(state, self.items.embeddings, transpose_b=True)


@pytest.mark.parametrize(
    "make, classes",
    [
        (_classifier, 2),
        (_separable, 2),
        pytest.param(_bidirectional, 2, marks=pytest.mark.slow),
        pytest.param(_Recommender, ITEMS, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_fit_is_a_float64_loop_over_rows(make, classes, monkeypatch, caplog):
    """All rows are in the batch and noise is left out: w − rate·Σ clipped / B."""
    random = np.random.default_rng(0)
    x = random.integers(1, ITEMS, [ROWS, LENGTH]).astype(np.int32)
    x[::3, 3:] = 0
    y = random.integers(0, classes, ROWS)
    tf.keras.utils.set_random_seed(1)
    model, wide = make("float32"), make("float64")
    model(x), wide(x)
    wide.set_weights(model.get_weights())
    gradients = oracle.by_row(
        lambda rows: _LOSS(y[rows], wide(x[rows])), wide.trainable_variables, ROWS
    )
    clip = float(np.median(oracle.norms(gradients)))  # half of the rows are clipped
    plan = plans.plan(
        clip_norm=clip,
        num_units=ROWS,
        n_is_public=True,
        batch_size=ROWS,
        steps=1,
        sampler="shuffled",
    )
    monkeypatch.setattr(step, "noised", lambda sums, *_: sums)
    private = PrivateModel(model, plan, microbatch_size=4)
    private.compile(tf.keras.optimizers.SGD(1.0), loss=_LOSS)
    with caplog.at_level(logging.WARNING):
        private.fit(x, y)
    assert "rowwise" in caplog.text
    facts = private.certificate("The engine that ran, not the one asked for.")
    assert facts["training"]["engine"] == "rowwise"
    sums = oracle.clipped_by_hand(gradients, clip)
    for found, before, total in zip(model.weights, wide.weights, sums):
        np.testing.assert_allclose(found, before.numpy() - total / ROWS, atol=1e-6)

"""Recurrent models, for which `fast` has no rule, trained by `fit`."""

import logging

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import PrivateModel, step

ROWS, ITEMS, LENGTH = 12, 9, 5
_LOSS = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction="none")


def _classifier(dtype):
    """Two classes of a text, from the last state of an LSTM."""
    return tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(ITEMS, 4, mask_zero=True, dtype=dtype),
            tf.keras.layers.LSTM(3, dtype=dtype),
            tf.keras.layers.Dense(2, dtype=dtype),
        ]
    )


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
    gradients = []
    for row in range(ROWS):
        with tf.GradientTape() as tape:
            loss = _LOSS(y[row : row + 1], wide(x[row : row + 1]))[0]
        found = tape.gradient(loss, wide.trainable_variables)
        gradients.append([np.array(tf.convert_to_tensor(each)) for each in found])
    norms = [np.sqrt(sum(np.square(g).sum() for g in each)) for each in gradients]
    clip = float(np.median(norms))  # half of the rows are clipped
    factors = [min(1.0, clip / norm) for norm in norms]
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
    for at, variable in enumerate(model.trainable_variables):
        clipped = [factor * each[at] for factor, each in zip(factors, gradients)]
        expected = wide.trainable_variables[at].numpy() - sum(clipped) / ROWS
        np.testing.assert_allclose(variable.numpy(), expected, atol=1e-6)

"""Batches in parts: gradient caching equals the plain gradient."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.retrieval import small_towers

from tfdpsq.retriever import cached_gradients
from tfdpsq.validation import InputError


def _batch(rows=8, hard=2, seed=0):
    draw = np.random.default_rng(seed)
    batch = {
        "document_key": draw.integers(0, 6, rows).astype(np.int64),
        "positive_keys": draw.integers(-1, 6, (rows, 2)).astype(np.int64),
        "weights": draw.choice([0.0, 1.0, 1.0], rows).astype(np.float32),
    }
    for name, shape, length in (
        ("query", [rows], 4),
        ("document", [rows], 5),
        ("negative", [rows, hard], 5),
    ):
        batch[f"{name}_ids"] = draw.integers(2, 30, (*shape, length)).astype(np.int32)
        batch[f"{name}_lengths"] = draw.integers(1, length + 1, shape).astype(np.int32)
    batch["negative_keys"] = draw.integers(-1, 9, (rows, hard)).astype(np.int64)
    return {name: tf.constant(values) for name, values in batch.items()}


def _without_negatives(batch):
    return {n: v for n, v in batch.items() if not n.startswith("negative")}


def _plain(model, batch, training=False):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model.per_example_losses(batch, training))
    gradients = tape.gradient(loss, model.trainable_variables)
    return loss, [tf.convert_to_tensor(g) for g in gradients]


@pytest.mark.parametrize(
    "rows, hard, options",
    [
        pytest.param(8, False, {"bidirectional": True}, marks=pytest.mark.slow),
        (2, True, {"shared": False, "learned_scale": True, "bidirectional": True}),
    ],
)
def test_cached_gradient_equals_the_plain_gradient(rows, hard, options):
    model, batch = small_towers(**options), _batch()
    if not hard:
        batch = _without_negatives(batch)
    variables = model.trainable_variables
    seed = tf.constant([3, 4], tf.int64)
    step = tf.function(lambda b: cached_gradients(model, b, variables, rows, seed))
    loss, gradients = step(batch)
    expected, wanted = _plain(model, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert sum(float(tf.reduce_sum(tf.abs(g))) for g in wanted) > 1
    for one, other in zip(gradients, wanted):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


def test_parts_that_do_not_divide_the_batch_are_refused():
    model, batch = small_towers(), _batch()
    with pytest.raises(InputError, match="rows"):
        cached_gradients(model, batch, model.trainable_variables, 3, [1, 2])

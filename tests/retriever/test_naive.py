"""`naive` a row at a time: the clipped sum that copies of the batch would give."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.retrieval import plan, small_towers

from tfdpsq.privacy import engines
from tfdpsq.retriever import NaiveLosses

_ROWS, _C = 8, 30.0
_PLAN = plan(_ROWS, _C, 2 * _ROWS - 1)


def _batch(seed=0):
    """Rows 2 and 7 are padding; rows 0 and 1 have one document; 3 knows 4's."""
    draw = np.random.default_rng(seed)
    batch = {
        "document_key": np.array([5, 5, 6, 7, 8, 9, 10, 11]),
        "positive_keys": np.array([[-1]] * 3 + [[8]] + [[-1]] * 4),
        "weights": np.array([1, 1, 0, 1, 1, 1, 1, 0], np.float32),
    }
    for name, length in (("query", 4), ("document", 5)):
        ids = draw.integers(2, 30, [_ROWS, length])
        batch[f"{name}_ids"] = ids.astype(np.int32)
        batch[f"{name}_lengths"] = draw.integers(1, length + 1, _ROWS).astype(np.int32)
    return {name: tf.constant(values) for name, values in batch.items()}


def _one_by_one(model, texts=2, **options):
    """A function of a batch: (clipped sums, losses, each row's gradient)."""
    variables = model.trainable_variables

    @tf.function(autograph=False, **options)
    def found(batch):
        losses, gradient = NaiveLosses(model, texts)(batch)
        made = engines.clipped_row_by_row(
            _PLAN, losses, gradient, variables, batch["weights"]
        )
        by_row = tf.map_fn(
            lambda row: gradient(tf.one_hot(row, _ROWS), variables),
            tf.range(_ROWS),
            fn_output_signature=[tf.TensorSpec(v.shape) for v in variables],
        )
        return made.sums, losses, by_row

    return found


def _flat(parts):
    parts = [np.ravel(np.asarray(part, np.float64)) for part in parts]
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def learning():
    """A model with towers of its own and a learned scale: every kind of weight."""
    return small_towers(shared=False, learned_scale=True)


@pytest.fixture(scope="module")
def step(learning):
    return _one_by_one(learning)


def test_clipped_sum_is_that_of_a_loop_over_rows(learning, step):
    """Gradients to 1e-6, compiled or not; factors up to what is held for rounding."""
    batch = _batch()
    real = np.flatnonzero(batch["weights"])
    sums, losses, by_row = step(batch)
    plain = learning.per_example_losses(batch).numpy()
    # Small ones are differences of large ones.
    np.testing.assert_allclose(losses, plain, atol=1e-6 * plain.max())
    gradients = np.stack([_flat(part[row] for part in by_row) for row in real])
    with tf.GradientTape(persistent=True) as tape:
        each = tf.unstack(learning.per_example_losses(batch))
    expected = np.stack(
        [
            _flat(
                tf.convert_to_tensor(g)
                for g in tape.gradient(
                    each[row],
                    learning.trainable_variables,
                    unconnected_gradients=tf.UnconnectedGradients.ZERO,
                )
            )
            for row in real
        ]
    )
    norms = np.linalg.norm(expected, axis=1)
    assert norms.min() < _C < norms.max()  # some are clipped and some are not
    # Small ones are differences of large ones, too.
    off = np.linalg.norm(gradients - expected, axis=1)
    assert (off < 1e-6 * norms.max()).all() and (off < 5e-6 * norms).all()
    # Each is clipped as it is: by min(1, C/‖g‖), and at most 2e-5 less, never more.
    clipped = (gradients * np.minimum(1, _C / norms)[:, None]).sum(axis=0)
    allowed = 2e-5 * np.minimum(_C, norms).sum()
    assert np.linalg.norm(_flat(sums) - clipped) < allowed


def test_clipped_sum_is_that_of_vectorized_dp_keras(learning, step):
    """tensorflow-privacy holds a gradient for each row; here there is one."""
    batch = _batch()

    @tf.function(autograph=False)
    def of_tensorflow_privacy():
        return engines.clipped_sum(
            "vectorized",
            _PLAN,
            lambda: learning.per_example_losses(batch),
            learning.trainable_variables,
            [learning],
            batch["weights"],
        ).sums

    found, expected = _flat(step(batch)[0]), _flat(of_tensorflow_privacy())
    np.testing.assert_allclose(found, expected, atol=3e-5 * _C)


def test_padding_and_rows_without_a_finite_gradient_add_nothing(learning, step):
    batch = _batch()
    sums, losses, _ = step({**batch, "weights": tf.zeros([_ROWS])})
    assert not np.any(_flat(sums)) and not np.any(losses)
    whole, _, by_row = step(batch)
    # Token 29 is in the query of row 4 alone, and its embedding is no number.
    ids, lengths = batch["query_ids"].numpy(), batch["query_lengths"].numpy()
    ids[ids == 29] = 28
    ids[4, 0], lengths[4] = 29, max(lengths[4], 1)
    spoilt = {**batch, "query_ids": tf.constant(ids)}
    before = step(spoilt)
    table = learning.query_tower.get_layer("t5_encoder").trainable_weights[0]
    kept = table.numpy()
    table.assign(np.where(np.arange(30)[:, None] == 29, np.nan, kept))
    after = step(spoilt)
    table.assign(kept)
    assert np.isnan(after[1][4])
    # That row alone is missing: exactly its clipped gradient, which is at most C.
    missing = _flat(before[0]) - _flat(after[0])
    own = _flat(part[4] for part in before[2])
    own *= min(1, _C / np.linalg.norm(own))
    np.testing.assert_allclose(missing, own, atol=3e-5 * _C)


def test_both_passes_use_the_same_dropout():
    """The gradient is that of the very losses that are returned, dropout included."""
    model, batch = small_towers(dropout=0.3), _batch()
    (kernel,) = [v for v in model.trainable_variables if "projection/kernel" in v.name]
    direction = tf.random.stateless_normal(kernel.shape, [1, 2])
    losses = NaiveLosses(model, 2)

    @tf.function(autograph=False)
    def step():
        found, gradient = losses(batch)
        (slope,) = gradient(batch["weights"], [kernel])
        return tf.reduce_sum(found), tf.reduce_sum(slope * direction)

    def seeded(shift):
        kernel.assign_add(shift * direction)
        tf.random.set_seed(7)  # restarts the function's random draws
        loss, slope = step()
        kernel.assign_add(-shift * direction)
        return float(loss), float(slope)

    (up, _), (down, _), (_, slope) = seeded(1e-2), seeded(-1e-2), seeded(0.0)
    assert (up - down) / 2e-2 == pytest.approx(slope, rel=2e-2)
    assert len({round(float(step()[0]), 5) for _ in range(3)}) == 3

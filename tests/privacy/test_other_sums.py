"""The clipped sum of rows that read each other."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.privacy import Coupled, coupled

_C, _ROWS = 10.0, 6


def _kernel():
    return tf.Variable([[0.3, -0.2], [0.5, 0.1]])


def _coupled(kernel, batch, bad=None):
    """ℓ_i = log Σ_j exp(x_i W x_j) − x_i W x_i, differentiated by a tape."""

    def losses():
        scores = batch["x"] @ kernel @ tf.transpose(batch["x"])
        away = (1 - batch["weights"]) * 1e9
        return tf.reduce_logsumexp(scores - away, 1) - tf.linalg.diag_part(scores)

    def gradient(coefficients, variables):
        with tf.GradientTape() as tape:
            kept = tf.where(coefficients != 0, losses(), 0.0)
            total = tf.reduce_sum(coefficients * kept)
        (found,) = tape.gradient(total, variables)
        return [
            found if bad is None else tf.where(coefficients[3] != 0, bad, 1) * found
        ]

    return Coupled(tf.where(batch["weights"] > 0, losses(), 0.0), gradient)


def _rows():
    x = np.random.default_rng(3).normal(size=[_ROWS, 2]).astype(np.float32)
    return {"x": 2 * x, "weights": np.array([1, 1, 0, 1, 1, 0], np.float32)}


def _clipped_by_hand(batch):
    """Each real row's clipped gradient in float64."""
    x, real = batch["x"].astype(np.float64), batch["weights"] > 0
    weight, found, norms = _kernel().numpy().astype(np.float64), [], []
    for i in np.flatnonzero(real):
        scores = x[i] @ weight @ x[real].T
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        gradient = np.outer(x[i], shares @ x[real] - x[i])
        norms.append(np.linalg.norm(gradient))
        found.append(gradient * min(1, _C / norms[-1]))
    assert min(norms) < _C < max(norms)
    return np.array(found)


@pytest.mark.parametrize("bad", [None, np.nan, 1e30])
def test_each_coupled_row_is_clipped_by_itself(bad):
    """A row without a finite norm adds nothing."""
    kernel, batch = _kernel(), _rows()
    tensors = {name: tf.constant(values) for name, values in batch.items()}
    (found,) = coupled.clipped_sum(
        _coupled(kernel, tensors, bad), [kernel], _C, tensors["weights"]
    )
    each = _clipped_by_hand(batch)
    expected = (each if bad is None else np.delete(each, 2, axis=0)).sum(0)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)

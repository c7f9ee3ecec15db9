"""The in-batch softmax against a float64 loop over rows and columns."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.retriever import in_batch_losses


def naive_losses(q, d, key, positive_keys, weights, scale):
    """Row by row, column by column, in python floats."""
    losses = []
    for i in range(len(q)):
        if weights[i] == 0:
            losses.append(0.0)
            continue
        scores = []
        for j in range(len(q)):
            s = scale * sum(float(a) * float(b) for a, b in zip(q[i], d[j]))
            if j == i:
                own = s
            elif weights[j] == 0 or key[j] == key[i] or key[j] in positive_keys[i]:
                continue
            scores.append(s)
        top = max(scores)
        losses.append(top + math.log(sum(math.exp(s - top) for s in scores)) - own)
    return losses


def _unit(array):
    return (array / np.linalg.norm(array, axis=1, keepdims=True)).astype(np.float32)


def _case(seed, b=9, scale=20.0):
    draw = np.random.default_rng(seed)
    # Few keys, so that duplicates and known positives are many; large ones, which
    # a cast to float or int32 would merge.
    keys = 2**62 + draw.integers(0, 5, b)
    return {
        "query_embeddings": _unit(draw.normal(size=(b, 4))),
        "document_embeddings": _unit(draw.normal(size=(b, 4))),
        "document_key": keys.astype(np.int64),
        "positive_keys": draw.choice([-1, -1, *keys], (b, 2)).astype(np.int64),
        "weights": draw.choice([0, 1, 1], b).astype(np.float32),
        "scale": scale,
    }


def _tensors(case):
    return {n: v if n == "scale" else tf.constant(v) for n, v in case.items()}


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_equals_a_loop_in_float64(scale, jit_compile):
    compiled = tf.function(in_batch_losses, jit_compile=jit_compile)
    for seed in range(8):
        case = _case(seed, scale=scale)
        got = compiled(**_tensors(case))
        expected = naive_losses(*case.values())
        assert got.dtype == tf.float32
        # Scores are up to `scale`, so a float32 of them is off by scale * 2^-23.
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=scale * 5e-7)


def test_own_duplicates_and_known_positives_are_no_negatives():
    # Three documents equal in embedding to the row's own. All as negatives: log 4.
    one = np.eye(1, 3, dtype=np.float32).repeat(4, axis=0)
    case = dict(
        query_embeddings=one,
        document_embeddings=one,
        document_key=np.array([7, 8, 9, 10]),
        positive_keys=np.full((4, 2), -1, np.int64),
        weights=np.ones(4, np.float32),
        scale=3.0,
    )
    assert float(in_batch_losses(**case)[0]) == pytest.approx(math.log(4))
    case["document_key"] = np.array([7, 7, 9, 10])  # row 1 is row 0's document
    assert float(in_batch_losses(**case)[0]) == pytest.approx(math.log(3))
    case["positive_keys"][0] = [10, 9]  # rows 2 and 3 answer query 0 as well
    assert float(in_batch_losses(**case)[0]) == pytest.approx(0, abs=1e-6)
    # ... and query 0 only.
    assert float(in_batch_losses(**case)[2]) == pytest.approx(math.log(4))


def _losses_and_gradients(case):
    q = tf.constant(case["query_embeddings"])
    d = tf.constant(case["document_embeddings"])
    with tf.GradientTape() as tape:
        tape.watch([q, d])
        losses = in_batch_losses(
            **{**case, "query_embeddings": q, "document_embeddings": d}
        )
        total = tf.reduce_sum(losses)
    return [losses.numpy()] + [g.numpy() for g in tape.gradient(total, [q, d])]


def test_padding_rows_change_nothing_and_receive_no_gradient():
    case = _case(2, b=6)
    case["weights"][:] = 1
    plain = _losses_and_gradients(case)
    padded = {
        name: v if name == "scale" else np.concatenate([v, v[:3]])
        for name, v in case.items()
    }
    padded["weights"][6:] = 0
    # At padding: own documents of real rows, and vectors longer than any score.
    padded["document_embeddings"][6:] *= 1000
    padded["query_embeddings"][6:] *= -1000
    for got, expected in zip(_losses_and_gradients(padded), plain):
        np.testing.assert_allclose(got[:6], expected, rtol=1e-6, atol=1e-6)
        assert not got[6:].any()


def test_a_batch_of_padding_and_a_batch_of_one_are_finite():
    case = _case(3, b=1)
    for weight in (0, 1):
        case["weights"] = np.array([weight], np.float32)
        for array in _losses_and_gradients(case):
            np.testing.assert_allclose(array, 0, atol=1e-6)

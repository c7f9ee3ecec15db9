"""The softmax losses against loops in float64."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.retriever.losses import (
    Embeddings,
    batch_losses,
    group_losses,
    public_losses,
)


def _unit(*shape, draw):
    values = draw.normal(size=shape)
    values /= np.linalg.norm(values, axis=-1, keepdims=True)
    return values.astype(np.float32)


def _case(seed, rows=8, hard=2, width=4):
    draw = np.random.default_rng(seed)
    keys = draw.integers(0, 5, rows)
    batch = {
        "document_key": keys.astype(np.int64),
        "positive_keys": draw.choice([-1, -1, *keys], (rows, 2)).astype(np.int64),
        "weights": draw.choice([0, 1, 1], rows).astype(np.float32),
        "negative_keys": draw.choice([-1, 0, 1, 7, 8, 9], (rows, hard)),
    }
    embeddings = Embeddings(
        _unit(rows, width, draw=draw),
        _unit(rows, width, draw=draw),
        _unit(rows, hard, width, draw=draw),
    )
    return embeddings, batch


def _log_sum(scores):
    top = max(scores)
    return top + math.log(sum(math.exp(score - top) for score in scores))


def _by_loop(embeddings, batch, scale, bidirectional=False, false_negatives=False):
    """Row by row, column by column, in Python's floats."""
    q, d, h = (
        None if values is None else np.asarray(values, np.float64)
        for values in embeddings
    )
    keys, known, real = (
        batch["document_key"],
        batch["positive_keys"],
        batch["weights"] > 0,
    )

    def negative(row, key):
        return false_negatives or (key != keys[row] and key not in known[row])

    losses = []
    for i in range(len(q)):
        if not real[i]:
            losses.append(0.0)
            continue
        own = scale * q[i] @ d[i]
        forwards, backwards = [own], [own]
        for j in range(len(q)):
            if not real[j]:
                continue
            if j != i and negative(i, keys[j]):
                forwards.append(scale * q[i] @ d[j])
            if j != i and negative(j, keys[i]):
                backwards.append(scale * q[j] @ d[i])
            for m in range(0 if h is None else h.shape[1]):
                key = batch["negative_keys"][j, m]
                if key >= 0 and negative(i, key):
                    forwards.append(scale * q[i] @ h[j, m])
        loss = _log_sum(forwards) - own
        if bidirectional:
            loss = (loss + _log_sum(backwards) - own) / 2
        losses.append(loss)
    return losses


@pytest.mark.parametrize("false_negatives", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("hard", [True, False])
def test_tfrs_task_equals_loops(hard, bidirectional, false_negatives):
    """To 1e-6 at scale 1; with equation (1) of the paper, too."""
    choices = (bidirectional, false_negatives)
    compiled = tf.function(
        lambda e, b, scale: batch_losses(e, b, lambda q: scale * q, *choices),
        jit_compile=True,
    )
    for seed in range(6):
        embeddings, batch = _case(seed)
        if not hard:
            embeddings = embeddings._replace(negatives=None)
        for scale in (1.0, 100.0):
            found = compiled(
                Embeddings(*(v if v is None else tf.constant(v) for v in embeddings)),
                {name: tf.constant(values) for name, values in batch.items()},
                tf.constant(scale),
            )
            expected = _by_loop(embeddings, batch, scale, *choices)
            assert max(expected) > 1
            # Scores are up to `scale`, so a float32 of them is off by scale * 2^-23.
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=scale * 1e-6)


@pytest.mark.parametrize("false_negatives", [False, True])
def test_groups_equal_loops(false_negatives):
    cases = [_case(seed, rows=6) for seed in range(4)]
    stacked = {
        name: np.stack([batch[name] for _, batch in cases])
        for name in ("document_key", "positive_keys", "weights")
    }
    stacked["document_key"] += 2**62  # a cast to float or int32 would merge them
    known = stacked["positive_keys"]
    stacked["positive_keys"] = np.where(known < 0, -1, known + 2**62)
    scores = np.stack([20 * e.queries @ e.documents.T for e, _ in cases])
    choices = (True, false_negatives)
    found = group_losses(tf.constant(scores), stacked, *choices)
    for losses, (embeddings, batch) in zip(found, cases):
        one = embeddings._replace(negatives=None)
        expected = _by_loop(one, batch, 20.0, *choices)
        np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5)


def test_padding_rows_change_nothing_and_receive_no_gradient():
    embeddings, batch = _case(2, rows=6)
    batch["weights"][:] = 1

    def found(embeddings, batch):
        given = [tf.constant(values) for values in embeddings]
        with tf.GradientTape() as tape:
            tape.watch(given)
            losses = batch_losses(Embeddings(*given), batch, lambda q: 20 * q)
            total = tf.reduce_sum(losses)
        return [losses.numpy(), *(g.numpy() for g in tape.gradient(total, given))]

    plain = found(embeddings, batch)
    # Padding with own documents of real rows, and vectors longer than any score.
    factors = (-1000.0, 1000.0, 1000.0)
    padded = Embeddings(
        *(np.concatenate([v, f * v[:3]]) for v, f in zip(embeddings, factors))
    )
    wider = {name: np.concatenate([v, v[:3]]) for name, v in batch.items()}
    wider["weights"][6:] = 0
    for got, expected in zip(found(padded, wider), plain):
        np.testing.assert_allclose(got[:6], expected, rtol=1e-5, atol=1e-5)
        assert not got[6:].any()
    # All padding.
    for values in found(embeddings, {**batch, "weights": 0 * batch["weights"]}):
        assert not values.any()


def _among(embeddings, batch, shared, shared_keys):
    return public_losses(
        embeddings, batch, lambda q: 20.0 * q, shared, shared_keys
    ).numpy()


def test_own_hard_negatives_reach_no_other_row():
    draw = np.random.default_rng(9)
    shared, shared_keys = _unit(5, 4, draw=draw), np.arange(3, 8)
    for seed in range(6):
        embeddings, batch = _case(seed)
        found = _among(embeddings, batch, shared, shared_keys)
        for i in np.flatnonzero(batch["weights"]):
            own, known = batch["document_key"][i], batch["positive_keys"][i]
            keys = [*shared_keys, *batch["negative_keys"][i]]
            vectors = [*shared, *embeddings.negatives[i]]
            mine = 20.0 * float(embeddings.queries[i] @ embeddings.documents[i])
            scores = [mine] + [
                20.0 * float(embeddings.queries[i] @ vector)
                for key, vector in zip(keys, vectors)
                if key >= 0 and key != own and key not in known
            ]
            assert found[i] == pytest.approx(_log_sum(scores) - mine, abs=1e-4)
        changed = embeddings._replace(negatives=embeddings.negatives.copy())
        changed.negatives[0] = _unit(2, 4, draw=draw)
        moved = _among(changed, batch, shared, shared_keys)
        np.testing.assert_array_equal(moved[1:], found[1:])

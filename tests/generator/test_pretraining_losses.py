"""Pretraining's losses, against naive float64 arithmetic."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.generator import T5QueryGenerator, pretraining
from tfdpsq.layers import T5Config

ROWS, DOCUMENT, QUERY = 9, 11, 5


def _model(version="1.0", dropout=0.0):
    tf.keras.utils.set_random_seed(1)
    return T5QueryGenerator(T5Config(50, 1, 2, 16, 24, 8, version, dropout=dropout))


def _rows(rows=ROWS, keys=None, seed=0):
    """Texts of random tokens, and of garbage beyond their lengths."""
    random = np.random.default_rng(seed)
    return {
        "document_ids": random.integers(1, 50, [rows, DOCUMENT]).astype(np.int32),
        "document_lengths": random.integers(1, DOCUMENT + 1, rows).astype(np.int32),
        "query_ids": random.integers(1, 50, [rows, QUERY]).astype(np.int32),
        "query_lengths": random.integers(1, QUERY + 1, rows).astype(np.int32),
        "document_key": np.array(
            [5, 7, 5, 9, 8, 7, 4, 5, 5][:rows] if keys is None else keys, np.int64
        ),
    }


def _states(model, ids, lengths):
    """The encoder's states of each text by itself: a list of [length, D] float64."""
    found = []
    for row, length in zip(ids, lengths):
        row = tf.constant(row[np.newaxis, :length])
        states = model.encode(row, tf.ones_like(row))
        found.append(states.numpy()[0].astype(np.float64))
    return found


def _unit(vectors):
    vectors = np.asarray(vectors)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _embeddings(model, rows, name):
    states = _states(model, rows[f"{name}_ids"], rows[f"{name}_lengths"])
    return _unit([state.mean(0) for state in states])


def _tensors(rows):
    return {name: tf.constant(values) for name, values in rows.items()}


@pytest.mark.parametrize(
    ("version", "mode"),
    [("1.1", "xla"), pytest.param("1.0", "eager", marks=pytest.mark.slow)],
)
def test_each_pretraining_loss_equals_its_task_alone(version, mode):
    model, rows = _model(version), _rows()
    trainer = pretraining.Pretrainer(model, scale=7.0)

    def losses():
        return trainer.losses_of(_tensors(rows), training=False)

    run = losses if mode == "eager" else tf.function(losses, jit_compile=True)
    found = run()
    assert set(found) == {"pseudo_queries", "contrast"}
    each = model.per_example_losses(_tensors(rows)).numpy()
    np.testing.assert_allclose(found["pseudo_queries"], each, rtol=1e-5)
    queries = _embeddings(model, rows, "query")
    documents = _embeddings(model, rows, "document")
    total = 0.0
    for i in range(ROWS):
        own = 7.0 * queries[i] @ documents[i]
        sums = np.exp(own)
        for j in range(ROWS):
            if rows["document_key"][j] != rows["document_key"][i]:
                sums += np.exp(7.0 * queries[i] @ documents[j])
        total += np.log(sums) - own
    assert float(found["contrast"]) == pytest.approx(total / ROWS, rel=1e-5)


def test_dropout_is_on_in_training_only():
    model, rows = _model(dropout=0.5), _rows()
    trainer = pretraining.Pretrainer(model)

    def losses(training):
        found = trainer.losses_of(_tensors(rows), training)
        return {name: float(tf.reduce_mean(value)) for name, value in found.items()}

    assert losses(False) == losses(False)
    one, other = losses(True), losses(True)
    for name in one:  # the queries' own pass, too
        assert abs(one[name] - other[name]) > 1e-4, name


def test_held_out_rows_are_measured_with_the_wrong_document_too():
    model, rows = _model("1.1"), _rows()
    trainer = pretraining.Pretrainer(model)
    trainer.compile()
    dataset = tf.data.Dataset.from_tensors(_tensors(rows))
    found = trainer.evaluate(dataset, verbose=0, return_dict=True)
    own = model.per_example_losses(_tensors(rows)).numpy().astype(np.float64)
    mixed = {
        name: np.roll(values, 1, 0) if name.startswith("document_") else values
        for name, values in rows.items()
    }
    wrong = model.per_example_losses(_tensors(mixed)).numpy().astype(np.float64)
    keys = rows["document_key"]
    other = keys != np.roll(keys, 1)
    assert 0 < other.sum() < ROWS
    assert found["gap"] == pytest.approx((wrong - own)[other].mean(), abs=1e-5)
    assert found["pseudo_queries"] == pytest.approx(own.mean(), rel=1e-5)
    expected = float(trainer.losses_of(_tensors(rows), False)["contrast"])
    assert found["contrast"] == pytest.approx(expected, rel=1e-5)

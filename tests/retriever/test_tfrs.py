"""TwoTower as a Keras and TFRS model: fit, evaluate, and Keras's own file."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs
from helpers.retrieval import tensors

from tfdpsq.retriever import (
    HitRate,
    TwoTower,
    encode_pairs,
)


def test_a_step_of_fit_is_one_of_tfrs_retrieval(make_model, make_batch):
    """TFRS sums over rows, we average; scale is one over its temperature."""
    model, batch = make_model(scale=7.0), make_batch()
    assert isinstance(model, tfrs.models.Model)
    task = tfrs.tasks.Retrieval(temperature=1 / 7.0)
    with tf.GradientTape() as tape:
        q = model.encode_queries(batch["query_ids"], batch["query_lengths"])
        d = model.encode_documents(batch["document_ids"], batch["document_lengths"])
        theirs = task(q, d) / 6
    gradients = tape.gradient(theirs, model.trainable_variables)
    expected = [
        v - 0.1 * tf.convert_to_tensor(g)
        for v, g in zip(model.trainable_variables, gradients)
    ]
    scores = 7.0 * q.numpy().astype(np.float64) @ d.numpy().astype(np.float64).T
    oracle = np.mean(np.log(np.exp(scores).sum(axis=1)) - np.diag(scores))
    model.compile(tf.keras.optimizers.SGD(0.1))
    history = model.fit(tf.data.Dataset.from_tensors(batch), verbose=0).history
    assert history["loss"] == [pytest.approx(oracle, rel=1e-5)]
    assert float(theirs) == pytest.approx(oracle, rel=1e-5)
    for variable, value in zip(model.trainable_variables, expected):
        np.testing.assert_allclose(variable, value, rtol=1e-4, atol=1e-5)


def test_hit_rate_follows_the_weights(make_model, make_rows, tokenizer):
    """Hits are counted by a matrix product, after every epoch."""
    model = make_model()
    rows = make_rows(40)
    rows[1] = dataclasses.replace(rows[1], document=rows[0].document)
    arrays = encode_pairs(rows, tokenizer, query_length=6, document_length=12)
    data = model_data(arrays)
    found = []

    class Oracle(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            embedded = model.predict(data, verbose=0)
            first = np.unique(arrays["document_key"], return_index=True)[1]
            documents = embedded["documents"].astype(np.float64)
            scores = embedded["queries"] @ documents[first].T
            own = (embedded["queries"] * documents).sum(axis=1, keepdims=True)
            ranks = (scores > own + 1e-6).sum(axis=1)
            found.append([(ranks < k).mean() for k in (1, 10)])

    model.compile(tf.keras.optimizers.Adam(3e-2))
    hit_rate = HitRate(arrays, ks=(1, 10, 100))
    history = model.fit(data, epochs=3, verbose=0, callbacks=[hit_rate, Oracle()])
    for k, values in zip((1, 10), np.transpose(found)):
        name = f"val_factorized_top_k/top_{k}_categorical_accuracy"
        np.testing.assert_allclose(history.history[name], values, atol=1e-6)
    assert found[0] != found[-1]  # 100 exceeds the 39 documents, and is left out
    assert len(history.history) == 3


def model_data(arrays):
    rows = len(arrays["document_key"])
    return tf.data.Dataset.from_tensors(tensors(arrays, range(rows)))


def test_a_keras_file_holds_the_whole_retriever(make_model, tmp_path):
    model = make_model(shared=False, learned_scale=True, pooling="first")
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is TwoTower and loaded.config == model.config
    ids, lengths = tf.constant([[4, 8, 9, 3, 1], [7, 1, 0, 0, 0]]), tf.constant([5, 2])
    for name in ("encode_queries", "encode_documents"):
        np.testing.assert_array_equal(
            getattr(loaded, name)(ids, lengths), getattr(model, name)(ids, lengths)
        )
    assert float(loaded.scaled.log_scale) == float(model.scaled.log_scale)


def test_fit_on_two_replicas_is_fit_on_one(make_config, make_batch, logical_cpus):
    batch = make_batch(weights=[1, 1, 1, 1, 0, 1])
    trained = []
    for strategy in (
        tf.distribute.get_strategy(),
        tf.distribute.MirroredStrategy(logical_cpus[:2]),
    ):
        with strategy.scope():
            tf.keras.utils.set_random_seed(0)
            model = TwoTower(make_config(bidirectional=True))
            model.compile(tf.keras.optimizers.SGD(0.1))
        data = tf.data.Dataset.from_tensor_slices(batch).batch(6, drop_remainder=True)
        hit_rate = HitRate({name: np.array(value) for name, value in batch.items()})
        history = model.fit(data, verbose=0, callbacks=[hit_rate]).history
        assert any("top_1_" in name for name in history)
        measured = [history[name] for name in sorted(history)]
        trained.append([*measured, *(v.numpy() for v in model.trainable_variables)])
    for one, two in zip(*trained):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)

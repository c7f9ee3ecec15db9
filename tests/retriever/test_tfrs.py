"""TwoTower as a Keras and TFRS model: fit, evaluate, and Keras's own file."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs
from helpers.retrieval import tensors

from tfdpsq.data import Tokenizer, train_vocabulary
from tfdpsq.retriever import (
    HitRate,
    ScannBruteForce,
    TwoTower,
    as_run,
    encode_pairs,
    load,
    save,
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


@pytest.mark.slow
@pytest.mark.parametrize("rows_at_a_time", [0, 2])
def test_fit_goes_on_from_a_backup_as_if_never_stopped(
    make_model, make_config, make_batch, tmp_path, rows_at_a_time
):
    """Dropout follows from seed and step, and the data start where they stopped."""
    t5 = dataclasses.replace(make_config().t5, dropout=0.2)
    batches = [make_batch(seed=seed) for seed in range(6)]

    def fit(epochs, start=0, callbacks=()):
        model = make_model(t5=t5)
        adam = tf.keras.optimizers.Adam(1e-2)
        model.compile(adam, rows_at_a_time=rows_at_a_time, seed=5)
        data = tf.data.Dataset.from_generator(
            lambda: iter(batches[start:]),
            output_signature=tf.nest.map_structure(
                lambda v: tf.TensorSpec(v.shape, v.dtype), batches[0]
            ),
        )
        model.fit(
            data, epochs=epochs, steps_per_epoch=2, verbose=0, callbacks=[*callbacks]
        )
        return [weight.numpy() for weight in model.trainable_variables]

    def backup():
        return tf.keras.callbacks.BackupAndRestore(
            str(tmp_path / "backup"), delete_checkpoint=False
        )

    whole = fit(3)
    fit(2, callbacks=[backup()])
    resumed = fit(3, start=4, callbacks=[backup()])
    for one, other in zip(resumed, whole):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_pages_api_trains_indexes_and_finds(make_config, make_rows, tmp_path):
    """Texts in, texts out, by public names alone."""
    rows = make_rows(30)
    texts = [text for row in rows for text in (row.query, row.document)]
    train_vocabulary(texts, 290, tmp_path / "spiece.model")
    t5 = dataclasses.replace(make_config().t5, vocabulary_size=300)
    towers = TwoTower(make_config(t5=t5), Tokenizer(tmp_path / "spiece.model"))
    towers.compile(tf.keras.optimizers.Adam(1e-3))
    towers.fit(towers.preprocessor(rows).shuffle(30, seed=0).batch(10), verbose=0)
    save(towers, tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.tokenizer.fingerprint == towers.tokenizer.fingerprint
    documents = tf.data.Dataset.from_tensor_slices(
        ([row.document_id for row in rows], [row.document for row in rows])
    ).batch(8)
    index = ScannBruteForce(again.query_model, k=3).index_from_dataset(
        documents.map(lambda ids, texts: (ids, again.document_model(texts)))
    )
    scores, ids = index(tf.constant([row.query for row in rows]))
    run = as_run([row.query_id for row in rows], scores.numpy(), ids.numpy())
    arrays = encode_pairs(rows, towers.tokenizer, query_length=6, document_length=12)
    embedded = towers(tensors(arrays, range(30)))
    product = embedded["queries"].numpy() @ embedded["documents"].numpy().T
    for row, best in zip(rows, np.argmax(product, axis=1)):
        assert next(iter(run[row.query_id])) == rows[best].document_id


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
            model = TwoTower(make_config())
            model.compile(tf.keras.optimizers.SGD(0.1))
        data = tf.data.Dataset.from_tensor_slices(batch).batch(6, drop_remainder=True)
        hit_rate = HitRate({name: np.array(value) for name, value in batch.items()})
        history = model.fit(data, verbose=0, callbacks=[hit_rate]).history
        assert any("top_1_" in name for name in history)
        measured = [history[name] for name in sorted(history)]
        trained.append([*measured, *(v.numpy() for v in model.trainable_variables)])
    for one, two in zip(*trained):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)

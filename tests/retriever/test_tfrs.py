"""TwoTower as a Keras and TFRS model: fit, evaluate, and Keras's own file."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs

from tfdpsq.retriever import TwoTower


def test_a_step_of_fit_is_one_of_tfrs_retrieval(make_model, make_batch):
    """TFRS sums over rows, we average; scale is one over its temperature."""
    model, batch = make_model(scale=7.0), make_batch()
    assert isinstance(model, tfrs.models.Model)
    task = tfrs.tasks.Retrieval(temperature=model.config.temperature)
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


def test_evaluate_updates_tfrs_metrics_over_the_corpus(
    make_model, make_config, make_batch
):
    batch = make_batch()
    found = make_model().predict(tf.data.Dataset.from_tensors(batch), verbose=0)
    documents = (batch["document_key"], found["documents"])
    corpus = tf.data.Dataset.from_tensor_slices(documents).batch(4)
    metric = tfrs.metrics.FactorizedTopK(candidates=corpus, ks=(1, 3))
    tf.keras.utils.set_random_seed(0)
    model = TwoTower(make_config(), metrics=[metric])
    model.compile(tf.keras.optimizers.SGD(0.0), run_eagerly=True)
    data = tf.data.Dataset.from_tensors({**batch, "weights": [1.0] * 5 + [0.0]})
    model.fit(data, verbose=0)
    assert not any(float(m.result()) for m in metric.metrics)  # too slow for a step
    result = model.evaluate(data, verbose=0, return_dict=True)
    scores = found["queries"].astype(np.float64) @ found["documents"].T
    ranks = (scores > np.diag(scores)[:, np.newaxis]).sum(axis=1)[:5]
    for k in (1, 3):
        name = f"factorized_top_k/top_{k}_categorical_accuracy"
        assert result[name] == pytest.approx((ranks < k).mean())
    assert 0 < (ranks < 1).mean() < 1


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


@pytest.mark.slow
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
        model.fit(data, verbose=0)
        trained.append([value.numpy() for value in model.trainable_variables])
    for one, two in zip(*trained):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)

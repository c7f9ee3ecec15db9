"""The generator's loss, head and storage, for both T5 shapes."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.data import train_vocabulary
from tfdpsq.data.texts import Pair
from tfdpsq.generator import Preprocessor, T5QueryGenerator
from tfdpsq.layers import T5Config, dropout_seed

# hidden_dim differs from heads · key_value_dim, as in T5 1.1 small.
_SHAPES = {
    version: T5Config(
        vocabulary_size=60,
        num_layers=2,
        num_heads=3,
        hidden_dim=16,
        intermediate_dim=24,
        key_value_dim=8,
        version=version,
        dropout=0.0,
    )
    for version in ("1.0", "1.1")
}


def _batch(seed=0, rows=4):
    random = np.random.default_rng(seed)
    document_lengths = random.integers(3, 11, rows)
    query_lengths = random.integers(1, 7, rows)
    documents = random.integers(3, 60, (rows, 10))
    queries = random.integers(3, 60, (rows, 6))
    for i in range(rows):
        documents[i, document_lengths[i] :] = 0
        queries[i, query_lengths[i] - 1] = 1
        queries[i, query_lengths[i] :] = 0
    return {
        "document_ids": tf.constant(documents, tf.int32),
        "document_lengths": tf.constant(document_lengths, tf.int32),
        "query_ids": tf.constant(queries, tf.int32),
        "query_lengths": tf.constant(query_lengths, tf.int32),
    }


@pytest.fixture(scope="module", params=list(_SHAPES))
def model(request):
    tf.keras.utils.set_random_seed(5)
    return T5QueryGenerator(_SHAPES[request.param])


def test_losses_are_means_over_a_rows_real_tokens(model):
    batch = _batch()
    logits = model(batch).numpy().astype(np.float64)
    expected = []
    for i in range(4):
        length = int(batch["query_lengths"][i])
        total = 0.0
        for t in range(length):
            row = logits[i, t]
            log_sum = row.max() + np.log(np.exp(row - row.max()).sum())
            total += log_sum - row[int(batch["query_ids"][i, t])]
        expected.append(total / length)
    np.testing.assert_allclose(model.per_example_losses(batch), expected, rtol=1e-5)


def test_loss_depends_on_its_row_alone(model):
    batch, other = _batch(0), _batch(9)
    mixed = {
        name: tf.concat([value[:1], other[name][1:]], 0)
        for name, value in batch.items()
    }
    np.testing.assert_allclose(
        model.per_example_losses(mixed)[0],
        model.per_example_losses(batch)[0],
        rtol=1e-5,
    )


def test_padding_changes_no_loss(model):
    batch = _batch()
    wider = {
        name: tf.pad(value, [[0, 0], [0, 5]]) if value.shape.rank == 2 else value
        for name, value in batch.items()
    }
    # Garbage in the padding, too: it is masked by length, not by id.
    wider["document_ids"] += 7 * tf.cast(
        tf.range(15)[None] >= batch["document_lengths"][:, None], tf.int32
    )
    np.testing.assert_allclose(
        model.per_example_losses(wider), model.per_example_losses(batch), rtol=1e-5
    )


def test_the_embedding_starts_around_zero_with_deviation_one(model):
    """keras-nlp's own start is 1 ± 0.05: all tokens alike, all texts alike."""
    embedding = model.backbone.token_embedding.embeddings.numpy()
    assert abs(embedding.mean()) < 0.1
    assert 0.7 < embedding.std() < 1.1


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    texts = [f"return the {w} of file {i}" for i, w in enumerate("abcdefgh" * 9)]
    path = tmp_path_factory.mktemp("vocabulary") / "spiece.model"
    return train_vocabulary(texts, 290, path)


def _with_words(vocabulary, **changes):
    tf.keras.utils.set_random_seed(4)
    config = dataclasses.replace(_SHAPES["1.1"], vocabulary_size=300, **changes)
    preprocessor = Preprocessor(vocabulary, "ask: ", 16, 8)
    return T5QueryGenerator(
        config, soft_prompt=2, preprocessor=preprocessor, name="writer"
    )


def test_a_keras_file_holds_the_whole_model(vocabulary, tmp_path):
    model = _with_words(vocabulary)
    model.compile(tf.keras.optimizers.Adam(0.125))
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is T5QueryGenerator and loaded.name == "writer"
    assert loaded.config == model.config and loaded.backbone.soft_prompt.length == 2
    np.testing.assert_array_equal(loaded(_batch()), model(_batch()))
    assert loaded.optimizer.learning_rate == 0.125
    texts = ["return the sum", "the mean of 7"]
    assert loaded.generate(texts) == model.generate(texts)
    assert loaded.preprocessor.get_config() == model.preprocessor.get_config()
    # The file that the vocabulary was read from is gone.
    loaded.save(tmp_path / "again.keras")


def test_preset_holds_vocabulary_prompt_and_lengths(vocabulary, tmp_path):
    model = _with_words(vocabulary)
    model.save_to_preset(tmp_path)
    loaded = T5QueryGenerator.from_preset(tmp_path)
    assert loaded.preprocessor.get_config() == {
        "prompt": "ask: ",
        "document_length": 16,
        "query_length": 8,
    }
    assert loaded.generate(["the sum"], seed=2) == model.generate(["the sum"], seed=2)
    other = T5QueryGenerator.from_preset(tmp_path, prompt="")
    assert other.preprocessor.prompt == "" and other.preprocessor.query_length == 8


_PAIRS = [
    Pair("", f"the {w} of {n}", "", f"return {w} {n}") for w in "ab" for n in "123"
]


def _fitted(vocabulary, pairs=_PAIRS, epochs=2, **options):
    model = _with_words(vocabulary, dropout=0.2)
    model.compile(tf.keras.optimizers.SGD(0.5), seed=5, **options)
    history = model.fit(model.preprocessor(pairs).batch(2), epochs=epochs, verbose=0)
    return model, history.history["loss"]


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fit_takes_the_steps_of_a_naive_loop(vocabulary, jit):
    """Means of `per_example_losses`; XLA changes nothing, dropout follows the seed."""
    model, losses = _fitted(vocabulary, jit_compile=jit)
    naive = _with_words(vocabulary, dropout=0.2)
    arrays = naive.preprocessor.arrays(_PAIRS)
    expected, step = [], 0
    for _ in range(2):
        found = []
        for start in range(0, len(_PAIRS), 2):
            batch = {name: v[start : start + 2] for name, v in arrays.items()}
            with tf.GradientTape() as tape, dropout_seed([5, step]):
                loss = tf.reduce_mean(naive.per_example_losses(batch, training=True))
            for variable, gradient in zip(
                naive.trainable_variables,
                tape.gradient(loss, naive.trainable_variables),
            ):
                variable.assign_sub(0.5 * tf.convert_to_tensor(gradient))
            found.append(float(loss))
            step += 1
        expected.append(np.mean(found))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for one, other in zip(model.weights, naive.weights):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_evaluate_weighs_rows_and_averages_over_them(vocabulary):
    model = _with_words(vocabulary)
    model.compile()
    arrays = model.preprocessor.arrays(_PAIRS)
    each = model.per_example_losses(arrays)
    found = model.evaluate(arrays, arrays["query_ids"], batch_size=6, verbose=0)
    assert found == pytest.approx(float(tf.reduce_mean(each)), rel=1e-5)

"""Cached decoding against the uncached model."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import attentive

from tfdpsq.generator import Greedy, T5QueryGenerator, TopP
from tfdpsq.generator.decoding import CachedDecoder, decode, text_mask
from tfdpsq.layers import T5Config, apply_lora

_V, _EOS = 60, 1


@pytest.fixture(scope="module")
def untied():
    """Version 1.1 alone, for properties that do not depend on the version."""
    return attentive.generator("1.1")


def _documents(rows, length=12, seed=0):
    random = np.random.default_rng(seed)
    lengths = random.integers(2, length + 1, rows).astype("int32")
    ids = random.integers(3, _V, (rows, length)).astype("int32")
    ids[np.arange(length)[None] >= lengths[:, None]] = 0
    return tf.constant(ids), tf.constant(lengths)


@pytest.mark.parametrize(
    "version, soft_prompt",
    [("1.1", 0), ("1.1", 5), pytest.param("1.0", 0, marks=pytest.mark.slow)],
)
def test_cached_logits_equal_the_uncached_models(version, soft_prompt):
    model = attentive.generator(version, soft_prompt=soft_prompt)
    rows, length = 5, 9
    documents, lengths = _documents(rows)
    queries = np.random.default_rng(1).integers(3, _V, (rows, length)).astype("int32")
    uncached = _uncached_logits(model, documents, lengths, queries)
    cached = _cached_logits(model, documents, lengths, queries)
    np.testing.assert_allclose(cached, uncached, atol=1e-4)
    assert np.abs(uncached[:, 1:] - uncached[:, :-1]).max() > 0.1  # not constant


def _uncached_logits(model, documents, lengths, queries):
    inputs = {
        "document_ids": documents,
        "document_lengths": lengths,
        "query_ids": tf.constant(queries),
        "query_lengths": tf.fill([len(queries)], queries.shape[1]),
    }
    return model(inputs).numpy()


def _cached_logits(model, documents, lengths, queries):
    """[B, T, V]: the decoder's logits when the queries' tokens are fed to it."""
    rows, length = queries.shape
    mask = tf.sequence_mask(lengths, documents.shape[1], tf.int32)
    decoder = CachedDecoder(model, length)
    of_documents = decoder.documents(model.encode(documents, mask), mask)
    inputs = np.concatenate([np.zeros((rows, 1), "int32"), queries[:, :-1]], 1)

    @tf.function
    def logits_of(t, tokens, cache):
        return decoder.step(t, tokens, cache, of_documents, decoder.position_bias())

    found, cache = [], decoder.empty_cache(rows)
    for t in range(length):
        logits, cache = logits_of(tf.constant(t), tf.constant(inputs[:, t]), cache)
        found.append(logits.numpy())
    return np.stack(found, axis=1)


def test_queries_for_one_document_share_its_keys_and_values(untied):
    documents, lengths = _documents(5)
    uniforms = np.random.default_rng(7).random((15, 8), dtype=np.float32)
    config = TopP()
    shared, _ = _generate(untied, documents, lengths, uniforms, config)
    repeated = (tf.repeat(documents, 3, axis=0), tf.repeat(lengths, 3))
    alone, _ = _generate(untied, *repeated, uniforms, config)
    np.testing.assert_array_equal(shared, alone)
    assert len(np.unique(shared[:3], axis=0)) == 3


def test_dropping_finished_rows_changes_no_query():
    """64 rows, then 32 and 16: EOS is made likely, so that rows end one by one."""
    samples = 4
    tf.keras.utils.set_random_seed(8)
    model = T5QueryGenerator(T5Config(_V, 1, 2, 16, 24, 8, dropout=0.0))
    documents, lengths = _documents(64 // samples)
    uniforms = np.random.default_rng(9).random((64, 20), dtype=np.float32)
    mask = text_mask(_V, 50) + 3.0 * tf.one_hot(_EOS, _V)
    decoder = _decoder(model, TopP(0.95), mask)
    uniforms = tf.constant(uniforms)
    together = decoder(documents, lengths, uniforms).numpy()
    for row in range(len(documents)):
        own, one = slice(row * samples, (row + 1) * samples), slice(row, row + 1)
        alone = decoder(documents[one], lengths[one], uniforms[own]).numpy()
        np.testing.assert_array_equal(together[own], alone)
    lengths_of = (together != 0).sum(axis=1)
    ends = np.sort(lengths_of.reshape(-1, samples).max(axis=1))
    # Both halvings happen, and the last rows go on after the second.
    assert ends[len(ends) // 2] < ends[3 * len(ends) // 4] < ends[-1]
    assert ends[-1] > ends[0] + 2


def test_cached_decoding_includes_lora():
    tf.keras.utils.set_random_seed(4)
    model = T5QueryGenerator(T5Config(_V, 1, 3, 16, 24, 8, version="1.1", dropout=0.0))
    targets = ["*/query_projector", "*/value_projector", "*/input_projector"]
    for layer in apply_lora(model, 2, 4.0, targets).values():
        layer.up.kernel.assign(tf.random.normal(layer.up.kernel.shape))
    documents, lengths = _documents(3)
    queries = np.random.default_rng(1).integers(3, _V, (3, 5)).astype("int32")
    uncached = _uncached_logits(model, documents, lengths, queries)
    cached = _cached_logits(model, documents, lengths, queries)
    np.testing.assert_allclose(cached, uncached, atol=1e-4)


@pytest.mark.slow
def test_bfloat16_stays_close_to_float32():
    """Logits within the rounding of a model whose every product has 8 bits."""
    config = T5Config(_V, 1, 4, 32, 64, 8, dropout=0.0)
    tf.keras.utils.set_random_seed(5)
    exact = T5QueryGenerator(config)
    rounded = T5QueryGenerator(config, dtype="mixed_bfloat16")
    rounded.set_weights(exact.get_weights())
    documents, lengths = _documents(24)
    queries = np.random.default_rng(1).integers(3, _V, (24, 6)).astype("int32")
    expected = _cached_logits(exact, documents, lengths, queries)
    found = _cached_logits(rounded, documents, lengths, queries)
    uncached = _uncached_logits(rounded, documents, lengths, queries)
    spread = expected.std()
    assert np.abs(found - expected).max() < 0.1 * spread
    assert np.abs(found - uncached).max() < 0.1 * spread
    assert np.abs(found - expected).max() > 1e-4 * spread  # it is another precision
    greedy = Greedy()
    uniforms = np.zeros((24, 6), "float32")
    tokens = [
        _generate(m, documents, lengths, uniforms, greedy)[0] for m in (exact, rounded)
    ]
    assert (tokens[0] == tokens[1]).all(axis=1).mean() > 0.7


def _generate(model, documents, lengths, uniforms, config, jit=False):
    run = _decoder(model, config, text_mask(_V, 50), jit)
    ids = run(documents, lengths, tf.constant(uniforms)).numpy()
    return ids, (ids != 0).sum(axis=1).astype("int32")


def _decoder(model, config, mask, jit=False):
    return tf.function(
        lambda d, n, u: decode(model, d, n, u, config, mask), jit_compile=jit
    )


def test_only_decodable_ids_are_written_and_no_query_is_empty(untied):
    documents, lengths = _documents(40)
    uniforms = np.random.default_rng(3).random((40, 12), dtype=np.float32)
    ids, found = _generate(
        untied, documents, lengths, uniforms, TopP(1.0, temperature=2.0)
    )
    real = np.arange(12)[None] < found[:, None]
    assert (ids[real] < 50).all() and not np.isin(ids[real], (0, 2)).any()
    assert (ids[:, 0] != _EOS).all()


@pytest.mark.slow  # compiles for 4 s
def test_xla_changes_no_query(untied):
    documents, lengths = _documents(8)
    uniforms = np.random.default_rng(5).random((8, 12), dtype=np.float32)
    config = TopP()
    plain = _generate(untied, documents, lengths, uniforms, config)
    compiled = _generate(untied, documents, lengths, uniforms, config, jit=True)
    np.testing.assert_array_equal(plain[0], compiled[0])

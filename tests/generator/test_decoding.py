"""Cached decoding against the uncached model; sampling against enumeration."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tfdpsq.generator import (
    CachedDecoder,
    SamplingConfig,
    T5QueryGenerator,
    decodable_logits_mask,
    generate,
    sample,
)
from tfdpsq.layers import T5Config

_V, _EOS = 60, 1


@pytest.fixture(scope="module", params=["1.0", "1.1"])
def model(request):
    tf.keras.utils.set_random_seed(8)
    model = T5QueryGenerator(
        T5Config(_V, 2, 3, 16, 24, 8, version=request.param, dropout=0.0)
    )
    # Larger weights than at the start of training: attention that matters.
    for variable in model.trainable_variables:
        if variable.shape.rank == 2:
            variable.assign(variable * 1.5)
    return model


def _documents(rows, length=12, seed=0):
    random = np.random.default_rng(seed)
    lengths = random.integers(2, length + 1, rows).astype("int32")
    ids = random.integers(3, _V, (rows, length)).astype("int32")
    ids[np.arange(length)[None] >= lengths[:, None]] = 0
    return tf.constant(ids), tf.constant(lengths)


def test_cached_logits_equal_the_uncached_models(model):
    rows, length = 5, 9
    documents, lengths = _documents(rows)
    queries = np.random.default_rng(1).integers(3, _V, (rows, length)).astype("int32")
    uncached = model(
        {
            "document_ids": documents,
            "document_lengths": lengths,
            "query_ids": tf.constant(queries),
            "query_lengths": tf.fill([rows], length),
        }
    ).numpy()
    mask = tf.sequence_mask(lengths, 12, tf.int32)
    decoder = CachedDecoder(model, length)
    states = model.encode(documents, mask)
    cross = decoder.cross_attention(states)
    cross_bias = (1.0 - tf.cast(mask, tf.float32))[:, None, :] * -1e9
    cache, bias = decoder.empty_cache(rows, tf.float32), decoder.position_bias()
    inputs = np.concatenate([np.zeros((rows, 1), "int32"), queries[:, :-1]], 1)
    for t in range(length):
        logits, cache = decoder.step(
            tf.constant(t), tf.constant(inputs[:, t]), cache, cross, cross_bias, bias
        )
        np.testing.assert_allclose(logits, uncached[:, t], atol=1e-4)
    assert np.abs(uncached[:, 1:] - uncached[:, :-1]).max() > 0.1  # not constant


def _generate(model, documents, lengths, uniforms, config, jit=False, early_stop=True):
    mask = decodable_logits_mask(_V, 50, (0, 2))
    run = tf.function(
        lambda d, n, u: generate(model, d, n, u, config, mask, _EOS, early_stop),
        jit_compile=jit,
    )
    ids, found = run(documents, lengths, tf.constant(uniforms))
    return ids.numpy(), found.numpy()


def test_greedy_decoding_is_the_argmax_of_the_uncached_model(model):
    documents, lengths = _documents(6)
    uniforms = np.zeros((6, 10), "float32")
    ids, found = _generate(
        model, documents, lengths, uniforms, SamplingConfig(temperature=0.0)
    )
    logits = model(
        {
            "document_ids": documents,
            "document_lengths": lengths,
            "query_ids": tf.constant(ids),
            "query_lengths": tf.constant(found),
        }
    ).numpy()
    logits[:, :, 50:] = -np.inf
    logits[:, :, [0, 2]] = -np.inf
    logits[:, 0, _EOS] = -np.inf
    for row in range(6):
        n = found[row]
        np.testing.assert_array_equal(ids[row, :n], logits[row, :n].argmax(-1))
        assert (ids[row, n:] == 0).all()
        assert n == 10 or ids[row, n - 1] == _EOS


def test_only_decodable_ids_come_out_and_never_an_empty_query(model):
    documents, lengths = _documents(40)
    uniforms = np.random.default_rng(3).random((40, 12), dtype=np.float32)
    ids, found = _generate(
        model, documents, lengths, uniforms, SamplingConfig(temperature=2.0, top_p=1.0)
    )
    real = np.arange(12)[None] < found[:, None]
    assert (ids[real] < 50).all() and not np.isin(ids[real], (0, 2)).any()
    assert (ids[:, 0] != _EOS).all()


def test_a_query_does_not_depend_on_its_batch(model):
    documents, lengths = _documents(64)
    uniforms = np.random.default_rng(4).random((64, 12), dtype=np.float32)
    config = SamplingConfig()
    whole, _ = _generate(model, documents, lengths, uniforms, config)
    for size, starts in ((1, (0, 5)), (7, (0, 7))):
        for start in starts:
            part = slice(start, start + size)
            ids, _ = _generate(
                model, documents[part], lengths[part], uniforms[part], config
            )
            np.testing.assert_array_equal(ids, whole[part])


def test_xla_and_early_stop_change_nothing(model):
    documents, lengths = _documents(8)
    uniforms = np.random.default_rng(5).random((8, 12), dtype=np.float32)
    config = SamplingConfig()
    plain = _generate(model, documents, lengths, uniforms, config)
    compiled = _generate(model, documents, lengths, uniforms, config, jit=True)
    patient = _generate(model, documents, lengths, uniforms, config, early_stop=False)
    np.testing.assert_array_equal(plain[0], compiled[0])
    np.testing.assert_array_equal(plain[0], patient[0])


def _enumerated(logits, temperature, top_k, top_p):
    """Nucleus sampling from its definition, in float64, one token at a time."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k is not None:
        order = order[:top_k]
    weights = np.exp([scaled[i] for i in order])
    weights /= weights.sum()
    kept, mass = [], 0.0
    for token, weight in zip(order, weights):
        if mass >= top_p:
            break
        kept.append((token, weight))
        mass += weight
    law = np.zeros(len(scaled))
    for token, weight in kept:
        law[token] = weight / mass
    return law


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [
        (1.0, None, 0.8),
        (0.7, None, 0.8),
        (1.0, 5, 1.0),
        (1.5, 8, 0.8),
        (1.0, None, 1.0),
    ],
)
def test_samples_follow_the_enumerated_law(temperature, top_k, top_p):
    draws = 20_000
    logits = np.random.default_rng(2).normal(size=12).astype("float32") * 1.5
    uniforms = np.random.default_rng(6).random(draws, dtype=np.float32)
    tokens = sample(
        tf.constant(np.tile(logits, (draws, 1))),
        tf.constant(uniforms),
        SamplingConfig(temperature, top_k, top_p),
    ).numpy()
    law = _enumerated(logits, temperature, top_k, top_p)
    counts = np.bincount(tokens, minlength=12)
    assert (counts[law == 0] == 0).all()
    kept = law > 0
    assert scipy.stats.chisquare(counts[kept], law[kept] * draws).pvalue > 1e-4
    # The test can tell: without the nucleus cut the law would be another.
    if top_p < 1:
        wrong = _enumerated(logits, temperature, top_k, 1.0)
        able = wrong > 0
        test = scipy.stats.chisquare(counts[able], wrong[able] * draws)
        assert test.pvalue < 1e-6


def test_a_wide_nucleus_is_found_beyond_the_first_candidates():
    """A flat distribution over 3000 tokens: the nucleus holds 2400 of them."""
    logits = np.zeros((2, 3000), "float32")
    logits[1, 7] = 20.0  # a peaked row beside it must not be disturbed
    uniforms = tf.constant([0.999, 0.999])
    tokens = sample(tf.constant(logits), uniforms, SamplingConfig()).numpy()
    # Ties go by id, so the nucleus is the ids below 2400.
    assert tokens[0] == pytest.approx(0.999 * 2400, abs=3)
    assert tokens[1] == 7


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(top_p=0.0), "top_p is 0.0"),
        (dict(top_p=1.5), "top_p is 1.5"),
        (dict(top_k=0), "top_k is 0"),
        (dict(temperature=-1.0), "temperature is -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**bad)


def test_a_vocabulary_larger_than_the_model_is_refused():
    with pytest.raises(ValueError, match="has 70 pieces but the model only 60"):
        decodable_logits_mask(60, 70, (0,))

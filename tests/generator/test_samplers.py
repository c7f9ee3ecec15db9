"""Sampling against the enumerated law."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tfdpsq.generator import Greedy, TopK, TopP


def _enumerated(logits, temperature, top_k, top_p):
    """Nucleus sampling from its definition, in float64, one token at a time.

    Tokens as probable as the last one are in the nucleus, too.
    """
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k is not None:
        order = order[:top_k]
    weights = np.exp([scaled[i] for i in order])
    weights /= weights.sum()
    kept, mass = [], 0.0
    for token, weight in zip(order, weights):
        if mass >= top_p and scaled[token] < scaled[kept[-1][0]]:
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
    config = TopP(top_p, top_k, temperature)
    tokens = _draws(np.tile(logits, (draws, 1)), config)
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


def test_rows_of_equal_tokens_draw_from_all_of_them():
    """3,000 equally probable tokens, which all are as probable as the last one."""
    logits = np.zeros((4000, 3000), "float32")
    logits[0, 7] = 20.0  # a peaked row beside them must not be disturbed
    tokens = _draws(logits, TopP())
    assert tokens[0] == 7
    # 50 equal cells of 60 tokens.
    assert scipy.stats.chisquare(np.bincount(tokens[1:] // 60)).pvalue > 1e-4


def _draws(logits, config):
    uniforms = np.random.default_rng(6).random(len(logits), dtype=np.float32)
    return config(tf.constant(logits), tf.constant(uniforms)).numpy()


def test_narrow_nucleus_of_many_tokens_follows_its_law():
    """V = 300, three blocks, p = 0.1: most first draws lie outside and are repeated."""
    draws = 30_000
    # Rounded, so that there are ties, across blocks and within.
    logits = np.random.default_rng(3).normal(size=300).round(1).astype("float32") / 2
    law = _enumerated(logits, 1.0, None, 0.1)
    tokens = _draws(np.tile(logits, (draws, 1)), TopP(0.1))
    counts = np.bincount(tokens, minlength=300)
    assert (counts[law == 0] == 0).all()
    kept = law > 0
    assert 8 < kept.sum() < 30 and law[kept].min() * draws > 5
    assert scipy.stats.chisquare(counts[kept], law[kept] * draws).pvalue > 1e-4


def test_forbidden_tokens_are_never_drawn():
    logits = np.full((2, 260), -np.inf, "float32")
    logits[:, [3, 130, 258]] = [0.0, 1.0, 0.5]
    ends = tf.constant([0.0, np.nextafter(np.float32(1), np.float32(0))])
    for config in (
        TopP(1.0),
        TopP(),
        TopK(3),
    ):
        assert set(config(tf.constant(logits), ends).numpy()) <= {3, 130, 258}


def test_samplers_are_equal_by_their_settings():
    """Compiled functions are kept by sampler."""
    assert TopK(5) == TopK(5) and hash(TopK(5)) == hash(TopK(5))
    assert TopK(5) != TopK(6) and Greedy() == Greedy() and TopP() != TopP(0.9)


def test_nan_logits_do_not_loop_forever():
    tokens = TopP()(tf.fill([2, 300], np.nan), tf.constant([0.1, 0.9]))
    assert tokens.shape == [2]


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(p=0.0), "top_p is 0.0"),
        (dict(k=0), "top_k is 0"),
        (dict(temperature=-1.0), "temperature is -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        TopP(**bad)

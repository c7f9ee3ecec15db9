"""The soft prompt: what it puts where, and that nothing else is trained."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.layers import SoftPrompt, T5Backbone, T5Config, encoder_of, train_only
from tfdpsq.validation import InputError

keras = tf.keras
_P, _B, _L, _D = 3, 4, 5, 6


def _inputs():
    random = np.random.default_rng(0)
    embedded = random.normal(size=[_B, _L, _D]).astype(np.float32)
    mask = (np.arange(_L) < np.array([[5], [1], [3], [2]])).astype(np.int32)
    return tf.constant(embedded), tf.constant(mask)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_prompt_comes_first_and_keeps_all_tokens(mode):
    embedded, mask = _inputs()
    layer = SoftPrompt(_P)
    layer(embedded, mask)
    run = tf.function(layer, jit_compile=mode == "xla") if mode != "eager" else layer
    prompted, longer = run(embedded, mask)
    assert prompted.shape == [_B, _P + _L, _D] and longer.shape == [_B, _P + _L]
    vectors = layer.vectors.numpy()
    assert len(np.unique(vectors)) == _P * _D and np.abs(vectors).max() <= 0.5
    for row in range(_B):
        np.testing.assert_array_equal(prompted[row, :_P], vectors)
        np.testing.assert_array_equal(longer[row, :_P], [1] * _P)
    np.testing.assert_array_equal(prompted[:, _P:], embedded)
    np.testing.assert_array_equal(longer[:, _P:], mask)
    assert longer.dtype == tf.int32


@pytest.mark.parametrize("length", [0, True])
def test_bad_lengths_are_refused(length):
    with pytest.raises(
        InputError, match=f"soft prompt length is {length!r}; .*above 0"
    ):
        SoftPrompt(length)


def test_both_stacks_see_the_prompt_and_only_it_is_trained():
    config = T5Config(30, 1, 2, 8, 12, 4, "1.1", dropout=0.0)
    backbone = T5Backbone(config, soft_prompt=_P)
    ids = tf.constant([[4, 5, 6, 1], [7, 1, 0, 0]])
    mask = tf.constant([[1, 1, 1, 1], [1, 1, 0, 0]])
    inputs = {
        "encoder_token_ids": ids,
        "encoder_padding_mask": mask,
        "decoder_token_ids": ids[:, :2],
        "decoder_padding_mask": mask[:, :2],
    }
    before = backbone(inputs)
    encoder = encoder_of(backbone)
    alone = encoder({name: inputs[name] for name in encoder.input})
    assert alone.shape == [2, _P + 4, 8]
    np.testing.assert_array_equal(alone, before["encoder_sequence_output"])

    paths = train_only(backbone, ["*soft_prompt/*"])
    assert paths == ["soft_prompt/embedding/embeddings"]
    assert [v.shape for v in backbone.trainable_variables] == [[_P, 8]]
    backbone.soft_prompt.vectors.assign_add(tf.ones([_P, 8]) * np.arange(8))
    after = backbone(inputs)
    for name in before:
        assert np.abs(after[name] - before[name]).max(axis=(1, 2)).min() > 0.05

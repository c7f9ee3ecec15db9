"""A generator with a soft prompt: the same as with words of its own, and kept whole."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from helpers import attentive

from tfdpsq.generator import T5QueryGenerator, checkpoints
from tfdpsq.validation import DataError, InputError

_V, _P, _EOS = 60, 5, 1


_generator = functools.partial(attentive.generator, layers=1, soft_prompt=_P)


@pytest.fixture(
    scope="module", params=["1.0", pytest.param("1.1", marks=pytest.mark.slow)]
)
def model(request):
    return _generator(request.param, layers=2)


def _batch(rows=6, length=12, query_length=7):
    random = np.random.default_rng(0)
    batch = {}
    for name, most in (("document", length), ("query", query_length)):
        lengths = random.integers(2, most + 1, rows)
        ids = random.integers(3, _V, (rows, most))
        ids[np.arange(most)[None] >= lengths[:, None]] = 0
        batch[f"{name}_ids"] = tf.constant(ids, tf.int32)
        batch[f"{name}_lengths"] = tf.constant(lengths, tf.int32)
    return batch


def test_soft_prompt_equals_extra_words_with_its_vectors(model):
    """A model without one, whose vocabulary has the vectors as further words."""
    version = model.config.version
    other = attentive.generator(version, _V + _P)
    theirs = iter(v for v in model.backbone.weights if "soft_prompt" not in v.name)
    vectors = model.backbone.soft_prompt.vectors.numpy()
    for variable in other.backbone.weights:
        value = next(theirs).numpy()
        if variable.shape == [_V + _P, 16]:
            value = np.concatenate([value, vectors])
        elif variable.shape == [16, _V + _P]:
            value = np.concatenate([value, np.zeros([16, _P])], axis=1)
        variable.assign(value)
    batch = _batch()
    words = tf.tile(tf.range(_V, _V + _P)[None], [6, 1])
    spelled = {
        **batch,
        "document_ids": tf.concat([words, batch["document_ids"]], 1),
        "document_lengths": batch["document_lengths"] + _P,
    }
    np.testing.assert_allclose(model(batch), other(spelled)[..., :_V], atol=2e-5)
    ours, expected = model.states(batch), other.states(spelled)
    for name in ours:
        np.testing.assert_allclose(ours[name], expected[name], atol=1e-5)
    mask = tf.sequence_mask(batch["document_lengths"], 12, tf.int32)
    encoded = model.encode(batch["document_ids"], mask)
    np.testing.assert_allclose(encoded, expected["encoder_sequence_output"], atol=1e-5)
    # And it matters.
    plain = attentive.generator(version)
    assert np.abs(plain(batch) - model(batch)).max() > 0.1


def test_saved_and_loaded_models_are_equal(tmp_path):
    model = _generator("1.0")
    model.save_to_preset(tmp_path)
    loaded = T5QueryGenerator.from_preset(tmp_path)
    batch = _batch()
    np.testing.assert_array_equal(loaded(batch), model(batch))
    again = T5QueryGenerator.from_preset(tmp_path, "mixed_bfloat16", True, _P)
    np.testing.assert_array_equal(
        again.backbone.soft_prompt.vectors, model.backbone.soft_prompt.vectors
    )
    _, backbone = checkpoints.load(tmp_path)
    assert backbone.soft_prompt.length == _P
    # Saved there again without one, none is left of the first.
    _generator("1.0", soft_prompt=0).save_to_preset(tmp_path)
    assert T5QueryGenerator.from_preset(tmp_path).backbone.soft_prompt is None


def test_plain_model_is_loaded_with_a_new_prompt(tmp_path):
    plain = _generator("1.1", soft_prompt=0)
    plain.save_to_preset(tmp_path)
    loaded = T5QueryGenerator.from_preset(tmp_path, soft_prompt=2)
    vectors = loaded.backbone.soft_prompt.vectors
    assert np.abs(vectors).max() <= 0.5


def test_prompt_is_never_dropped_silently(tmp_path):
    model = _generator("1.1")
    model.save_to_preset(tmp_path)
    for wanted in (0, 3):
        with pytest.raises(InputError, match="5 vectors.*length to 5"):
            T5QueryGenerator.from_preset(tmp_path, soft_prompt=wanted)
    with pytest.raises(DataError, match="an encoder alone has no place for"):
        checkpoints.load_encoder(tmp_path)

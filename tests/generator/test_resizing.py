"""Resizing a T5: a larger one is the same function, a smaller one has its weights."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.generator.resizing import resized
from tfdpsq.layers import T5Config

_CONFIG = T5Config(
    vocabulary_size=40,
    num_layers=3,
    num_heads=2,
    hidden_dim=8,
    intermediate_dim=12,
    key_value_dim=4,
    dropout=0.0,
)


def _rows():
    # Not at the top of the module: other tests need devices made before any operation.
    return {
        "document_ids": tf.constant([[5, 6, 7, 8, 1, 0], [9, 3, 1, 0, 0, 0]]),
        "document_lengths": tf.constant([5, 3]),
        "query_ids": tf.constant([[4, 11, 12, 1], [30, 1, 0, 0]]),
        "query_lengths": tf.constant([4, 2]),
    }


def _model(**changes):
    tf.keras.utils.set_random_seed(3)
    model = T5QueryGenerator(dataclasses.replace(_CONFIG, **changes))
    for variable in model.trainable_variables:
        # Norms and biases too: a fresh T5's are ones and small numbers.
        variable.assign_add(tf.random.normal(variable.shape, stddev=0.2))
    return model


@pytest.mark.parametrize(
    ("version", "size"),
    [
        pytest.param("1.0", (5, 13), marks=pytest.mark.slow),
        ("1.1", (4, 20)),
    ],
)
def test_enlarged_t5_is_the_same_function(version, size):
    model = _model(version=version)
    larger = resized(model, *size)
    assert larger.config.num_layers == (size[0] or 3)
    assert larger.config.intermediate_dim == (size[1] or 12)
    expected = model(_rows()).numpy()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(larger(_rows()).numpy(), expected, rtol=0, atol=2e-5)


def test_shrinking_keeps_the_largest_units():
    """Units whose weights out are zero go first: the function does not change."""
    model = _model()
    backbone = model.backbone
    for layer in (
        *backbone.encoder_transformer_layers,
        *backbone.decoder_transformer_layers,
    ):
        kernel = layer.output_projector.kernel
        mask = np.ones(kernel.shape[0])
        mask[[1, 4, 7, 8]] = 0
        kernel.assign(kernel * mask[:, None])
    smaller = resized(model, intermediate_dim=8)
    assert smaller.config.intermediate_dim == 8
    np.testing.assert_allclose(smaller(_rows()), model(_rows()), rtol=0, atol=2e-5)


def test_bad_sizes_and_soft_prompts_are_refused():
    prompted = T5QueryGenerator(_CONFIG, soft_prompt=2)
    with pytest.raises(validation.InputError, match="num_layers is -1"):
        resized(prompted, num_layers=-1)
    with pytest.raises(validation.InputError, match="has a soft prompt"):
        resized(prompted, num_layers=4)

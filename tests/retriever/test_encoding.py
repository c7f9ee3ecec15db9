"""Corpus encoding: order, and agreement with texts encoded one by one."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.retriever import encode_texts
from tfdpsq.validation import InputError


def _texts(n, seed=0):
    draw = np.random.default_rng(seed)
    return [
        " ".join(f"w{word}" for word in draw.integers(0, 500, draw.integers(0, 15)))
        for _ in range(n)
    ]


@pytest.mark.parametrize(
    ("n", "batch_size", "jit_compile"),
    [(1, 4, False), (70, 4, False), (70, 128, True)],
)
def test_equals_texts_encoded_one_by_one(model, tokenizer, n, batch_size, jit_compile):
    texts = _texts(n)
    got = encode_texts(
        model,
        iter(texts),
        "document",
        batch_size,
        progress=False,
        jit_compile=jit_compile,
    )
    assert (got.dtype, got.shape) == (np.float32, (n, 12))
    for row in range(0, n, 7):
        alone = model.encode_documents(*tokenizer.encode([texts[row]], 12))
        np.testing.assert_allclose(got[row], alone[0], rtol=0, atol=1e-6)


def test_kind_chooses_tower_and_length(make_model, tokenizer):
    model, texts = make_model(tokenizer=tokenizer, shared=False), _texts(9)
    got = encode_texts(model, texts, "query", 4, progress=False)
    expected = model.encode_queries(*tokenizer.encode(texts, 6))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="kind is 'passage'"):
        encode_texts(model, texts, "passage")


def test_weights_trained_after_the_first_call_are_used(make_model, tokenizer):
    model, texts = make_model(tokenizer=tokenizer), _texts(3)
    before = encode_texts(model, texts, "query", 2, progress=False)
    for variable in model.trainable_variables:
        variable.assign_add(tf.random.normal(variable.shape, seed=1))
    after = encode_texts(model, texts, "query", 2, progress=False)
    assert np.abs(after - before).max() > 0.01

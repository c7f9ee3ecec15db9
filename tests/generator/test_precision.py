"""bfloat16 beside float32: what is computed in which."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.generator import T5QueryGenerator
from tfdpsq.layers import T5Config

_V, _ROWS, _DOCUMENT, _QUERY = 64, 16, 12, 6


def _model(dtype, version="1.1", **options):
    tf.keras.utils.set_random_seed(7)
    config = T5Config(_V, 1, 2, 32, 48, 16, version, dropout=0.0)
    return T5QueryGenerator(config, dtype, **options)


def _batch(random):
    """Queries that can be learned: every second token of the document, and EOS."""
    documents = random.integers(3, _V, (_ROWS, _DOCUMENT))
    queries = documents[:, : 2 * _QUERY : 2].copy()
    lengths = random.integers(2, _QUERY + 1, _ROWS)
    queries[np.arange(_ROWS), lengths - 1] = 1
    queries[np.arange(_QUERY)[None] >= lengths[:, None]] = 0
    return {
        "document_ids": tf.constant(documents, tf.int32),
        "document_lengths": tf.fill([_ROWS], _DOCUMENT),
        "query_ids": tf.constant(queries, tf.int32),
        "query_lengths": tf.constant(lengths, tf.int32),
        "weights": tf.ones([_ROWS]),
    }


def test_bfloat16_keeps_weights_norms_and_softmax_in_float32():
    model = _model("mixed_bfloat16")
    assert {v.dtype.base_dtype for v in model.variables} == {tf.float32}
    graph = (
        tf.function(lambda batch: model.per_example_losses(batch, training=True))
        .get_concrete_function(_batch(np.random.default_rng(0)))
        .graph
    )
    kinds = {}
    for op in graph.get_operations():
        if op.type in ("Softmax", "Rsqrt", "BatchMatMulV2", "MatMul"):
            kinds.setdefault(op.type, []).append(op.outputs[0].dtype)
    assert set(kinds["Softmax"]) == set(kinds["Rsqrt"]) == {tf.float32}
    assert tf.bfloat16 in kinds["BatchMatMulV2"] + kinds["MatMul"]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_head_and_position_bias_use_unrounded_weights(version):
    """Rounded by autocast, a head is off by a third of a per cent."""
    exact, model = _model("float32", version), _model("mixed_bfloat16", version)
    model.set_weights(exact.get_weights())
    random = np.random.default_rng(3)
    hidden = tf.constant(random.normal(0, 5, (4, 32)), tf.float32)
    embedding = model.backbone.token_embedding
    kernel = (
        tf.transpose(embedding.embeddings).numpy() * 32**-0.5
        if model.config.tied
        else embedding.weights[1].numpy()
    )
    expected = hidden.numpy().astype(np.float64) @ kernel.astype(np.float64)
    np.testing.assert_allclose(model.head(hidden), expected, rtol=1e-4, atol=1e-5)

    for stack in ("encoder", "decoder"):
        biases = []
        for each in (exact, model):
            layer = getattr(each.backbone, f"{stack}_transformer_layers")[0]
            states = tf.zeros([1, 9, 32], layer.compute_dtype)
            biases.append(layer.self_attention(states)[1])
        assert biases[1].dtype == tf.float32
        np.testing.assert_array_equal(*biases)


def test_layer_norm_of_large_numbers_is_exact_to_bfloat16():
    """In bfloat16 throughout, the mean of squares would be off by several per mille."""
    layer = _model("mixed_bfloat16").backbone.encoder_transformer_layers[0].layer_norm
    x = np.random.default_rng(0).normal(3.0, 1.0, (4, 32)).astype("float32")
    x = tf.cast(tf.constant(x), tf.bfloat16)
    exact = tf.cast(x, tf.float64)
    exact /= tf.sqrt(tf.reduce_mean(exact**2, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(layer(x), exact, rtol=1e-5)

"""bfloat16 beside float32: what is computed in which, and where training ends."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq import privacy
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


def test_weights_norms_softmax_and_logits_are_float32_and_products_are_not():
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
    # All but the head's: a layer of 4 + 3 products, one of 4 + 4 + 3; three attentions
    # have two more each.
    products = [t for k in ("BatchMatMulV2", "MatMul") for t in kinds[k]]
    assert products.count(tf.float32) == 1
    assert products.count(tf.bfloat16) == 7 + 11 + 3 * 2


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_head_and_position_bias_are_of_weights_that_are_not_rounded(version):
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


def test_a_norm_of_large_numbers_is_exact_to_bfloat16():
    """In bfloat16 throughout, the mean of squares would be off by several per mille."""
    layer = _model("mixed_bfloat16").backbone.encoder_transformer_layers[0].layer_norm
    x = np.random.default_rng(0).normal(3.0, 1.0, (4, 32)).astype("float32")
    x = tf.cast(tf.constant(x), tf.bfloat16)
    exact = tf.cast(x, tf.float64)
    exact /= tf.sqrt(tf.reduce_mean(exact**2, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(layer(x), exact, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [math.inf, 8.0])
def test_training_ends_within_a_per_cent_of_float32(epsilon):
    """200 steps of the same batches and the same noise."""
    ends = {}
    for dtype in ("float32", "mixed_bfloat16"):
        model = _model(dtype)
        spec = privacy.PrivacySpec(
            epsilon=epsilon,
            clip_norm=1.0,
            num_units=100_000,
            batch_size=_ROWS,
            steps=200,
        )
        plan = privacy.PrivacyPlan(spec, _ROWS, 0.0 if math.isinf(epsilon) else 0.05)
        optimizer = privacy.make_optimizer(plan, 3e-3, noise_seed=11)
        step = tf.function(
            privacy.make_logical_step(
                lambda part, model=model: model.per_example_losses(part, training=True),
                model.trainable_variables,
                optimizer,
                _ROWS // 2,
                layers=[model],
            )
        )
        random = np.random.default_rng(1)
        losses = [float(step(_batch(random), tf.constant(_ROWS))) for _ in range(200)]
        ends[dtype] = np.mean(losses[-20:])
        assert ends[dtype] < 0.8 * losses[0]  # it did learn
    assert ends["mixed_bfloat16"] == pytest.approx(ends["float32"], rel=0.01)


@pytest.mark.slow  # tests/privacy/test_fast_t5.py does it with dropout, layer by layer
def test_rematerialisation_changes_no_loss_and_no_gradient():
    batch = _batch(np.random.default_rng(3))
    results = []
    for rematerialize in (False, True):
        model = _model("float32", rematerialize=rematerialize)

        @tf.function
        def gradients(model=model):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model.per_example_losses(batch, training=True))
            return loss, tape.gradient(loss, model.trainable_variables)

        results.append(gradients())
    assert float(results[0][0]) == float(results[1][0])
    for one, other in zip(results[0][1], results[1][1]):
        one, other = tf.convert_to_tensor(one), tf.convert_to_tensor(other)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

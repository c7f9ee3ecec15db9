"""Weights by name: all of them, each in its place."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.generator import checkpoints
from tfdpsq.generator.checkpoints.weights import (
    stored_values,
    variable_of,
    weights_of,
)
from tfdpsq.layers import T5Backbone, T5Config, apply_lora
from tfdpsq.validation import InputError

_QUERY = "encoder.block.0.layer.0.SelfAttention.q.weight"
_CONFIGS = {
    version: T5Config(20, 1, 3, 16, 12, 8, version, dropout=0.0)
    for version in ("1.0", "1.1")
}


@pytest.mark.parametrize("version", _CONFIGS)
def test_the_table_covers_every_variable_once(version):
    backbone = T5Backbone(_CONFIGS[version])
    found = weights_of(_CONFIGS[version])

    variables = [variable_of(backbone, weight) for weight in found]
    assert {id(v) for v in variables} == {id(v) for v in backbone.variables}
    assert len(variables) == len(backbone.variables)
    assert [weight.shape for weight in found] == [tuple(v.shape) for v in variables]
    for form in ("huggingface", "keras", "t5x"):
        assert len({getattr(weight, form) for weight in found}) == len(found)


def test_replicated_model_is_loaded_on_every_replica(logical_cpus, tmp_path):
    config = _CONFIGS["1.1"]
    one = T5Backbone(config)
    checkpoints.save(tmp_path, config, one)
    with tf.distribute.MirroredStrategy(logical_cpus[:2]).scope():
        backbone = T5Backbone(config)

    checkpoints.open_checkpoint(tmp_path).load_into(backbone)

    for weight in weights_of(config):
        copies = variable_of(backbone, weight).values
        assert len(copies) == 2
        for copy in copies:
            np.testing.assert_array_equal(copy, variable_of(one, weight))


def test_lora_is_written_merged():
    config = _CONFIGS["1.1"]
    backbone = T5Backbone(config)
    (query,) = [w for w in weights_of(config) if w.huggingface == _QUERY]
    before = variable_of(backbone, query).numpy()
    adapted = apply_lora(backbone, 2, 4.0, ["*/self_attention/query_projector"])
    for layer in adapted.values():
        layer.up.kernel.assign(tf.random.stateless_normal([2, 24], [1, 2]))
    layer = backbone.encoder_transformer_layers[0].self_attention.query_projector

    # alpha / rank = 2
    update = 2.0 * layer.down.kernel.numpy() @ layer.up.kernel.numpy()
    written = dict(stored_values(backbone, config, "huggingface"))[query.huggingface]
    np.testing.assert_allclose(written.T, before + update, rtol=1e-5, atol=1e-6)
    assert np.abs(update).max() > 0.1


def test_values_a_format_cannot_hold_are_not_written():
    backbone = T5Backbone(_CONFIGS["1.0"])
    backbone.token_embedding.embeddings.assign(tf.fill([20, 16], 70_000.0))

    # The largest float16 is 65,504.
    with pytest.raises(InputError, match="shared.weight is not finite in float16"):
        next(stored_values(backbone, _CONFIGS["1.0"], "huggingface", "float16"))

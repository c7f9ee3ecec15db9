"""Weights by name: all of them, in blocks, checked; against sources in memory."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.generator.checkpoints import slots, weights
from tfdpsq.layers import T5Backbone, T5Config, apply_lora
from tfdpsq.validation import DataError, InputError

_CONFIGS = {
    version: T5Config(20, 1, 3, 16, 12, 8, version, dropout=0.0)
    for version in ("1.0", "1.1")
}
# The kinds that a format may hold transposed.
_MATRICES = (slots.EMBEDDING, slots.HEAD, slots.KERNEL, slots.POSITIONS)


@pytest.fixture(scope="module")
def backbones():
    """Backbones by version, for tests that load all weights or none."""
    return {version: T5Backbone(config) for version, config in _CONFIGS.items()}


class _Memory:
    """A source whose tensors are arrays."""

    path = "checkpoint"

    def __init__(self, arrays):
        self.arrays = arrays
        self.reads = []

    @property
    def tensors(self):
        return {
            name: weights.Entry(array.shape, array.dtype.name, f"{name}.bin")
            for name, array in self.arrays.items()
        }

    def read(self, name, start, stop):
        self.reads.append((name, start, stop))
        return self.arrays[name][start:stop]


def _slots(config, transposed=False, encoder_only=False):
    """Slots stored under other names, and the other way round."""
    return [
        dataclasses.replace(
            slot,
            stored=f"their {slot.name}",
            transposed=transposed and slot.kind in _MATRICES,
        )
        for slot in slots.slots(config, encoder_only)
    ]


def _source(wanted, dtype="float32"):
    random = np.random.default_rng(0)
    return _Memory(
        {
            slot.stored: random.normal(size=slot.stored_shape).astype(dtype)
            for slot in wanted
        }
    )


@pytest.mark.parametrize("version", _CONFIGS)
def test_slots_cover_every_variable_once(version, backbones):
    backbone = backbones[version]
    found = slots.slots(_CONFIGS[version])

    variables = [slots.variable_of(backbone, slot) for slot in found]
    assert {id(v) for v in variables} == {id(v) for v in backbone.variables}
    assert len(variables) == len(backbone.variables)
    assert [slot.shape for slot in found] == [tuple(v.shape) for v in variables]
    assert len({slot.name for slot in found}) == len(found)


@pytest.mark.parametrize("transposed", [False, True])
def test_every_value_arrives_in_its_place(transposed, backbones):
    config = _CONFIGS["1.1"]
    wanted = _slots(config, transposed)
    source = _source(wanted)
    backbone = backbones["1.1"]
    for variable in backbone.variables:
        variable.assign(tf.zeros_like(variable))

    weights.load_into(backbone, wanted, source)

    for slot in wanted:
        values = source.arrays[slot.stored]
        expected = values.T if slot.transposed else values
        np.testing.assert_array_equal(slots.value_of(backbone, slot), expected)
        blocks = list(weights.stored_blocks(backbone, slot))
        np.testing.assert_array_equal(np.concatenate(blocks), values)


def test_replicated_model_is_loaded_on_every_replica(logical_cpus):
    config = _CONFIGS["1.1"]
    wanted = _slots(config, transposed=True)
    source = _source(wanted)
    with tf.distribute.MirroredStrategy(logical_cpus[:2]).scope():
        backbone = T5Backbone(config)

    weights.load_into(backbone, wanted, source)

    for slot in wanted:
        copies = slots.variable_of(backbone, slot).values
        assert len(copies) == 2
        for copy in copies:
            stored = copy.numpy().T if slot.transposed else copy.numpy()
            np.testing.assert_array_equal(stored, source.arrays[slot.stored])


def test_half_precision_becomes_float32_exactly_and_back(backbones):
    dtype = "bfloat16"
    config = _CONFIGS["1.0"]
    wanted = _slots(config)
    source = _source(wanted, tf.as_dtype(dtype).as_numpy_dtype)
    backbone = backbones["1.0"]

    weights.load_into(backbone, wanted, source)

    for slot in wanted:
        exact = source.arrays[slot.stored].astype(np.float32)
        np.testing.assert_array_equal(slots.value_of(backbone, slot), exact)
        (block,) = weights.stored_blocks(backbone, slot, dtype)
        assert block.dtype == source.arrays[slot.stored].dtype
        assert block.tobytes() == source.arrays[slot.stored].tobytes()


_Q = "their encoder.block.0.layer.0.SelfAttention.q.weight"


def test_bad_headers_are_named_before_anything_is_read():
    wanted = _slots(_CONFIGS["1.0"])
    weights.check(wanted, _source(wanted))
    for change, message in (
        (lambda arrays: arrays.pop(_Q), f"lacks 1 tensor: {_Q}"),
        (lambda arrays: arrays.update(adapter=np.ones(3)), "unknown tensor: adapter"),
        (lambda arrays: arrays.update({_Q: arrays[_Q].T}), r"shape \[24, 16\]"),
    ):
        source = _source(wanted)
        change(source.arrays)
        with pytest.raises(DataError, match=message):
            weights.check(wanted, source)
        assert source.reads == []


def test_value_that_is_not_finite_is_named_with_its_row(backbones):
    wanted = _slots(_CONFIGS["1.0"])
    source = _source(wanted)
    source.arrays[_Q][9, 3] = np.nan

    with pytest.raises(DataError, match=f"{_Q}.bin: tensor {_Q} holds NaN .* row 9"):
        weights.load_into(backbones["1.0"], wanted, source)


def test_lora_is_written_merged_and_not_loaded_over():
    config = _CONFIGS["1.1"]
    backbone = T5Backbone(config)
    wanted = _slots(config, transposed=True)
    (query,) = [slot for slot in wanted if slot.stored == _Q]
    before = slots.value_of(backbone, query).numpy()
    adapted = apply_lora(backbone, 2, 4.0, ["*/self_attention/query_projector"])
    for layer in adapted.values():
        layer.up.kernel.assign(tf.random.stateless_normal([2, 24], [1, 2]))
    layer = backbone.encoder_transformer_layers[0].self_attention.query_projector

    written = np.concatenate(list(weights.stored_blocks(backbone, query)))
    # alpha / rank = 2
    update = 2.0 * layer.down.kernel.numpy() @ layer.up.kernel.numpy()
    np.testing.assert_allclose(written.T, before + update, rtol=1e-5, atol=1e-6)
    assert np.abs(update).max() > 0.1
    with pytest.raises(InputError, match="encoder.*q.weight belongs to a LoRA layer"):
        weights.load_into(backbone, wanted, _source(wanted))


def test_values_a_format_cannot_hold_are_not_written(backbones):
    config, backbone = _CONFIGS["1.0"], backbones["1.0"]
    slot = slots.slots(config)[0]
    backbone.token_embedding.embeddings.assign(tf.fill([20, 16], 70_000.0))

    # The largest float16 is 65,504.
    with pytest.raises(InputError, match="shared.weight .* not finite in float16"):
        list(weights.stored_blocks(backbone, slot, "float16"))

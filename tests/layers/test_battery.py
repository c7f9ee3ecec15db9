"""One battery for every exported layer, as keras-hub's `run_layer_test`.

Build, configuration, `.keras` round trip, dtype policies, static shapes under XLA, and
one step of `fit`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq import layers
from tfdpsq.layers import (
    FirstTokenPooling,
    Folded,
    LoRADense,
    MaskedMeanPooling,
    QueryAdapter,
    Scale,
    SeededDropout,
    SoftPrompt,
    T5Backbone,
    T5Config,
    T5TransformerLayer,
)

keras = tf.keras
_B, _L, _D = 3, 5, 6  # rows, tokens, width


@dataclasses.dataclass(frozen=True)
class _Case:
    """A layer and what the battery expects of it.

    Attributes:
      make: makes the layer, given `dtype` and `name`.
      inputs: arguments of its call, positional ones in a tuple.
      shapes: shapes of its outputs.
      weights: how many weights it has.
      trainable: how many of them are trained.
      exact: whether it computes in float32 unless it gets a `dtype` of its own.
    """

    make: Callable[..., keras.layers.Layer]
    inputs: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    weights: int
    trainable: int
    exact: bool = False


def _floats(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


_MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]], np.int32)


def _t5(version):
    return T5Config(19, 1, 2, _D, 10, 4, version, dropout=0.1)


_TEXTS = {
    "encoder_token_ids": np.array([[3, 4, 5, 0, 0], [6, 7, 8, 9, 1], [2, 0, 0, 0, 0]]),
    "encoder_padding_mask": _MASK,
    "decoder_token_ids": np.array([[0, 3], [0, 4], [0, 5]]),
    "decoder_padding_mask": np.ones([_B, 2]),
}
_TEXTS = {name: values.astype(np.int32) for name, values in _TEXTS.items()}
_STATES = (_floats(_B, _L, _D), _MASK[:, np.newaxis])

_CASES = {
    "FirstTokenPooling": _Case(
        FirstTokenPooling, (_floats(_B, _L, _D), _MASK), ((_B, _D),), 0, 0, True
    ),
    "MaskedMeanPooling": _Case(
        MaskedMeanPooling, (_floats(_B, _L, _D), _MASK), ((_B, _D),), 0, 0, True
    ),
    "Folded": _Case(
        lambda dtype=None, **options: Folded(
            keras.layers.Dense(4, dtype=dtype), dtype=dtype, **options
        ),
        (_floats(_B, _L, _D),),
        ((_B, _L, 4),),
        2,
        2,
    ),
    "LoRADense": _Case(
        lambda dtype=None, **options: LoRADense(
            keras.layers.Dense(4, "tanh", dtype=dtype), 2, 3.0, **options
        ),
        (_floats(_B, _D),),
        ((_B, 4),),
        4,
        2,
    ),
    "QueryAdapter": _Case(QueryAdapter, (_floats(_B, _D),), ((_B, _D),), 1, 1, True),
    "Scale": _Case(
        lambda **options: Scale(5.0, learned=True, **options),
        (_floats(_B, 4),),
        ((_B, 4),),
        1,
        1,
        True,
    ),
    "SeededDropout": _Case(
        lambda **options: SeededDropout(0.4, **options),
        (_floats(_B, _D),),
        ((_B, _D),),
        0,
        0,
    ),
    "SoftPrompt": _Case(
        lambda **options: SoftPrompt(2, **options),
        (_floats(_B, _L, _D), _MASK),
        ((_B, 2 + _L, _D), (_B, 2 + _L)),
        1,
        1,
    ),
    # Norm, four projections and the bias; norm and two or three projections.
    "T5TransformerLayer": _Case(
        lambda **options: T5TransformerLayer(
            _t5("1.1"), False, True, rematerialize=True, **options
        ),
        _STATES,
        ((_B, _L, _D), (_B, 2, _L, _L)),
        10,
        10,
    ),
    "T5TransformerLayer, decoder": _Case(
        lambda **options: T5TransformerLayer(_t5("1.0"), True, True, **options),
        (*_STATES, None, _floats(_B, 4, _D), np.ones([_B, 1, 4], np.int32), True),
        ((_B, _L, _D), (_B, 2, _L, _L)),
        14,
        14,
    ),
    # A layer has 9 or 14 weights in T5 1.0, one more in 1.1; and there are two norms,
    # the embedding, and the soft prompt or the head.
    "T5Backbone": _Case(
        lambda **options: T5Backbone(_t5("1.0"), soft_prompt=2, **options),
        (_TEXTS,),
        ((_B, 2, _D), (_B, 2 + _L, _D)),
        27,
        27,
    ),
    "T5Backbone, 1.1": _Case(
        lambda **options: T5Backbone(_t5("1.1"), rematerialize=True, **options),
        (_TEXTS,),
        ((_B, 2, _D), (_B, _L, _D)),
        29,
        29,
    ),
}


def _params(slow):
    """The cases, those whose names hold `slow` marked so: making a T5 takes seconds."""
    return [
        pytest.param(name, marks=pytest.mark.slow if slow in name else ())
        for name in _CASES
    ]


@pytest.fixture(params=_params(slow=","), scope="module")
def case(request):
    return _CASES[request.param]


@pytest.fixture(scope="module")
def built(case):
    """(layer, its outputs), for tests that change neither."""
    keras.utils.set_random_seed(0)
    layer = case.make(name="one")
    return layer, _outputs(layer, case)


def _outputs(layer, case, training=False):
    found = layer(*_tensors(case.inputs), training=training)
    return [tensor.numpy() for tensor in tf.nest.flatten(found)]


def _tensors(inputs):
    def convert(value):
        return tf.constant(value) if isinstance(value, np.ndarray) else value

    return tf.nest.map_structure(convert, inputs)


def _as_model(layer, case):
    """A functional model around the layer; the layer itself if it is a model."""
    if isinstance(layer, keras.Model):
        return layer, case.inputs[0]
    symbols, arrays = [], []
    for value in case.inputs:
        if isinstance(value, np.ndarray):
            arrays.append(value)
            value = keras.Input(value.shape[1:], dtype=value.dtype)
        symbols.append(value)
    inputs = [value for value in symbols if tf.is_tensor(value)]
    return keras.Model(inputs, layer(*symbols)), arrays


def test_battery_covers_every_exported_layer():
    exported = {
        name
        for name in layers.__all__
        if isinstance(getattr(layers, name), type)
        and issubclass(getattr(layers, name), keras.layers.Layer)
    }
    assert exported == {name.split(",")[0] for name in _CASES}


def test_layer_builds(case, built):
    layer, outputs = built
    assert tuple(output.shape for output in outputs) == case.shapes
    assert layer.name == "one"
    assert len(layer.weights) == case.weights
    assert len(layer.trainable_weights) == case.trainable
    assert all(np.isfinite(output).all() for output in outputs)


def test_configuration_recreates_the_layer(case, built):
    layer, outputs = built
    config = layer.get_config()
    copy = type(layer).from_config(config)
    _outputs(copy, case)
    assert copy.get_config() == config
    shapes = [weight.shape for weight in layer.weights]
    assert [weight.shape for weight in copy.weights] == shapes
    copy.set_weights(layer.get_weights())
    for one, other in zip(_outputs(copy, case), outputs):
        np.testing.assert_array_equal(one, other)
    # As Keras itself writes it, by the registered name alone.
    serialized = keras.saving.serialize_keras_object(layer)
    assert serialized["registered_name"] == f"tfdpsq>{type(layer).__name__}"


def test_keras_file_round_trip(case, built, tmp_path):
    model, arrays = _as_model(built[0], case)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    before, after = (tf.nest.flatten(one(arrays)) for one in (model, loaded))
    for one, other in zip(before, after):
        np.testing.assert_array_equal(one, other)
    assert [weight.trainable for weight in loaded.weights] == [
        weight.trainable for weight in model.weights
    ]


def test_layer_follows_its_dtype_policy(case, built):
    layer = case.make(dtype="mixed_bfloat16")
    first = _outputs(layer, case)[0]
    assert {weight.dtype for weight in layer.weights} <= {tf.float32}
    # A backbone's decoder ends in a norm, which is exact.
    backbone = isinstance(layer, T5Backbone)
    assert first.dtype == (tf.float32 if backbone else tf.bfloat16)
    layer.set_weights(built[0].get_weights())
    for one, other in zip(_outputs(layer, case), built[1]):
        # bfloat16 keeps 8 bits of every factor and sum.
        exact = one.dtype == np.float32  # a norm, or a position bias
        one = one.astype(np.float32)
        np.testing.assert_allclose(one, other, rtol=0.1, atol=0.1)
        # float32 would be closer than that.
        assert exact or other.dtype != np.float32 or not np.array_equal(one, other)


@pytest.mark.parametrize("name", _params(slow="Backbone"))
def test_global_policy_reaches_the_layer(name):
    case = _CASES[name]
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        layer = case.make()
        found = layer.compute_dtype
        if isinstance(layer, T5Backbone):
            found = layer.encoder_transformer_layers[0].compute_dtype
    finally:
        # Not "float32", which other tests' `floatx` could not change any more.
        keras.mixed_precision.set_global_policy(None)
    assert found == ("float32" if case.exact else "bfloat16")


@pytest.mark.parametrize("name", _params(slow="T5"))
def test_shapes_are_static_under_xla(name):
    case, shapes = _CASES[name], []
    layer = case.make()
    outputs = _outputs(layer, case)

    # What is no tensor must stay as it is.
    arrays = [np.asarray(value) for value in tf.nest.flatten(case.inputs)]
    where = [i for i, value in enumerate(arrays) if value.ndim]

    @tf.function(jit_compile=True)
    def run(*tensors):
        values = tf.nest.flatten(case.inputs)
        for place, tensor in zip(where, tensors):
            values[place] = tensor
        found = layer(*tf.nest.pack_sequence_as(case.inputs, values))
        shapes.extend(tensor.shape for tensor in tf.nest.flatten(found))
        return found

    found = tf.nest.flatten(run(*(tf.constant(arrays[place]) for place in where)))
    assert tuple(tuple(shape) for shape in shapes) == case.shapes
    for one, other in zip(found, outputs):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", _params(slow="Backbone"))
def test_a_step_of_fit_trains_exactly_what_is_trainable(name):
    case = _CASES[name]
    keras.utils.set_random_seed(1)
    layer = case.make()
    model, arrays = _as_model(layer, case)
    # Only floating outputs have a loss.
    outputs = [
        output for output in tf.nest.flatten(model.output) if output.dtype.is_floating
    ]
    model = keras.Model(model.input, [tf.cast(output, "float32") for output in outputs])
    before = [weight.numpy() for weight in layer.weights]
    # Eagerly, as tracing a T5 takes most of the time; XLA is tested above.
    model.compile(keras.optimizers.SGD(0.5), loss="mse", run_eagerly=True)
    targets = [np.zeros(output.shape) for output in tf.nest.flatten(model(arrays))]
    model.fit(arrays, targets, batch_size=_B, verbose=0)
    trained = {id(weight) for weight in layer.trainable_weights}
    for weight, old in zip(layer.weights, before):
        changed = not np.array_equal(weight.numpy(), old)
        # LoRA's B starts at zero, so that A's first gradient is zero; and a backbone's
        # states do not use the head.
        silent = "down" in weight.name or "reverse" in weight.name
        assert changed == (id(weight) in trained and not silent), weight.name

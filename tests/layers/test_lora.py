"""LoRA against its formula in float64, and what it freezes and replaces."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.layers import lora, train_only
from tfdpsq.validation import InputError

keras = tf.keras


def _adapted(activation="gelu", use_bias=True, shape=(4, 6, 5)):
    """A LoRA layer with an update that is not zero, and inputs."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(7, activation, use_bias=use_bias)
    layer = lora.LoRADense(dense, rank=2, alpha=3.0)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    layer(x)
    layer.up.kernel.assign(tf.random.normal([2, 7]))
    if use_bias:
        dense.bias.assign(tf.random.normal([7]))
    return layer, x


def _oracle(layer, x):
    """The layer's value before its activation, in float64."""
    w, a, b = (
        kernel.numpy().astype(np.float64)
        for kernel in (layer.dense.kernel, layer.down.kernel, layer.up.kernel)
    )
    value = x.astype(np.float64) @ (w + 3.0 / 2 * a @ b)
    return value + layer.dense.bias.numpy() if layer.dense.use_bias else value


@pytest.mark.parametrize(
    "mode, shape", [("eager", (4, 5)), ("eager", (2, 3, 4, 5)), ("xla", (4, 6, 5))]
)
def test_dense_equals_the_formula_in_float64(mode, shape):
    for activation, use_bias in (("linear", False), ("tanh", True)):
        layer, x = _adapted(activation, use_bias, shape=shape)
        run = tf.function(layer, jit_compile=True) if mode == "xla" else layer
        expected = _oracle(layer, x)
        expected = np.tanh(expected) if activation == "tanh" else expected
        got = run(tf.constant(x))
        assert got.shape == (*shape[:-1], 7)
        assert layer.compute_output_shape(shape) == (*shape[:-1], 7)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


def test_layer_starts_as_the_one_it_replaces():
    dense = keras.layers.Dense(7, "relu")
    x = tf.random.normal([4, 5])
    before = dense(x).numpy()
    layer = lora.LoRADense(dense, rank=3, alpha=8.0)
    np.testing.assert_allclose(layer(x), before, rtol=1e-6, atol=1e-7)
    assert layer.name == dense.name
    # A is random, of variance 1 / m; B must be zero, and then neither is stuck.
    assert np.any(layer.down.kernel.numpy()) and not np.any(layer.up.kernel.numpy())
    wide = lora.LoRADense(keras.layers.Dense(1), rank=400, alpha=1.0)
    wide.build([None, 250])
    assert np.var(wide.down.kernel) == pytest.approx(1 / 250, rel=0.05)


class _Gate(keras.layers.Layer):
    """Two Dense layers as attributes, one of them shared, and a weight of its own."""

    def __init__(self, shared, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.layers.Dense(5)
        self.shared = shared

    def build(self, shape):
        self.factor = self.add_weight("factor", [5], initializer="ones")

    def call(self, x):
        return self.factor * self.inner(x) * self.shared(x)


class _Gates(keras.Model):
    def __init__(self):
        super().__init__()
        shared = keras.layers.Dense(5)
        self.blocks = [_Gate(shared, name=f"gate_{i}") for i in range(2)]
        self.last = keras.layers.LayerNormalization()

    def call(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def test_targets_are_adapted_and_the_rest_frozen():
    model = _Gates()
    x = tf.random.normal([4, 5])
    before = model(x).numpy()
    replaced = lora.apply_lora(model, 2, 2.0, ["gate_0/inner", "*/shared"])
    assert list(replaced) == ["gate_0/inner", "gate_0/shared", "gate_1/shared"]
    assert replaced["gate_0/inner"] is model.blocks[0].inner
    # One layer in two places stays one layer.
    assert model.blocks[0].shared is model.blocks[1].shared
    assert isinstance(model.blocks[1].shared, lora.LoRADense)
    assert type(model.blocks[1].inner) is keras.layers.Dense
    np.testing.assert_allclose(model(x), before, rtol=1e-5, atol=1e-6)
    assert [v.name for v in model.trainable_variables] == [
        "gate_0/inner/down/kernel:0",
        "gate_0/inner/up/kernel:0",
        "gate_0/shared/down/kernel:0",
        "gate_0/shared/up/kernel:0",
    ]
    # Nothing is lost: 3 Dense layers, 2 factors, 1 normalisation, and the new ones.
    assert len(model.weights) == 3 * 2 + 2 + 2 + 4


def test_bad_targets_are_refused_and_change_nothing():
    model = _Gates()
    model(tf.ones([4, 5]))
    for rank, alpha, targets, message in (
        (2, 2.0, ["*/inner", "*/query"], r"'\*/query', which matches no Dense"),
        (2, 2.0, "*/inner", "give patterns"),
        (0, 2.0, ["*"], "rank is 0"),
        (2, -1.0, ["*"], "alpha is -1"),
    ):
        with pytest.raises(InputError, match=message):
            lora.apply_lora(model, rank, alpha, targets)
    assert len(model.trainable_variables) == 3 * 2 + 2 + 2


def test_only_dense_layers_can_be_adapted():
    with pytest.raises(InputError, match="layers of class Dense"):
        lora.LoRADense(keras.layers.EinsumDense("ab,bc->ac", 2), 2, 2.0)


def test_nodes_of_a_graph_are_adapted_trained_and_merged():
    """As the docstring of `apply_lora` shows it: a layer that is used twice has one."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input([6])
    hidden = keras.layers.Dense(6, "tanh", name="hidden")
    logits = keras.layers.Dense(2, name="logits")
    model = keras.Model(inputs, logits(hidden(hidden(inputs))))
    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    before, weights = model.predict(x, verbose=0), model.get_weights()

    def adapt(layer):
        return lora.LoRADense(layer, 2, 4.0) if layer.name == "hidden" else layer

    adapted = keras.models.clone_model(model, clone_function=adapt)
    train_only(adapted, ["*/down/kernel", "*/up/kernel"])
    np.testing.assert_allclose(
        adapted.predict(x, verbose=0), before, rtol=1e-5, atol=1e-6
    )
    assert len(adapted.trainable_weights) == 2
    adapted.compile(keras.optimizers.SGD(0.5), "mse")
    adapted.fit(x, np.ones([8, 2], np.float32), epochs=2, verbose=0)
    learned = adapted.predict(x, verbose=0)
    assert np.max(np.abs(learned - before)) > 0.05
    for one, other in zip(model.get_weights(), weights):
        np.testing.assert_array_equal(one, other)  # the given model's are as before
    lora.merge_lora(adapted)
    for same in (adapted, model):
        np.testing.assert_allclose(
            same.predict(x, verbose=0), learned, rtol=1e-4, atol=1e-5
        )

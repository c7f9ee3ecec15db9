"""LoRA against its formula in float64, and what it freezes and replaces."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.layers import lora, t5, t5_backbone
from tfdpsq.validation import InputError

keras = tf.keras


def _adapted(activation="gelu", use_bias=True, dtype=None, shape=(4, 6, 5)):
    """A LoRA layer with an update that is not zero, and inputs."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(7, activation, use_bias=use_bias, dtype=dtype)
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


@pytest.mark.parametrize("mode", ["eager", "xla"])
@pytest.mark.parametrize("shape", [(4, 5), (4, 6, 5), (2, 3, 4, 5)])
def test_it_computes_the_formula(mode, shape):
    for activation, use_bias in (("linear", False), ("tanh", True)):
        layer, x = _adapted(activation, use_bias, shape=shape)
        run = tf.function(layer, jit_compile=True) if mode == "xla" else layer
        expected = _oracle(layer, x)
        expected = np.tanh(expected) if activation == "tanh" else expected
        got = run(tf.constant(x))
        assert got.shape == (*shape[:-1], 7)
        assert layer.compute_output_shape(shape) == (*shape[:-1], 7)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


def test_it_starts_as_the_layer_it_replaces():
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


def test_what_merge_returns_computes_the_same():
    layer, x = _adapted()
    plain = keras.layers.Dense(7, "gelu")
    plain.build([None, 5])
    plain.set_weights([layer.merge(), layer.dense.bias])
    np.testing.assert_allclose(plain(x), layer(x), rtol=1e-5, atol=1e-6)
    assert layer.merge().dtype == tf.float32


def test_its_two_matrices_are_all_that_is_trained():
    layer, x = _adapted()
    model = keras.Sequential([layer])
    model(x)
    model.trainable = True  # would thaw a layer that is frozen in the ordinary way
    assert [v.shape for v in model.trainable_weights] == [[5, 2], [2, 7]]
    assert len(model.non_trainable_weights) == 2
    model.compile("sgd", "mse")
    before = [weight.copy() for weight in model.get_weights()]
    model.fit(x, np.zeros([4, 6, 7], np.float32), verbose=0)
    changed = [np.any(old != new) for old, new in zip(before, model.get_weights())]
    assert changed == [True, True, False, False]


def test_its_config_makes_it_again():
    layer, _ = _adapted()
    again = lora.LoRADense.from_config(layer.get_config())
    assert (again.rank, again.alpha) == (2, 3.0)
    assert again.dense.get_config() == layer.dense.get_config()


def test_mixed_precision_keeps_float32_weights():
    layer, x = _adapted(dtype=keras.mixed_precision.Policy("mixed_bfloat16"))
    got = layer(tf.constant(x))
    assert got.dtype == tf.bfloat16
    assert {weight.dtype for weight in layer.weights} == {tf.float32}
    expected = keras.activations.gelu(tf.constant(_oracle(layer, x)))
    # bfloat16 keeps 8 bits of each factor and each sum.
    np.testing.assert_allclose(tf.cast(got, tf.float64), expected, rtol=0.05, atol=0.1)


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


def test_it_goes_where_the_targets_say_and_the_rest_is_frozen():
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


def test_a_second_call_leaves_alone_what_the_first_one_wraps():
    """Its frozen kernel would be trained again, under an update of the update."""
    model = _Gates()
    model(tf.random.normal([4, 5]))
    lora.apply_lora(model, 2, 2.0, ["gate_0/inner"])
    replaced = lora.apply_lora(model, 2, 2.0, ["*"])
    assert list(replaced) == ["gate_0/shared", "gate_1/inner", "gate_1/shared"]


def test_t5_keeps_its_outputs_and_trains_only_the_update():
    config = t5.T5Config(23, 2, 2, 12, 20, 5, "1.1", dropout=0.0)
    backbone = t5_backbone.T5Backbone(config)
    ids = tf.constant([[3, 4, 5], [6, 7, 8]])
    inputs = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("token_ids", ids), ("padding_mask", tf.ones_like(ids)))
    }
    before = backbone(inputs)["decoder_sequence_output"].numpy()
    everything = len(backbone.weights)
    replaced = lora.apply_lora(
        backbone, 4, 4.0, ["*/query_projector", "*_0/gate_projector"]
    )
    # Queries of 2 + 2 self-attentions and 2 cross-attentions, 2 gates.
    assert len(replaced) == 8
    assert "transformer_decoder_layer_1/cross_attention/query_projector" in replaced
    assert len(backbone.trainable_variables) == 16
    assert len(backbone.weights) == everything + 16
    after = backbone(inputs)["decoder_sequence_output"]
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
    # The function changes as soon as B does: the replacement is what runs.
    replaced["transformer_encoder_layer_0/gate_projector"].up.kernel.assign(
        tf.ones([4, 20])
    )
    changed = backbone(inputs)["decoder_sequence_output"]
    assert np.max(np.abs(changed - before)) > 1e-2
    # A configuration without LoRA would load as another model.
    with pytest.raises(
        NotImplementedError, match="_projector is a LoRADense.*save_to_preset"
    ):
        backbone.get_config()


def test_bad_targets_are_refused_and_change_nothing():
    model = _Gates()
    model(tf.ones([4, 5]))
    for targets, message in (
        (["*/inner", "*/query"], r"'\*/query', which matches no Dense.*4: gate_0/in"),
        ("*/inner", "give a list of patterns"),
        ([], r"targets is \[\]"),
    ):
        with pytest.raises(InputError, match=message):
            lora.apply_lora(model, 2, 2.0, targets)
    with pytest.raises(InputError, match="rank is 0"):
        lora.apply_lora(model, 0, 2.0, ["*"])
    with pytest.raises(InputError, match="alpha is -1"):
        lora.apply_lora(model, 2, -1.0, ["*"])
    assert len(model.trainable_variables) == 3 * 2 + 2 + 2
    # What a functional model calls are its nodes, not its attributes.
    inputs = keras.Input([5])
    dense = keras.layers.Dense(2)
    functional = keras.Model(inputs, dense(inputs))
    functional.dense = dense
    with pytest.raises(InputError, match="There are 0: none"):
        lora.apply_lora(functional, 2, 2.0, ["*"])


def test_only_dense_layers_can_be_adapted():
    class _Odd(keras.layers.Dense):
        pass

    einsum = keras.layers.EinsumDense("ab,bc->ac", 2)
    for adapter, layer in (
        (lora.LoRADense, einsum),
        (lora.LoRADense, _Odd(2)),
        (lora.LoRAEinsumDense, keras.layers.Dense(2)),
    ):
        with pytest.raises(InputError, match="LoRA is for layers of class Dense"):
            adapter(layer, 2, 2.0)
    # A kernel of its own for each position has an axis that is neither in nor out.
    by_place = keras.layers.EinsumDense("abc,bcd->abd", [5, 3])
    with pytest.raises(InputError, match="each axis of which is either summed over"):
        lora.LoRAEinsumDense(by_place, 2, 2.0)


_EQUATIONS = {
    "abc,cde->abde": ((4, 5, 6), [None, 2, 3], "de"),
    "abde,dec->abc": ((4, 5, 2, 3), [None, 6], "c"),
    "...x,xy->...y": ((4, 5, 6), 3, "y"),
    "ab...,bc->ac...": ((4, 6, 5), 3, None),
    "abc,dc->abd": ((4, 5, 6), [None, 3], None),
    "abc,cd->ad": ((4, 5, 6), 3, None),
}


@pytest.mark.parametrize("mode", ["eager", "xla"])
@pytest.mark.parametrize("equation", _EQUATIONS)
def test_einsum_computes_the_formula(equation, mode):
    shape, output, bias_axes = _EQUATIONS[equation]
    keras.utils.set_random_seed(0)
    dense = keras.layers.EinsumDense(equation, output, "tanh", bias_axes)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    before = dense(x).numpy()
    layer = lora.LoRAEinsumDense(dense, rank=2, alpha=3.0)
    # As `apply_lora` builds it, and as a call does.
    layer.build_as_dense()
    np.testing.assert_allclose(layer(x), before, rtol=1e-6, atol=1e-7)
    known = layer.compute_output_shape(shape)  # what EinsumDense says of itself
    assert [own or size for own, size in zip(known, before.shape)] == [*before.shape]
    fan_in = np.prod(layer.down.kernel.shape[:-1])
    assert fan_in * 2 == np.prod(layer.down.kernel.shape)
    layer.up.kernel.assign(tf.random.normal(layer.up.kernel.shape))
    # The product of A and B over the rank alone has the kernel's axes in some order.
    a, b = layer.down.kernel.numpy(), layer.up.kernel.numpy()
    product = np.tensordot(a.astype(np.float64), b.astype(np.float64), 1)
    if equation == "abc,dc->abd":
        product = product.T
    kernel = dense.kernel.numpy() + 3.0 / 2 * product
    spelled = equation.replace("...", "uv" if equation.startswith("...") else "u")
    expected = np.einsum(spelled, x.astype(np.float64), kernel)
    if bias_axes:
        dense.bias.assign(tf.random.normal(dense.bias.shape))
        expected += dense.bias.numpy()
    run = tf.function(layer, jit_compile=True) if mode == "xla" else layer
    np.testing.assert_allclose(run(tf.constant(x)), np.tanh(expected), atol=2e-5)
    np.testing.assert_allclose(layer.merge(), kernel, rtol=1e-6, atol=1e-6)


def test_attention_is_adapted_by_its_attributes():
    inputs = keras.Input([5, 6])
    attention = keras.layers.MultiHeadAttention(2, 3, name="attention")
    model = keras.Model(inputs, attention(inputs, inputs))
    x = tf.random.normal([4, 5, 6])
    before = model(x).numpy()
    replaced = lora.apply_lora(model, 2, 2.0, ["attention/_query_dense", "*output*"])
    assert {type(layer) for layer in replaced.values()} == {lora.LoRAEinsumDense}
    np.testing.assert_allclose(model(x), before, rtol=1e-5, atol=1e-6)
    assert len(model.trainable_weights) == 4
    for layer in replaced.values():
        layer.up.kernel.assign(tf.random.normal(layer.up.kernel.shape))
    changed = model(x).numpy()
    assert np.max(np.abs(changed - before)) > 0.1
    lora.merge_lora(model)
    np.testing.assert_allclose(model(x), changed, rtol=1e-4, atol=1e-5)


def _functional():
    """A shared layer, a tower in the model, and an einsum; what it runs and inputs."""
    inner = keras.Input([6])
    hidden = keras.layers.Dense(6, "tanh", name="hidden")
    tower = keras.Model(inner, hidden(hidden(inner)), name="tower")
    one, other = keras.Input([6], name="one"), keras.Input([6], name="other")
    both = keras.layers.Concatenate()([tower(one), tower(other)])
    both = keras.layers.EinsumDense("...x,xy->...y", 4, name="mix")(both)
    model = keras.Model([one, other], keras.layers.Dense(2, name="logits")(both))
    random = np.random.default_rng(0)
    return model, [random.normal(size=(8, 6)).astype(np.float32) for _ in range(2)]


def _sequential():
    layers = [
        keras.layers.Dense(6, "relu", input_shape=(6,), name="hidden"),
        keras.layers.Dropout(0.5),
        keras.Sequential([keras.layers.Dense(3, input_shape=(6,), name="mix")]),
        keras.layers.Dense(2, name="logits"),
    ]
    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    return keras.Sequential(layers), x


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (_functional, ["tower/hidden", "mix"]),
        (_sequential, ["hidden", "sequential*/mix"]),
    ],
)
def test_a_graph_model_gets_updates_that_are_trained_alone_and_merged(make, targets):
    keras.utils.set_random_seed(0)
    model, x = make()
    before, weights = model.predict(x, verbose=0), model.get_weights()
    adapted = lora.with_lora(model, 2, 4.0, targets)
    assert type(adapted) is type(model)
    np.testing.assert_allclose(
        adapted.predict(x, verbose=0), before, rtol=1e-5, atol=1e-6
    )
    # A layer that is used twice has one update: two layers, A and B each.
    assert len(adapted.trainable_weights) == 4 and not model.trainable_weights
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


def test_an_adapted_graph_model_is_saved_and_loaded(tmp_path):
    model, x = _functional()
    adapted = lora.with_lora(model, 2, 4.0, ["*"])
    adapted.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.predict(x, verbose=0), adapted.predict(x, verbose=0)
    )
    assert len(loaded.trainable_weights) == len(adapted.trainable_weights) == 6


def test_what_is_no_graph_and_what_no_target_names_is_refused():
    for model in (_Gates(), keras.Sequential([keras.layers.Dense(2)])):
        with pytest.raises(InputError, match="not built yet.*use apply_lora"):
            lora.with_lora(model, 2, 2.0, ["*"])
    model, _ = _functional()
    with pytest.raises(InputError, match="'hidden', which.*3: tower/hidden, mix, log"):
        lora.with_lora(model, 2, 2.0, ["hidden"])
    assert len(model.trainable_weights) == 5

"""The one-pass engine: dropout, precision, replicas, and what it refuses."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.privacy import fast
from tfdpsq.privacy.fast import factored, gradient_norms

keras = tf.keras
layers = tf.keras.layers
ROWS = 6
_ALL = np.arange(ROWS)


def _made():
    """A stack of Dense layers and inputs for it."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential([layers.Dense(7, "relu"), layers.Dense(3, "tanh")])
    x = np.random.default_rng(2).normal(size=(ROWS, 5)).astype("float32")
    model(x)
    return model, x


def _losses(model, x):
    """One loss per example: a fixed function of the outputs."""
    outputs = model(tf.convert_to_tensor(x), training=True)
    outputs = tf.reshape(tf.cast(outputs, tf.float32), [x.shape[0], -1])
    return tf.reduce_sum(
        tf.cos(tf.range(outputs.shape[1], dtype=tf.float32)) * outputs**2, 1
    )


def _run(model, x, variables=None, clip_norm=1e30, mode="graph"):
    variables = model.trainable_variables if variables is None else variables

    def clipped():
        return fast.clipped_sum(
            lambda: _losses(model, x), [model], variables, clip_norm
        )

    return clipped() if mode == "eager" else tf.function(clipped)()


def _by_row(model, x):
    """Every row's gradient by the ordinary tape, from one forward pass."""
    with tf.GradientTape(persistent=True) as tape:
        losses = tf.unstack(_losses(model, x))
    rows = [tape.gradient(loss, model.trainable_variables) for loss in losses]
    return [np.stack(per_weight).astype(np.float64) for per_weight in zip(*rows)]


def _norms(gradients):
    return np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients))


def test_a_norm_takes_the_cheaper_of_two_ways():
    """Gram matrices for few positions, the product itself for many.

    Here mn = 72 is compared with 2·T·17: 68 for T = 2, and 1,020 for T = 30.
    """
    gram = factored.Outer(tf.ones([2, 2, 8]), tf.ones([2, 2, 9]))
    direct = factored.Outer(tf.ones([2, 30, 8]), tf.ones([2, 30, 9]))
    assert isinstance(factored.merge([gram], [8, 9])[0], factored.Outer)
    (product,) = factored.merge([direct], [8, 9])
    assert product.gradients.shape == [2, 8, 9]
    for use, length in ((gram, 2), (direct, 30)):
        squared = gradient_norms.squared_norms(factored.merge([use], [8, 9])).norm
        # Every entry of the gradient is T, of 72 entries.
        np.testing.assert_allclose(squared, [72 * length**2] * 2)


def test_dropout_masks_are_those_of_the_same_forward():
    """A second forward for the norms would clip the gradient of another function."""
    model = keras.Sequential(
        [layers.Dense(16, "relu"), layers.Dropout(0.5), layers.Dense(4)]
    )
    x = np.random.default_rng(3).normal(size=(ROWS, 5)).astype("float32")
    model(x)
    tf.random.set_seed(5)
    gradients = _by_row(model, x)
    norms = _norms(gradients)
    clip_norm = float(np.median(norms))
    tf.random.set_seed(5)
    found = _run(model, x, clip_norm=clip_norm, mode="eager")
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    for total, gradient in zip(found.sums, gradients):
        expected = np.tensordot(np.minimum(1, clip_norm / norms), gradient, 1)
        np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-6 * clip_norm)
    # And whatever the masks, one example's released gradient obeys the clip norm.
    again = tf.function(lambda: _run(model, x[:1], clip_norm=1e-3, mode="eager").sums)
    drawn = [again() for _ in range(10)]
    assert any(np.any(a != b) for a, b in zip(drawn[0], drawn[1]))
    for sums in drawn:
        assert np.sqrt(sum(np.sum(s**2) for s in sums)) <= 1e-3 * (1 + 1e-5)


def test_mixed_precision_takes_norms_and_sums_in_float32():
    keras.utils.set_random_seed(0)
    policy = keras.mixed_precision.Policy("mixed_bfloat16")
    model = keras.Sequential(
        [
            layers.Dense(8, "tanh", dtype=policy),
            layers.LayerNormalization(dtype=policy),
            layers.Dense(3, dtype=policy),
        ]
    )
    x = np.random.default_rng(1).normal(size=(ROWS, 4, 5)).astype("float32")
    model(x)
    norms = _norms(_by_row(model, x))
    found = _run(model, x, clip_norm=0.5)
    assert found.norms.dtype == tf.float32
    assert {total.dtype for total in found.sums} == {tf.float32}
    # bfloat16 has 8 bits: what it rounds differs between the two.
    np.testing.assert_allclose(found.norms, norms, rtol=2e-2)
    fast.check(lambda: _losses(model, x), [model], model.trainable_variables, 0.05)


@pytest.mark.parametrize("width", [2, 1500])
def test_mixed_precision_counts_beyond_what_bfloat16_can(width):
    """601 positions of ones: bfloat16 has no such number, and its sums stop at 256.

    The narrow layer's norm comes from its product, the wide one's from Gram
    matrices. Every entry of either gradient is 601.
    """
    policy = keras.mixed_precision.Policy("mixed_bfloat16")
    dense = layers.Dense(width, dtype=policy)
    x = tf.ones([2, 601, width])
    dense(x)
    found = fast.clipped_sum(
        lambda: tf.reduce_sum(tf.cast(dense(x), tf.float32), [1, 2]),
        [dense],
        dense.trainable_variables,
        1e30,
    )
    entries = width * width + width
    np.testing.assert_allclose(found.norms, [601 * np.sqrt(entries)] * 2, rtol=1e-6)
    for total in found.sums:
        np.testing.assert_array_equal(total, 2 * 601 * np.ones(total.shape))


def test_replicas_clip_their_own_rows(logical_cpus):
    model, x = _made()
    want = [_run(model, x[rows], clip_norm=0.5).sums for rows in np.split(_ALL, 2)]
    strategy = tf.distribute.MirroredStrategy(logical_cpus[:2])
    with strategy.scope():
        copy, _ = _made()

    def on_replica():
        context = tf.distribute.get_replica_context()
        start = 3 * context.replica_id_in_sync_group
        rows = tf.slice(x, [start, 0], [3, x.shape[1]])
        return fast.clipped_sum(
            lambda: _losses(copy, rows), [copy], copy.trainable_variables, 0.5
        ).sums

    sums = tf.function(lambda: strategy.run(on_replica))()
    for position, total in enumerate(sums):
        for replica, found in enumerate(strategy.experimental_local_results(total)):
            np.testing.assert_allclose(found, want[replica][position], rtol=1e-5)


def test_a_weight_that_no_loss_depends_on_has_sum_zero():
    model, x = _made()
    spare = layers.Dense(2)
    spare.build([None, 3])
    found = _run(model, x, [*model.trainable_variables, spare.kernel])
    assert found.sums[-1].shape == [3, 2] and not np.any(found.sums[-1])


class _Scale(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight("factor", [shape[-1]], initializer="ones")

    def call(self, x):
        return x * self.factor


@pytest.mark.parametrize(
    "layer, shape",
    [
        (layers.Conv2D(3, 2, dilation_rate=2, padding="same"), [6, 5, 2]),
        (layers.Conv2D(3, 2, dilation_rate=2, padding="valid"), [6, 5, 2]),
        # No product along the last axes, though its shapes are those of one.
        (layers.EinsumDense("abc,cd->adb", [5, 5]), [5, 3]),
    ],
    ids=["same", "valid", "permuted"],
)
def test_each_weight_meets_the_inputs_that_its_layer_reads(layer, shape):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input(shape), layer])
    x = np.random.default_rng(2).normal(size=(ROWS, *shape)).astype("float32")
    found, rows = _run(model, x), _by_row(model, x)
    np.testing.assert_allclose(found.norms, _norms(rows), rtol=1e-5)
    for summed, each in zip(found.sums, rows):
        np.testing.assert_allclose(summed, each.sum(0), rtol=1e-4, atol=1e-5)


class _Again(layers.Layer):
    """A layer that is rematerialised."""

    rematerialize = True

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5, "tanh")

    def call(self, x):
        return self.dense(x)

    def pieces(self, x):
        return self.dense, [x]


def test_a_rematerialised_layer_that_runs_twice_has_the_cross_terms_of_both_runs():
    keras.utils.set_random_seed(2)
    inputs = keras.Input([5])
    shared = _Again()
    outputs = layers.Dense(3, use_bias=False)(shared(shared(inputs)))
    model = keras.Model(inputs, outputs)
    x = np.random.default_rng(2).normal(size=(ROWS, 5)).astype("float32")
    for mode in ("graph", "eager"):
        found = _run(model, x, mode=mode)
        rows = _by_row(model, x)
        np.testing.assert_allclose(found.norms, _norms(rows), rtol=1e-5)
        for summed, each in zip(found.sums, rows):
            np.testing.assert_allclose(summed, each.sum(0), rtol=1e-4, atol=1e-6)


def test_a_weight_without_a_rule_is_named_until_a_rule_is_registered():
    model = keras.Sequential([layers.Dense(4, "tanh"), _Scale(name="gain")])
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    model(x)
    with pytest.raises(
        ValueError, match="factor.*layer 'gain': no rule covers.*_Scale"
    ):
        _run(model, x, mode="eager")
    # Frozen, it is in nobody's way.
    _run(model, x, model.layers[0].trainable_variables)

    def rule(record, layer, inputs):
        output = inputs * record.read(layer.factor)
        record.direct(
            layer.factor, output, lambda g: fast.sum_to(g * inputs, layer.factor.shape)
        )
        return output

    class _Registered(_Scale):
        pass

    fast.register_rule(_Registered, rule)
    model = keras.Sequential([layers.Dense(4, "tanh"), _Registered()])
    model(x)
    fast.check(lambda: _losses(model, x), [model], model.trainable_variables)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(_losses(model, x))
    expected = tape.gradient(total, model.trainable_variables)
    for found, gradient in zip(_run(model, x).sums, expected):
        np.testing.assert_allclose(found, gradient, rtol=1e-5, atol=1e-6)


def test_a_wrong_rule_is_found():
    class _Odd(layers.Dense):
        pass

    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")

    def rule(record, layer, inputs, share=1.0, factor=1.0):
        output = factor * (inputs @ record.read(layer.kernel))
        record.outer(layer.kernel, share * inputs, output)
        return output

    model = keras.Sequential([_Odd(2, use_bias=False, name="odd")])
    model(x)
    arguments = (lambda: _losses(model, x), [model], model.trainable_variables)
    fast.register_rule(_Odd, rule)
    fast.check(*arguments)
    fast.register_rule(_Odd, lambda *a: rule(*a, share=1.01))
    with pytest.raises(ValueError, match="'odd' is used where.*off by 0.0"):
        fast.check(*arguments)
    fast.register_rule(_Odd, lambda *a: rule(*a, factor=1.01))
    with pytest.raises(ValueError, match="'odd' computes another output"):
        fast.check(*arguments)


def test_a_wrong_rule_is_found_where_other_gradients_are_a_thousand_times_as_large():
    """Its share of the whole gradient is small now, and need not stay so."""

    class _Small(layers.Dense):
        pass

    def rule(record, layer, inputs, share):
        output = inputs @ record.read(layer.kernel)
        record.outer(layer.kernel, share * inputs, output)
        return output

    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    parts = [layers.Dense(2, use_bias=False), _Small(2, use_bias=False, name="small")]
    kernels = [part(x) is not None and part.kernel for part in parts]

    def losses():
        large, small = (tf.reduce_sum(part(x), axis=1) for part in parts)
        return 1000 * large + small

    fast.register_rule(_Small, lambda *a: rule(*a, share=1.0))
    fast.check(losses, parts, kernels)
    fast.register_rule(_Small, lambda *a: rule(*a, share=1.01))
    with pytest.raises(ValueError, match="'small' is used where.*off by 0.0"):
        fast.check(losses, parts, kernels)


def test_a_layer_that_branches_on_values_is_compared_with_its_rule():
    """Its own call is converted by autograph, as Keras does, when it is compared."""

    class _Branches(layers.Dense):
        def call(self, inputs):
            if tf.reduce_sum(inputs) > 1e9:
                return tf.zeros([ROWS, 2])
            return inputs @ self.kernel

    def rule(record, layer, inputs):
        output = inputs @ record.read(layer.kernel)
        record.outer(layer.kernel, inputs, output)
        return output

    fast.register_rule(_Branches, rule)
    model = keras.Sequential([_Branches(2, use_bias=False, name="branches")])
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    model(x)
    fast.check(lambda: _losses(model, x), [model], model.trainable_variables)


def test_layers_are_themselves_again_whatever_happens():
    model, x = _made()
    before = model(x).numpy()
    with pytest.raises(RuntimeError):
        fast.clipped_sum(
            lambda: (_ for _ in ()).throw(RuntimeError()),
            [model],
            model.trainable_variables,
            1.0,
        )
    assert all("call" not in vars(layer) for layer in model.layers)
    np.testing.assert_array_equal(model(x), before)

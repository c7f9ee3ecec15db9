"""The one-pass engine against a naive float64 loop, on Keras's own layers."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import fast_oracle as oracle

from tfdpsq.privacy import fast

keras = tf.keras
layers = tf.keras.layers
ROWS = oracle.ROWS
# Cases cost seconds in a graph, and more under XLA; these meet every kind of use
# between them.
_QUICK = {
    "graph": ("lora", "reusing", "masked", "transformer"),
    "xla": ("attention", "conv1d", "einsum", "language", "time"),
}


@pytest.mark.parametrize("name", oracle.MODELS)
def test_norms_and_sums_equal_a_naive_loop_to_the_last_digits(name):
    """Each term counts: one that is wrong or missing would show at 1e-11."""
    _, twin, x = oracle.made(name)
    gradients = oracle.naive(twin, x)
    norms = oracle.norms(gradients)
    found = oracle.run(twin, x, clip_norm=float(np.median(norms)), mode="eager")
    assert found.norms.dtype == tf.float64
    np.testing.assert_allclose(found.norms, norms, rtol=1e-11)
    expected = oracle.clipped_by_hand(gradients, np.median(norms))
    for one, other in zip(found.sums, expected):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-11 * np.median(norms))


def _cases():
    for mode, quick in _QUICK.items():
        for name in oracle.MODELS:
            marks = [] if name in quick else [pytest.mark.slow]
            yield pytest.param(name, mode, marks=marks)


@pytest.mark.parametrize(("name", "mode"), _cases())
def test_clipped_sums_in_float32_equal_a_naive_float64_loop(name, mode):
    model, twin, x = oracle.made(name)
    gradients = oracle.naive(twin, x)
    norms = oracle.norms(gradients)
    clip_norm = float(np.median(norms))  # some examples are clipped, some are not
    found = oracle.run(model, x, clip_norm=clip_norm, mode=mode)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    variables = model.trainable_variables
    oracle.assert_close(
        found.sums,
        oracle.clipped_by_hand(gradients, clip_norm),
        clip_norm,
        [variable.name for variable in variables],
    )
    assert all(s.shape == v.shape for s, v in zip(found.sums, variables))
    losses = oracle.losses(twin, x).numpy()
    off = np.abs(found.losses - losses)
    assert np.max(off) <= 1e-5 * np.max(np.abs(losses))
    fast.check(lambda: oracle.losses(model, oracle.single(x)), [model], variables)


@pytest.mark.parametrize(
    ("name", "bad", "mode"),
    [
        ("dense, long", np.nan, "eager"),
        ("conv1d", np.inf, "eager"),
        ("tied", np.nan, "eager"),
        ("einsum", np.nan, "xla"),
        # Lookups have ids, which are never NaN: here the loss is.
        ("reusing", np.nan, "eager"),
        # The gradient's square overflows.
        ("attention", 1e30, "eager"),
    ],
)
def test_nan_row_contributes_nothing(name, bad, mode):
    """The row's NaN is in the activations as well as in the gradients."""
    model, twin, x = oracle.made(name)
    good = [row for row in range(ROWS) if row != 2]
    gradients = [g[good] for g in oracle.naive(twin, x)]
    clip_norm = float(np.median(oracle.norms(gradients)))
    poison = np.ones(ROWS, np.float32)
    if x.dtype == np.int64:
        poison[2] = bad
    else:
        x[2, ..., 1] = bad
        x[2, ..., 0] = -bad
    found = oracle.run(model, x, clip_norm=clip_norm, mode=mode, poison=poison)
    assert np.isinf(found.norms[2])
    np.testing.assert_allclose(
        np.asarray(found.norms)[good], oracle.norms(gradients), rtol=1e-5
    )
    expected = oracle.clipped_by_hand(gradients, clip_norm)
    oracle.assert_close(found.sums, expected, clip_norm)


def test_frozen_weights_cost_nothing_and_unused_ones_have_sum_zero():
    model, twin, x = oracle.made("nested")
    gradients = oracle.naive(twin, x)[2:]
    spare = layers.Dense(2)
    spare.build([None, 3])
    trained = [*model.trainable_variables[2:], spare.kernel]
    found = oracle.run(model, x, trained, clip_norm=0.5, mode="eager")
    oracle.assert_close(found.sums[:-1], oracle.clipped_by_hand(gradients, 0.5), 0.5)
    assert found.sums[-1].shape == [3, 2] and not np.any(found.sums[-1])


# -- One forward pass, precision, replicas --------------------------------------------


def _by_row(model, x):
    """Every row's gradient by the ordinary tape, from one forward pass."""
    with tf.GradientTape(persistent=True) as tape:
        losses = tf.unstack(tf.cast(oracle.losses(model, x), tf.float32))
    rows = [tape.gradient(loss, model.trainable_variables) for loss in losses]
    rows = [[tf.convert_to_tensor(gradient) for gradient in row] for row in rows]
    return [np.stack(per_weight).astype(np.float64) for per_weight in zip(*rows)]


def _assert_sums(found, rows):
    """Norms and unclipped sums are those of the rows' own gradients."""
    np.testing.assert_allclose(found.norms, oracle.norms(rows), rtol=1e-5)
    for summed, each in zip(found.sums, rows):
        scale = np.abs(each).max()
        np.testing.assert_allclose(summed, each.sum(0), rtol=1e-4, atol=1e-5 * scale)


def _of(stack, *shape, seed=2):
    """A stack of layers, and inputs for it."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(stack)
    x = np.random.default_rng(seed).normal(size=(ROWS, *shape)).astype("float32")
    model(x)
    return model, x


def test_dropout_masks_are_those_of_the_same_forward():
    """A second forward for the norms would clip the gradient of another function."""
    model, x = _of([layers.Dense(16, "relu"), layers.Dropout(0.5), layers.Dense(4)], 5)
    tf.random.set_seed(5)
    gradients = _by_row(model, x)
    norms = oracle.norms(gradients)
    clip_norm = float(np.median(norms))
    tf.random.set_seed(5)
    found = oracle.run(model, x, clip_norm=clip_norm, mode="eager")
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    for total, expected in zip(
        found.sums, oracle.clipped_by_hand(gradients, clip_norm)
    ):
        np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-6 * clip_norm)
    # And whatever the masks, one example's released gradient obeys the clip norm.
    again = tf.function(
        lambda: oracle.run(model, x[:1], clip_norm=1e-3, mode="eager").sums
    )
    drawn = [again() for _ in range(10)]
    assert any(np.any(a != b) for a, b in zip(drawn[0], drawn[1]))
    for sums in drawn:
        assert np.sqrt(sum(np.sum(s**2) for s in sums)) <= 1e-3 * (1 + 1e-5)


def test_mixed_precision_takes_norms_and_sums_in_float32():
    policy = keras.mixed_precision.Policy("mixed_bfloat16")
    stack = [
        layers.Dense(8, "tanh", dtype=policy),
        layers.LayerNormalization(dtype=policy),
        layers.Dense(3, dtype=policy),
    ]
    model, x = _of(stack, 4, 5)
    norms = oracle.norms(_by_row(model, x))

    def losses():
        return tf.cast(oracle.losses(model, x), tf.float32)

    variables = model.trainable_variables
    found = fast.clipped_sum(losses, [model], variables, 0.5)
    assert found.norms.dtype == tf.float32
    assert {total.dtype for total in found.sums} == {tf.float32}
    # bfloat16 has 8 bits: what it rounds differs between the two.
    np.testing.assert_allclose(found.norms, norms, rtol=2e-2)
    fast.check(losses, [model], variables, 0.05)


@pytest.mark.parametrize("width", [2, 2500])
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


class _LookedUpAndScaled(layers.Layer):
    """An embedding whose weight is also the scale of an elementwise product."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = (
            layers.Embedding(4, 5),
            layers.LayerNormalization([1, 2]),
        )

    def build(self, shape):
        self.embed.build(None)
        self.norm.build([None, 4, 5])
        self.norm.gamma = self.embed.embeddings
        self.norm._trainable_weights = [self.norm.beta]

    def call(self, x):
        ids = tf.cast(tf.abs(2 * x[..., 0]), tf.int32) % 4  # some ids twice
        return self.embed(ids) + self.norm(x)


@pytest.mark.parametrize(
    "layer, shape",
    [
        (layers.Conv2D(3, 2, dilation_rate=2, padding="same"), [6, 5, 2]),
        # No product along the last axes, though its shapes are those of one.
        (layers.EinsumDense("abc,cd->adb", [5, 5]), [5, 3]),
        (_LookedUpAndScaled(), [4, 5]),
        (layers.LayerNormalization(scale=False), [4, 5]),
        (layers.LayerNormalization(center=False), [4, 5]),
        (layers.GroupNormalization(2, scale=False), [3, 4]),
        (layers.GroupNormalization(2, center=False), [3, 4]),
        (layers.Dense(5000), [3, 8]),  # a Gram matrix in panels of 1,024 columns
    ],
    ids=lambda given: getattr(given, "name", None),
)
def test_each_weight_meets_the_inputs_that_its_layer_reads(layer, shape):
    model, x = _of([keras.Input(shape), layer], *shape)
    _assert_sums(oracle.run(model, x), _by_row(model, x))


def test_a_long_text_s_gram_matrices_may_be_computed_by_halves():
    def ids(x):
        return tf.cast(tf.abs(3 * x[..., 0]), tf.int32) % 9  # many are there twice

    embed, dense = layers.Embedding(9, 300), layers.Dense(300)
    model, x = _of([keras.Input([70, 1]), layers.Lambda(ids), embed, dense], 70, 1)
    _assert_sums(oracle.run(model, x, mode="xla"), _by_row(model, x))


@pytest.mark.parametrize("layer", [layers.Conv2D(3, 2), layers.DepthwiseConv2D(2)])
def test_a_frozen_kernel_needs_no_gradient_of_its_own(layer):
    model, x = _of([layers.Conv2D(2, 1), layer, layers.Flatten()], 4, 4, 2)
    trained = [*model.layers[0].trainable_variables, layer.bias]
    rows = _by_row(model, x)
    rows = [rows[0], rows[1], rows[3]]  # rows[2] is the kernel's
    _assert_sums(oracle.run(model, x, trained), rows)


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
    shared = _Again()
    inputs = keras.Input([5])
    outputs = layers.Dense(3, use_bias=False)(shared(shared(inputs)))
    model, x = _of([keras.Model(inputs, outputs)], 5)
    for mode in ("graph", "eager"):
        _assert_sums(oracle.run(model, x, mode=mode), _by_row(model, x))


# -- Rules of a user's own layers -----------------------------------------------------


class _Scale(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight("factor", [shape[-1]], initializer="ones")

    def call(self, x):
        return x * self.factor


def test_a_weight_without_a_rule_is_named_until_a_rule_is_registered():
    model, x = _of([layers.Dense(4, "tanh"), _Scale(name="gain")], 3)
    with pytest.raises(ValueError, match="factor.*layer 'gain'.*_Scale"):
        oracle.run(model, x, mode="eager")
    # Frozen, it is in nobody's way.
    oracle.run(model, x, model.layers[0].trainable_variables, mode="eager")

    def rule(record, layer, inputs):
        output = inputs * record.read(layer.factor)
        record.direct(
            layer.factor, output, lambda g: fast.sum_to(g * inputs, layer.factor.shape)
        )
        return output

    class _Registered(_Scale):
        pass

    fast.register_rule(_Registered, rule)
    model, x = _of([layers.Dense(4, "tanh"), _Registered()], 3)
    fast.check(lambda: oracle.losses(model, x), [model], model.trainable_variables)
    _assert_sums(oracle.run(model, x), _by_row(model, x))


def test_a_wrong_rule_is_found():
    """Also where other gradients are a thousand times as large: not for ever."""

    class _Odd(layers.Dense):
        pass

    def rule(record, layer, inputs, share=1.0):
        output = inputs @ record.read(layer.kernel)
        record.outer(layer.kernel, share * inputs, output)
        return output

    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    parts = [layers.Dense(2, use_bias=False), _Odd(2, use_bias=False, name="odd")]
    kernels = [part(x) is not None and part.kernel for part in parts]

    def losses():
        large, small = (tf.reduce_sum(part(x), axis=1) for part in parts)
        return 1000 * large + small

    arguments = (losses, parts, kernels)
    fast.register_rule(_Odd, rule)
    fast.check(*arguments)
    fast.register_rule(_Odd, lambda *a: rule(*a, share=1.01))
    with pytest.raises(ValueError, match="'odd' is used where.*off by 0.0"):
        fast.check(*arguments)


def test_layers_are_themselves_again_whatever_happens():
    model, x = _of([layers.Dense(7, "relu"), layers.Dense(3, "tanh")], 5)
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

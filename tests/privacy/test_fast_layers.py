"""The one-pass engine against a naive float64 loop, on Keras's own layers."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.privacy import fast
from tfdpsq.privacy.fast import factored

keras = tf.keras
layers = tf.keras.layers
ROWS = 6


@contextlib.contextmanager
def _floatx(name):
    before = keras.backend.floatx()
    keras.backend.set_floatx(name)
    try:
        yield
    finally:
        keras.backend.set_floatx(before)


class _Block(keras.Model):
    """A transformer block around Keras's MultiHeadAttention, subclassed."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(11, 8)
        self.norms = [layers.LayerNormalization(epsilon=e) for e in (1e-3, 1e-6)]
        self.attention = layers.MultiHeadAttention(2, 4, value_dim=3)
        self.inner = keras.Sequential([layers.Dense(12, "gelu"), layers.Dense(8)])
        self.head = layers.Dense(1)

    def call(self, ids):
        x = self.embed(ids)
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=True)
        x = x + self.inner(self.norms[1](x))
        return self.head(tf.tanh(x))[..., 0]


class _Reusing(keras.Model):
    """One layer called three times on itself, one embedding looked up twice."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(9, 5)
        self.step = layers.Dense(5, "tanh")

    def call(self, ids):
        x = self.embed(ids) + self.embed(ids[:, ::-1] // 2)
        for _ in range(3):
            x = x + self.step(x)
        return tf.reduce_sum(x, -1)


class _Tied(keras.Model):
    """A Dense layer that goes by another layer's weight."""

    def __init__(self):
        super().__init__()
        self.one = layers.Dense(6, "tanh", use_bias=False)
        self.other = layers.Dense(6, use_bias=False)

    def build(self, shape):
        self.one.build(shape)
        self.other.build(shape)
        self.other.kernel = self.one.kernel
        self.other._trainable_weights = []
        self.built = True

    def call(self, x):
        return self.other(self.one(x))


def _dense_stack():
    return keras.Sequential(
        [layers.Dense(7, "relu"), layers.Dense(4, "tanh"), layers.Dense(3)]
    )


def _nested():
    inner_input = keras.Input([5, 4])
    inner = keras.Model(inner_input, layers.Dense(4, "tanh")(inner_input))
    outer_input = keras.Input([5, 4])
    x = inner(inner(outer_input))
    return keras.Model(outer_input, layers.LayerNormalization()(x))


def _cnn():
    return keras.Sequential(
        [
            layers.Conv1D(5, 3, padding="same", activation="relu"),
            layers.Conv1D(4, 3, padding="causal", dilation_rate=2),
            layers.LayerNormalization(),
            layers.Conv1D(3, 2, strides=2, padding="valid", activation="tanh"),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )


def _cnn_2d():
    return keras.Sequential(
        [
            layers.Conv2D(4, (3, 2), padding="same", strides=2, activation="relu"),
            layers.Conv2D(3, 2, use_bias=False),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )


def _einsums():
    return keras.Sequential(
        [
            layers.EinsumDense("...c,cde->...de", [2, 3], bias_axes="de"),
            layers.EinsumDense("abde,dec->abc", [None, 4], activation="tanh"),
            # Weights that differ by position, a transposed kernel, and a sum.
            layers.EinsumDense("abc,bcd->abd", [5, 3], bias_axes="d"),
            layers.EinsumDense("abc,dc->abd", [None, 4]),
            layers.EinsumDense("abc,cd->ad", 2),
        ]
    )


def _ids(high, *shape):
    return lambda random: random.integers(0, high, size=(ROWS, *shape))


def _floats(*shape):
    return lambda random: random.normal(size=(ROWS, *shape))


_MODELS = {
    "dense": (_dense_stack, _floats(5)),
    "dense, long": (_dense_stack, _floats(20, 5)),  # the direct product is cheaper
    "nested": (_nested, _floats(5, 4)),
    "conv1d": (_cnn, _floats(9, 4)),
    "conv2d": (_cnn_2d, _floats(6, 5, 3)),
    "einsum": (_einsums, _floats(5, 4)),
    "attention": (_Block, _ids(11, 7)),
    "reusing": (_Reusing, _ids(9, 6)),
    "tied": (_Tied, _floats(6)),
    "tied, long": (_Tied, _floats(8, 6)),
}


def _made(name, seed=0):
    """A model, its float64 twin, and inputs for both."""
    make, draw = _MODELS[name]
    random = np.random.default_rng(seed)
    x = draw(random)
    keras.utils.set_random_seed(seed)
    model = make()
    model(x if x.dtype == np.int64 else x.astype("float32"))
    for variable in model.trainable_variables:  # biases and scales matter, too
        variable.assign_add(0.3 * random.normal(size=variable.shape))
    with _floatx("float64"):
        twin = make()
        twin(x)
        twin.set_weights([w.astype(np.float64) for w in model.get_weights()])
    return model, twin, x


def _losses(model, x):
    """One loss per example: a fixed function of the outputs, with wild sizes."""
    outputs = model(tf.convert_to_tensor(x), training=True)
    outputs = tf.reshape(outputs, [x.shape[0], -1])
    mix = tf.cos(tf.range(outputs.shape[1], dtype=tf.float64))
    return tf.reduce_sum(tf.cast(mix, outputs.dtype) * outputs**2, 1)


def _naive(twin, x):
    """Every example's gradient from a batch of its own, per weight, float64."""
    gradients = []
    for row in range(len(x)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(_losses(twin, x[row : row + 1]))
        gradients.append(
            [
                tf.convert_to_tensor(g).numpy()
                for g in tape.gradient(loss, twin.trainable_variables)
            ]
        )
    return [np.stack(per_weight) for per_weight in zip(*gradients)]


def _single(x):
    return x if x.dtype == np.int64 else x.astype("float32")


def _run(model, x, variables=None, clip_norm=1e30, mode="graph", **options):
    variables = model.trainable_variables if variables is None else variables

    def clipped():
        return fast.clipped_sum(
            lambda: _losses(model, _single(x)), [model], variables, clip_norm, **options
        )

    if mode == "eager":
        return clipped()
    return tf.function(clipped, jit_compile=mode == "xla")()


def _norms(gradients):
    return np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients))


def _clipped_by_hand(gradients, clip_norm):
    scale = np.minimum(1, clip_norm / _norms(gradients))
    return [np.tensordot(scale, g, 1) for g in gradients]


def _assert_close(found, expected, floor=0.0, tolerance=1e-5):
    """Relative error of each weight, in norm, at most 1e-5."""
    for index, (one, other) in enumerate(zip(found, expected)):
        off = np.linalg.norm(np.asarray(one, np.float64) - other)
        assert off <= tolerance * np.linalg.norm(other) + floor, index


@pytest.mark.parametrize("name", _MODELS)
def test_norms_of_each_weight_equal_a_naive_float64_loop(name):
    model, twin, x = _made(name)
    gradients = _naive(twin, x)
    overall = np.linalg.norm(_norms(gradients))
    for variable, gradient in zip(model.trainable_variables, gradients):
        norms = _run(model, x, [variable], mode="eager").norms
        expected = _norms([gradient])
        # A key's bias has no influence: its gradient is zero but for rounding.
        np.testing.assert_allclose(
            norms, expected, rtol=1e-5, atol=1e-6 * overall, err_msg=variable.name
        )


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("name", _MODELS)
def test_clipped_sums_equal_a_naive_float64_loop(name, mode):
    model, twin, x = _made(name)
    gradients = _naive(twin, x)
    norms = _norms(gradients)
    clip_norm = float(np.median(norms))  # some examples are clipped, some are not
    found = _run(model, x, clip_norm=clip_norm, mode=mode)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    _assert_close(found.sums, _clipped_by_hand(gradients, clip_norm), 1e-6 * clip_norm)
    assert all(
        s.shape == v.shape for s, v in zip(found.sums, model.trainable_variables)
    )
    np.testing.assert_allclose(found.losses, _losses(twin, x), rtol=1e-5)


def test_a_norm_without_cross_terms_would_be_wrong():
    """Were each use squared by itself, a shared weight's norm would be far off."""
    for name, shared in (("reusing", 0), ("reusing", 1), ("tied", 0)):
        model, twin, x = _made(name)
        truth = _norms([_naive(twin, x)[shared]])
        variable = model.trainable_variables[shared]
        seen = []
        original = factored.merge

        def apart(uses, shape, seen=seen, original=original):
            seen.append(
                sum(factored.squared_norms(original([use], shape)) for use in uses)
            )
            return original(uses, shape)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factored, "merge", apart)
            found = _run(model, x, [variable], mode="eager")
        np.testing.assert_allclose(found.norms, truth, rtol=1e-5)
        without = np.sqrt(seen[0])
        assert np.max(np.abs(without / truth - 1)) > 0.1, name


@pytest.mark.parametrize("mode", ["eager", "xla"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["dense, long", "conv1d", "einsum", "nested", "tied"])
def test_a_row_that_is_no_number_costs_nobody_else(name, bad, mode):
    """The row's NaN is in the activations as well as in the gradients."""
    model, twin, x = _made(name)
    good = [row for row in range(ROWS) if row != 2]
    gradients = [g[good] for g in _naive(twin, x)]
    clip_norm = float(np.median(_norms(gradients)))
    x[2, ..., 1] = bad
    x[2, ..., 0] = -bad
    found = _run(model, x, clip_norm=clip_norm, mode=mode)
    if name == "tied" and np.isinf(bad):
        x[2] = np.nan  # tanh makes a number of it, and so the row may count
        found = _run(model, x, clip_norm=clip_norm, mode=mode)
    assert np.isinf(found.norms[2])
    np.testing.assert_allclose(
        np.asarray(found.norms)[good], _norms(gradients), rtol=1e-5
    )
    expected = _clipped_by_hand(gradients, clip_norm)
    _assert_close(found.sums, expected, 1e-6 * clip_norm)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("name", ["reusing", "attention"])
def test_a_gradient_that_overflows_costs_nobody_else(name, bad):
    """Of 1e30 the square overflows; lookups have ids, which are never NaN."""
    model, twin, x = _made(name)
    good = [row for row in range(ROWS) if row != 4]
    gradients = [g[good] for g in _naive(twin, x)]
    clip_norm = float(np.median(_norms(gradients)))
    poison = np.where(np.arange(ROWS) == 4, bad, 1.0).astype("float32")
    found = tf.function(fast.clipped_sum)(
        lambda: _losses(model, x) * poison,
        [model],
        model.trainable_variables,
        clip_norm,
    )
    assert np.isinf(found.norms[4])
    expected = _clipped_by_hand(gradients, clip_norm)
    _assert_close(found.sums, expected, 1e-6 * clip_norm)


@pytest.mark.parametrize("garbage", [0.0, np.nan, 1e20])
def test_padding_rows_contribute_nothing(garbage):
    model, twin, x = _made("dense, long")
    gradients = [g[:4] for g in _naive(twin, x)]
    x[4:] = garbage
    weights = tf.constant([1.0, 1, 1, 1, 0, 0])
    found = _run(model, x, clip_norm=0.7, weights=weights)
    _assert_close(found.sums, _clipped_by_hand(gradients, 0.7))
    nothing = _run(model, x, clip_norm=0.7, weights=tf.zeros([ROWS]))
    assert all(not np.any(total) for total in nothing.sums)


def test_one_example_moves_the_sum_by_at_most_the_clip_norm():
    for name in ("attention", "reusing", "conv1d"):
        model, _, x = _made(name)
        weights = np.ones(ROWS, np.float32)
        whole = _run(model, x, clip_norm=1e-2, weights=tf.constant(weights)).sums
        weights[3] = 0
        without = _run(model, x, clip_norm=1e-2, weights=tf.constant(weights)).sums
        moved = np.sqrt(sum(np.sum((w - o) ** 2) for w, o in zip(whole, without)))
        assert moved == pytest.approx(1e-2, rel=1e-4)


def test_it_runs_inside_a_while_loop():
    model, twin, x = _made("attention")
    expected = [g.sum(0) for g in _naive(twin, x)]

    @tf.function
    def accumulated(x):
        def add(index, *sums):
            part = tf.slice(x, [2 * index, 0], [2, x.shape[1]])
            new = fast.clipped_sum(
                lambda: _losses(model, part), [model], model.trainable_variables, 1e30
            ).sums
            return index + 1, *(total + one for total, one in zip(sums, new))

        zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
        return tf.while_loop(lambda i, *_: i < 3, add, (tf.constant(0), *zeros))[1:]

    overall = max(np.linalg.norm(e) for e in expected)
    _assert_close(accumulated(tf.constant(x)), expected, 1e-6 * overall)


def test_frozen_weights_cost_nothing_and_others_stay_exact():
    model, twin, x = _made("nested")
    gradients = _naive(twin, x)
    found = _run(model, x, model.trainable_variables[2:], clip_norm=0.5)
    _assert_close(found.sums, _clipped_by_hand(gradients[2:], 0.5))


@pytest.mark.parametrize("name", _MODELS)
def test_every_model_passes_its_own_check(name):
    model, _, x = _made(name)
    variables = model.trainable_variables
    fast.check(lambda: _losses(model, _single(x)), [model], variables)

"""The clip norm holds whatever precision a device multiplies in.

Rows are made whose gradients cancel, or are huge, or tiny. The engine runs on them
with products rounded as a CPU, a GPU (TensorFloat-32) and a TPU (bfloat16) round them;
what each row adds to the sum is then computed in float64 from the operands that the
engine multiplied last.
"""

import math

import keras_nlp
import numpy as np
import pytest
import tensorflow as tf
from helpers import fast_oracle as oracle
from helpers import plans
from helpers.rounding import Device
from tensorflow.compiler.tf2xla.python import xla

from tfdpsq.privacy import fast
from tfdpsq.privacy.fast import factored, gradient_norms

layers = tf.keras.layers
C = 0.1
POSITIONS, WIDTH, OUT, VOCABULARY = 6, 40, 30, 37


# -- Rows that are hard to clip on a device that rounds -----------------------------


def _sides(random, rows, width, out):
    """Inputs [rows, T, width] and gradients [rows, T, out] that are hard to measure.

    A sixth of the rows each: ordinary; opposite pairs that cancel up to a last bit or
    a per cent; opposite pairs of inputs that a device rounds to the same number; any
    size from 1e-18 to 1e18, by position; near the largest number; squares below the
    smallest.
    """
    a = random.normal(size=[rows, POSITIONS, width])
    g = random.normal(size=[rows, POSITIONS, out])
    kind = np.arange(rows) % 6
    half = POSITIONS // 2
    for which, sizes in ((1, (-8, -2)), (2, (-4, -2))):
        at = kind == which
        off = 10 ** random.uniform(*sizes, size=[at.sum(), 1, 1])
        noise = random.uniform(-1, 1, size=a[at, :half].shape)
        a[at, half:] = a[at, :half] * (1 + off * noise)
        g[at, half:] = -g[at, :half]
        a[at] *= 10 ** random.uniform(-1, 6, size=[at.sum(), 1, 1])
    a[kind == 3] *= 10 ** random.uniform(-18, 18, size=a[kind == 3][..., :1].shape)
    g[kind == 3] *= 10 ** random.uniform(-18, 18, size=g[kind == 3][..., :1].shape)
    for which, powers in ((4, (8, 19)), (5, (-23, -17))):
        at = kind == which
        power = random.uniform(*powers, size=[at.sum(), 1, 1])
        a[at] *= 10**power
        g[at] *= 10 ** (random.uniform(-1, 1, size=power.shape) - power * (which == 5))
    return a.astype(np.float32), g.astype(np.float32)


def _linear(outputs, gradients):
    """Losses whose gradient by the outputs is `gradients`."""
    gradients = tf.reshape(gradients, tf.shape(outputs))
    axes = list(range(1, outputs.shape.rank))
    return tf.reduce_sum(outputs * tf.stop_gradient(gradients), axes)


def _dense(random, rows, width=WIDTH, out=OUT):
    a, g = _sides(random, rows, width, out)
    layer = layers.Dense(out, kernel_initializer="zeros")
    layer.build([None, None, width])
    return [layer], lambda: _linear(layer(a), g)


def _called_twice(random, rows):
    (a, g), (b, h) = (_sides(random, rows, WIDTH, OUT) for _ in range(2))
    random.shuffle(b[::6])  # of the others, the cross terms cancel as well
    b[1::6], h[1::6] = a[1::6] * (1 + 1e-6), -g[1::6]
    layer = layers.Dense(OUT, use_bias=False, kernel_initializer="zeros")
    layer.build([None, None, WIDTH])
    return [layer], lambda: _linear(layer(a), g) + _linear(layer(b), h)


def _embedding(random, rows):
    _, g = _sides(random, rows, OUT, OUT)
    ids = random.integers(0, 3, size=[rows, POSITIONS])
    ids[1::6, POSITIONS // 2 :] = ids[1::6, : POSITIONS // 2]
    layer = layers.Embedding(VOCABULARY, OUT)
    layer.build([None, None])
    return [layer], lambda: _linear(layer(ids), g)


def _shared_embedding(random, rows):
    """Looked up and made logits of; in a sixth of the rows the two uses cancel."""
    w, h = _sides(random, rows, VOCABULARY, OUT)
    ids = random.integers(0, VOCABULARY, size=[rows, POSITIONS])
    g = random.normal(size=h.shape).astype(np.float32)
    g[1::6], w[1::6] = -h[1::6], np.eye(VOCABULARY)[ids[1::6]]
    w[1::6] *= 1 + random.uniform(-1e-3, 1e-3, size=w[1::6].shape)
    layer = keras_nlp.layers.ReversibleEmbedding(VOCABULARY, OUT)
    layer.build([None, None])
    layer.embeddings.assign(tf.zeros_like(layer.embeddings))
    return [layer], lambda: _linear(layer(ids), g) + _linear(layer(h, reverse=True), w)


def _normalization(random, rows):
    a, g = _sides(random, rows, OUT, OUT)
    layer = layers.LayerNormalization()
    layer.build([None, None, OUT])
    return [layer], lambda: _linear(layer(a), g)


_KINDS = {
    function.__name__[1:]: function
    for function in (
        _dense,
        _called_twice,
        _embedding,
        _shared_embedding,
        _normalization,
    )
}


def _run(patch, device, kind, rows, seed=0, clip_norm=C):
    """The engine's answer, and the exact norm of what each row added, [B]."""
    random = np.random.default_rng(seed)
    found_layers, losses = _KINDS[kind](random, rows)
    variables = [v for layer in found_layers for v in layer.trainable_variables]
    used = Device(patch, device)
    found = fast.clipped_sum(losses, found_layers, variables, clip_norm)
    return found, np.sqrt(used.squared)


_QUICK = (
    *(("bfloat16", kind) for kind in _KINDS),
    *(("tensor_float_32", kind) for kind in ("dense", "shared_embedding")),
    *(("float32", kind) for kind in ("dense", "called_twice")),
)


@pytest.mark.parametrize(("device", "kind"), _QUICK)
def test_no_row_adds_more_than_the_clip_norm(device, kind, monkeypatch):
    found, added = _run(monkeypatch, device, kind, 504)
    assert np.all(np.isfinite(added))
    assert np.max(added) <= C * (1 + 1e-6)
    # Ordinary rows are clipped to C, and not far below where products are exact.
    share = {"float32": 1 - 2e-5, "tensor_float_32": 0.95, "bfloat16": 0.8}[device]
    assert np.min(added[::6]) > C * share
    assert np.mean(found.norms > C) > 0.5


def test_by_their_computed_norms_alone_rows_would_add_more(monkeypatch):
    """The rows above are hard."""
    found, _ = _run(monkeypatch, "bfloat16", "dense", 504)
    _, exact = _run(monkeypatch, "bfloat16", "dense", 504, clip_norm=1e30)
    kept = found.norms.numpy() > 0
    added = np.minimum(1, C / found.norms.numpy()[kept]) * exact[kept]
    assert np.max(added) > 1.05 * C
    assert np.sum(added > C * (1 + 1e-6)) > 20


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("bfloat16", "attention"),
        ("bfloat16", "language"),
        ("tensor_float_32", "tied, wide"),
        ("tensor_float_32", "conv1d"),
    ],
)
def test_whole_models_keep_the_bound(device, name, monkeypatch):
    model, _, x = oracle.made(name)
    used = Device(monkeypatch, device)
    oracle.run(model, x, clip_norm=1e-3, mode="eager")
    added = np.sqrt(used.squared)
    assert np.max(added) <= 1e-3 * (1 + 1e-6)
    assert np.min(added) > 0.8e-3


def test_a_gram_norm_of_zero_does_not_let_a_row_pass(monkeypatch):
    """Inputs that round to the same bfloat16 while their gradients are opposite.

    (a_1 - a_2) ⊗ g has the length 2^-10·‖a‖·‖g‖ = 2^-10 · 2^10 · 2^-1 = 5·C, and its
    computed norm is zero: C/0 would let it pass, at a factor of 1.
    """
    a = np.full([2, 2, 16], 2.0**8, np.float32)
    a[0, 1] *= 1 - 2.0**-10
    signs = np.float32([[[1], [-1]], [[1], [0]]])
    g = signs * np.full([2, 2, 64], 2.0**-4, np.float32)
    layer = layers.Dense(64, use_bias=False, kernel_initializer="zeros")
    layer.build([None, None, 16])
    used = Device(monkeypatch, "bfloat16")
    found = fast.clipped_sum(
        lambda: _linear(layer(a), g), [layer], layer.trainable_variables, C
    )
    exact = np.linalg.norm(np.einsum("btm,btn->bmn", a, g), axis=(1, 2))
    np.testing.assert_allclose(exact, [5 * C, 512])
    assert found.norms[0] == 0
    assert np.sqrt(used.squared)[0] <= C
    assert np.sqrt(used.squared)[1] == pytest.approx(C, rel=0.1)


def test_no_row_is_longer_than_the_clip_norm_by_rounding():
    """Clipped by the computed norm, about half of them would be, by some 1e-8 of it."""
    rows, clip_norm = 64, 0.7
    g = np.random.default_rng(5).normal(size=[rows, 1, 40]).astype(np.float32)
    layer = layers.Embedding(9, 40)
    layer.build([None, None])

    @tf.function
    def clip(weights):
        (found,) = fast.clipped_sum(
            lambda: _linear(layer(tf.ones([rows, 1], tf.int32)), g),
            [layer],
            layer.trainable_variables,
            clip_norm,
            weights,
        ).sums
        return tf.convert_to_tensor(found)

    alone = [clip(tf.one_hot(row, rows)).numpy() for row in range(rows)]
    lengths = [np.linalg.norm(found.astype(np.float64)) for found in alone]
    assert max(lengths) <= clip_norm
    np.testing.assert_allclose(lengths, clip_norm, rtol=1e-4)


# -- What a device may do to products -----------------------------------


@pytest.mark.parametrize(
    ("gpus", "tpus", "tensor_float_32", "compiled", "operand"),
    [
        (0, 0, True, True, 0.0),
        (1, 0, True, False, 2.0**-10),
        (1, 0, False, False, 0.0),
        (1, 0, True, True, 2.0**-22),
        (0, 1, False, False, 2.0**-8),
    ],
)
def test_the_precision_presumed_is_that_of_the_device(
    gpus, tpus, tensor_float_32, compiled, operand, monkeypatch
):
    devices = {"GPU": [None] * gpus, "TPU": [None] * tpus}
    monkeypatch.setattr(tf.config, "list_logical_devices", devices.__getitem__)
    experimental = tf.config.experimental
    before = experimental.tensor_float_32_execution_enabled()
    experimental.enable_tensor_float_32_execution(tensor_float_32)
    try:
        found = gradient_norms.arithmetic(tf.float32, compiled)
        with factored.true_float32():
            inside = gradient_norms.arithmetic(tf.float32, False)
        after = experimental.tensor_float_32_execution_enabled()
    finally:
        experimental.enable_tensor_float_32_execution(before)
    assert found.operand == operand
    assert found.step == (2.0**-23 if gpus or tpus else 2.0**-24)
    assert inside.operand == (2.0**-8 if tpus else 0)
    assert after == tensor_float_32


def test_products_are_not_rewritten_to_16_bits():
    """TensorFlow rewrites after tracing; in bfloat16 rows would add up to 1.05 C."""
    options, rewrite = tf.config.optimizer, "auto_mixed_precision_onednn_bfloat16"
    options.set_experimental_options({rewrite: True})
    try:
        with factored.true_float32():
            inside = options.get_experimental_options()[rewrite]
        after = options.get_experimental_options()[rewrite]
    finally:
        options.set_experimental_options({rewrite: False})
    assert not inside and after


def test_xla_is_asked_for_the_highest_precision():
    """Every product that the engine makes in a compiled sum carries it."""
    model, _, x = oracle.made("dense, wide")
    x = tf.constant(oracle.single(x))

    def clipped():
        return fast.clipped_sum(
            lambda: oracle.losses(model, x), [model], model.trainable_variables, 0.1
        )

    graph = tf.function(clipped, jit_compile=True).get_concrete_function().graph
    highest = xla.PrecisionConfig.HIGHEST
    asked = [
        xla.PrecisionConfig.FromString(dot.get_attr("precision_config"))
        for dot in graph.get_operations()
        if dot.type.startswith("XlaDot")
    ]
    # A Gram matrix each of inputs and gradients of two kernels, and their sums.
    assert [list(each.operand_precision) for each in asked] == [[highest] * 2] * 6


@pytest.mark.parametrize("epsilon", [8.0, math.inf])
def test_a_private_step_turns_tensor_float_32_off_and_on_again(epsilon):
    experimental = tf.config.experimental
    seen, layer = [], layers.Dense(1)
    layer.build([None, 3])

    def look():
        seen.append(experimental.tensor_float_32_execution_enabled())
        return np.float32(0)

    def losses(batch):
        zero = tf.reshape(tf.numpy_function(look, [], tf.float32), [])
        return layer(batch["x"])[:, 0] + zero

    before = experimental.tensor_float_32_execution_enabled()
    experimental.enable_tensor_float_32_execution(True)
    plan = plans.plan(num_units=8, batch_size=4, steps=1, epsilon=epsilon)
    try:
        plans.trained(
            plan,
            losses,
            [layer],
            {"x": np.ones([8, 3], np.float32)},
            before_step=lambda step: seen.clear(),
        )
        assert seen and set(seen) == {math.isinf(epsilon)}
        assert experimental.tensor_float_32_execution_enabled()
    finally:
        experimental.enable_tensor_float_32_execution(before)

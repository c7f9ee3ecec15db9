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
from helpers.rounding import DEVICES, rounded

from tfdpsq.privacy import fast
from tfdpsq.privacy.fast import factored, gradient_norms, products

layers = tf.keras.layers
C = 0.1
POSITIONS, WIDTH, OUT, VOCABULARY = 6, 40, 30, 37


# -- A device that rounds, and the rows that it is given --------------------------


class _Device:
    """Multiplies as a device does, and notes what every row adds to the sums.

    Attributes:
      squared: [B] float64, ‖what a row adds‖² over all weights.
    """

    def __init__(self, patch, name):
        bits, arithmetic = DEVICES[name]
        multiply, weighted_sum = products.product, factored.weighted_sum
        form = products.formed
        operands = []
        self.squared = 0.0

        def product(one, other, transpose_a=False, transpose_b=False):
            one, other = (rounded(x.numpy(), bits) for x in (one, other))
            operands[:] = [one.astype(np.float64), other.astype(np.float64)]
            return multiply(
                tf.constant(one), tf.constant(other), transpose_a, transpose_b
            )

        def formed(left, right):
            left, right = (tf.constant(rounded(x.numpy(), bits)) for x in (left, right))
            return form(left, right)

        def noted(uses, factors, shape):
            rows = len(factors)
            added = np.zeros([rows, *shape])
            for use in uses:
                operands.clear()
                weighted_sum([use], factors, shape)
                if isinstance(use, factored.Direct):
                    added += (operands[0].T * operands[1]).reshape(added.shape)
                elif isinstance(use, factored.Outer):
                    left, right = (x.reshape(rows, -1, x.shape[-1]) for x in operands)
                    outer = np.einsum("btm,btn->bmn", left, right)
                    added += outer.reshape(added.shape)
                else:  # no product takes part
                    scaled = use.right * tf.reshape(factors, [-1, 1, 1])
                    hot = np.eye(shape[0])[use.ids.numpy()]
                    added += np.einsum("btm,btn->bmn", hot, scaled.numpy())
            self.squared += np.sum(added.reshape(rows, -1) ** 2, axis=1)
            return weighted_sum(uses, factors, shape)

        patch.setattr(products, "product", product)
        patch.setattr(products, "formed", formed)
        patch.setattr(factored, "weighted_sum", noted)
        patch.setattr(products, "arithmetic", lambda dtype: arithmetic)


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


def _narrow(random, rows):
    """Few enough weights that gradients are formed: no Gram matrix."""
    return _dense(random, rows, 5, 4)


def _called_twice(random, rows):
    (a, g), (b, h) = (_sides(random, rows, WIDTH, OUT) for _ in range(2))
    random.shuffle(b[::6])  # of the others, the cross terms cancel as well
    b[1::6], h[1::6] = a[1::6] * (1 + 1e-6), -g[1::6]
    layer = layers.Dense(OUT, use_bias=False, kernel_initializer="zeros")
    layer.build([None, None, WIDTH])
    return [layer], lambda: _linear(layer(a), g) + _linear(layer(b), h)


def _attention(random, rows):
    """A projection onto heads, as attention has it, and the one behind the heads."""
    (a, g), (b, h) = (_sides(random, rows, WIDTH, OUT) for _ in range(2))
    b, h = h.reshape(rows, POSITIONS, 3, 10), b
    into = layers.EinsumDense("abc,cde->abde", [None, 3, 10], bias_axes="de")
    out = layers.EinsumDense("abde,dec->abc", [None, WIDTH], bias_axes="c")
    into.build([None, None, WIDTH])
    out.build([None, None, 3, 10])
    return [into, out], lambda: _linear(into(a), g) + _linear(out(b), h)


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
        _narrow,
        _called_twice,
        _attention,
        _embedding,
        _shared_embedding,
        _normalization,
    )
}


def _run(patch, device, kind, rows, seed=0):
    """The engine's answer, what each row added (norms, [B]), and the exact norms."""
    random = np.random.default_rng(seed)
    found_layers, losses = _KINDS[kind](random, rows)
    variables = [v for layer in found_layers for v in layer.trainable_variables]
    used = _Device(patch, device)
    found = fast.clipped_sum(losses, found_layers, variables, C)
    return found, np.sqrt(used.squared)


# -- No row adds more than the clip norm -------------------------------------------


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_no_row_adds_more_than_the_clip_norm(device, kind, monkeypatch):
    """21 times 504 rows, of which nobody's contribution is longer than C."""
    found, added = _run(monkeypatch, device, kind, 504)
    assert np.all(np.isfinite(added))
    assert np.max(added) <= C * (1 + 1e-6)
    # Ordinary rows are clipped to C, and not far below where products are exact.
    share = {"float32": 1 - 2e-5, "tensor_float_32": 0.95, "bfloat16": 0.8}[device]
    assert np.min(added[::6]) > C * share
    assert np.mean(found.norms > C) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_no_row_of_very_many_adds_more_than_the_clip_norm(device, kind):
    for seed in range(1, 11):
        with pytest.MonkeyPatch.context() as patch:
            _, added = _run(patch, device, kind, 3000, seed)
        assert np.max(added) <= C * (1 + 1e-6), seed


@pytest.mark.parametrize("device", DEVICES)
def test_without_the_error_bound_rows_would_add_more(device, monkeypatch):
    """The rows above are hard: by their computed norms alone they escape."""
    monkeypatch.setattr(products, "exponent", lambda *_: 0.0)
    _, added = _run(monkeypatch, device, "dense", 504)
    assert np.max(added) > 1.05 * C
    assert np.sum(added > C * (1 + 1e-6)) > 20


@pytest.mark.parametrize("device", ["tensor_float_32", "bfloat16"])
@pytest.mark.parametrize("name", ["attention", "language", "tied, wide", "conv1d"])
def test_whole_models_keep_the_bound(device, name, monkeypatch):
    model, _, x = oracle.made(name)
    used = _Device(monkeypatch, device)
    oracle.run(model, x, clip_norm=1e-3, mode="eager")
    added = np.sqrt(used.squared)
    assert np.max(added) <= 1e-3 * (1 + 1e-6)
    assert np.min(added) > 0.8e-3


# -- A norm that cancels is not a norm of zero -------------------------------------


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
    used = _Device(monkeypatch, "bfloat16")
    found = fast.clipped_sum(
        lambda: _linear(layer(a), g), [layer], layer.trainable_variables, C
    )
    exact = np.linalg.norm(np.einsum("btm,btn->bmn", a, g), axis=(1, 2))
    np.testing.assert_allclose(exact, [5 * C, 512])
    assert found.norms[0] == 0
    # Each position is 512 long, rounded by up to 2^-8 twice: only a factor of about
    # C / √(h · 1024²), h = 4 · 2^-8, is safe, and a row that is known is not harmed.
    (merged,) = factored.merge(
        [factored.Outer(tf.constant(a), tf.constant(g))], [16, 64]
    )
    _, bounds = gradient_norms.norm_and_bound([gradient_norms.squared_norms([merged])])
    assert exact[0] < bounds[0] and float(bounds[0]) == pytest.approx(128, rel=0.2)
    assert np.sqrt(used.squared)[0] <= C
    assert np.sqrt(used.squared)[1] == pytest.approx(C, rel=0.1)


def test_a_computed_norm_below_zero_is_bounded_as_well():
    """In float32, over many rows that cancel, rounding goes either way."""
    random = np.random.default_rng(0)
    a, g = _sides(random, 600, WIDTH, OUT)
    exact = np.linalg.norm(
        np.einsum("btm,btn->bmn", a[1::6].astype(np.float64), g[1::6]), axis=(1, 2)
    )
    use = factored.Outer(tf.constant(a[1::6]), tf.constant(g[1::6]))
    squared = gradient_norms.squared_norms([use])
    below = squared.norm.numpy() == 0
    assert np.sum(below) > 5 and np.all(exact > 0)
    assert np.all(exact**2 <= squared.norm + squared.error)


def test_weights_of_two_types_are_bounded_as_the_coarser_one():
    """The factor is float64, and converted to float32 before it scales a gradient."""
    gradients = np.random.default_rng(0).uniform(1, 2, [4096, 1]).astype(np.float32)
    squares = [
        gradient_norms.squared_norms([factored.Direct(tf.constant(values))])
        for values in (gradients, np.full([4096, 1], 1e-9))
    ]
    _, bounds = gradient_norms.norm_and_bound(squares)
    assert bounds.dtype == tf.float64
    factors = tf.cast(tf.constant(C, tf.float64) / bounds, tf.float32).numpy()
    added = (factors[:, np.newaxis] * gradients).astype(np.float64)
    assert added.max() <= C
    assert added.min() == pytest.approx(C, rel=1e-5)


# -- Every part of the bound is needed ----------------------------------------------

# Just less than a truncating accumulator keeps of a term that is added to 1.
_LOST = 0.99 * 2.0**-23
_MANY = 900


def _truncated(values):
    """float64 values as float32, rounded towards zero."""
    near = values.astype(np.float32)
    return np.where(
        np.abs(near) > np.abs(values), np.nextafter(near, np.float32(0)), near
    )


def _in_order(terms):
    """Sums along the last axis, one term after the other, each sum truncated."""
    total = np.zeros(terms.shape[:-1], np.float32)
    for term in np.moveaxis(terms, -1, 0):
        total = _truncated(total.astype(np.float64) + term)
    return total


@pytest.fixture
def truncating(monkeypatch):
    """A device whose accumulators truncate: u = 2^-23, and operands are not rounded."""
    reduce_sum = tf.reduce_sum

    def product(one, other, transpose_a=False, transpose_b=False):
        assert transpose_b and not transpose_a  # of a Gram matrix
        left, right = (values.numpy().astype(np.float64) for values in (one, other))
        return tf.constant(_in_order(_truncated(left[:, :, None] * right[:, None])))

    def sums(values, axis=None, **options):
        if axis in (-1, 2) and values.dtype == tf.float32:
            return tf.constant(_in_order(np.moveaxis(values.numpy(), axis, -1)))
        return reduce_sum(values, axis=axis, **options)

    monkeypatch.setattr(products, "product", product)
    monkeypatch.setattr(products, "arithmetic", lambda _: products._FLOAT32_ELSEWHERE)
    monkeypatch.setattr(tf, "reduce_sum", sums)


def _first_and_small(size, small):
    """[size]: 1, and then numbers that are small beside it."""
    return np.array([1.0] + [small] * (size - 1), np.float32)


def _use_and_exact(kind):
    """Uses of one weight by one row, whose squared norm loses all it can, and that."""
    long = _first_and_small(_MANY, math.sqrt(_LOST))
    short = np.array([1.0, 0.0], np.float32)
    steps = _first_and_small(_MANY, _LOST)  # by position
    along = steps[:, np.newaxis] * short
    of_all = np.tile(short, [_MANY, 1])
    squared = float(np.sum(long.astype(np.float64) ** 2))
    summed = float(np.sum(steps.astype(np.float64))) ** 2
    zeros = np.zeros([1, _MANY], np.int32)
    made = {
        # ‖a ⊗ g‖² = ‖a‖²·‖g‖².
        "wide inputs": ([factored.Outer(long[None, None], short[None, None])], squared),
        "wide gradients": (
            [factored.Outer(short[None, None], long[None, None])],
            squared,
        ),
        # ‖Σ_t s_t·a ⊗ g‖² = (Σ_t s_t)².
        "positions": ([factored.Outer(along[None], of_all[None])], summed),
        "looked-up positions": ([factored.Lookup(zeros, along[None])], summed),
        # ‖e_0 ⊗ g + e_0 ⊗ g‖² = 4‖g‖².
        "both": (
            [
                factored.Outer(short[None, None], long[None, None]),
                factored.Lookup(zeros[:, :1], long[None, None]),
            ],
            4 * squared,
        ),
        "a matrix": (
            [factored.Direct(long[np.newaxis, :, np.newaxis] * short)],
            squared,
        ),
    }
    uses, exact = made[kind]
    return [type(use)(*map(tf.constant, use)) for use in uses], exact


@pytest.mark.parametrize(
    "kind",
    [
        "wide inputs",
        "wide gradients",
        "positions",
        "looked-up positions",
        "both",
        "a matrix",
    ],
)
def test_rows_that_lose_all_they_can_stay_below_the_bound(
    kind, truncating, monkeypatch
):
    """By 900 sums that each lose nearly a last bit; the bound is hardly above that."""
    # Only what is compiled adds up a matrix's columns.
    monkeypatch.setattr(products, "compiled_by_xla", lambda: kind == "a matrix")
    uses, exact = _use_and_exact(kind)
    squared = gradient_norms.squared_norms(uses)
    norm, error = (float(part[0]) for part in (squared.norm, squared.error))
    lost = exact - norm
    assert lost > 0.95 * _MANY * _LOST * (4 if kind == "both" else 1)
    assert lost <= error <= 1.05 * lost


@pytest.mark.parametrize("kind", ["a vector", "positions"])
def test_rows_in_float64_that_lose_all_they_can_stay_below_the_bound(kind, monkeypatch):
    """A sum of sums: of blocks of one, as 9,973 is prime; of two axes of positions."""
    reduce_sum = tf.reduce_sum

    def in_order(values, axis=None, **options):
        if values.dtype != tf.float64 or kind == "a vector" and axis == 2:
            return reduce_sum(values, axis=axis, **options)
        axes = [axis] if isinstance(axis, int) else list(axis)
        last = np.moveaxis(values.numpy(), axes, range(-len(axes), 0))
        last = last.reshape(*last.shape[: last.ndim - len(axes)], -1)
        return tf.constant(np.cumsum(last, axis=-1)[..., -1])

    monkeypatch.setattr(tf, "reduce_sum", in_order)
    small = 2.0**-53.04  # less than half a last bit of 1, and so lost beside it
    if kind == "a vector":
        values = np.array([1.0] + [math.sqrt(small)] * 9972)
        use = factored.Direct(tf.constant(values[np.newaxis]))
        exact = math.fsum(values**2)
    else:
        steps = np.array([1.0] + [small] * 899)
        use = factored.Outer(
            tf.constant(steps[np.newaxis, :, np.newaxis]),
            tf.ones([1, 900, 1], tf.float64),
        )
        exact = math.fsum(steps) ** 2
    squared = gradient_norms.squared_norms([use])
    norm, error = (float(part[0]) for part in (squared.norm, squared.error))
    lost = exact - norm
    assert lost > 0.95 * (9972 if kind == "a vector" else 2 * 899) * 2.0**-53
    assert lost <= error <= 1.1 * lost


def test_what_follows_from_the_bound_is_rounded_as_well():
    """Bound, C, factor and product, each to nearest, may be off by 2^-24 in one way.

    The rows are such that this is nearly so: all of these are just above a power of 2,
    where a last bit is largest, and C is rounded up by nearly half of one.
    """
    random = np.random.default_rng(0)
    rows = random.uniform([1, 1e-3], [1.01, 0.05], size=[1 << 19, 2]).astype(np.float32)
    below = np.float32(1.02)
    above = np.nextafter(below, np.float32(2))
    clip_norm = 0.499 * float(below) + 0.501 * float(above)
    assert np.float32(clip_norm) == above
    squared = gradient_norms.squared_norms([factored.Direct(tf.constant(rows))])
    _, bounds = gradient_norms.norm_and_bound([squared])
    factors = (tf.constant(clip_norm, tf.float32) / bounds).numpy()
    added = np.linalg.norm((factors[:, np.newaxis] * rows).astype(np.float64), axis=1)
    assert added.max() <= clip_norm
    assert added.min() > clip_norm * (1 - 32 * 2.0**-24)

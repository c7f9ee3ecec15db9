r"""Per-example gradients kept in factors: their norms, and their weighted sum.

Let a weight W, seen as an m × n matrix, have one example's gradient

    g = Σ_u A_uᵀ G_u,        A_u: T_u × m,  G_u: T_u × n,

one term for every use u of W in the forward pass (every call of its layer, every
layer that shares it). T positions of the example met the weight. One factor is what
went into the layer, the other the gradient that came back.

*Norm* (Goodfellow 2015; Li et al. 2021, arXiv:2110.05679, section 4). All uses
stacked along T, A = [A_1; A_2; …] and G = [G_1; G_2; …], give g = AᵀG, and

    ‖g‖² = tr(GᵀA AᵀG) = tr(AAᵀ GGᵀ) = Σ_{t,s} (a_t·a_s)(g_t·g_s),

where t and s run over the positions of *all* uses: the terms with t and s in
different uses are the cross terms, without which a shared weight's norm is wrong
in both directions. The Gram matrices cost T²(m + n) multiplications, in addition to the
T·m·n of the sum below. To form g itself costs T·m·n, and the sum then next to
nothing, but mn numbers of memory per example instead of the factors' T(m + n). It is
formed where that is less than twice as many; from there on it was measured not to pay.

*Lookup* of row id_t instead of a product with a_t is a_t = e_{id_t}; then
a_t·a_s = [id_t = id_s], and against a dense factor a_t·a_s = a_s[id_t]. No one-hot
row, and no [B, m, n] array, is ever made for it.

*Sum* (Bu et al. 2023, arXiv:2210.00038, "book-keeping"): Σ_i c_i A_iᵀG_i is one
product of the factors with all examples stacked, c_i multiplied into the smaller
of the two. No second backward pass takes place.

*Precision.* Everything here is in float32 (float64 for float64 factors), whatever the
layers compute in. By default a GPU rounds the operands of a float32 product to
TensorFloat-32, and a TPU to bfloat16. `product` asks for the highest precision there
is; `gradient_norms` says what it gets, and lowers the clipping factors accordingly.
Nothing else needs this: elementwise operations and reductions run in float32 on these
devices, and a product that forms an example's gradient is part of the function, like
the backward pass: it is clipped as it came out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Union

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util


class Outer(NamedTuple):
    """Example i's gradient is Σ_t left[i, t] ⊗ right[i, t]."""

    left: tf.Tensor  # [B, T, m] float
    right: tf.Tensor  # [B, T, n] float


class Lookup(NamedTuple):
    """Example i's gradient is Σ_t e(ids[i, t]) ⊗ right[i, t], e a unit vector."""

    ids: tf.Tensor  # [B, T] int64, below m
    right: tf.Tensor  # [B, T, n] float


class Direct(NamedTuple):
    """Example i's gradient itself."""

    gradients: tf.Tensor  # [B, *shape of the weight] float


Use = Union[Outer, Lookup, Direct]


def full_precision(values: tf.Tensor) -> tf.Tensor:
    """The values in float32, or in float64 if they are so already."""
    return values if values.dtype == tf.float64 else tf.cast(values, tf.float32)


def full_dtype(variable: tf.Variable) -> tf.DType:
    """The type of a weight's sums and slots: float32, or float64 for float64."""
    return tf.float64 if variable.dtype == tf.float64 else tf.float32


def sum_to(gradient: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Per-example gradients, [B, *shape], of a weight that was broadcast.

    `gradient`, [B, ...], is by the tensor that it was broadcast to, with whose last
    axes its `shape` is aligned.
    """
    shape = list(shape)
    missing = gradient.shape.rank - 1 - len(shape)
    axes = [1 + axis for axis in range(missing)]
    axes += [1 + missing + axis for axis, size in enumerate(shape) if size == 1]
    return tf.reshape(tf.reduce_sum(gradient, axes), [-1, *shape])


def merge(uses: Sequence[Use], shape: Sequence[int]) -> list[Use]:
    """All uses of one weight, in the cheapest form that keeps their cross terms.

    Returns:
      A single `Direct`, or at most one `Outer` and one `Lookup` in this order, `pinned`
      for norm and sum to have the same numbers; nothing of no use.
    """
    outers = [use for use in uses if isinstance(use, Outer)]
    lookups = [use for use in uses if isinstance(use, Lookup)]
    # The rows of the matrix that each use makes of the weight; None: it makes none.
    splits = {use.left.shape[-1] for use in outers}
    splits |= {shape[0]} if lookups else set()
    splits |= {None} if len(outers) + len(lookups) < len(uses) else set()
    merged: list[Any]
    if len(splits) > 1 or splits == {None}:
        # Layouts that cannot be stacked still add up, cross terms included.
        merged = [Direct(tf.add_n([_gradients(use, shape) for use in uses]))]
    else:
        merged = [
            type(same[0])(*(tf.concat(factors, axis=1) for factors in zip(*same)))
            for same in (outers, lookups)
            if same
        ]
        if outers and not lookups and _product_is_cheaper(merged[0]):
            merged = [Direct(_gradients(merged[0], shape))]
    return [type(use)(*map(pinned, use)) for use in merged]


def grouped(use: Use, size: int) -> Use:
    """The use with every `size` consecutive rows made one; `size` divides B.

    Their gradients add up, which costs no arithmetic for factors: the positions of all
    become positions of one, and the cross terms follow.
    """
    if size == 1:
        return use
    if isinstance(use, Direct):
        shape = use.gradients.shape
        apart = tf.reshape(use.gradients, [shape[0] // size, size, *shape[1:]])
        return Direct(tf.reduce_sum(apart, axis=1))
    rows = use.right.shape[0] // size
    return type(use)(*(tf.reshape(x, [rows, -1, *x.shape[2:]]) for x in use))


def cleaned(by_weight: Sequence[list[Use]], keep: tf.Tensor) -> list[list[Use]]:
    """The weights' uses with exact zeros for examples i where keep[i], [B], is false.

    A factor 0 would not do it: 0 · NaN is NaN, and would spoil the sum.
    """

    def clean(factor: tf.Tensor) -> tf.Tensor:
        if not factor.dtype.is_floating:
            return factor
        column = [-1] + [1] * (factor.shape.rank - 1)
        mask = tf.reshape(tf.cast(keep, factor.dtype), column)
        return tf.math.multiply_no_nan(factor, mask)

    return [[type(use)(*map(clean, use)) for use in uses] for uses in by_weight]


def weighted_sum(
    uses: Sequence[Use], factors: tf.Tensor, shape: Sequence[int]
) -> tf.Tensor:
    """Σ_i factors[i] · gradient_i of one weight, dense and of its `shape`.

    `uses` are merged, and finite wherever one of the `factors`, [B] float, is 0.
    """
    summed = [tf.reshape(_weighted(use, factors, shape), shape) for use in uses]
    return tf.add_n(summed) if summed else tf.zeros(shape, factors.dtype)


def _weighted(use: Use, factors: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    factors = tf.cast(factors, use[-1].dtype)
    if isinstance(use, Direct):
        return sum_of_rows(factors, use.gradients)
    left, right = use
    factors, width = tf.reshape(factors, [-1, 1, 1]), right.shape[-1]
    if isinstance(use, Lookup):
        flat = tf.reshape(right * factors, [-1, width])
        return tf.math.unsorted_segment_sum(flat, tf.reshape(left, [-1]), shape[0])
    # One input often meets several weights (query, key, value), and is scaled once.
    if left.shape[-1] <= width:
        left *= factors
    else:
        right *= factors
    left, right = (tf.reshape(x, [-1, x.shape[-1]]) for x in (left, right))
    return product(left, right, transpose_a=True)


def _gradients(use: Use, shape: Sequence[int]) -> tf.Tensor:
    """Every example's gradient, [B, *shape]."""
    if isinstance(use, Direct):
        return use.gradients
    left, right = use
    if isinstance(use, Lookup):
        left = tf.one_hot(left, shape[0], dtype=right.dtype)
    gradients = tf.matmul(left, right, transpose_a=True)
    return tf.reshape(gradients, [right.shape[0], *shape])


def _product_is_cheaper(use: Outer) -> bool:
    (_, length, rows), columns = use.left.shape, use.right.shape[2]
    # Of unknown length neither cost is known; the factors are there already.
    return length is not None and rows * columns < 2 * length * (rows + columns)


def product(
    one: tf.Tensor,
    other: tf.Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> tf.Tensor:
    """The matrix product over the last two axes, in the highest precision there is.

    `one`, [..., k, l] float32 or float64, and `other`, [..., l, n], share dtype and
    leading axes; the transpositions are those of `tf.matmul`.
    """
    if one.dtype == tf.float64 or not compiled_by_xla():
        return tf.matmul(one, other, transpose_a, transpose_b)
    leading = range(one.shape.rank - 2)
    numbers = xla_data_pb2.DotDimensionNumbers(
        lhs_batch_dimensions=leading,
        rhs_batch_dimensions=leading,
        lhs_contracting_dimensions=[one.shape.rank - (2 if transpose_a else 1)],
        rhs_contracting_dimensions=[one.shape.rank - (1 if transpose_b else 2)],
    )
    highest = xla.PrecisionConfig(operand_precision=[xla.PrecisionConfig.HIGHEST] * 2)
    result = xla.dot_general(one, other, numbers, highest)
    rows, columns = (-1 if transpose_a else -2), (-2 if transpose_b else -1)
    result.set_shape([*one.shape[:-2], one.shape[rows], other.shape[columns]])
    return result


def sum_of_rows(factors: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Σ_i factors[i] · rows[i], of [B] and [B, ...]; both are rounded once."""
    if compiled_by_xla():
        # In one pass over the rows as they lie. For a product, a TPU copies them first.
        column = tf.reshape(factors, [-1] + [1] * (rows.shape.rank - 1))
        return tf.reduce_sum(rows * column, axis=0)
    count, *shape = rows.shape
    flat = tf.reshape(rows, [count, -1])
    return tf.reshape(product(tf.reshape(factors, [1, count]), flat), shape)


def pinned(values: tf.Tensor) -> tf.Tensor:
    """The values behind an XLA barrier, so that norm and sum read the same numbers.

    XLA may compute a cheap value once per use, and round it differently each time. (XLA
    for CPUs drops the barrier before fusion; no difference was found there.)
    """
    if not compiled_by_xla() or not values.dtype.is_floating:
        return values
    return xla.optimization_barrier(values)[0]


def compiled_by_xla() -> bool:
    """Returns whether XLA compiles what is traced at this moment."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


@contextlib.contextmanager
def true_float32() -> Iterator[None]:
    """While inside, float32 is multiplied in float32, not in TensorFloat-32 or 16 bits.

    TensorFlow has one switch for the process, which operations look at when they run:
    a step must be traced and run inside.
    """
    config, rewrites = tf.config.experimental, tf.config.optimizer
    before = config.tensor_float_32_execution_enabled()
    options = rewrites.get_experimental_options()
    to_16_bits = [n for n, on in options.items() if on and "auto_mixed_precision" in n]
    config.enable_tensor_float_32_execution(False)
    rewrites.set_experimental_options(dict.fromkeys(to_16_bits, False))
    try:
        yield
    finally:
        config.enable_tensor_float_32_execution(before)
        rewrites.set_experimental_options(dict.fromkeys(to_16_bits, True))

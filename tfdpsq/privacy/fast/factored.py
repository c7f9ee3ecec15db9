r"""Per-example gradients kept in factors: their norms, and their weighted sum.

Let a weight W, seen as an m × n matrix, have one example's gradient

    g = Σ_u A_uᵀ G_u,        A_u: T_u × m,  G_u: T_u × n,

one term for every use u of W in the forward pass (every call of its layer, every
layer that shares it). T is how many positions of the example met the weight. One
factor is what went into the layer, the other the gradient that came back.

*Norm* (Goodfellow 2015; Li et al. 2021, arXiv:2110.05679, section 4). All uses
stacked along T, A = [A_1; A_2; …] and G = [G_1; G_2; …], give g = AᵀG, and

    ‖g‖² = tr(GᵀA AᵀG) = tr(AAᵀ GGᵀ) = Σ_{t,s} (a_t·a_s)(g_t·g_s),

where t and s run over the positions of *all* uses: the terms with t and s in
different uses are the cross terms, without which a shared weight's norm is wrong
in both directions. The Gram matrices cost T²(m + n) multiplications, beside the
T·m·n of the sum below. To form g itself costs T·m·n, and the sum then next to
nothing; but it takes memory, mn numbers per example instead of the T(m + n) of its
factors. It is formed where that is less than twice as many. (From there on, writing
and reading it was measured to take as long as it saves.)

*Lookup* of row id_t instead of a product with a_t is a_t = e_{id_t}; then
a_t·a_s = [id_t = id_s], and against a dense factor a_t·a_s = a_s[id_t]. No one-hot
row, and no [B, m, n] array, is ever made for it.

*Sum* (Bu et al. 2023, arXiv:2210.00038, "book-keeping"): Σ_i c_i A_iᵀG_i is one
product of the factors with all examples stacked, c_i multiplied into the smaller
of the two. No second backward pass takes place.

Everything here is computed in float32 (float64 for float64 factors), whatever the
layers compute in.

*Rounding.* What is clipped is the gradient of the factors as they are: with which
precision layers and backward pass made them is part of the function. What must hold
is that c_i times g_i, as it enters the sum, is no longer than C, for every factor
that a row may have, and on devices that round the operands of a product (`products`).
Let M = Σ_t ‖a_t‖·‖g_t‖, over the positions of all uses; ‖g‖ ≤ M, and where terms
cancel M may be far larger than ‖g‖.

- A computed inner product a_t·a_s is within (e^h - 1)·‖a_t‖·‖a_s‖ of the exact one,
  h = 2p + K·u, with p the rounding of an operand, u that of an operation and K the
  roundings that one term goes through: its absolute terms sum to ‖a_t‖·‖a_s‖ at most,
  by Cauchy and Schwarz. So the computed ‖g‖² is within (e^h - 1)·M² of the exact one,
  h now of the two inner products, their product and the sum over (t, s). Of lookups
  only equal ids meet, and M² is Σ_{t,s} [id_t = id_s]·‖g_t‖·‖g_s‖ here.
- M itself comes from the diagonals of the Gram matrices, which cancel nothing: within
  a factor e^3h, and a few roundings more. Altogether, for h ≤ 0.05,

      ‖g‖² ≤ max(computed ‖g‖², 0) + (h + 8h²)·(computed M²).

- In the sum, both operands are rounded once more: what enters it is within
  (e^r - 1)·c·M of c·g, r = 2p + 2u.

So a row whose gradient has, over all weights, Σ computed ‖g‖² = n, Σ (h + 8h²)·M² = e
and Σ M² = m gets the factor

    c = min(1, C / (√(n + e) + (r + r²)·√m)),

and what it adds to the sum is no longer than C. A gradient whose terms cancel, so that
nothing of its computed norm can be believed, has a bound of about √h·M: a smaller
factor, never none. For a `Direct` gradient, clipped as it was computed, M = ‖g‖.
Squares below the smallest normal number are lost: 2^-100 is added to squared lengths
of a_t and g_t, and 2^-90 to n, far below any clip norm, for what that may be.

Left out is the rounding of the additions *between* rows: like that of every DP-SGD in
floating point, it depends on all rows together and on their order, and is at most
T·B·u of the sum of the c_i·M_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Union

import numpy as np
import tensorflow as tf

from tfdpsq.privacy.fast import products


class Outer(NamedTuple):
    """Example i's gradient is Σ_t left[i, t] ⊗ right[i, t].

    Attributes:
      left: [B, T, m] float.
      right: [B, T, n] float.
    """

    left: tf.Tensor
    right: tf.Tensor


class Lookup(NamedTuple):
    """Example i's gradient is Σ_t e(ids[i, t]) ⊗ right[i, t], e a unit vector.

    Attributes:
      ids: [B, T] integers below m.
      right: [B, T, n] float.
    """

    ids: tf.Tensor
    right: tf.Tensor


class Direct(NamedTuple):
    """Example i's gradient itself.

    Attributes:
      gradients: [B, *shape of the weight] float.
    """

    gradients: tf.Tensor


Use = Union[Outer, Lookup, Direct]


class Squared(NamedTuple):
    """‖g‖² of one weight, for each example; see *Rounding* above.

    Attributes:
      norm: [B] float32 (float64), as computed, at least 0; infinite where it is no
        finite number.
      error: [B]; the exact value is at most `norm + error`.
      magnitude: [B], M².
    """

    norm: tf.Tensor
    error: tf.Tensor
    magnitude: tf.Tensor


# For squares that are too small for a float32.
_TINY_POSITION, _TINY_SQUARE = 2.0**-100, 2.0**-90
# Squares that are added up in their own precision (the rest follow in float64), and
# positions so few that their products are added up in float64 at once.
_BLOCK, _FEW = 256, 64


def full_precision(values: tf.Tensor) -> tf.Tensor:
    """The values in float32, or in float64 if they are so already."""
    return values if values.dtype == tf.float64 else tf.cast(values, tf.float32)


def sum_to(gradient: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Per-example gradients of a weight that was broadcast along some axes.

    Args:
      gradient: [B, ...] float, by the tensor that the weight was broadcast to.
      shape: the weight's shape, aligned with the last axes of `gradient`.

    Returns:
      [B, *shape], summed over every other axis but the first.
    """
    shape = list(shape)
    missing = gradient.shape.rank - 1 - len(shape)
    axes = [1 + axis for axis in range(missing)]
    axes += [1 + missing + axis for axis, size in enumerate(shape) if size == 1]
    return tf.reshape(tf.reduce_sum(gradient, axes), [-1, *shape])


def precise(use: Use) -> Use:
    """The use with its factors in float32, or float64 where they are so already."""
    return type(use)(
        *(full_precision(part) if part.dtype.is_floating else part for part in use)
    )


def merge(uses: Sequence[Use], shape: Sequence[int]) -> list[Use]:
    """All uses of one weight, in the cheapest form that keeps their cross terms.

    Args:
      uses: at least one use of the weight, of the same B examples, in full
        precision.
      shape: the weight's shape.

    Returns:
      A single `Direct`, or at most one `Outer` and one `Lookup`.
    """
    outers = [use for use in uses if isinstance(use, Outer)]
    lookups = [use for use in uses if isinstance(use, Lookup)]
    # How each use splits the weight into rows and columns; None: not at all.
    splits = {use.left.shape[-1] for use in outers}
    splits |= {shape[0]} if lookups else set()
    splits |= {None} if len(outers) + len(lookups) < len(uses) else set()
    if len(splits) > 1 or splits == {None}:
        # Layouts that cannot be stacked still add up, cross terms included.
        return [Direct(tf.add_n([_gradients(use, shape) for use in uses]))]
    merged: list[Use] = []
    if outers:
        stacked = Outer(*(_concatenated(factors) for factors in zip(*outers)))
        if not lookups and _product_is_cheaper(stacked):
            return [Direct(_gradients(stacked, shape))]
        merged.append(stacked)
    if lookups:
        merged.append(Lookup(*(_concatenated(factors) for factors in zip(*lookups))))
    return merged


def grouped(use: Use, size: int) -> Use:
    """The use with every `size` consecutive rows made one.

    Their gradients add up, which for factors is no arithmetic at all: the positions
    of all of them become positions of one, and the cross terms between them follow.

    Args:
      use: a use of B rows.
      size: how many rows form one; it divides B.

    Returns:
      The same kind of use, of B / size rows.
    """
    if size == 1:
        return use
    if isinstance(use, Direct):
        shape = use.gradients.shape
        apart = tf.reshape(use.gradients, [shape[0] // size, size, *shape[1:]])
        return Direct(tf.reduce_sum(apart, axis=1))

    def joined(factor):
        rows, length, *width = factor.shape
        length = -1 if length is None else size * length
        return tf.reshape(factor, [rows // size, length, *width])

    return type(use)(*(joined(factor) for factor in use))


def squared_norms(uses: Sequence[Use]) -> Squared:
    """‖gradient‖² of one weight for each example, and how far it may be off.

    Args:
      uses: what `merge` returned.
    """
    dtype = uses[0][-1].dtype
    if isinstance(uses[0], Direct):
        total, steps = _sum_of_squares(uses[0].gradients)
        return _squared(total, total, total, products.exponent(dtype, 0, steps + 2))
    terms, lengths, squares = [], [], []
    grams, widths, positions = 0, 0, 0
    for use in uses:
        met = _gram(use.right, use.right)
        length = _lengths(met)
        steps, made = products.chain(use.right.shape[-1]), 1
        if isinstance(use, Outer):
            same = _gram(use.left, use.left)
            length *= _lengths(same)
            steps, made = steps + products.chain(use.left.shape[-1]), 2
            squares.append(tf.square(tf.reduce_sum(length, axis=1)))
        else:
            same = tf.cast(
                use.ids[:, :, tf.newaxis] == use.ids[:, tf.newaxis, :], dtype
            )
            both = length[:, :, tf.newaxis] * length[:, tf.newaxis, :]
            squares.append(_total(same * both))
        terms.append(_total(same * met))
        lengths.append(tf.reduce_sum(length, axis=1))
        grams, widths = max(grams, made), max(widths, steps)
        positions += _positions(use)
    outers = [use for use in uses if isinstance(use, Outer)]
    lookups = [use for use in uses if isinstance(use, Lookup)]
    for outer in outers:
        for lookup in lookups:
            # a_s[id_t] for t of the lookup, s of the product: [B, S, T].
            met = tf.gather(outer.left, lookup.ids, axis=2, batch_dims=1)
            terms.append(2 * _total(met * _gram(outer.right, lookup.right)))
            squares.append(2 * lengths[0] * lengths[1])
    return _squared(
        tf.add_n(terms),
        tf.add_n(squares),
        tf.square(tf.add_n(lengths)),
        # A product of two entries, their sum, and conversions.
        products.exponent(dtype, grams, widths + positions + 5),
    )


def _squared(
    total: tf.Tensor,
    absolute: tf.Tensor,
    magnitude: tf.Tensor,
    exponent: float | tf.Tensor,
) -> Squared:
    """A computed ‖g‖², of terms whose absolute values sum to `absolute` at most."""
    slack = tf.cast(exponent + 8 * exponent * exponent, total.dtype)
    # Rounding can leave a vanishing norm just below zero; infinities of both signs,
    # just below minus infinity.
    norm = tf.where(
        tf.math.is_finite(total),
        tf.maximum(total, tf.zeros([], total.dtype)),
        tf.constant(np.inf, total.dtype),
    )
    return Squared(norm, slack * absolute, magnitude)


def norm_and_bound(squares: Sequence[Squared]) -> tuple[tf.Tensor, tf.Tensor]:
    """The norm over all weights, and what no released contribution is longer than.

    Args:
      squares: what `squared_norms` returned for each weight; at least one.

    Returns:
      norms: [B] float32 (float64), as computed.
      bounds: [B]; a row with factor c adds at most c · bound to the sum as computed.
        Above 0; infinite where it is no finite number.
    """
    double = any(square.norm.dtype == tf.float64 for square in squares)
    dtype = tf.float64 if double else tf.float32
    norm, error, magnitude = (
        tf.add_n([tf.cast(part, tf.float64) for part in parts])
        for parts in zip(*squares)
    )
    rounding = products.exponent(dtype, 1, 2)
    bounds = tf.sqrt(norm + error + _TINY_SQUARE)
    bounds += (rounding + rounding * rounding) * tf.sqrt(magnitude)
    # For what is computed in `dtype` from here on: conversion, quotient, coefficient.
    bounds = tf.cast(bounds * (1 + 8 * np.finfo(dtype.as_numpy_dtype).eps), dtype)
    bounds = tf.where(tf.math.is_finite(bounds), bounds, tf.constant(np.inf, dtype))
    return tf.cast(tf.sqrt(norm), dtype), bounds


def cleaned(use: Use, keep: tf.Tensor) -> Use:
    """The use with exact zeros for examples that are left out.

    A factor 0 would not do it: 0 · NaN is NaN, and in the product that sums over
    examples it would spoil all of them.

    Args:
      use: any use.
      keep: [B] bool.

    Returns:
      The same kind of use.
    """

    def clean(factor: tf.Tensor) -> tf.Tensor:
        if not factor.dtype.is_floating:
            return factor
        mask = tf.reshape(tf.cast(keep, factor.dtype), _column(factor))
        return tf.math.multiply_no_nan(factor, mask)

    return type(use)(*(clean(factor) for factor in use))


def weighted_sum(
    uses: Sequence[Use], factors: tf.Tensor, shape: Sequence[int]
) -> tf.Tensor:
    """Σ_i factors[i] · gradient_i of one weight.

    Args:
      uses: what `merge` returned; finite wherever a factor is 0.
      factors: [B] float.
      shape: the weight's shape.

    Returns:
      A dense tensor of that shape, float32 (float64).
    """
    return tf.add_n([_weighted(use, factors, shape) for use in uses])


def _weighted(use: Use, factors: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    if isinstance(use, Direct):
        rows = use.gradients.shape[0]
        factors = tf.cast(factors, use.gradients.dtype)
        flat = tf.reshape(use.gradients, [rows, -1])
        total = products.product(tf.reshape(factors, [1, rows]), flat)
        return tf.reshape(total, shape)
    right = use.right
    factors = tf.reshape(tf.cast(factors, right.dtype), _column(right))
    width = right.shape[-1]
    if isinstance(use, Lookup):
        total = tf.math.unsorted_segment_sum(
            tf.reshape(right * factors, [-1, width]),
            tf.reshape(use.ids, [-1]),
            shape[0],
        )
        return tf.reshape(total, shape)
    left = use.left
    if left.shape[-1] < width:
        left *= factors
    else:
        right *= factors
    total = products.product(
        tf.reshape(left, [-1, left.shape[-1]]),
        tf.reshape(right, [-1, width]),
        transpose_a=True,
    )
    return tf.reshape(total, shape)


def _gradients(use: Use, shape: Sequence[int]) -> tf.Tensor:
    """Every example's gradient, [B, *shape]."""
    if isinstance(use, Direct):
        return use.gradients
    left = (
        tf.one_hot(use.ids, shape[0], dtype=use.right.dtype)
        if isinstance(use, Lookup)
        else use.left
    )
    gradients = products.product(left, use.right, transpose_a=True)
    return tf.reshape(gradients, [use.right.shape[0], *shape])


def _product_is_cheaper(use: Outer) -> bool:
    length, rows, columns = use.left.shape[1], use.left.shape[2], use.right.shape[2]
    if length is None:  # then neither cost is known; the factors are there already
        return False
    return rows * columns < 2 * length * (rows + columns)


def _gram(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return products.gram(one, other)


def _lengths(gram: tf.Tensor) -> tf.Tensor:
    """‖a_t‖ for each position, [B, T], from the Gram matrix [B, T, T]."""
    return tf.sqrt(tf.linalg.diag_part(gram) + _TINY_POSITION)


def _positions(use: Outer | Lookup) -> int | tf.Tensor:
    """How many roundings `_total` makes along one axis of the use's positions."""
    length = use.right.shape[1]
    if length is None:
        return tf.cast(tf.shape(use.right)[1], tf.float32)
    return 0 if length <= _FEW else length


def _total(terms: tf.Tensor) -> tf.Tensor:
    """Σ over all but the first axis, [B]: along the last one, then in float64.

    So a term goes through as many roundings as the last axis is long, and no more, in
    whatever order a device adds. A short axis costs little in float64 as well.
    """
    dtype, length = terms.dtype, terms.shape[-1]
    if length is not None and length <= _FEW:
        terms = tf.cast(terms, tf.float64)
    partial = tf.cast(tf.reduce_sum(terms, axis=-1), tf.float64)
    return tf.cast(tf.reduce_sum(partial, range(1, partial.shape.rank)), dtype)


def _sum_of_squares(values: tf.Tensor) -> tuple[tf.Tensor, int]:
    """‖values‖² for each example, and how many roundings a square goes through."""
    rows, *sizes = values.shape.as_list()
    size = math.prod(sizes)
    block = max(k for k in range(1, _BLOCK + 1) if size % k == 0)
    return _total(tf.square(tf.reshape(values, [rows, -1, block]))), block


def _concatenated(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].dtype.is_integer:
        parts = [tf.cast(part, tf.int64) for part in parts]
    return tf.concat(parts, axis=1)


def _column(values: tf.Tensor) -> list[int]:
    """The shape that lets one number per example multiply `values`."""
    return [-1] + [1] * (values.shape.rank - 1)

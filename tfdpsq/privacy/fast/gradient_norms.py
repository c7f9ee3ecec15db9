r"""Norms of gradients in factors, and upper bounds on them that include rounding.

The gradient that is clipped is that of the factors as they are (see `factored`): the
precision in which layers and backward pass made them is part of the function. c_i
times g_i, as it enters the sum, must be no longer than C, whatever numbers a row's
factors hold, and on devices that round the operands of a product (`products`). Let
M = Σ_t ‖a_t‖·‖g_t‖, over the positions of all uses; ‖g‖ ≤ M, and where terms cancel M
may be far larger than ‖g‖.

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
Squares below the smallest normal number, 2^-126, are lost. An inner product of up to
2^25 terms loses at most 2^-101 that way, which is covered by adding 2^-100 to the
squared lengths of a_t and g_t: h is at least as many u as there are terms. 2^-90 added
to n covers lost products of two entries; both are far below any clip norm.

For T5-small (128 + 32 tokens, float32 on a CPU) the bound is 0.06 to 0.08 % above the
norm; it is what cancels, and what a device rounds, that makes it larger.

Left out is the rounding of the additions *between* rows: like that of every DP-SGD in
floating point, it depends on all rows together and on their order, and is at most
T·B·u of the sum of the c_i·M_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdpsq.privacy.fast import products
from tfdpsq.privacy.fast.factored import Direct, Lookup, Outer, Use

# For squares that are too small for a float32.
_TINY_POSITION, _TINY_SQUARE = 2.0**-100, 2.0**-90
# Squares that are added up in their own precision (the rest follow in float64), and
# positions so few that their products are added up in float64 at once.
_BLOCK, _FEW = 256, 64
_LONGEST = 4096  # axis of a matrix whose squares are added up in one go


class Squared(NamedTuple):
    """‖g‖² of one weight, for each example; see above.

    Attributes:
      norm: [B] float32 (float64), as computed, at least 0; infinite where it is no
        finite number.
      error: [B]; the exact value is at most `norm + error`.
      magnitude: [B], M².
    """

    norm: tf.Tensor
    error: tf.Tensor
    magnitude: tf.Tensor


def squared_norms(uses: Sequence[Use]) -> Squared:
    """‖gradient‖² of one weight for each example, and how far it may be off.

    Args:
      uses: what `merge` returned.
    """
    dtype, first = uses[0][-1].dtype, uses[0]
    if isinstance(first, Direct):
        total, steps = _sum_of_squares(first.gradients)
        return _squared(total, total, total, products.exponent(dtype, 0, steps + 2))
    terms, lengths, squares = [], [], []
    grams, widths, positions = 0, 0, 0
    outers = [use for use in uses if isinstance(use, Outer)]
    lookups = [use for use in uses if isinstance(use, Lookup)]
    factors: list[Outer | Lookup] = [*outers, *lookups]
    for use in factors:
        met = products.gram(use.right, use.right)
        length = _lengths(met)
        steps, made = products.chain(use.right.shape[-1]), 1
        if isinstance(use, Outer):
            same = products.gram(use.left, use.left)
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
    for outer in outers:
        for lookup in lookups:
            # a_s[id_t] for t of the lookup, s of the product: [B, S, T].
            met = tf.gather(outer.left, lookup.ids, axis=2, batch_dims=1)
            terms.append(2 * _total(met * products.gram(outer.right, lookup.right)))
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
        Above 0; infinite where it is not a finite number.
    """
    double = any(square.norm.dtype == tf.float64 for square in squares)
    dtype = tf.float64 if double else tf.float32
    norm, error, magnitude = (
        tf.add_n([tf.cast(part, tf.float64) for part in parts])
        for parts in zip(*squares)
    )
    # A factor is converted to the type of the gradients that it scales.
    single = any(square.norm.dtype != tf.float64 for square in squares)
    coarsest = tf.float32 if single else tf.float64
    rounding = products.exponent(coarsest, 1, 2)
    bounds = tf.sqrt(norm + error + _TINY_SQUARE)
    bounds += (rounding + rounding * rounding) * tf.sqrt(magnitude)
    # For what is computed from here on. Bound, C, quotient and coefficient are rounded:
    # 2 eps where a device divides to nearest, and some are several units off.
    bounds = tf.cast(bounds * (1 + 8 * np.finfo(coarsest.as_numpy_dtype).eps), dtype)
    bounds = tf.where(tf.math.is_finite(bounds), bounds, tf.constant(np.inf, dtype))
    return tf.cast(tf.sqrt(norm), dtype), bounds


def _lengths(gram: tf.Tensor) -> tf.Tensor:
    """‖a_t‖ for each position, [B, T], from the Gram matrix [B, T, T]."""
    return tf.sqrt(tf.linalg.diag_part(gram) + _TINY_POSITION)


def _positions(use: Outer | Lookup) -> int | tf.Tensor:
    """Number of roundings that `_total` makes along the use's positions."""
    length, double = use.right.shape[1], use.right.dtype == tf.float64
    if length is None:
        length = tf.cast(tf.shape(use.right)[1], tf.float32)
    elif length <= _FEW and not double:
        return 0
    return 2 * length if double else length  # in float64 those of the other axis, too


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
    """‖values‖² for each example, and how many roundings a square goes through.

    Blocks of the whole are added up first. Where XLA compiles it is a matrix's columns:
    to cut a last axis, a TPU would copy it.
    """
    rows, *sizes = values.shape.as_list()
    length, width = math.prod(sizes[:-1]), math.prod(sizes[-1:])
    block = length
    if not (products.compiled_by_xla() and _FEW < length <= _LONGEST):
        length, width = length * width, 1
        block = max(k for k in range(1, _BLOCK + 1) if length % k == 0)
    blocks = tf.reshape(values, [rows, length // block, block, width])
    partial = tf.cast(tf.reduce_sum(tf.square(blocks), axis=2), tf.float64)
    total = tf.cast(tf.reduce_sum(partial, axis=[1, 2]), values.dtype)
    # In float64 the second sum rounds as the first does.
    double = values.dtype == tf.float64
    return total, block + length // block * width if double else block

r"""Norms of gradients in factors, and upper bounds on them that include rounding.

The gradient that is clipped is that of the factors as they are (see `factored`): the
precision in which layers and backward pass made them is part of the function. c_i
times g_i, as it enters the sum, must be no longer than C, whatever numbers a row's
factors hold, and on devices that round the operands of a product:

| where the product runs | operands rounded to | by |
|---|---|---|
| CPU | not rounded | |
| GPU or TPU, compiled by XLA | three bfloat16 words at worst | `HIGHEST` precision |
| GPU, TensorFloat-32 off (`true_float32`) | not rounded | |
| GPU, TensorFloat-32 on | TensorFloat-32 | TensorFlow's default |
| TPU, not compiled | bfloat16 | the device's default |

Let M = Σ_t ‖a_t‖·‖g_t‖ over the positions of all uses: ‖g‖ ≤ M, far below it where
terms cancel.

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

and what it adds to the sum is no longer than C. Where terms cancel, so that nothing of
the computed norm can be believed, the bound is about √h·M: a smaller factor, never
none. For a `Direct` gradient, clipped as it was computed, M = ‖g‖.
Squares below the smallest normal number, 2^-126, are lost. An inner product of up to
2^25 terms loses at most 2^-101 that way, which is covered by adding 2^-100 to the
squared lengths of a_t and g_t: h is at least as many u as there are terms. 2^-90 added
to n covers lost products of two entries; both are far below any clip norm.

For T5-small (128 + 32 tokens, float32 on a CPU) the bound is 0.05 to 0.11 % above the
norm. Left out is the rounding of the additions *between* rows: as in every DP-SGD in
floating point, it is at most T·B·u of the sum of the c_i·M_i.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdpsq.privacy.fast import factored
from tfdpsq.privacy.fast.factored import Direct, Outer

# For squares that are too small for a float32.
_TINY_POSITION, _TINY_SQUARE = 2.0**-100, 2.0**-90
# Squares that are added up in their own precision (the rest follow in float64), and
# the positions whose products are added up in float64 at once.
_BLOCK, _FEW = 256, 64
# Terms of an inner product that are added up at a time, and the most that are not cut:
# to copy T5-small's 2,048 would cost one per cent of a step. For strips see `_strips`.
_PANEL, _UNCUT, _STRIPS = 1024, 2048, 4


class Arithmetic(NamedTuple):
    """Bound on the error of one product: factors 1 + δ."""

    name: str
    operand: float  # |δ| ≤ p of each operand that is rounded
    step: float  # |δ| ≤ u of each multiplication and addition, in whatever order


# GPUs and TPUs may truncate, not round, in sums and to TensorFloat-32: twice as much.
FLOAT64 = Arithmetic("float64", 0.0, 2.0**-53)
FLOAT32 = Arithmetic("float32", 0.0, 2.0**-24)
_FLOAT32_ELSEWHERE = Arithmetic("float32", 0.0, 2.0**-23)
# Six products of bfloat16 words, the smallest three of nine left out. Where words are
# cut off, the second is less than 2^-7 and the third less than 2^-15 of a first one of
# 1: what is left out, 2 · 2^-22 of the product of the operands, is (1 + p)^2 - 1; where
# they are rounded to nearest, an eighth.
_HIGHEST = Arithmetic("float32 (XLA, highest)", 2.0**-22, 2.0**-23)
TENSOR_FLOAT_32 = Arithmetic("TensorFloat-32", 2.0**-10, 2.0**-23)
BFLOAT16 = Arithmetic("bfloat16", 2.0**-8, 2.0**-23)


def arithmetic(dtype: tf.DType, compiled: bool | None = None) -> Arithmetic:
    """The precision of products of float32 or float64 that are now made or traced.

    `compiled`, by XLA, is by default what holds at this moment.
    """
    if dtype == tf.float64:
        return FLOAT64
    gpus, tpus = (tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))
    if not gpus and not tpus:
        return FLOAT32
    if factored.compiled_by_xla() if compiled is None else compiled:
        return _HIGHEST
    if tpus:
        return BFLOAT16
    if tf.config.experimental.tensor_float_32_execution_enabled():
        return TENSOR_FLOAT_32
    return _FLOAT32_ELSEWHERE


def precision_in_words(jit_compile: bool) -> str:
    """Describes the products of a step, compiled by XLA or not, for its certificate."""
    tpu = isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)
    with factored.true_float32():
        name = arithmetic(tf.float32, jit_compile or tpu).name
    return (
        f"{name}; clipping factors follow from an upper bound on each gradient's norm "
        "that includes rounding"
    )


class Squared(NamedTuple):
    """‖g‖² of one weight, for each example; see above."""

    dtype: tf.DType  # of the factors
    total: tf.Tensor  # [B] float64, as computed; below 0 or NaN where terms cancel
    absolute: tf.Tensor  # [B] float64, M² or less: of all terms, made positive
    magnitude: tf.Tensor  # [B] float64, M²
    exponent: Any  # h


def squared_norms(uses: Sequence[Any]) -> Squared:
    """‖gradient‖² of one weight, whose `uses` are merged, and how far it may be off."""
    dtype, first = uses[0][-1].dtype, uses[0]
    if isinstance(first, Direct):
        total, steps = _sum_of_squares(first.gradients)
        return Squared(dtype, total, total, total, _exponent(dtype, 0, steps + 2))
    terms, lengths, squares = [], [], []
    grams, widths, positions = 0, 0, 0
    # An Outer, a Lookup, or one of each in this order.
    for use in uses:
        steps, made, parts = _chain(use.right.shape[-1]), 1, []
        if outer := isinstance(use, Outer):
            steps, made = steps + _chain(use.left.shape[-1]), 2
        else:
            equal = use.ids[:, :, tf.newaxis] == use.ids[:, tf.newaxis, :]
            equal = tf.cast(equal, dtype)
        for rows, columns, weight in _strips(use.right.shape[1]):
            met = _gram(use.right[:, rows], use.right[:, columns])
            parts.append(_lengths(met))
            if outer:
                same = _gram(use.left[:, rows], use.left[:, columns])
                parts[-1] *= _lengths(same)
            else:
                same = equal[:, rows, columns]
            terms.append(_total(same * met if weight is None else same * met * weight))
        length = tf.concat(parts, axis=1)
        lengths.append(_total(length))
        if outer:
            squares.append(tf.square(lengths[-1]))
        else:
            both = length[:, :, tf.newaxis] * length[:, tf.newaxis, :]
            squares.append(_total(equal * both))
        grams, widths = max(grams, made), max(widths, steps)
        if dtype == tf.float64 or not _is_short(use.right.shape[1]):
            positions += use.right.shape[1] or tf.shape(use.right)[1]
    positions = tf.cast(positions * (2 if dtype == tf.float64 else 1), tf.float64)
    if len(uses) == 2:
        outer, lookup = uses
        # a_s[id_t] for t of the lookup, s of the product: [B, S, T].
        met = tf.gather(outer.left, lookup.ids, axis=2, batch_dims=1)
        terms.append(2 * _total(met * _gram(outer.right, lookup.right)))
        squares.append(2 * lengths[0] * lengths[1])
    return Squared(
        dtype,
        tf.add_n(terms),
        tf.add_n(squares),
        tf.square(tf.add_n(lengths)),
        # The sums over positions, a product of two entries, and conversions.
        _exponent(dtype, grams, widths + positions + 5),
    )


def norm_and_bound(squares: Sequence[Squared]) -> tuple[tf.Tensor, tf.Tensor]:
    """The norm over all weights, from the `squared_norms` of each, and its bound.

    Returns:
      norms: [B] float32 (float64), as computed.
      bounds: [B], above 0: a row with factor c adds at most c · bound to the computed
        sum. Infinite where it is not a finite number.
    """
    dtypes, *columns, exponents = zip(*squares)
    total, absolute, magnitude = map(tf.stack, columns)  # [weights, B]
    # Rounding can leave a vanishing norm just below zero, and infinities of both signs
    # a NaN.
    total = tf.where(tf.math.is_finite(total), tf.maximum(total, 0), np.inf)
    norm = tf.reduce_sum(total, axis=0)
    h = tf.stack([tf.cast(each, tf.float64) for each in exponents])[:, tf.newaxis]
    error = tf.reduce_sum((h + 8 * h * h) * absolute, axis=0)
    dtype = tf.float32 if tf.float32 in dtypes else tf.float64
    rounding = _exponent(dtype, 1, 2)
    length = tf.sqrt(tf.reduce_sum(magnitude, axis=0))
    bounds = tf.sqrt(norm + error + _TINY_SQUARE)
    bounds += (rounding + rounding * rounding) * length
    # For what is computed from here on. Bound, C, quotient and coefficient are rounded:
    # 2 eps where a device divides to nearest, and some are several units off.
    bounds = tf.cast(bounds * (1 + 8 * np.finfo(dtype.as_numpy_dtype).eps), dtype)
    bounds = tf.where(tf.math.is_finite(bounds), bounds, np.inf)
    return tf.cast(tf.sqrt(norm), dtype), bounds


def _exponent(dtype: tf.DType, rounded: int, steps: float | tf.Tensor) -> float:
    """The h of a term that went through `rounded` products and `steps` roundings.

    (1 + p)^2 ≤ e^2p and (1 - p)^2 ≥ e^-(2.02 p) for p ≤ 2^-7; likewise for u.
    """
    _, operand, step = arithmetic(dtype)
    return 1.01 * (2 * rounded * operand + steps * step)


def _gram(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """The product one · otherᵀ, [B, T, S], of [B, T, m] and [B, S, m].

    Long inner products are cut into panels, whose results are added up: in whatever
    order a device adds, a term meets at most `_chain(m)` roundings, not m.
    """
    width = one.shape[-1]
    if width <= _UNCUT:  # without a copy
        return factored.product(one, other, transpose_b=True)
    panels = [slice(begin, begin + _PANEL) for begin in range(0, width, _PANEL)]
    return tf.add_n(
        [factored.product(one[..., p], other[..., p], transpose_b=True) for p in panels]
    )


def _strips(positions: int | None) -> Iterator[tuple[slice, slice, Any]]:
    """Rows and columns of parts of a Gram matrix, and how often each column counts.

    XLA computes little more than its upper half; elsewhere copies would cost more.
    """
    if positions is None or _is_short(positions) or not factored.compiled_by_xla():
        yield slice(None), slice(None), None
        return
    size = -(-positions // _STRIPS)
    for k in range(0, positions, size):  # a column right of the square counts twice
        weights = [1.0] * size + [2.0] * positions
        yield slice(k, k + size), slice(k, None), weights[: positions - k]


def _chain(terms: int) -> int:
    """The most roundings that a term of `_gram`'s inner products goes through."""
    return terms if terms <= _UNCUT else _PANEL + (terms - 1) // _PANEL


def _lengths(gram: tf.Tensor) -> tf.Tensor:
    """‖a_t‖ for each position, [B, T], from the Gram matrix [B, T, T]."""
    return tf.sqrt(tf.linalg.diag_part(gram) + _TINY_POSITION)


def _total(terms: tf.Tensor) -> tf.Tensor:
    """Σ over all but the first axis, [B] float64: along the last one, then in float64.

    A term goes through as many roundings as the last axis is long, in whatever order a
    device adds, or none if it is short; in float64, as all summed axes together.
    """
    if _is_short(terms.shape[-1]):
        terms = tf.cast(terms, tf.float64)
    partial = tf.cast(tf.reduce_sum(terms, axis=-1), tf.float64)
    return tf.reduce_sum(partial, range(1, partial.shape.rank))


def _is_short(axis: int | None) -> bool:
    return axis is not None and axis <= _FEW


def _sum_of_squares(values: tf.Tensor) -> tuple[tf.Tensor, int]:
    """‖values‖² for each example, and how many roundings a square goes through."""
    rows, *sizes = values.shape.as_list()
    length, block = math.prod(sizes), sizes[-1] if sizes[1:] else 0
    # Where XLA compiles, rows of a matrix: to cut them, a TPU would copy them first.
    if not 0 < block <= _UNCUT or not factored.compiled_by_xla():
        block = max(k for k in range(1, _BLOCK + 1) if length % k == 0)
        values = tf.reshape(values, [rows, length // block, block])
    # In float64 the second sum rounds as the first does.
    steps = block + length // block if values.dtype == tf.float64 else block
    return _total(tf.square(values)), steps

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
in both directions. The Gram matrices cost T²(m + n) multiplications, in addition to the
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

Everything here is in float32 (float64 for float64 factors), whatever the layers compute
in; `gradient_norms` says how precisely a device multiplies float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Union

import tensorflow as tf

from tfdpsq.privacy.fast import products


class Outer(NamedTuple):
    """Example i's gradient is Σ_t left[i, t] ⊗ right[i, t]."""

    left: tf.Tensor  # [B, T, m] float
    right: tf.Tensor  # [B, T, n] float


class Lookup(NamedTuple):
    """Example i's gradient is Σ_t e(ids[i, t]) ⊗ right[i, t], e a unit vector."""

    ids: tf.Tensor  # [B, T] integers below m
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
    """Per-example gradients of a weight that was broadcast along some axes.

    Args:
      gradient: [B, ...] float, by the tensor that the weight was broadcast to.
      shape: the weight's shape, aligned with the last axes of `gradient`.

    Returns:
      [B, *shape], summed over all axes that the weight was broadcast along.
    """
    shape = list(shape)
    missing = gradient.shape.rank - 1 - len(shape)
    axes = [1 + axis for axis in range(missing)]
    axes += [1 + missing + axis for axis, size in enumerate(shape) if size == 1]
    return tf.reshape(tf.reduce_sum(gradient, axes), [-1, *shape])


def merge(uses: Sequence[Use], shape: Sequence[int]) -> list[Use]:
    """All uses of one weight, in the cheapest form that keeps their cross terms.

    Args:
      uses: of the weight, by the same B examples.
      shape: the weight's shape.

    Returns:
      A single `Direct`, or at most one `Outer` and one `Lookup`, `products.pinned`,
      for norm and sum to have the same numbers; nothing of no use.
    """
    return [type(use)(*map(products.pinned, use)) for use in _merged_uses(uses, shape)]


def _merged_uses(uses: Sequence[Use], shape: Sequence[int]) -> list[Use]:
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
    """The use with every `size` consecutive rows made one; `size` divides B.

    Their gradients add up, which for factors is no arithmetic at all: the positions
    of all of them become positions of one, and the cross terms between them follow.
    """
    if size == 1:
        return use
    if isinstance(use, Direct):
        shape = use.gradients.shape
        apart = tf.reshape(use.gradients, [shape[0] // size, size, *shape[1:]])
        return Direct(tf.reduce_sum(apart, axis=1))

    def joined(factor: Any) -> Any:
        rows, length, *width = factor.shape
        length = -1 if length is None else size * length
        return tf.reshape(factor, [rows // size, length, *width])

    return type(use)(*(joined(factor) for factor in use))


def cleaned(use: Use, keep: tf.Tensor) -> Use:
    """The use with exact zeros for examples i where keep[i], [B] bool, is false.

    A factor 0 would not do it: 0 · NaN is NaN, and in the product that sums over
    examples it would spoil all of them.
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
        factors = tf.cast(factors, use.gradients.dtype)
        return tf.reshape(products.sum_of_rows(factors, use.gradients), shape)
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
    if isinstance(use, Lookup):
        left = tf.one_hot(use.ids, shape[0], dtype=use.right.dtype)
    else:
        left = use.left
    gradients = products.formed(left, use.right)
    return tf.reshape(gradients, [use.right.shape[0], *shape])


def _product_is_cheaper(use: Outer) -> bool:
    length, rows, columns = use.left.shape[1], use.left.shape[2], use.right.shape[2]
    if length is None:  # then neither cost is known; the factors are there already
        return False
    return rows * columns < 2 * length * (rows + columns)


def _concatenated(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].dtype.is_integer:
        parts = [tf.cast(part, tf.int64) for part in parts]
    return tf.concat(parts, axis=1)


def _column(values: tf.Tensor) -> list[int]:
    """The shape that lets one number per example multiply `values`."""
    return [-1] + [1] * (values.shape.rank - 1)

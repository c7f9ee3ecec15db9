"""Every product that a norm or a clipped sum depends on, and how far it may be off.

A device may multiply float32 tensors with less than float32's precision: a GPU rounds
both operands to TensorFloat-32, a TPU to bfloat16, unless it is instructed otherwise.
Here the products ask for the highest precision that can be had, and `arithmetic` says
what they get; `gradient_norms` lowers the clipping factors by what that may cost.

| where the product runs | operands rounded to | by |
|---|---|---|
| CPU | not rounded | |
| GPU or TPU, compiled by XLA | three bfloat16 words at worst | `HIGHEST` precision |
| GPU, TensorFloat-32 off (`true_float32`) | not rounded | |
| GPU, TensorFloat-32 on | TensorFloat-32 | TensorFlow's default |
| TPU, not compiled | bfloat16 | the device's default |

Only products are listed: elementwise operations and reductions run in float32 on all
of these devices. Nor are products that form an example's gradient (`formed`, `einsum`):
it is clipped as it came out, so they are part of the function, like the backward pass.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

from tfdpsq import validation


class Arithmetic(NamedTuple):
    """Bound on the error of one product.

    Attributes:
      name: of the precision, for the record.
      operand: p; each operand may be rounded to (1 + δ) times itself, |δ| ≤ p.
      step: u; each multiplication and each addition, in whatever order, may be off by
        a factor 1 + δ, |δ| ≤ u.
    """

    name: str
    operand: float
    step: float


# Accumulators of GPUs and TPUs may truncate where a CPU rounds: twice the roundoff. So
# may a GPU where it shortens a float32 to TensorFloat-32's 11 bits.
_FLOAT64 = Arithmetic("float64", 0.0, 2.0**-53)
_FLOAT32 = Arithmetic("float32", 0.0, 2.0**-24)
_FLOAT32_ELSEWHERE = Arithmetic("float32", 0.0, 2.0**-23)
# Six products of bfloat16 words, the smallest three of nine left out. Where words are
# cut off, the second is less than 2^-7 and the third less than 2^-15 of a first one of
# 1: what is left out, 2 · 2^-22 of the product of the operands, is (1 + p)^2 - 1. Where
# they are rounded to nearest it is an eighth of that.
_HIGHEST = Arithmetic("float32 (XLA, highest)", 2.0**-22, 2.0**-23)
_TENSOR_FLOAT_32 = Arithmetic("TensorFloat-32", 2.0**-10, 2.0**-23)
_BFLOAT16 = Arithmetic("bfloat16", 2.0**-8, 2.0**-23)

# Variables by which oneDNN computes float32 in fewer bits.
_ONEDNN_MODES = (
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "TF_SET_ONEDNN_FPMATH_MODE",
)
# TensorFlow's graph rewrites that compute float32 in 16 bits.
_REWRITES = "auto_mixed_precision"
# Terms of an inner product that are added up at a time; see `gram`.
_PANEL = 1024


def arithmetic(dtype: tf.DType, compiled: bool | None = None) -> Arithmetic:
    """The precision of the products that are made, or traced, at this moment.

    Args:
      dtype: of their operands, float32 or float64.
      compiled: by XLA; `None` for what is so at this moment.
    """
    if dtype == tf.float64:
        return _FLOAT64
    gpus, tpus = (tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))
    if not gpus and not tpus:
        return _FLOAT32
    if compiled_by_xla() if compiled is None else compiled:
        return _HIGHEST
    if tpus:
        return _BFLOAT16
    if tf.config.experimental.tensor_float_32_execution_enabled():
        return _TENSOR_FLOAT_32
    return _FLOAT32_ELSEWHERE


def precision_in_words(jit_compile: bool) -> str:
    """Describes the products of a private step, for its certificate.

    Args:
      jit_compile: whether the step is compiled by XLA; on a TPU it always is.
    """
    tpu = isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)
    with true_float32():
        name = arithmetic(tf.float32, jit_compile or tpu).name
    return (
        f"{name}; clipping factors follow from an upper bound on each gradient's norm "
        "that includes rounding"
    )


def require_true_arithmetic() -> None:
    """Refuses variables of the process that make floating point another one.

    XLA's fast math takes it that nothing is NaN or infinite, so that a row without a
    finite gradient would count, without bound. oneDNN's modes round what norms are made
    of to 16 bits, of which no bound knows.

    Raises:
      InputError: names the variable and its value.
    """
    for flag in _xla_flags():
        name, _, value = flag.partition("=")
        if name.endswith("enable_fast_math") and value.lower() not in ("false", "0"):
            raise validation.InputError(
                f"XLA_FLAGS has {validation.shown(flag)}, under which a row without a "
                "finite gradient could move the weights without bound. Leave it out."
            )
    for name in _ONEDNN_MODES:
        value = os.environ.get(name, "")
        if value.lower() not in ("", "strict"):
            raise validation.InputError(
                f"{name} is {validation.shown(value)}, under which norms of gradients "
                "are computed in 16 bits where a processor can, beyond the bound on "
                "their rounding. Unset it."
            )


def _xla_flags() -> list[str]:
    """Returns the flags of XLA, whose variable may name a file of them."""
    given = os.environ.get("XLA_FLAGS", "")
    if not given.lstrip().startswith("-"):
        with contextlib.suppress(OSError), open(given, errors="replace") as file:
            given = file.read()
    return [flag.strip("'\"") for flag in given.split()]


def exponent(dtype: tf.DType, products: int, steps: float | tf.Tensor) -> float:
    """The h within which roundings stay: a factor between e^-h and e^h.

    (1 + p)^2 ≤ e^2p and (1 - p)^2 ≥ e^-(2.02 p) for p ≤ 2^-7; likewise for u.

    Args:
      dtype: of the operands.
      products: how many products of two rounded operands a term went through.
      steps: how many multiplications and additions it went through besides.

    Returns:
      h, a number, or a tensor if `steps` is one.
    """
    _, operand, step = arithmetic(dtype)
    return 1.01 * (2 * products * operand + steps * step)


def chain(terms: int) -> int:
    """The most roundings that a term of one of `gram`'s inner products goes through."""
    return min(terms, _PANEL) + (terms - 1) // _PANEL


def product(
    one: tf.Tensor,
    other: tf.Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> tf.Tensor:
    """The matrix product over the last two axes, in the highest precision there is.

    Args:
      one: [..., k, l] float32 or float64.
      other: [..., l, n], of the same dtype and leading axes.
      transpose_a: `one` is [..., l, k].
      transpose_b: `other` is [..., n, l].

    Returns:
      [..., k, n].
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
    result.set_shape(
        [
            *one.shape[:-2],
            one.shape[-1 if transpose_a else -2],
            other.shape[-2 if transpose_b else -1],
        ]
    )
    return result


def einsum(equation: str, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """A product that makes per-example gradients, in free precision as `formed`."""
    return tf.einsum(equation, one, other)


def formed(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Per-example gradients, Σ_t left[i, t] ⊗ right[i, t], in free precision.

    The norm is that of the gradient as computed, which is also what enters the sum.

    Args:
      left: [B, T, m] float.
      right: [B, T, n] of the same dtype.

    Returns:
      [B, m, n].
    """
    return tf.matmul(left, right, transpose_a=True)


def pinned(values: tf.Tensor) -> tf.Tensor:
    """The values behind an XLA barrier, so that norm and sum read the same numbers.

    XLA may compute a cheap value once per use, and round it differently each time: the
    sum would then hold other numbers than the norm was taken of. (XLA for CPUs drops
    the barrier before fusion. No difference was found there in the cases tried.)
    """
    if not compiled_by_xla() or not values.dtype.is_floating:
        return values
    return xla.optimization_barrier(values)[0]


def sum_of_rows(factors: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Σ_i factors[i] · rows[i], a term rounded twice as an operand at most.

    Args:
      factors: [B] float32 or float64.
      rows: [B, ...] of the same dtype.

    Returns:
      [...].
    """
    if compiled_by_xla():
        # In one pass over the rows as they lie. For a product, a TPU copies them first.
        column = tf.reshape(factors, [-1] + [1] * (rows.shape.rank - 1))
        return tf.reduce_sum(rows * column, axis=0)
    count, *shape = rows.shape
    flat = tf.reshape(rows, [count, -1])
    return tf.reshape(product(tf.reshape(factors, [1, count]), flat), shape)


def gram(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """The product one · otherᵀ, long inner products in panels.

    The panels' results are added up by themselves, so that in whatever order a device
    adds, a term meets at most `chain(m)` roundings instead of m.

    Args:
      one: [B, T, m] float.
      other: [B, S, m] of the same dtype.

    Returns:
      [B, T, S].
    """
    width = one.shape[-1]
    return tf.add_n(
        [
            product(
                one[..., start : start + _PANEL],
                other[..., start : start + _PANEL],
                transpose_b=True,
            )
            for start in range(0, width, _PANEL)
        ]
        if width > _PANEL
        else [product(one, other, transpose_b=True)]
    )


@contextlib.contextmanager
def true_float32() -> Iterator[None]:
    """While inside, float32 is multiplied in float32; afterwards as it was before.

    TensorFlow keeps one switch for TensorFloat-32 for the whole process, which every
    operation looks at when it runs, so this must be open while a step is traced and
    while it runs. Its graph rewrites to 16 bits (`auto_mixed_precision`,
    `auto_mixed_precision_onednn_bfloat16`) would turn the products of norms and sums
    into such of 8 or 11 bits, of which no bound knows.
    """
    config, rewrites = tf.config.experimental, tf.config.optimizer
    before = config.tensor_float_32_execution_enabled()
    options = rewrites.get_experimental_options()
    to_16_bits = {
        name: on for name, on in options.items() if name.startswith(_REWRITES)
    }
    config.enable_tensor_float_32_execution(False)
    if any(to_16_bits.values()):
        rewrites.set_experimental_options(dict.fromkeys(to_16_bits, False))
    try:
        yield
    finally:
        config.enable_tensor_float_32_execution(before)
        if any(to_16_bits.values()):
            rewrites.set_experimental_options(to_16_bits)


def compiled_by_xla() -> bool:
    """Returns whether XLA compiles what is traced at this moment."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))

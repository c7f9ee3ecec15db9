"""The products that norms and clipped sums are made of, in the highest precision.

A device may multiply float32 tensors with less than float32's precision: a GPU rounds
both operands to TensorFloat-32, a TPU to bfloat16, unless it is instructed otherwise.
These products ask for the highest precision that can be had; `gradient_norms` says what
they get, and lowers the clipping factors by what that may cost.

Only products need this: elementwise operations and reductions run in float32 on all of
these devices. Nor do products that form an example's gradient (`formed`): it is clipped
as it came out, so they are part of the function, like the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

# TensorFlow's graph rewrites that compute float32 in 16 bits.
_REWRITES = "auto_mixed_precision"


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
    rows, columns = (-1 if transpose_a else -2), (-2 if transpose_b else -1)
    result.set_shape([*one.shape[:-2], one.shape[rows], other.shape[columns]])
    return result


def formed(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Per-example gradients, Σ_t left[i, t] ⊗ right[i, t], in free precision.

    The norm is that of the gradient as computed, which is also what enters the sum.
    Of [B, T, m] and [B, T, n] it is [B, m, n].
    """
    return tf.matmul(left, right, transpose_a=True)


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

    XLA may compute a cheap value once per use, and round it differently each time: the
    sum would then hold other numbers than the norm was taken of. (XLA for CPUs drops
    the barrier before fusion. No difference was found there in the cases tried.)
    """
    if not compiled_by_xla() or not values.dtype.is_floating:
        return values
    return xla.optimization_barrier(values)[0]


def compiled_by_xla() -> bool:
    """Returns whether XLA compiles what is traced at this moment."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


@contextlib.contextmanager
def true_float32() -> Iterator[None]:
    """While inside, float32 is multiplied in float32; afterwards as it was before.

    TensorFlow keeps one switch for TensorFloat-32 for the whole process, which every
    operation looks at when it runs, so this must be open while a step is traced and
    while it runs. Graph rewrites to 16 bits (`auto_mixed_precision`) are off, too: no
    bound on norms knows of them.
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

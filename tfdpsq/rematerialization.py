"""Rematerialization: what a layer computes is forgotten, and computed again if needed.

A layer run by `rematerialized` keeps its inputs alone and runs once more when its
gradient is asked for (Chen et al. 2016, arXiv:1604.06174): for about a third more time,
memory holds the insides of one layer instead of all.

A layer offers this by an attribute `rematerialize` and a method `pieces` with the
arguments of its `call`, which returns (function, tensors): function(*tensors) is what
`call` computes, and all that depends on data or chance, such as dropout's seeds, is
among the tensors. `privacy` runs such layers by the same pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def gradients_of(
    function: Callable[..., Any],
    tensors: Sequence[tf.Tensor],
    upstream: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
) -> list[Any]:
    """Returns gradients by floating tensors, then by variables, given the outputs'."""
    sources = [tensor for tensor in tensors if tensor.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        outputs = tf.nest.flatten(function(*tensors))
    return tape.gradient(
        outputs, [*sources, *variables], output_gradients=list(upstream)
    )


def rematerialized(
    function: Callable[..., Any],
    tensors: Sequence[tf.Tensor],
    differentiate: Callable[..., Sequence[Any]] = gradients_of,
) -> Any:
    """Runs function(*tensors), keeping nothing of it but the result.

    Args:
      function: of tensors and variables, to [B, ...] or a tuple that begins so.
      tensors: its arguments.
      differentiate: runs it again for its gradients, as `gradients_of` does.
    """

    @tf.custom_gradient
    def run(*tensors: Any) -> Any:
        def backward(*upstream: Any, variables: Any = ()) -> Any:
            delayed = _delayed(tensors, upstream[0])
            found = iter(differentiate(function, delayed, upstream, variables))
            gradients = [
                next(found) if tensor.dtype.is_floating else None for tensor in tensors
            ]
            return (gradients, list(found)) if variables else gradients

        return function(*tensors), backward

    return tf.autograph.experimental.do_not_convert(run)(*tensors)


def _delayed(
    tensors: Sequence[tf.Tensor], upstream: tf.Tensor
) -> tuple[tf.Tensor, ...]:
    """The tensors, but not before `upstream` [B, ...] is known.

    XLA, which heeds no control dependencies, would merge the second run with the first.
    So the dependency is one of data: each example's numbers get something added that is
    zero, or, where its own upstream gradient is NaN and the example lost anyway, next
    to zero. Nothing passes from one example to another.
    """
    rows = upstream.shape[0]
    first = tf.reshape(upstream, [rows or tf.shape(upstream)[0], -1])[:, 0]
    tiny = tf.constant(1e-38, tf.float32)
    zero = tf.where(tf.math.is_nan(first), tiny, tf.zeros_like(tiny))

    def delay(tensor: tf.Tensor) -> tf.Tensor:
        if not tensor.dtype.is_floating or tensor.shape[0] != rows:
            return tensor
        shape = [-1] + [1] * (tensor.shape.rank - 1)
        return tensor + tf.reshape(tf.cast(zero, tensor.dtype), shape)

    return tuple(delay(tensor) for tensor in tensors)

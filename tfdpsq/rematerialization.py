"""Rematerialization: what a layer computes is forgotten, and computed again if needed.

Backpropagation keeps every intermediate result of the forward pass. A layer run by
`rematerialized` keeps its inputs alone and runs once more when its gradient is asked
for (Chen et al. 2016, arXiv:1604.06174): for about a third more time, memory holds the
insides of one layer instead of all. The second run is the first to the last bit,
dropout included, so such a layer draws its random numbers from seeds that are among
its inputs.

A layer offers this by an attribute `rematerialize` and a method `pieces` with the
arguments of its `call`, which returns (function, tensors): function(*tensors) is what
`call` computes, the same each time, and all that depends on data or chance is among
the tensors. `privacy` runs such layers by the same pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# (function, tensors, upstream, variables) to gradients by the floating tensors, then by
# the variables; see `gradients_of`.
Differentiate = Callable[..., Sequence[Any]]


def gradients_of(
    function: Callable[..., Any],
    tensors: Sequence[tf.Tensor],
    upstream: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
) -> list[Any]:
    """Runs the function once more, and differentiates it.

    Returns:
      Gradients by its floating arguments, then by the variables; `None` where there
      is none. `upstream` are those by its outputs.
    """
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
    differentiate: Differentiate = gradients_of,
) -> Any:
    """Runs function(*tensors), keeping nothing of it but the result.

    Args:
      function: of tensors; returns a tensor [B, ...] or a tuple of tensors whose first
        is one. It may read variables.
      tensors: its arguments.
      differentiate: what runs it again for its gradients.

    Returns:
      What it returns. Gradients, those by variables included, are as ever. Works
      eagerly, in graphs, and under XLA.
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

    # Plain Python about tensors: nothing in it needs converting.
    return tf.autograph.experimental.do_not_convert(run)(*tensors)


def _delayed(
    tensors: Sequence[tf.Tensor], upstream: tf.Tensor
) -> tuple[tf.Tensor, ...]:
    """The tensors, but not before `upstream` [B, ...] is known.

    Without that the second run would be done, or by XLA merged with the first, long
    before it is wanted, and nothing saved. XLA heeds no control dependencies, so the
    dependency is one of data: each example's numbers get something added that is zero,
    or, where its own upstream gradient is NaN and the example lost anyway, next to
    zero. Nothing passes from one example to another.
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

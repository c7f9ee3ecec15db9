"""Engines: how the clipped sum of one microbatch is computed.

| engine | how | memory |
|---|---|---|
| `fast` | one forward and one backward pass; see `fast` | as a plain step |
| `rowwise` | one unit's gradient after the other; any layer | one gradient |
| `vectorized` | tensorflow-privacy's VectorizedDPKeras optimizer | a gradient a unit |
| `dpkeras` | tensorflow-privacy's DPKeras optimizer | a gradient a unit |

All give equal sums. tensorflow-privacy's optimizers clip here and do nothing else:
their noise multiplier is 0, since noise is added once per logical step, whatever the
replicas and microbatches, and their mean over units is undone, since the step divides
by the expected batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy import fast
from tfdpsq.privacy.fast import factored, gradient_norms, products
from tfdpsq.privacy.jacobian import FiniteTape
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.spec import ENGINES
from tfdpsq.privacy.terms import require_rows

# Why tensorflow-privacy cannot be had; empty where it can. It needs TensorFlow's
# estimators, which end with TensorFlow 2.15.
MISSING = ""
try:
    # Its optimizers mix what they get with `tf.keras`.
    if keras.layers.Layer is not tf.keras.layers.Layer:
        raise ImportError("it works on tf.keras, which is Keras 3 here")
    from tensorflow_privacy.privacy.dp_query.gaussian_query import GaussianSumQuery
    from tensorflow_privacy.privacy.optimizers import (
        dp_optimizer_keras,
        dp_optimizer_keras_vectorized,
    )
except Exception as error:  # on another TensorFlow it fails in several ways
    MISSING = f"{type(error).__name__}: {error}"


class Clipped(NamedTuple):
    """The clipped sum of one microbatch.

    Attributes:
      sums: per variable, the sum of clipped gradients, float32 (float64).
      losses: [rows], one per row; not to be trusted where weights are 0.
      complete: `True`, or a scalar bool tensor. Where that is false, some row had a
        gradient without a finite norm; such rows, and possibly rows next to them, were
        left out, and the caller must take the rows one by one so that only the guilty
        ones stay out.
    """

    sums: list[tf.Tensor]
    losses: tf.Tensor
    complete: tf.Tensor | bool


def require_engine(engine: str) -> str:
    """Returns the name of an engine that this environment has.

    Raises:
      InputError: no such engine, or tensorflow-privacy does not import.
    """
    validation.one_of("engine", engine, ENGINES)
    if MISSING and engine in ("vectorized", "dpkeras"):
        raise validation.InputError(
            f"engine {engine!r} is tensorflow-privacy's, which this environment does "
            f'not have ({MISSING}). Use engine "fast", which gives the same sums.'
        )
    return engine


def clipped_sum(
    engine: str,
    plan: PrivacyPlan,
    per_example_losses: Callable[[], tf.Tensor],
    variables: Sequence[tf.Variable],
    layers: Sequence[tf.Module],
    weights: tf.Tensor,
) -> Clipped:
    """The sum over units of each unit's clipped gradient; without ε, of all gradients.

    Args:
      engine: one of `spec.ENGINES`.
      plan: clip norm, and rows that are clipped together.
      per_example_losses: runs the model, and returns one loss per row, [rows].
      variables: what to differentiate by.
      layers: the model or layers that hold `variables`; used by engine "fast".
      weights: [rows], 0 for padding rows, which contribute nothing.
    """
    if not plan.spec.private:
        return _plain(per_example_losses, variables, weights)
    if engine == "fast":
        if not layers:
            raise validation.InputError(
                'engine "fast" must know the layers that hold the weights. Pass '
                "layers=[model]."
            )
        result = fast.clipped_sum(
            per_example_losses,
            layers,
            variables,
            plan.spec.clip_norm,
            weights=weights,
            rows_per_unit=plan.rows_clipped_together,
        )
        return Clipped(result.sums, result.losses, True)
    if engine == "rowwise":
        return _rowwise(plan, per_example_losses, variables, weights)
    return _by_jacobians(engine, plan, per_example_losses, variables, weights)


def _plain(
    per_example_losses: Callable[[], tf.Tensor],
    variables: Sequence[tf.Variable],
    weights: tf.Tensor,
) -> Clipped:
    """The ε = ∞ baseline: the same step without clipping."""
    with tf.GradientTape() as tape:
        losses = require_rows(per_example_losses())
        losses = tf.where(weights > 0, losses, 0.0)
        total = tf.reduce_sum(losses)
    gradients = tape.gradient(
        total, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return Clipped([tf.convert_to_tensor(g) for g in gradients], losses, True)


def _rowwise(
    plan: PrivacyPlan,
    per_example_losses: Callable[[], tf.Tensor],
    variables: Sequence[tf.Variable],
    weights: tf.Tensor,
) -> Clipped:
    """The clipped gradient of a microbatch that is one unit."""
    with tf.GradientTape() as tape:
        losses = require_rows(per_example_losses())
        if losses.shape[0] != plan.rows_clipped_together:
            raise validation.InputError(
                f'engine "rowwise" takes {plan.rows_clipped_together} rows at a time, '
                f"those of one unit, and got {losses.shape[0]}. Set microbatch_size to "
                "that."
            )
        losses = tf.where(weights > 0, losses, 0.0)
        total = tf.reduce_sum(losses)
    gradients = tape.gradient(
        total, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return Clipped(clipped_gradient(gradients, plan.spec.clip_norm), losses, True)


def clipped_gradient(
    gradients: Sequence[tf.Tensor], clip_norm: float, counts: tf.Tensor | bool = True
) -> list[tf.Tensor]:
    """One gradient, clipped as it was computed; zero where its norm is not finite.

    Args:
      gradients: by each variable.
      clip_norm: C, above 0.
      counts: scalar bool; where it is false, the result is zero.
    """
    found = [
        products.pinned(factored.full_precision(tf.convert_to_tensor(gradient)))
        for gradient in gradients
    ]
    squares = [
        gradient_norms.squared_norms([factored.Direct(gradient[tf.newaxis])])
        for gradient in found
    ]
    _, (bound,) = map(tf.unstack, gradient_norms.norm_and_bound(squares))
    factor = tf.minimum(tf.constant(clip_norm, bound.dtype) / bound, 1.0)
    used = tf.math.is_finite(bound) & counts
    # Not a product alone: 0 · NaN would not be 0.
    return [
        tf.where(used, tf.cast(factor, g.dtype) * g, tf.zeros_like(g)) for g in found
    ]


def _by_jacobians(
    engine: str,
    plan: PrivacyPlan,
    per_example_losses: Callable[[], tf.Tensor],
    variables: Sequence[tf.Variable],
    weights: tf.Tensor,
) -> Clipped:
    """Clips by one of tensorflow-privacy's optimizers, which never applies anything."""
    with tf.GradientTape() as tape:
        # A padding row's loss is exactly zero, and so is its gradient; `where` rather
        # than a product, as 0 · NaN would not be.
        losses = tf.where(weights > 0, require_rows(per_example_losses()), 0.0)
        by_unit = tf.reduce_sum(
            tf.reshape(losses, [-1, plan.rows_clipped_together]), axis=1
        )
    finite_tape = FiniteTape(tape)
    averaged = _optimizer(engine, plan.spec.clip_norm)._compute_gradients(
        by_unit, variables, tape=finite_tape
    )
    units = float(by_unit.shape[0])
    sums = [gradient * units for gradient, _ in averaged]
    return Clipped(sums, losses, finite_tape.all_finite)


def _optimizer(engine: str, clip_norm: float) -> Any:
    base = keras.optimizers.legacy.SGD
    if engine == "vectorized":
        made = dp_optimizer_keras_vectorized.make_vectorized_keras_optimizer_class(base)
        return made(l2_norm_clip=clip_norm, noise_multiplier=0.0, learning_rate=0.0)
    made = dp_optimizer_keras.make_keras_generic_optimizer_class(base)
    return made(dp_sum_query=GaussianSumQuery(clip_norm, 0.0), learning_rate=0.0)

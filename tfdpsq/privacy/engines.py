"""Engines: how the clipped sum of one microbatch is computed.

| engine | how | memory |
|---|---|---|
| `fast` | one forward and one backward pass; see `fast` | as a plain step |
| `rowwise` | one unit's gradient after the other; any layer | one gradient |
| `vectorized` | tensorflow-privacy's VectorizedDPKeras optimizer | a gradient a unit |
| `dpkeras` | tensorflow-privacy's DPKeras optimizer | a gradient a unit |

All give equal sums. tensorflow-privacy's optimizers only clip here: their noise is 0,
and their mean over units is undone.

An engine may also be a function of (plan, batch, variables) that returns the `Clipped`
of a whole logical batch, for losses whose rows read each other, such as one made of
`clipped_row_by_row`. It gets all M rows on every replica; the results are summed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Union

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy import fast
from tfdpsq.privacy.fast import factored, gradient_norms
from tfdpsq.privacy.fast.engine import require_rows
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.spec import ENGINES

Batch = Mapping[str, tf.Tensor]


class Clipped(NamedTuple):
    """The clipped sum of one microbatch, or of a logical batch.

    Attributes:
      sums: per variable, the sum of clipped gradients, float32 (float64).
      losses: [rows]; meaningless where weights are 0.
      complete: `True`, or a scalar bool tensor. If false, a row without a finite norm
        may have cost others theirs: the caller must take the rows one by one.
    """

    sums: list[tf.Tensor]
    losses: tf.Tensor
    complete: tf.Tensor | bool


# One of `ENGINES`, or a function that clips a whole logical batch.
Engine = Union[str, Callable[[PrivacyPlan, Batch, Sequence[tf.Variable]], Clipped]]


@functools.cache
def missing() -> str:
    """Returns why tensorflow-privacy does not import, or "".

    Its estimators end with TensorFlow 2.15. The import takes a second, and must not
    happen while a step is traced.
    """
    try:
        # Its optimizers mix what they get with `tf.keras`.
        if keras.layers.Layer is not tf.keras.layers.Layer:
            raise ImportError("it works on tf.keras, which is Keras 3 here")
        importlib.import_module("tensorflow_privacy")
    except Exception as error:  # on another TensorFlow it fails in several ways
        return f"{type(error).__name__}: {error}"
    return ""


def require_engine(engine: Engine) -> Engine:
    """Returns an engine; an InputError if this environment does not have it."""
    if callable(engine):
        return engine
    validation.one_of("engine", engine, ENGINES)
    if engine in ("vectorized", "dpkeras") and (problem := missing()):
        raise validation.InputError(
            f"engine {engine!r} needs tensorflow-privacy, which does not import "
            f'({problem}). Use engine "fast", which gives the same sums.'
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
      variables: see `train`, also for `layers`.
      layers: for engine "fast".
      weights: [rows], 0 for padding rows, which contribute nothing.
    """
    if engine == "fast" and plan.spec.private:
        if not layers:
            raise validation.InputError('engine "fast" needs layers=[model]')
        result = fast.clipped_sum(
            per_example_losses,
            layers,
            variables,
            plan.spec.clip_norm,
            weights=weights,
            rows_per_unit=plan.rows_clipped_together,
        )
        return Clipped(result.sums, result.losses, True)
    with _FiniteTape() as tape:
        # A padding row's loss is exactly zero, and so is its gradient; `where` rather
        # than a product, as 0 · NaN would not be.
        losses = tf.where(weights > 0, require_rows(per_example_losses()), 0.0)
        total = tf.reduce_sum(losses)
    if engine in ("vectorized", "dpkeras") and plan.spec.private:
        return _by_tensorflow_privacy(engine, plan, tape, losses, variables)
    gradients = tape.gradient(
        total, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
    if not plan.spec.private:
        return Clipped(gradients, losses, True)
    if losses.shape[0] != plan.rows_clipped_together:
        raise validation.InputError(
            f'engine "rowwise" takes one unit at a time, but microbatch_size is '
            f"{losses.shape[0]}. Set it to {plan.rows_clipped_together}."
        )
    return Clipped(_clipped(gradients, plan.spec.clip_norm), losses, True)


def clipped_row_by_row(
    plan: PrivacyPlan,
    losses: tf.Tensor,
    gradient: Callable[[tf.Tensor, Sequence[tf.Variable]], Sequence[tf.Tensor]],
    variables: Sequence[tf.Variable],
    weights: tf.Tensor,
) -> Clipped:
    """Clips the gradients of rows that read each other, one row at a time.

    Other engines tell gradients apart by what a layer ran on, so that each row of an
    in-batch softmax would need a copy of the batch. Here each row's gradient, of the
    size of the weights, is clipped as it was computed and added up. Memory does not
    grow with the batch.

    | what | follows from |
    |---|---|
    | each row adds at most C | the norm of the very numbers that are added |
    | a row without a finite norm adds exactly zero | its own gradient alone |
    | padding adds exactly zero | its weight 0 |
    | sensitivity (2n - 1)·C, n the static maximum | the above, for *any* gradients |

    The last line needs nothing of the loss: of two batches that differ by one row, one
    sum has a row more (C), and every other row may turn around (2C).

    Of R replicas, number r clips the rows r, r + R, r + 2R, …

    Args:
      plan: its clip norm; for ε = ∞ nothing is clipped.
      losses: [M] of the whole batch.
      gradient: maps coefficients [M], constants, and variables to the gradient of
        Σ_r coefficients[r] · losses[r] by each of them, dense.
      variables: to differentiate by.
      weights: [M], not above 0 for padding.
    """
    spec, least = plan.spec, 2 * plan.max_batch_size - 1
    if plan.rows_clipped_together > 1:
        raise validation.InputError(
            f"the plan clips {plan.rows_clipped_together} rows together, but rows that "
            "read each other are clipped one by one. Use units of one row."
        )
    if spec.private and spec.sensitivity_multiplier < least:
        raise validation.InputError(
            f"sensitivity_multiplier is {spec.sensitivity_multiplier}, but one of "
            f"{plan.max_batch_size} rows that read each other can move their sum by "
            f"{least} clip norms. Set it to {least}."
        )
    rows = weights.shape[0]
    replica = tf.distribute.get_replica_context()
    first, replicas = tf.constant(0), 1
    if replica is not None:
        first = tf.cast(replica.replica_id_in_sync_group, tf.int32)
        replicas = replica.num_replicas_in_sync
    if not spec.private:
        own = (weights > 0) & (tf.range(rows) % replicas == first)
        sums = gradient(tf.cast(own, losses.dtype), variables)
        return Clipped(list(sums), losses, True)
    used = tf.reduce_max(tf.where(weights > 0, tf.range(rows) + 1, 0))

    def add(row: tf.Tensor, *sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
        found = gradient(tf.one_hot(row, rows), variables)
        clipped = _clipped(found, spec.clip_norm, weights[row] > 0)
        return row + replicas, *(total + one for total, one in zip(sums, clipped))

    _, *sums = tf.while_loop(
        lambda row, *_: row < used,
        add,
        (first, *(tf.zeros(v.shape, factored.full_dtype(v)) for v in variables)),
        maximum_iterations=rows,
        parallel_iterations=1,
    )
    return Clipped(sums, losses, True)


def _clipped(
    gradients: Sequence[tf.Tensor], clip_norm: float, counts: tf.Tensor | bool = True
) -> list[tf.Tensor]:
    """One gradient, clipped as it was computed.

    It is zero where its norm is not finite, or the scalar `counts` is false.
    """
    found = [
        factored.pinned(factored.full_precision(tf.convert_to_tensor(gradient)))
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


def _by_tensorflow_privacy(
    engine: str,
    plan: PrivacyPlan,
    tape: _FiniteTape,
    losses: tf.Tensor,
    variables: Sequence[tf.Variable],
) -> Clipped:
    """Clips by an optimizer of tensorflow-privacy, which never applies anything.

    It takes the mean of a unit's losses, and of the units' clipped gradients.
    """
    from tensorflow_privacy.privacy.dp_query.gaussian_query import GaussianSumQuery
    from tensorflow_privacy.privacy.optimizers import (
        dp_optimizer_keras,
        dp_optimizer_keras_vectorized,
    )

    together = plan.rows_clipped_together
    units = losses.shape[0] // together
    options = {"num_microbatches": units, "learning_rate": 0.0}
    base = keras.optimizers.legacy.SGD
    if engine == "vectorized":
        made = dp_optimizer_keras_vectorized.make_vectorized_keras_optimizer_class(base)
        optimizer = made(
            l2_norm_clip=plan.spec.clip_norm, noise_multiplier=0.0, **options
        )
    else:
        made = dp_optimizer_keras.make_keras_generic_optimizer_class(base)
        query = GaussianSumQuery(plan.spec.clip_norm, 0.0)
        optimizer = made(dp_sum_query=query, **options)
    with tape:
        scaled = losses * together
    averaged = optimizer._compute_gradients(scaled, variables, tape=tape)
    sums = [gradient * float(units) for gradient, _ in averaged]
    return Clipped(sums, losses, tape.all_finite)


class _FiniteTape(tf.GradientTape):
    """A gradient tape whose Jacobians have zeros for rows without a finite norm.

    Attributes:
      all_finite: scalar bool, whether every row had one. If not, zeroed rows may be
        innocent: inside one batched product 0 · NaN is NaN.
    """

    all_finite: tf.Tensor | bool = True

    def jacobian(
        self, target: tf.Tensor, sources: Sequence[tf.Variable], **options: Any
    ) -> list[tf.Tensor]:
        """Returns the Jacobians, cleaned; see the class."""
        options["unconnected_gradients"] = tf.UnconnectedGradients.ZERO
        found = super().jacobian(target, sources, **options)
        jacobians = [tf.convert_to_tensor(jacobian) for jacobian in found]
        flat = [tf.reshape(j, [j.shape[0], -1]) for j in jacobians]
        squares = [tf.reduce_sum(tf.square(tf.cast(j, tf.float32)), 1) for j in flat]
        squared = tf.add_n(squares)
        finite = tf.math.is_finite(squared)
        self.all_finite = tf.reduce_all(finite)
        kept = [tf.where(finite[:, tf.newaxis], j, 0) for j in flat]
        return [
            factored.pinned(tf.reshape(k, j.shape)) for k, j in zip(kept, jacobians)
        ]

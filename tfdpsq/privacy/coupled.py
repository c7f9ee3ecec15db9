"""Clips the gradients of rows that read each other, one row at a time.

A loss such as the in-batch softmax reads the whole batch. Engines that clip by row
tell gradients apart by what a layer ran on, so that each row would need copies of the
batch of its own: n² texts at once. Here the loss differentiates itself instead
(`terms.Coupled`): row by row, each gradient has the size of the weights, is clipped as
it was computed, and added up. Memory does not grow with the batch, whatever the model,
and no rule for its layers is needed.

| what | follows from |
|---|---|
| each row adds at most C | the norm of the very numbers that are added |
| a row without a finite norm adds exactly zero | its own gradient alone |
| padding adds exactly zero | its weight 0 |
| sensitivity (2n - 1)·C, n the static maximum | the three above, for *any* gradients |

The last line needs nothing of the loss: of two batches that differ by one row, one
sum has a row more (C), and every other row may turn around (2C). A plan with a smaller
`sensitivity_multiplier` is refused.

Of R replicas, each holds the whole batch and clips the rows r, r + R, r + 2R, …; what
it adds up is summed over replicas like any other clipped sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy.engines import clipped_gradient
from tfdpsq.privacy.fast import factored
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.terms import Coupled


def require_covered(plan: PrivacyPlan) -> None:
    """Refuses a plan whose sensitivity does not cover rows that read each other.

    Raises:
      InputError: `sensitivity_multiplier` below 2n - 1, or several rows a unit.
    """
    spec = plan.spec
    if plan.rows_clipped_together > 1:
        raise validation.InputError(
            f"coupled rows are clipped one by one, but the plan clips "
            f"{plan.rows_clipped_together} together. Use units of one row, without "
            "clip_groups."
        )
    least = 2 * plan.max_batch_size - 1
    if spec.private and spec.sensitivity_multiplier < least:
        raise validation.InputError(
            f"sensitivity_multiplier is {spec.sensitivity_multiplier}, but one row can "
            f"move the sum of up to {plan.max_batch_size} coupled rows by {least} clip "
            f"norms. Set it to {least} and max_batch_size to {plan.max_batch_size}."
        )


def require_coupled(found: object) -> Coupled:
    """Returns what a loss function returned, if it is coupled.

    Raises:
      InputError: it is not, or its losses have no static length.
    """
    if not isinstance(found, Coupled) or found.losses.shape.rank != 1:
        raise validation.InputError(
            "coupled is True, but the loss function does not return Coupled with one "
            "loss per row. Return privacy.Coupled, or leave coupled out."
        )
    return found


def own_rows(weights: tf.Tensor) -> tf.Tensor:
    """[rows] bool: real rows that this replica differentiates."""
    first, every = _dealt()
    places = tf.range(weights.shape[0])
    return (weights > 0) & (places % every == first)


def clipped_sum(
    found: Coupled,
    variables: Sequence[tf.Variable],
    clip_norm: float,
    weights: tf.Tensor,
) -> list[tf.Tensor]:
    """Computes the sum of the clipped gradients of this replica's rows.

    Args:
      found: the losses of the whole batch.
      variables: to differentiate by.
      clip_norm: C, above 0.
      weights: [rows], not above 0 for padding.

    Returns:
      For each variable the sum, float32 (float64 for float64 variables).
    """
    rows = weights.shape[0]
    first, every = _dealt()
    used = tf.reduce_max(tf.where(weights > 0, tf.range(rows) + 1, 0))

    def add(row: tf.Tensor, *sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
        gradients = found.gradient(tf.one_hot(row, rows), variables)
        clipped = clipped_gradient(gradients, clip_norm, weights[row] > 0)
        return row + every, *(total + one for total, one in zip(sums, clipped))

    zeros = [tf.zeros(v.shape, factored.full_dtype(v)) for v in variables]
    _, *sums = tf.while_loop(
        lambda row, *_: row < used,
        add,
        (first, *zeros),
        maximum_iterations=rows,
        parallel_iterations=1,
    )
    return sums


def _dealt() -> tuple[tf.Tensor, int]:
    """Returns (the first row, the distance to the next) of this replica."""
    replica = tf.distribute.get_replica_context()
    if replica is None:
        return tf.constant(0), 1
    return (
        tf.cast(replica.replica_id_in_sync_group, tf.int32),
        replica.num_replicas_in_sync,
    )

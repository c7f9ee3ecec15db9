"""One logical DP-SGD step over physical microbatches, as one compiled function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy.optimizers import LogicalStep

Batch = Mapping[str, tf.Tensor]


def make_logical_step(
    row_losses: Callable[[Batch], tf.Tensor],
    variables: Sequence[tf.Variable],
    optimizer: LogicalStep,
    microbatch_size: int,
    rows_are_independent: bool = True,
) -> Callable[[Batch, tf.Tensor], tf.Tensor]:
    """Builds the step: accumulate clipped sums, noise once, update once.

    Args:
      row_losses: maps a microbatch (a dict of tensors with `microbatch_size`
        leading rows) to one loss per row, [microbatch_size] float32. It runs the
        model in training mode.
      variables: the trainable variables.
      optimizer: made by `make_optimizer`.
      microbatch_size: rows differentiated at a time.
      rows_are_independent: whether row i's loss depends on row i alone. If not,
        the plan's sensitivity must account for it, and all rows of a logical
        batch must form one microbatch.

    Returns:
      A function of (batch, count): a dict of tensors with M leading rows, M a
      multiple of `microbatch_size`, whose "weights" [M] are 0 for padding, and
      the number of leading rows in use, a scalar int32. Microbatches past
      `count` hold padding only and are skipped: their clipped sum is zero. The
      function updates the variables and returns the mean loss of the rows in
      use (those that are no number left out), which is a private measurement. An
      empty batch still takes a noisy step. It can be wrapped in `tf.function`,
      `jit_compile=True` included.

    Raises:
      InputError: `microbatch_size` below one, or it does not divide M.
    """
    validation.positive_integer("microbatch_size", microbatch_size)
    variables = list(variables)
    # Slots must exist before a compiled function first runs.
    optimizer._create_all_weights(variables)

    def differentiate(part: Batch):
        with tf.GradientTape() as tape:
            # A padding row's loss is exactly zero, and so is its gradient;
            # `where` rather than a product, as 0 · NaN would not be.
            losses = tf.where(part["weights"] > 0, row_losses(part), 0.0)
        return losses, *optimizer.clipped_sum(losses, variables, tape)

    def one_by_one(part: Batch) -> list[tf.Tensor]:
        def add(row, *sums):
            alone = {
                name: tf.slice(
                    value,
                    [row] + [0] * (value.shape.rank - 1),
                    [1, *value.shape[1:]],
                )
                for name, value in part.items()
            }
            _, clipped, _ = differentiate(alone)
            return row + 1, *(total + new for total, new in zip(sums, clipped))

        _, *sums = tf.while_loop(
            lambda row, *_: row < microbatch_size,
            add,
            (tf.constant(0), *zero_sums()),
            maximum_iterations=microbatch_size,
        )
        return sums

    def zero_sums() -> list[tf.Tensor]:
        return [tf.zeros(v.shape, v.dtype) for v in variables]

    def step(batch: Batch, count: tf.Tensor) -> tf.Tensor:
        rows = batch["weights"].shape[0]
        if rows % microbatch_size:
            raise validation.InputError(
                f"the batch has {rows} rows, which microbatch_size "
                f"{microbatch_size} does not divide. Pad it to a multiple."
            )

        def accumulate(index, loss_sum, *sums):
            # tf.slice, not [a:b]: its size is static, which XLA insists on.
            part = {
                name: tf.slice(
                    value,
                    [index * microbatch_size] + [0] * (value.shape.rank - 1),
                    [microbatch_size, *value.shape[1:]],
                )
                for name, value in batch.items()
            }
            losses, clipped, separate = differentiate(part)
            if rows_are_independent and optimizer.plan.spec.private:
                # A row without a finite gradient must cost nobody else: were the
                # rows beside it lost too, one unit could move the sum by a whole
                # microbatch of clip norms. So those are taken one by one. Rows
                # that do depend on each other stay as they are; a sensitivity
                # that bounds every row's change covers their loss as well.
                clipped = tf.cond(separate, lambda: clipped, lambda: one_by_one(part))
            return (
                index + 1,
                loss_sum
                + tf.reduce_sum(tf.where(tf.math.is_finite(losses), losses, 0.0)),
                *(total + new for total, new in zip(sums, clipped)),
            )

        used = (count + microbatch_size - 1) // microbatch_size
        _, loss_sum, *sums = tf.while_loop(
            lambda index, *_: index < used,
            accumulate,
            (tf.constant(0), tf.constant(0.0), *zero_sums()),
            maximum_iterations=rows // microbatch_size,
        )
        optimizer.apply_gradients(zip(optimizer.privatize(sums), variables))
        return loss_sum / tf.maximum(tf.cast(count, tf.float32), 1.0)

    return step

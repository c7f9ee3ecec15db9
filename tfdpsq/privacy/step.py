"""One logical DP-SGD step over physical microbatches, as one compiled function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy.optimizers import Clipped, LogicalStep
from tfdpsq.privacy.randomness import replayable
from tfdpsq.privacy.terms import Losses, require_losses

Batch = Mapping[str, tf.Tensor]


def make_logical_step(
    per_example_losses: Callable[[Batch], Losses],
    variables: Sequence[tf.Variable],
    optimizer: LogicalStep,
    microbatch_size: int,
    layers: Iterable[tf.Module] = (),
    rows_are_independent: bool = True,
    copies_are_separate: bool = False,
) -> Callable[..., tf.Tensor]:
    """Builds the step: accumulate clipped sums, noise once, update once.

    Args:
      per_example_losses: maps a microbatch (a dict of tensors with `microbatch_size`
        leading rows) to one loss per row, [microbatch_size] float32, or to `Terms`.
        It runs the model in training mode.
      variables: the trainable variables.
      optimizer: made by `make_optimizer`.
      microbatch_size: rows differentiated at a time; a multiple of the plan's
        `rows_clipped_together`.
      layers: the model, or the layers that hold `variables`. Engine "fast" needs
        them; with every engine their dropout draws from secret keys that a resumed
        run repeats (see `randomness`).
      rows_are_independent: whether row i's loss depends on row i alone. If not,
        the plan's sensitivity must account for it, and all rows of a logical batch
        must form one microbatch.
      copies_are_separate: for rows that are not independent and engine "fast", which
        tells gradients apart by what a layer ran on: declares that every loss, or
        value of `Terms`, runs the layers on copies of its own of all rows that it
        reads. `fast.check` tests that, and `train` calls it.

    Returns:
      A function of (batch, count): a dict of tensors with M leading rows, M a
      multiple of `microbatch_size`, whose "weights" [M] are 0 for padding, and
      the number of leading rows in use, a scalar int32. Microbatches past
      `count` hold padding only and are skipped: their clipped sum is zero. The
      function updates the variables and returns the mean loss of the rows in
      use (those that are no number left out), which is a private measurement. An
      empty batch still takes a noisy step. Where the plan is secure, a third argument
      is what `secure_noise` drew for this step. It can be wrapped in `tf.function`,
      `jit_compile=True` included, and run by `Strategy.run`, each replica on rows
      of its own; noise and result are then the same on all. Of R replicas, number r
      takes the microbatches r, r + R, r + 2R, … of the whole batch.

    Raises:
      InputError: `microbatch_size` below one, or it does not divide M, or parts
        rows that are clipped together; rows that are not independent, nor separate
        copies, with engine "fast".
    """
    validation.positive_integer("microbatch_size", microbatch_size)
    variables, layers = list(variables), list(layers)
    private = optimizer.plan.spec.private
    together = optimizer.plan.rows_clipped_together
    if microbatch_size % together:
        raise validation.InputError(
            f"microbatch_size {microbatch_size} parts the {together} rows that are "
            "clipped together (rows_per_unit, or a clip group's). Use a multiple of it."
        )
    separate = rows_are_independent or copies_are_separate
    if not separate and private and optimizer.engine == "fast":
        raise validation.InputError(
            'engine "fast" tells gradients apart by row, but here each loss depends '
            'on several rows. Use engine "dpkeras" or "vectorized", or let every loss '
            "run the layers on copies of its own (copies_are_separate)."
        )
    optimizer.prepare(variables)

    def differentiate(part: Batch, number: tf.Tensor) -> Clipped:
        def losses() -> Losses:
            seed = optimizer.dropout_seed
            with replayable(layers, seed, optimizer.iterations, number):
                return require_losses(per_example_losses(part))

        return optimizer.clipped_sum(losses, variables, layers, part["weights"])

    def one_by_one(part: Batch, number: tf.Tensor) -> list[tf.Tensor]:
        def add(row, *sums):
            # Dropout of its own for every unit, as in the batch: with the microbatch's
            # number again all units would share one draw, which whoever spoilt the
            # batch would have brought about.
            own = (1 + tf.cast(row // together, tf.int64)) * (1 << 32)
            clipped = differentiate(_slice(part, row, together), own + number)
            return row + together, *_added(sums, clipped.sums)

        _, *sums = tf.while_loop(
            lambda row, *_: row < microbatch_size,
            add,
            (tf.constant(0), *zero_sums()),
            maximum_iterations=microbatch_size // together,
            parallel_iterations=1,
        )
        return sums

    def zero_sums() -> list[tf.Tensor]:
        return [tf.zeros(v.shape, _sum_dtype(v)) for v in variables]

    def step(
        batch: Batch, count: tf.Tensor, noise: Sequence[tf.Tensor] = ()
    ) -> tf.Tensor:
        rows = batch["weights"].shape[0]
        if rows % microbatch_size:
            raise validation.InputError(
                f"the batch has {rows} rows, which microbatch_size "
                f"{microbatch_size} does not divide. Pad it to a multiple."
            )
        microbatches = rows // microbatch_size
        replica = tf.distribute.get_replica_context()
        first, every = 0, 1
        if replica is not None:
            first = replica.replica_id_in_sync_group
            every = replica.num_replicas_in_sync
        first = tf.cast(first, tf.int64)

        def accumulate(index, loss_sum, losses_counted, *sums):
            part = _slice(batch, index * microbatch_size, microbatch_size)
            # As `batches.split_over_replicas` deals them: of the whole batch, this is
            # the same one whatever the replicas, and so is its dropout.
            number = first + tf.cast(index, tf.int64) * every
            clipped = differentiate(part, number)
            new = clipped.sums
            if rows_are_independent and private and clipped.complete is not True:
                # A row without a finite gradient must cost nobody else: were the
                # rows beside it lost too, one unit could move the sum by a whole
                # microbatch of clip norms. So those are taken one by one. Rows
                # that do depend on each other stay as they are; a sensitivity
                # that bounds every row's change covers their loss as well.
                new = tf.cond(
                    clipped.complete,
                    lambda: _cast(clipped.sums, variables),
                    lambda: one_by_one(part, number),
                )
            counted = tf.math.is_finite(clipped.losses) & (part["weights"] > 0)
            total = tf.reduce_sum(tf.where(counted, clipped.losses, 0.0))
            loss_sum += tf.cast(total, tf.float32)
            losses_counted += tf.reduce_sum(tf.cast(counted, tf.float32))
            return index + 1, loss_sum, losses_counted, *_added(sums, new)

        used = (count + microbatch_size - 1) // microbatch_size
        _, loss_sum, losses_counted, *sums = tf.while_loop(
            lambda index, *_: index < used,
            accumulate,
            (tf.constant(0), tf.constant(0.0), tf.constant(0.0), *zero_sums()),
            maximum_iterations=microbatches,
            # Microbatches hardly wait for each other, and TensorFlow would run ten at
            # once: ten times the activations.
            parallel_iterations=1,
        )
        optimizer.update(optimizer.privatize(sums, noise), variables)
        losses = [loss_sum, losses_counted]
        if replica is not None and replica.num_replicas_in_sync > 1:
            losses = replica.all_reduce(tf.distribute.ReduceOp.SUM, losses)
        return losses[0] / tf.maximum(losses[1], 1.0)

    return step


def _slice(batch: Batch, start: tf.Tensor, rows: int) -> dict[str, tf.Tensor]:
    # tf.slice, not [a:b]: its size is static, which XLA insists on.
    return {
        name: tf.slice(
            value, [start] + [0] * (value.shape.rank - 1), [rows, *value.shape[1:]]
        )
        for name, value in batch.items()
    }


def _added(
    sums: Sequence[tf.Tensor], new: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, ...]:
    return tuple(total + tf.cast(one, total.dtype) for total, one in zip(sums, new))


def _cast(
    sums: Sequence[tf.Tensor], variables: Sequence[tf.Variable]
) -> list[tf.Tensor]:
    return [tf.cast(one, _sum_dtype(v)) for one, v in zip(sums, variables)]


def _sum_dtype(variable: tf.Variable) -> tf.DType:
    return tf.float64 if variable.dtype == tf.float64 else tf.float32

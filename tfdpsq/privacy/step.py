"""One logical DP-SGD step over physical microbatches, as one compiled function."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy import coupled as coupled_rows
from tfdpsq.privacy import fast
from tfdpsq.privacy.fast import products
from tfdpsq.privacy.fast.factored import full_dtype
from tfdpsq.privacy.optimizers import Clipped, LogicalStep, StepKeys
from tfdpsq.privacy.replay import replayable
from tfdpsq.privacy.terms import Losses, require_losses

Batch = Mapping[str, tf.Tensor]


class Setup(NamedTuple):
    """A loss, what it trains, and how it is differentiated; see `train`."""

    per_example_losses: Callable[[Batch], Losses]
    variables: list[tf.Variable]
    layers: list[tf.Module]
    optimizer: LogicalStep
    microbatch_size: int
    coupled: bool = False


def make_logical_step(
    per_example_losses: Callable[[Batch], Losses],
    variables: Sequence[tf.Variable],
    optimizer: LogicalStep,
    microbatch_size: int,
    layers: Iterable[tf.Module] = (),
    coupled: bool = False,
) -> Callable[..., tf.Tensor]:
    """Builds the step: accumulate clipped sums, noise once, update once.

    Args:
      per_example_losses: maps a microbatch (a dict of tensors with `microbatch_size`
        leading rows) to one loss per row, [microbatch_size] float32. It runs the
        model in training mode.
      variables: the trainable variables.
      optimizer: made by `make_optimizer`.
      microbatch_size: rows differentiated at a time; a multiple of the plan's
        `rows_clipped_together`.
      layers: the model, or the layers that hold `variables`. Engine "fast" needs
        them; with every engine their dropout draws from secret keys that a resumed
        run repeats (see `randomness`).
      coupled: the loss returns `Coupled`, and its rows are differentiated one by one
        with every engine. `microbatch_size` is then M, every replica takes the whole
        batch, and the rows are dealt to them (see `coupled`).

    Returns:
      A function of (batch, count): a dict of tensors with M leading rows, M a
      multiple of `microbatch_size`, whose "weights" [M] are 0 for padding, and
      the number of leading rows in use, a scalar int32. Microbatches past
      `count` hold padding only and are skipped: their clipped sum is zero. The
      function updates the variables and returns the mean loss of the rows in
      use (those that are no number left out), which is a private measurement. An
      empty batch still takes a noisy step. Where the plan is secure, a third argument
      is what `secure_noise` drew for this step. A fourth is what `step_keys` of the
      optimizer returned for it; without it the step's number is `iterations`, which
      must never go back, and seeds are constants of the graph, so that anybody who has
      a dump or a profile of it can subtract the noise. It can be wrapped in
      `tf.function`, `jit_compile=True` included, and run by `Strategy.run`, each
      replica on rows of its own; noise and result are then the same on all. Of R
      replicas, number r takes the microbatches r, r + R, r + 2R, … of the whole batch.

    Raises:
      InputError: `microbatch_size` below one, or it does not divide M, or parts
        rows that are clipped together; coupled rows that the plan does not cover; a
        variable listed twice; a variable of the process under which floating point is
        another one (`products.require_true_arithmetic`).
    """
    fast.require_distinct(variables)
    together = _whole_units(microbatch_size, optimizer)
    private = optimizer.plan.spec.private
    if private:
        products.require_true_arithmetic()
    if coupled:
        coupled_rows.require_covered(optimizer.plan)
    variables = list(variables)
    optimizer.prepare(variables)
    step = _Step(
        per_example_losses,
        variables,
        optimizer,
        microbatch_size,
        list(layers),
        private and not coupled,
        together,
        coupled,
    )
    return step.run


def make_microbatch_sum(
    per_example_losses: Callable[[Batch], Losses],
    variables: Sequence[tf.Variable],
    optimizer: LogicalStep,
    rows: int,
    layers: Iterable[tf.Module] = (),
) -> Callable[[Batch, tf.Tensor, tf.Tensor], Clipped]:
    """Builds what the logical step adds up, for trying it before anything is spent.

    Arguments are those of `make_logical_step`, but for `rows`, the microbatch's.
    Nothing of the optimizer is changed.

    Returns:
      A function of (batch, apart, dropout). `apart`, a scalar bool: take the units one
      by one, as the step does where a gradient is not finite. `dropout`: [2] int64,
      the key of random layers. It returns what `LogicalStep.clipped_sum` does, of the
      step's own sums. `complete` says whether the units were, or could have been,
      taken together.
    """
    step = _Step(
        per_example_losses,
        list(variables),
        optimizer,
        rows,
        list(layers),
        True,
        _whole_units(rows, optimizer),
        coupled=False,
    )
    zero = tf.constant(0, tf.int64)

    def microbatch_sum(batch: Batch, apart: tf.Tensor, dropout: tf.Tensor) -> Clipped:
        keys = StepKeys(zero, zero, dropout)
        return step.of_microbatch(batch, zero, keys, apart)

    return microbatch_sum


@dataclasses.dataclass(frozen=True)
class _Step:
    per_example_losses: Callable[[Batch], Losses]
    variables: list[tf.Variable]
    optimizer: LogicalStep
    microbatch_size: int
    layers: list[tf.Module]
    spares_others: bool  # a row without a finite gradient costs nobody else
    together: int
    coupled: bool

    def run(
        self,
        batch: Batch,
        count: tf.Tensor,
        noise: Sequence[tf.Tensor] = (),
        keys: StepKeys | None = None,
    ) -> tf.Tensor:
        """Takes the step; see `make_logical_step`."""
        keys = keys or self.optimizer.step_keys(self.optimizer.iterations)
        size, rows = self.microbatch_size, batch["weights"].shape[0]
        if rows % size:
            raise validation.InputError(
                f"the batch has {rows} rows, which microbatch_size {size} does not "
                "divide. Pad it to a multiple."
            )
        if self.coupled and rows != size:
            raise validation.InputError(
                f"the batch has {rows} coupled rows and microbatch_size is {size}, but "
                "rows that read each other must form one microbatch. Set it to all."
            )
        replica = tf.distribute.get_replica_context()
        first, every = 0, 1
        if replica is not None and not self.coupled:  # those have the same batch
            first = replica.replica_id_in_sync_group
            every = replica.num_replicas_in_sync
        first = tf.cast(first, tf.int64)

        def accumulate(
            index: Any, loss_sum: Any, losses_counted: Any, *sums: Any
        ) -> Any:
            part = _slice(batch, index * size, size)
            # As `batches.split_over_replicas` deals them: of the whole batch, this is
            # the same one whatever the replicas, and so is its dropout.
            number = first + tf.cast(index, tf.int64) * every
            clipped = self.of_microbatch(part, number, keys)
            losses = clipped.losses
            counted = tf.math.is_finite(losses) & (part["weights"] > 0)
            total = tf.reduce_sum(tf.where(counted, losses, 0.0))
            loss_sum += tf.cast(total, tf.float32)
            losses_counted += tf.reduce_sum(tf.cast(counted, tf.float32))
            return index + 1, loss_sum, losses_counted, *_added(sums, clipped.sums)

        used = (count + size - 1) // size
        _, loss_sum, losses_counted, *sums = tf.while_loop(
            lambda index, *_: index < used,
            accumulate,
            (tf.constant(0), tf.constant(0.0), tf.constant(0.0), *self._zero_sums()),
            maximum_iterations=rows // size,
            # Microbatches hardly wait for each other, and TensorFlow would run ten at
            # once: ten times the activations.
            parallel_iterations=1,
        )
        estimate = self.optimizer.privatize(sums, noise, keys)
        self.optimizer.update(estimate, self.variables)
        losses = [loss_sum, losses_counted]
        if replica is not None and replica.num_replicas_in_sync > 1:
            losses = replica.all_reduce(tf.distribute.ReduceOp.SUM, losses)
        return losses[0] / tf.maximum(losses[1], 1.0)

    def of_microbatch(
        self,
        part: Batch,
        number: tf.Tensor,
        keys: StepKeys,
        apart: tf.Tensor | bool = False,
    ) -> Clipped:
        """Returns the rows' losses and the sum of their clipped gradients."""
        clipped = self._differentiated(part, number, keys)
        if not self.spares_others or clipped.complete is True:
            return clipped
        # Were the other rows of the microbatch lost with one that has no finite
        # gradient, one unit could move the sum by a whole microbatch of clip norms. So
        # they are taken one by one. Rows that depend on each other stay as they are; a
        # sensitivity that bounds every row's change covers their loss as well.
        sums = tf.cond(
            clipped.complete & tf.logical_not(apart),
            lambda: _cast(clipped.sums, self.variables),
            lambda: self._one_by_one(part, number, keys),
        )
        return clipped._replace(sums=sums)

    def _differentiated(
        self, part: Batch, number: tf.Tensor, keys: StepKeys
    ) -> Clipped:
        optimizer = self.optimizer

        @contextlib.contextmanager
        def replayed() -> Iterator[None]:
            with replayable(self.layers, keys.dropout, keys.number, number):
                yield

        def losses() -> Losses:
            with replayed():
                return require_losses(self.per_example_losses(part))

        if self.coupled:
            with replayed():
                found = coupled_rows.require_coupled(self.per_example_losses(part))
                return optimizer.coupled_sum(found, self.variables, part["weights"])
        return optimizer.clipped_sum(
            losses, self.variables, self.layers, part["weights"]
        )

    def _one_by_one(
        self, part: Batch, number: tf.Tensor, keys: StepKeys
    ) -> list[tf.Tensor]:
        size, together = self.microbatch_size, self.together

        def add(row: Any, *sums: Any) -> Any:
            # As many rows as there are, which a loss can read, and all its own: padding
            # could spoil the batch again. In its own place a unit has the dropout that
            # it had in the batch; in a common one all would share a draw, brought about
            # by the unit that spoilt the batch.
            unit = _alone(part, row, together)
            clipped = self._differentiated(unit, number, keys)
            return row + together, *_added(sums, clipped.sums)

        _, *sums = tf.while_loop(
            lambda row, *_: row < size,
            add,
            (tf.constant(0), *self._zero_sums()),
            maximum_iterations=size // together,
            parallel_iterations=1,
        )
        return sums

    def _zero_sums(self) -> list[tf.Tensor]:
        return [tf.zeros(v.shape, full_dtype(v)) for v in self.variables]


def _whole_units(microbatch_size: int, optimizer: LogicalStep) -> int:
    """Returns the rows clipped together, if they divide those of a microbatch."""
    validation.positive_integer("microbatch_size", microbatch_size)
    together = optimizer.plan.rows_clipped_together
    if microbatch_size % together:
        raise validation.InputError(
            f"microbatch_size {microbatch_size} parts the {together} rows that are "
            "clipped together (rows_per_unit, or a clip group's). Use a multiple of it."
        )
    return together


def _slice(batch: Batch, start: tf.Tensor, rows: int) -> dict[str, tf.Tensor]:
    # tf.slice, not [a:b]: its size is static, which XLA insists on.
    return {
        name: tf.slice(
            value, [start] + [0] * (value.shape.rank - 1), [rows, *value.shape[1:]]
        )
        for name, value in batch.items()
    }


def _alone(batch: Batch, start: tf.Tensor, rows: int) -> dict[str, tf.Tensor]:
    """Returns the batch with copies of one unit, of no weight, in all other places."""
    places = tf.range(next(iter(batch.values())).shape[0])
    own = (places >= start) & (places < start + rows)
    found = {
        name: tf.gather(value, start + (places - start) % rows)
        for name, value in batch.items()
    }
    weights = found["weights"]
    return {**found, "weights": tf.where(own, weights, tf.zeros_like(weights))}


def _added(
    sums: Sequence[tf.Tensor], new: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, ...]:
    return tuple(total + tf.cast(one, total.dtype) for total, one in zip(sums, new))


def _cast(
    sums: Sequence[tf.Tensor], variables: Sequence[tf.Variable]
) -> list[tf.Tensor]:
    return [tf.cast(one, full_dtype(v)) for one, v in zip(sums, variables)]

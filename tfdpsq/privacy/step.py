"""One logical DP-SGD step over physical microbatches, as one compiled function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy import coupled as coupled_rows
from tfdpsq.privacy import fast
from tfdpsq.privacy.engines import Clipped, clipped_sum, require_engine
from tfdpsq.privacy.fast import products
from tfdpsq.privacy.fast.factored import full_dtype
from tfdpsq.privacy.keys import StepKeys
from tfdpsq.privacy.optimizers import apply, build
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.randomness import grid
from tfdpsq.privacy.randomness.noise import noised
from tfdpsq.privacy.replay import replayable
from tfdpsq.privacy.terms import Losses, require_losses

Batch = Mapping[str, tf.Tensor]


class Setup(NamedTuple):
    """A loss, what it trains, and how it is differentiated; see `train`."""

    plan: PrivacyPlan
    per_example_losses: Callable[[Batch], Losses]
    variables: list[tf.Variable]
    layers: list[tf.Module]
    microbatch_size: int
    engine: str = "fast"
    coupled: bool = False


def make_logical_step(
    plan: PrivacyPlan,
    per_example_losses: Callable[[Batch], Losses],
    variables: Sequence[tf.Variable],
    optimizer: Any,
    microbatch_size: int,
    layers: Iterable[tf.Module] = (),
    engine: str = "fast",
    coupled: bool = False,
) -> Callable[..., tf.Tensor]:
    """Builds the step: accumulate clipped sums, noise once, update once.

    Args:
      plan: clip norm, noise and expected batch size.
      per_example_losses: maps a microbatch (a dict of tensors with `microbatch_size`
        leading rows) to one loss per row, [microbatch_size] float32. It runs the
        model in training mode.
      variables: the trainable variables.
      optimizer: a Keras optimizer.
      microbatch_size: rows differentiated at a time; a multiple of the plan's
        `rows_clipped_together`.
      layers: the model, or the layers that hold `variables`. Engine "fast" needs
        them; with every engine their dropout draws from secret keys that a resumed
        run repeats (see `randomness`).
      engine: how clipped sums are computed; see `engines`.
      coupled: the loss returns `Coupled`, and its rows are differentiated one by one
        with every engine. `microbatch_size` is then M, every replica takes the whole
        batch, and the rows are dealt to them (see `coupled`).

    Returns:
      A function of (batch, count, noise, keys): a dict of tensors with M leading rows,
      M a multiple of `microbatch_size`, whose "weights" [M] are 0 for padding, and
      the number of leading rows in use, a scalar int32. Microbatches past
      `count` hold padding only and are skipped: their clipped sum is zero. The
      function updates the variables and returns the mean loss of the rows in
      use (those that are no number left out), which is a private measurement. An
      empty batch still takes a noisy step. The third argument is what
      `RunKey.secure_noise` drew for this step, and the fourth its `RunKey.step_keys`,
      of a number that no other step of the run has. It can be wrapped in
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
    require_engine(engine)
    if plan.spec.private:
        products.require_true_arithmetic()
    if coupled:
        coupled_rows.require_covered(plan)
    variables = list(variables)
    build(optimizer, variables)
    given = (plan, per_example_losses, variables, list(layers), microbatch_size)
    step = _Step(Setup(*given, engine, coupled), _whole_units(microbatch_size, plan))
    return functools.partial(step.run, optimizer)


def make_microbatch_sum(
    setup: Setup,
) -> Callable[[Batch, tf.Tensor], Clipped]:
    """Builds what the logical step adds up, for trying it before anything is spent.

    Returns:
      A function of (batch, dropout): `microbatch_size` rows, and the key of random
      layers, [2] int64. It returns the step's own clipped sum of these rows.
    """
    step = _Step(setup, _whole_units(setup.microbatch_size, setup.plan))
    zero = tf.constant(0, tf.int64)
    return lambda batch, dropout: step.of_microbatch(
        batch, zero, StepKeys(zero, zero, dropout)
    )


@dataclasses.dataclass(frozen=True)
class _Step:
    setup: Setup
    together: int

    def run(
        self,
        optimizer: Any,
        batch: Batch,
        count: tf.Tensor,
        noise: Sequence[tf.Tensor],
        keys: StepKeys,
    ) -> tf.Tensor:
        """Takes the step; see `make_logical_step`."""
        setup, size = self.setup, self.setup.microbatch_size
        rows = batch["weights"].shape[0]
        if rows % size or (setup.coupled and rows != size):
            raise validation.InputError(
                f"the batch has {rows} rows, which microbatch_size {size} does not "
                "divide, or which read each other and must form one microbatch. Pad "
                "it to a multiple, or set microbatch_size to all."
            )
        replica = tf.distribute.get_replica_context()
        several = replica is not None and replica.num_replicas_in_sync > 1
        first, every = 0, 1
        if replica is not None and not setup.coupled:  # those have the same batch
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
        losses = [loss_sum, losses_counted]
        if several:
            sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, list(sums))
            losses = replica.all_reduce(tf.distribute.ReduceOp.SUM, losses)
        estimate = privatized(setup.plan, sums, noise, keys)
        apply(optimizer, estimate, setup.variables)
        return losses[0] / tf.maximum(losses[1], 1.0)

    def of_microbatch(self, part: Batch, number: tf.Tensor, keys: StepKeys) -> Clipped:
        """Returns the rows' losses and the sum of their clipped gradients."""
        clipped = self._differentiated(part, number, keys)
        if clipped.complete is True:
            return clipped
        # Were the other rows of the microbatch lost with one that has no finite
        # gradient, one unit could move the sum by a whole microbatch of clip norms. So
        # they are taken one by one.
        sums = tf.cond(
            clipped.complete,
            lambda: _cast(clipped.sums, self.setup.variables),
            lambda: self._one_by_one(part, number, keys),
        )
        return clipped._replace(sums=sums)

    def _differentiated(
        self, part: Batch, number: tf.Tensor, keys: StepKeys
    ) -> Clipped:
        plan, per_example_losses, variables, layers, _, engine, coupled = self.setup

        def losses() -> Any:
            with replayable(layers, keys.dropout, keys.number, number):
                return per_example_losses(part)

        if not coupled:
            return clipped_sum(
                engine,
                plan,
                lambda: require_losses(losses()),
                variables,
                layers,
                part["weights"],
            )
        with replayable(layers, keys.dropout, keys.number, number):
            found = coupled_rows.require_coupled(per_example_losses(part))
            if plan.spec.private:
                sums = coupled_rows.clipped_sum(
                    found, variables, plan.spec.clip_norm, part["weights"]
                )
            else:
                counted = coupled_rows.own_rows(part["weights"])
                counted = tf.cast(counted, found.losses.dtype)
                sums = list(found.gradient(counted, variables))
        return Clipped(sums, found.losses, True)

    def _one_by_one(
        self, part: Batch, number: tf.Tensor, keys: StepKeys
    ) -> list[tf.Tensor]:
        size, together = self.setup.microbatch_size, self.together

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
        return [tf.zeros(v.shape, full_dtype(v)) for v in self.setup.variables]


def privatized(
    plan: PrivacyPlan,
    sums: Sequence[tf.Tensor],
    noise: Sequence[tf.Tensor],
    keys: StepKeys,
) -> list[tf.Tensor]:
    """The gradient estimate of one logical step, (Σ + noise) / expected batch size.

    Args:
      plan: its noise and batch size.
      sums: per variable, the clipped sum over all microbatches and replicas.
      noise: of a secure plan, what `RunKey.secure_noise` drew for this step.
      keys: `RunKey.step_keys` of this step.

    Raises:
      InputError: a secure plan without noise for every variable.
    """
    if plan.grid_step is not None:
        if len(noise) != len(sums):
            raise validation.InputError(
                f"secure is True, but there is noise for {len(noise)} of {len(sums)} "
                "variables. Give the step what RunKey.secure_noise returns, afresh for "
                "every step."
            )
        sums = grid.noised(sums, noise, plan.grid_step)
    elif plan.spec.private:
        sums = noised(
            sums, plan.noise_stddev, keys.noise, keys.number, plan.noise_window
        )
    return [value / plan.spec.batch_size for value in sums]


def _whole_units(microbatch_size: int, plan: PrivacyPlan) -> int:
    """Returns the rows clipped together, if they divide those of a microbatch."""
    validation.positive_integer("microbatch_size", microbatch_size)
    together = plan.rows_clipped_together
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

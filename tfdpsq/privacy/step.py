"""One logical DP-SGD step over physical microbatches, and its compiled form.

A logical batch is cut into microbatches, and microbatch j goes to replica j mod R. So
microbatches, their clipped sums and their dropout (which follows from a row's place in
the batch) are the same for every number of replicas R; only the order in which sums are
added up is not. The sampler drew the whole batch before, by the plan's law, and dealing
it out changes nothing of that law.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tfdpsq import validation
from tfdpsq.privacy import fast
from tfdpsq.privacy.batches import padded_rows, rows_at_once, split_over_replicas
from tfdpsq.privacy.engines import Batch, Clipped, Engine, clipped_sum, require_engine
from tfdpsq.privacy.fast.capture import converted
from tfdpsq.privacy.fast.factored import full_dtype
from tfdpsq.privacy.keys import RunKey, StepKeys
from tfdpsq.privacy.optimizers import apply, build
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.randomness import secure
from tfdpsq.privacy.randomness.noise import noised
from tfdpsq.privacy.replay import replayable

Arrays = Mapping[str, np.ndarray]


class Setup(NamedTuple):
    """A loss, what it trains, and how it is differentiated; see `train`."""

    plan: PrivacyPlan
    per_example_losses: Callable[[Batch], tf.Tensor]
    variables: list[tf.Variable]
    layers: list[tf.Module]
    microbatch_size: int
    engine: Engine = "fast"


def make_logical_step(
    plan: PrivacyPlan,
    per_example_losses: Callable[[Batch], tf.Tensor],
    variables: Sequence[tf.Variable],
    optimizer: Any,
    microbatch_size: int,
    layers: Iterable[tf.Module] = (),
    engine: Engine = "fast",
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
        them, and so does dropout that a resumed run repeats (see `replay`).
      engine: how clipped sums are computed; see `engines`. One that is a function gets
        all M rows on every replica, and `per_example_losses` is not called.

    Returns:
      A function of (batch, count, noise, keys): a dict of tensors with M leading rows,
      M a multiple of `microbatch_size`, whose "weights" [M] are 0 for padding; the
      number of leading rows in use, a scalar int32; what `RunKey.secure_noise` drew
      for this step; and its `RunKey.step_keys`, of a number that no other step of the
      run has. It skips microbatches past `count`, updates the variables and returns the
      mean loss of the rows in use whose loss is finite, a private measurement. An empty
      batch still takes a noisy step. It runs in `tf.function`, `jit_compile=True`
      included, and by `Strategy.run`: of R replicas, number r takes the microbatches
      r, r + R, r + 2R, … of the whole batch, and noise and result are the same on all.

    Raises:
      InputError: `microbatch_size` does not divide M, or parts rows that are clipped
        together; a variable listed twice; an unknown engine.
    """
    fast.require_distinct(variables)
    require_engine(engine)
    variables = list(variables)
    build(optimizer, variables)
    size = microbatch_size
    setup = Setup(plan, per_example_losses, variables, list(layers), size, engine)
    return functools.partial(_Step(setup).run, optimizer)


def rows_of_batch(setup: Setup) -> int:
    """Returns M, the rows that every batch of a run is padded to.

    Raises:
      InputError: more replicas than microbatches.
    """
    if callable(setup.engine):
        parts = -(-setup.plan.max_rows // setup.microbatch_size)
        return parts * setup.microbatch_size
    return padded_rows(setup.plan, setup.microbatch_size)


def make_microbatch_sum(setup: Setup) -> Callable[[Batch, tf.Tensor], Clipped]:
    """Builds the step's own clipped sum, for trying it before anything is spent.

    Returns:
      A function of `microbatch_size` rows and the key of random layers, [2] int64.
    """
    step = _Step(setup)
    zero = tf.constant(0, tf.int64)
    return lambda batch, dropout: step.of_microbatch(
        batch, zero, StepKeys(zero, zero, dropout)
    )


class _Step:
    def __init__(self, setup: Setup):
        self.setup, self._together = setup, setup.plan.rows_clipped_together
        size = validation.positive_integer("microbatch_size", setup.microbatch_size)
        if not callable(setup.engine) and size % self._together:
            raise validation.InputError(
                f"microbatch_size {size} parts the {self._together} rows that are "
                "clipped together (rows_per_unit, or a dealt microbatch). Use a "
                "multiple of it."
            )

    def run(
        self,
        optimizer: Any,
        batch: Batch,
        count: tf.Tensor,
        noise: Sequence[tf.Tensor],
        keys: StepKeys,
    ) -> tf.Tensor:
        """Takes the step; see `make_logical_step`."""
        setup, whole = self.setup, callable(self.setup.engine)
        rows = batch["weights"].shape[0]
        size = rows if whole else setup.microbatch_size
        if rows % size:
            raise validation.InputError(
                f"the batch has {rows} rows, which microbatch_size {size} does not "
                "divide. Pad it to a multiple."
            )
        replica = tf.distribute.get_replica_context()
        several = replica is not None and replica.num_replicas_in_sync > 1
        first, every = tf.constant(0, tf.int64), 1
        if several and not whole:
            first = tf.cast(replica.replica_id_in_sync_group, tf.int64)
            every = replica.num_replicas_in_sync

        def accumulate(
            index: Any, loss_sum: Any, losses_counted: Any, *sums: Any
        ) -> Any:
            part = _slice(batch, index * size, size)
            # Its number in the whole batch, as `split_over_replicas` deals them: so
            # its dropout is the same whatever the replicas.
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
            lambda: list(_added(self._zero_sums(), clipped.sums)),
            lambda: self._one_by_one(part, number, keys),
        )
        return clipped._replace(sums=sums)

    def _differentiated(
        self, part: Batch, number: tf.Tensor, keys: StepKeys
    ) -> Clipped:
        plan, per_example_losses, variables, layers, _, engine = self.setup

        def losses() -> tf.Tensor:
            with replayable(layers, keys.dropout, keys.number, number):
                return per_example_losses(part)

        if not callable(engine):
            weights = part["weights"]
            return clipped_sum(engine, plan, losses, variables, layers, weights)
        with replayable(layers, keys.dropout, keys.number, number):
            return engine(plan, part, variables)

    def _one_by_one(
        self, part: Batch, number: tf.Tensor, keys: StepKeys
    ) -> list[tf.Tensor]:
        size = part["weights"].shape[0]

        def add(row: Any, *sums: Any) -> Any:
            # As many rows as there are, which a loss can read, and all its own: padding
            # could spoil the batch again. In its own place a unit has the dropout that
            # it had in the batch; in a common one all would share a draw, brought about
            # by the unit that spoilt the batch.
            unit = _alone(part, row, self._together)
            clipped = self._differentiated(unit, number, keys)
            return row + self._together, *_added(sums, clipped.sums)

        _, *sums = tf.while_loop(
            lambda row, *_: row < size,
            add,
            (tf.constant(0), *self._zero_sums()),
            maximum_iterations=size // self._together,
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
        sums = secure.noised(sums, noise, plan.grid_step)
    elif plan.spec.private:
        sums = noised(sums, plan.noise_stddev, keys.noise, keys.number)
    return [value / plan.spec.batch_size for value in sums]


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
    places = tf.range(batch["weights"].shape[0])
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


# -- Compiled -------------------------------------------------------------------------


class CompiledSteps:
    """Takes logical steps as a compiled function of arrays.

    Attributes:
      variables: those that are trained.
      microbatch_size: as `train` was given it.
      rows: what every batch is padded to.
      read: variables that a step reads, once it is built.
    """

    def __init__(self, setup: Setup, optimizer: Any, key: RunKey, jit_compile: bool):
        """Initializes with the arguments of `train`; nothing is traced yet.

        Raises:
          InputError: more replicas than microbatches.
        """
        self._plan, self._key = setup.plan, key
        self.variables = setup.variables
        self.microbatch_size = setup.microbatch_size
        self._dealt = not callable(setup.engine)
        self._at_once = rows_at_once(setup.plan, setup.microbatch_size)
        self.rows = rows_of_batch(setup)
        self.read: Sequence[tf.Variable] = ()
        self._strategy = tf.distribute.get_strategy()
        self._replicas = self._strategy.num_replicas_in_sync
        # Several replicas compile, or not, as their strategy does.
        self._jit_compile = jit_compile if self._replicas == 1 else None
        step = make_logical_step(
            setup.plan,
            converted(setup.per_example_losses),
            setup.variables,
            optimizer,
            self._at_once,
            setup.layers,
            setup.engine,
        )
        run = self._strategy.run
        self._function = tf.function(
            step if self._replicas == 1 else lambda *given: run(step, args=given),
            jit_compile=self._jit_compile,
            autograph=False,
        )

    def build(self, batch: Arrays) -> None:
        """Traces the step for batches like this one, of one row or more.

        Raises:
          InputError: XLA cannot compile the step, and is to.
        """
        empty = {
            name: np.zeros([self.rows, *values.shape[1:]], values.dtype)
            for name, values in batch.items()
        }
        arguments = self._arguments(empty, 0, self._plan.spec.steps)
        with self._precisely():
            self.read = self._function.get_concrete_function(*arguments).variables
            if not self._jit_compile:
                return
            try:
                self._function.experimental_get_compiler_ir(*arguments)(stage="hlo")
            except Exception as error:  # of a class that differs by version
                refused = str(error).partition("Detected unsupported operations")[2]
                if refused:
                    names = refused.splitlines()[0].rpartition("_JIT")[2]
                    raise validation.InputError(
                        "jit_compile is True, but XLA does not have all operations of "
                        f"the step{names}. Use others, or set jit_compile to False."
                    ) from error

    def rehearse(self, batch: Arrays) -> None:
        """Takes a step that the caller undoes, and logs its memory and time.

        It draws noise by keys that no step of the plan takes. Rows have no weight, but
        for one where the engine skips rows without.

        Args:
          batch: one row or more of what `__call__` will get.
        """
        at = np.arange(self.rows)
        given = {name: values[at % len(values)] for name, values in batch.items()}
        given["weights"] = np.zeros(self.rows, np.float32)
        in_use = self._at_once * self._replicas  # a microbatch for each replica
        if not self._dealt:
            in_use = 1
            given["weights"][0] = 1
        arguments = [given], [in_use], self._plan.spec.steps
        self(*arguments)  # XLA compiles in the first call
        started = time.monotonic()
        self(*arguments)
        expected = self._plan.spec.batch_size * self._plan.spec.rows_per_unit
        seconds = (time.monotonic() - started) * max(1, -(-expected // in_use))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        for device in tf.config.list_logical_devices("GPU")[:1]:
            memory = tf.config.experimental.get_memory_info(device.name)["peak"] / 2**30
        logging.info(
            "a step takes about %.3g seconds; peak memory: %.2f GiB", seconds, memory
        )

    def __call__(
        self, batches: Sequence[Arrays], counts: Sequence[int], first: int
    ) -> list[float]:
        """Takes one step for each batch, in order, and waits for the last.

        Args:
          batches: of one size; see `batches.batch_of`.
          counts: leading rows in use, of each.
          first: the number of the first step in the run; the others follow it.

        Returns:
          The mean loss of each step, over all replicas.
        """
        losses = []
        with self._precisely():
            for number, (batch, count) in enumerate(zip(batches, counts), first):
                loss = self._function(*self._arguments(batch, count, number))
                losses.append(self._strategy.experimental_local_results(loss)[0])
            return [float(loss) for loss in losses]

    def _precisely(self) -> contextlib.AbstractContextManager[None]:
        """While a private step is traced or runs; see `fast.true_float32`."""
        private = self._plan.spec.private
        return fast.true_float32() if private else contextlib.nullcontext()

    def _arguments(self, batch: Arrays, count: int, number: int) -> list[Any]:
        """Packs what the step takes: batch, count, noise and keys."""

        def on_replicas(part: Callable[[int], Any]) -> Any:
            if self._replicas == 1:
                return part(0)
            return self._strategy.experimental_distribute_values_from_function(
                lambda context: part(context.replica_id_in_sync_group)
            )

        def tensors(rows: Arrays) -> dict[str, tf.Tensor]:
            return {name: tf.convert_to_tensor(value) for name, value in rows.items()}

        rows_of, count_of = (lambda _: batch), (lambda _: count)
        if self._dealt:
            rows_of, count_of = split_over_replicas(
                batch, count, self._replicas, self._at_once
            )
        # The same for all replicas, as it is added to what they have summed up.
        noise = self._key.secure_noise(number, self.variables)
        return [
            on_replicas(lambda replica: tensors(rows_of(replica))),
            on_replicas(lambda replica: tf.constant(count_of(replica), tf.int32)),
            [tf.convert_to_tensor(values) for values in noise],
            self._key.step_keys(number),
        ]

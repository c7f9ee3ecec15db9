"""One logical DP-SGD step over physical microbatches, and its compiled form.

A logical batch is cut into microbatches, and microbatch j goes to replica j mod R. So
microbatches, their clipped sums and their dropout (which follows from a row's place in
the batch) are the same for every R; only the order of addition is not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdpsq import validation
from tfdpsq.privacy import fast
from tfdpsq.privacy.engines import Batch, Clipped, Engine, clipped_sum, require_engine
from tfdpsq.privacy.fast.factored import full_dtype
from tfdpsq.privacy.keys import RunKey, StepKeys
from tfdpsq.privacy.optimizers import apply, build
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.randomness import secure
from tfdpsq.privacy.randomness.noise import noised
from tfdpsq.privacy.replay import replayable

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A loss, what it trains, and how it is differentiated; see `train`.

    Raises:
      InputError: a variable listed twice; an engine as there; rows clipped together
        that `microbatch_size` would part.
    """

    plan: PrivacyPlan
    per_example_losses: Callable[[Batch], tf.Tensor]
    variables: list[tf.Variable]
    layers: list[tf.Module]
    microbatch_size: int
    engine: Engine = "fast"

    def __post_init__(self) -> None:
        """Checks the arguments; see the class."""
        fast.require_distinct(self.variables)
        require_engine(self.engine)
        size, together = self.microbatch_size, self.plan.rows_clipped_together
        if not callable(self.engine) and size % together:
            raise validation.InputError(
                f"microbatch_size is {size}; use a multiple of the {together} rows "
                "that are clipped together."
            )


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
      variables: see `train`, also for what follows.
      optimizer: a Keras optimizer.
      microbatch_size: a multiple of the plan's `rows_clipped_together`.
      layers: for engine "fast", and for dropout that a resumed run repeats.
      engine: one that is a function gets all M rows on every replica, and
        `per_example_losses` is not called.

    Returns:
      A function of (batch, count, noise, keys): a dict of tensors with M leading rows,
      M a multiple of `microbatch_size`, whose "weights" [M] are 0 for padding; the
      number of leading rows in use, a scalar int32; what `RunKey.secure_noise` drew
      for this step; and its `RunKey.step_keys`. It updates the variables and returns
      the mean of the finite losses of rows in use, a private measurement. An empty
      batch still takes a noisy step. It runs in `tf.function`, `jit_compile=True`
      included, and by `Strategy.run`: of R replicas, number r gets the microbatches
      r, r + R, r + 2R, …, and noise and result are the same on all.

    Raises:
      InputError: see `Setup`.
    """
    held = list(variables), list(layers)
    validation.positive_integer("microbatch_size", microbatch_size)
    setup = Setup(plan, per_example_losses, *held, microbatch_size, engine)
    build(optimizer, setup.variables)
    return functools.partial(_Step(setup).run, optimizer)


def rows_of_batch(setup: Setup) -> int:
    """Returns M, the rows that every batch of a run is padded to.

    The most that can be drawn, rounded up to whole microbatches, the same number for
    every replica; an InputError if there are more replicas than microbatches.
    """
    most, size = setup.plan.max_rows, setup.microbatch_size
    if callable(setup.engine):
        return -(-most // size) * size
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    microbatches = -(-most // size)
    if replicas > microbatches:
        raise validation.InputError(
            f"microbatch_size {size} makes {microbatches} microbatches for {replicas} "
            "replicas. Lower it, or use fewer replicas."
        )
    return -(-microbatches // replicas) * replicas * size


def make_microbatch_sum(setup: Setup) -> Callable[[Batch, tf.Tensor], Clipped]:
    """Builds the step's clipped sum, a function of rows and of a dropout key [2]."""
    step = _Step(setup)
    zero = tf.constant(0, tf.int64)
    return lambda batch, dropout: step.of_microbatch(
        batch, zero, StepKeys(zero, zero, dropout)
    )


class _Step:
    def __init__(self, setup: Setup):
        self.setup, self._together = setup, setup.plan.rows_clipped_together

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
                f"the batch has {rows} rows; pad it to a multiple of {size}."
            )
        replica = tf.distribute.get_replica_context()
        several = replica is not None and replica.num_replicas_in_sync > 1
        first, every = tf.constant(0, tf.int64), 1
        if several and not whole:
            first = tf.cast(replica.replica_id_in_sync_group, tf.int64)
            every = replica.num_replicas_in_sync

        def accumulate(index: Any, losses: Any, *sums: Any) -> Any:
            part = _slice(batch, index * size, size)
            # Its number in the whole batch, as `_share_of` deals them: so its dropout
            # is the same whatever the replicas.
            number = first + tf.cast(index, tf.int64) * every
            clipped = self.of_microbatch(part, number, keys)
            counted = tf.math.is_finite(clipped.losses) & (part["weights"] > 0)
            kept = tf.where(counted, clipped.losses, 0.0)
            both = [tf.cast(each, tf.float32) for each in (kept, counted)]
            losses += tf.reduce_sum(both, axis=1)
            return index + 1, losses, *_added(sums, clipped.sums)

        used = (count + size - 1) // size
        _, losses, *sums = tf.while_loop(
            lambda index, *_: index < used,
            accumulate,
            (tf.constant(0), tf.zeros([2]), *self._zero_sums()),
            maximum_iterations=rows // size,
            # TensorFlow would run ten at once: ten times the activations.
            parallel_iterations=1,
        )
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
        # Were other rows lost with one that has no finite gradient, one unit could move
        # the sum by a whole microbatch of clip norms. So they are taken one by one.
        sums = tf.cond(
            clipped.complete,
            lambda: list(_added(self._zero_sums(), clipped.sums)),
            lambda: self._one_by_one(part, number, keys),
        )
        return clipped._replace(sums=sums)

    def _differentiated(
        self, part: Batch, number: tf.Tensor, keys: StepKeys
    ) -> Clipped:
        setup = self.setup
        plan, variables, layers = setup.plan, setup.variables, setup.layers

        def losses() -> tf.Tensor:
            with replayable(layers, keys.dropout, keys.number, number):
                return setup.per_example_losses(part)

        if not callable(setup.engine):
            weights = part["weights"]
            return clipped_sum(setup.engine, plan, losses, variables, layers, weights)
        with replayable(layers, keys.dropout, keys.number, number):
            return setup.engine(plan, part, variables)

    def _one_by_one(
        self, part: Batch, number: tf.Tensor, keys: StepKeys
    ) -> list[tf.Tensor]:
        size = part["weights"].shape[0]

        def add(row: Any, *sums: Any) -> Any:
            # In its own place, where it has the dropout that it had in the batch, among
            # copies of itself: padding could spoil the batch again.
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
                "secure is True: give each step its noise from RunKey.secure_noise."
            )
        sums = secure.noised(sums, noise, plan.grid_step)
    elif plan.spec.private:
        sums = noised(sums, plan.noise_stddev, keys.noise, keys.number)
    return [value / plan.spec.batch_size for value in sums]


def _share_of(
    batch: Mapping[str, np.ndarray],
    count: int,
    replica: int,
    replicas: int,
    microbatch_size: int,
) -> tuple[dict[str, np.ndarray], int]:
    """Returns a replica's rows, and how many of them are in use.

    Microbatch j goes to replica j mod `replicas` whole: what is clipped together stays
    together. `batch` has a multiple of `replicas` times `microbatch_size` rows, of
    which the first `count` are in use.
    """
    dealt = {}
    for name, values in batch.items():
        microbatches = values.reshape(-1, microbatch_size, *values.shape[1:])
        dealt[name] = microbatches[replica::replicas].reshape(-1, *values.shape[1:])
    # All of its microbatches are full but perhaps the last one in use.
    starts = range(replica * microbatch_size, count, replicas * microbatch_size)
    return dealt, sum(min(microbatch_size, count - start) for start in starts)


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


class CompiledStep:
    """Takes logical steps as a compiled function of arrays.

    Attributes:
      variables: those that are trained.
      rows: what every batch is padded to.
      read: variables that a step reads.
    """

    def __init__(
        self,
        setup: Setup,
        optimizer: Any,
        key: RunKey,
        jit_compile: bool | None,
        batch: Arrays,
    ):
        """Traces the step for batches like this one; an InputError if XLA cannot."""
        self._plan, self._key = setup.plan, key
        self.variables = setup.variables
        self._dealt = not callable(setup.engine)
        self._at_once = setup.microbatch_size
        self.rows = rows_of_batch(setup)
        self._strategy = tf.distribute.get_strategy()
        self._replicas = self._strategy.num_replicas_in_sync
        step = functools.partial(_Step(setup).run, optimizer)

        def run(*given: Any) -> Any:
            return self._strategy.run(step, args=given)

        self._function = tf.function(run, jit_compile=jit_compile, autograph=False)
        empty = {
            name: np.zeros([self.rows, *values.shape[1:]], values.dtype)
            for name, values in batch.items()
        }
        arguments = self._arguments(empty, 0, setup.plan.spec.steps)
        with self._precisely():
            self.read = self._function.get_concrete_function(*arguments).variables
            if jit_compile:
                try:
                    self._function.experimental_get_compiler_ir(*arguments)(stage="hlo")
                except Exception as error:  # of a class that differs by version
                    _require_operations(str(error))

    def weights_finite(self) -> bool:
        """Returns whether all values of the trained variables are finite."""
        return all(bool(tf.reduce_all(tf.math.is_finite(v))) for v in self.variables)

    def rehearse(self, batch: Arrays) -> None:
        """Takes a step that the caller undoes, and logs its memory and time.

        It draws noise by keys that no step of the plan takes.
        """
        at = np.arange(self.rows)
        given = {name: values[at % len(values)] for name, values in batch.items()}
        given["weights"] = np.zeros(self.rows, np.float32)
        in_use = self._at_once * self._replicas if self._dealt else 1
        if not self._dealt:  # which would skip all rows
            given["weights"][0] = 1
        self(given, in_use, self._plan.spec.steps)  # XLA compiles in the first call
        started = time.monotonic()
        self(given, in_use, self._plan.spec.steps)
        expected = self._plan.spec.batch_size * self._plan.spec.rows_per_unit
        seconds = (time.monotonic() - started) * max(1, -(-expected // in_use))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        for device in tf.config.list_logical_devices("GPU")[:1]:
            memory = tf.config.experimental.get_memory_info(device.name)["peak"] / 2**30
        logging.info(
            "a step takes about %.3g seconds; peak memory: %.2f GiB", seconds, memory
        )

    def __call__(self, batch: Arrays, count: int, number: int) -> float:
        """Takes step `number` with `count` rows of a batch; returns the mean loss."""
        with self._precisely():
            loss = self._function(*self._arguments(batch, count, number))
            return float(self._strategy.experimental_local_results(loss)[0])

    def _precisely(self) -> contextlib.AbstractContextManager[None]:
        """While a private step is traced or runs; see `fast.true_float32`."""
        private = self._plan.spec.private
        return fast.true_float32() if private else contextlib.nullcontext()

    def _arguments(self, batch: Arrays, count: int, number: int) -> tuple[Any, ...]:
        """Packs what the step takes: batch, count, noise and keys."""

        def given_to(context: Any) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
            rows, used, at = batch, count, context.replica_id_in_sync_group
            if self._dealt:
                rows, used = _share_of(batch, count, at, self._replicas, self._at_once)
            tensors = {name: tf.convert_to_tensor(v) for name, v in rows.items()}
            return tensors, tf.constant(used, tf.int32)

        deal = self._strategy.experimental_distribute_values_from_function
        # The same for all replicas, as it is added to what they have summed up.
        noise = self._key.secure_noise(number, self.variables)
        tensors = [tf.convert_to_tensor(values) for values in noise]
        return *deal(given_to), tensors, self._key.step_keys(number)


def _require_operations(problem: str) -> None:
    missing = problem.partition("Detected unsupported operations")[2]
    if missing:
        raise validation.InputError(
            "jit_compile is True, but XLA lacks operations of the step"
            f"{missing.splitlines()[0].rpartition('_JIT')[2]}. Set it to False."
        )

"""The logical step as a compiled function of arrays, on one replica or several.

A logical batch is cut into microbatches, and microbatch j goes to replica j mod R. So
microbatches, their clipped sums and their dropout keys (which follow from j) are the
same for every number of replicas R; only the order in which sums are added up is not.
Who is drawn was decided before: the sampler draws the whole batch, by the plan's law,
and dealing it out changes nothing of that law.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy import fast
from tfdpsq.privacy.batches import padded_rows, rows_at_once, split_over_replicas
from tfdpsq.privacy.fast.capture import converted
from tfdpsq.privacy.keys import RunKey, StepKeys
from tfdpsq.privacy.step import Batch, Setup, make_logical_step

Arrays = Mapping[str, np.ndarray]


class CompiledSteps:
    """Takes logical steps, up to `most` of them in one call.

    Attributes:
      variables: those that are trained.
      microbatch_size: as `train` was given it.
      rows: what every batch is padded to.
      read: variables that a step reads, once it is built.
    """

    def __init__(
        self,
        setup: Setup,
        optimizer: Any,
        key: RunKey,
        jit_compile: bool,
        most: int = 1,
    ):
        """Takes what `train` was given; nothing is traced yet.

        One call takes at most `most` steps. `jit_compile` compiles with XLA; on several
        replicas it is left to the strategy.

        Raises:
          InputError: `most` below one; more replicas than microbatches.
        """
        plan, losses, variables, layers, microbatch_size, engine, coupled = setup
        self._most = validation.positive_integer("steps_per_loop", most)
        self._plan = plan
        self._coupled = coupled
        self._key = key
        self.variables = variables
        self.microbatch_size = microbatch_size
        self._at_once = rows_at_once(plan, microbatch_size)
        self._strategy = tf.distribute.get_strategy()
        self._replicas = self._strategy.num_replicas_in_sync
        self.read: Sequence[tf.Variable] = ()
        # A strategy's devices compile, or not, by themselves.
        self._jit_compile = jit_compile if self._replicas == 1 else None
        self.rows = padded_rows(plan, microbatch_size, coupled)
        step = make_logical_step(
            plan,
            converted(losses),
            variables,
            optimizer,
            self.rows if coupled else self._at_once,
            layers,
            engine,
            coupled,
        )
        self._function = tf.function(
            self._on_one(step) if self._replicas == 1 else self._on_all(step),
            jit_compile=self._jit_compile,
            autograph=False,
        )

    def build(self, batch: Arrays) -> None:
        """Traces the step for batches like this one.

        Args:
          batch: one row or more of what `__call__` will get.

        Raises:
          InputError: XLA cannot compile the step, and is to; or no memory for it.
        """
        rows = self.rows
        try:
            empty = {
                name: np.zeros([rows, *values.shape[1:]], values.dtype)
                for name, values in batch.items()
            }
        except MemoryError as error:
            raise validation.InputError(
                f"a batch is padded to {rows} rows, which memory does not hold. Lower "
                "the batch size, or the bound on the number of units that it follows "
                "from."
            ) from error
        arguments = self._arguments([empty], [0], [self._silence()], 0)
        with self._precisely():
            function = self._function
            made = function.get_concrete_function(*arguments)
            if self._jit_compile:
                self._require_compilable(function, arguments)
        self.read = made.variables

    def _silence(self) -> list[np.ndarray]:
        """Returns what `secure_noise` does, but zeros."""
        if self._plan.grid_step is None:
            return []
        return [np.zeros(v.shape, np.int64) for v in self.variables]

    def rehearse(self, batch: Arrays) -> None:
        """Takes a step of rows that do not count.

        It adds noise to sums of zeros, by keys that no step of the plan takes. The
        caller undoes what it leaves in weights and optimizer.

        Args:
          batch: one row or more of what `__call__` will get.
        """
        rows = self.rows
        given = {
            name: values[np.arange(rows) % len(values)]
            for name, values in batch.items()
        }
        given["weights"] = np.zeros(rows, np.float32)
        in_use = rows
        if not self._coupled:
            in_use = self._at_once * self._replicas  # a microbatch for each
        self([given], [in_use], [self._silence()], self._plan.untaken_step)

    def _require_compilable(self, function: Any, arguments: Sequence[Any]) -> None:
        """Refuses operations that XLA lacks, of which it would tell in the first call.

        Raises:
          InputError: names one of them, as XLA does.
        """
        try:
            function.experimental_get_compiler_ir(*arguments)(stage="hlo")
        except Exception as error:  # of a class that differs by version
            refused = str(error).partition("Detected unsupported operations")[2]
            if not refused:  # of the request, perhaps, and not of the step
                return
            raise validation.InputError(
                "jit_compile is True, but XLA does not have all operations of the step"
                f"{refused.splitlines()[0].rpartition('_JIT')[2]}. Use others, or set "
                "jit_compile to False."
            ) from error

    def secure_noise(self, number: int) -> list[np.ndarray]:
        """Draws the noise of a step on the host, where the plan is secure."""
        return self._key.secure_noise(number, self.variables)

    def __call__(
        self,
        batches: Sequence[Arrays],
        counts: Sequence[int],
        noise: Sequence[Sequence[np.ndarray]],
        first: int,
    ) -> list[float]:
        """Takes one step for each batch, in order.

        Args:
          batches: 1 to `most` of them, of one size; see `batches.batch_of`.
          counts: leading rows in use, of each.
          noise: of each, what `secure_noise` drew.
          first: the number of the first step in the run; the others follow it.

        Returns:
          The mean loss of each step, in which all replicas have a part.
        """
        with self._precisely():
            losses = self._function(*self._arguments(batches, counts, noise, first))
        if self._replicas > 1:
            losses = self._strategy.experimental_local_results(losses)[0]
        return np.reshape(losses, [-1])[: len(batches)].tolist()

    def _precisely(self) -> contextlib.AbstractContextManager[None]:
        """While a private step is traced or runs; see `fast.true_float32`."""
        private = self._plan.spec.private
        return fast.true_float32() if private else contextlib.nullcontext()

    def _arguments(
        self,
        batches: Sequence[Arrays],
        counts: Sequence[int],
        noise: Sequence[Sequence[np.ndarray]],
        first: int,
    ) -> list[Any]:
        """Packs what the function takes: batch, count, noise; for a loop, how many.

        Keys come last.

        A loop's are stacked, and filled up to `most`: its shapes are always the same.
        """
        dealt = [
            (lambda _, batch=batch: batch, lambda _, count=count: count)
            if self._coupled
            else split_over_replicas(batch, count, self._replicas, self._at_once)
            for batch, count in zip(batches, counts)
        ]
        more = self._most - len(batches)

        def rows_of(replica: int) -> dict[str, tf.Tensor]:
            parts = [rows(replica) for rows, _ in dealt]
            if self._most == 1:
                return {name: tf.convert_to_tensor(v) for name, v in parts[0].items()}
            return {
                name: tf.convert_to_tensor(
                    np.stack([part[name] for part in parts + parts[:1] * more])
                )
                for name in parts[0]
            }

        def count_of(replica: int) -> tf.Tensor:
            own = [count(replica) for _, count in dealt]
            return tf.constant(
                own[0] if self._most == 1 else own + [0] * more, tf.int32
            )

        arguments: list[Any] = [rows_of, count_of]
        if self._replicas == 1:
            arguments = [part(0) for part in arguments]
        else:
            arguments = [
                self._strategy.experimental_distribute_values_from_function(
                    lambda context, part=part: part(context.replica_id_in_sync_group)
                )
                for part in arguments
            ]
        # The same for all replicas, as it is added to what they have summed up.
        if self._most == 1:
            arguments.append([tf.convert_to_tensor(values) for values in noise[0]])
        else:
            filled = zip(*noise, *[noise[0]] * more)
            stacks = [tf.convert_to_tensor(np.stack(values)) for values in filled]
            arguments += [stacks, tf.constant(len(batches), tf.int32)]
        return [*arguments, self._key.step_keys(first)]

    def _on_one(self, step: Callable) -> Callable:
        if self._most == 1:
            return step
        return lambda batches, counts, noise, used, keys: self._loop(
            lambda index: _step_of(step, batches, counts, noise, keys, index), used
        )

    def _on_all(self, step: Callable) -> Callable:
        run, local = self._strategy.run, self._strategy.experimental_local_results
        if self._most == 1:
            return lambda *given: run(step, args=given)
        # The loop is around the replicas, not in them: what they wait for each other
        # with cannot be inside a loop of one's own.
        return lambda batches, counts, noise, used, keys: self._loop(
            lambda index: local(
                run(
                    lambda *given: _step_of(step, *given),
                    args=(batches, counts, noise, keys, index),
                )
            )[0],
            used,
        )

    def _loop(self, take: Callable[[tf.Tensor], tf.Tensor], used: tf.Tensor) -> Any:
        """[most] losses of the first `used` steps, one after the other; then zeros."""

        def body(index: tf.Tensor, losses: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            now = tf.range(self._most) == index
            return index + 1, tf.where(now, take(index), losses)

        return tf.while_loop(
            lambda index, _: index < used,
            body,
            (tf.constant(0), tf.zeros([self._most])),
            maximum_iterations=self._most,
            parallel_iterations=1,
        )[1]


def _step_of(
    step: Callable,
    batches: Batch,
    counts: tf.Tensor,
    noise: Sequence[tf.Tensor],
    keys: StepKeys,
    index: tf.Tensor,
) -> tf.Tensor:
    batch = {name: tf.gather(values, index) for name, values in batches.items()}
    own = [tf.gather(values, index) for values in noise]
    now = keys._replace(number=keys.number + tf.cast(index, tf.int64))
    return step(batch, tf.gather(counts, index), own, now)

"""Inference on all devices of a strategy, each with batches of its own.

Work that needs no sums between devices is shared by whole batches: every replica runs
what a single device would run, on a batch of the same size, so that results do not
depend on the number of devices.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_OVERLAPPED = 2


class Replicated:
    """A function of one batch, run on as many at a time as there are replicas.

    Attributes:
      at_a_time: most batches of a call. Of several workers, each has batches for its
        own devices.
      static: whether the devices need shapes that are known, as TPUs do.
    """

    def __init__(
        self,
        function: Callable[..., tf.Tensor],
        input_signature: Sequence[tf.TensorSpec] | None = None,
        jit_compile: bool = False,
        overlapped: bool = False,
    ):
        """Takes the strategy of the scope that this is called in.

        Args:
          function: of tensors, to one tensor; its variables were made in this scope.
          input_signature: of `function`, as `tf.function` takes it; in a scope, shapes
            are those of the calls.
          jit_compile: compile with XLA, as a TPU does in any case.
          overlapped: outside of a scope, run two batches at a time on processors,
            which fill with one what the operations of the other leave idle.
        """
        strategy = tf.distribute.get_strategy()
        inside = tf.distribute.has_strategy()
        self._strategy = strategy if inside else None
        self.at_a_time = _OVERLAPPED if overlapped and _cores_alone() else 1
        if inside:
            self.at_a_time = len(strategy.extended.worker_devices)
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self.static = isinstance(strategy, tf.distribute.TPUStrategy)
        compiled = jit_compile and not self.static
        if self._strategy is None or compiled:
            function = tf.function(
                function,
                None if self._strategy else input_signature,
                jit_compile=compiled,
                autograph=False,
            )
        if self._strategy is not None:
            alone = function
            function = tf.function(
                lambda *given: strategy.run(alone, args=given),
                autograph=False,
                # One graph for all lengths of text, where nothing forbids that.
                reduce_retracing=not (compiled or self.static),
            )
        self._function = function

    def __call__(self, batches: Sequence[Sequence[Any]]) -> list[tf.Tensor]:
        """Returns the results of 1 to `at_a_time` batches, each a list of arguments."""
        strategy = self._strategy
        if strategy is None:
            return self._by_threads(batches)
        # Replicas without a batch repeat the last one.
        filled = [*batches, *[batches[-1]] * (self.at_a_time - len(batches))]
        given = [
            strategy.experimental_distribute_values_from_function(
                lambda context, column=column: tf.convert_to_tensor(
                    column[context.replica_id_in_sync_group % len(column)]
                )
            )
            for column in zip(*filled)
        ]
        found = strategy.experimental_local_results(self._function(*given))
        return list(found[: len(batches)])

    def _by_threads(self, batches: Sequence[Sequence[Any]]) -> list[tf.Tensor]:
        if self.at_a_time == 1 or self._pool is None:
            # The first ones in turn: the function is traced.
            found = [self._function(*batch) for batch in batches]
            if self.at_a_time > 1:
                self._pool = concurrent.futures.ThreadPoolExecutor(self.at_a_time)
            return found
        return list(self._pool.map(lambda batch: self._function(*batch), batches))


def _cores_alone() -> bool:
    """Returns whether there are several cores and no accelerator."""
    return (os.cpu_count() or 1) > 1 and not tf.config.list_physical_devices("GPU")

"""Inference on all devices of a strategy, each with batches of its own.

Every replica runs what a single device would run, on a batch of the same size, so
results do not depend on the number of devices.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class Replicated:
    """A function of one batch, run on as many at a time as there are replicas.

    Attributes:
      at_a_time: most batches of a call.
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
          overlapped: outside of a scope, run two batches at a time on processors.
        """
        strategy = tf.distribute.get_strategy()
        self._strategy = strategy if tf.distribute.has_strategy() else None
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self.at_a_time = 1
        self.static = isinstance(strategy, tf.distribute.TPUStrategy)
        compiled = jit_compile and not self.static
        if self._strategy is None:
            gpus = tf.config.list_physical_devices("GPU")
            if overlapped and (os.cpu_count() or 1) > 1 and not gpus:
                self.at_a_time = 2
            self._function = tf.function(
                function, input_signature, jit_compile=compiled, autograph=False
            )
            return
        self.at_a_time = len(strategy.extended.worker_devices)
        if compiled:
            function = tf.function(function, jit_compile=True, autograph=False)
        self._function = tf.function(
            lambda *given: strategy.run(function, args=given),
            autograph=False,
            # One graph for all lengths of text, where nothing forbids that.
            reduce_retracing=not (compiled or self.static),
        )

    def __call__(self, batches: Sequence[Sequence[Any]]) -> list[tf.Tensor]:
        """Returns the results of 1 to `at_a_time` batches, each a list of arguments."""
        if self._strategy is None:
            if self._pool is not None:
                return list(self._pool.map(lambda b: self._function(*b), batches))
            found = [self._function(*batch) for batch in batches]  # traces it
            if self.at_a_time > 1:
                self._pool = concurrent.futures.ThreadPoolExecutor(self.at_a_time)
            return found
        # Replicas without a batch repeat the last one.
        filled = [*batches, *[batches[-1]] * (self.at_a_time - len(batches))]
        given = [
            self._strategy.experimental_distribute_values_from_function(
                lambda context, column=column: tf.convert_to_tensor(
                    column[context.replica_id_in_sync_group % len(column)]
                )
            )
            for column in zip(*filled)
        ]
        found = self._strategy.experimental_local_results(self._function(*given))
        return list(found[: len(batches)])

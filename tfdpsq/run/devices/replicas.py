"""Ordinary training on replicas: each takes an equal share of a batch's rows.

Results are summed over all replicas before use. (Private training distributes rows in
its own way: see `privacy.step`.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Arrays = Mapping[str, np.ndarray]
# Maps a batch, a replica's number and the number of replicas to the replica's share.
Deal = Callable[[Arrays, int, int], Arrays]


def whole_batches(
    step: Callable[[Mapping[str, tf.Tensor]], Any], jit_compile: bool, deal: Deal
) -> Callable[[Arrays], Any]:
    """Compiles a replica's step into a function of whole batches.

    Call it, and its result, in the strategy's scope if there is one.

    `step` takes a replica's share, which `deal` gives it, and returns the same scalars
    on all replicas. With `jit_compile` XLA compiles it; in a strategy's scope that is
    left to the strategy.

    Returns:
      A function from a batch to the step's result, as floats.
    """
    strategy = tf.distribute.get_strategy()
    count = strategy.num_replicas_in_sync
    if not tf.distribute.has_strategy():
        function = tf.function(step, jit_compile=jit_compile, autograph=False)
        return lambda batch: _floats(function(_tensors(batch)))
    function = tf.function(
        lambda batch: strategy.run(step, args=(batch,)), autograph=False
    )

    def on_replicas(batch: Arrays) -> Any:
        given = strategy.experimental_distribute_values_from_function(
            lambda context: _tensors(
                deal(batch, context.replica_id_in_sync_group, count)
            )
        )
        found = function(given)
        return _floats(
            tf.nest.map_structure(
                lambda value: strategy.experimental_local_results(value)[0], found
            )
        )

    return on_replicas


def rows_of(batch: Arrays, replica: int, replicas: int) -> Arrays:
    """Returns a replica's rows of a batch whose size is a multiple of `replicas`."""
    shares = {}
    for name, values in batch.items():
        share = len(values) // replicas
        shares[name] = values[replica * share : (replica + 1) * share]
    return shares


def summed(values: Sequence[Any]) -> list[Any]:
    """Returns the values' sums over all replicas; the values themselves for one.

    `values` have the same shapes on all replicas; `None` stays. Slices become dense, as
    the rows of an embedding's gradient differ between replicas.
    """
    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return list(values)
    there = [tf.convert_to_tensor(v) for v in values if v is not None]
    left = iter(replica.all_reduce(tf.distribute.ReduceOp.SUM, there))
    return [None if v is None else next(left) for v in values]


def _tensors(batch: Arrays) -> dict[str, tf.Tensor]:
    return {name: tf.constant(values) for name, values in batch.items()}


def _floats(values: Any) -> Any:
    return tf.nest.map_structure(float, values)

"""How long a step takes, from what its kernels cost and what this machine can do."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import tensorflow as tf

from tfdpsq.run.estimation.estimate_graph import Flat

# How long each measurement lasts, in seconds.
_MEASURED = 0.6
# A step's products are smaller, and its other work is harder, than what is measured.
# Fitted to steps of the tiny shape; see tests/benchmarks/estimate.py.
_REACHED = 1 / 1.4


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a machine does per second.

    Attributes:
      flops: multiplications and additions of float32 products.
      flops_16: the same of bfloat16 products.
      moved: bytes read and written by work element by element; infinite if `flops`
        is what whole steps reach.
      drawn: normally distributed random numbers.
      kernel: seconds to start a kernel.
    """

    flops: float
    flops_16: float
    moved: float = float("inf")
    drawn: float = float("inf")
    kernel: float = 0.0


def measured_rates() -> Rates:
    """What steps reach on the machine this runs on, found in about three seconds."""
    one, other = tf.ones([2048, 512]), tf.ones([512, 1024])
    flops = 2 * 2048 * 512 * 1024
    half = tf.cast(one, tf.bfloat16), tf.cast(other, tf.bfloat16)
    wide = tf.ones([2 << 20])  # 8 MiB, as activations are
    seed = tf.constant([1, 2])
    return Rates(
        flops=_reached(flops, lambda: tf.matmul(one, other)),
        flops_16=_reached(flops, lambda: tf.matmul(*half)),
        moved=_reached(3 * 4 * (2 << 20), lambda: wide + wide),
        drawn=_reached(2 << 20, lambda: tf.random.stateless_normal([2 << 20], seed)),
        kernel=5e-6,
    )


def seconds_of(flat: Flat, rates: Rates) -> float:
    """Seconds of one run of all kernels.

    Args:
      flat: a step's kernels.
      rates: of the machine that runs them.

    Returns:
      The sum over kernels: products by their operations, noise by its numbers, all
      others by the bytes they touch, each with what it takes to start it.
    """
    total = 0.0
    for node in flat.nodes:
        if node.inline:
            continue
        if node.flops:
            length = node.flops / (rates.flops_16 if node.half else rates.flops)
        else:
            length = max(node.moved / rates.moved, node.drawn / rates.drawn)
        total += node.times * (rates.kernel + length)
    return total


def flops_of(flat: Flat) -> float:
    """Multiplications and additions of all products."""
    return sum(node.times * node.flops for node in flat.nodes)


def _reached(work: float, run: Callable[[], tf.Tensor]) -> float:
    """How much of such work is done in a second of a step."""
    run()
    # The mean, not the best: what others do on the machine slows training as well.
    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < _MEASURED:
        run()
        runs += 1
    return _REACHED * work * runs / (time.perf_counter() - start)

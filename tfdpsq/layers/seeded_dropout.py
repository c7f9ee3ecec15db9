"""Dropout that follows from a seed, and from where in a batch a row stands.

A batch may be cut into parts: shares of replicas, rows that are embedded at a time. A
row must lose the same units whoever computes it, or the same training would end in
other weights on other devices. So what a dropout draws is a stretch of one stream of
random numbers for the whole batch, which every part enters where its rows begin:
Philox (Salmon et al. 2011, *Parallel Random Numbers: As Easy as 1, 2, 3*) computes any
stretch of its stream without those before it.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

# Numbers that one value of Philox's counter gives.
_GROUP = 4
# Calls have the lower bits of a counter's upper half, kinds of rows those above.
_CALLS = 1 << 32

_NEXT: contextvars.ContextVar[Callable[[], tf.Tensor] | None] = contextvars.ContextVar(
    "next_dropout_seed", default=None
)
_KINDS: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar(
    "kinds_of_rows", default=(1,)
)


@contextlib.contextmanager
def dropout_seed(
    seed: tf.Tensor, part: tf.Tensor | int = 0, parts: int = 1
) -> Iterator[None]:
    """Within it, this package's T5 layers draw dropout from the arguments alone.

    The n-th dropout to be called draws from the seed, n and the place of its rows in
    the batch: the same calls in the same order drop the same units, in another run, on
    other devices, compiled by XLA or not (but for TPUs, which make another key of the
    seed, and for seeds beyond 32 bits, of which XLA takes the lower). A batch may be
    cut into any number of parts of one size, and its rows lose what they would lose
    uncut. Each replica of a `tf.distribute.Strategy` has so many of them, the first
    replica the first.

    Args:
      seed: [2] integers, the same on all replicas.
      part: which part of this replica's rows, from 0, the calls are on. In all that
        is dropped, one row's elements come before the next row's.
      parts: how many parts this replica's rows are cut into.
    """
    numbers = itertools.count()
    replica = tf.distribute.get_replica_context()
    before = 0 if replica is None else replica.replica_id_in_sync_group
    place = tf.cast(before, tf.int64) * parts + tf.cast(part, tf.int64)
    first, second = tf.unstack(tf.cast(seed, tf.int64))
    token = _NEXT.set(
        lambda: tf.stack([first, second, tf.constant(next(numbers), tf.int64), place])
    )
    try:
        yield
    finally:
        _NEXT.reset(token)


@contextlib.contextmanager
def kinds_of_rows(counts: Sequence[int]) -> Iterator[None]:
    """Within it, rows of several batches stand one after the other.

    A part of each: so many rows of the first, then so many of the second. Cut into
    parts, every part has its share of each.

    Args:
      counts: rows of each kind, of a part.
    """
    token = _KINDS.set(tuple(counts))
    try:
        yield
    finally:
        _KINDS.reset(token)


def current_kinds() -> tuple[int, ...]:
    """What `kinds_of_rows` was given; one kind where it is not in force."""
    return _KINDS.get()


def seed_of_step(seed: int, step: tf.Tensor) -> tf.Tensor:
    """[2] int64 for `dropout_seed`: of a run's seed, any integer, and its step."""
    return tf.stack([tf.constant(seed % (1 << 63), tf.int64), tf.cast(step, tf.int64)])


def next_dropout_seed() -> tf.Tensor | None:
    """[4] int64 for `dropped`; `None` where no `dropout_seed` is in force."""
    draw = _NEXT.get()
    return None if draw is None else draw()


def dropped(x: tf.Tensor, rate: float, seed: tf.Tensor) -> tf.Tensor:
    """Dropout by seed and place.

    Args:
      x: floating point, of a shape that XLA knows; rows first.
      rate: share of the elements that become zero, to within 2^-32.
      seed: of `next_dropout_seed`.

    Returns:
      The same shape; what stays is divided by 1 - rate.
    """
    known = x.shape.is_fully_defined()
    shape = x.shape if known else tf.shape(x)
    size = math.prod(x.shape) if known else tf.size(x, tf.int64)
    bits = tf.reshape(_bits(size, seed), shape)
    # Integers, whose draws are the same compiled or not.
    kept = bits >= tf.constant(int(rate * 2**32), tf.uint32)
    return tf.where(kept, x / (1 - rate), tf.zeros_like(x))


def _bits(size: int | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """[size] uint32: this part's of the streams of a dropout, one for each kind."""
    call, part = seed[2], seed[3]
    key, _ = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed[:2])
    kinds = current_kinds()
    each = size // sum(kinds)
    found = []
    for kind, count in enumerate(kinds):
        wanted = each * count
        start = part * tf.cast(wanted, tf.int64)
        aligned = isinstance(wanted, int) and wanted % _GROUP == 0
        drawn = wanted if aligned else (wanted // _GROUP + 2) * _GROUP
        counter = tf.cast([start // _GROUP, call + kind * _CALLS], tf.uint64)
        bits = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[drawn],
            key=key,
            counter=counter,
            alg=tf.random.Algorithm.PHILOX.value,
            dtype=tf.uint32,
        )
        if not aligned:
            bits = tf.slice(bits, [start % _GROUP], [wanted])
        found.append(bits)
    return found[0] if len(found) == 1 else tf.concat(found, axis=0)


@tf.keras.utils.register_keras_serializable("tfdpsq")
class SeededDropout(tf.keras.layers.Dropout):
    """Keras's Dropout, which follows `dropout_seed` where that is in force."""

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Drops as `tf.keras.layers.Dropout` does.

        Args:
          inputs: any shape.
          training: whether anything is dropped.

        Returns:
          The same shape.
        """
        seed = next_dropout_seed() if training and self.rate else None
        if seed is None:
            return super().call(inputs, training=training)
        return dropped(inputs, self.rate, seed)

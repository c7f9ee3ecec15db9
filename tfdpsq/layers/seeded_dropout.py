"""Dropout determined by a seed and by each row's place in the batch.

A row loses the same units however a batch is split into replicas' shares or parts. Each
dropout has one stream of random numbers for the whole batch, and every part reads the
stretch of its own rows: Philox (Salmon et al. 2011, *Parallel Random Numbers: As Easy
as 1, 2, 3*) computes any stretch without those before it.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdpsq import dropout_masks
from tfdpsq.keras_choice import keras

# Calls have the lower bits of a counter's upper half, kinds of rows those above.
_CALLS = 1 << 32

_NEXT: contextvars.ContextVar[Callable[[], tf.Tensor] | None] = contextvars.ContextVar(
    "next_dropout_seed", default=None
)
_KINDS: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar(
    "kinds_of_rows", default=(1,)
)


@contextlib.contextmanager
def _within(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def dropout_seed(
    seed: tf.Tensor, part: tf.Tensor | int = 0, parts: int = 1
) -> contextlib.AbstractContextManager[None]:
    """Makes this package's layers draw dropout from the arguments alone.

    The n-th dropout call inside draws from the seed, n and the place of its rows in the
    batch: the same calls in the same order drop the same units in another run, on other
    devices, with XLA or without (except on TPUs, which derive another key from the
    seed, and for seeds beyond 32 bits, of which XLA takes the lower). A batch split
    into equal parts loses the same units as unsplit. Each replica of a
    `tf.distribute.Strategy` has `parts` of them, in the order of the replicas.

    Args:
      seed: [2] integers, the same on all replicas.
      part: number of the part of this replica's rows, from 0, that the calls are on.
        Rows are the first axis of every tensor that is dropped.
      parts: number of parts that this replica's rows are split into.
    """
    numbers = itertools.count()
    replica = tf.distribute.get_replica_context()
    before = 0 if replica is None else replica.replica_id_in_sync_group
    place = tf.cast(before, tf.int64) * parts + tf.cast(part, tf.int64)
    # Once, not in each call: these are 230 operations where XLA compiles.
    words = tf.raw_ops.StatelessRandomGetKeyCounter(seed=tf.cast(seed, tf.int64))
    key = tf.bitcast(words.key[0], tf.int64)
    return _within(
        _NEXT, lambda: tf.stack([key, tf.constant(next(numbers), tf.int64), place])
    )


def given_seeds(seeds: tf.Tensor | None) -> contextlib.AbstractContextManager[None]:
    """Makes the n-th dropout inside use row n of `seeds`; `None` changes nothing."""
    if seeds is None:
        return contextlib.nullcontext()
    return _within(_NEXT, iter(tf.unstack(seeds)).__next__)


def kinds_of_rows(counts: Sequence[int]) -> contextlib.AbstractContextManager[None]:
    """Declares that a part's rows come from several batches, `counts` from each."""
    return _within(_KINDS, tuple(counts))


def current_kinds() -> tuple[int, ...]:
    """Returns the argument of the enclosing `kinds_of_rows`; (1,) outside of one."""
    return _KINDS.get()


def seed_of_step(seed: int, step: tf.Tensor) -> tf.Tensor:
    """Returns [2] int64 for `dropout_seed`, from a run's seed and its step."""
    return tf.stack([tf.constant(seed % (1 << 63), tf.int64), tf.cast(step, tf.int64)])


def next_dropout_seed() -> tf.Tensor | None:
    """Returns [3] int64 for `dropped`, or `None` outside of `dropout_seed`.

    They are Philox's key, the upper half of its counter, and the number of the part.
    """
    draw = _NEXT.get()
    return None if draw is None else draw()


def dropped(x: tf.Tensor, rate: float, seed: tf.Tensor) -> tf.Tensor:
    """Applies dropout by seed and place.

    Args:
      x: floating point, of a shape that XLA knows; rows first.
      rate: share of the elements that become zero, to within 2^-17.
      seed: [3] from `next_dropout_seed`, or [2] for TensorFlow's stateless dropout.

    Returns:
      The same shape; kept elements are divided by 1 - rate.
    """
    if seed.shape[0] == 2:
        return tf.nn.experimental.stateless_dropout(x, rate=rate, seed=seed)
    shape = x.shape.as_list() if x.shape.is_fully_defined() else tf.shape(x)
    with tf.name_scope("tfdpsq_keyed_draw"):  # which `privacy` looks for
        words = _words(dropout_masks.words_for(shape), seed)
    kept = dropout_masks.kept(words, rate, shape)
    return tf.where(kept, x / (1 - rate), tf.zeros_like(x))


def _words(shape: Sequence[int | tf.Tensor], seed: tf.Tensor) -> tf.Tensor:
    """Returns [rows, groups, 4] uint32: this part's stretch of a dropout's stream."""
    (rows, groups, size), (_, call, part) = shape, tf.unstack(seed)
    kinds = current_kinds()
    found = []
    for kind, count in enumerate(kinds):
        own = rows // sum(kinds) * count
        start = part * tf.cast(own, tf.int64) * tf.cast(groups, tf.int64)
        words = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[own, groups, size],
            key=tf.bitcast(seed[:1], tf.uint64),
            counter=tf.bitcast(tf.stack([start, call + kind * _CALLS]), tf.uint64),
            alg=tf.random.Algorithm.PHILOX.value,
            dtype=tf.uint32,
        )
        found.append(words)
    return tf.concat(found, axis=0)


@keras.utils.register_keras_serializable("tfdpsq")
class SeededDropout(keras.layers.Dropout):
    """Keras's Dropout, made reproducible by an enclosing `dropout_seed`.

    Example:
      >>> layer = SeededDropout(0.5)
      >>> with dropout_seed([1, 2]):
      ...     first = layer(tf.ones([4, 8]), training=True)
      >>> with dropout_seed([1, 2]):
      ...     second = layer(tf.ones([4, 8]), training=True)
      >>> bool(tf.reduce_all(first == second))
      True
    """

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Drops as `keras.layers.Dropout` does; any shape."""
        seed = next_dropout_seed() if training and self.rate else None
        if seed is None:
            return super().call(inputs, training=training)
        return dropped(inputs, self.rate, seed)

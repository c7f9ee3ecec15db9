"""Dropout that can be drawn twice alike: from a seed that is in force around a call."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator

import tensorflow as tf

_NEXT: contextvars.ContextVar[Callable[[], tf.Tensor] | None] = contextvars.ContextVar(
    "next_dropout_seed", default=None
)


@contextlib.contextmanager
def dropout_seed(seed: tf.Tensor) -> Iterator[None]:
    """Within it, this package's T5 layers draw dropout from the seed alone.

    The n-th dropout to be called draws from the seed and n: the same calls in the same
    order drop the same units, in another run, too.

    Args:
      seed: [2] integers.
    """
    numbers = itertools.count()
    token = _NEXT.set(
        lambda: tf.random.experimental.stateless_fold_in(
            tf.cast(seed, tf.int64), tf.constant(next(numbers), tf.int64)
        )
    )
    try:
        yield
    finally:
        _NEXT.reset(token)


def next_dropout_seed() -> tf.Tensor | None:
    """[2] int64, the seed of the next dropout; `None` where none is in force."""
    draw = _NEXT.get()
    return None if draw is None else draw()


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
        return tf.nn.experimental.stateless_dropout(inputs, self.rate, seed=seed)

"""The noise of a logical step: tensorflow-privacy's Gaussian sum, replayable.

Every variable of every step has a key of its own, made from secret bits, the step
number and the variable's position: same-shaped variables and successive steps get
independent noise, every replica draws the same, and a step replayed after an
interruption gets what it got before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import tensorflow as tf
from tensorflow_privacy.privacy.dp_query import gaussian_query

_HALF = (1 << 63) - 1


class SeededGaussianSumQuery(gaussian_query.GaussianSumQuery):
    """tensorflow-privacy's Gaussian sum query with noise from a given seed.

    The parent draws from TF's stateful generator, which differs by replica and
    cannot be replayed; everything else is the parent's.
    """

    def noised(
        self, sums: Sequence[tf.Tensor], seed: tf.Tensor, step: tf.Tensor
    ) -> list[tf.Tensor]:
        """The sums plus independent Gaussian noise.

        Args:
          sums: one float tensor per variable.
          seed: [2] int64, secret.
          step: scalar int64, new for every logical step.

        Returns:
          Tensors shaped as `sums`, with noise of deviation `stddev` added.
        """
        return [
            value
            + tf.random.stateless_normal(
                tf.shape(value),
                noise_key(seed, step, position),
                stddev=self._stddev,
                dtype=value.dtype,
            )
            for position, value in enumerate(sums)
        ]


def noise_key(
    seed: tf.Tensor, step: tf.Tensor | int, position: tf.Tensor | int
) -> tf.Tensor:
    """The seed of one draw in one step.

    Step and position are added to the two halves by exclusive or: all keys of a run
    differ, and none has fewer secret bits than the seed. (TensorFlow's
    `stateless_fold_in` would not do: with a Python integer it returns 32 bits.)

    XLA keeps the low 32 bits of each half, 64 in all. So a position's upper bits are
    added to the first half as well: keys differ there, too, up to 2^20 steps and, in
    `randomness`, up to 2^12 microbatches.

    Args:
      seed: [2] int64.
      step: scalar integer, at least 0.
      position: which draw, a scalar integer, at least 0.

    Returns:
      [2] int64.
    """
    mixed = tf.stack([tf.cast(step, tf.int64), tf.cast(position, tf.int64)])
    upper = tf.bitwise.right_shift(mixed[1], tf.constant(32, tf.int64))
    mixed = tf.bitwise.bitwise_xor(mixed, tf.stack([upper, tf.zeros_like(upper)]))
    return tf.bitwise.bitwise_xor(seed, mixed)


def as_words(seed: int) -> tuple[int, int]:
    """The seed's lowest 126 bits as two numbers that fit an int64 each."""
    return seed & _HALF, (seed >> 63) & _HALF


def derived_seed(seed: int, purpose: str) -> int:
    """A seed for another purpose, which tells nothing about `seed` or the others.

    Args:
      seed: at least 0, below 2^128.
      purpose: any text; each has its own seed.

    Returns:
      128 bits.
    """
    message = seed.to_bytes(16, "big") + purpose.encode()
    return int.from_bytes(hashlib.blake2b(message, digest_size=16).digest(), "big")

"""Dropout masks from random words: the same with XLA or without, and fast on TPUs.

Each half of Philox's 32-bit words decides about one element: first come all groups'
first words, as a group's words side by side would take TPUs 32 times the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Union

import tensorflow as tf

WORDS = 4  # of a group

Shape = Union[Sequence[int], tf.Tensor]


def words_for(shape: Shape) -> list[int | tf.Tensor]:
    """Returns the shape [rows, groups, 4] of the words that `kept` takes."""
    scalar = not tf.is_tensor(shape) and len(shape) == 0
    return [1 if scalar else shape[0], -(-elements(shape) // (2 * WORDS)), WORDS]


def kept(words: tf.Tensor, rate: float, shape: Shape) -> tf.Tensor:
    """Decides which elements dropout keeps; a row's follow from its own words.

    Args:
      words: uint32, uniform, of the shape that `words_for` returns.
      rate: share of the elements that are dropped, to within 2^-17.
      shape: of what is dropped and of the result, bool; rows first.
    """
    least = tf.constant(round(float(rate) * 2**16), tf.uint32)
    halves = (
        tf.bitwise.bitwise_and(words, tf.constant(0xFFFF, tf.uint32)),
        tf.bitwise.right_shift(words, tf.constant(16, tf.uint32)),
    )
    found = [half[..., word] >= least for half in halves for word in range(WORDS)]
    return tf.reshape(tf.concat(found, axis=1)[:, : elements(shape)], shape)


def elements(shape: Shape) -> int | tf.Tensor:
    """Returns how many elements a row has."""
    return tf.reduce_prod(shape[1:]) if tf.is_tensor(shape) else math.prod(shape[1:])

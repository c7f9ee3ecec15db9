"""Dropout masks from random words: the same with XLA or without, and fast on TPUs.

Philox gives groups of four words of 32 bits; each half of a word decides about one
element. A row has first the elements of all first words' lower halves, then those of
all second words', and so on: a TPU, whose tiles have 128 columns, would take 32 times
the memory to put a group's four words side by side.
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
    """Decides which elements dropout keeps.

    Args:
      words: uint32, uniform, of the shape that `words_for` returns.
      rate: share of the elements that are dropped, to within 2^-17.
      shape: of what is dropped, rows first.

    Returns:
      [*shape] bool. A row's follow from its own words.
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

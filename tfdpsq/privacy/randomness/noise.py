"""The noise of a logical step, which can be drawn again.

Every variable of every step has a key of its own, made from secret bits, the step
number and the variable's position: same-shaped variables and successive steps have
independent draws, every replica draws the same, and a replayed step repeats them.

Draws name Philox (Salmon et al. 2011), its key and its counter. TensorFlow's own way
from a seed to these keeps 64 of its 128 bits where XLA compiles, lets a TPU choose its
generator, and is 230 operations in each compiled draw.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

# How draws follow from seeds; no run resumes under another name.
SCHEME = "two draws of Philox under HKDF keys, Box-Muller, 16 bits a dropout"
_PHILOX = tf.random.Algorithm.PHILOX.value
# Draws that make the noise together. A Philox key has 64 bits, which part of a draw is
# enough to search for; two must be guessed together.
DRAWS = 2
# Values of Philox's counter that one draw may use: four numbers each.
_BLOCK_BITS = 40
_HALF = (1 << 63) - 1


class DrawKey(NamedTuple):
    """The start of a draw, as TensorFlow's `StatelessRandom...V2` take it."""

    key: tf.Tensor  # [1] uint64
    counter: tf.Tensor  # [2] uint64, the lower half first; four numbers add one to it


def noised(
    sums: Sequence[tf.Tensor], stddev: float, seed: tf.Tensor, step: tf.Tensor
) -> list[tf.Tensor]:
    """The sums, a float tensor per variable, plus Gaussian noise of deviation `stddev`.

    `seed`, [DRAWS, 2] int64, is secret; `step`, int64, is new for every logical step.
    """
    words = tf.unstack(seed, DRAWS)
    found = []
    for position, value in enumerate(sums):
        keys = [draw_key(own, step, position) for own in words]
        drawn = _gaussian(value.shape, keys, value.dtype)
        found.append(value + tf.cast(stddev, value.dtype) * drawn)
    return found


def _gaussian(
    shape: tf.TensorShape, keys: Sequence[DrawKey], dtype: tf.DType
) -> tf.Tensor:
    """Standard normal numbers, from the exclusive or of the draws' bits if float32."""
    if dtype != tf.float32:
        draw = functools.partial(
            tf.raw_ops.StatelessRandomNormalV2, shape=shape, alg=_PHILOX, dtype=dtype
        )
        drawn = [draw(key=key, counter=counter) for key, counter in keys]
        return tf.add_n(drawn) / len(keys) ** 0.5
    size = shape.num_elements()
    drawn = [integers([2, (size + 1) // 2], key, tf.uint32) for key in keys]
    bits = functools.reduce(tf.bitwise.bitwise_xor, drawn)
    return tf.reshape(tf.reshape(gaussian_of(bits, axis=0), [-1])[:size], shape)


def gaussian_of(bits: tf.Tensor, axis: int = -1) -> tf.Tensor:
    """Standard normal numbers, float32 and 6.6 at most, by Box and Muller's transform.

    The two halves of uint32 `bits` along `axis`, of even length, make a number each.
    """
    first, second = tf.split(bits, 2, axis)
    angle = tf.cast(tf.bitcast(second, tf.int32), tf.float32) * (math.pi * 2.0**-31)
    radius = tf.sqrt(-2 * tf.math.log(uniform_of(first)))
    return tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis)


def uniform_of(bits: tf.Tensor) -> tf.Tensor:
    """Numbers in (0, 1], float32, from the upper 31 bits of each uint32."""
    upper = tf.bitwise.right_shift(bits, tf.constant(1, tf.uint32))
    return (tf.cast(tf.bitcast(upper, tf.int32), tf.float32) + 0.5) * 2.0**-31


def draw_key(
    seed: tf.Tensor, step: tf.Tensor | int, position: tf.Tensor | int
) -> DrawKey:
    """The key of one draw in one step.

    The first word of the seed is Philox's key. The second, with the step added to it by
    exclusive or, is the upper half of its counter, and the position, below 2^24, the
    lower half, in steps that no draw is as long as. So no two draws of a run share a
    value of the counter, and all bits of the seed, [2] int64, count on every device.
    """
    first, second = tf.unstack(seed, 2)
    lower = tf.cast(position, tf.int64) * (1 << _BLOCK_BITS)
    upper = tf.bitwise.bitwise_xor(second, tf.cast(step, tf.int64))
    return DrawKey(
        tf.bitcast(first[tf.newaxis], tf.uint64),
        tf.bitcast(tf.stack([lower, upper]), tf.uint64),
    )


def integers(
    shape: tf.Tensor | Sequence[int], key: DrawKey, dtype: tf.DType
) -> tf.Tensor:
    """Uniform numbers over all of an integer `dtype`, [*shape], by Philox."""
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape, key=key.key, counter=key.counter, alg=_PHILOX, dtype=dtype
    )


def as_words(seed: int) -> tuple[int, int]:
    """The seed's lowest 126 bits as two numbers that fit an int64 each."""
    return seed & _HALF, (seed >> 63) & _HALF

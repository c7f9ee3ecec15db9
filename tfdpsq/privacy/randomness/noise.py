"""The noise of a logical step, which can be drawn again.

Every variable of every step has a key of its own, made from secret bits, the step
number and the variable's position: same-shaped variables and successive steps have
independent draws, every replica draws the same, and a step replayed after an
interruption gets what it got before.

Draws name Philox (Salmon et al. 2011), its key and its counter. TensorFlow's own way
from a seed to these keeps 32 bits of each of the seed's two words where XLA compiles,
lets a TPU choose its generator, and is 230 operations in each compiled draw.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

# How draws follow from seeds; no run resumes under another name, as its steps differ.
SCHEME = "two draws of Philox under HKDF keys, Box-Muller, 16 bits a dropout"
_PHILOX = tf.random.Algorithm.PHILOX.value
# Draws whose bits make the noise together. A Philox key has 64 bits, and part of a draw
# is enough to try all keys; two must be guessed together.
DRAWS = 2
# Values of Philox's counter that one draw may use: four numbers each.
_BLOCK_BITS = 40
_HALF = (1 << 63) - 1


class DrawKey(NamedTuple):
    """The start of a draw, as TensorFlow's `StatelessRandom...V2` take it.

    [1] and [2] uint64, the counter's lower half first; four numbers add one to it.
    """

    key: tf.Tensor
    counter: tf.Tensor


def noised(
    sums: Sequence[tf.Tensor], stddev: float, seed: tf.Tensor, step: tf.Tensor
) -> list[tf.Tensor]:
    """The sums plus Gaussian noise.

    Args:
      sums: one float tensor per variable.
      stddev: deviation of the noise, σΔ.
      seed: [DRAWS, 2] int64, secret.
      step: scalar int64, new for every logical step.
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
    """Standard normal numbers from the bits of several draws together.

    float32 from the exclusive or of the draws' bits; others as a sum of normal draws.
    """
    if dtype != tf.float32:
        normal = tf.raw_ops.StatelessRandomNormalV2
        drawn = [
            normal(shape=shape, key=key, counter=counter, alg=_PHILOX, dtype=dtype)
            for key, counter in keys
        ]
        return tf.add_n(drawn) / len(keys) ** 0.5
    size = shape.num_elements()
    drawn = [integers([2, (size + 1) // 2], key, tf.uint32) for key in keys]
    bits = functools.reduce(tf.bitwise.bitwise_xor, drawn)
    return tf.reshape(tf.reshape(gaussian_of(bits, axis=0), [-1])[:size], shape)


def gaussian_of(bits: tf.Tensor, axis: int = -1) -> tf.Tensor:
    """Standard normal numbers, 6.6 at most, by Box and Muller's transform.

    Args:
      bits: uint32; its two halves along an axis make one float32 number each.
      axis: that axis, of even length.
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
    exclusive or, is the upper half of its counter, and the position the lower half, in
    steps that no draw is as long as. So no two draws of a run share a value of the
    counter, and all bits of the seed count on every device.

    Args:
      seed: [2] int64.
      step: scalar integer.
      position: which draw of the step, a scalar integer below 2^24.
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

"""The noise of a logical step, which can be drawn again.

Every variable of every step has a key of its own, made from secret bits, the step
number and the variable's position: same-shaped variables and successive steps have
independent draws, every replica draws the same, and a step replayed after an
interruption gets what it got before. Noise that cancels over steps (`correlation`) is
made of the same draws, made again in each step of their window.

Draws name Philox (Salmon et al. 2011), its key and its counter. TensorFlow's own way
from a seed to these keeps 32 bits of each of the seed's two words where XLA compiles,
takes a generator of the device's choice on a TPU, and is 230 operations in each
compiled draw.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdpsq.privacy.randomness.correlation import NoiseWindow

# Names how draws follow from seeds; another way is another name. A run does not resume
# under another one: its steps would be other steps.
SCHEME = "two draws of Philox by key and counter, Box-Muller, 16 bits a dropout"
PHILOX = tf.random.Algorithm.PHILOX.value
# Draws whose bits make the noise together. A Philox key has 64 bits, and Philox can be
# inverted: who knows some of a single draw tries these. Of two they must guess both.
DRAWS = 2
# Values of Philox's counter that one draw may use: four numbers each.
_BLOCK_BITS = 40
_HALF = (1 << 63) - 1


class DrawKey(NamedTuple):
    """The start of a draw, as TensorFlow's `StatelessRandom...V2` take it.

    Attributes:
      key: [1] uint64.
      counter: [2] uint64, the lower half first; each four numbers add one to it.
    """

    key: tf.Tensor
    counter: tf.Tensor


def noised(
    sums: Sequence[tf.Tensor],
    stddev: float,
    seed: tf.Tensor,
    step: tf.Tensor,
    window: NoiseWindow | None = None,
) -> list[tf.Tensor]:
    """The sums plus Gaussian noise.

    Args:
      sums: one float tensor per variable.
      stddev: deviation of the noise, σΔ.
      seed: [DRAWS, 2] int64, secret.
      step: scalar int64, new for every logical step.
      window: where noise cancels; `None` makes it independent of other steps'.

    Returns:
      Tensors shaped as `sums`, with noise of deviation `stddev` added, or with the
      window's shares of such noise, drawn afresh for this step and again for each step
      before it in its window.
    """
    if window is None:
        return _with_draws(sums, seed, step, stddev)
    # Of the sums' own type: no 64-bit floats where a TPU would emulate them.
    shares = tf.constant(stddev * window.shares(), sums[0].dtype)
    before = window.position(step)

    def add(past: Any, *values: Any) -> Any:
        return past + 1, *_with_draws(values, seed, step - past, shares[past])

    _, *found = tf.while_loop(
        lambda past, *_: past <= before,
        add,
        (tf.constant(0, tf.int64), *sums),
        maximum_iterations=window.steps,
        parallel_iterations=1,
    )
    return found


def _with_draws(
    sums: Sequence[tf.Tensor],
    seed: tf.Tensor,
    step: tf.Tensor,
    deviation: float | tf.Tensor,
) -> list[tf.Tensor]:
    words = tf.unstack(seed, DRAWS)
    found = []
    for position, value in enumerate(sums):
        keys = [draw_key(own, step, position) for own in words]
        drawn = _gaussian(value.shape, keys, value.dtype)
        found.append(value + tf.cast(deviation, value.dtype) * drawn)
    return found


def _gaussian(
    shape: tf.TensorShape, keys: Sequence[DrawKey], dtype: tf.DType
) -> tf.Tensor:
    """Standard normal numbers from the bits of several draws together.

    float32 by Box and Muller's transform of 32 random bits a number, the exclusive or
    of the draws' bits; others as a sum of normal draws. The largest of float32 is 6.6.
    """
    if dtype != tf.float32:
        return tf.add_n([normal(shape, key, dtype) for key in keys]) / len(keys) ** 0.5
    size = shape.num_elements()
    words = [2, (size + 1) // 2]
    bits = integers(words, keys[0], tf.uint32)
    for key in keys[1:]:
        bits = tf.bitwise.bitwise_xor(bits, integers(words, key, tf.uint32))
    return tf.reshape(tf.reshape(gaussian_of(bits, axis=0), [-1])[:size], shape)


def gaussian_of(bits: tf.Tensor, axis: int = -1) -> tf.Tensor:
    """Standard normal numbers by Box and Muller's transform.

    Args:
      bits: uint32; two halves along an axis make one number each.
      axis: that axis, of even length.

    Returns:
      float32, of the same shape; 6.6 at most.
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
      step: scalar integer, at least 0.
      position: which draw, a scalar integer, at least 0 and below 2^24.
    """
    first, second = tf.unstack(seed, 2)
    lower = tf.cast(position, tf.int64) * (1 << _BLOCK_BITS)
    upper = tf.bitwise.bitwise_xor(second, tf.cast(step, tf.int64))
    return DrawKey(
        tf.bitcast(first[tf.newaxis], tf.uint64),
        tf.bitcast(tf.stack([lower, upper]), tf.uint64),
    )


def normal(
    shape: tf.Tensor | Sequence[int], key: DrawKey, dtype: tf.DType
) -> tf.Tensor:
    """Standard normal numbers, [*shape] of `dtype`, by Philox."""
    return tf.raw_ops.StatelessRandomNormalV2(
        shape=shape, key=key.key, counter=key.counter, alg=PHILOX, dtype=dtype
    )


def integers(
    shape: tf.Tensor | Sequence[int], key: DrawKey, dtype: tf.DType
) -> tf.Tensor:
    """Uniform numbers over all of an integer `dtype`, [*shape], by Philox."""
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape, key=key.key, counter=key.counter, alg=PHILOX, dtype=dtype
    )


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

"""Samplers: one token from logits, by greedy, top-k or nucleus sampling.

The randomness comes in as one uniform number per row. A row's token is a function of
its own logits and its own number, whatever else is in the batch.

The nucleus is never sorted out. A token is drawn from all of them and kept if it is in
the nucleus, which takes one sum: the mass of the tokens that are more probable is below
p. If it is not, neither is any less probable token, so the next draw is from the more
probable ones alone. The kept token follows the nucleus's law exactly, and over a flat
distribution of 32,128 tokens, where sorting costs more than the network, a row needs
1.2 draws on average.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpsq import validation

# Draws a token a row from logits [B, V] float32 (-inf for tokens that must not be
# drawn) and uniforms [B] float32 in [0, 1): [B] int32. Hashable, for compiled
# functions are kept by sampler.
Sampler = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

# Logits divided by less could exceed float32.
LEAST_TEMPERATURE = 1e-3
# Sums over tokens are taken within blocks of this size, and then over the blocks.
_BLOCK = 128
# The part of the distribution beyond the nucleus shrinks by a uniform factor a draw:
# more than 40 draws have a probability below 1e-20 for every p.
_DRAWS = 64


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Takes the most probable token; of equal ones the lowest id."""

    def __call__(self, logits: tf.Tensor, uniforms: tf.Tensor) -> tf.Tensor:
        """See `Sampler`; the uniforms are ignored."""
        del uniforms
        return tf.argmax(logits, axis=-1, output_type=tf.int32)


@dataclasses.dataclass(frozen=True)
class TopP:
    """Nucleus sampling (Holtzman et al. 2020).

    Draws from the smallest set of most probable tokens whose probabilities reach p,
    and from all that are as probable as its last one.

    Attributes:
      p: in (0, 1]; 1 keeps all tokens. The paper uses 0.8.
      k: keep the k most probable tokens before that; `None` keeps all.
      temperature: divides the logits first.

    Raises:
      InputError: a value out of range.
    """

    p: float = 0.8
    k: int | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Checks every value."""
        validation.in_range("top_p", self.p, 0.0, 1.0, low_open=True)
        if self.k is not None:
            validation.positive_integer("top_k", self.k)
        validation.in_range(
            "temperature", self.temperature, LEAST_TEMPERATURE, float("inf")
        )

    def __call__(self, logits: tf.Tensor, uniforms: tf.Tensor) -> tf.Tensor:
        """See `Sampler`."""
        if self.temperature != 1:
            logits = logits / self.temperature
        if self.k is None or self.k >= logits.shape[-1]:
            return _sample(logits, uniforms, self.p)
        logits, ids = tf.math.top_k(logits, self.k)
        places = _sample(logits, uniforms, self.p)
        return tf.gather(ids, places, batch_dims=1)


class TopK(TopP):
    """Draws from the k most probable tokens; see `TopP`."""

    def __init__(self, k: int, temperature: float = 1.0) -> None:
        """Checks the values."""
        super().__init__(1.0, k, temperature)


def sampler_of(temperature: float, top_k: int | None, top_p: float) -> Sampler:
    """Returns the sampler of three settings; temperature 0 is greedy decoding."""
    return Greedy() if temperature == 0 else TopP(top_p, top_k or None, temperature)


def _sample(logits: Any, uniforms: Any, top_p: float) -> Any:
    """Draws from all tokens, then from the more probable ones, … (see above)."""
    weights = tf.nn.softmax(logits)
    missing = -logits.shape[-1] % _BLOCK
    weights = tf.pad(weights, [[0, 0], [0, missing]]) if missing else weights
    weights = tf.reshape(weights, [-1, weights.shape[-1] // _BLOCK, _BLOCK])
    sums = tf.reduce_sum(weights, axis=-1)
    token, weight = _draw(weights, sums, -tf.ones_like(uniforms), uniforms)
    if top_p == 1:
        return token
    target = top_p * tf.reduce_sum(sums, axis=-1)

    def more_probable(weight: Any) -> Any:
        # This op is `where(weights > weight, weights, 0)` in half the time.
        excess = weights - weight[:, None, None]
        more = tf.raw_ops.ReluGrad(gradients=weights, features=excess)
        return tf.reduce_sum(more, axis=-1)

    def outside(sums: Any) -> Any:
        # Not a number is inside: no loop without end.
        return tf.reduce_sum(sums, axis=-1) >= target

    def body(draws: Any, token: Any, weight: Any, sums: Any) -> Any:
        new, bound = _draw(weights, sums, weight, _renewed(uniforms, draws))
        token = tf.where(outside(sums), new, token)
        weight = tf.where(outside(sums), bound, weight)
        return draws + 1, token, weight, more_probable(weight)

    return tf.while_loop(
        lambda draws, token, weight, sums: tf.reduce_any(outside(sums)),
        body,
        (tf.constant(1), token, weight, more_probable(weight)),
        maximum_iterations=_DRAWS,
    )[1]


def _draw(weights: Any, sums: Any, bound: Any, uniforms: Any) -> tuple[Any, Any]:
    """Draws from the tokens with more weight than a bound [B].

    `weights` are [B, blocks, _BLOCK], `sums` [B, blocks] of those above the bound.
    Returns tokens [B] int32, never one of weight 0, and their weights.
    """
    cumulative = tf.cumsum(sums, axis=-1)
    aim = uniforms * cumulative[:, -1]
    block = _first_beyond(cumulative, sums, aim)
    aim -= tf.gather(cumulative - sums, block, batch_dims=1)
    contents = tf.gather(weights, block, batch_dims=1)
    left = tf.where(contents > bound[:, None], contents, 0.0)
    place = _first_beyond(tf.cumsum(left, axis=-1), left, aim)
    return block * _BLOCK + place, tf.gather(contents, place, batch_dims=1)


def _first_beyond(cumulative: Any, weights: Any, aim: Any) -> Any:
    """The first index whose running sum exceeds `aim`, of those that have a weight."""
    beyond = (cumulative > aim[:, None]) & (weights > 0)
    first = tf.argmax(tf.cast(beyond, tf.int8), axis=-1, output_type=tf.int32)
    # Where rounding leaves none, the heaviest.
    heaviest = tf.argmax(weights, axis=-1, output_type=tf.int32)
    return tf.where(tf.reduce_any(beyond, axis=-1), first, heaviest)


def _renewed(uniforms: Any, draws: Any) -> Any:
    """Returns another number for each further draw.

    A uniform float32 has 24 random bits. Number and count go through an integer hash
    (multiply and xor-shift with the constants of Wellons's lowbias32), which gives
    24 others.
    """
    scale = 2.0**24
    bits = tf.cast(tf.cast(uniforms * scale, tf.int32), tf.uint32)
    bits += tf.cast(draws, tf.uint32) * tf.constant(2**24, tf.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        shifted = tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint32))
        bits = tf.bitwise.bitwise_xor(bits, shifted) * tf.constant(factor, tf.uint32)
    fresh = tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32))
    return tf.cast(tf.cast(fresh, tf.int32), tf.float32) / scale

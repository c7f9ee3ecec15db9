"""Samplers: one token from logits, by greedy, top-k or nucleus sampling.

The randomness comes in as one uniform number per row. A row's token is a function of
its own logits and its own number, whatever else is in the batch.

The nucleus is never sorted out. A token is drawn from all of them and kept if it is in
the nucleus, which takes one sum: the mass of the tokens before it is below p. If it is
not, neither is any token after it, so the next draw is from those before it alone. The
kept token follows the nucleus's law exactly, and over a flat distribution of 32,128
tokens, where sorting costs more than the network, a row needs 1.2 draws on average.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

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

    Draws from the smallest set of most probable tokens whose probabilities reach p.
    Ties in probability favour the lower id.

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
        if self.k is not None and self.k < logits.shape[-1]:
            return _sample_sorted(logits, uniforms, self.k, self.p)
        return _sample_unsorted(logits, uniforms, self.p)


class TopK(TopP):
    """Draws from the k most probable tokens; see `TopP`."""

    def __init__(self, k: int, temperature: float = 1.0) -> None:
        """Checks the values."""
        super().__init__(1.0, k, temperature)


def sampler_of(temperature: float, top_k: int | None, top_p: float) -> Sampler:
    """Returns the sampler of three settings; temperature 0 is greedy decoding."""
    return Greedy() if temperature == 0 else TopP(top_p, top_k or None, temperature)


def _sample_sorted(logits: Any, uniforms: Any, top_k: Any, top_p: Any) -> Any:
    """Inverts the cumulative distribution of the k most probable tokens."""
    values, ids = tf.math.top_k(logits, top_k)
    cumulative = tf.cumsum(tf.nn.softmax(values), axis=-1)
    # A token is in the nucleus if those before it have not yet reached p.
    before = tf.pad(cumulative[:, :-1], [[0, 0], [1, 0]])
    size_of_nucleus = tf.reduce_sum(tf.cast(before < top_p, tf.int32), axis=-1)
    mass = tf.gather(cumulative, size_of_nucleus - 1, batch_dims=1)
    chosen = tf.reduce_sum(
        tf.cast(cumulative <= (uniforms * mass)[:, None], tf.int32), axis=-1
    )
    # uniforms · mass can round up to mass itself: stay inside the nucleus.
    chosen = tf.minimum(chosen, size_of_nucleus - 1)
    return tf.gather(ids, chosen, batch_dims=1)


def _sample_unsorted(logits: Any, uniforms: Any, top_p: Any) -> Any:
    """Draws from all tokens, then from those before the drawn one, … (see above)."""
    weights = _blocks(tf.nn.softmax(logits))
    sums = tf.reduce_sum(weights, axis=-1)
    # All tokens come before this one.
    last = _Drawn(
        tf.fill(tf.shape(uniforms), weights.shape[1] * _BLOCK), tf.zeros_like(uniforms)
    )
    if top_p == 1:
        return _draw(weights, sums, last, uniforms)[0].token
    target = top_p * tf.reduce_sum(sums, axis=-1)

    def unsettled(draws: Any, tokens: Any, settled: Any, drawn: Any, sums: Any) -> Any:
        del draws, tokens, drawn, sums
        return ~tf.reduce_all(settled)

    def body(draws: Any, tokens: Any, settled: Any, drawn: Any, sums: Any) -> Any:
        drawn, sums = _draw(weights, sums, drawn, _renewed(uniforms, draws))
        tokens = tf.where(settled, tokens, drawn.token)
        # Not a number settles too: no loop without end.
        settled |= ~(tf.reduce_sum(sums, axis=-1) >= target)
        return draws + 1, tokens, settled, drawn, sums

    start = (
        tf.constant(0),
        tf.zeros_like(last.token),
        tf.zeros_like(uniforms, tf.bool),
        last,
        sums,
    )
    return tf.while_loop(unsettled, body, start, maximum_iterations=_DRAWS)[1]


class _Drawn(NamedTuple):
    """A token a row. Tokens go by falling weight, those of equal weight by id."""

    token: tf.Tensor  # [B] int32
    weight: tf.Tensor  # [B] float32


def _blocks(weights: Any) -> Any:
    """[B, V] to [B, blocks, _BLOCK], filled up with zeros."""
    size = weights.shape[-1]
    missing = -size % _BLOCK
    if missing:
        weights = tf.pad(weights, [[0, 0], [0, missing]])
    return tf.reshape(weights, [-1, (size + missing) // _BLOCK, _BLOCK])


def _draw(weights: Any, sums: Any, last: Any, uniforms: Any) -> Any:
    """Draws from the tokens that go before the last one drawn.

    Args:
      weights: [B, blocks, _BLOCK].
      sums: [B, blocks], each block's tokens before `last`.
      last: the last tokens drawn.
      uniforms: [B].

    Returns:
      (what is drawn, never a token of weight 0; the sums of the tokens before it).
    """
    cumulative = tf.cumsum(sums, axis=-1)
    aim = uniforms * cumulative[:, -1]
    block = _first_beyond(cumulative, sums, aim)
    aim -= tf.gather(cumulative - sums, block, batch_dims=1)
    contents = tf.gather(weights, block, batch_dims=1)
    ids = block[:, None] * _BLOCK + tf.range(_BLOCK)
    left = _before(contents, ids, last)
    place = _first_beyond(tf.cumsum(left, axis=-1), left, aim)
    drawn = _Drawn(block * _BLOCK + place, tf.gather(contents, place, batch_dims=1))
    # In blocks of lower ids a tie goes before the drawn token.
    blocks = tf.range(weights.shape[1])
    bound = tf.where(
        blocks < block[:, None],
        tf.math.nextafter(drawn.weight, tf.zeros_like(drawn.weight))[:, None],
        drawn.weight[:, None],
    )[..., None]
    # This op is `where(weights > bound, weights, 0)` in half the time.
    others = tf.raw_ops.ReluGrad(gradients=weights, features=weights - bound)
    own = tf.reduce_sum(_before(contents, ids, drawn), axis=-1, keepdims=True)
    return drawn, tf.where(
        blocks == block[:, None], own, tf.reduce_sum(others, axis=-1)
    )


def _before(contents: Any, ids: Any, drawn: Any) -> Any:
    """`contents` [B, n] with zeros but for tokens that go before the drawn one."""
    weight, token = drawn.weight[:, None], drawn.token[:, None]
    before = (contents > weight) | ((contents == weight) & (ids < token))
    return tf.where(before, contents, 0.0)


def _first_beyond(cumulative: Any, weights: Any, aim: Any) -> Any:
    """The first index whose running sum exceeds `aim`, of those that have a weight."""
    beyond = (cumulative > aim[:, None]) & (weights > 0)
    first = tf.argmax(tf.cast(beyond, tf.int8), axis=-1, output_type=tf.int32)
    # Where rounding leaves none, the heaviest.
    heaviest = tf.argmax(weights, axis=-1, output_type=tf.int32)
    return tf.where(tf.reduce_any(beyond, axis=-1), first, heaviest)


def _renewed(uniforms: Any, draws: Any) -> Any:
    """Another number for each further draw; the first draw has the number itself.

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
    fresh = tf.cast(tf.cast(fresh, tf.int32), tf.float32) / scale
    return tf.where(draws == 0, uniforms, fresh)

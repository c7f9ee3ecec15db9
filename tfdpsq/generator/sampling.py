"""One token from logits: greedy, temperature, top-k and nucleus sampling.

The randomness comes in as one uniform number per row, turned into a token by
the inverse of the row's cumulative distribution. A row's token is therefore a
function of its own logits and its own number, whatever else is in the batch.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdpsq import validation

# Nucleus sampling needs the most probable tokens in order. These many nearly
# always hold the nucleus; rows where they do not are sorted in full.
_FIRST_CANDIDATES = 512


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How a token is chosen.

    Attributes:
      temperature: divides the logits; 0 is greedy decoding.
      top_k: keep the k most probable tokens; `None` keeps all.
      top_p: keep the smallest set of most probable tokens whose probabilities
        reach p (nucleus sampling, Holtzman et al. 2020); 1 keeps all. The paper
        uses 0.8. Applied after temperature and top-k.

    Raises:
      InputError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 0.8

    def __post_init__(self):
        """Checks every value."""
        validation.in_range("temperature", self.temperature, 0.0, float("inf"))
        if self.top_k is not None:
            validation.positive_integer("top_k", self.top_k)
        validation.in_range("top_p", self.top_p, 0.0, 1.0, low_open=True)


def sample(logits: tf.Tensor, uniforms: tf.Tensor, config: SamplingConfig) -> tf.Tensor:
    """Draws one token a row.

    Args:
      logits: [B, V] float32; -inf for tokens that must not be drawn.
      uniforms: [B] float32 in [0, 1).
      config: how to choose. Ties in probability favour the lower id.

    Returns:
      [B] int32 token ids. Compiles under XLA.
    """
    if config.temperature == 0:
        return tf.argmax(logits, axis=-1, output_type=tf.int32)
    size = logits.shape[-1]
    logits = logits / config.temperature
    kept = min(config.top_k or size, size)
    if config.top_k is None:
        normalizer = tf.reduce_logsumexp(logits, axis=-1, keepdims=True)
    else:
        top, _ = tf.math.top_k(logits, kept)
        normalizer = tf.reduce_logsumexp(top, axis=-1, keepdims=True)

    def draw(candidates: int) -> tuple[tf.Tensor, tf.Tensor]:
        values, ids = tf.math.top_k(logits, candidates)
        cumulative = tf.cumsum(tf.exp(values - normalizer), axis=-1)
        # A token is in the nucleus if those before it have not yet reached p.
        before = tf.pad(cumulative[:, :-1], [[0, 0], [1, 0]])
        size_of_nucleus = tf.reduce_sum(
            tf.cast(before < config.top_p, tf.int32), axis=-1
        )
        mass = tf.gather(cumulative, size_of_nucleus - 1, batch_dims=1)
        chosen = tf.reduce_sum(
            tf.cast(cumulative <= (uniforms * mass)[:, None], tf.int32), axis=-1
        )
        # uniforms · mass can round up to mass itself: stay inside the nucleus.
        chosen = tf.minimum(chosen, size_of_nucleus - 1)
        complete = tf.reduce_all(cumulative[:, -1] >= config.top_p)
        return tf.gather(ids, chosen, batch_dims=1), complete

    first = min(_FIRST_CANDIDATES, kept)
    tokens, complete = draw(first)
    if first == kept:
        return tokens
    # Both branches give the same token to a row whose nucleus is complete in
    # the first: sorted order and running sums agree on the common prefix.
    return tf.cond(complete, lambda: tokens, lambda: draw(kept)[0])

"""Dropout that a resumed run repeats: layers' random numbers from secret keys.

Keras's random layers draw from TensorFlow's stateful generators, whose state no
checkpoint holds, so a step replayed after an interruption would be another step: two
clipped sums under one noise, whose difference has no noise at all. While `replayable`
is open they draw statelessly instead, each call with a key of its own. The keys are
secret, because dropout takes part in the mechanism: were the masks known, a row's
gradient would depend on its place in the batch, and so on who else was drawn.

Every row must have random numbers of its own. A row's clipped gradient is a function of
the row and of its numbers; if these are independent from row to row, one row more or
less leaves the law of the other rows' sum as it was, whatever places they move to.
`checks` refuses losses that draw otherwise.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdpsq import dropout_masks
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast.capture import flatten
from tfdpsq.privacy.fast.recorder import replaced
from tfdpsq.privacy.randomness import noise

# Operations that draw by a key that they are given.
DRAWN_BY_KEY = re.compile(
    r"Stateless(?!RandomGet|While|If|Case|PartitionedCall).*|RandomIndexShuffle"
)
# A scope of draws whose shapes are known without looking at operations: those here, and
# dropout of this package's T5s (`layers.seeded_dropout`), whose rows come first.
KEYED = "tfdpsq_keyed_draw"
# A scope of seeds that layers draw by themselves with.
SEED = "tfdpsq_seed"


@contextlib.contextmanager
def replayable(
    layers: Iterable[tf.Module],
    seed: tf.Tensor,
    step: tf.Tensor | int,
    microbatch: tf.Tensor | int,
    draws: list[Draw] | None = None,
) -> Iterator[None]:
    """While inside, the layers' random numbers follow from the arguments.

    A row's numbers follow from its place in the logical batch, not from how that is cut
    into microbatches of one size (but for layers that draw from a seed by themselves).

    Args:
      layers: models and layers; those inside them, however deep, count too. Random
        numbers that a model draws by itself, from `tf.random`, are not affected.
      seed: [2] int64, secret.
      step: scalar integer, the logical step.
      microbatch: scalar integer, unique within the step, over all replicas.
      draws: if given, what the layers draw is added to it.
    """
    count = 0
    upper = tf.bitwise.bitwise_xor(seed[1], tf.cast(step, tf.int64))
    counter = tf.stack([tf.zeros([], tf.int64), upper])
    of_step = noise.DrawKey(
        tf.bitcast(seed[:1], tf.uint64), tf.bitcast(counter, tf.uint64)
    )
    with tf.name_scope(KEYED):
        words = noise.integers([2], of_step, tf.int64)
    part = tf.cast(microbatch, tf.int64)

    def key() -> tf.Tensor:
        nonlocal count
        count += 1
        return tf.stack([words[0], words[1] + count, part])

    with contextlib.ExitStack() as stack:
        for layer in flatten(layers):
            if hasattr(layer, "_random_generator"):
                generator = _StatelessGenerator(key, layer.name, draws)
                stack.enter_context(replaced(layer, _random_generator=generator))
        yield


class Draw(NamedTuple):
    """Random numbers that a layer draws.

    Attributes:
      layer: its name, or that of an operation.
      shape: of the numbers, as far as it is known.
      own: whether the layer draws by itself, from a seed that it asked for.
    """

    layer: str
    shape: tf.TensorShape
    own: bool = False


class _StatelessGenerator:
    """A random generator for a Keras layer that takes a new key for each draw.

    The names and arguments are those of Keras's `backend.RandomGenerator`. All numbers
    are made of groups of four random words, whole groups for each row, so that a row's
    follow from its place.
    """

    def __init__(
        self, key: Callable[[], tf.Tensor], layer: str, draws: list[Draw] | None
    ):
        self._key = key
        self._layer = layer
        self._draws = draws

    def _maybe_init(self) -> None:
        """Called when a layer is first built; there is nothing to initialise."""

    def random_normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = None,
        nonce: Any = None,
    ) -> Any:
        drawn = noise.gaussian_of(self._words(shape))
        return mean + stddev * self._numbers(drawn, shape, dtype)

    def random_uniform(
        self,
        shape: Any,
        minval: Any = 0.0,
        maxval: Any = None,
        dtype: Any = None,
        nonce: Any = None,
    ) -> Any:
        dtype = tf.as_dtype(dtype or keras.backend.floatx())
        maxval = 1.0 if maxval is None else maxval
        words = self._words(shape)
        if dtype.is_integer:
            share = tf.cast(words, tf.float64) * 2.0**-32  # below 1, unlike below
            above = tf.floor(share * tf.cast(maxval - minval, tf.float64))
            return tf.cast(minval, dtype) + self._numbers(above, shape, dtype)
        share = self._numbers(noise.uniform_of(words), shape, tf.float32)
        return minval + tf.cast(share, dtype) * tf.cast(maxval - minval, dtype)

    def truncated_normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = None,
        nonce: Any = None,
    ) -> Any:
        share = noise.uniform_of(self._words(shape))
        # Two deviations on each side: 0.0228 of the probability is cut off there.
        inside = tf.math.ndtri(0.02275013 + (1 - 2 * 0.02275013) * share)
        return mean + stddev * self._numbers(inside, shape, dtype)

    def dropout(self, inputs: Any, rate: Any, noise_shape: Any = None) -> Any:
        shape = tf.shape(inputs)
        if noise_shape is not None and not tf.is_tensor(noise_shape):
            sizes = enumerate(noise_shape)
            noise_shape = [shape[i] if size is None else size for i, size in sizes]
        if noise_shape is not None:
            shape = tf.convert_to_tensor(noise_shape, tf.int32)
        shape = self._noted(shape)
        groups = dropout_masks.words_for(shape)[1]
        kept = dropout_masks.kept(self._drawn(shape, groups), rate, shape)
        return tf.where(kept, inputs / (1 - rate), tf.zeros_like(inputs))

    def dropout_seed(self) -> tf.Tensor:
        """[3] int64, for layers of this package; see `layers.seeded_dropout`."""
        return self._key()

    def make_seed_for_stateless_op(self) -> Any:
        """[2] int64, of which XLA keeps 32 bits each: for layers that draw with it.

        They draw for a microbatch as a whole, so its number is part of the seed.
        """
        key, upper, part = tf.unstack(tf.bitcast(self._key(), tf.uint64))
        draw = noise.DrawKey(key[tf.newaxis], tf.stack([part, upper]))
        with tf.name_scope(KEYED):
            seed = noise.integers([2], draw, tf.int64)
        with tf.name_scope(SEED):
            return tf.identity(seed)

    def make_legacy_seed(self) -> Any:
        return None

    def _noted(self, shape: Any) -> Any:
        """Notes a shape that is drawn for; returns it, as numbers where it is known."""
        known = tf.fill(shape, False).shape  # as far as shapes are inferred
        if self._draws is not None:
            self._draws.append(Draw(f"layer {self._layer!r}", known))
        return known.as_list() if known.is_fully_defined() else shape

    def _words(self, shape: Any) -> tf.Tensor:
        """[rows, groups, 4] uint32, at least as many as a row has numbers."""
        shape = self._noted(shape)
        return self._drawn(shape, -(-dropout_masks.elements(shape) // 4))

    def _drawn(self, shape: Any, groups: Any) -> tf.Tensor:
        rows = shape[0] if tf.is_tensor(shape) or len(shape) else 1
        with tf.name_scope(KEYED):
            key, upper, part = tf.unstack(self._key())
            blocks = tf.cast(rows, tf.int64) * tf.cast(groups, tf.int64)
            counter = tf.bitcast(tf.stack([part * blocks, upper]), tf.uint64)
            draw = noise.DrawKey(tf.bitcast(key[tf.newaxis], tf.uint64), counter)
            return noise.integers([rows, groups, 4], draw, tf.uint32)

    def _numbers(self, values: tf.Tensor, shape: Any, dtype: Any) -> tf.Tensor:
        """The first of each row's numbers, [rows, groups, 4], in a shape."""
        flat = tf.reshape(values, [tf.shape(values)[0], -1])
        known = tf.fill(shape, False).shape
        shape = known.as_list() if known.is_fully_defined() else shape
        found = tf.reshape(flat[:, : dropout_masks.elements(shape)], shape)
        return tf.cast(found, dtype or keras.backend.floatx())

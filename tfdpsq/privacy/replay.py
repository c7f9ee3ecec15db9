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

    Args:
      layers: models and layers; those inside them, however deep, count too. Random
        numbers that a model draws by itself, from `tf.random`, are not affected.
      seed: [2] int64, secret.
      step: scalar integer, the logical step.
      microbatch: scalar integer, unique within the step, over all replicas.
      draws: if given, what the layers draw is added to it.
    """
    count = 0
    # A key of its own for each forward pass: microbatches have too many numbers for the
    # places of a draw.
    upper = tf.bitwise.bitwise_xor(seed[1], tf.cast(step, tf.int64))
    counter = tf.stack([tf.cast(microbatch, tf.int64), upper])
    pass_key = noise.DrawKey(
        tf.bitcast(seed[:1], tf.uint64), tf.bitcast(counter, tf.uint64)
    )
    with tf.name_scope(KEYED):
        words = noise.integers([2], pass_key, tf.int64)

    def key() -> tf.Tensor:
        nonlocal count
        count += 1
        return tf.stack([words[0], words[1] + count, 0])

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
    """

    layer: str
    shape: tf.TensorShape


class _StatelessGenerator:
    """A random generator for a Keras layer that takes a new key for each draw.

    The names and arguments are those of Keras's `backend.RandomGenerator`.
    """

    def __init__(
        self,
        key: Callable[[], tf.Tensor],
        layer: str,
        draws: list[Draw] | None,
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
        dtype = dtype or keras.backend.floatx()
        drawn = self._drawn(lambda: noise.normal(shape, self._draw_key(), dtype))
        return mean + stddev * drawn

    def random_uniform(
        self,
        shape: Any,
        minval: Any = 0.0,
        maxval: Any = None,
        dtype: Any = None,
        nonce: Any = None,
    ) -> Any:
        dtype = dtype or keras.backend.floatx()

        def draw() -> tf.Tensor:
            seed = noise.integers([2], self._draw_key(), tf.int64)
            return tf.random.stateless_uniform(shape, seed, minval, maxval, dtype)

        return self._drawn(draw)

    def truncated_normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = None,
        nonce: Any = None,
    ) -> Any:
        dtype = dtype or keras.backend.floatx()

        def draw() -> tf.Tensor:
            seed = noise.integers([2], self._draw_key(), tf.int64)
            return tf.random.stateless_truncated_normal(
                shape, seed, mean, stddev, dtype
            )

        return self._drawn(draw)

    def dropout(self, inputs: Any, rate: Any, noise_shape: Any = None) -> Any:
        shape = tf.shape(inputs)
        if noise_shape is not None and not tf.is_tensor(noise_shape):
            sizes = enumerate(noise_shape)
            noise_shape = [shape[i] if size is None else size for i, size in sizes]
        if noise_shape is not None:
            shape = tf.convert_to_tensor(noise_shape, tf.int32)
        known = tf.fill(shape, False).shape  # as far as shapes are inferred
        shape = known.as_list() if known.is_fully_defined() else shape
        size = dropout_masks.words_for(shape)
        words = self._drawn(
            lambda: noise.integers(size, self._draw_key(), tf.uint32), known
        )
        kept = dropout_masks.kept(words, rate, shape)
        return tf.where(kept, inputs / (1 - rate), tf.zeros_like(inputs))

    def dropout_seed(self) -> tf.Tensor:
        """[3] int64, for layers of this package; see `layers.seeded_dropout`."""
        return self._key()

    def make_seed_for_stateless_op(self) -> Any:
        """[2] int64, of which XLA keeps 32 bits each: for layers that draw with it."""
        with tf.name_scope(KEYED):
            seed = noise.integers([2], self._draw_key(), tf.int64)
        with tf.name_scope(SEED):
            return tf.identity(seed)

    def _drawn(
        self, draw: Callable[[], tf.Tensor], shape: tf.TensorShape | None = None
    ) -> tf.Tensor:
        """Draws, and notes the shape of what is drawn for if it is another one."""
        with tf.name_scope(KEYED):
            drawn = draw()
            if self._draws is not None:
                noted = drawn.shape if shape is None else shape
                self._draws.append(Draw(f"layer {self._layer!r}", noted))
            return drawn

    def _draw_key(self) -> noise.DrawKey:
        key, upper, lower = tf.unstack(tf.bitcast(self._key(), tf.uint64))
        return noise.DrawKey(key[tf.newaxis], tf.stack([lower, upper]))

    def make_legacy_seed(self) -> Any:
        return None

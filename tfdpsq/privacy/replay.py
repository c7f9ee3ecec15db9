"""Dropout that a resumed run repeats: layers draw from secret keys.

Keras's random layers draw from stateful generators, whose state no checkpoint holds. A
step replayed after an interruption would be another step: two clipped sums under one
noise, whose difference has no noise at all. Inside `replayable` each call draws
statelessly by a key of its own. The keys are secret: were the masks known, a row's
gradient would depend on its place in the batch, and so on who else was drawn.

A row's clipped gradient is a function of the row and of its random numbers. If these
are independent from row to row, one row more or less leaves the law of the other rows'
sum as it was, whatever places they move to. `checks` refuses other losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdpsq import dropout_masks
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast.engine import flatten
from tfdpsq.privacy.fast.recorder import replaced
from tfdpsq.privacy.randomness import noise

# The scope of draws whose numbers are laid out by row.
KEYED = "tfdpsq_keyed_draw"
# Names of layers, and the shapes of what they draw, as far as they are static.
Draws = list[tuple[str, tf.TensorShape]]


@contextlib.contextmanager
def replayable(
    layers: Iterable[tf.Module],
    seed: tf.Tensor,
    step: tf.Tensor | int,
    microbatch: tf.Tensor | int,
    draws: Draws | None = None,
) -> Iterator[None]:
    """Makes a row's random numbers a function of its place in the logical batch.

    Args:
      layers: models and layers; those inside them count, too.
      seed: [2] int64, secret.
      step: scalar integer, the logical step.
      microbatch: scalar integer, unique within the step, over all replicas.
      draws: receives what the layers draw.
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

    def next_key() -> tf.Tensor:
        nonlocal count
        count += 1
        return tf.stack([words[0], words[1] + count, part])

    with contextlib.ExitStack() as stack:
        for layer in flatten(layers):
            if hasattr(layer, "_random_generator"):
                generator = _StatelessGenerator(next_key, layer.name, draws)
                stack.enter_context(replaced(layer, _random_generator=generator))
        yield


class _StatelessGenerator:
    """Stands in for Keras's `backend.RandomGenerator`; takes a new key for each draw.

    Each row has whole groups of four words, so its numbers follow from its place.
    """

    def __init__(
        self, next_key: Callable[[], tf.Tensor], layer: str, draws: Draws | None
    ):
        self._next_key, self._layer, self._draws = next_key, layer, draws

    def _maybe_init(self) -> None:
        """Called when a layer is built; there is nothing to initialise."""

    def random_normal(
        self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None
    ) -> Any:
        drawn = self._numbers(noise.gaussian_of, shape)
        return mean + stddev * tf.cast(drawn, dtype or keras.backend.floatx())

    def random_uniform(
        self, shape: Any, minval: Any = 0.0, maxval: Any = None, dtype: Any = None
    ) -> Any:
        dtype = tf.as_dtype(dtype or keras.backend.floatx())
        width = tf.cast((1.0 if maxval is None else maxval) - minval, tf.float64)
        # In [0, 1): whole numbers stay below maxval.
        drawn = self._numbers(lambda w: tf.cast(w, tf.float64) * 2.0**-32, shape)
        drawn = tf.floor(width * drawn) if dtype.is_integer else width * drawn
        return tf.cast(minval, dtype) + tf.cast(drawn, dtype)

    def dropout(self, inputs: Any, rate: Any, noise_shape: Any = None) -> Any:
        shape = tf.shape(inputs)
        if tf.is_tensor(noise_shape):
            shape = noise_shape
        elif noise_shape is not None:
            sizes = enumerate(noise_shape)
            shape = tf.stack([shape[i] if size is None else size for i, size in sizes])
        shape = self._noted(shape)
        groups = dropout_masks.words_for(shape)[1]
        kept = dropout_masks.kept(self._words(shape, groups), rate, shape)
        return tf.where(kept, inputs / (1 - rate), tf.zeros_like(inputs))

    def dropout_seed(self) -> tf.Tensor:
        """[3] int64, for layers of this package; see `layers.seeded_dropout`."""
        return self._next_key()

    def make_seed_for_stateless_op(self) -> Any:
        """[2] int64; where ε counts, `checks` refuses layers that draw from it."""
        return tf.cast(self._words([1], 1)[0, 0, :2], tf.int64)

    def _noted(self, shape: Any) -> Any:
        """Records a shape that is drawn; returns it, as numbers if it is static."""
        known = tf.fill(shape, False).shape  # as far as shapes are inferred
        if self._draws is not None:
            self._draws.append((self._layer, known))
        return known.as_list() if known.is_fully_defined() else shape

    def _words(self, shape: Any, groups: Any) -> tf.Tensor:
        """[rows, groups, 4] uint32."""
        rows = shape[0] if tf.is_tensor(shape) or len(shape) else 1
        with tf.name_scope(KEYED):
            key, upper, part = tf.unstack(self._next_key())
            blocks = tf.cast(rows, tf.int64) * tf.cast(groups, tf.int64)
            counter = tf.bitcast(tf.stack([part * blocks, upper]), tf.uint64)
            draw = noise.DrawKey(tf.bitcast(key[tf.newaxis], tf.uint64), counter)
            return noise.integers([rows, groups, 4], draw, tf.uint32)

    def _numbers(self, of_words: Callable[[Any], Any], shape: Any) -> tf.Tensor:
        """Draws numbers of a shape, the first of each row's [groups, 4]."""
        shape = self._noted(shape)
        size = dropout_masks.elements(shape)
        drawn = of_words(self._words(shape, -(-size // 4)))
        flat = tf.reshape(drawn, [tf.shape(drawn)[0], -1])
        return tf.reshape(flat[:, :size], shape)

"""Dropout that a resumed run repeats: layers' random numbers from secret keys.

Keras's random layers draw from TensorFlow's stateful generators, whose state no
checkpoint holds, so a step replayed after an interruption would be another step.
While `replayable` is open they draw statelessly instead, each call with a key of
its own. The keys are secret, because dropout takes part in the mechanism: were the
masks known, a row's gradient would depend on its place in the batch, and so on who
else was drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from tfdpsq.privacy.fast.capture import flatten
from tfdpsq.privacy.fast.recorder import replaced
from tfdpsq.privacy.noise import noise_key

# Draws in one forward pass; the bits above count microbatches.
_DRAWS = 1 << 20


@contextlib.contextmanager
def replayable(
    layers: Iterable[tf.Module],
    seed: tf.Tensor,
    step: tf.Tensor | int,
    microbatch: tf.Tensor | int,
) -> Iterator[None]:
    """While inside, the layers' random numbers follow from the arguments.

    Args:
      layers: models and layers; those inside them, however deep, count too. Random
        numbers that a model draws by itself, from `tf.random`, are not affected.
      seed: [2] int64, secret.
      step: scalar integer, the logical step.
      microbatch: scalar integer, unique within the step, over all replicas.
    """
    count = 0

    def key() -> tf.Tensor:
        nonlocal count
        count += 1
        return noise_key(seed, step, tf.cast(microbatch, tf.int64) * _DRAWS + count)

    generator = _StatelessGenerator(key)
    with contextlib.ExitStack() as stack:
        for layer in flatten(layers):
            if hasattr(layer, "_random_generator"):
                stack.enter_context(replaced(layer, _random_generator=generator))
        yield


class _StatelessGenerator:
    """What Keras layers ask of their random generator, with a new key each time.

    The names and arguments are those of Keras's `backend.RandomGenerator`.
    """

    def __init__(self, key: Callable[[], tf.Tensor]):
        self._key = key

    def _maybe_init(self):
        """Called when a layer is first built; there is nothing to initialise."""

    def random_normal(self, shape, mean=0.0, stddev=1.0, dtype=None, nonce=None):
        dtype = dtype or tf.keras.backend.floatx()
        return tf.random.stateless_normal(shape, self._key(), mean, stddev, dtype)

    def random_uniform(self, shape, minval=0.0, maxval=None, dtype=None, nonce=None):
        dtype = dtype or tf.keras.backend.floatx()
        return tf.random.stateless_uniform(shape, self._key(), minval, maxval, dtype)

    def truncated_normal(self, shape, mean=0.0, stddev=1.0, dtype=None, nonce=None):
        dtype = dtype or tf.keras.backend.floatx()
        return tf.random.stateless_truncated_normal(
            shape, self._key(), mean, stddev, dtype
        )

    def dropout(self, inputs, rate, noise_shape=None):
        return tf.nn.experimental.stateless_dropout(
            inputs, rate=rate, seed=self._key(), noise_shape=noise_shape
        )

    def make_seed_for_stateless_op(self):
        return self._key()

    def make_legacy_seed(self):
        return None

"""Dropout from keys: repeated exactly, and never the same where it must differ."""

import contextlib

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from helpers.dense_runs import check, squared, wide_run

from tfdpsq.privacy.randomness import noise
from tfdpsq.privacy.replay import _StatelessGenerator, replayable
from tfdpsq.validation import InputError

# No tensor: that would start TensorFlow before conftest.py can split the CPU.
_SEED = (11, 12)


def test_both_words_of_a_seed_reach_the_generator():
    """With one word twice, a key of 126 bits would have 63."""
    low, high = 0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321
    assert noise.as_words(low | high << 63) == (low, high)
    # Bits that do not fit are left out, and change nothing else.
    assert noise.as_words(low | high << 63 | 3 << 126) == (low, high)


def _open(layer, seed=_SEED, step=0, microbatch=0):
    return replayable([layer], tf.constant(seed, tf.int64), step, microbatch)


def _mask(layer, size=(50, 40), **keys):
    with _open(layer, **keys):
        return layer(tf.ones(size), training=True).numpy()


@pytest.mark.parametrize(
    "layer",
    [
        tf.keras.layers.Dropout(0.3),
        tf.keras.layers.GaussianDropout(0.3),
        tf.keras.layers.GaussianNoise(1.0),
        tf.keras.layers.AlphaDropout(0.3),
    ],
)
def test_same_keys_repeat_the_mask_and_others_do_not(layer):
    first = _mask(layer)
    np.testing.assert_array_equal(first, _mask(layer))
    others = [
        _mask(layer, step=1),
        _mask(layer, microbatch=1),
        _mask(layer, seed=(11, 13)),
        _mask(layer, seed=(10, 12)),
    ]
    for other in others:
        correlation = np.corrcoef(first.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 4.5 / np.sqrt(first.size)


def test_no_two_draws_of_a_step_have_one_key():
    """Whichever microbatch and layer they are of: equal masks would add up."""
    layer = tf.keras.layers.Dropout(0.5)
    masks = []
    for microbatch in range(4):
        with _open(layer, microbatch=microbatch):
            drawn = [layer(tf.ones([30, 40]), training=True) for _ in range(5)]
        masks += [mask.numpy().ravel() for mask in drawn]
    apart = np.abs(np.corrcoef(masks) - np.eye(20))
    assert apart.max() < 5.5 / np.sqrt(1200)


def test_dropout_rate_is_the_layers_own():
    dropped = (_mask(tf.keras.layers.Dropout(0.3), size=(100, 100)) == 0).sum()
    law = scipy.stats.binom(10_000, 0.3)
    assert law.ppf(1e-5) < dropped < law.ppf(1 - 1e-5)
    assert not scipy.stats.binom(10_000, 0.35).ppf(1e-5) < dropped


def test_layers_deep_inside_count_and_get_their_own_generator_back():
    inner = tf.keras.layers.Dropout(0.5)
    model = tf.keras.Sequential([tf.keras.Sequential([inner]), tf.keras.layers.ReLU()])
    model.build([None, 40])
    own = inner._random_generator
    with _open(model, step=3):
        one = model(tf.ones([50, 40]), training=True).numpy()
        assert inner._random_generator is not own
    assert inner._random_generator is own
    with _open(model, step=3):
        np.testing.assert_array_equal(one, model(tf.ones([50, 40]), training=True))


def test_microbatches_have_masks_of_their_own_under_xla():
    """Of numbers from 2^32 on XLA once kept nothing: all had one mask."""
    layer = tf.keras.layers.Dropout(0.5)

    @tf.function(jit_compile=True)
    def masks(step, microbatch):
        with _open(layer, step=step, microbatch=microbatch):
            return layer(tf.ones([20, 20]), training=True)

    places = [(s, (m << 32) + n) for s in (0, 1) for m in range(4) for n in (0, 3)]
    found = [
        masks(tf.constant(step, tf.int64), tf.constant(at, tf.int64)).numpy()
        for step, at in places
    ]
    assert len({one.tobytes() for one in found}) == len(places)


def test_whole_numbers_stay_below_their_bound(monkeypatch):
    """Of the highest random word as of the lowest, for a bound that is an index."""
    for word, expected in ((0, 3), ((1 << 32) - 1, 9)):
        monkeypatch.setattr(
            noise, "integers", lambda shape, *_, w=word: tf.fill(shape, np.uint32(w))
        )
        generator = _StatelessGenerator(lambda: tf.zeros([3], tf.int64), "a", None)
        found = generator.random_uniform([5, 2], 3, 10, tf.int32)
        assert set(found.numpy().ravel()) == {expected}


def _generator():
    return tf.keras.layers.RandomFlip()._random_generator


class _NoisyWeights(tf.keras.layers.Dense):
    """Noise on a weight, which all rows of a microbatch share."""

    def __init__(self):
        super().__init__(5)
        self._random_generator = _generator()

    def call(self, inputs):
        return inputs @ (self.kernel + self._random_generator.random_normal([5, 5]))


class _Drawing(tf.keras.layers.Layer):
    """Multiplies its input by what is made of random numbers and their rows."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self._random_generator = _generator()

    def call(self, inputs):
        return inputs * self.make(self._random_generator, tf.shape(inputs)[0])


@pytest.mark.parametrize(
    "layer, engine, named",
    [
        (tf.keras.layers.Dropout(0.5, noise_shape=(1, 5)), "fast", "layer 'dropout"),
        (_NoisyWeights(), "fast", r"\(5, 5\)"),
        # Half of the rows have the numbers of the other half.
        (
            _Drawing(
                lambda g, n: tf.tile(g.random_normal([n // 2 + 1, 1]), [2, 1])[:n]
            ),
            "dpkeras",
            r"\(505, 1\)",
        ),
    ],
)
def test_numbers_that_rows_share_are_refused(layer, engine, named):
    """A row more moves others to the next microbatch, and to its numbers."""
    with pytest.raises(InputError, match=named) as refused:
        wide_run(squared, [layer], engine)
    assert "rows as the first" in str(refused.value)


def _by_a_constant(generator, rows):
    own = tf.random.stateless_uniform([rows, 1], [1, 2])
    return generator.random_normal([rows, 1]) * own


def _by_a_microbatch(generator, rows):
    """Other microbatches would draw other numbers, and a step not be repeated."""
    seed = generator.make_seed_for_stateless_op()
    return tf.random.stateless_uniform([rows, 1], seed)


def _in_a_loop(generator, rows):
    def factor(_):
        return _by_a_microbatch(generator, 1)

    return tf.map_fn(factor, tf.zeros([1]))[0]


@pytest.mark.parametrize("made", [_by_a_constant, _by_a_microbatch, _in_a_loop])
def test_numbers_that_a_layer_draws_by_itself_are_refused(made):
    with pytest.raises(InputError, match="draws random numbers by itself"):
        wide_run(squared, [_Drawing(made)], "dpkeras")


def test_numbers_that_every_row_uses_alone_are_taken():
    def made(generator, rows):
        drawn = tf.reshape(generator.random_uniform([3 * rows, 1]), [rows, 3, 1])
        return tf.reduce_mean(drawn, 1) + generator.random_normal([rows, 1])

    wide_run(squared, [_Drawing(made), tf.keras.layers.Dropout(0.2)])


_LAYERS = tf.keras.layers


@pytest.mark.parametrize(
    "layers, shared",
    [
        ([_LAYERS.RandomContrast(0.5)], True),
        ([_LAYERS.RandomTranslation(0.2, 0.2)], False),
        ([_LAYERS.Dropout(0.5, noise_shape=(None, 1, 1, 1))], False),
        ([_LAYERS.Reshape((16, 1)), _LAYERS.SpatialDropout1D(0.5)], False),
        ([_LAYERS.Flatten(), _LAYERS.AlphaDropout(0.5)], False),
    ],
)
def test_keras_layers_pass_if_every_row_has_its_own_draw(layers, shared):
    ends = [_LAYERS.Flatten(), _LAYERS.Dense(2)]
    model = tf.keras.Sequential([tf.keras.Input((4, 4, 1)), *layers, *ends])
    x = np.random.default_rng(0).normal(size=[40, 4, 4, 1]).astype(np.float32)

    def losses(found):
        return tf.reduce_sum(model(found["x"], training=True) ** 2, axis=1)

    refused = pytest.raises(InputError, match="random numbers by itself")
    with refused if shared else contextlib.nullcontext():
        check(losses, {"x": x}, model.trainable_variables, [model])

"""Dropout from keys: repeated exactly, and never the same where it must differ."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from helpers import plans
from helpers.dense_runs import squared, wide_plan, wide_run

from tfdpsq.generator import T5QueryGenerator
from tfdpsq.layers import T5Config
from tfdpsq.privacy import make_optimizer, train
from tfdpsq.privacy.randomness import noise
from tfdpsq.privacy.replay import (
    replayable,
    require_draws_of_rows,
    require_own_draws,
    traced,
)
from tfdpsq.privacy.step import make_microbatch_sum
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
def test_the_same_keys_repeat_and_others_differ(layer):
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


def test_each_call_of_a_layer_draws_anew():
    layer = tf.keras.layers.Dropout(0.5)
    with _open(layer):
        one, other = (layer(tf.ones([40, 50]), training=True) for _ in range(2))
    assert abs(np.corrcoef(one.numpy().ravel(), other.numpy().ravel())[0, 1]) < 0.1


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


def test_the_rate_is_the_layers_own():
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


def test_units_taken_one_by_one_have_masks_of_their_own_under_xla():
    """Numbered from 2^32 on, of which XLA once kept nothing: all had one mask."""
    layer = tf.keras.layers.Dropout(0.5)

    @tf.function(jit_compile=True)
    def masks(step, microbatch):
        with _open(layer, step=step, microbatch=microbatch):
            return layer(tf.ones([20, 20]), training=True)

    places = [
        (s, (unit << 32) + m) for s in (0, 1) for unit in range(4) for m in (0, 3)
    ]
    found = [
        masks(tf.constant(step, tf.int64), tf.constant(at, tf.int64)).numpy()
        for step, at in places
    ]
    assert len({one.tobytes() for one in found}) == len(places)


@pytest.mark.parametrize("engine", ["dpkeras", "vectorized"])
def test_units_taken_one_by_one_lose_inputs_of_their_own(engine):
    """Masks differ between units, or one bad row would give all others one mask."""
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dropout(0.5, input_shape=(40,)),
            tf.keras.layers.Dense(1, use_bias=False),
        ]
    )
    plan = wide_plan(clip_norm=1e3)
    summed = make_microbatch_sum(
        lambda batch: model(batch["x"], training=True)[:, 0],
        model.trainable_variables,
        make_optimizer(plan, 0.1, "sgd", engine),
        8,
        [model],
    )
    batch = {"x": tf.ones([8, 40]), "weights": tf.ones([8])}
    (total,) = tf.function(summed)(
        batch, tf.constant(True), tf.constant(_SEED, tf.int64)
    ).sums
    # An input that is kept counts twice.
    kept = np.round(total.numpy().ravel() / 2)
    law = scipy.stats.binom(8, 0.5)
    assert law.ppf(1e-6) < kept.mean() < law.ppf(1 - 1e-6)
    assert len(set(kept) - {0.0, 8.0}) > 2


def _generator():
    return tf.keras.layers.RandomFlip()._random_generator


class _NoisyWeights(tf.keras.layers.Dense):
    """Noise on a weight, which all rows of a microbatch share."""

    def __init__(self):
        super().__init__(5)
        self._random_generator = _generator()

    def call(self, inputs):
        return inputs @ (self.kernel + self._random_generator.random_normal([5, 5]))


class _OneForAll(tf.keras.layers.Layer):
    """Draws by itself, with the seed it is given, one number for all rows."""

    def __init__(self, looped=False):
        super().__init__()
        self.looped = looped
        self._random_generator = _generator()

    def call(self, inputs):
        seed = self._random_generator.make_seed_for_stateless_op()

        def factor(_=0):
            return tf.random.stateless_uniform([1, 1], seed)

        if self.looped:
            return inputs * tf.map_fn(factor, tf.zeros([1]))[0]
        return inputs * factor()


class _Drawing(tf.keras.layers.Layer):
    """Multiplies its input by what is made of random numbers and their rows."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self._random_generator = _generator()

    def call(self, inputs):
        return inputs * self.make(self._random_generator, tf.shape(inputs)[0])


def _in_a_loop(seed):
    return tf.map_fn(lambda n: n * tf.random.stateless_uniform([], seed), tf.ones([1]))


@pytest.mark.parametrize("engine", ["fast", "dpkeras"])
@pytest.mark.parametrize(
    "layer, named",
    [
        (tf.keras.layers.Dropout(0.5, noise_shape=(1, 5)), r"layer 'dropout\w*'"),
        (tf.keras.layers.Dropout(0.5, noise_shape=(1, None)), r"\(1, 5\)"),
        (_NoisyWeights(), r"\(5, 5\)"),
        (_OneForAll(), r"\(1, 1\)"),
        (_OneForAll(looped=True), "map/while"),
        (_Drawing(lambda g, n: _in_a_loop([1, 2])), "map/while"),
        # Half of the rows have the numbers of the other half.
        (
            _Drawing(
                lambda g, n: tf.tile(g.random_normal([n // 2 + 1, 1]), [2, 1])[:n]
            ),
            r"\(505, 1\)",
        ),
        (
            _Drawing(lambda g, n: tf.transpose(g.random_uniform([1, n]))),
            r"shape \(1, 1009\)",
        ),
    ],
)
def test_numbers_that_rows_share_are_refused(layer, named, engine):
    """A row more moves others to the next microbatch, and to its numbers."""
    with pytest.raises(InputError, match=named) as refused:
        wide_run(squared, [layer], engine)
    assert "not every row can be seen to have its own" in str(refused.value)


@pytest.mark.parametrize(
    "made",
    [
        lambda g, n: tf.reduce_mean(g.random_uniform([n, 1])),
        lambda g, n: g.random_normal([n, 1])[:1],
        lambda g, n: tf.sort(g.truncated_normal([n, 1]), axis=0),
        lambda g, n: tf.roll(g.dropout(tf.ones([n, 1]), 0.5), 1, axis=0),
    ],
)
def test_numbers_of_a_row_that_others_use_are_refused(made):
    with pytest.raises(InputError, match="is dealt move the loss of another"):
        wide_run(squared, [_Drawing(made)], "dpkeras")


def _seeded(generator, shape):
    return tf.random.stateless_uniform(shape, generator.make_seed_for_stateless_op())


def _in_a_branch(seed, rows):
    return tf.cond(rows > 0, lambda: tf.cast(seed[0] % 9, tf.float32), lambda: 1.0)


@pytest.mark.parametrize(
    "made, message",
    [
        (lambda g, n: tf.reduce_mean(_seeded(g, [n, 1])), "is dealt move the loss"),
        (lambda g, n: _seeded(g, [n, 1])[::-1], "is dealt move the loss"),
        (lambda g, n: tf.reduce_mean(_seeded(g, [4 * n])), "is dealt move the loss"),
        (
            lambda g, n: tf.cast(g.make_seed_for_stateless_op()[0] % 9, tf.float32),
            "uses a seed as a number",
        ),
        (
            lambda g, n: _in_a_branch(g.make_seed_for_stateless_op(), n),
            "uses a seed as a number",
        ),
        (
            lambda g, n: tf.random.stateless_uniform(
                [n, 1], [1, 2], tf.cast(g.make_seed_for_stateless_op()[0], tf.float32)
            ),
            "uses a seed",
        ),
        (
            lambda g, n: (
                g.random_normal([n, 1]) * tf.random.stateless_uniform([n, 1], [1, 2])
            ),
            "from a seed of its own",
        ),
        (lambda g, n: _seeded(g, [n, 1]), None),
        (lambda g, n: tf.reshape(_seeded(g, [5 * n]), [n, 5]), None),
    ],
)
def test_what_layers_draw_from_a_seed_of_their_own_is_looked_into(made, message):
    if message is None:
        wide_run(squared, [_Drawing(made)], "dpkeras")
        return
    with pytest.raises(InputError, match=message):
        wide_run(squared, [_Drawing(made)], "dpkeras")


def test_numbers_that_every_row_uses_alone_are_taken():
    def made(generator, rows):
        drawn = tf.reshape(generator.random_uniform([3 * rows, 1]), [rows, 3, 1])
        return tf.reduce_mean(drawn, axis=1) + generator.random_normal([rows, 1])

    wide_run(squared, [_Drawing(made), tf.keras.layers.Dropout(0.2)], "dpkeras")


@pytest.mark.parametrize("rematerialize", [False, True])
def test_dropout_of_a_t5_is_each_rows_own(rematerialize):
    """Whatever the sizes: drawn flat, in fours, where layers run twice."""
    config = T5Config(30, 1, 1, 7, 9, 5, "1.1", dropout=0.3)
    model = T5QueryGenerator(config, "float32", rematerialize)
    batch = {
        "document_ids": np.ones([4, 9], np.int32),
        "document_lengths": np.full(4, 9, np.int32),
        "query_ids": np.ones([4, 5], np.int32),
        "query_lengths": np.full(4, 5, np.int32),
        "weights": np.ones(4, np.float32),
    }

    def losses(found):
        return model.per_example_losses(found, training=True)

    require_draws_of_rows(losses, batch, [model], 1)
    require_own_draws(losses, batch, [model], 1, 1e-4)


class _OfPairs(tf.keras.layers.Layer):
    """Drops the same inputs of every two rows."""

    def __init__(self):
        super().__init__()
        self.dropout = tf.keras.layers.SpatialDropout1D(0.5)

    def call(self, inputs):
        pairs = self.dropout(tf.reshape(inputs, [-1, 2, 5]), training=True)
        return tf.reshape(pairs, [-1, 5])


def test_a_loss_for_even_numbers_of_rows_alone_is_refused():
    with pytest.raises(InputError, match="could not be traced for 1009 rows"):
        wide_run(squared, [_OfPairs()], "dpkeras")


_LAYERS = tf.keras.layers


@pytest.mark.parametrize(
    "layers, shared",
    [
        ([_LAYERS.RandomCrop(3, 3)], True),
        ([_LAYERS.RandomContrast(0.5)], True),
        ([_LAYERS.RandomFlip()], False),
        ([_LAYERS.RandomTranslation(0.2, 0.2)], False),
        ([_LAYERS.SpatialDropout2D(0.5)], False),
        ([_LAYERS.Dropout(0.5, noise_shape=(None, 1, 1, 1))], False),
        ([_LAYERS.Reshape((16, 1)), _LAYERS.SpatialDropout1D(0.5)], False),
        ([_LAYERS.Flatten(), _LAYERS.AlphaDropout(0.5)], False),
    ],
)
def test_layers_of_keras_that_draw_for_each_row_are_taken(layers, shared):
    model = tf.keras.Sequential([tf.keras.Input((4, 4, 1)), *layers, _LAYERS.Flatten()])
    batch = {"x": np.ones([3, 4, 4, 1], np.float32), "weights": np.ones(3, np.float32)}

    def losses(found):
        return tf.reduce_sum(model(found["x"], training=True), axis=1)

    assert traced(losses, batch, [model]).draws
    if shared:
        with pytest.raises(InputError, match="not every row can"):
            require_draws_of_rows(losses, batch, [model], 1)
    else:
        require_draws_of_rows(losses, batch, [model], 1)


def test_keys_work_as_tensors_inside_a_compiled_function():
    layer = tf.keras.layers.Dropout(0.5)

    @tf.function(jit_compile=True)
    def masks(step, microbatch):
        with _open(layer, step=step, microbatch=microbatch):
            return layer(tf.ones([20, 20]), training=True)

    def at(step, microbatch):
        return masks(tf.constant(step, tf.int64), tf.constant(microbatch)).numpy()

    np.testing.assert_array_equal(at(4, 2), at(4, 2))
    assert (at(4, 2) != at(5, 2)).any() and (at(4, 2) != at(4, 3)).any()


def test_masks_that_drop_all_of_a_narrow_model_are_no_dependence_on_places():
    """Both keys that were tried leave only its last bias, which is the same in both."""
    tf.keras.utils.set_random_seed(7)
    draw = np.random.default_rng(0)
    x = draw.normal(size=[64, 6]).astype(np.float32)
    y = draw.normal(size=[64]).astype(np.float32)
    keras = tf.keras.layers
    model = tf.keras.Sequential(
        [
            keras.Dense(2, "relu"),
            keras.Dropout(0.9),
            keras.Dense(3, "relu"),
            keras.Dropout(0.9),
            keras.Dense(1),
        ]
    )
    model(x[:2])
    plan = plans.plan(
        epsilon=8.0,
        delta=1e-3,
        clip_norm=0.5,
        num_units=64,
        batch_size=16,
        steps=1,
    )
    taken = train(
        plan,
        lambda b: tf.square(model(b["x"], training=True)[:, 0] - b["y"]),
        model.trainable_variables,
        make_optimizer(plan, 0.1),
        lambda at: {"x": x[at], "y": y[at]},
        8,
        layers=[model],
        units=64,
    )
    assert taken == 1

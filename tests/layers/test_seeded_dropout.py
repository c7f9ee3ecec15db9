"""Dropout by seed and place: parts are the whole, and no two draws are alike."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.layers import SeededDropout, T5Config, T5TransformerLayer, dropout_seed
from tfdpsq.layers.seeded_dropout import kinds_of_rows, seed_of_step


def _function(mode, function):
    if mode == "eager":
        return function
    return tf.function(function, jit_compile=mode == "xla")


def _dropping(shape, rate=0.3, parts=1, calls=1, mode="eager"):
    """A function of seed and part: [calls, *shape], what dropouts in a row keep."""
    layer = SeededDropout(rate)

    def drop(seed, part):
        with dropout_seed(seed, part, parts):
            return tf.stack(
                [layer(tf.ones(shape), training=True) for _ in range(calls)]
            )

    function = _function(mode, drop)

    def kept(seed=(1, 2), part=0):
        found = function(tf.constant(seed, tf.int64), tf.constant(part)).numpy()
        assert set(np.unique(found)) <= {0, np.float32(1 / (1 - rate))}
        return found > 0

    return kept


@pytest.mark.parametrize(
    "mode, columns",
    [("eager", (4,)), ("eager", (3, 7)), ("graph", (5,)), ("xla", (8,)), ("xla", (5,))],
)
def test_parts_drop_what_the_whole_batch_drops(mode, columns):
    """Also where a row's elements are no multiple of what the generator gives."""
    whole = _dropping((12, *columns), calls=2)()  # eager: compiled ones draw the same
    for parts in (3,) if mode == "xla" else (1, 2, 3, 4, 12):
        kept = _dropping((12 // parts, *columns), parts=parts, calls=2, mode=mode)
        found = [kept(part=part) for part in range(parts)]
        np.testing.assert_array_equal(np.concatenate(found, axis=1), whole)


def test_kinds_of_rows_are_split_separately():
    def kept(counts, part):
        with kinds_of_rows(counts):
            return _dropping((sum(counts), 5))(part=part)[0]

    whole = kept((8, 4), 0)
    halves = [kept((4, 2), part) for part in range(2)]
    for kind in (slice(0, 8), slice(8, 12)):
        own = slice(kind.start // 2, kind.stop // 2)
        np.testing.assert_array_equal(
            np.concatenate([half[own] for half in halves]), whole[kind]
        )
    # Kinds have streams of their own, and so have calls.
    assert (whole[:4] != whole[8:]).any()


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_drops_have_the_rate_and_are_independent(rate):
    """Rows, calls, steps, seeds and kinds: no draw knows anything of another.

    Of n pairs of independent draws a share of rate² drops both, give or take the
    deviation of a binomial.
    """
    n = 500_000
    draws = {}
    for seed, step in ((1, 0), (1, 1), (2, 0)):
        with kinds_of_rows((2, 1)):
            drawn = _dropping((3, n), rate, calls=2)(
                seed_of_step(seed, tf.constant(step))
            )
        for call in range(2):
            for row in range(3):
                draws[seed, step, call, row] = ~drawn[call, row]
    assert len(draws) == 18
    # Six deviations: one of these 171 numbers is beyond them once in three million
    # runs.
    for dropped in draws.values():
        assert abs(dropped.mean() - rate) < 6 * np.sqrt(rate * (1 - rate) / n)
    both = rate**2
    names = sorted(draws)
    for i, one in enumerate(names):
        for other in names[:i]:
            found = (draws[one] & draws[other]).mean()
            assert abs(found - both) < 6 * np.sqrt(both * (1 - both) / n), (one, other)
    # Nor do neighbours within a row, or numbers of one word, or of one group.
    for shift in (1, 2, 3, 4, 5, n // 8, n // 4, n // 2, n // 2 + n // 8):
        found = (draws[names[0]][shift:] & draws[names[0]][:-shift]).mean()
        assert abs(found - both) < 6 * np.sqrt(2 * both * (1 - both) / n)


def test_seeds_of_any_size_work():
    for seed in (0, -3, 1 << 70):
        assert seed_of_step(seed, tf.constant(4)).numpy().tolist()[1] == 4


@pytest.mark.parametrize("mode", ["graph", pytest.param("xla", marks=pytest.mark.slow)])
def test_layer_in_parts_equals_the_layer_on_the_whole(mode):
    """Its gradient, too, for which a rematerialised layer drops the same once more."""
    config = T5Config(9, 1, 2, 6, 10, 3, "1.0", dropout=0.4)
    layer = T5TransformerLayer(config, False, True, rematerialize=True)
    random = np.random.default_rng(0)
    x = random.normal(size=[6, 5, 6]).astype(np.float32)
    wanted = random.normal(size=[6, 5, 6]).astype(np.float32)
    mask = np.ones([6, 1, 5], np.float32)
    layer(x, mask)

    def derive(part, x, mask, wanted, parts, kinds):
        with kinds_of_rows(kinds):
            with tf.GradientTape() as tape, dropout_seed([3, 4], part, parts):
                output, _ = layer(x, mask, training=True)
                total = tf.reduce_sum(output * wanted)
        # Not within: the second run is of what the first one was told.
        gradients = tape.gradient(total, layer.trainable_variables)
        return output, *map(tf.convert_to_tensor, gradients)

    def on(parts, kinds):
        function = _function(
            mode, lambda part, *given: derive(part, *given, parts, kinds)
        )

        def run(part, rows):
            given = (x[rows], mask[rows], wanted[rows])
            found = function(tf.constant(part), *map(tf.constant, given))
            return [values.numpy() for values in found]

        return run

    whole = on(1, (4, 2))(0, np.arange(6))
    # Of each kind one half: rows 0, 1 and 4; rows 2, 3 and 5.
    halves = ([0, 1, 4], [2, 3, 5])
    run = on(2, (2, 1))
    parts = [run(part, rows) for part, rows in enumerate(halves)]
    for rows, part in zip(halves, parts):
        np.testing.assert_allclose(part[0], whole[0][rows], rtol=1e-5, atol=1e-5)
    for one, two, sum_ in zip(parts[0][1:], parts[1][1:], whole[1:]):
        np.testing.assert_allclose(one + two, sum_, rtol=1e-4, atol=1e-4)
    # Without the dropout it would be something else by far.
    plain = layer(x, mask)[0].numpy()
    assert np.abs(plain - whole[0]).max() > 0.1

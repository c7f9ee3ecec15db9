"""The law of training's noise: its scale, its shape, once per logical step.

Where every gradient is zero, SGD moves the weights by the noise alone, so after T
steps each of P coordinates is a sum of T independent N(0, (σΔ·lr/B)²):

    E Σθ² = T · P · σ²Δ² · lr² / B²,    Δ = sensitivity_multiplier · C.

tensorflow-privacy alone gives √replicas and √microbatches times that.
"""

import functools
import itertools
import math

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from helpers import plans

from tfdpsq.layers import SeededDropout
from tfdpsq.privacy import ENGINES, RunKey, make_logical_step
from tfdpsq.privacy.randomness.noise import as_words, noised
from tfdpsq.privacy.randomness.secure import derived_seed

_RATE = 0.3
_WRONG = (2 / 3, 3 / 2, math.sqrt(2), 1 / math.sqrt(2), 2, 1 / 2)


# Everybody takes part in every step, so that it has as many microbatches as said.
_plan = functools.partial(plans.plan, num_units=32, batch_size=32, steps=3)


def _deviation(plan):
    """Of one step's update of one weight, from the spec and σ.

    That a secure plan adds 2^-16 for rounding is below what can be seen here.
    """
    spec = plan.spec
    sensitivity = spec.sensitivity_multiplier * spec.clip_norm
    return plan.noise_multiplier * sensitivity * _RATE / spec.batch_size


def _fits(values, deviation):
    """Two-sided χ² test of the variance of zero-mean Gaussians, at level 1e-5."""
    tail = scipy.stats.chi2(len(values)).cdf((values**2).sum() / deviation**2)
    return 5e-6 < tail < 1 - 5e-6


def _assert_scale(values, deviation):
    assert _fits(values, deviation)
    for factor in _WRONG:
        assert not _fits(values, factor * deviation)


def _assert_uncorrelated(vectors):
    """Each with every other; a correlation of P pairs has deviation 1/√P."""
    for one, other in itertools.combinations(vectors, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / math.sqrt(len(one))


class _Still:
    """Two weights of one shape, and a loss that none of them moves."""

    def __init__(self):
        self.layers = [
            tf.keras.layers.Dense(80, use_bias=False, kernel_initializer="zeros")
            for _ in range(2)
        ]
        for layer in self.layers:
            layer.build([None, 60])
        self.variables = [layer.kernel for layer in self.layers]

    def per_example_losses(self, batch):
        outputs = [layer(batch["x"]) for layer in self.layers]
        return 0.0 * tf.reduce_sum(tf.add_n(outputs), 1)

    def copies(self, strategy):
        """[replicas, P]: what each replica holds of all weights."""
        held = [
            [np.ravel(v) for v in strategy.experimental_local_results(variable)]
            for variable in self.variables
        ]
        return np.stack([np.concatenate(one) for one in zip(*held)])


@pytest.fixture(scope="module")
def trained(strategy_of):
    """Trains on zero gradients; returns each replica's weights after each step."""
    seen = {}

    def run(replicas=1, microbatches=1, seed=11, engine="fast", **changes):
        key = (replicas, microbatches, seed, engine, *sorted(changes.items()))
        if key not in seen or seed is None:
            plan = _plan(**changes)
            strategy, weights = strategy_of(replicas), []
            with strategy.scope():
                still = _Still()
                optimizer = plans.optimizer(_RATE)
                plans.trained(
                    plan,
                    still.per_example_losses,
                    still.layers,
                    {"x": np.ones([32, 60], np.float32)},
                    32 // (replicas * microbatches),
                    optimizer,
                    engine=engine,
                    seed=seed,
                    on_step=lambda *_: weights.append(still.copies(strategy)),
                )
                assert (
                    int(tf.convert_to_tensor(optimizer.iterations)) == plan.spec.steps
                )
            seen[key] = plan, np.stack(weights)
        return seen[key]

    return run


def _noise(weights):
    """[steps, P]: what each step added to the first replica's weights."""
    first = weights[:, 0].astype(np.float64)
    return np.diff(first, axis=0, prepend=0)


@pytest.mark.parametrize(
    "replicas, microbatches, secure",
    [(1, 1, False), (1, 4, False), (2, 4, False), (4, 1, False), (2, 4, True)],
)
def test_zero_gradients_leave_the_stated_noise(trained, replicas, microbatches, secure):
    """Once per logical step, whatever the replicas and microbatches."""
    changes = {"secure": True} if secure else {}
    _assert_stated_noise(*trained(replicas, microbatches, **changes), replicas)


def _assert_stated_noise(plan, weights, replicas):
    assert weights.shape == (3, replicas, 2 * 60 * 80)
    # E Σθ² = steps · P · (σΔ·lr/B)², and so for each step alone.
    _assert_scale(weights[-1, 0], math.sqrt(3) * _deviation(plan))
    for step in _noise(weights):
        _assert_scale(step, _deviation(plan))
    # Two weights of one shape in three steps: six vectors, none like another.
    _assert_uncorrelated(_noise(weights).reshape(6, -1))
    # Replicas that drew for themselves would drift apart, or add up.
    for other in range(1, replicas):
        np.testing.assert_array_equal(weights[:, 0], weights[:, other])


@pytest.mark.parametrize("options", [{}, {"secure": True}], ids=["default", "secure"])
def test_the_noise_follows_from_its_seed_and_nothing_else(trained, options):
    _, first = trained(1, 1, **options)
    for replicas, microbatches in ((2, 4),) if options else ((2, 4), (4, 1)):
        _, other = trained(replicas, microbatches, **options)
        np.testing.assert_array_equal(first[:, 0], other[:, 0])
    seeds = (11, 12, None, None)
    draws = [_noise(trained(seed=seed, **options)[1])[0] for seed in seeds]
    _assert_uncorrelated(draws)


@pytest.mark.parametrize("secure", [False, True])
def test_the_noise_is_gaussian(trained, secure):
    plan, weights = trained(2, 4, **({"secure": True} if secure else {}))
    standard = _noise(weights).ravel() / _deviation(plan)
    assert scipy.stats.kstest(standard, "norm").pvalue > 1e-4
    # Other laws of the same variance are told apart.
    for law in (
        scipy.stats.laplace(scale=1 / math.sqrt(2)),
        scipy.stats.uniform(-math.sqrt(3), 2 * math.sqrt(3)),
        scipy.stats.truncnorm(-2, 2, scale=1 / scipy.stats.truncnorm(-2, 2).std()),
    ):
        assert scipy.stats.kstest(standard, law.cdf).pvalue < 1e-6
    if secure:
        _assert_uncorrelated([_noise(weights)[0], _noise(trained(2, 4)[1])[0]])


@pytest.mark.parametrize("engine", ["dpkeras", "fast"])
def test_noise_grows_with_the_sensitivity(trained, engine):
    plan, weights = trained(engine=engine, steps=1, sensitivity_multiplier=7.0)
    sigma = plan.noise_multiplier
    assert sigma == pytest.approx(_plan(steps=1).noise_multiplier)
    _assert_scale(weights[0, 0], 7 * sigma * 0.5 * _RATE / 32)


def _one_step(engine, replicas, microbatches, strategy_of, jit=False):
    """One logical step in the caller's own loop, on zero gradients."""
    plan, strategy = _plan(), strategy_of(replicas)
    with strategy.scope():
        still = _Still()
        step = make_logical_step(
            plan,
            still.per_example_losses,
            still.variables,
            optimizer := plans.optimizer(_RATE),
            1 if engine == "rowwise" else 8,
            layers=still.layers,
            engine=engine,
        )
    rows = 8 * microbatches
    batch = {"x": tf.zeros([rows, 60]), "weights": tf.ones([rows])}
    arguments = (batch, tf.constant(rows), [], RunKey(plan, 11).step_keys(0))

    @tf.function(jit_compile=jit)
    def run(*arguments):
        if replicas == 1:
            return step(*arguments)
        return strategy.run(step, arguments)

    run(*arguments)
    assert int(tf.convert_to_tensor(optimizer.iterations)) == 1
    return plan, still.copies(strategy)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_in_a_loop_of_the_callers_has_the_same_noise(
    engine, strategy_of, trained
):
    plan, copies = _one_step(engine, 2, 4, strategy_of)
    _assert_scale(copies[0], _deviation(plan))
    for other in copies:
        np.testing.assert_array_equal(other, trained(1, 1)[1][0, 0])


def test_the_step_compiled_by_xla_has_the_stated_noise(strategy_of):
    plan, copies = _one_step("fast", 1, 4, strategy_of, jit=True)
    _assert_scale(copies[0], _deviation(plan))
    _assert_uncorrelated(copies[0].reshape(2, -1))


def test_empty_batches_step_with_the_stated_noise(trained):
    """Were they left out, how far the weights moved would show who was drawn."""
    plan, weights = trained(num_units=32, batch_size=1, steps=8, seed=3)
    noise = _noise(weights)
    sampler = plan.sampler(None, RunKey(plan, 3).sampler)
    counts = {sampler.draw(step).count for step in range(8)}
    assert 0 in counts  # one in three steps is empty
    assert len(noise) == 8
    for step in noise:
        _assert_scale(step, _deviation(plan))


@pytest.mark.parametrize("jit", [False, True])
def test_every_bit_of_the_noise_seed_counts_compiled_or_not(jit):
    """XLA kept 32 bits of each word, and stateless_fold_in left 32 of a whole key."""

    @tf.function(jit_compile=jit)
    def noise(seed):
        zeros, step = [tf.zeros([256])], tf.constant(1, tf.int64)
        return noised(zeros, 1.0, seed, step)[0]

    def drawn(words):
        return noise(tf.constant(np.reshape(words, [2, 2]), tf.int64)).numpy()

    words = [0x123456789ABCDEF, 0x3EDCBA987654321, 0x0F1E2D3C4B5A697, 0x1112131415161]
    before = drawn(words)
    for place in range(4):
        for bit in range(63):
            other = list(words)
            other[place] ^= 1 << bit
            assert np.abs(drawn(other) - before).max() > 0.5, (place, bit)


_WITH_ONE_IN_COMMON = [[[11, 12], [15, 16]], [[17, 18], [13, 14]]]


@pytest.mark.parametrize("jit", [False, True])
def test_the_two_draws_of_a_noise_make_independent_normals(jit):
    @tf.function(jit_compile=jit)
    def noise(seed):
        zeros, step = [tf.zeros([40_000])] * 2, tf.constant(1, tf.int64)
        return noised(zeros, 2.0, seed, step)

    both = noise(tf.constant([[11, 12], [13, 14]], tf.int64))
    found = np.stack(both).astype(np.float64) / 2
    assert scipy.stats.kstest(found.ravel(), "norm").pvalue > 1e-4
    for wrong in (2 / 3, 1 / math.sqrt(2), math.sqrt(2), 3 / 2):
        assert scipy.stats.kstest(found.ravel() * wrong, "norm").pvalue < 1e-9
    # Neither draw alone tells anything of the noise.
    others = [noise(tf.constant(s, tf.int64)) for s in _WITH_ONE_IN_COMMON]
    _assert_uncorrelated([*found, *np.concatenate(others)])


def test_variables_of_one_shape_have_independent_noise():
    seed, step = tf.constant([[1, 2], [3, 4]], tf.int64), tf.constant(1, tf.int64)
    found = noised([tf.zeros([2])] * 700, 1.0, seed, step)
    assert len({value for noise in found for value in noise.numpy().tolist()}) == 1400


def test_noise_of_float64_sums_has_all_their_digits():
    """With float32's, the last ones of a sum would be those of no noise at all.

    A normal number of float32 is a multiple of 2^-40, but for one in a million.
    """
    seed, step = tf.constant([[1, 2], [3, 4]], tf.int64), tf.constant(1, tf.int64)
    for dtype, share in ((tf.float32, 1.0), (tf.float64, 0.0)):
        (found,) = noised([tf.zeros([1000], dtype)], 1.0, seed, step)
        steps = found.numpy().astype(np.float64) * 2.0**40
        assert found.dtype == dtype
        assert np.std(found) == pytest.approx(1, abs=0.1)
        assert np.mean(steps == np.round(steps)) == pytest.approx(share, abs=0.02)


def test_no_key_of_a_run_tells_anything_of_another():
    key = RunKey(_plan(), (5 << 100) + 3)
    of_step = key.step_keys(0)
    own = tuple(of_step.dropout.numpy().tolist())
    seeds = {derived_seed(seed, "dropout") for seed in range(100)}
    assert len(seeds) == 100 and all(seed >= 0 for seed in seeds)
    assert not set(own) & {3, 5 << 37, (5 << 100) + 3}
    # Dropout, the two draws of noise, samples and the process have keys of their own.
    keys = {own, *(tuple(words) for words in of_step.noise.numpy().tolist())}
    keys |= {as_words(key.sampler), (key.process, 0)}
    assert len(keys) == 5 and len({first for first, _ in keys}) == 5


@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_key_is_in_a_dump_of_the_graph(tmp_path, secure):
    """TensorBoard's files are shown to people who must not subtract the noise."""
    plan = _plan(secure=secure, steps=1)
    model = tf.keras.Sequential(
        [tf.keras.layers.Dropout(0.5), tf.keras.layers.Dense(2)]
    )
    model.build([None, 3])
    seed = 0x2545F4914F6CDD1D9E3779B97F4A7C15
    tf.summary.trace_on(graph=True)
    plans.trained(
        plan,
        lambda batch: tf.reduce_sum(model(batch["x"], training=True), 1),
        [model],
        {"x": np.ones([32, 3], np.float32)},
        32,
        engine="vectorized",
        seed=seed,
    )
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        tf.summary.trace_export("step", 0)
    (dump,) = (path.read_bytes() for path in tmp_path.iterdir())
    assert b"StatelessRandom" in dump
    keys = RunKey(plan, seed).step_keys(0)
    words = [*keys.noise.numpy().ravel(), *keys.dropout.numpy()]
    assert len(words) == (2 if secure else 6)
    assert not any(int(word).to_bytes(8, "little") in dump for word in words)


@pytest.mark.parametrize("layer", [tf.keras.layers.Dropout, SeededDropout])
def test_every_step_of_every_run_has_dropout_of_its_own(layer):
    """At rate 0 the weights stay, and all rows are in every step: masks alone differ.

    The global seed, public here, does not decide them. Of 32 · 64 units, half stay; the
    mean of a step's losses deviates by about 0.7.
    """
    plan, losses, dropout = _plan(steps=4), [], layer(0.5)
    dense = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    dense.build([None, 64])
    units = np.random.default_rng(0).uniform(0.9, 1.1, [32, 64]).astype(np.float32)
    for _ in range(2):
        tf.random.set_seed(7)
        plans.trained(
            plan,
            lambda batch: dense(dropout(batch["x"], training=True))[:, 0],
            [dropout, dense],
            {"x": units},
            32,
            plans.optimizer(0.0),
            on_step=lambda step, loss: losses.append(loss),
        )
    assert len(set(losses)) == 8 and np.std(losses) < 5

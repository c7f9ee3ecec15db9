"""Clipping against a float64 loop; noise scale, once per logical step."""

import math

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras

from tfdpsq.privacy import PrivacySpec, make_logical_step, make_optimizer, make_plan
from tfdpsq.privacy.optimizers import SeededGaussianSumQuery, noise_key

_ENGINES = ("dpkeras", "vectorized")


def _plan(**changes):
    values = dict(
        epsilon=2.0, clip_norm=0.5, n=400, batch_size=16, steps=50, accountant="rdp"
    )
    return make_plan(PrivacySpec(**{**values, **changes}))


def _linear_rows(width, outputs, rows, seed=0):
    random = np.random.default_rng(seed)
    return (
        random.normal(size=(rows, width)).astype("float32"),
        random.normal(size=(rows, outputs)).astype("float32"),
    )


class _Regression:
    """y ≈ tanh(x·a)·b with squared error: two weights, one loss per row."""

    def __init__(self, width=5, hidden=4, outputs=3, seed=1):
        random = np.random.default_rng(seed)
        self.a = tf.Variable(random.normal(size=(width, hidden)).astype("float32"))
        self.b = tf.Variable(random.normal(size=(hidden, outputs)).astype("float32"))
        self.variables = [self.a, self.b]

    def row_losses(self, batch):
        output = tf.tanh(batch["x"] @ self.a) @ self.b
        return tf.reduce_sum((output - batch["y"]) ** 2, axis=1)

    def naive_clipped_sum(self, x, y, clip_norm):
        """Per-example gradients by hand in float64, clipped, added one by one."""
        a, b = (v.numpy().astype(np.float64) for v in self.variables)
        total = [np.zeros_like(a), np.zeros_like(b)]
        for xi, yi in zip(x.astype(np.float64), y.astype(np.float64)):
            h = np.tanh(xi @ a)
            error = 2 * (h @ b - yi)
            grads = [np.outer(xi, (b @ error) * (1 - h**2)), np.outer(h, error)]
            norm = math.sqrt(sum((g**2).sum() for g in grads))
            scale = min(1.0, clip_norm / norm)
            total = [t + scale * g for t, g in zip(total, grads)]
        return total


def _clipped(model, optimizer, x, y):
    with tf.GradientTape() as tape:
        losses = model.row_losses({"x": tf.constant(x), "y": tf.constant(y)})
    return [g.numpy() for g in optimizer.clipped_sum(losses, model.variables, tape)[0]]


@pytest.mark.parametrize("engine", _ENGINES)
def test_clipped_sums_equal_a_naive_float64_loop(engine):
    model, (x, y) = _Regression(), _linear_rows(5, 3, 12)
    x[:4] *= 0.01  # some rows below the clip norm, some above
    y[:4] = np.tanh(x[:4] @ model.a.numpy()) @ model.b.numpy() + 0.01
    optimizer = make_optimizer(_plan(), 1.0, "sgd", engine)
    expected = model.naive_clipped_sum(x, y, 0.5)
    for got, want in zip(_clipped(model, optimizer, x, y), expected):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_row_without_a_finite_gradient_costs_nobody_else(engine, bad, jit):
    """In tensorflow-privacy one Inf turned the whole clipped sum into NaN.

    Zeroing what is not finite is not enough: in the batched backward pass 0 · NaN
    spoils the rows beside it, and one row would have moved the sum by n·C.
    """
    x, y = _linear_rows(5, 3, 8)
    y[2, 1] = bad
    updates = []
    for rows in (np.arange(8), np.delete(np.arange(8), 2)):
        model = _Regression()
        start = [v.numpy() for v in model.variables]
        expected = model.naive_clipped_sum(np.delete(x, 2, 0), np.delete(y, 2, 0), 0.5)
        optimizer = make_optimizer(_plan(), 1.0, "sgd", engine, noise_seed=4)
        filled = np.concatenate([rows, np.zeros(8 - len(rows), int)])
        after = _run_steps(
            model, optimizer, [(x[filled], y[filled], len(rows))], 4, jit
        )
        updates.append([a - b for a, b in zip(after, start)])
    for with_bad, without in zip(*updates):
        np.testing.assert_allclose(with_bad, without, rtol=1e-4, atol=1e-6)
    # And the good rows are really there: far from the noise alone.
    silent = _run_steps(
        model := _Regression(),
        make_optimizer(_plan(), 1.0, "sgd", engine, noise_seed=4),
        [(x, y, 0)],
        4,
        jit,
    )
    start = [v.numpy() for v in _Regression().variables]
    for update, alone, was, total in zip(updates[0], silent, start, expected):
        np.testing.assert_allclose(
            update - (alone - was), -total / 16, rtol=1e-3, atol=2e-6
        )


@pytest.mark.parametrize("engine", _ENGINES)
def test_neighbours_move_the_clipped_sum_by_at_most_the_clip_norm(engine):
    model = _Regression()
    optimizer = make_optimizer(_plan(), 1.0, "sgd", engine)
    for seed in range(5):
        x, y = _linear_rows(5, 3, 7, seed)
        y[0] *= 10.0**seed
        whole = _clipped(model, optimizer, x, y)
        without = _clipped(model, optimizer, x[1:], y[1:])
        moved = math.sqrt(sum(((w - o) ** 2).sum() for w, o in zip(whole, without)))
        assert moved <= 0.5 * (1 + 1e-5)
        assert moved >= 0.5 * (1 - 1e-3) or seed == 0


def test_the_classes_are_tensorflow_privacys():
    factory = dp_optimizer_keras.make_keras_generic_optimizer_class
    made = make_optimizer(_plan(), 0.1, "adam", "dpkeras")
    assert isinstance(made, tf.keras.optimizers.legacy.Adam)
    parents = [base.__qualname__ for base in type(made).__mro__]
    assert factory(tf.keras.optimizers.legacy.Adam).__qualname__ in parents
    assert made.plan.noise_stddev > 0
    assert "seed" not in str(made.get_config())


def _zero_gradient_update(engine, replicas, microbatches, logical_cpus, jit=False):
    """One SGD step at learning rate 1 on zero gradients: the noise itself."""
    plan = _plan(max_batch_size=40)
    if replicas == 1:
        strategy = tf.distribute.get_strategy()
    else:
        strategy = tf.distribute.MirroredStrategy(logical_cpus[:replicas])
    with strategy.scope():
        variables = [tf.Variable(tf.zeros([60, 50])), tf.Variable(tf.zeros([60, 50]))]
        optimizer = make_optimizer(plan, 1.0, "sgd", engine, noise_seed=11)
        step = make_logical_step(
            lambda b: 0.0 * tf.reduce_sum(b["x"] @ variables[0] + variables[1][0], 1),
            variables,
            optimizer,
            8,
        )
    batch = {
        "x": tf.zeros([8 * microbatches, 60]),
        "weights": tf.ones([8 * microbatches]),
    }
    count = tf.constant(8 * microbatches)

    @tf.function(jit_compile=jit)
    def run(batch, count):
        return (
            strategy.run(step, (batch, count)) if replicas > 1 else step(batch, count)
        )

    run(batch, count)
    copies = [
        [value.numpy() for value in strategy.experimental_local_results(variable)]
        for variable in variables
    ]
    return plan, copies, int(tf.convert_to_tensor(optimizer.iterations))


@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_update_noise_is_the_plans_once_per_logical_step(
    engine, replicas, microbatches, logical_cpus
):
    """tensorflow-privacy alone gives √2 for 2 replicas and √4 for 4 microsteps."""
    plan, copies, iterations = _zero_gradient_update(
        engine, replicas, microbatches, logical_cpus
    )
    assert iterations == 1
    noise = np.concatenate([values[0].ravel() for values in copies])
    stated = plan.noise_stddev / plan.spec.batch_size

    def fits(deviation):
        # Two-sided χ² test of the variance with 6000 degrees of freedom.
        statistic = (noise**2).sum() / deviation**2
        tail = scipy.stats.chi2(len(noise)).cdf(statistic)
        return 1e-5 < tail < 1 - 1e-5

    assert fits(stated)
    assert not fits(stated * 2 / 3) and not fits(stated * 3 / 2)
    assert not fits(stated * math.sqrt(2)) and not fits(stated / math.sqrt(2))
    # Independent for variables of one shape, identical on every replica.
    a, b = (values[0].ravel() for values in copies)
    assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / math.sqrt(len(a))
    for values in copies:
        for other in values[1:]:
            np.testing.assert_array_equal(values[0], other)


@pytest.mark.parametrize("engine", _ENGINES)
def test_the_step_compiles_with_xla_and_noises_alike(engine, logical_cpus):
    plan, copies, _ = _zero_gradient_update(engine, 1, 4, logical_cpus, jit=True)
    noise = np.concatenate([values[0].ravel() for values in copies])
    assert noise.std() * plan.spec.batch_size == pytest.approx(
        plan.noise_stddev, rel=0.05
    )


def _run_steps(model, optimizer, batches, microbatch=4, jit=False):
    step = tf.function(
        make_logical_step(model.row_losses, model.variables, optimizer, microbatch),
        jit_compile=jit,
    )
    for x, y, count in batches:
        weights = (np.arange(len(x)) < count).astype("float32")
        step(
            {"x": tf.constant(x), "y": tf.constant(y), "weights": tf.constant(weights)},
            tf.constant(count),
        )
    return [v.numpy() for v in model.variables]


def test_engines_and_microbatch_sizes_give_the_same_training():
    x, y = _linear_rows(5, 3, 16)
    results = []
    for engine in _ENGINES:
        for microbatch in (2, 16):
            model = _Regression()
            optimizer = make_optimizer(_plan(), 0.1, "adam", engine, noise_seed=4)
            results.append(
                _run_steps(model, optimizer, [(x, y, 13), (x, y, 9)], microbatch)
            )
    for other in results[1:]:
        for a, b in zip(results[0], other):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_padding_rows_change_nothing():
    x, y = _linear_rows(5, 3, 8)
    garbage_x, garbage_y = x.copy(), y.copy()
    garbage_x[5:], garbage_y[5:] = 1e20, np.nan
    results = [
        _run_steps(
            model := _Regression(),
            make_optimizer(_plan(), 0.1, "sgd", "dpkeras", noise_seed=4),
            [(a, b, 5)],
        )
        for a, b in ((x, y), (garbage_x, garbage_y))
    ]
    assert np.isfinite(model.a.numpy()).all()
    for a, b in zip(*results):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_an_empty_batch_still_takes_a_noisy_step():
    x, y = _linear_rows(5, 3, 8)
    model = _Regression()
    before = [v.numpy() for v in model.variables]
    optimizer = make_optimizer(_plan(), 0.1, "sgd", "dpkeras")
    after = _run_steps(model, optimizer, [(x, y, 0)])
    assert all((a != b).all() for a, b in zip(before, after))
    assert int(optimizer.iterations) == 1


def test_the_update_is_normalised_by_the_expected_batch_not_the_drawn_one():
    x, y = _linear_rows(5, 3, 8)
    model = _Regression()
    plan = _plan(epsilon=math.inf)
    start = [v.numpy() for v in model.variables]
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(
            model.row_losses({"x": tf.constant(x[:3]), "y": tf.constant(y[:3])})
        )
    gradients = [g.numpy() for g in tape.gradient(total, model.variables)]
    after = _run_steps(model, make_optimizer(plan, 1.0, "sgd"), [(x, y, 3)])
    for was, now, gradient in zip(start, after, gradients):
        # Sixteen rows were expected, three were drawn.
        np.testing.assert_allclose(was - now, gradient / 16, rtol=1e-4, atol=1e-6)


def test_steps_draw_independent_noise_and_seeds_are_fresh():
    def noise(seed, steps):
        variable = tf.Variable(tf.zeros([2000]))
        optimizer = make_optimizer(_plan(), 1.0, "sgd", "dpkeras", noise_seed=seed)
        seen = []
        for _ in range(steps):
            before = variable.numpy()
            gradient = optimizer.privatize([tf.zeros([2000])])
            optimizer.apply_gradients(zip(gradient, [variable]))
            seen.append(before - variable.numpy())
        return seen

    first, second = noise(3, 2)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4.5 / math.sqrt(2000)
    np.testing.assert_array_equal(first, noise(3, 1)[0])
    assert not np.array_equal(noise(None, 1)[0], noise(None, 1)[0])


def test_fit_is_refused_as_it_could_not_keep_the_guarantee():
    x, y = _linear_rows(5, 1, 32)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(
        make_optimizer(_plan(), 1.0, "sgd"),
        loss=tf.keras.losses.MeanSquaredError(reduction="none"),
        run_eagerly=True,
    )
    with pytest.raises(ValueError, match="Use tfdpsq.privacy.train"):
        model.fit(x, y, batch_size=16, verbose=0)


def test_a_loss_that_was_reduced_already_is_refused():
    model, (x, y) = _Regression(), _linear_rows(5, 3, 8)
    with tf.GradientTape() as tape:
        losses = model.row_losses({"x": tf.constant(x), "y": tf.constant(y)})
        mean = tf.reduce_mean(losses)
    with pytest.raises(ValueError, match="reduction=NONE"):
        make_optimizer(_plan(), 1.0, "sgd").clipped_sum(mean, model.variables, tape)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="engine is 'ghost'; choose one of"):
        make_optimizer(_plan(), 0.1, "adam", "ghost")
    with pytest.raises(ValueError, match="optimizer is 'lion'; choose one of"):
        make_optimizer(_plan(), 0.1, "lion")


def test_noise_keys_keep_all_their_bits_and_never_repeat():
    """stateless_fold_in with a Python integer gave a 32-bit key for a whole step."""
    seed = tf.constant([3 << 40, 5 << 50], tf.int64)
    keys = {
        tuple(noise_key(seed, tf.constant(step), position).numpy().tolist())
        for step in range(50)
        for position in range(40)
    }
    assert len(keys) == 50 * 40
    assert noise_key(seed, tf.constant(1), 1).dtype == tf.int64
    query = SeededGaussianSumQuery(1.0, 1.0)
    zeros, step = [tf.zeros([64])], tf.constant(0, tf.int64)
    draws = [
        query.noised(zeros, tf.constant(other, tf.int64), step)[0].numpy()
        for other in (
            [1, 1],
            [1 + (1 << 40), 1],
            [1, 1 + (1 << 40)],
            [1, 1 + (1 << 61)],
        )
    ]
    for i, one in enumerate(draws):
        assert all(np.abs(one - other).max() > 0.1 for other in draws[:i])

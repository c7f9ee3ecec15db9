"""Clipped sums of every engine against a float64 loop, and what a step makes of them.

The noise's law is in test_statistics.py, what Adam and Adafactor do with it in
test_trajectories.py.
"""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras

from tfdpsq.privacy import ENGINES, RunKey, engines, make_logical_step
from tfdpsq.privacy.optimizers import require_new
from tfdpsq.privacy.randomness.noise import draw_key, integers
from tfdpsq.privacy.step import Setup, make_microbatch_sum
from tfdpsq.validation import InputError

_plan = functools.partial(plans.plan, num_units=400, batch_size=16, steps=50)


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
        self.layers = [
            tf.keras.layers.Dense(hidden, "tanh", use_bias=False),
            tf.keras.layers.Dense(outputs, use_bias=False),
        ]
        for layer, size in zip(self.layers, (width, hidden)):
            layer.build([None, size])
            layer.kernel.assign(random.normal(size=layer.kernel.shape))
        self.a, self.b = (layer.kernel for layer in self.layers)
        self.variables = [self.a, self.b]

    def per_example_losses(self, batch):
        output = self.layers[1](self.layers[0](batch["x"]))
        return tf.reduce_sum((output - batch["y"]) ** 2, axis=1)

    def naive_clipped_sum(self, x, y, clip_norm, per_unit=1):
        """Per-unit gradients by hand in float64, clipped, added one by one."""
        a, b = (v.numpy().astype(np.float64) for v in self.variables)
        total, unit = [0, 0], [0, 0]
        for row, (xi, yi) in enumerate(zip(x.astype(float), y.astype(float)), 1):
            h = np.tanh(xi @ a)
            error = 2 * (h @ b - yi)
            grads = [np.outer(xi, (b @ error) * (1 - h**2)), np.outer(h, error)]
            unit = [u + g for u, g in zip(unit, grads)]
            if row % per_unit == 0:
                norm = math.sqrt(sum((u**2).sum() for u in unit))
                scale = min(1.0, clip_norm / norm)
                total = [t + scale * u for t, u in zip(total, unit)]
                unit = [0, 0]
        return total


def _at_once(engine, plan, rows):
    """The microbatch size: "rowwise" takes one unit at a time."""
    return plan.rows_clipped_together if engine == "rowwise" else rows


def _clipped(model, plan, engine, x, y, losses=None):
    """The clipped sum of all rows."""
    size = _at_once(engine, plan, len(x))
    losses = losses or model.per_example_losses
    setup = Setup(plan, losses, model.variables, model.layers, size, engine)
    run = tf.function(make_microbatch_sum(setup))
    total = [0.0, 0.0]
    for at in range(0, len(x), size):
        batch = {"x": x[at : at + size], "y": y[at : at + size]}
        batch = {name: tf.constant(v) for name, v in batch.items()}
        batch["weights"] = tf.ones(size)
        sums = run(batch, tf.constant([1, 2], tf.int64)).sums
        total = [one + g.numpy() for one, g in zip(total, sums)]
    return total


def _batch(x, y, count):
    weights = (np.arange(len(x)) < count).astype("float32")
    values = {"x": x, "y": y, "weights": weights}
    return {name: tf.constant(v) for name, v in values.items()}, tf.constant(count)


def _step_of(model, plan, optimizer, engine, microbatch, jit=False):
    step = make_logical_step(
        plan,
        model.per_example_losses,
        model.variables,
        optimizer,
        _at_once(engine, plan, microbatch),
        layers=model.layers,
        engine=engine,
    )
    return tf.function(step, jit_compile=jit)


def _run_steps(model, plan, optimizer, engine, batches, microbatch):
    compiled = _step_of(model, plan, optimizer, engine, microbatch)
    key = RunKey(plan, 4)
    for number, batch in enumerate(batches):
        compiled(*_batch(*batch), [], key.step_keys(number))
    return [v.numpy() for v in model.variables]


def _first_step(engine, plan=None, jit=False, microbatch=4):
    """A function of rows and count: the first step's update, rate 1, same noise."""
    model, plan = _Regression(), plan or _plan()
    optimizer = plans.optimizer(1.0)
    start = [v.numpy() for v in model.variables]
    step = _step_of(model, plan, optimizer, engine, microbatch, jit)
    keys = RunKey(plan, 4).step_keys(0)

    def update(x, y, count):
        for variable, value in zip(model.variables, start):
            variable.assign(value)
        before = int(optimizer.iterations)
        step(*_batch(x, y, count), [], keys)
        assert int(optimizer.iterations) == before + 1
        return [v.numpy() - value for v, value in zip(model.variables, start)]

    return update


@pytest.mark.parametrize("engine", ENGINES)
def test_clipped_sums_equal_a_naive_float64_loop(engine):
    model, (x, y) = _Regression(), _linear_rows(5, 3, 12)
    x[:4] *= 0.01  # some rows below the clip norm, some above
    y[:4] = np.tanh(x[:4] @ model.a.numpy()) @ model.b.numpy() + 0.01
    expected = model.naive_clipped_sum(x, y, 0.5)
    for got, want in zip(_clipped(model, _plan(), engine, x, y), expected):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_users_rows_are_clipped_together(engine):
    model, (x, y) = _Regression(), _linear_rows(5, 3, 12)
    plan = _plan(unit="user", rows_per_unit=3)
    found = _clipped(model, plan, engine, x, y)
    for got, want in zip(found, model.naive_clipped_sum(x, y, 0.5, per_unit=3)):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    # One user's rows in one direction: clipped row by row they would move it by 3·C.
    x, y = np.repeat(x[:1], 3, 0), np.repeat(y[:1], 3, 0)
    alone = _clipped(model, plan, engine, x, y)
    assert math.sqrt(sum((g**2).sum() for g in alone)) == pytest.approx(0.5, rel=1e-5)
    with pytest.raises(ValueError, match="use a multiple of the 3 rows"):
        make_logical_step(
            plan, model.per_example_losses, model.variables, plans.optimizer(), 4
        )


@pytest.mark.parametrize(
    "engine, jit",
    [
        *((engine, False) for engine in ENGINES),
        ("fast", True),
        pytest.param("dpkeras", True, marks=pytest.mark.slow),
        pytest.param("vectorized", True, marks=pytest.mark.slow),
    ],
)
def test_nan_row_contributes_nothing(engine, jit):
    """In tensorflow-privacy one Inf turned the whole clipped sum into NaN.

    Zeroing what is not finite is not enough: in the batched backward pass 0 · NaN
    spoils the rows beside it, and one row would have moved the sum by n·C.
    """
    x, y = _linear_rows(5, 3, 8)
    good = np.delete(np.arange(8), 2)
    expected = _Regression().naive_clipped_sum(x[good], y[good], 0.5)
    update = _first_step(engine, jit=jit, microbatch=8 if engine == "vectorized" else 4)
    noise = update(x, y, 0)
    for bad in (np.nan, np.inf, 1e30):
        y[2, 1] = bad
        for found, alone, total in zip(update(x, y, 8), noise, expected):
            # The other seven rows, as if this one were not there.
            np.testing.assert_allclose(found - alone, -total / 16, rtol=1e-3, atol=2e-6)


_SCHEDULES = tf.keras.optimizers.schedules


@pytest.mark.parametrize(
    "rate, message",
    [
        (math.nan, "learning_rate"),
        (-1.0, "learning_rate"),
        (1e39, "learning_rate is inf"),
        (_SCHEDULES.PiecewiseConstantDecay([48], [0.1, -0.1]), "at step 49"),
    ],
)
def test_rates_that_would_spoil_weights_are_refused(rate, message):
    """They fail in steps that were paid for: here before anything is."""
    for make in (plans.optimizer, tf.keras.optimizers.legacy.Adam):
        with pytest.raises(InputError, match=message):
            require_new(make(rate), 50)


@pytest.mark.parametrize("engine", ENGINES)
def test_nan_row_costs_its_unit_and_no_other(engine):
    x, y = _linear_rows(5, 3, 8)
    plan = _plan(unit="user", rows_per_unit=2)
    update = _first_step(engine, plan)
    noise = update(x, y, 0)
    expected = _Regression().naive_clipped_sum(
        np.delete(x, [2, 3], 0), np.delete(y, [2, 3], 0), 0.5, per_unit=2
    )
    y[2, 1] = np.nan
    for found, alone, total in zip(update(x, y, 8), noise, expected):
        np.testing.assert_allclose(found - alone, -total / 16, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_neighbours_move_the_clipped_sum_by_at_most_the_clip_norm(engine):
    model, plan = _Regression(), _plan()
    for size in (0, 3):
        x, y = _linear_rows(5, 3, 7, seed=size)
        y[0] *= 10.0**size
        whole = _clipped(model, plan, engine, x, y)
        without = _clipped(model, plan, engine, x[1:], y[1:])
        moved = math.sqrt(sum(((w - o) ** 2).sum() for w, o in zip(whole, without)))
        assert moved <= 0.5 * (1 + 1e-5)
        assert moved >= 0.5 * (1 - 1e-3) or size == 0


def test_dropout_draws_from_other_bits_than_the_noise():
    """Masks show in the gradients; from the noise's own keys they would tell of it."""
    keys = RunKey(_plan(), 7).step_keys(0)

    def words(seed, positions):
        of = [draw_key(seed, keys.number, position) for position in range(positions)]
        return {n for k in of for n in integers([500], k, tf.int64).numpy().tolist()}

    own, noise = words(keys.dropout, 20), [words(s, 3) for s in keys.noise]
    assert [len(own), *map(len, noise)] == [10_000, 1500, 1500]
    assert not own & noise[0] and not own & noise[1] and not noise[0] & noise[1]


@pytest.mark.parametrize(
    "optimizer",
    ["adam", "t5x_adafactor", pytest.param("adafactor", marks=pytest.mark.slow)],
)
def test_engines_and_microbatch_sizes_give_the_same_training(optimizer):
    x, y = _linear_rows(5, 3, 16)
    results = []
    for engine, microbatch in (("fast", 2), *((engine, 16) for engine in ENGINES)):
        made = plans.optimizer(0.1, optimizer)
        given = _Regression(), _plan(), made, engine, [(x, y, 13), (x, y, 9)]
        results.append(_run_steps(*given, microbatch))
    for other in results[1:]:
        for a, b in zip(results[0], other):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_padding_rows_change_nothing_and_the_expected_batch_normalises(engine):
    """Sixteen rows were expected, five were drawn."""
    x, y = _linear_rows(5, 3, 8)
    expected = _Regression().naive_clipped_sum(x[:5], y[:5], 0.5)
    update = _first_step(engine)
    noise = update(x, y, 0)
    assert all((moved != 0).all() for moved in noise)  # an empty batch steps, too
    for padding in (1.0, 1e20, np.nan):  # rows like any other, and rows like none
        x[5:], y[5:] = padding, -padding
        for found, alone, total in zip(update(x, y, 5), noise, expected):
            np.testing.assert_allclose(found - alone, -total / 16, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("engine", ["fast", "dpkeras"])
def test_a_loss_that_was_reduced_already_is_refused(engine):
    model, rows = _Regression(), _linear_rows(5, 3, 8)

    def mean(batch):
        return tf.reduce_mean(model.per_example_losses(batch))

    with pytest.raises(ValueError, match="reduction=NONE"):
        _clipped(model, _plan(), engine, *rows, mean)


def _used():
    optimizer = tf.keras.optimizers.SGD(0.1)
    optimizer.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
    return optimizer


def _of_tensorflow_privacy():
    base = tf.keras.optimizers.legacy.SGD
    made = dp_optimizer_keras.make_keras_optimizer_class(base)
    return made(l2_norm_clip=1.0, noise_multiplier=1.0, learning_rate=0.1)


@pytest.mark.parametrize(
    "make, message",
    [
        (_used, "has taken steps"),
        (_of_tensorflow_privacy, "adds noise once more"),
        (lambda: "adam", "optimizer is a str"),
    ],
)
def test_optimizers_that_the_plan_does_not_account_for_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        require_new(make(), 50)


@pytest.mark.parametrize(
    "microbatch_size, options, message",
    [
        (2, {"engine": "rowwise"}, "one unit at a time"),
        (2, {"layers": []}, "needs layers"),
        (5, {}, "a multiple of 5"),
        (0, {}, "microbatch_size"),
        (2, {"engine": "ghost"}, "engine is 'ghost'; choose one of"),
    ],
)
def test_step_names_what_does_not_fit(microbatch_size, options, message):
    model, plan = _Regression(), _plan()
    with pytest.raises(InputError, match=message):
        step = make_logical_step(
            plan,
            model.per_example_losses,
            model.variables,
            plans.optimizer(),
            microbatch_size,
            **{"layers": model.layers, **options},
        )
        step(*_batch(*_linear_rows(5, 3, 8), 8), [], RunKey(plan, 1).step_keys(0))


def test_without_tensorflow_privacy_engine_fast_takes_the_same_step(monkeypatch):
    x, y = _linear_rows(5, 3, 8)
    before = _first_step("fast")(x, y, 8)
    monkeypatch.setattr(engines, "missing", lambda: "ImportError: no estimator")
    for own, same in zip(before, _first_step("fast")(x, y, 8)):
        np.testing.assert_array_equal(own, same)
    for engine in ("dpkeras", "vectorized"):
        with pytest.raises(InputError, match=r"no estimator\). Use engine \"fast\""):
            _first_step(engine)


@pytest.mark.parametrize("engine", ["dpkeras", "vectorized"])
def test_rows_taken_one_by_one_have_dropout_of_their_own(engine):
    """Else a NaN in the batch gives all others one mask, and their sum grows."""
    dropout = tf.keras.layers.Dropout(0.5)
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build([None, 64])
    plan = _plan(clip_norm=0.01, num_units=40, batch_size=6, steps=2)
    step = tf.function(
        make_logical_step(
            plan,
            lambda batch: layer(dropout(batch["x"], training=True))[:, 0],
            [layer.kernel],
            plans.optimizer(1.0),
            8,
            layers=[dropout, layer],
            engine=engine,
        )
    )
    keys = RunKey(plan, 4).step_keys(0)

    def update(x, count):
        layer.kernel.assign(np.ones([64, 1]))
        weights = (np.arange(8) < count).astype(np.float32)
        batch = {"x": tf.constant(x), "weights": tf.constant(weights)}
        step(batch, tf.constant(count), [], keys)
        return layer.kernel.numpy() - 1

    x = np.ones([8, 64], np.float32)
    noise = update(x, 0)
    whole = np.linalg.norm(update(x, 8) - noise) * 6 / 0.01
    x[7] = np.nan
    spoilt = np.linalg.norm(update(x, 8) - noise) * 6 / 0.01
    # Two masks of one half share half of what they keep: √(m + m(m - 1)/2), not m.
    assert whole == pytest.approx(math.sqrt(8 + 28), rel=0.1)
    assert spoilt == pytest.approx(math.sqrt(7 + 21), rel=0.1)


def test_a_loss_of_groups_must_keep_to_its_group():
    """Undivided, a loss over all rows would be clipped as if it kept to its group."""
    layer = tf.keras.layers.Dense(1, use_bias=False)
    layer.build([None, 3])
    x, _ = _linear_rows(3, 1, 40)
    plan = _plan(
        num_microbatches=2,
        sensitivity_multiplier=2.0,
        num_units=40,
        batch_size=6,
        steps=2,
    )

    def coupled(batch):
        scores = layer(batch["x"])[:, 0]
        return tf.square(scores - tf.reduce_mean(scores))

    with pytest.raises(InputError, match="rows read others"):
        plans.trained(
            plan, coupled, [layer], {"x": x}, plan.max_rows, engine="vectorized"
        )

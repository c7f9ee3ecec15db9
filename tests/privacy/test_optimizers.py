"""Clipped sums of every engine against a float64 loop, and what a step makes of them.

The noise's law is in test_statistics.py, what Adam and Adafactor do with it in
test_trajectories.py.
"""

import functools
import math
import re

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras

from tfdpsq.privacy import (
    make_logical_step,
    make_optimizer,
    train,
)
from tfdpsq.privacy import spec as spec_module
from tfdpsq.privacy.optimizers import ENGINES, OPTIMIZERS
from tfdpsq.privacy.randomness import tensorflow_privacy_parts as parts
from tfdpsq.privacy.randomness.noise import draw_key, normal
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


def _clipped(model, optimizer, x, y):
    @tf.function
    def clipped(x, y):
        batch = {"x": x, "y": y}
        return optimizer.clipped_sum(
            lambda: model.per_example_losses(batch),
            model.variables,
            model.layers,
            tf.ones(len(x)),
        ).sums

    return [g.numpy() for g in clipped(tf.constant(x), tf.constant(y))]


def _batch(x, y, count):
    weights = (np.arange(len(x)) < count).astype("float32")
    values = {"x": x, "y": y, "weights": weights}
    return {name: tf.constant(v) for name, v in values.items()}, tf.constant(count)


def _run_steps(model, optimizer, batches, microbatch=4):
    step = make_logical_step(
        model.per_example_losses,
        model.variables,
        optimizer,
        microbatch,
        layers=model.layers,
    )
    compiled = tf.function(step)
    for batch in batches:
        compiled(*_batch(*batch))
    return [v.numpy() for v in model.variables]


def _first_step(engine, plan=None, jit=False):
    """A function of rows and count: the first step's update, rate 1, same noise."""
    model = _Regression()
    optimizer = make_optimizer(plan or _plan(), 1.0, "sgd", engine, noise_seed=4)
    start = [v.numpy() for v in model.variables]
    step = tf.function(
        make_logical_step(
            model.per_example_losses, model.variables, optimizer, 4, layers=model.layers
        ),
        jit_compile=jit,
    )

    def update(x, y, count):
        for variable, value in zip(model.variables, start):
            variable.assign(value)
        optimizer.iterations.assign(0)
        step(*_batch(x, y, count))
        assert int(optimizer.iterations) == 1
        return [v.numpy() - value for v, value in zip(model.variables, start)]

    return update


@pytest.mark.parametrize("engine", ENGINES)
def test_clipped_sums_equal_a_naive_float64_loop(engine):
    model, (x, y) = _Regression(), _linear_rows(5, 3, 12)
    x[:4] *= 0.01  # some rows below the clip norm, some above
    y[:4] = np.tanh(x[:4] @ model.a.numpy()) @ model.b.numpy() + 0.01
    optimizer = make_optimizer(_plan(), 1.0, "sgd", engine)
    expected = model.naive_clipped_sum(x, y, 0.5)
    for got, want in zip(_clipped(model, optimizer, x, y), expected):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_users_rows_are_clipped_together(engine):
    model, (x, y) = _Regression(), _linear_rows(5, 3, 12)
    plan = _plan(unit="user", rows_per_unit=3)
    optimizer = make_optimizer(plan, 1.0, "sgd", engine)
    found = _clipped(model, optimizer, x, y)
    for got, want in zip(found, model.naive_clipped_sum(x, y, 0.5, per_unit=3)):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    # One user's rows in one direction: clipped row by row they would move it by 3·C.
    x, y = np.repeat(x[:1], 3, 0), np.repeat(y[:1], 3, 0)
    alone = _clipped(model, optimizer, x, y)
    assert math.sqrt(sum((g**2).sum() for g in alone)) == pytest.approx(0.5, rel=1e-5)
    with pytest.raises(ValueError, match="microbatch_size 4 parts the 3 rows that are"):
        make_logical_step(model.per_example_losses, model.variables, optimizer, 4)


@pytest.mark.parametrize(
    "engine, jit",
    [
        *((engine, False) for engine in ENGINES),
        ("fast", True),
        pytest.param("dpkeras", True, marks=pytest.mark.slow),
        pytest.param("vectorized", True, marks=pytest.mark.slow),
    ],
)
def test_a_row_without_a_finite_gradient_costs_nobody_else(engine, jit):
    """In tensorflow-privacy one Inf turned the whole clipped sum into NaN.

    Zeroing what is not finite is not enough: in the batched backward pass 0 · NaN
    spoils the rows beside it, and one row would have moved the sum by n·C.
    """
    x, y = _linear_rows(5, 3, 8)
    good = np.delete(np.arange(8), 2)
    expected = _Regression().naive_clipped_sum(x[good], y[good], 0.5)
    update = _first_step(engine, jit=jit)
    noise = update(x, y, 0)
    for bad in (np.nan, np.inf, 1e30):
        y[2, 1] = bad
        for found, alone, total in zip(update(x, y, 8), noise, expected):
            # The other seven rows, as if this one were not there.
            np.testing.assert_allclose(found - alone, -total / 16, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize(
    "rate",
    [math.nan, math.inf, -1.0, "0.1", None, lambda: 0.1, "becomes nan", "falls below"],
)
def test_rates_that_would_spoil_weights_are_refused(rate):
    """After steps that were paid for: here before anything is."""
    schedules = {"becomes nan": math.nan, "falls below": -0.1}
    where = ""
    if rate in schedules:
        piecewise = tf.keras.optimizers.schedules.PiecewiseConstantDecay
        rate, where = piecewise([48], [0.1, schedules[rate]]), "at step 49"
    with pytest.raises(ValueError, match="learning_rate .*" + where):
        make_optimizer(_plan(), rate)


class _Always(tf.keras.optimizers.schedules.LearningRateSchedule):
    """One rate, as a number of Python's, which no tensor has rounded."""

    def __init__(self, rate):
        self._rate = rate

    def __call__(self, step):
        return self._rate


_SCHEDULES = tf.keras.optimizers.schedules


@pytest.mark.parametrize(
    "rate, message",
    [
        (1e39, r"learning_rate is 1e\+39, which is inf in float32. Give a number"),
        (10**39, "learning_rate is 10+, which is inf in float32. Give a number"),
        (_Always(1e39), r"learning_rate at step 0 is 1e\+39, which is inf in float32"),
        (
            _SCHEDULES.ExponentialDecay(1e39, 10, 0.5),
            "learning_rate is .*, which cannot be computed at step 0: .*below 3.4e38",
        ),
        (
            _SCHEDULES.PiecewiseConstantDecay([10], [0.1, 1e39]),
            "learning_rate is .*, which cannot be computed at step",
        ),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rates_beyond_float32_are_refused(name, rate, message):
    """TensorFlow spoke of a Python sequence, of none that anybody had given."""
    with pytest.raises(InputError, match=message):
        make_optimizer(_plan(), rate, name)


@pytest.mark.parametrize(
    "name, value",
    [("clipnorm", math.nan), ("beta_1", 2.0), ("beta_2", 1.0), ("epsilon", -1.0)],
)
def test_options_that_would_spoil_weights_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        make_optimizer(_plan(), 0.1, **{name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan"), 1e39, "0.1"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_number_among_the_options_is_checked(name, value):
    """Tries each option of the class that is a number, whatever its name."""
    defaults = OPTIMIZERS[name]().get_config()
    numeric = {option for option, held in defaults.items() if isinstance(held, float)}
    numeric |= {"lr", "weight_decay", "clipnorm", "global_clipnorm", "clipvalue"}
    assert len(numeric) >= 7
    for option in numeric - {"learning_rate"}:
        with pytest.raises(ValueError, match=f"{option} is .*{re.escape(str(value))}"):
            make_optimizer(_plan(), 0.1, name, **{option: value})


@pytest.mark.parametrize(
    "name, option, value",
    [
        ("adafactor", "beta_2_decay", 0.8),  # beta_2 = 1 - t^0.8 is below 0
        ("adafactor", "epsilon_1", 1e-60),  # 0 in float32, as is the root of it
        ("adam", "lr", 0.1),
        ("adam", "beta_1", True),  # 1.0, which made all weights NaN
        ("adafactor", "clip_threshold", False),
    ],
)
def test_options_out_of_their_range_are_refused(name, option, value):
    with pytest.raises(ValueError, match=f"{option} is {value}"):
        make_optimizer(_plan(), 0.2, name, **{option: value})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_the_same_step_with_every_engine(name):
    steps = []
    for engine in ENGINES:
        made = make_optimizer(_plan(), 0.1, name, engine, noise_seed=4)
        steps.append(_run_steps(_Regression(), made, [(*_linear_rows(5, 3, 8), 8)]))
    assert not np.allclose(steps[0][0], _Regression().a, atol=1e-3)
    for other in steps[1:]:
        for found, expected in zip(other, steps[0]):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["dpkeras", "vectorized"])
def test_rows_that_stay_together_spare_each_other_if_nothing_is_declared(engine):
    """`train` without microbatches: with one NaN the whole batch would be gone."""
    plan = _plan(num_units=16, max_batch_size=16, steps=1)
    x, y = _linear_rows(5, 3, 16)

    def trained():
        model = _Regression()
        train(
            plan,
            model.per_example_losses,
            model.variables,
            make_optimizer(plan, 1.0, "sgd", engine, noise_seed=1),
            lambda rows: {"x": x[rows], "y": y[rows]},
            None,
            layers=model.layers,
            sampler_seed=2,
        )
        return np.concatenate([v.numpy().ravel() for v in model.variables])

    whole = trained()
    y[2] = np.nan
    assert np.linalg.norm(trained() - whole) * 16 == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_unit_without_a_finite_gradient_costs_no_other_unit(engine):
    x, y = _linear_rows(5, 3, 8)
    plan = _plan(clip_groups=8, sensitivity_multiplier=2.0)
    assert plan.rows_clipped_together == 5  # 2 expected, and 2 deviations
    plan = _plan(clip_groups=16, sensitivity_multiplier=2.0, max_batch_size=60)
    assert plan.rows_clipped_together == 3
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
    model = _Regression()
    optimizer = make_optimizer(_plan(), 1.0, "sgd", engine)
    for size in (0, 3):
        x, y = _linear_rows(5, 3, 7, seed=size)
        y[0] *= 10.0**size
        whole = _clipped(model, optimizer, x, y)
        without = _clipped(model, optimizer, x[1:], y[1:])
        moved = math.sqrt(sum(((w - o) ** 2).sum() for w, o in zip(whole, without)))
        assert moved <= 0.5 * (1 + 1e-5)
        assert moved >= 0.5 * (1 - 1e-3) or size == 0


def test_the_classes_are_tensorflow_privacys():
    factory = dp_optimizer_keras.make_keras_generic_optimizer_class
    for engine in ("fast", "dpkeras"):
        made = make_optimizer(_plan(), 0.1, "adam", engine)
        assert isinstance(made, tf.keras.optimizers.legacy.Adam)
        parents = [base.__qualname__ for base in type(made).__mro__]
        assert factory(tf.keras.optimizers.legacy.Adam).__qualname__ in parents
        assert made.plan.noise_stddev > 0


@pytest.mark.parametrize("optimizer", ["adam", "adafactor", "t5x_adafactor", "sgd"])
def test_the_seed_is_in_nothing_that_is_saved(optimizer):
    seed = (123456789 << 63) + 987654321
    made = make_optimizer(_plan(), 0.1, optimizer, noise_seed=seed)
    made.prepare(_Regression().variables)
    saved = str([made.get_config(), *(v.numpy() for v in made.state())])
    derived = sum(made._noise_words, tuple(made.dropout_seed.numpy().tolist()))
    assert len(derived) == 6 and min(derived) > 1 << 40
    for secret in (seed, 123456789, 987654321, *derived):
        assert str(secret) not in saved


def test_engines_and_microbatch_sizes_give_the_same_training():
    x, y = _linear_rows(5, 3, 16)
    results = []
    for engine, microbatch in (("fast", 2), *((engine, 16) for engine in ENGINES)):
        model = _Regression()
        optimizer = make_optimizer(_plan(), 0.1, "adam", engine, noise_seed=4)
        results.append(
            _run_steps(model, optimizer, [(x, y, 13), (x, y, 9)], microbatch)
        )
    for other in results[1:]:
        for a, b in zip(results[0], other):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_padding_rows_change_nothing(engine):
    x, y = _linear_rows(5, 3, 8)
    expected = _Regression().naive_clipped_sum(x[:5], y[:5], 0.5)
    update = _first_step(engine)
    noise = update(x, y, 0)
    for padding in (1.0, 1e20, np.nan):  # rows like any other, and rows like none
        x[5:], y[5:] = padding, -padding
        for found, alone, total in zip(update(x, y, 5), noise, expected):
            np.testing.assert_allclose(found - alone, -total / 16, rtol=1e-3, atol=2e-6)


def test_an_empty_batch_still_takes_a_noisy_step():
    update = _first_step("fast")(*_linear_rows(5, 3, 8), 0)
    assert all((moved != 0).all() for moved in update)


@pytest.mark.parametrize("engine", ["fast", "dpkeras"])
def test_the_update_is_normalised_by_the_expected_batch_not_the_drawn_one(engine):
    x, y = _linear_rows(5, 3, 8)
    update = _first_step(engine)
    noise, expected = (
        update(x, y, 0),
        _Regression().naive_clipped_sum(x[:3], y[:3], 0.5),
    )
    for found, alone, total in zip(update(x, y, 3), noise, expected):
        # Sixteen rows were expected, three were drawn.
        np.testing.assert_allclose(found - alone, -total / 16, rtol=1e-3, atol=2e-6)


def test_without_privacy_the_step_is_the_plain_gradients():
    x, y = _linear_rows(5, 3, 8)
    model = _Regression()
    expected = model.naive_clipped_sum(x[:3], y[:3], math.inf)
    update = _first_step("fast", _plan(epsilon=math.inf))
    for found, total in zip(update(x, y, 3), expected):
        np.testing.assert_allclose(found, -total / 16, rtol=1e-4, atol=1e-6)


def test_fit_is_refused_as_it_could_not_keep_the_guarantee():
    x, y = _linear_rows(5, 1, 32)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(
        make_optimizer(_plan(), 1.0, "sgd"),
        loss=tf.keras.losses.MeanSquaredError(reduction="none"),
        run_eagerly=True,
    )
    with pytest.raises(
        ValueError, match="Wrap the model in tfdpsq.privacy.PrivateModel"
    ):
        model.fit(x, y, batch_size=16, verbose=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_was_reduced_already_is_refused(engine):
    model, (x, y) = _Regression(), _linear_rows(5, 3, 8)
    batch = {"x": tf.constant(x), "y": tf.constant(y)}
    with pytest.raises(ValueError, match="reduction=NONE"):
        make_optimizer(_plan(), 1.0, "sgd", engine).clipped_sum(
            lambda: tf.reduce_mean(model.per_example_losses(batch)),
            model.variables,
            model.layers,
            tf.ones(8),
        )


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="engine is 'ghost'; choose one of"):
        make_optimizer(_plan(), 0.1, "adam", "ghost")
    with pytest.raises(ValueError, match="optimizer is 'lion'; choose one of"):
        make_optimizer(_plan(), 0.1, "lion")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "option", ["num_microbatches", "l2_norm_clip", "gradient_accumulation_steps"]
)
def test_options_that_would_change_the_sensitivity_are_refused(engine, option):
    """num_microbatches=2 averaged pairs before clipping: one row moved it by 2C."""
    with pytest.raises(ValueError, match=f"{option} is 2, but the plan decides"):
        make_optimizer(_plan(), 0.1, "sgd", engine, **{option: 2})


def test_microbatches_run_one_after_the_other():
    """TensorFlow ran ten at once: T5-small at batch 1,024 died of 24 GiB."""
    model, (x, y) = _Regression(), _linear_rows(5, 3, 16)
    step = make_logical_step(
        model.per_example_losses,
        model.variables,
        make_optimizer(_plan(), 0.1),
        4,
        layers=model.layers,
    )
    batch = {"x": tf.constant(x), "y": tf.constant(y), "weights": tf.ones(16)}
    graph = tf.function(step).get_concrete_function(batch, tf.constant(16)).graph
    loops = [op for op in graph.get_operations() if op.type.endswith("While")]
    assert len(loops) == 1
    assert loops[0].get_attr("parallel_iterations") == 1


def test_dropout_draws_from_other_bits_than_the_noise():
    """Masks show in the gradients; from the noise's own keys they would tell of it."""
    plan = _plan()
    optimizer = make_optimizer(plan, 0.1, "sgd", noise_seed=7)
    zeros = [tf.zeros([500])] * 3
    noise = np.array(optimizer.privatize(zeros)) * plan.spec.batch_size
    scale = plan.noise_stddev
    assert np.std(noise) == pytest.approx(scale, rel=0.1)
    # Draws of one law from one key are equal up to their scale.
    for position in range(20):
        drawn = _draws([optimizer.dropout_seed] * 2, position)
        for found in noise:
            assert abs(np.corrcoef(drawn, found)[0, 1]) < 0.3
        # The noise's own seed, to show that the search is not blind.
        own = scale / math.sqrt(2) * _draws(optimizer._noise_words, position)
        close = [np.allclose(own, found, rtol=1e-4) for found in noise]
        assert close == [place == position for place in range(3)]


def _draws(seeds, position):
    keys = [draw_key(tf.constant(seed, tf.int64), 0, position) for seed in seeds]
    return sum(normal([500], key, tf.float32).numpy() for key in keys)


def test_without_tensorflow_privacy_engine_fast_trains_to_the_same_bytes(monkeypatch):
    found = []
    for missing in ("", "ImportError: no estimator"):
        monkeypatch.setattr(parts, "MISSING", missing)
        for name in ("adam", "adafactor", "t5x_adafactor"):
            tf.keras.utils.set_random_seed(0)
            model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(4,))])
            plan = plans.plan(
                epsilon=8.0, clip_norm=1.0, num_units=40, batch_size=8, steps=3
            )
            optimizer = make_optimizer(plan, 0.1, name, noise_seed=1)
            step = make_logical_step(
                lambda batch, model=model: tf.reduce_sum(model(batch["x"]) ** 2, 1),
                model.trainable_variables,
                optimizer,
                4,
                layers=[model],
            )
            x = tf.random.stateless_normal([8, 4], [1, 2])
            for _ in range(3):
                step({"x": x, "weights": tf.ones([8])}, tf.constant(8))
            found.append(model.get_weights())
    for one, other in zip(found[:3], found[3:]):
        for own, same in zip(one, other):
            np.testing.assert_array_equal(own, same)


@pytest.mark.parametrize("name", ["adam", "adafactor", "t5x_adafactor", "sgd"])
def test_without_tensorflow_privacy_nothing_else_is_applied(monkeypatch, name):
    monkeypatch.setattr(parts, "MISSING", "ImportError: no estimator")
    plan = plans.plan(epsilon=8.0, clip_norm=1.0, num_units=40, batch_size=8, steps=3)
    for engine in ("dpkeras", "vectorized"):
        with pytest.raises(InputError, match=r"no estimator\). Use engine \"fast\""):
            make_optimizer(plan, 0.1, name, engine=engine)
    variable = tf.Variable([1.0])
    optimizer = make_optimizer(plan, 0.1, name)
    optimizer.prepare([variable])
    with pytest.raises(InputError, match="no logical step has clipped"):
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    with pytest.raises(InputError, match="does not run in a plain model's fit"):
        optimizer.minimize(lambda: variable**2, [variable])
    np.testing.assert_array_equal(variable, [1.0])


@pytest.mark.parametrize(
    "name, engine",
    [
        *((name, "fast") for name in ("adam", "adafactor", "t5x_adafactor", "sgd")),
        *((name, "dpkeras") for name in ("adam", "adafactor", "sgd")),
    ],
)
def test_a_step_opens_the_optimizer_to_its_own_gradients_alone(name, engine):
    """The weights could be moved by anything after training, under its certificate."""
    plan = plans.plan(epsilon=8.0, clip_norm=1.0, num_units=40, batch_size=8, steps=3)
    variable = tf.Variable([1.0])
    optimizer = make_optimizer(plan, 0.1, name, engine=engine)
    optimizer.prepare([variable])
    optimizer.update([tf.constant([1.0])], [variable])
    moved = variable.numpy()
    assert moved != 1.0
    with pytest.raises(InputError, match="no logical step has clipped"):
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    np.testing.assert_array_equal(variable, moved)


def test_the_settings_name_all_optimizers_and_engines():
    """By copies, since commands that train nothing do not import these."""
    assert set(spec_module.OPTIMIZERS) == set(OPTIMIZERS)
    assert set(spec_module.ENGINES) == set(ENGINES)

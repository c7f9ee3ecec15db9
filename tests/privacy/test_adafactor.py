"""T5X's Adafactor against the formulas, Keras's, its own state, and what it refuses."""

import itertools
import math
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.privacy import PrivacySpec, make_optimizer, make_plan, train
from tfdpsq.privacy.adafactor import T5XAdafactor
from tfdpsq.validation import InputError

_SHAPES = {
    "scalar": [],
    "vector": [200],
    "small matrix": [6, 9],
    "one small dimension": [127, 130],
    "matrix": [130, 128],
    "square": [128, 128],
    "three": [128, 3, 129],
    "two large of three": [2, 140, 128],
    "small three": [4, 5, 6],
}
# The dimensions that are factored: row (second largest), column (largest).
_FACTORED = {
    "matrix": (1, 0),
    "square": (0, 1),
    "three": (0, 2),
    "two large of three": (2, 1),
}


def _oracle(start, gradients, dims, rates, **options):
    """Yields the weight after each step, in float64, by sums over whole arrays."""
    taken = {
        **dict(scaled=True, beta1=None, decay_rate=0.8, clipping=1.0, decay=None),
        **dict(epsilon1=1e-30, epsilon2=1e-3, first=0),
        **options,
    }
    weight = np.array(start, np.float64)
    rows = columns = moment = momentum = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates)):
        t = max(step - taken["first"], 0) + 1
        beta = 1 - t ** -taken["decay_rate"]
        squares = np.float64(gradient) ** 2 + taken["epsilon1"]
        if dims is None:
            moment = beta * moment + (1 - beta) * squares
            estimate = moment
        else:
            row, column = dims
            rows = beta * rows + (1 - beta) * squares.mean(column, keepdims=True)
            columns = beta * columns + (1 - beta) * squares.mean(row, keepdims=True)
            estimate = rows * columns / rows.mean(row, keepdims=True)
        update = gradient / np.sqrt(estimate)
        if taken["clipping"]:
            update = update / max(
                1.0, math.sqrt(np.mean(update**2)) / taken["clipping"]
            )
        size = max(math.sqrt(np.mean(weight**2)), taken["epsilon2"])
        update = rate * update * (size if taken["scaled"] else 1.0)
        if taken["beta1"] is not None:
            momentum = taken["beta1"] * momentum + (1 - taken["beta1"]) * update
            update = momentum
        weight = (1 - (taken["decay"] or 0.0)) * weight - update
        yield weight


def _given(shape, steps=5, dtype=np.float32):
    """A start and gradients of sizes that differ by rows, columns and steps."""
    random = np.random.default_rng(len(shape) + sum(shape))
    start = random.normal(size=shape).astype(dtype)
    sizes = [np.exp(random.normal(size=n)) for n in shape]
    spread = np.ones([]) if not sizes else sizes[0]
    for size in sizes[1:]:
        spread = spread[..., np.newaxis] * size
    gradients = [
        (10.0 ** (step - 3) * spread * random.normal(size=shape)).astype(dtype)
        for step in range(steps)
    ]
    return start, gradients


def _steps(made, start, gradients):
    variable = tf.Variable(start)
    made.build([variable])
    for gradient in gradients:
        made.apply_gradients([(tf.constant(gradient), variable)])
        yield variable.numpy()


_OPTIONS = {
    "defaults": ({}, {}),
    "absolute": ({"multiply_by_parameter_scale": False}, {"scaled": False}),
    "momentum": ({"beta1": 0.9}, {"beta1": 0.9}),
    "no momentum of 0": ({"beta1": 0.0}, {}),
    "decay_rate": ({"decay_rate": 0.5}, {"decay_rate": 0.5}),
    "step_offset": ({"step_offset": 2}, {"first": 2}),
    "unclipped": ({"clipping_threshold": None}, {"clipping": None}),
    "clipped": ({"clipping_threshold": 0.3}, {"clipping": 0.3}),
    "weight decay": ({"weight_decay_rate": 0.1}, {"decay": 0.1}),
    "epsilon1": ({"epsilon1": 1e-2}, {"epsilon1": 1e-2}),
    "epsilon2": ({"epsilon2": 3.0}, {"epsilon2": 3.0}),
    "together": (
        {"beta1": 0.5, "weight_decay_rate": 0.01, "clipping_threshold": 2.0},
        {"beta1": 0.5, "decay": 0.01, "clipping": 2.0},
    ),
}


@pytest.mark.parametrize("options", list(_OPTIONS))
def test_a_step_is_that_of_the_formulas(options):
    ours, theirs = _OPTIONS[options]
    for name, shape in _SHAPES.items():
        start, gradients = _given(shape)
        made = T5XAdafactor(0.3, **ours)
        expected = _oracle(start, gradients, _FACTORED.get(name), [0.3] * 5, **theirs)
        for found, wanted in zip(_steps(made, start, gradients), expected):
            np.testing.assert_allclose(
                found, wanted, rtol=1e-4, atol=2e-6, err_msg=name
            )


@pytest.mark.parametrize(
    "least, factored, dims", [(6, True, (0, 1)), (7, True, None), (6, False, None)]
)
def test_what_is_factored_follows_the_settings(least, factored, dims):
    start, gradients = _given([6, 9])
    made = T5XAdafactor(0.3, factored=factored, min_dim_size_to_factor=least)
    *_, found = _steps(made, start, gradients)
    *_, wanted = _oracle(start, gradients, dims, [0.3] * 5)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    *_, other = _oracle(start, gradients, None if dims else (0, 1), [0.3] * 5)
    assert np.abs(found - other).max() > 0.01


def test_a_rate_is_not_capped_and_a_schedule_is_followed():
    """Keras's takes at most 1/√t: .447 from the fifth step on."""
    start, gradients = _given([8], 6)
    rates = [2.0 * 0.9**step for step in range(6)]
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(2.0, 1, 0.9)
    for rate, by_step in ((0.9, [0.9] * 6), (schedule, rates)):
        *_, found = _steps(T5XAdafactor(rate), start, gradients)
        *_, wanted = _oracle(start, gradients, None, by_step)
        np.testing.assert_allclose(found, wanted, rtol=1e-4)
        keras = tf.keras.optimizers.Adafactor(rate)
        *_, capped = _steps(keras, start, gradients)
        assert np.abs(capped - found).max() > 0.1


@pytest.mark.parametrize("shape", [[], [7], [6, 9], [130, 140]])
def test_it_is_kerass_where_the_two_agree(shape):
    """Matrices and vectors, and rates that 1/√t does not cap."""
    start, gradients = _given(shape, 6)
    keras = tf.keras.optimizers.Adafactor(0.01, relative_step=False)
    ours = T5XAdafactor(0.01, min_dim_size_to_factor=1)
    for found, wanted in zip(
        _steps(ours, start, gradients), _steps(keras, start, gradients)
    ):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-7)


def test_slots_are_vectors_where_factored():
    for name, shape in _SHAPES.items():
        made = T5XAdafactor(beta1=0.9 if name == "three" else None)
        others = len(made.variables)
        made.build([tf.Variable(np.zeros(shape, np.float32))])
        slots = [variable.shape.as_list() for variable in made.variables[others:]]
        if name in _FACTORED:
            row, column = _FACTORED[name]
            wanted = [np.delete(shape, column).tolist(), np.delete(shape, row).tolist()]
        else:
            wanted = [shape]
        assert slots == wanted + [shape] * (name == "three"), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_slots_of_other_dtypes(dtype):
    start, gradients = _given([4, 5])
    gradients = [
        gradient.astype(tf.as_dtype(dtype).as_numpy_dtype) for gradient in gradients
    ]
    start = start.astype(tf.as_dtype(dtype).as_numpy_dtype)
    made = T5XAdafactor(0.3)
    *_, found = _steps(made, start, gradients)
    *_, wanted = _oracle(start, map(np.float64, gradients), None, [0.3] * 5)
    tolerance = 0.03 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(
        np.float64(found), wanted, rtol=tolerance, atol=tolerance
    )
    assert found.dtype == dtype
    assert made.variables[-1].dtype == ("float32" if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize("beta1", [None, 0.9])
def test_a_compiled_step_is_the_eager_one(beta1):
    """By XLA, of static shapes; a gradient may be sparse."""
    starts, gradients = zip(*(_given(shape) for shape in _SHAPES.values()))
    eager, compiled = ([tf.Variable(start) for start in starts] for _ in range(2))
    one, other = (T5XAdafactor(0.1, beta1=beta1) for _ in range(2))
    other.build(compiled)

    @tf.function(jit_compile=True)
    def step(values):
        other.apply_gradients(zip(values, compiled))

    for values in zip(*gradients):
        one.apply_gradients(zip(map(tf.constant, values), eager))
        step(list(map(tf.constant, values)))
    for own, same in zip(eager, compiled):
        np.testing.assert_allclose(own, same, rtol=1e-4, atol=1e-6)


def test_a_sparse_gradient_is_its_dense_one():
    start, _ = _given([130, 128])
    rows = np.random.default_rng(0).normal(size=[2, 128]).astype(np.float32)
    dense = np.zeros([130, 128], np.float32)
    dense[3], dense[7] = rows
    sparse = tf.IndexedSlices(tf.constant(rows), tf.constant([3, 7]), [130, 128])
    found = []
    for gradient in (sparse, tf.constant(dense)):
        variable = tf.Variable(start)
        T5XAdafactor(0.3).apply_gradients([(gradient, variable)])
        found.append(variable.numpy())
    np.testing.assert_array_equal(*found)
    assert np.abs(found[0] - start).max() > 0.01


_CHANGED = dict(
    learning_rate=0.25,
    factored=False,
    multiply_by_parameter_scale=False,
    beta1=0.5,
    decay_rate=0.7,
    step_offset=1,
    clipping_threshold=2.0,
    weight_decay_rate=0.01,
    min_dim_size_to_factor=4,
    epsilon1=1e-20,
    epsilon2=0.5,
)


def test_its_config_makes_it_again():
    made = T5XAdafactor(**_CHANGED)
    config = tf.keras.optimizers.serialize(made)
    again = tf.keras.optimizers.deserialize(config)
    assert type(again) is T5XAdafactor and again.get_config() == made.get_config()
    for name, value in _CHANGED.items():
        assert again.get_config()[name] == value, name
        assert T5XAdafactor().get_config()[name] != value, name
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.4, 1, 0.5)
    again = T5XAdafactor.from_config(T5XAdafactor(schedule).get_config())
    assert float(again._learning_rate(2)) == pytest.approx(0.1)


def _model():
    tf.keras.utils.set_random_seed(0)
    layers = [tf.keras.layers.Dense(130, input_shape=(128,)), tf.keras.layers.Dense(3)]
    model = tf.keras.Sequential(layers)
    options = dict(beta1=0.9, weight_decay_rate=0.01)
    model.compile(T5XAdafactor(0.1, **options), "mse")
    return model


@pytest.mark.parametrize("way", ["keras", "weights", "checkpoint"])
def test_training_goes_on_to_the_same_bytes(way, tmp_path):
    random = np.random.default_rng(0)
    x, y = random.normal(size=[40, 128]), random.normal(size=[40, 3])
    options = dict(batch_size=8, shuffle=False, verbose=0)
    model = _model()
    model.fit(x[:24], y[:24], **options)
    path = str(tmp_path / ("saved.keras" if way == "keras" else "saved"))
    if way == "keras":
        model.save(path)
        again = tf.keras.models.load_model(path)
    elif way == "weights":
        model.save_weights(path)
        again = _model()
        again.load_weights(path)
    else:
        made = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
        again = _model()
        again.optimizer.build(again.trainable_variables)
        tf.train.Checkpoint(model=again, optimizer=again.optimizer).read(
            made
        ).assert_consumed()
    for each in (model, again):
        each.fit(x[24:], y[24:], **options)
    assert int(again.optimizer.iterations) == 5
    for own, same in zip(model.get_weights(), again.get_weights()):
        np.testing.assert_array_equal(own, same)


def test_a_private_run_goes_on_to_the_same_bytes(tmp_path):
    """Stopped after a step that was saved, with momentum and with factored slots."""
    spec = PrivacySpec(epsilon=8.0, clip_norm=1.0, num_units=40, batch_size=8, steps=5)
    plan, found = make_plan(spec), []
    random = np.random.default_rng(0)
    x = random.normal(size=[40, 128]).astype(np.float32)

    def run(directory, last):
        model = _model()

        def stop(step, _):
            if step == last:
                raise InterruptedError

        train(
            plan,
            lambda batch: tf.reduce_sum(model(batch["x"]) ** 2, 1),
            model.trainable_variables,
            make_optimizer(plan, 0.1, "t5x_adafactor", noise_seed=7, beta1=0.9),
            lambda at: {"x": x[at]},
            4,
            layers=[model],
            directory=tmp_path / directory,
            data_fingerprint="x",
            save_every=2,
            on_step=stop,
        )
        found.append(model.get_weights())

    with pytest.raises(InterruptedError):
        run("stopped", 1)
    # Both go on from the seeds that were drawn, and from the first weights.
    shutil.copytree(tmp_path / "stopped", tmp_path / "whole")
    run("whole", None)
    with pytest.raises(InterruptedError):
        run("stopped", 3)
    run("stopped", None)
    for own, same in zip(*found):
        np.testing.assert_array_equal(own, same)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"factored": "yes"}, "factored is 'yes'; choose one of True, False"),
        ({"beta1": 1.0}, r"beta1 is 1.0; it must lie in \[0.0, 1.0\)"),
        ({"decay_rate": 0}, "decay_rate is 0; it must be a finite number above 0"),
        ({"step_offset": -1}, "step_offset is -1"),
        ({"clipping_threshold": math.nan}, "clipping_threshold is nan"),
        ({"weight_decay_rate": -0.1}, "weight_decay_rate is -0.1"),
        ({"min_dim_size_to_factor": 1.5}, "min_dim_size_to_factor is 1.5"),
        ({"epsilon1": 0.0}, "epsilon1 is 0.0"),
        ({"epsilon2": math.inf}, "epsilon2 is inf"),
    ],
)
def test_values_out_of_range_are_refused_where_it_is_made(options, message):
    with pytest.raises(InputError, match=message):
        T5XAdafactor(**options)


def test_a_private_run_counts_its_steps_from_zero():
    spec = PrivacySpec(epsilon=8.0, clip_norm=1.0, num_units=40, batch_size=8, steps=3)
    plan = make_plan(spec)
    with pytest.raises(InputError, match="step_offset is 1000.*Leave it at 0"):
        make_optimizer(plan, 0.1, "t5x_adafactor", step_offset=1000)
    for engine, beta1 in itertools.product(("fast", "dpkeras"), (None, 0.9)):
        made = make_optimizer(plan, 0.1, "t5x_adafactor", engine, beta1=beta1)
        assert isinstance(made, T5XAdafactor) and made.beta1 == beta1

"""The loop that runs a plan, and what it refuses."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.layers.seeded_dropout import SeededDropout
from tfdpsq.privacy import make_optimizer, train
from tfdpsq.privacy.batches import batch_of, padded_rows
from tfdpsq.privacy.endings import finite_check
from tfdpsq.privacy.randomness.sampling import Draw

_plan = functools.partial(plans.plan, num_units=12, batch_size=6, steps=4)


def _run(plan, per_example_losses, optimizer=None, take=None, **options):
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    layer.build([None, 3])
    data = np.arange(1, 13, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    optimizer = optimizer or make_optimizer(plan, 0.1, "sgd", noise_seed=1)
    executed = train(
        plan,
        lambda batch: per_example_losses(batch, layer),
        [layer.kernel],
        optimizer,
        take or (lambda rows: {"x": data[rows]}),
        options.pop("microbatch_size", 4),
        layers=[layer],
        **options,
    )
    return executed, layer.kernel.numpy()


def _linear(batch, layer):
    return layer(batch["x"])[:, 0]


def test_every_planned_step_runs_and_is_counted():
    seen = []
    executed, weight = _run(
        _plan(), _linear, on_step=lambda step, loss: seen.append(step)
    )
    assert executed == 4 and seen == [1, 2, 3, 4]
    assert np.abs(weight).min() > 0


def test_the_sampler_and_noise_seeds_replay_a_run():
    runs = [_run(_plan(), _linear, sampler_seed=5)[1] for _ in range(2)]
    np.testing.assert_array_equal(*runs)
    other = _run(_plan(), _linear, sampler_seed=6)[1]
    assert not np.array_equal(runs[0], other)


def test_padding_rows_hold_zeros_and_not_row_zero_of_the_data():
    seen, marks = [], []

    def losses(batch, layer):
        tf.py_function(
            lambda x, w: seen.append((x.numpy(), w.numpy())),
            [batch["x"], batch["weights"]],
            [],
        )
        return _linear(batch, layer)

    def mark(step, loss):
        marks.append(len(seen))

    _run(_plan(), losses, sampler_seed=3, on_step=mark)
    steps = seen[marks[0] :]  # before the first, other padding was tried
    padding = np.concatenate([x[w == 0] for x, w in steps])
    real = np.concatenate([x[w == 1] for x, w in steps])
    assert len(padding) and (padding == 0).all()
    assert len(real) and (real > 0).all()


def _with_own_draws(batch, layer):
    return _linear(batch, layer) + tf.random.uniform([batch["x"].shape[0]])


def test_draws_whose_seed_is_in_the_graph_are_refused():
    """TensorFlow keeps 31 bits of the global seed, as an attribute of the operation."""
    with pytest.raises(ValueError, match="31 bits .* name the model in `layers`"):
        _run(_plan(), _with_own_draws)
    tf.random.set_seed(7)
    traced = tf.function(lambda: tf.random.uniform([3])).get_concrete_function()
    (draw,) = (op for op in traced.graph.get_operations() if "seed" in op.node_def.attr)
    assert draw.get_attr("seed") == 7


@pytest.mark.parametrize(
    "random_layer",
    [
        tf.keras.layers.Dropout(0.5),
        tf.keras.layers.GaussianNoise(0.5),
        SeededDropout(0.5),
    ],
)
def test_random_layers_draw_from_keys_where_epsilon_is_finite(random_layer):
    """The global seed, public here, does not decide what they draw."""
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input([3]),
            random_layer,
            tf.keras.layers.Dense(1, kernel_initializer="ones"),
        ]
    )
    plan = _plan(num_units=12, batch_size=12, delta=0.04, steps=1)
    # Of distinct numbers, so that no two masks leave the same sum.
    data = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    seen = []
    for _ in range(2):
        tf.random.set_seed(7)
        train(
            plan,
            lambda batch: model(batch["x"], training=True)[:, 0],
            model.trainable_variables,
            make_optimizer(plan, 0.0, "sgd"),
            lambda rows: {"x": data[rows]},
            12,
            layers=[model],
            sampler_seed=5,
            on_step=lambda step, loss: seen.append(loss),
        )
    assert seen[0] != pytest.approx(seen[1], rel=1e-4)


def test_draws_that_no_trace_shows_are_seeded_in_secret():
    """With a known seed a row's mask depends on its place, so on who else is there."""

    def hidden(batch, layer):
        rows = batch["x"].shape[0]
        drawn = tf.py_function(lambda: tf.random.uniform([rows]), [], tf.float32)
        return _linear(batch, layer) + tf.reshape(drawn, [rows])

    def losses_of(plan):
        tf.random.set_seed(7)
        seen = []
        _run(plan, hidden, on_step=lambda step, loss: seen.append(loss))
        return seen

    whole = dict(num_units=12, batch_size=12, delta=0.04)
    one, other = losses_of(_plan(**whole)), losses_of(_plan(**whole))
    assert one != pytest.approx(other, rel=1e-4)
    # The rows come in another order each time, which only rounding can tell.
    public = _plan(epsilon=math.inf, **whole)
    assert losses_of(public) == pytest.approx(losses_of(public), rel=1e-5)


def test_a_loss_may_ask_tensors_in_pythons_words():
    """The step is compiled without autograph, the caller's loss is not."""

    def in_python(batch, layer):
        losses = _linear(batch, layer)
        if tf.reduce_max(batch["x"]) > 6.0:
            losses = 2.0 * losses
        for _ in tf.range(3):
            losses = losses + 1.0
        return losses

    def in_operations(batch, layer):
        twice = tf.cast(tf.reduce_max(batch["x"]) > 6.0, tf.float32)
        return (1.0 + twice) * _linear(batch, layer) + 3.0

    # A loss that doubles by what else is there: told to the plan, not tried out.
    plan = _plan(epsilon=math.inf)
    one, other = (
        _run(plan, losses, sampler_seed=5, microbatch_size=None)
        for losses in (in_python, in_operations)
    )
    np.testing.assert_allclose(one[1], other[1], rtol=1e-5)
    assert np.abs(one[1]).min() > 0


def test_an_optimizer_is_good_for_one_run():
    plan = _plan()
    optimizer = make_optimizer(plan, 0.1, "sgd")
    _run(plan, _linear, optimizer)
    with pytest.raises(ValueError, match="has taken steps before"):
        _run(plan, _linear, optimizer)


def test_an_optimizer_of_another_plan_is_refused():
    with pytest.raises(ValueError, match="made for another plan"):
        _run(_plan(), _linear, make_optimizer(_plan(epsilon=8.0), 0.1, "sgd"))


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="take returned 2 rows of 'x' for"):
        _run(_plan(), _linear, take=lambda rows: {"x": np.ones((2, 3), np.float32)})


def test_padded_sizes_are_static_for_independent_rows():
    plan = _plan(num_units=100, max_batch_size=33)
    assert {padded_rows(plan, count, 16) for count in range(34)} == {48}
    assert {padded_rows(plan, count, None) for count in range(34)} == {33}
    declared = _plan(num_units=100, max_batch_size=33, sensitivity_multiplier=2)
    sizes = [padded_rows(declared, count, None) for count in (0, 1, 8, 9)]
    assert sizes == [8, 8, 8, 16]
    assert padded_rows(plan, 5, 10**15) == 33


@pytest.mark.parametrize("microbatch_size", [None, 4])
def test_a_loss_reads_no_private_number_of_rows(microbatch_size):
    """A step has the same number of rows, whatever is drawn."""
    sizes = []

    def seen(rows):
        sizes.append(int(rows))
        return np.float32(0)

    def losses(batch, layer):
        read = tf.numpy_function(seen, [tf.shape(batch["x"])[0]], tf.float32)
        return _linear(batch, layer) + tf.ensure_shape(read, [])

    plan = _plan(num_units=12, batch_size=6, steps=12, max_batch_size=12)
    # What is tried comes before the first step.
    tried = []
    _run(
        plan,
        losses,
        microbatch_size=microbatch_size,
        before_call=lambda steps: tried or tried.append(len(sizes)),
    )
    assert set(sizes[tried[0] :]) == {microbatch_size or 12}
    assert len(sizes) - tried[0] >= 12


def test_what_a_loss_writes_of_many_rows_alone_is_found():
    """The rows tried first are too few to show it."""
    kept = tf.Variable(0.0)

    def losses(batch, layer):
        if batch["x"].shape[0] > 4:
            kept.assign(tf.reduce_max(batch["x"]))
        return _linear(batch, layer)

    with pytest.raises(ValueError, match="running the model changes a state"):
        _run(_plan(), losses, microbatch_size=8)


def test_a_microbatch_larger_than_any_draw_is_all_of_it():
    """However large: no padding to its size, and the same weights."""
    runs = [
        _run(_plan(), _linear, sampler_seed=5, microbatch_size=size)[1]
        for size in (4, _plan().max_rows, 10**15)
    ]
    np.testing.assert_allclose(runs[0], runs[2], rtol=1e-5)
    np.testing.assert_array_equal(runs[1], runs[2])


@pytest.mark.parametrize("private", [True, False])
def test_an_empty_place_inside_a_draw_counts_for_nobody(private):
    """A user with fewer rows than fit leaves a gap, whose index points at row 0."""
    draw = Draw(np.array([3, 0, 5, 2]), np.array([1, 0, 1, 1], np.float32), 4)

    def batch(data):
        return batch_of(lambda rows: {"x": data[rows]}, draw, 6, private)

    data = np.arange(1.0, 7.0)
    found = batch(data)
    assert found["weights"].tolist() == [1, 0, 1, 1, 0, 0]
    assert found["x"][found["weights"] == 1].tolist() == [4, 6, 3]
    # Row 0 was not drawn, so a neighbour that has another one gives the same rows.
    data[0] = 99.0
    other = batch(data)
    assert other["weights"].tolist() == found["weights"].tolist()
    if private:
        np.testing.assert_array_equal(other["x"], found["x"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_seen_wherever_it_is(bad):
    variables = [tf.Variable(tf.ones(shape)) for shape in ([2, 3], [], [4])]
    is_finite = finite_check(variables)
    assert is_finite()
    for variable in variables:
        good = variable.numpy()
        spoilt = good.copy().reshape(-1)
        spoilt[-1] = bad
        variable.assign(spoilt.reshape(good.shape))
        assert not is_finite()
        variable.assign(good)
    assert is_finite()

"""The loop that runs a plan, and what it refuses."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans
from helpers.small_runs import interrupted_at

from tfdpsq.privacy import Groups, Preempted, optimizers, read_ledger
from tfdpsq.privacy.batches import batch_of
from tfdpsq.privacy.randomness.sampling import Draw
from tfdpsq.validation import InputError

_plan = functools.partial(plans.plan, num_units=12, batch_size=6, steps=4)


def _run(plan, per_example_losses, optimizer=None, **options):
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    layer.build([None, 3])
    data = np.arange(1, 13, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    executed = plans.trained(
        plan,
        lambda batch: per_example_losses(batch, layer),
        [layer],
        {"x": data},
        optimizer=optimizer,
        **options,
    )
    return executed, layer.kernel.numpy()


def _linear(batch, layer):
    return layer(batch["x"])[:, 0]


def test_a_loss_may_ask_tensors_in_pythons_words():
    """The step is compiled without autograph, the caller's loss is not."""

    def losses(batch, layer):
        losses = _linear(batch, layer)
        if tf.reduce_max(batch["x"]) > 0.0:
            losses = 2.0 * losses
        for _ in tf.range(3):
            losses = losses + 1.0
        return losses

    # Without a guarantee a loss may read what else is there.
    plan = _plan(epsilon=math.inf)
    options = dict(seed=5, microbatch=12)
    _, found = _run(plan, losses, **options)
    _, expected = _run(plan, lambda *given: 2.0 * _linear(*given), **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.abs(found).min() > 0


@pytest.mark.parametrize("epsilon", [2.0, math.inf])
def test_an_optimizer_serves_one_run(epsilon):
    plan, optimizer = _plan(epsilon=epsilon), tf.keras.optimizers.SGD(0.1)
    _run(plan, _linear, optimizer)
    with pytest.raises(InputError, match="has taken steps"):
        _run(plan, _linear, optimizer)


def test_rows_that_take_leaves_out_are_noticed_without_epsilon_too():
    """Where ε is infinite no check runs before the first step."""
    layer, plan = tf.keras.layers.Dense(1), _plan(epsilon=math.inf)
    layer.build([None, 3])

    def take(rows):
        return {"x": np.ones([min(len(rows), 3), 3], np.float32)}

    with pytest.raises(InputError, match="take returned 3 rows"):
        plans.trained(plan, lambda batch: _linear(batch, layer), [layer], take)


def test_a_loss_reads_no_private_number_of_rows():
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
        microbatch=12,
        before_step=lambda step: tried or tried.append(len(sizes)),
    )
    assert set(sizes[tried[0] :]) == {12}
    assert len(sizes) - tried[0] >= 12


def test_a_microbatch_larger_than_any_draw_is_all_of_it():
    """However large: no padding to its size, and the same weights."""
    runs = [
        _run(_plan(), _linear, seed=5, microbatch=size)[1]
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


def test_state_set_before_a_step_is_restored_after_a_resume(tmp_path):
    """`before_step` sees every step once its state is there, after a resume too."""

    def run(directory, stop_after=None):
        memory, seen = tf.Variable(0.0, trainable=False), []

        def before(step):
            seen.append((step, float(memory)))
            if step % 3 == 0:
                memory.assign(float(step) + 0.5)

        _run(
            _plan(steps=7),
            lambda batch, layer: _linear(batch, layer) ** 2 + memory,
            directory=directory,
            save_every=1,
            before_step=before,
            state=[memory],
            on_step=interrupted_at(stop_after),
        )
        return seen, float(memory)

    with pytest.raises(Preempted):
        run(tmp_path, stop_after=5)
    seen, memory = run(tmp_path)
    # First 0, for trying out; then from step 5 on, with what was set at step 3.
    assert seen[1:] == [(5, 3.5), (6, 3.5)]
    assert memory == 6.5


# -- A step is rehearsed, unpaid, before the first ------------------------------------


def _kept(directory, fails=lambda rows: False, microbatch=4, spec=(), **options):
    """Trains on twelve rows; returns the weights.

    `fails` says whether a microbatch of this many rows finds no memory.
    """
    plan = _plan(**{"steps": 3, **dict(spec)})
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build([None, 3])
    data = np.arange(36, dtype=np.float32).reshape(12, 3)

    def memory(rows):
        if fails(int(rows)):
            raise MemoryError
        return np.float32(0)

    def losses(batch):
        zero = tf.numpy_function(memory, [tf.shape(batch["x"])[0]], tf.float32)
        return layer(batch["x"])[:, 0] ** 2 + tf.ensure_shape(zero, [])

    optimizer = tf.keras.optimizers.Adam(0.1)

    def unmoved(step):
        if step == 0:
            assert int(optimizer.iterations) == 0
            np.testing.assert_array_equal(layer.kernel, np.ones([3, 1]))
            slots = optimizers.build(optimizer, [layer.kernel])
            assert not any(np.any(slot) for slot in slots[1:] if slot.shape.rank)

    plans.trained(
        plan,
        losses,
        [layer],
        {"x": data},
        microbatch,
        optimizer,
        directory=directory,
        before_step=unmoved,
        **options,
    )
    return layer.kernel.numpy()


def test_a_microbatch_too_large_for_memory_costs_nothing(tmp_path):
    with pytest.raises(InputError, match="too little memory.*microbatch_size"):
        _kept(tmp_path, lambda rows: rows > 4, microbatch=8)
    ledger = tmp_path / "ledger.jsonl"
    assert not ledger.exists() or read_ledger(ledger).steps_paid == 0
    assert (_kept(tmp_path, lambda rows: rows > 4) != 1).all()
    assert read_ledger(ledger).steps_paid == 3


def test_memory_that_runs_out_later_is_told_with_its_remedy(tmp_path):
    done = []
    with pytest.raises(InputError, match=r"step 2 .*lower microbatch_size"):
        _kept(tmp_path, lambda rows: done, on_step=lambda step, _: done.append(step))
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 2


class _Full(tf.keras.optimizers.SGD):
    """Finds no memory after its first update."""

    def update_step(self, gradient, variable):
        super().update_step(gradient, variable)

        def memory():
            raise MemoryError

        tf.numpy_function(memory, [], [])


def test_a_rehearsed_step_that_fails_costs_nothing_and_moves_no_weight(tmp_path):
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build([None, 3])
    with pytest.raises(InputError, match="a step could not be tried"):
        plans.trained(
            _plan(),
            lambda batch: layer(batch["x"])[:, 0] ** 2,
            [layer],
            {"x": np.ones([12, 3], np.float32)},
            optimizer=_Full(0.1),
            directory=tmp_path,
        )
    np.testing.assert_array_equal(layer.kernel, np.ones([3, 1]))
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 0


@pytest.mark.parametrize("spec", [{"secure": True}, {"unit": "user"}])
def test_a_rehearsed_step_leaves_nothing_behind(tmp_path, spec, caplog):
    """It tells how long a step takes, and in how much memory."""
    groups = None
    if "unit" in spec:
        spec = {**spec, "rows_per_unit": 2, "num_units": 6, "batch_size": 3}
        groups = Groups.of(np.arange(12) // 2)
    with caplog.at_level("INFO", logger="absl"):
        _kept(tmp_path, spec=spec, units=groups, save_every=2)
    assert "seconds; peak memory: " in caplog.text

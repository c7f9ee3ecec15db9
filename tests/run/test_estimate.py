"""The estimator: its allocator, its executor, its sums, and one measured peak."""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.layers import T5Config
from tfdpsq.run import estimate, finetune
from tfdpsq.run.estimation import (
    estimate_graph,
    estimate_memory,
    estimate_step,
    estimate_table,
    estimate_time,
    finetuning,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20
SHAPE = T5Config(
    vocabulary_size=64,
    num_layers=1,
    num_heads=2,
    hidden_dim=16,
    intermediate_dim=24,
    key_value_dim=8,
    version="1.0",
    dropout=0.1,
)


def _config(**changes):
    config = finetune.default_config()
    config.t5.update(dataclasses.asdict(SHAPE))
    config.epsilon = math.inf
    config.batch_size, config.microbatch_size = 8, 4
    config.document_length, config.query_length = 12, 6
    config.update(changes)
    return config


def _peak(function, *shapes, threads=1):
    """Units of 1 MiB that a function of [2^18] float32 tensors takes besides them."""
    specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
    traced = tf.function(function).get_concrete_function(*specs)
    flat = estimate_graph.flatten(traced)
    return estimate_memory.simulate(flat, [], threads).alive / MIB


# -- The allocator ---------------------------------------------------------------


def test_allocator_takes_regions_twice_as_large_each_time():
    allocator = estimate_memory.Allocator()
    # The first region has 2 MiB, the second 4.
    first, second, third = (allocator.allocate(MIB) for _ in range(3))
    assert allocator.touched == 3 * MIB
    # A hole of 1 MiB fits better than the 3 MiB left in the second region.
    allocator.free(MIB, first)
    assert allocator.allocate(MIB)[0] == first[0]
    assert allocator.touched == 3 * MIB
    del second, third


def test_allocator_joins_neighbours_and_reuses_them():
    allocator = estimate_memory.Allocator()
    first, second = allocator.allocate(MIB), allocator.allocate(MIB)
    allocator.free(MIB, second)
    allocator.free(MIB, first)
    allocator.allocate(2 * MIB)
    assert allocator.touched == 2 * MIB


def test_allocator_cannot_fill_a_gap_with_something_larger():
    allocator = estimate_memory.Allocator()
    first, _ = allocator.allocate(MIB), allocator.allocate(MIB)
    allocator.free(MIB, first)
    # 1 MiB is free, 2 are wanted, and the region is full: new memory.
    allocator.allocate(2 * MIB)
    assert allocator.used == 3 * MIB
    assert allocator.touched == 4 * MIB


def test_allocator_keeps_a_chunk_whole_if_less_than_half_is_left():
    allocator = estimate_memory.Allocator()
    taken = allocator.allocate(2 * MIB)
    allocator.free(2 * MIB, taken)
    _, found = allocator.allocate(MIB + MIB // 2)
    assert found == 2 * MIB


# -- The executor, on graphs whose liveness is derived by hand ---------------------


@pytest.mark.parametrize(
    "function, units",
    [
        # exp needs memory of its own, as x is the caller's; then each runs in it.
        pytest.param(lambda x: tf.exp(tf.exp(x)), 1, id="in place"),
        # a is needed twice, so exp(a) needs memory; the sum takes over one of them.
        pytest.param(lambda x: (lambda a: a + tf.exp(a))(tf.exp(x)), 2, id="kept"),
        pytest.param(lambda x: tf.reshape(x, [512, 512]), 0, id="reshaped"),
        # x times itself, and a result that takes over neither.
        pytest.param(
            lambda x: tf.matmul(*[tf.exp(tf.reshape(x, [512, 512]))] * 2),
            2,
            id="product",
        ),
        # A constant is kept for good, the sum is another tensor.
        pytest.param(lambda x: x + tf.zeros([1 << 18]), 2, id="constant"),
        # [2, 512, 256] split into rows, which lie in it: exp(x), and exp of each row.
        pytest.param(
            lambda x: (lambda a: tf.exp(a[0]) + tf.exp(a[1]))(
                tf.reshape(tf.exp(x), [2, 512, 256])
            ),
            2,
            id="rows",
        ),
    ],
)
def test_what_is_alive_at_once(function, units):
    assert _peak(function, [1 << 18]) == pytest.approx(units, abs=1e-3)


def test_loop_holds_its_sum_its_zeros_and_one_turn():
    def total(x):
        return tf.while_loop(
            lambda i, s: i < 6,
            lambda i, s: (i + 1, s + tf.exp(x * tf.cast(i, tf.float32))),
            (0, tf.zeros([1 << 18])),
            maximum_iterations=6,
            parallel_iterations=1,
        )[1]

    # Zeros are a constant; the sum and x·i, where exp is taken as well, are the rest.
    assert _peak(total, [1 << 18]) == pytest.approx(3, abs=1e-3)


def test_branch_that_is_taken_counts_and_the_other_does_not():
    def chosen(x):
        return tf.cond(
            tf.reduce_sum(x) > 0, lambda: tf.exp(x), lambda: tf.tile(x, [64])[: 1 << 18]
        )

    assert _peak(chosen, [1 << 18]) == pytest.approx(1, abs=1e-3)


def test_einsum_copies_what_it_must_transpose():
    # bqd,bkd->bqk is a product as it stands; bqk->bkq needs a copy of the result.
    shapes = [4, 256, 256], [4, 256, 256]
    plain = _peak(lambda x, y: tf.einsum("bqd,bkd->bqk", x, y), *shapes)
    turned = _peak(lambda x, y: tf.einsum("bqd,bkd->bkq", x, y), *shapes)
    assert plain == pytest.approx(1, abs=1e-3)
    assert turned == pytest.approx(2, abs=1e-3)


def test_operations_in_loops_count_as_often_as_they_run():
    def power(x):
        return tf.while_loop(
            lambda i, y: i < 7,
            lambda i, y: (i + 1, tf.matmul(x, y)),
            (0, x),
            maximum_iterations=7,
        )[1]

    traced = tf.function(power).get_concrete_function(tf.TensorSpec([8, 8]))
    flat = estimate_graph.flatten(traced)
    assert estimate_time.flops_of(flat) == 7 * 2 * 8**3
    rates = estimate_time.Rates(1e6, 1e6)
    assert estimate_time.seconds_of(flat, rates) == pytest.approx(7 * 2 * 8**3 / 1e6)


# -- Configs -----------------------------------------------------------------------


def test_parts_are_what_they_are_called():
    found = finetuning.estimate(_config(), None, process=10**9)
    # Embedding; per layer and stack 4 or 8 projections, two of the feed-forward, 2
    # or 3 norms; two bias tables [32, 2]; two last norms.
    attention, hidden = 4 * 16 * 16, 2 * 16 * 24
    count = 64 * 16 + 3 * attention + 2 * hidden + 5 * 16 + 2 * 64 + 2 * 16
    assert found.parameters == found.trained == count
    assert found.memory.weights == 4 * count
    assert found.memory.sums == 4 * count
    # Two moments of each weight; the count of steps is 8 bytes, and there is more of
    # that kind, but little.
    assert 0 <= found.memory.optimizer - 2 * 4 * count < 100
    assert found.memory.process > 10**9
    parts = dataclasses.asdict(found.memory).values()
    assert found.memory.peak == sum(parts)
    text = estimate.as_text(_config(), found)
    assert f"{count:,} parameters, all trained; no privacy" in text
    assert "2 microbatches of 4" in text


def test_more_rows_and_longer_texts_take_more():
    def step(**changes):
        # Large enough for tensors that the simulated allocator sees.
        config = _config(microbatch_size=32, batch_size=64, **changes)
        return finetuning.estimate(config, None, process=0).memory.step

    base = step()
    assert step(document_length=24) > base
    assert (
        finetuning.estimate(
            _config(microbatch_size=64, batch_size=64), None, process=0
        ).memory.step
        > 1.5 * base
    )


def test_lora_takes_no_slots_for_what_is_frozen():
    config = _config()
    config.lora.rank = 2
    found = finetuning.estimate(config, None, process=0)
    # Query and value of three attentions: 16 × 2 and 2 × 16 numbers each.
    assert found.trained == 6 * 2 * 2 * 16
    assert found.memory.sums == 4 * found.trained
    assert found.parameters > 10 * found.trained / 4


def test_nothing_of_a_large_model_is_allocated():
    # 4 GiB of weights, and as much again for each of the optimizer's two slots.
    shape = dataclasses.replace(SHAPE, vocabulary_size=1 << 19, hidden_dim=2048)
    before = estimate_step.resident_bytes()
    traced = estimate_step.trace(_config(microbatch_size=1, batch_size=1), shape)
    assert sum(traced.weights) > 4 << 30
    assert estimate_step.resident_bytes() - before < 1 << 29


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"microbatch_size": 0}, "microbatch_size is 0"),
        ({"document_length": -1}, "document_length is -1"),
        ({"engine": "quick", "epsilon": 8.0}, "engine is 'quick'"),
        ({"init": "/nowhere"}, "/nowhere"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(validation.InputError, match=message):
        finetuning.estimate(_config(**changes), None, process=0)


@pytest.mark.slow
def test_command_refuses_another_stage_with_one_line():
    command = [sys.executable, "-m", "tfdpsq.run.estimate"]
    done = subprocess.run(
        [*command, "--config=configs/evaluate.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    (line,) = (one for one in done.stderr.splitlines() if one.startswith("error: "))
    assert "configs/finetune.py" in line


# -- Slow: many traces, and a measurement --------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "dpkeras"])
def test_table_knows_microbatches_it_has_not_traced(engine):
    config = _config(
        epsilon=math.inf if engine == "plain" else 8.0,
        engine="fast" if engine == "plain" else engine,
        document_length=64,
        query_length=32,
    )
    # One and two layers say what three take.
    shape = dataclasses.replace(SHAPE, num_layers=3, vocabulary_size=8192)
    peak, parameters = estimate_table.peaks(config, shape, engine, 0, 2, layers=(1, 2))
    microbatch = 32 if engine == "plain" else 12
    config.microbatch_size, config.batch_size = microbatch, 2 * microbatch
    traced = estimate_step.trace(config, shape)
    direct = estimate_step.memory_of(traced, 0, threads=2)
    assert parameters == traced.parameters[0]
    assert peak(microbatch) == pytest.approx(direct.peak, rel=0.08)
    # Beyond what is the same at every microbatch, too.
    assert peak(microbatch) > 1.2 * peak(1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "fast", "dpkeras", "vectorized"])
def test_peak_is_what_a_process_takes(engine):
    command = [sys.executable, str(ROOT / "tests/benchmarks/estimate.py")]
    case = ["shape=tiny", f"engine={engine}", "document=96"]
    done = subprocess.run(
        [*command, "--only", *case],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    (result,) = (json.loads(line) for line in done.stdout.splitlines())
    assert 0.85 <= result["ratio"] <= 1.15, result

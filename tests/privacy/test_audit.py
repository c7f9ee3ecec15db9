"""Audits of the engine, end to end: what a run leaks against what its plan certifies.

Canaries are put into the data by coins, and what the weights tell of the coins gives
a lower bound on ε at 95 % confidence (`tfdpsq.evaluation`). It must stay below the
certified ε, and rise above it when the run has half of the noise that the plan says.

Gradients are the worst case: each row's is longer than the clip norm and points
where no other row's does (one run), or away from all others (many runs).
"""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.evaluation import audit_one_run, audit_two_hypotheses
from tfdpsq.privacy import PrivacySpec, RunKey, make_logical_step, make_plan

CLIP_NORM = 0.5
SEED = 0x2545F4914F6CDD1D9E3779B97F4A7C15  # as large as real ones


def _with_noise(plan, factor):
    """What runs: the plan's noise times `factor`, while its claim stays."""
    return dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier * factor)


# -- One run, many canaries ------------------------------------------------------


def _audit_of_one_run(plan, factor, guesses, microbatch_size):
    """Trains on half of the canaries, chosen by coins, and audits the weights.

    Canary i moves coordinate i alone, by C in every step that draws it. The data
    are the canaries whose coin says so: fewer than the plan's n, which is a bound.
    """
    canaries = plan.spec.num_units
    included = np.random.default_rng(11).random(canaries) < 0.5
    present = np.flatnonzero(included).astype(np.int32)
    layer = tf.keras.layers.Embedding(canaries, 1, embeddings_initializer="zeros")
    layer.build(None)
    used = _with_noise(plan, factor)
    # SGD with the expected batch size as learning rate: the weights are the sum of
    # all noised sums.
    plans.trained(
        used,
        lambda batch: -3.0 * CLIP_NORM * layer(batch["canary"])[:, 0],
        [layer],
        {"canary": present},
        microbatch_size,
        tf.keras.optimizers.SGD(used.spec.batch_size),
        units=len(present),
        seed=SEED,
    )
    scores = layer.embeddings.numpy()[:, 0]
    return audit_one_run(scores, included, plan.spec.target_delta, guesses)


@pytest.mark.parametrize(
    "batch_size, steps, guesses, microbatch_size, least",
    [
        (400_000, 1, [(500, 500), (1500, 1500)], 1 << 16, 0.5),
        # Poisson batches of a quarter: the audited epsilon includes amplification. Only
        # guesses of "in" are informative: an included unit may never be sampled.
        (100_000, 4, [(800, 0), (3200, 0)], 1 << 14, 0.4),
    ],
)
def test_one_run_leaks_less_than_epsilon_and_more_at_half_the_noise(
    batch_size, steps, guesses, microbatch_size, least
):
    spec = PrivacySpec(3.0, CLIP_NORM, 400_000, batch_size, steps, delta=1e-6)
    plan = make_plan(spec)
    certified = plan.epsilon(steps)
    as_planned = _audit_of_one_run(plan, 1.0, guesses, microbatch_size)
    halved = _audit_of_one_run(plan, 0.5, guesses, microbatch_size)
    assert least * certified < as_planned.epsilon < certified < halved.epsilon


# -- Many runs, one target -------------------------------------------------------


def _audit_of_many_runs(plan, factor, engine, runs):
    """Runs the plan often, with and without a target, from weight 0 each time.

    The data are three rows that push the one weight down, the target pushes it up,
    all by more than the clip norm. A run is as many logical steps as the plan has;
    one stream of noise serves one run after another, each step taking its own.
    """
    used = _with_noise(plan, factor)
    weight = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    weight.build([None, 1])
    step = make_logical_step(
        used,
        lambda batch: weight(batch["push"])[:, 0],
        weight.trainable_variables,
        tf.keras.optimizers.SGD(used.spec.batch_size),
        microbatch_size=1 if engine == "rowwise" else 2,
        layers=[weight],
        engine=engine,
    )
    key = RunKey(used, SEED)

    @tf.function(jit_compile=True)
    def all_runs(weights, count, before):
        batch = {"push": tf.constant([[2.0], [3.0], [5.0], [-7.0]]), "weights": weights}
        found = tf.TensorArray(tf.float32, runs)
        for run in tf.range(runs):
            weight.kernel.assign([[0.0]])
            for number in tf.range(used.spec.steps):
                taken = (before + run) * used.spec.steps + number
                step(batch, count, [], key.step_keys(taken))
            found = found.write(run, weight.kernel[0, 0])
        return found.stack()

    of_runs = (([1.0, 1.0, 1.0, 1.0], 4, 0), ([1.0, 1.0, 1.0, 0.0], 3, runs))
    with_target, without = (
        all_runs(tf.constant(weights), tf.constant(count), tf.constant(before))
        for weights, count, before in of_runs
    )
    return audit_two_hypotheses(
        with_target.numpy(), without.numpy(), plan.spec.target_delta
    )


@pytest.mark.parametrize(
    "engine",
    [
        "fast",
        "vectorized",
        pytest.param("rowwise", marks=pytest.mark.slow),
        pytest.param("dpkeras", marks=pytest.mark.slow),
    ],
)
def test_many_runs_leak_less_than_epsilon_and_more_at_half_the_noise(engine):
    plan = make_plan(PrivacySpec(3.0, CLIP_NORM, 100, 100, 2))
    certified, runs = plan.epsilon(2), 20_000
    as_planned = _audit_of_many_runs(plan, 1.0, engine, runs)
    halved = _audit_of_many_runs(plan, 0.5, engine, runs)
    assert 0.5 * certified < as_planned.epsilon < certified < halved.epsilon
    # Every step takes all rows (q = 1), so the trade-off function is Gaussian, and
    # knowing that leaves little room: half of the noise is far outside.
    mu = math.sqrt(2) / plan.noise_multiplier
    assert 0.75 * mu < as_planned.mu < mu
    assert halved.mu > 1.5 * mu

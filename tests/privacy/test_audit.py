"""Audits of the engine, end to end: what a run leaks against what its plan certifies.

Every other test knows what to look for. These attack: canaries are put into the
data by coins, the plan is run, and what the weights tell of the coins gives a lower
bound on ε that holds with 95 % whatever goes wrong inside (`tfdpsq.evaluation`,
`auditing` and `two_hypotheses`, say what it means). It must stay below the certified
ε, which alone would prove little, since a weak attack stays below too. So the same
attack must also rise above it when the run has half of the noise that the plan says.

Gradients are the worst case: each row's is longer than the clip norm and points
where no other row's does (one run), or away from all others (many runs). All seeds
are fixed.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.evaluation import audit_one_run, audit_two_hypotheses
from tfdpsq.privacy import (
    PrivacySpec,
    make_logical_step,
    make_optimizer,
    make_plan,
    train,
)

CLIP_NORM = 0.5
NOISE_SEED = 0x2545F4914F6CDD1D9E3779B97F4A7C15  # as large as real ones


def _with_noise(plan, factor):
    """What runs: the plan's noise times `factor`, while its claim stays."""
    return dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier * factor)


def _slow(*values):
    """Another ε by the same attack: the quick cases are of ε = 3."""
    return pytest.param(*values, marks=pytest.mark.slow)


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
    optimizer = make_optimizer(used, used.spec.batch_size, "sgd", noise_seed=NOISE_SEED)
    train(
        used,
        lambda batch: -3.0 * CLIP_NORM * layer(batch["canary"])[:, 0],
        layer.trainable_variables,
        optimizer,
        lambda rows: {"canary": present[rows]},
        microbatch_size,
        layers=[layer],
        units=len(present),
        sampler_seed=13,
    )
    scores = layer.embeddings.numpy()[:, 0]
    return audit_one_run(scores, included, plan.spec.target_delta, guesses)


@pytest.mark.parametrize(
    ("epsilon", "canaries", "delta", "guesses"),
    [
        _slow(1.0, 400_000, 1e-6, [(500, 500), (1500, 1500)]),
        (3.0, 400_000, 1e-6, [(500, 500), (1500, 1500)]),
        # r right guesses in a row show at most ln(r/3): to show 8 takes 9,000, with
        # 1 wrong in 3,000, and so millions of canaries of which the few with the
        # most extreme scores are guessed. δ must be small against the 2mδ canaries
        # that it gives away.
        _slow(8.0, 4_000_000, 5e-8, [(8000, 8000), (80_000, 80_000)]),
    ],
)
def test_one_run_stays_within_its_certificate_and_half_the_noise_does_not(
    epsilon, canaries, delta, guesses
):
    spec = PrivacySpec(
        epsilon,
        CLIP_NORM,
        num_units=canaries,
        batch_size=canaries,
        steps=1,
        delta=delta,
    )
    plan = make_plan(spec)
    certified = plan.epsilon(1)
    as_planned = _audit_of_one_run(plan, 1.0, guesses, 1 << 16)
    halved = _audit_of_one_run(plan, 0.5, guesses, 1 << 16)
    assert 0.5 * certified < as_planned.epsilon < certified < halved.epsilon


def test_one_run_of_sampled_steps_stays_within_its_certificate():
    """Poisson batches of a quarter: what is audited claims amplification, too."""
    spec = PrivacySpec(
        3.0, CLIP_NORM, num_units=400_000, batch_size=100_000, steps=4, delta=1e-6
    )
    plan = make_plan(spec)
    certified = plan.epsilon(4)
    # Only presence shows well: whoever is included may never have been drawn.
    guesses = [(800, 0), (3200, 0)]
    as_planned = _audit_of_one_run(plan, 1.0, guesses, 1 << 14)
    halved = _audit_of_one_run(plan, 0.5, guesses, 1 << 14)
    assert 0.4 * certified < as_planned.epsilon < certified < halved.epsilon


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
    optimizer = make_optimizer(
        used, used.spec.batch_size, "sgd", engine, noise_seed=NOISE_SEED
    )
    step = make_logical_step(
        lambda batch: weight(batch["push"])[:, 0],
        weight.trainable_variables,
        optimizer,
        microbatch_size=2,
        layers=[weight],
    )

    @tf.function(jit_compile=True)
    def all_runs(weights, count):
        batch = {"push": tf.constant([[2.0], [3.0], [5.0], [-7.0]]), "weights": weights}
        found = tf.TensorArray(tf.float32, runs)
        for run in tf.range(runs):
            weight.kernel.assign([[0.0]])
            for _ in tf.range(used.spec.steps):
                step(batch, count)
            found = found.write(run, weight.kernel[0, 0])
        return found.stack()

    with_target = all_runs(tf.constant([1.0, 1.0, 1.0, 1.0]), tf.constant(4))
    without = all_runs(tf.constant([1.0, 1.0, 1.0, 0.0]), tf.constant(3))
    return audit_two_hypotheses(
        with_target.numpy(), without.numpy(), plan.spec.target_delta
    )


@pytest.mark.parametrize(
    ("engine", "epsilon", "runs"),
    [
        _slow("fast", 1.0, 40_000),
        ("fast", 3.0, 20_000),
        _slow("fast", 8.0, 200_000),
        ("dpkeras", 3.0, 20_000),
        _slow("vectorized", 3.0, 20_000),
    ],
)
def test_many_runs_stay_within_their_certificate_and_half_the_noise_does_not(
    engine, epsilon, runs
):
    spec = PrivacySpec(epsilon, CLIP_NORM, num_units=100, batch_size=100, steps=2)
    plan = make_plan(spec)
    certified = plan.epsilon(2)
    as_planned = _audit_of_many_runs(plan, 1.0, engine, runs)
    halved = _audit_of_many_runs(plan, 0.5, engine, runs)
    assert 0.5 * certified < as_planned.epsilon < certified < halved.epsilon
    # Every step takes all rows (q = 1), so the trade-off function is Gaussian, and
    # knowing that leaves little room: half of the noise is far outside.
    assert 0.75 * certified < as_planned.gaussian_epsilon < certified
    assert halved.gaussian_epsilon > 2 * certified

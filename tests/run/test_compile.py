"""Every step a TPU would run compiles under XLA, with static shapes."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq import privacy, retriever
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.layers import T5Config
from tfdpsq.privacy import choose_max_batch_size

_T5 = {
    "vocabulary_size": 40,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 12,
    "key_value_dim": 4,
}
_N = 20


_plan = functools.partial(
    plans.plan, epsilon=8.0, clip_norm=0.1, num_units=_N, batch_size=3, steps=2
)


def _train(plan, model, arrays, microbatch, engine, jit):
    """Trains with fixed seeds and returns the weights."""
    variables = model.trainable_variables
    optimizer = privacy.make_optimizer(plan, 0.1, "sgd", engine, noise_seed=1)
    privacy.train(
        plan,
        lambda batch: model.per_example_losses(batch, training=True),
        variables,
        optimizer,
        lambda rows: {name: value[rows] for name, value in arrays.items()},
        microbatch,
        layers=[model],
        sampler_seed=2,
        jit_compile=jit,
    )
    return [v.numpy() for v in variables]


def _pairs(columns):
    random = np.random.default_rng(0)
    arrays = {}
    for name, length in columns.items():
        lengths = random.integers(2, length + 1, _N)
        ids = random.integers(3, 40, (_N, length))
        ids[np.arange(length)[None] >= lengths[:, None]] = 0
        arrays[f"{name}_ids"] = ids.astype(np.int32)
        arrays[f"{name}_lengths"] = lengths.astype(np.int32)
    return arrays


@pytest.mark.parametrize(
    "version, epsilon, engine",
    [
        ("1.1", 8.0, "fast"),
        # The rest of the table; compiling takes half a minute each.
        pytest.param("1.0", 8.0, "fast", marks=pytest.mark.slow),
        pytest.param("1.0", math.inf, "fast", marks=pytest.mark.slow),
        pytest.param("1.1", math.inf, "fast", marks=pytest.mark.slow),
        pytest.param("1.0", 8.0, "dpkeras", marks=pytest.mark.slow),
        pytest.param("1.1", 8.0, "dpkeras", marks=pytest.mark.slow),
        pytest.param("1.0", 8.0, "vectorized", marks=pytest.mark.slow),
        pytest.param("1.1", 8.0, "vectorized", marks=pytest.mark.slow),
    ],
)
def test_generator_training_compiles(version, epsilon, engine):
    tf.keras.utils.set_random_seed(0)
    model = T5QueryGenerator(T5Config(**_T5, version=version, dropout=0.1))
    arrays = _pairs({"document": 7, "query": 5})
    start = [v.numpy() for v in model.trainable_variables]
    after = _train(
        _plan(epsilon=epsilon),
        model,
        arrays,
        4,
        engine,
        jit=True,
    )
    assert all(np.isfinite(v).all() for v in after)
    moved = [np.abs(a - b).max() for a, b in zip(after, start)]
    # With noise every weight moves; without, all that had a gradient.
    assert min(moved) > 0 if math.isfinite(epsilon) else max(moved) > 0


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [8.0, math.inf])
def test_bfloat16_and_rematerialisation_compile(epsilon):
    tf.keras.utils.set_random_seed(0)
    config = T5Config(**_T5, version="1.1", dropout=0.1)
    model = T5QueryGenerator(config, "mixed_bfloat16", rematerialize=True)
    arrays = _pairs({"document": 7, "query": 5})
    after = _train(_plan(epsilon=epsilon), model, arrays, 4, "fast", jit=True)
    assert all(np.isfinite(v).all() for v in after)


@pytest.mark.slow
@pytest.mark.parametrize("rematerialize", [False, True])
def test_engines_agree_on_a_t5(rematerialize):
    """Dropout included: its masks follow from the run's seed, whatever the engine."""
    arrays = _pairs({"document": 7, "query": 5})
    results = []
    for engine in ("fast", "dpkeras"):
        tf.keras.utils.set_random_seed(0)
        config = T5Config(**_T5, version="1.0", dropout=0.3)
        model = T5QueryGenerator(config, rematerialize=rematerialize)
        results.append(_train(_plan(), model, arrays, 4, engine, jit=False))
    for other in results[1:]:
        for a, b in zip(results[0], other):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def _two_tower():
    tf.keras.utils.set_random_seed(0)
    model = retriever.TwoTower(
        retriever.RetrieverConfig(T5Config(**_T5, dropout=0.0), 8, 5.0, 5, 7)
    )
    arrays = _pairs({"query": 5, "document": 7})
    arrays["document_key"] = np.arange(_N, dtype=np.int64)
    arrays["positive_keys"] = np.full((_N, 1), -1, np.int64)
    return model, arrays


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dpkeras", "vectorized"])
def test_direct_dp_training_of_the_retriever_compiles(engine):
    maximum = choose_max_batch_size(_N, 3, 2, 8.0, 0.5 / _N)
    plan = _plan(
        max_batch_size=maximum,
        sensitivity_multiplier=retriever.naive_sensitivity_multiplier(maximum),
    )
    model, arrays = _two_tower()
    start = [v.numpy() for v in model.trainable_variables]
    results = _train(plan, model, arrays, None, engine, jit=True)
    assert all(np.isfinite(v).all() for v in results)
    assert min(np.abs(a - b).max() for a, b in zip(results, start)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", retriever.METHODS)
def test_every_method_of_direct_training_compiles(method):
    """Static shapes, no host operations: what a TPU would run."""
    model, arrays = _two_tower()
    maximum = choose_max_batch_size(_N, 3, 2, 8.0, 0.5 / _N)
    changes, options = {}, {"microbatch": None}
    if method == "microbatch":
        changes = {"clip_groups": 2, "sensitivity_multiplier": 2.0}
    elif method != "public_negatives":
        changes = {"sensitivity_multiplier": 2.0 * maximum, "max_batch_size": maximum}
    if method == "naive":
        options = {"microbatch": 4, "coupled": True}
    plan = _plan(**changes)
    if method == "naive":
        losses = retriever.NaiveLosses(model, 4)

        def loss(batch):
            return privacy.Coupled(*losses(batch))

    elif method == "logit_dp":
        losses = retriever.LogitTerms(model, 16)

        def loss(batch):
            return privacy.Terms(*losses(batch))

    elif method == "microbatch":
        loss = losses = retriever.GroupLosses(model, plan.group_capacity)
        options["microbatch"] = plan.max_rows
    else:
        loss = losses = retriever.PublicNegatives(model, arrays, 6, seed=0)
        options = {"microbatch": 4, "before_step": losses.refresh}
    variables = model.trainable_variables
    start = [v.numpy() for v in variables]
    privacy.train(
        plan,
        loss,
        variables,
        privacy.make_optimizer(plan, 0.1, "sgd", noise_seed=1),
        lambda rows: {name: value[rows] for name, value in arrays.items()},
        options.pop("microbatch"),
        layers=losses.layers,
        sampler_seed=2,
        jit_compile=True,
        **options,
    )
    moved = [np.abs(v.numpy() - old).max() for v, old in zip(variables, start)]
    assert np.isfinite(moved).all() and min(moved) > 0


def test_plain_training_of_the_retriever_compiles():
    model, arrays = _two_tower()
    batch = retriever.collate(arrays, np.arange(8))
    variables = model.trainable_variables
    optimizer = tf.keras.optimizers.legacy.Adam(1e-2)
    optimizer._create_all_weights(variables)

    @tf.function(jit_compile=True)
    def step(batch):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(batch, training=True)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    tensors = {name: tf.constant(value) for name, value in batch.items()}
    losses = [float(step(tensors)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]

"""Prompt tuning under DP: gradients are a naive loop's, and all else stays."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import fast_oracle as oracle

from tfdpsq import privacy
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.layers import T5Config, train_only
from tfdpsq.privacy import fast

ROWS, DOCUMENT, QUERY, PROMPT = 5, 6, 4, 3


def _make(version, dtype=None, rematerialize=False, dropout=0.0, layers=1):
    config = T5Config(23, layers, 2, 8, 12, 4, version, dropout=dropout)
    return T5QueryGenerator(config, dtype, rematerialize, PROMPT)


def _models(version, alone, rematerialize):
    """A generator and its float64 twin; `alone` trains the prompt and nothing else."""
    tf.keras.utils.set_random_seed(1)
    random = np.random.default_rng(1)
    model = _make(version, rematerialize=rematerialize)
    for variable in model.variables:
        variable.assign_add(0.1 * random.normal(size=variable.shape))
    with oracle.floatx("float64"):
        twin = _make(version)
    for variable, other in zip(model.variables, twin.variables):
        other.assign(variable.numpy().astype(np.float64))
    if alone:
        for each in (model, twin):
            train_only(each, ["*soft_prompt/*"])
    return model, twin


def _batch(rows=ROWS):
    random = np.random.default_rng(2)
    batch = {}
    for name, most in (("document", DOCUMENT), ("query", QUERY)):
        lengths = random.integers(1, most + 1, rows)
        ids = random.integers(1, 9, [rows, most])
        ids[np.arange(most) >= lengths[:, None]] = 0
        batch[f"{name}_ids"] = ids.astype(np.int32)
        batch[f"{name}_lengths"] = lengths.astype(np.int32)
    return batch


def _losses(model, batch, rows=slice(None)):
    part = {name: tf.constant(values[rows]) for name, values in batch.items()}
    return model.per_example_losses(part, training=True)


def _naive(twin, batch):
    """Gradients [ROWS, ...] of every trained weight, one row at a time."""
    found = []
    for row in range(ROWS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(_losses(twin, batch, slice(row, row + 1)))
        gradients = tape.gradient(loss, twin.trainable_variables)
        found.append([tf.convert_to_tensor(g).numpy() for g in gradients])
    return [np.stack(per_weight) for per_weight in zip(*found)]


@pytest.mark.parametrize(
    "version, alone, rematerialize, mode",
    [
        ("1.1", True, False, "eager"),
        pytest.param("1.0", True, True, "eager", marks=pytest.mark.slow),
        ("1.0", False, False, "eager"),
        ("1.1", True, False, "xla"),
        pytest.param("1.1", False, True, "eager", marks=pytest.mark.slow),
        pytest.param("1.0", True, True, "xla", marks=pytest.mark.slow),
    ],
)
def test_norms_and_clipped_sums_equal_a_naive_float64_loop(
    version, alone, rematerialize, mode
):
    model, twin = _models(version, alone, rematerialize)
    batch, variables = _batch(), model.trainable_variables
    if alone:
        assert [v.shape for v in variables] == [[PROMPT, 8]]
    gradients = _naive(twin, batch)
    assert gradients[0].dtype == np.float64
    norms = oracle.norms(gradients)
    assert norms.min() > 1e-3 and norms.max() > 1.2 * norms.min()
    clip_norm = float(np.median(norms))
    run = fast.clipped_sum
    if mode == "xla":
        run = tf.function(run, jit_compile=True)
    found = run(lambda: _losses(model, batch), [model], variables, clip_norm)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    scale = np.minimum(1, clip_norm / norms)
    oracle.assert_close(
        found.sums,
        [np.tensordot(scale, gradient, 1) for gradient in gradients],
        clip_norm,
        [variable.name for variable in variables],
    )
    fast.check(lambda: _losses(model, batch), [model], variables)


def test_mixed_bfloat16_stays_near_float32():
    exact, _ = _models("1.1", True, False)
    rounded = _make("1.1", "mixed_bfloat16")
    for variable, other in zip(rounded.variables, exact.variables):
        variable.assign(other)
    batch = _batch()
    low, high = (
        fast.clipped_sum(
            lambda m=m: _losses(m, batch), [m], [m.backbone.soft_prompt.vectors], 0.5
        )
        for m in (rounded, exact)
    )
    assert low.sums[0].dtype == tf.float32
    np.testing.assert_allclose(low.norms, high.norms, rtol=0.1)
    assert np.abs(low.norms - high.norms).max() > 1e-5  # it is another precision


_N = 20


def _trained(engine, model):
    """The prompt after two private steps with fixed seeds."""
    spec = privacy.PrivacySpec(
        epsilon=8.0,
        clip_norm=0.1,
        num_units=_N,
        batch_size=3,
        steps=2,
        accountant="rdp",
    )
    plan = privacy.make_plan(spec)
    arrays = _batch(_N)
    privacy.train(
        plan,
        lambda batch: model.per_example_losses(batch, training=True),
        model.trainable_variables,
        privacy.make_optimizer(plan, 0.1, "sgd", engine, noise_seed=1),
        lambda rows: {name: value[rows] for name, value in arrays.items()},
        4,
        layers=[model],
        sampler_seed=2,
    )
    return model.backbone.soft_prompt.vectors.numpy()


@pytest.mark.parametrize(
    "engine", ["dpkeras", pytest.param("vectorized", marks=pytest.mark.slow)]
)
def test_engines_agree_and_frozen_weights_do_not_move(engine):
    """Dropout included, on the prompt as on the text: masks follow from the seed."""
    results = []
    # tensorflow-privacy's vectorised loss draws one mask for all rows.
    dropout = 0.3 if engine == "dpkeras" else 0.0
    for one in ("fast", engine):
        tf.keras.utils.set_random_seed(0)
        model = _make("1.1", dropout=dropout)
        train_only(model, ["*soft_prompt/*"])
        before = [variable.numpy() for variable in model.variables]
        results.append(_trained(one, model))
        moved = [
            not np.array_equal(old, new) for old, new in zip(before, model.variables)
        ]
        assert sum(moved) == 1
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-6)

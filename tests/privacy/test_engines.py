"""Engines: equal clipped sums, layers without a rule, and draws by place."""

import logging as std_logging

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq import privacy
from tfdpsq.privacy.step import Setup, make_microbatch_sum

L = tf.keras.layers
CLIP = 0.3
ROWS = 8


def _plan(**options):
    settings = {
        "epsilon": 3.0,
        "clip_norm": CLIP,
        "num_units": 200,
        "n_is_public": True,
        "batch_size": 20,
        "steps": 3,
        "accountant": "rdp",
    }
    return privacy.make_plan(privacy.PrivacySpec(**{**settings, **options}))


PLAN = _plan()
_LOSS = tf.keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction="none"
)


def _texts(rows=200, seed=0):
    x = np.random.default_rng(seed).integers(1, 50, size=(rows, 6)).astype(np.int32)
    return x, (x[:, 0] > 25).astype(np.int64)


def _model(*middle):
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [L.Input((6,)), L.Embedding(50, 8, mask_zero=True), *middle, L.Dense(2)]
    )


MIDDLES = {
    "lstm": lambda: L.LSTM(6),
    "gru": lambda: L.GRU(6),
    "bidirectional": lambda: L.Bidirectional(L.LSTM(3)),
    "separable": lambda: tf.keras.Sequential(
        [L.SeparableConv1D(6, 3), L.GlobalAveragePooling1D()]
    ),
    "dense": lambda: tf.keras.Sequential(
        [L.GlobalAveragePooling1D(), L.Dense(6, "tanh")]
    ),
}


def _sums(model, engine, batch, plan=PLAN):
    """The clipped sum of all rows, by one engine."""

    def losses(part):
        return _LOSS(part["y"], model(part["x"], training=True))

    size = 1 if engine == "rowwise" else ROWS
    setup = Setup(plan, losses, model.trainable_variables, [model], size, engine)
    run = tf.function(make_microbatch_sum(setup))
    key = tf.constant([1, 2], tf.int64)
    parts = [
        run({name: v[at : at + size] for name, v in batch.items()}, key).sums
        for at in range(0, ROWS, size)
    ]
    return [tf.add_n(list(map(tf.convert_to_tensor, each))) for each in zip(*parts)]


def _naive(model, batch):
    """The same, row by row in float64."""
    total = [np.zeros(v.shape) for v in model.trainable_variables]
    for row in range(ROWS):
        with tf.GradientTape() as tape:
            x, y = (batch[name][row : row + 1] for name in ("x", "y"))
            loss = _LOSS(y, model(x, training=True))[0]
        found = tape.gradient(loss, model.trainable_variables)
        found = [np.asarray(tf.convert_to_tensor(g), np.float64) for g in found]
        norm = np.sqrt(sum((g**2).sum() for g in found))
        total = [t + g * min(1.0, CLIP / norm) for t, g in zip(total, found)]
    return total


def _batch():
    x, y = _texts(ROWS, seed=3)
    return {"x": tf.constant(x), "y": tf.constant(y), "weights": tf.ones(ROWS)}


@pytest.mark.parametrize("engine", ["fast", "rowwise", "vectorized", "dpkeras"])
def test_engines_equal_a_float64_loop(engine):
    model, batch = _model(MIDDLES["dense"]()), _batch()

    for found, expected in zip(_sums(model, engine, batch), _naive(model, batch)):
        np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(
    "middle",
    [
        "lstm",
        "separable",
        pytest.param("gru", marks=pytest.mark.slow),
        pytest.param("bidirectional", marks=pytest.mark.slow),
    ],
)
def test_layers_without_a_rule_are_clipped_row_by_row(middle):
    model, batch = _model(MIDDLES[middle]()), _batch()

    with pytest.raises(privacy.fast.UncoveredError, match="no rule covers"):
        _sums(model, "fast", batch)
    for found, expected in zip(_sums(model, "rowwise", batch), _naive(model, batch)):
        np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(
    "middle", ["lstm", pytest.param("gru", marks=pytest.mark.slow)]
)
def test_fit_trains_recurrent_models_and_warns_of_the_cost(middle, caplog):
    model = _model(MIDDLES[middle]())
    before = [np.array(w) for w in model.get_weights()]
    private = privacy.PrivateModel(model, _plan(steps=1), microbatch_size=16)
    private.compile(tf.keras.optimizers.SGD(0.1), loss=_LOSS)
    with caplog.at_level(std_logging.WARNING):
        private.fit(*_texts())

    assert "rowwise" in caplog.text and f"{middle}_cell" in caplog.text
    assert private.steps_executed == 1
    assert all((a != b).any() for a, b in zip(before, model.get_weights()))


@pytest.mark.parametrize("engine", ["fast", "rowwise", "vectorized", "dpkeras"])
def test_nan_row_contributes_nothing_and_costs_nobody(engine):
    tf.keras.utils.set_random_seed(2)
    model = tf.keras.Sequential([L.Input((3,)), L.Dense(4, "tanh"), L.Dense(2)])
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    y = np.zeros(ROWS, np.int64)
    weights = np.ones(ROWS, np.float32)
    odd, left_out = x.copy(), weights.copy()
    odd[2], left_out[2] = np.nan, 0.0

    def batch(rows, counted):
        return {
            n: tf.constant(v) for n, v in zip(("x", "y", "weights"), (rows, y, counted))
        }

    with_nan = _sums(model, engine, batch(odd, weights))
    without = _sums(model, engine, batch(x, left_out))
    for found, expected in zip(with_nan, without):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    "layer",
    [
        L.Dropout,
        pytest.param(L.GaussianNoise, marks=pytest.mark.slow),
        pytest.param(L.AlphaDropout, marks=pytest.mark.slow),
    ],
)
def test_draws_follow_a_rows_place_whatever_the_microbatches(layer):
    """So a killed run may go on with a smaller microbatch_size."""
    x = np.random.default_rng(0).normal(size=(200, 7)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)

    def weights(microbatch_size, engine="fast", seed=5):
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential(
            [L.Input((7,)), L.Dense(5, "relu"), layer(0.3), L.Dense(2)]
        )
        privacy.train(
            _plan(steps=2),
            lambda part: _LOSS(part["y"], model(part["x"], training=True)),
            model.trainable_variables,
            tf.keras.optimizers.SGD(0.5),
            lambda at: {"x": x[at], "y": y[at]},
            microbatch_size,
            layers=[model],
            engine=engine,
            seed=seed,
        )
        return np.concatenate([w.ravel() for w in model.get_weights()])

    whole = weights(20)
    np.testing.assert_allclose(weights(10), whole, atol=1e-6)
    np.testing.assert_allclose(weights(20, "rowwise"), whole, atol=1e-6)
    assert np.abs(weights(20, seed=6) - whole).max() > 1e-3


def test_a_killed_run_goes_on_with_smaller_microbatches(tmp_path):
    x = np.random.default_rng(0).normal(size=(200, 7)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)

    def fit(directory, microbatch_size, stop_after=None):
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential(
            [L.Input((7,)), L.Dense(5, "relu"), L.Dropout(0.3), L.Dense(2)]
        )

        class Stop(tf.keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch + 1 == stop_after:
                    raise KeyboardInterrupt

        private = privacy.PrivateModel(model, PLAN, microbatch_size=microbatch_size)
        private.compile(tf.keras.optimizers.SGD(0.5), loss=_LOSS)
        private.fit(x, y, directory=directory, callbacks=[Stop()])
        return private

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", 20, stop_after=2)
    private = fit(tmp_path / "run", 5)

    assert private.steps_executed == PLAN.spec.steps
    ledger = privacy.read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert ledger.steps_paid == PLAN.spec.steps

"""Losses that read other rows are found, independent ones pass."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.privacy import PrivacySpec, make_optimizer, make_plan, train
from tfdpsq.privacy.independence import check_independence


def _batch(rows=4):
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(rows, 5)).astype(np.float32),
        "y": random.normal(size=(rows, 5)).astype(np.float32),
        "weights": np.ones(rows, np.float32),
    }


def _dense(*layers):
    model = tf.keras.Sequential([tf.keras.layers.Dense(5), *layers])
    model.build([None, 5])
    return model


def _squared(model):
    return lambda b: tf.reduce_sum((model(b["x"], training=True) - b["y"]) ** 2, 1)


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [tf.keras.layers.Dropout(0.5)],
        [tf.keras.layers.LayerNormalization()],
        [tf.keras.layers.GaussianNoise(1.0), tf.keras.layers.AlphaDropout(0.2)],
    ],
)
def test_rows_that_keep_to_themselves_pass(layers):
    model = _dense(*layers)
    check_independence(_squared(model), _batch(), [model])


def _in_batch_softmax(model):
    def losses(b):
        scores = model(b["x"]) @ tf.transpose(b["y"])
        return tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.range(b["x"].shape[0]), scores
        )

    return losses


def _mean_subtracted(model):
    return lambda b: tf.reduce_sum(
        (model(b["x"]) - tf.reduce_mean(b["y"], 0, keepdims=True)) ** 2, 1
    )


@pytest.mark.parametrize(
    "losses_of, layers",
    [
        (_squared, [tf.keras.layers.BatchNormalization()]),
        (_in_batch_softmax, []),
        (_mean_subtracted, []),
    ],
)
def test_rows_that_read_each_other_are_found(losses_of, layers):
    model = _dense(*layers)
    with pytest.raises(ValueError, match="depends on them.*in-batch softmax"):
        check_independence(losses_of(model), _batch(), [model])


@pytest.mark.parametrize("reverse", [False, True])
def test_rows_that_read_the_others_on_one_side_are_found(reverse):
    """The first row, or the last one, alone keeps to itself."""
    model = _dense()

    def losses(b):
        return tf.cumsum(_squared(model)(b), reverse=reverse)

    with pytest.raises(ValueError, match="depends on them"):
        check_independence(losses, _batch(), [model])


def test_one_loss_too_few_is_found():
    model = _dense()
    with pytest.raises(ValueError, match="3 losses for 4 rows"):
        check_independence(lambda b: _squared(model)(b)[1:], _batch(), [model])


def test_random_numbers_of_a_models_own_are_held_fixed():
    model = _dense()
    check_independence(
        lambda b: _squared(model)(b) * tf.random.uniform([4]), _batch(), [model]
    )
    with pytest.raises(ValueError, match="depends on them"):
        check_independence(
            lambda b: _mean_subtracted(model)(b) * tf.random.uniform([4]),
            _batch(),
            [model],
        )


class _RunningMean(tf.keras.layers.Layer):
    """Passes its inputs on and keeps their mean: private data without noise."""

    def build(self, shape):
        self.mean = self.add_weight("mean", shape[1:], trainable=False)

    def call(self, inputs):
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, 0))
        return inputs


def test_a_weight_that_the_forward_pass_writes_is_refused():
    model = _dense(_RunningMean())
    with pytest.raises(ValueError, match="changes its weight.*mean.*without noise"):
        check_independence(_squared(model), _batch(), [model])


def test_a_layer_that_remembers_the_last_batch_is_refused():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Reshape([5, 1]),
            tf.keras.layers.LSTM(5, stateful=True, trainable=False),
            tf.keras.layers.Dense(5),
        ]
    )
    model.build([4, 5])
    with pytest.raises(ValueError, match="changes its weight|keeps a state"):
        check_independence(_squared(model), _batch(), [model])


def test_rows_that_are_all_alike_are_warned_of(caplog):
    model = _dense()
    same = {name: np.repeat(v[:1], 4, 0) for name, v in _batch().items()}
    check_independence(_squared(model), same, [model])
    assert "all the same" in caplog.text


@pytest.mark.parametrize("engine", ["fast", "dpkeras"])
@pytest.mark.parametrize("microbatch", [4, None])
def test_an_undeclared_in_batch_softmax_is_refused_before_a_step(engine, microbatch):
    """Staying together in one microbatch declares nothing: the multiplier does."""
    plan = make_plan(
        PrivacySpec(
            epsilon=2.0,
            clip_norm=1.0,
            num_units=12,
            batch_size=4,
            steps=2,
            accountant="rdp",
        )
    )
    model, data = _dense(), _batch(12)
    optimizer = make_optimizer(plan, 0.1, "sgd", engine)
    with pytest.raises(ValueError, match="declare its sensitivity"):
        train(
            plan,
            _in_batch_softmax(model),
            model.trainable_variables,
            optimizer,
            lambda at: {"x": data["x"][at], "y": data["y"][at]},
            microbatch,
            layers=[model],
        )
    assert int(optimizer.iterations) == 0

"""Calls that are easy to get wrong: refused by name, before anything is paid."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import (
    InputError,
    RunKey,
    calibrate_noise_multiplier,
    make_logical_step,
    train,
    training,
)
from tfdpsq.privacy.step import Setup, rows_of_batch

_plan = functools.partial(plans.plan, num_units=12, batch_size=4, steps=2)


def _layer():
    layer = tf.keras.layers.Dense(1, use_bias=False)
    layer.build([None, 3])
    return layer


@pytest.mark.parametrize(
    "microbatch_size, options, message",
    [
        (2, {"engine": "rowwise"}, "one unit at a time"),
        (2, {"layers": []}, "needs layers"),
        (5, {}, "a multiple of 5"),
        (0, {}, "microbatch_size"),
        (2, {"engine": "slow"}, "engine"),
    ],
)
def test_step_names_what_does_not_fit(microbatch_size, options, message):
    layer, plan = _layer(), _plan()
    batch = {"x": tf.ones([8, 3]), "weights": tf.ones([8])}
    with pytest.raises(InputError, match=message):
        step = make_logical_step(
            plan,
            lambda rows: layer(rows["x"])[:, 0],
            [layer.kernel],
            tf.keras.optimizers.SGD(0.1),
            microbatch_size,
            **{"layers": [layer], **options},
        )
        step(batch, tf.constant(8), [], RunKey(plan, 1).step_keys(0))


def _train(plan, layer, variables, take, **options):
    return train(
        plan,
        lambda rows: layer(rows["x"])[:, 0],
        variables,
        tf.keras.optimizers.SGD(0.1),
        take,
        2,
        layers=[layer],
        **options,
    )


def test_more_replicas_than_microbatches_are_refused(strategy_of):
    plan = _plan()
    setup = Setup(plan, len, [], [], -(-plan.max_rows // 3))
    with strategy_of(2).scope():
        assert rows_of_batch(setup) == 4 * setup.microbatch_size
    with strategy_of(4).scope():
        with pytest.raises(InputError, match="makes 3 microbatches for 4 replicas"):
            rows_of_batch(setup)


def test_nothing_to_train_is_refused():
    with pytest.raises(InputError, match="no gradient|not depend"):
        _train(_plan(), _layer(), [], lambda rows: {"x": np.ones([len(rows), 3])})


def test_rows_that_take_leaves_out_are_noticed_without_epsilon_too():
    """Where ε is infinite no check runs before the first step."""
    layer = _layer()

    def take(rows):
        return {"x": np.ones([min(len(rows), 3), 3], np.float32)}

    with pytest.raises(InputError, match="take returned 3 rows"):
        _train(_plan(epsilon=math.inf), layer, [layer.kernel], take)


def test_epsilon_that_no_noise_reaches_is_refused():
    """RDP's rounding allowance alone is above it."""
    with pytest.raises(InputError, match="no noise multiplier"):
        calibrate_noise_multiplier(1e-9, 1e-5, 0.5, 1000, "rdp")


def test_little_noise_is_found_for_a_large_epsilon():
    sigma = calibrate_noise_multiplier(290.0, 1e-2, 1e-6, 1, "rdp")
    assert 0 < sigma < 0.05


@pytest.mark.parametrize("level, warned", [("0", True), ("2", False)])
def test_train_warns_where_tensorflow_may_log_rows(monkeypatch, caplog, level, warned):
    """An operation that refuses a value logs values of its whole batch."""
    layer = _layer()
    monkeypatch.setattr(training, "LOG_LEVEL", level)
    with caplog.at_level("WARNING"), pytest.raises(InputError, match="units is"):
        _train(_plan(), layer, [layer.kernel], lambda rows: {}, units="twelve")
    assert ("TF_CPP_MIN_LOG_LEVEL" in caplog.text) == warned

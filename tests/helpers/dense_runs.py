"""Small dense models, their losses, and runs of them on a few random rows."""

import functools

import numpy as np
import tensorflow as tf

from helpers import plans
from tfdpsq.privacy import checks
from tfdpsq.privacy.fast.engine import converted
from tfdpsq.privacy.step import Setup


def batch_of_rows(rows=4):
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(rows, 5)).astype(np.float32),
        "y": random.normal(size=(rows, 5)).astype(np.float32),
        "weights": np.ones(rows, np.float32),
    }


def dense(*layers):
    model = tf.keras.Sequential([tf.keras.layers.Dense(5), *layers])
    model.build([None, 5])
    return model


def squared(model):
    return lambda b: tf.reduce_sum((model(b["x"], training=True) - b["y"]) ** 2, 1)


wide_plan = functools.partial(
    plans.plan, clip_norm=1.0, num_units=40, batch_size=24, max_batch_size=32, steps=1
)


def wide_run(losses_of, layers=(), engine="fast", microbatch=16, plan=None, **options):
    """A run on 40 rows, of which a microbatch has 16."""
    tf.keras.utils.set_random_seed(1)
    plan = plan or wide_plan()
    model, data = dense(*layers), batch_of_rows(40)
    optimizer, rows = tf.keras.optimizers.SGD(0.1), {n: data[n] for n in ("x", "y")}
    steps = plans.trained(
        plan,
        losses_of(model),
        [model],
        rows,
        microbatch,
        optimizer,
        engine=engine,
        **options,
    )
    assert steps == plan.spec.steps == int(optimizer.iterations)


def skipped_where_the_mean_is_high(model):
    def losses(b):
        found = squared(model)(b)
        return tf.where(tf.reduce_mean(found) > 1e4, 0.0, found)

    return losses


def check(losses, data, variables, layers=(), plan=None, microbatch=8, **options):
    """Checks a loss on rows as `train` does; returns what `check_setup` does."""
    plan = plan or plans.plan(num_units=40, batch_size=8, steps=1, clip_norm=1.0)
    count = len(next(iter(data.values())))
    rows = checks.Rows(lambda at: {n: v[at] for n, v in data.items()}, range(count))
    held, losses = (list(variables), list(layers)), converted(losses)
    setup = Setup(plan, losses, *held, microbatch, **options)
    return checks.check_setup(setup, rows)

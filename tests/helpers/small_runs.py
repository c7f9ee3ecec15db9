"""Runs of a linear layer on twelve rows, and whether they paid for anything."""

import numpy as np
import tensorflow as tf

from helpers import plans
from tfdpsq.privacy import Preempted, make_plan, read_ledger


def small_spec(**changes):
    """Three steps of about six of twelve rows."""
    values = {"clip_norm": 1.0, "num_units": 12, "batch_size": 6, "steps": 3}
    return plans.spec(**{**values, **changes})


def interrupted_at(last):
    """Returns an `on_step` that ends a run for now, after a step."""

    def on_step(step, loss):
        if step == last:
            raise Preempted(step)

    return on_step


def linear(batch, layer):
    return layer(batch["x"])[:, 0]


def small_run(
    directory,
    spec,
    data=None,
    losses=linear,
    rate=0.1,
    width=1,
    engine="fast",
    **options,
):
    """Trains a linear layer on twelve rows, as `small_spec` says.

    Returns the steps paid for, of an interrupted run those executed.
    """
    plan = make_plan(spec)
    layer = tf.keras.layers.Dense(width, use_bias=False)
    layer.build([None, 3])
    data = np.arange(36, dtype=np.float32).reshape(12, 3) if data is None else data
    try:
        return plans.trained(
            plan,
            lambda batch: losses(batch, layer),
            [layer],
            {"x": data},
            optimizer=tf.keras.optimizers.SGD(rate),
            engine=engine,
            directory=directory,
            **options,
        )
    except Preempted as ended:
        return ended.executed


def unpaid(directory):
    """Returns True if the run in a directory has paid for no step."""
    path = directory / "ledger.jsonl"
    return not path.exists() or read_ledger(path).steps_paid == 0

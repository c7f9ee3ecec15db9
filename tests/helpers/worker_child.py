"""A training run of one worker or several; see test_workers.py.

    TF_CONFIG=... python worker_child.py DIRECTORY OUTPUT [OTHER_ROWS] [SECURE]

Without TF_CONFIG it is a run of one process.
"""

import os
import sys

import numpy as np
import tensorflow as tf

from helpers import plans
from tfdpsq.privacy import Preempted

STEPS = 6
_N = 60


def main(directory, output=None, other_rows=False, on_step=None, secure=False):
    """Trains, and writes all variables to `output`."""
    strategy = tf.distribute.get_strategy()
    if os.environ.get("TF_CONFIG"):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    random = np.random.default_rng(1 if other_rows else 0)
    x = random.normal(size=[_N, 6]).astype(np.float32)
    plan = plans.plan(
        epsilon=4.0, num_units=_N, batch_size=14, steps=STEPS, secure=secure
    )
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(8, "tanh"),
                tf.keras.layers.Dropout(0.5),
                tf.keras.layers.Dense(2),
            ]
        )
        model.build([None, 6])  # from random weights: all must have the chief's
        optimizer = tf.keras.optimizers.Adam(0.05)
        try:
            executed = plans.trained(
                plan,
                lambda batch: tf.reduce_sum(model(batch["x"], True) ** 2, 1),
                [model],
                {"x": x},
                optimizer=optimizer,
                directory=directory,
                save_every=4,
                on_step=on_step,
            )
        except Preempted:
            return
        assert executed == STEPS
        values = [v.numpy() for v in (*model.trainable_variables, *optimizer.variables)]
    if output:
        np.savez(output, **{f"{i:03d}": value for i, value in enumerate(values)})


if __name__ == "__main__":
    main(
        sys.argv[1],
        sys.argv[2],
        "OTHER_ROWS" in sys.argv,
        secure="SECURE" in sys.argv,
    )

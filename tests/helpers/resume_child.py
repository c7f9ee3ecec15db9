"""A training run that dies where it is told to; see test_resume.py.

    python resume_child.py DIRECTORY OUTPUT WHERE:STEP

WHERE is "pay" (paid, not yet run), "update" (run, not yet saved), "save" (state
written, not yet in place) or "never".
"""

import os
import signal
import sys

import numpy as np
import tensorflow as tf

from helpers import plans
from tfdpsq.privacy import checkpoint
from tfdpsq.privacy.proof.ledger import Ledger

STEPS = 12


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def main(directory, output, death):
    """Trains, dies on the way, or writes all variables to `output`."""
    where, _, at = death.partition(":")
    at = int(at or -1)
    plan = plans.plan(epsilon=4.0, num_units=40, batch_size=10, steps=STEPS)
    random = np.random.default_rng(0)
    rows = {
        "ids": random.integers(0, 20, [40, 6]).astype(np.int32),
        "y": random.normal(size=40).astype(np.float32),
    }
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(20, 8),
            tf.keras.layers.GlobalAveragePooling1D(),
            tf.keras.layers.Dropout(0.5),
            tf.keras.layers.Dense(8, "tanh"),
            tf.keras.layers.Dense(1),
        ]
    )
    model.build([None, 6])  # from fresh random weights: they must be restored, too
    optimizer = tf.keras.optimizers.Adam(0.05)

    if where == "pay":
        pay = Ledger.pay

        def paid(self, step):
            new = pay(self, step)
            if step == at:
                _die()
            return new

        Ledger.pay = paid
    if where == "save":
        replace = os.replace

        def replaced(source, target):
            if f"step-{at:08d}" in str(target):
                _die()
            replace(source, target)

        checkpoint.os.replace = replaced

    def on_step(executed, loss):
        sys.stdout.write(f"{executed}\n")
        sys.stdout.flush()
        if where == "update" and executed == at:
            _die()

    executed = plans.trained(
        plan,
        lambda batch: tf.square(model(batch["ids"], training=True)[:, 0] - batch["y"]),
        [model],
        rows,
        optimizer=optimizer,
        directory=directory,
        save_every=3,
        on_step=on_step,
    )
    assert executed == STEPS
    values = [v.numpy() for v in (*model.trainable_variables, *optimizer.variables)]
    np.savez(output, **{f"{i:03d}": value for i, value in enumerate(values)})


if __name__ == "__main__":
    main(*sys.argv[1:])

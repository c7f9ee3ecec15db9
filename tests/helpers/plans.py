"""Plans, certificates and runs for tests that state only what matters to them."""

import math

import tensorflow as tf

from tfdpsq.privacy import PrivacySpec, make_certificate, make_plan, optimizers, train


def spec(**fields):
    """Returns a spec: num_units, batch_size, steps, and what differs from the usual.

    Noise for ε = 2 is found by RDP, which is faster than PLD.
    """
    usual = {"epsilon": 2.0, "clip_norm": 0.5, "accountant": "rdp"}
    return PrivacySpec(**{**usual, **fields})


def plan(**fields):
    """Returns the plan of a `spec`."""
    return make_plan(spec(**fields))


def certificate(plan, steps=None, **stated):
    """Returns the certificate of a plan's run, of all its steps unless given.

    `stated` replaces words and entries that nothing else follows from.
    """
    usual = {
        "description": "A model.",
        "sensitivity_argument": "Each loss depends on one unit alone.",
        "training": {},
        "fingerprints": {},
    }
    steps = plan.spec.steps if steps is None else steps
    return make_certificate(plan, steps, **{**usual, **stated})


def optimizer(rate=0.1, name="sgd", **options):
    """Returns a new Keras optimizer by the name that stages use."""
    return optimizers.OPTIMIZERS[name](rate, **options)


def trained(plan, losses, layers, rows, microbatch=4, optimizer=None, **options):
    """Trains all that layers train, by SGD unless given; returns the steps paid for.

    `rows` are {name: array}, or a function of row numbers as `train` takes it.
    """

    def take(at):
        return {name: values[at] for name, values in rows.items()}

    return train(
        plan,
        losses,
        [variable for layer in layers for variable in layer.trainable_variables],
        optimizer or tf.keras.optimizers.SGD(0.1),
        rows if callable(rows) else take,
        microbatch,
        layers=layers,
        data_fingerprint="rows",
        **options,
    )


class Breaks(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is infinite from a step on, where a step is compiled.

    Checks beforehand call it outside and see nothing wrong.
    """

    def __init__(self, last):
        self._last = last

    def __call__(self, step):
        then = math.inf if tf.inside_function() else 0.05
        return tf.where(tf.cast(step, tf.int64) < self._last, 0.05, then)

    def get_config(self):
        return {"last": self._last}

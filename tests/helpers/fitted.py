"""Small models under a plan, as `compile` and `fit` take them."""

import functools

import numpy as np
import tensorflow as tf

from helpers import plans
from tfdpsq.privacy import PrivateModel

NONE = tf.keras.losses.Reduction.NONE


plan_of = functools.partial(
    plans.plan, epsilon=8.0, clip_norm=1.0, num_units=64, batch_size=16, steps=8
)


def data(rows=64, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 6)).astype("float32")
    return x, (x @ random.normal(size=(6, 3))).argmax(1).astype("int64")


def functional():
    inputs = tf.keras.Input([6])
    shared = tf.keras.layers.Dense(6, "tanh")
    return tf.keras.Model(inputs, tf.keras.layers.Dense(3)(shared(shared(inputs))))


def compiled(model, plan, optimizer="adam", loss=None, **options):
    private = PrivateModel(model, plan, microbatch_size=8, **options)
    loss = loss or tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=NONE
    )
    private.compile(plans.optimizer(0.05, optimizer), loss)
    return private

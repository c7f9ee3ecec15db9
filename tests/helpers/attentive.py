"""A generator of random weights whose attention matters."""

import tensorflow as tf

from tfdpsq.generator import T5QueryGenerator
from tfdpsq.layers import T5Config


def generator(version, size=60, layers=2, dropout=0.0, soft_prompt=0):
    """Returns a T5 of `size` words, its weights larger than training starts from."""
    tf.keras.utils.set_random_seed(8)
    config = T5Config(size, layers, 3, 16, 24, 8, version, dropout=dropout)
    model = T5QueryGenerator(config, soft_prompt=soft_prompt)
    for variable in model.trainable_variables:
        if variable.shape.rank == 2:
            variable.assign(variable * 1.5)
    return model

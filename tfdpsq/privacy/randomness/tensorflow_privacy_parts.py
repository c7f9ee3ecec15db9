"""The parts of tensorflow-privacy that this package builds on, where there are any.

tensorflow-privacy 0.9 needs TensorFlow's estimators, which end with TensorFlow 2.15.
Without it, engine "fast" and the noise lose a base class each and none of their
arithmetic: what they take from these classes is the clip norm and the deviation that
they were given.
"""

from __future__ import annotations

import tensorflow as tf

from tfdpsq.keras_choice import keras2 as keras

# Why the classes below cannot be had; empty where they can.
MISSING = ""
try:
    # Its optimizers mix what they get with `tf.keras`.
    if keras.layers.Layer is not tf.keras.layers.Layer:
        raise ImportError("it works on tf.keras, which is Keras 3 here")
    from tensorflow_privacy.privacy.dp_query.gaussian_query import GaussianSumQuery
    from tensorflow_privacy.privacy.optimizers import (
        dp_optimizer_keras,
        dp_optimizer_keras_vectorized,
    )

    generic_class = dp_optimizer_keras.make_keras_generic_optimizer_class
    vectorized_class = (
        dp_optimizer_keras_vectorized.make_vectorized_keras_optimizer_class
    )
except Exception as error:  # on another TensorFlow it fails in several ways
    MISSING = f"{type(error).__name__}: {error}"

    class GaussianSumQuery:  # type: ignore[no-redef]
        """Holds what `noise.SeededGaussianSumQuery` was made with."""

        def __init__(self, l2_norm_clip: float, stddev: float):
            """Keeps the arguments under the names of tensorflow-privacy's class."""
            self._l2_norm_clip = l2_norm_clip
            self._stddev = stddev

"""A positive number that scores are multiplied by, fixed or learned."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfdpsq.validation import positive


@tf.keras.utils.register_keras_serializable("tfdpsq")
class Scale(tf.keras.layers.Layer):
    """Multiplies by exp(w): the inverse of a softmax's temperature.

    Learned, w is a weight, so that the scale stays above zero (as in CLIP, Radford et
    al. 2021, arXiv:2103.00020, section 2.5); fixed, the layer has none.
    """

    def __init__(self, initial: float, learned: bool = False, **kwargs):
        """Makes the layer.

        Args:
          initial: the scale to begin with.
          learned: whether it is trained.
          **kwargs: those of `tf.keras.layers.Layer`.

        Raises:
          InputError: an initial scale that is not above 0.
        """
        kwargs.setdefault("dtype", "float32")
        super().__init__(**kwargs)
        self.initial, self.learned = positive("scale", initial), learned
        self.log_scale = None
        if learned:
            self.log_scale = self.add_weight(
                name="log_scale",
                shape=[],
                initializer=tf.keras.initializers.Constant(math.log(initial)),
            )

    def call(self, scores: tf.Tensor) -> tf.Tensor:
        """[B, ...] to [B, ...]."""
        if self.log_scale is None:
            return self.initial * scores
        return tf.exp(self.log_scale) * scores

    def get_config(self) -> dict[str, Any]:
        """Initial scale, whether it is learned, and Keras's own."""
        own = {"initial": self.initial, "learned": self.learned}
        return {**super().get_config(), **own}

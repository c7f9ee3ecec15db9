"""A positive factor for scores, fixed or learned."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfdpsq.keras_choice import keras
from tfdpsq.validation import positive


@keras.utils.register_keras_serializable("tfdpsq")
class Scale(keras.layers.Layer):
    """Multiplies by exp(w): the inverse of a softmax's temperature.

    A learned scale has the weight w, as in CLIP (Radford et al. 2021, arXiv:2103.00020,
    section 2.5); a fixed one has none.

    Example:
      >>> Scale(20.0)(tf.constant([1.0, 0.5])).numpy()
      array([20., 10.], dtype=float32)

    Attributes:
      initial: the scale to begin with, 1/temperature, above 0.
      learned: whether it is trained.
      log_scale: the weight w, a scalar, or `None` if the scale is fixed.
    """

    def __init__(self, initial: float, learned: bool = False, **kwargs: Any) -> None:
        """Makes the layer; other arguments are those of `keras.layers.Layer`."""
        kwargs.setdefault("dtype", "float32")
        super().__init__(**kwargs)
        self.initial, self.learned = positive("scale", initial), learned
        self.log_scale = None
        if learned:
            start = keras.initializers.Constant(math.log(initial))
            self.log_scale = self.add_weight(
                name="log_scale", shape=[], initializer=start
            )

    def call(self, scores: tf.Tensor) -> tf.Tensor:
        """Multiplies scores of any shape by the scale."""
        scale = self.initial if self.log_scale is None else tf.exp(self.log_scale)
        return scale * scores

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        own = {"initial": self.initial, "learned": self.learned}
        return {**super().get_config(), **own}

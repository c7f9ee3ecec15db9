"""A soft prompt: trained vectors before the embedded text.

Prompt tuning (Lester, Al-Rfou and Constant 2021, arXiv:2104.08691, section 2) freezes
the whole model and trains only these length · hidden_dim numbers.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras


@keras.utils.register_keras_serializable("tfdpsq")
class SoftPrompt(keras.layers.Layer):
    """Puts trained vectors before every text of a batch; no token is ever lost.

    The vectors are the table of an inner Keras `Embedding`, of which every text looks
    up all rows, so the per-example rule for embeddings covers them. They are float32
    also under mixed precision.

    Example:
      >>> layer = SoftPrompt(3)
      >>> embedded, mask = layer(tf.zeros([2, 5, 16]), tf.ones([2, 5], tf.int32))
      >>> embedded.shape, mask.shape
      (TensorShape([2, 8, 16]), TensorShape([2, 8]))

    Attributes:
      length: number of vectors, at least 1.
      embedding: the layer that holds them.
    """

    def __init__(self, length: int, **kwargs: Any) -> None:
        """Makes the layer; other arguments are those of `keras.layers.Layer`."""
        super().__init__(**kwargs)
        self.length = validation.positive_integer("soft prompt length", length)

    def build(self, input_shape: Any) -> None:
        """Creates the vectors, uniform in [-0.5, 0.5] like the paper's random ones."""
        self.embedding = keras.layers.Embedding(
            self.length,
            input_shape[-1],
            embeddings_initializer=keras.initializers.RandomUniform(-0.5, 0.5),
            dtype=self.dtype_policy,
            name="embedding",
        )
        with tf.name_scope(self.embedding.name):
            self.embedding.build(None)
        self.built = True

    @property
    def vectors(self) -> tf.Variable:
        """[length, D] float32."""
        return self.embedding.embeddings

    def call(
        self, embedded: tf.Tensor, padding_mask: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Prepends to [B, L, D] floats, and to their mask [B, L], 1 for real tokens."""
        rows = embedded.shape[0] or tf.shape(embedded)[0]
        ids = tf.tile(tf.range(self.length)[tf.newaxis], [rows, 1])
        prompted = tf.concat([self.embedding(ids), embedded], axis=1)
        return prompted, self.extend_mask(padding_mask)

    def extend_mask(self, padding_mask: tf.Tensor) -> tf.Tensor:
        """Returns the mask [B, length + L] for one of [B, L], integers."""
        if padding_mask.dtype == tf.bool:
            padding_mask = tf.cast(padding_mask, tf.int32)
        return tf.pad(padding_mask, [[0, 0], [self.length, 0]], constant_values=1)

    def get_config(self) -> dict:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "length": self.length}

"""A soft prompt: vectors that are trained, put before the embedded text.

Prompt tuning (Lester, Al-Rfou and Constant 2021, arXiv:2104.08691, section 2) keeps the
whole model frozen and trains these alone, length · hidden_dim numbers. Under
differential privacy the noise's norm grows with the root of the number of trained
weights, and there is no smaller part of a T5 to train.
"""

from __future__ import annotations

import tensorflow as tf

from tfdpsq import validation


@tf.keras.utils.register_keras_serializable("tfdpsq")
class SoftPrompt(tf.keras.layers.Layer):
    """Puts trained vectors before every text of a batch.

    It makes texts longer, rather than writing over placeholders that its caller would
    have to leave room for: no caller can forget them, and no token is ever lost.

    The vectors are the table of a Keras `Embedding` inside, of which every text looks
    up all rows: its rule gives their gradient apart for each text, and no further one
    is needed. They are float32 also under mixed precision.

    Attributes:
      length: how many vectors.
      embedding: the layer that holds them.
    """

    def __init__(self, length: int, **kwargs):
        """Makes the layer.

        Args:
          length: how many vectors, at least 1.
          **kwargs: those of `tf.keras.layers.Layer`.

        Raises:
          InputError: length below 1.
        """
        super().__init__(**kwargs)
        self.length = validation.positive_integer("soft prompt length", length)

    def build(self, input_shape):
        """Makes the vectors, uniform in [-0.5, 0.5] as the paper's random ones."""
        self.embedding = tf.keras.layers.Embedding(
            self.length,
            input_shape[-1],
            embeddings_initializer=tf.keras.initializers.RandomUniform(-0.5, 0.5),
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
        """Puts the vectors first.

        Args:
          embedded: [B, L, D] floating point.
          padding_mask: [B, L] integers, 1 for real tokens.

        Returns:
          ([B, length + L, D], the mask [B, length + L]).
        """
        rows = embedded.shape[0] or tf.shape(embedded)[0]
        ids = tf.tile(tf.range(self.length)[tf.newaxis], [rows, 1])
        prompted = tf.concat([self.embedding(ids), embedded], axis=1)
        return prompted, self.longer(padding_mask)

    def longer(self, padding_mask: tf.Tensor) -> tf.Tensor:
        """The mask of texts that have the prompt before them.

        Args:
          padding_mask: [B, L] integers, 1 for real tokens.

        Returns:
          [B, length + L], 1 for the prompt.
        """
        return tf.pad(padding_mask, [[0, 0], [self.length, 0]], constant_values=1)

    def get_config(self) -> dict:
        """The layer's configuration."""
        return {**super().get_config(), "length": self.length}

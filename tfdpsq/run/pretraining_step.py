"""One step of pretraining: the three losses, weighted, and what moves the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_collections
import tensorflow as tf

from tfdpsq.generator import T5QueryGenerator, pretraining
from tfdpsq.retriever.losses import in_batch_losses


def make_step(
    config: ml_collections.ConfigDict,
    model: T5QueryGenerator,
    optimizer: tf.keras.optimizers.Optimizer,
) -> Callable[[Mapping[str, tf.Tensor]], dict[str, tf.Tensor]]:
    """One step of pretraining, to be compiled.

    Args:
      config: the stage's.
      model: what is trained.
      optimizer: built for its weights.

    Returns:
      Takes a batch of `pretraining.Batches`; returns its losses.
    """
    variables = model.trainable_variables

    def contrast(queries, documents, keys):
        return in_batch_losses(
            queries,
            documents,
            keys,
            tf.fill([tf.shape(keys)[0], 1], tf.constant(-1, keys.dtype)),
            tf.ones(tf.shape(keys)[:1]),
            config.scale,
        )

    def step(batch):
        with tf.GradientTape() as tape:
            losses = pretraining.pretraining_losses(model, batch, contrast)
            loss = losses["pseudo_queries"] * config.pair_rows
            loss += losses["spans"] * config.text_rows
            loss /= config.pair_rows + config.text_rows
            loss += config.contrast_weight * losses["contrast"]
        gradients = tape.gradient(loss, variables)
        # The embedding's is part sparse (inputs), part dense (logits).
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, variables))
        return losses

    return step

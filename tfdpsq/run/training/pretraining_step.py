"""One step of pretraining: the weighted sum of three losses, and the update.

Each replica has its share of the pseudo-queries and of the texts. The contrastive task
compares a pseudo-query with the documents of all replicas. Gradients are summed before
the optimizer sees them, so its clipping and statistics use the whole batch's gradient,
as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq.generator import T5QueryGenerator, pretraining
from tfdpsq.layers.seeded_dropout import dropout_seed, seed_of_step
from tfdpsq.retriever.losses import Embeddings, batch_losses
from tfdpsq.run.devices import replicas


def make_step(
    config: ml_collections.ConfigDict,
    model: T5QueryGenerator,
    optimizer: tf.keras.optimizers.Optimizer,
) -> Callable[[Mapping[str, tf.Tensor]], dict[str, tf.Tensor]]:
    """Returns one step of pretraining, to be compiled.

    The step takes a batch of `pretraining.Batches`, or within a replica its share of
    one (`deal`), and returns the losses of the whole batch. `optimizer` is built for
    the model's weights.
    """
    variables = model.trainable_variables
    count = tf.distribute.get_strategy().num_replicas_in_sync

    def contrast(queries, documents, keys):
        batch = {
            "document_key": keys,
            "positive_keys": tf.fill(
                [tf.shape(keys)[0], 1], tf.constant(-1, keys.dtype)
            ),
            "weights": tf.ones(tf.shape(keys)[:1]),
        }
        return batch_losses(
            Embeddings(queries, documents),
            batch,
            lambda cosines: config.scale * cosines,
        )

    def step(batch):
        seed = seed_of_step(config.seed, optimizer.iterations)
        with tf.GradientTape() as tape, dropout_seed(seed):
            losses = pretraining.pretraining_losses(model, batch, contrast)
            if count > 1:  # shares are equal: the mean of their means is the batch's
                losses = {name: loss / count for name, loss in losses.items()}
            loss = losses["pseudo_queries"] * config.pair_rows
            loss += losses["spans"] * config.text_rows
            loss /= config.pair_rows + config.text_rows
            loss += config.contrast_weight * losses["contrast"]
        gradients = tape.gradient(loss, variables)
        # The embedding's gradient is part sparse (inputs), part dense (logits).
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        *gradients, total = replicas.summed([*gradients, tf.stack([*losses.values()])])
        optimizer.apply_gradients(
            zip(gradients, variables), skip_gradients_aggregation=True
        )
        return dict(zip(losses, tf.unstack(total)))

    return step


def deal(batch: replicas.Arrays, replica: int, of: int) -> replicas.Arrays:
    """Returns a replica's share of a batch's pseudo-queries and of its texts.

    The pseudo-queries come first in a batch; `of` replicas divide both counts.
    """
    pairs = len(batch["document_key"])
    first = {name: values[:pairs] for name, values in batch.items()}
    texts = {n: values[pairs:] for n, values in batch.items() if n != "document_key"}
    share = dict(replicas.rows_of(first, replica, of))
    for name, values in replicas.rows_of(texts, replica, of).items():
        share[name] = np.concatenate([share[name], values])
    return share

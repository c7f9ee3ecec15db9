"""Ordinary training of a retriever: whole batches, on one replica or several.

Each replica embeds its share of a batch, and every row's softmax is over the documents
of all, on whichever worker they are. What dropout drops follows from the run's seed,
the step and the row's place in the batch (`layers.dropout_seed`). No state is kept: a
training that is ended begins anew, and takes the same steps to the same weights.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import privacy, retriever, validation
from tfdpsq.data import Tokenizer
from tfdpsq.layers.seeded_dropout import dropout_seed, seed_of_step
from tfdpsq.privacy import workers
from tfdpsq.retriever.training import require_enough
from tfdpsq.run.core import sources
from tfdpsq.run.core.progress import Progress
from tfdpsq.run.devices import replicas, strategy
from tfdpsq.run.training import hard_negatives, private_training


def train(
    config: ml_collections.ConfigDict,
    model: retriever.TwoTower,
    tokenizer: Tokenizer,
    source: sources.Source,
    progress: Progress,
    scratch: pathlib.Path,
    devices: strategy.Devices = strategy.DEFAULT,
) -> None:
    """Trains for `config.steps` steps.

    Args:
      config: the stage's.
      model: to be trained; made in the devices' scope.
      tokenizer: the model's.
      source: the pairs.
      progress: called after each step.
      scratch: a directory for the tokenised pairs, as private as they are. It is made,
        and removed at the end; what a killed run left there is removed first.
      devices: what it is trained on.

    Raises:
      Preempted: the process, or another worker, was asked to end.
      InputError: replicas, or `rows_at_a_time`, that do not divide the batch; bad hard
        negatives.
    """
    devices.require_share(config.batch_size)
    devices.require_single_steps("method 'plain' takes one step at a time")
    if model.documents_frozen and config.rows_at_a_time:
        raise validation.InputError(
            f"rows_at_a_time is {config.rows_at_a_time}, but the documents stay as "
            "they are and are embedded before training. Set it to 0."
        )
    with _empty(scratch):
        batches = _batches(config, model, tokenizer, source, scratch)
        with devices.scope(), devices.notice.training() as asked:
            workers.copy_from_chief(model.variables)
            step = make_step(
                model,
                private_training.learning_rate(config),
                config.rows_at_a_time,
                config.jit_compile,
                config.seed,
            )
            for done, batch in enumerate(itertools.islice(batches, config.steps), 1):
                workers.require_same_rows([batch])
                progress(done, step(batch))
                if any(workers.any_of(asked())) and done < config.steps:
                    raise privacy.Preempted(done)


def _batches(
    config, model, tokenizer, source: sources.Source, scratch: pathlib.Path
) -> Iterator[dict[str, np.ndarray]]:
    """Batches from the disk; of pairs with hard negatives, in memory as these are."""
    require_enough(source.count, config.batch_size)
    lengths = {name: config[name] for name in ("query_length", "document_length")}
    embedding = model if model.documents_frozen else None
    negatives = hard_negatives.arrays(config, source, tokenizer)
    if not negatives:
        stored = retriever.store_pairs(
            scratch, source.read(), tokenizer, **lengths, model=embedding
        )
        return stored.batches(config.batch_size, config.seed)
    return retriever.make_batches(
        source.pairs,
        tokenizer,
        config.batch_size,
        **lengths,
        seed=config.seed,
        negatives=negatives,
        model=embedding,
    )


@contextlib.contextmanager
def _empty(directory: pathlib.Path) -> Iterator[None]:
    """A directory for the owner alone, removed at the end."""
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(mode=0o700, parents=True)
    try:
        yield
    finally:
        shutil.rmtree(directory)


def make_step(
    model: retriever.TwoTower,
    learning_rate: Any,
    rows_at_a_time: int = 0,
    jit_compile: bool = False,
    seed: int = 0,
) -> Callable[[Mapping[str, np.ndarray]], float]:
    """A step of Adam on the mean loss of a batch.

    Args:
      model: the retriever.
      learning_rate: a number or a schedule.
      rows_at_a_time: of a replica's rows, how many are embedded at a time
        (`retriever.cached_gradients`); 0 for all.
      jit_compile: compile with XLA; in a strategy's scope left to the strategy.
      seed: of dropout.

    Returns:
      Takes a whole batch, applies its gradient, returns its mean loss in nats.
    """
    step = replica_step(model, learning_rate, rows_at_a_time, seed)
    return replicas.whole_batches(step, jit_compile, replicas.rows_of)


def replica_step(
    model: retriever.TwoTower,
    learning_rate: Any,
    rows_at_a_time: int = 0,
    seed: int = 0,
) -> Callable[[Mapping[str, tf.Tensor]], tf.Tensor]:
    """The step of one replica, to be compiled; see `make_step`.

    Args:
      model: the retriever.
      learning_rate: a number or a schedule.
      rows_at_a_time: of the replica's rows.
      seed: of dropout.

    Returns:
      Takes the replica's rows of a batch; returns the mean loss of the whole batch.
    """
    optimizer = tf.keras.optimizers.legacy.Adam(learning_rate)
    variables = model.trainable_variables
    optimizer._create_all_weights(variables)

    def step(batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        count = tf.reduce_sum(tf.cast(batch["weights"] > 0, tf.float32))
        (count,) = replicas.summed([count])
        drawn = seed_of_step(seed, optimizer.iterations)
        if rows_at_a_time:
            total, gradients = retriever.cached_gradients(
                model, batch, variables, rows_at_a_time, seed=drawn
            )
        else:
            with tf.GradientTape() as tape, dropout_seed(drawn):
                total = tf.reduce_sum(model.per_example_losses(batch, training=True))
            gradients = tape.gradient(total, variables)
        count = tf.maximum(count, 1)
        gradients = [None if g is None else g / count for g in gradients]
        total, *gradients = replicas.summed([total, *gradients])
        optimizer.apply_gradients(
            zip(gradients, variables), experimental_aggregate_gradients=False
        )
        return total / count

    return step

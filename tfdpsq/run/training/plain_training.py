"""Ordinary training of a retriever: whole batches, on one replica or several.

Each replica embeds its share of a batch; every row's softmax is over the documents of
all replicas and workers. Dropout follows from the run's seed, the step and the row's
place in the batch (`layers.dropout_seed`). No state is kept: a training that is
interrupted starts from the beginning, and takes the same steps to the same weights.
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
from tfdpsq.layers.seeded_dropout import dropout_seed, seed_of_step
from tfdpsq.privacy import optimizers, workers
from tfdpsq.privacy.batches import require_same_rows
from tfdpsq.retriever.training import require_enough
from tfdpsq.run.core import sources
from tfdpsq.run.core.progress import Progress
from tfdpsq.run.devices import replicas
from tfdpsq.run.training import context as contexts
from tfdpsq.run.training import hard_negatives, private_training, training_settings


def train(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    model: retriever.TwoTower,
    source: sources.Source,
    progress: Progress,
    scratch: pathlib.Path,
) -> None:
    """Trains for `config.steps` steps.

    `model` was made in the scope of the context's devices. `scratch` is created for the
    tokenised pairs, as private as they are, and removed at the end, with the leftovers
    of a killed run.

    Raises:
      Preempted: the process, or another worker, received a signal to end.
      InputError: the replicas, or `rows_at_a_time`, do not divide the batch; or bad
        hard negatives.
    """
    devices = context.devices
    devices.require_share(config.batch_size)
    check_rows(
        config.rows_at_a_time,
        config.batch_size // devices.replicas,
        model.documents_frozen,
    )
    with _empty(scratch):
        require_enough(source.count, config.batch_size)
        mined = hard_negatives.encoder(
            config.hard_negatives, source, context.tokenizer, config.document_length
        )
        batches = retriever.store_pairs(
            scratch,
            source.read(),
            context.tokenizer,
            negatives=mined,
            query_length=config.query_length,
            document_length=config.document_length,
            model=model if model.documents_frozen else None,
        ).batches(config.batch_size, config.seed)
        with devices.scope(), devices.notice.training() as asked:
            workers.copy_from_chief(model.variables)
            step = make_step(
                model,
                private_training.learning_rate(
                    config.learning_rate, config.schedule, config.steps
                ),
                config.rows_at_a_time,
                config.jit_compile,
                config.seed,
                config.optimizer,
                **training_settings.optimizer_options(config),
            )
            for done, batch in enumerate(itertools.islice(batches, config.steps), 1):
                require_same_rows(batch)
                progress(done, step(batch))
                if any(workers.any_of(asked())) and done < config.steps:
                    raise privacy.Preempted(done)


def check_rows(rows_at_a_time: int, rows: int, documents_frozen: bool) -> None:
    """Refuses a `rows_at_a_time` that does not fit a replica's rows or the model."""
    if not rows_at_a_time:
        return
    if documents_frozen:
        raise validation.InputError(
            f"rows_at_a_time is {rows_at_a_time}, but the documents' tower is "
            "frozen and they are embedded before training. Set it to 0."
        )
    if rows % rows_at_a_time:
        raise validation.InputError(
            f"rows_at_a_time is {rows_at_a_time}, which does not divide the "
            f"{rows} rows of a replica. Give a divisor of {rows}, or 0 for all."
        )


@contextlib.contextmanager
def _empty(directory: pathlib.Path) -> Iterator[None]:
    """Makes an empty directory for the owner alone; removes it at the end."""
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
    optimizer: str = "adam",
    **options: Any,
) -> Callable[[Mapping[str, np.ndarray]], float]:
    """Returns a step of an optimizer on the mean loss of a batch.

    `rows_at_a_time` rows of a replica are embedded at a time
    (`retriever.cached_gradients`); 0 for all. With `jit_compile` XLA compiles the step;
    in a strategy's scope that is left to the strategy. `seed` is that of dropout,
    `optimizer` a name in `privacy.optimizers.OPTIMIZERS`, and `options` go to it.

    Returns:
      Takes a whole batch, applies its gradient, returns its mean loss in nats.
    """
    step = replica_step(
        model, learning_rate, rows_at_a_time, seed, optimizer, **options
    )
    return replicas.whole_batches(step, jit_compile, replicas.rows_of)


def replica_step(
    model: retriever.TwoTower,
    learning_rate: Any,
    rows_at_a_time: int = 0,
    seed: int = 0,
    optimizer: str = "adam",
    **options: Any,
) -> Callable[[Mapping[str, tf.Tensor]], tf.Tensor]:
    """Returns the step of one replica, to be compiled; arguments as in `make_step`.

    The step takes the replica's rows and returns the mean loss of the whole batch.
    """
    taken = optimizers.OPTIMIZERS[optimizer](learning_rate, **options)
    variables = model.trainable_variables
    legacy = isinstance(taken, tf.keras.optimizers.legacy.Optimizer)
    # Slots must exist before a compiled function runs.
    (taken._create_all_weights if legacy else taken.build)(variables)
    # The gradients below are summed over replicas already.
    summed = {
        "experimental_aggregate_gradients"
        if legacy
        else "skip_gradients_aggregation": not legacy
    }

    def step(batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        count = tf.reduce_sum(tf.cast(batch["weights"] > 0, tf.float32))
        (count,) = replicas.summed([count])
        drawn = seed_of_step(seed, taken.iterations)
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
        taken.apply_gradients(zip(gradients, variables), **summed)
        return total / count

    return step

"""Ordinary training of a retriever by Keras's `fit`, on one replica or several.

Each replica embeds its share of a batch; every row's softmax is over the documents of
all replicas and workers. An epoch of Keras is `save_every` steps: after it the state is
backed up and held-out pairs are searched for. A killed training goes on from the last
backup with the rows that come next.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import privacy, retriever, validation
from tfdpsq.privacy import optimizers, workers
from tfdpsq.run.core import layout, sources, workdir
from tfdpsq.run.core.progress import Progress
from tfdpsq.run.training import context as contexts
from tfdpsq.run.training import hard_negatives, private_training, training_settings


def train(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    model: retriever.TwoTower,
    source: sources.Source,
    progress: Progress,
) -> None:
    """Trains for `config.steps` steps.

    `model` was made in the scope of the context's devices. Tokenised pairs and backups
    stay in the run's directory, which is as private as they are; the pairs are removed
    at the end, the backups by `close_run`.

    Raises:
      Preempted: the process, or another worker, received a signal to end.
      InputError: the replicas, or `rows_at_a_time`, do not divide the batch; too few
        pairs; or bad hard negatives.
    """
    devices = context.devices
    devices.require_share(config.batch_size)
    check_rows(config.rows_at_a_time, config.batch_size // devices.replicas)
    with _empty(context.run_dir / private_training.ROWS) as scratch:
        mined = hard_negatives.encoder(
            config.hard_negatives, source, context.tokenizer, config.document_length
        )
        rows = retriever.store_pairs(
            scratch,
            source.read(),
            context.tokenizer,
            negatives=mined,
            query_length=config.query_length,
            document_length=config.document_length,
        )
        count = min(len(rows) // 20, len(rows) - config.batch_size)
        count = max(0, min(config.validation_pairs, count))
        if source.private and config.strict:
            count = 0  # nobody may see it
        held_out = np.linspace(0, len(rows) - 1, count, dtype=np.int64)
        trained = np.setdiff1d(np.arange(len(rows)), held_out)
        callbacks: list[tf.keras.callbacks.Callback] = []
        if len(held_out):
            callbacks.append(retriever.HitRate(rows.take(held_out)))
        if not (source.private and config.strict):
            logs = context.private / layout.LOGS / context.run_dir.name
            callbacks.append(
                tf.keras.callbacks.TensorBoard(os.fspath(logs), write_graph=False)
            )
        with devices.scope(), devices.notice.training() as asked:
            _fit(config, context, model, rows.take, trained, progress, asked, callbacks)


def _fit(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    model: retriever.TwoTower,
    take: Callable[[np.ndarray], dict[str, np.ndarray]],
    trained: np.ndarray,
    progress: Progress,
    asked: Callable[[], bool],
    callbacks: list[tf.keras.callbacks.Callback],
) -> None:
    """Fits the model to rows `trained`, from the last backup if there is one."""
    optimizer = optimizers.OPTIMIZERS[config.optimizer](
        private_training.learning_rate(
            config.learning_rate, config.schedule, config.steps
        ),
        **training_settings.optimizer_options(config),
    )
    state = [*model.variables, *optimizers.build(optimizer, model.trainable_variables)]
    model.compile(
        optimizer,
        rows_at_a_time=config.rows_at_a_time,
        seed=config.seed,
        # In a strategy's scope that is left to the strategy.
        jit_compile=config.jit_compile and not tf.distribute.has_strategy(),
    )
    per_epoch = min(config.save_every, config.steps)
    backup = _backup(config, context)
    first = _epochs_in(backup)

    class Steps(tf.keras.callbacks.Callback):
        """Shows every step, and ends training after the last or on a signal."""

        done = first * per_epoch

        def on_train_begin(self, logs: Any = None) -> None:
            workers.copy_from_chief(state)  # which alone has restored a backup

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.done += 1
            progress(self.done, logs["loss"])
            if self.done >= config.steps:
                self.model.stop_training = True
            elif any(workers.any_of(asked())):
                raise privacy.Preempted(self.done)

    model.fit(
        _batches(take, trained, config.batch_size, config.seed, first * per_epoch),
        epochs=math.ceil(config.steps / per_epoch),
        steps_per_epoch=per_epoch,
        initial_epoch=first,
        verbose=0,
        callbacks=[
            tf.keras.callbacks.BackupAndRestore(
                os.fspath(backup), delete_checkpoint=False
            ),
            Steps(),
            *callbacks,
        ],
    )


def _batches(
    take: Callable[[np.ndarray], dict[str, np.ndarray]],
    trained: np.ndarray,
    batch_size: int,
    seed: int,
    start: int,
) -> Any:
    """Returns the dataset of batches from number `start` on, shared by replicas."""
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    share = batch_size // replicas
    # Refuses too few pairs at once.
    retriever.shuffled_batches(len(trained), batch_size, seed)

    def rows_of(indices: np.ndarray) -> dict[str, np.ndarray]:
        return {**take(indices), "weights": np.ones(len(indices), np.float32)}

    def of_worker(context: tf.distribute.InputContext | None) -> tf.data.Dataset:
        number, of = (
            (context.input_pipeline_id, context.num_input_pipelines)
            if context
            else (0, 1)
        )
        own = range(number * replicas // of, (number + 1) * replicas // of)

        def shares() -> Iterator[dict[str, np.ndarray]]:
            for batch in retriever.shuffled_batches(
                len(trained), batch_size, seed, start
            ):
                for replica in own:
                    rows = batch[replica * share : (replica + 1) * share]
                    yield rows_of(trained[rows])

        signature = {
            name: tf.TensorSpec((share, *values.shape[1:]), values.dtype)
            for name, values in rows_of(trained[:1]).items()
        }
        return tf.data.Dataset.from_generator(
            shares, output_signature=signature
        ).prefetch(2)

    if not tf.distribute.has_strategy():
        return of_worker(None)
    return strategy.distribute_datasets_from_function(of_worker)


def _backup(config: ml_collections.ConfigDict, context: contexts.Context) -> Any:
    """Returns the directory of backups of a run with these settings and inputs."""
    settings = json.dumps([workdir.plain(config), context.inputs], sort_keys=True)
    name = hashlib.sha256(settings.encode()).hexdigest()[:16]
    return context.run_dir / private_training.BACKUP / name


def _epochs_in(backup: pathlib.Path) -> int:
    """Returns the epochs that the chief's backup has finished.

    Keras restores the number, and starts the dataset at its beginning.
    """
    latest = tf.train.latest_checkpoint(os.fspath(backup / "chief"))
    epochs = 0
    if latest is not None:
        name = "ckpt_saved_epoch/.ATTRIBUTES/VARIABLE_VALUE"
        epochs = int(tf.train.load_variable(latest, name)) + 1
    return workers.chiefs_number(epochs)


def check_rows(rows_at_a_time: int, rows: int) -> None:
    """Refuses a `rows_at_a_time` that does not divide a replica's rows."""
    if rows_at_a_time and rows % rows_at_a_time:
        raise validation.InputError(
            f"rows_at_a_time is {rows_at_a_time}, which does not divide the "
            f"{rows} rows of a replica. Give a divisor of {rows}, or 0 for all."
        )


@contextlib.contextmanager
def _empty(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes an empty directory for the owner alone; removes it at the end."""
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(mode=0o700, parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)

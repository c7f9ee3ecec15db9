"""Public pretraining: its steps, and their loop with measurements and states.

Each replica has its share of a batch's pseudo-queries and of its texts. The contrastive
task compares a pseudo-query with the documents of all replicas. Gradients are summed
before the optimizer sees them, so its clipping and statistics use the whole batch's
gradient: a run takes the same steps on any number of replicas and resumes on any other.

Every worker saves states, but only the chief's are in the run's directory; on restart
the chief sends what it restored to all.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf
from absl import logging

from tfdpsq import privacy
from tfdpsq.data import atomic_write
from tfdpsq.generator import T5QueryGenerator, pretraining
from tfdpsq.generator.schedules import WarmupCosine
from tfdpsq.layers.seeded_dropout import dropout_seed, seed_of_step
from tfdpsq.privacy import workers
from tfdpsq.privacy.batches import require_same_rows
from tfdpsq.retriever.losses import Embeddings, batch_losses
from tfdpsq.run.core import workdir
from tfdpsq.run.core.progress import Progress
from tfdpsq.run.devices import replicas, strategy


def train(
    config: ml_collections.ConfigDict,
    own: pathlib.Path,
    model: T5QueryGenerator,
    batches: pretraining.Batches,
    watched: Mapping[str, np.ndarray],
    progress: Progress,
    devices: strategy.Devices,
) -> dict[str, Any]:
    """Trains to the last step, from the state in `own` if there is one.

    `model` was made in the scope of `devices`; `watched` are held-out rows, as
    `pretraining.Watcher` takes.

    Returns:
      "steps" at which something was measured, mean "losses" since the measurement
      before, "watched" values, and "hours" taken.

    Raises:
      Preempted: the process, or another worker, received a signal to end.
    """
    with devices.scope(), devices.notice.training() as asked:
        optimizer = _optimizer(
            config.optimizer, config.learning_rate, config.warmup, config.steps
        )
        optimizer.build(model.trainable_variables)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        manager = tf.train.CheckpointManager(checkpoint, str(own / "weights"), 1)
        record: dict[str, Any] = {
            "steps": [],
            "losses": [],
            "watched": [],
            "hours": 0.0,
        }
        sums: dict[str, float] = {}
        count = 0
        # Restores even from none: it makes a variable, which all workers must do.
        restored = checkpoint.restore(manager.latest_checkpoint)
        if manager.latest_checkpoint:
            restored.assert_consumed()
            found = int(optimizer.iterations.numpy())
            record = workdir.read_json(
                own / f"record-{found}.json",
                **{"sums": dict, "count": int, "hours": (int, float)},
                **dict.fromkeys(("steps", "losses", "watched"), list),
            )
            sums, count = record.pop("sums"), record.pop("count")
            logging.info("going on after step %d of %d", found, config.steps)
        workers.copy_from_chief([*model.variables, *optimizer.variables])
        start = int(optimizer.iterations.numpy())
        step = replicas.whole_batches(
            make_step(config, model, optimizer), config.jit_compile, deal
        )
        watcher = pretraining.Watcher(model, watched)
        began = time.monotonic()
        before = record["hours"]
        for done in range(start + 1, config.steps + 1):
            batch = batches(done - 1)
            require_same_rows(batch)
            losses = step(batch)
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + value
            count += 1
            progress(done, sum(losses.values()))
            last = done == config.steps
            record["hours"] = before + (time.monotonic() - began) / 3600
            if done % config.watch_every == 0 or last:
                record["steps"].append(done)
                means = {name: round(v / count, 4) for name, v in sums.items()}
                record["losses"].append(means)
                seen = {name: round(v, 4) for name, v in watcher().items()}
                record["watched"].append(seen)
                logging.info("step %d of %d: %s; %s", done, config.steps, means, seen)
                sums, count = {}, 0
            ends = any(workers.any_of(asked())) and not last
            if done % config.save_every == 0 or last or ends:
                _save(own, manager, {**record, "sums": sums, "count": count}, done)
            if ends:
                raise privacy.Preempted(done)
    return record


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

    def contrast(queries: Any, documents: Any, keys: Any) -> Any:
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

    def step(batch: Any) -> Any:
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


def _optimizer(
    name: str, learning_rate: float, warmup: int, steps: int
) -> tf.keras.optimizers.Optimizer:
    schedule = WarmupCosine(learning_rate, warmup, steps)
    if name == "adam":
        return tf.keras.optimizers.Adam(
            schedule, global_clipnorm=1.0, jit_compile=False
        )
    return tf.keras.optimizers.Adafactor(
        schedule, relative_step=False, jit_compile=False
    )


def _save(own: pathlib.Path, manager: Any, record: dict, done: int) -> None:
    """Saves the record before the checkpoint, so none is ever without its record."""
    atomic_write(own / f"record-{done}.json", json.dumps(record))
    manager.save(checkpoint_number=done)
    for path in own.glob("record-*.json"):
        if path.name != f"record-{done}.json":
            os.remove(path)

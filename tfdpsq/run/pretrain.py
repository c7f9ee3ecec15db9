"""Pretrain a T5 on public documents alone.

    python -m tfdpsq.run.pretrain --workdir=DIR --config.data=BEIR

Every batch has pseudo-queries to write and a contrastive task for the encoder (see
`generator.pretraining`). The stage trains on no query and reads none of yours
("pydocs" compares further `texts` with its queries, to refuse them). Writes the model
with its vocabulary, and `pretraining.json` with the losses, those of held-out documents
too. To resume, start the same command again; it goes on from the last backup to the
same weights, also under another `--strategy` (with dropout, a TPU draws other masks).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf
from absl import logging

from tfdpsq import privacy, validation
from tfdpsq.data import (
    Document,
    RowStore,
    Tokenizer,
    train_vocabulary,
    write_rows,
)
from tfdpsq.data.beir import read_documents
from tfdpsq.data.io import atomic_write, write_json
from tfdpsq.data.pydocs import public_documents
from tfdpsq.data.recurrence import Sentences, refuse_recurring
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator import (
    Preprocessor,
    T5QueryGenerator,
    checkpoints,
    pretraining,
)
from tfdpsq.generator.model import PREPROCESSOR_FILE
from tfdpsq.layers import T5Config
from tfdpsq.privacy import workers
from tfdpsq.run.core import (
    acting,
    command,
    outputs,
    releases,
    settings,
    sources,
    workdir,
)
from tfdpsq.run.core.progress import Progress, log_directory
from tfdpsq.run.devices import strategy
from tfdpsq.run.training import private_training, training_settings

CURVE_FILE = "pretraining.json"

SETTINGS: settings.Declaration = {
    # A BEIR directory, of which only the documents are read, or "pydocs".
    "data": settings.Text(sources.PYDOCS, required=True),
    # Further public documents: JSON Lines files with "_id" and "text".
    "texts": settings.Several((), settings.Text("", required=True)),
    "vocabulary": settings.Text(""),  # "" learns one of `t5.vocabulary_size`
    "init": settings.Text(""),  # any T5 checkpoint to go on from
    "t5": training_settings.t5_settings(8192, 3, 4, 192, 512, 48, "1.0", 0.0),
    **training_settings.length_settings(112, 28),
    "pseudo_queries_per_passage": settings.Integer(2, 1, 10000),
    "batch_size": settings.Integer(48),
    "contrast_weight": settings.Number(1.0, 0, 1e6),
    "scale": settings.Number(20.0, 0, 1e6, low_open=True),
    "steps": settings.Integer(7000, 1, settings.STEPS),
    "optimizer": settings.Text("adafactor", ("adafactor", "adam")),
    "learning_rate": settings.Number(2e-2, 0, 1e3, low_open=True),
    "warmup": settings.Integer(200, 1, settings.STEPS),
    # One document in this many is held out, and measured by.
    "held_out_one_in": settings.Integer(50, 1),
    "held_out_rows": settings.Integer(480),
    # Steps of an epoch, which ends with the measurement and a backup.
    "save_every": settings.Integer(250, 1, settings.STEPS),
    **training_settings.dtype_settings(),
    "stored": settings.Text("float16", ("float32", "float16", "bfloat16")),
    "jit_compile": settings.Flag(False),
    "seed": settings.Integer(0, 0, settings.SEED),
}


ACTING = (
    acting.Only("t5.*", "init", ("",)),
    acting.Only("scale", "contrast_weight"),
)


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings: those of the T5 that is shipped."""
    return settings.default_config(SETTINGS)


def run(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    devices: strategy.Devices = strategy.DEFAULT,
) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, replicas that do not divide a batch, or a corpus too
        small for the vocabulary.
      Preempted: the process, or another worker, received a signal to end.
      DataError: malformed documents; for "pydocs", further text with one of the
        benchmark's queries. Names file and line.
    """
    acting.check(config, SETTINGS, ACTING)
    holds = "a T5 of public documents"
    output = releases.Output(directory, releases.PUBLIC, holds)
    _check(config)
    devices.require_share(config.batch_size, "batch_size")
    beir = sources.open_beir(config.data)
    for path in config.texts:
        problem = sources.why_not_public(path)
        if problem:  # weights trained on it would carry no certificate of it
            raise validation.InputError(
                f"texts has {path}, which {problem}. Give public documents; those of a "
                "BEIR directory as data."
            )
        if config.data == sources.PYDOCS:
            refuse_recurring(path, Sentences(beir.queries().values()))
    inputs = {
        "documents": sources.documents_fingerprint(
            documents_of(config.data, config.texts)
        )
    }
    if config.vocabulary:
        tokenizer = Tokenizer(config.vocabulary)
        inputs["vocabulary"] = tokenizer.fingerprint
        sources.require_own_vocabulary(
            "vocabulary", config.vocabulary, tokenizer, config.init
        )
    if config.init:
        sources.require_public(
            config.init,
            sources.certificate_of_model(config.init),
            "what is trained on from it is not public",
        )
        inputs["init"] = workdir.model_fingerprint(checkpoints.locate(config.init))
    own = directory.parent / f".{directory.name}.state"
    stage = workdir.run_stage(
        output,
        config,
        inputs,
        lambda out: _make(config, devices, out, own, inputs, log_directory(directory)),
    )
    shutil.rmtree(own, ignore_errors=True)
    outputs.settle(directory)
    return stage


def usable(
    config: ml_collections.ConfigDict, devices: strategy.Devices
) -> strategy.Devices:
    """Returns a job's devices, or one where the replicas do not divide a batch."""
    if config.batch_size % devices.replicas:
        return dataclasses.replace(devices, strategy=None)
    return devices


def _check(config: Any) -> None:
    if config.steps % _of_epoch(config):
        raise validation.InputError(
            f"steps is {config.steps}, no multiple of save_every, {config.save_every}. "
            "Change one of them."
        )


def _of_epoch(config: Any) -> int:
    """Returns the steps of an epoch."""
    return min(config.save_every, config.steps)


def documents_of(data: str, texts: Iterable[str]) -> Iterator[Document]:
    """Yields the documents of a corpus, then those of the files `texts`."""
    yield from public_documents(sources.open_beir(data))
    for path in texts:
        yield from read_documents(pathlib.Path(path), may_be_empty=True)


def _make(
    config: Any, devices: Any, out: pathlib.Path, own: Any, inputs: dict, logs: Any
) -> dict:
    _open_state(own, config, inputs)
    vocabulary = _vocabulary(config, own)
    tokenizer = Tokenizer(vocabulary)
    tf.keras.utils.set_random_seed(config.seed)
    with devices.scope():
        if config.init:
            model = T5QueryGenerator.from_preset(
                config.init, config.dtype, soft_prompt=0
            )
        else:
            model = T5QueryGenerator(T5Config(**config.t5), config.dtype)
    tokenizer.require_embeddings(model.config.vocabulary_size)
    stores = _rows(config, own, tokenizer)
    batches = pretraining.Batches(stores["pairs"], config.batch_size, config.seed)
    held = stores["held_out"]
    # Spread over the corpus, which may be sorted.
    count = max(min(len(held), config.held_out_rows), devices.replicas)
    at = np.linspace(0, len(held) - 1, count).astype(np.int64)
    size = min(config.batch_size, count - count % devices.replicas)
    held_out = tf.data.Dataset.from_tensor_slices(held.take(at)).batch(
        size, drop_remainder=True
    )
    rows = config.batch_size
    tokens = rows * (config.document_length + config.query_length)
    bar = Progress(logs, config.steps, True, rows, tokens, config.save_every)
    with bar, devices.scope(), devices.notice.training() as asked:
        trainer = pretraining.Pretrainer(
            model, config.contrast_weight, config.scale, config.seed
        )
        trainer.compile(_optimizer(config), jit_compile=config.jit_compile)
        recording = _Record(config, own, bar, asked)
        path = str(own / "backup")
        backup = tf.keras.callbacks.BackupAndRestore(path, delete_checkpoint=False)
        every = _of_epoch(config)
        first = pretraining.epochs_in(path) * every
        trainer.fit(
            batches.dataset(first, config.steps),
            epochs=config.steps // every,
            steps_per_epoch=every,
            validation_data=held_out,
            verbose=0,
            # An epoch is recorded before it is in a backup.
            callbacks=[recording, backup],
        )
    record = recording.record
    if not all(np.isfinite(v.numpy()).all() for v in model.trainable_variables):
        raise validation.InputError(
            "training diverged: the weights hold NaN or infinity. Lower "
            f"learning_rate (now {config.learning_rate})."
        )
    checkpoints.save(
        out, model.config, model.backbone, dtype=config.stored, vocabulary=vocabulary
    )
    preprocessor = Preprocessor(
        tokenizer,
        document_length=config.document_length,
        query_length=config.query_length,
    )
    write_json(out / PREPROCESSOR_FILE, preprocessor.get_config())
    record["rows"] = {name: len(store) for name, store in stores.items()}
    record["inputs"] = inputs
    record["config"] = workdir.plain(config)
    atomic_write(out / CURVE_FILE, json.dumps(record, indent=1) + "\n")
    return {"held_out": record["held_out"][-1]}


def _optimizer(config: Any) -> tf.keras.optimizers.Optimizer:
    rate = private_training.cosine_decay(
        config.learning_rate, config.warmup, config.steps
    )
    if config.optimizer == "adam":
        return tf.keras.optimizers.Adam(rate, global_clipnorm=1.0, jit_compile=False)
    return tf.keras.optimizers.Adafactor(rate, relative_step=False, jit_compile=False)


class _Record(tf.keras.callbacks.Callback):
    """Records each epoch's losses; ends at a preemption notice.

    `record` has the "steps" of the epochs' ends, their mean "losses", and what
    "held_out" rows measure.
    """

    def __init__(self, config: Any, own: Any, bar: Any, asked: Any):
        super().__init__()
        self._steps, self._every = config.steps, _of_epoch(config)
        self._bar, self._asked = bar, asked
        self._file = own / "record.json"
        self._epoch: int | None = None
        self.record: dict[str, Any] = {"steps": [], "losses": [], "held_out": []}
        if self._file.is_file():
            self.record = workdir.read_json(self._file)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._epoch is None:
            if epoch:
                done = epoch * self._every
                logging.info("going on after step %d of %d", done, self._steps)
            # The backup may be older than the last measurements.
            self.record = {name: rows[:epoch] for name, rows in self.record.items()}
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done = (self._epoch or 0) * self._every + int(batch) + 1
        self._bar(done, logs["loss"])
        if any(workers.any_of(self._asked())) and done < self._steps:
            raise privacy.Preempted(done)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        done = (epoch + 1) * self._every
        means = {name: round(float(value), 4) for name, value in logs.items()}
        measured = {
            name.removeprefix("val_"): means.pop(name)
            for name in list(means)
            if name.startswith("val_")
        }
        for name, value in zip(self.record, (done, means, measured)):
            self.record[name].append(value)
        logging.info("step %d: %s; held out %s", done, means, measured)
        atomic_write(self._file, json.dumps(self.record))


def _open_state(own: pathlib.Path, config: Any, inputs: dict) -> None:
    """Opens an unfinished run's state, if it has the same config and documents."""
    wanted = {"config": workdir.plain(config), "inputs": inputs}
    path = own / "run.json"
    if path.is_file():
        changed = workdir.differences(workdir.read_json(path), wanted, own)
        if changed:
            raise validation.InputError(
                f"{own} holds an unfinished run with another config or other "
                f"documents ({'; '.join(changed)}). Move it away to start again."
            )
    own.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps({**wanted, **workdir.written_in(own)}))


def _vocabulary(config: Any, own: pathlib.Path) -> pathlib.Path:
    if config.vocabulary or config.init:
        return sources.vocabulary_file(config.vocabulary, config.init)
    path = own / VOCABULARY_FILE
    if not path.is_file():
        train_vocabulary(
            (document.content for document in documents_of(config.data, config.texts)),
            config.t5.vocabulary_size,
            path,
        )
    return path


def _rows(config: Any, own: pathlib.Path, tokenizer: Tokenizer) -> dict[str, RowStore]:
    def documents(held_out: bool) -> Iterator[Document]:
        return (
            document
            for document in documents_of(config.data, config.texts)
            if pretraining.is_held_out(document.id, config.held_out_one_in) == held_out
        )

    def pairs(held_out: bool, **shares: Any) -> Any:
        return pretraining.pair_rows(
            documents(held_out),
            tokenizer,
            (config.document_length, config.query_length),
            config.pseudo_queries_per_passage,
            config.seed,
            **shares,
        )

    stores = {}
    for name, chunks in (
        ("pairs", pairs(False)),
        ("held_out", pairs(True, whole=0.0, bare=0.0)),
    ):
        path = own / "rows" / name
        if not path.is_dir():
            # The contrastive task needs at least two rows.
            first = list(itertools.islice(chunks, 1))
            count = len(next(iter(first[0].values()))) if first else 0
            if count < 2:
                raise validation.InputError(
                    f"{config.data} gives {count} rows of {name}; pretraining needs "
                    "hundreds of documents with sentences. Give more text (or, for "
                    f"held_out, lower held_out_one_in, now {config.held_out_one_in})."
                )
            write_rows(path, itertools.chain(first, chunks))
        stores[name] = RowStore(path)
    return stores


if __name__ == "__main__":
    command.main(run, strategy.STRATEGIES)

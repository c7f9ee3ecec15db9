"""Pretrain a T5 on public documents alone.

    tfdpsq pretrain --workdir=DIR --config.data=BEIR

Every batch has pseudo-queries to write and a contrastive task for the encoder (see
`generator.pretraining`); no query is read. Writes the model with its vocabulary, and
`pretraining.json` with the losses. A killed run goes on from its last backup to the
same weights, also under another `--strategy` (with dropout, a TPU draws other masks).
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tqdm

from tfdpsq.data import Document, RowStore, Tokenizer, train_vocabulary, write_rows
from tfdpsq.data.io import write_json
from tfdpsq.data.pydocs import public_documents
from tfdpsq.data.texts import documents_fingerprint
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator import Preprocessor, T5QueryGenerator, checkpoints, pretraining
from tfdpsq.generator.model import PREPROCESSOR_FILE
from tfdpsq.layers import T5Config
from tfdpsq.run.common import training
from tfdpsq.run.common.kinds import Corpus, File, Generator
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import nested, path, setting
from tfdpsq.validation import InputError

CURVE_FILE = "pretraining.json"
_MEASURED = 480  # held-out rows


class Pretrain(Stage):
    """Trains a T5 on pseudo-queries of public documents."""

    name = "pretrain"
    strategies = training.STRATEGIES

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `pretrain`: those of the T5 that is shipped."""

        data: str = path(Corpus, "pydocs")
        init: str = path(Generator, "", help="a T5 to go on from")
        vocabulary: str = path(File, "", when={"init": ("",)}, help='"" learns one')
        t5: Any = nested(
            training.T5Settings,
            vocabulary_size=8192,
            num_layers=3,
            num_heads=4,
            hidden_dim=192,
            intermediate_dim=512,
            key_value_dim=48,
            version="1.0",
            dropout=0.0,
            when={"init": ("",)},
        )
        document_length: int = setting(112, ge=2, le=10**6, help="tokens, end included")
        query_length: int = setting(28, ge=2, le=10**6)
        pseudo_queries_per_passage: int = setting(2, ge=1, le=10_000)
        batch_size: int = setting(48, ge=2)
        steps: int = setting(7000, ge=1, le=10**9)
        learning_rate: float = setting(2e-2, gt=0, le=1e3)
        warmup: int = setting(200, ge=1, le=10**9)
        held_out_one_in: int = setting(50, ge=1, help="documents, to measure by")
        save_every: int = setting(250, ge=1, le=10**9, help="steps, and to measure")
        dtype: str = setting("float32", choices=training.DTYPES)
        stored: str = setting("float16", choices=("float32", "float16", "bfloat16"))
        jit_compile: bool = setting(False)
        seed: int = setting(0, ge=0, le=settings.SEED)

    def check(self, s: Settings, given: Given) -> None:
        """Refuses what is not public: the weights would carry no certificate of it."""
        for name, one in given.each():
            if one.privacy > Privacy.PUBLIC:
                raise InputError(
                    f"{name} is {one.path}, which private queries had a part in. Give "
                    "what is public."
                )

    def also(self, c: Context) -> dict[str, str]:
        """All documents, without where they are."""
        return {"documents": documents_fingerprint(_documents(c))}

    def run(self, c: Context) -> dict[str, Any]:
        """Trains, and writes the model and its losses."""
        assert c.devices is not None
        s = c.settings
        c.devices.require_share(s.batch_size)
        backup = training.open_backup(c, s)
        tokenizer = _tokenizer(c, backup.folder)
        stores = {
            # Held-out rows are of the one kind that is measured.
            name: _rows(c, backup.folder / name, tokenizer, name == "held_out", shares)
            for name, shares in (("pairs", {}), ("held_out", {"whole": 0, "bare": 0}))
        }
        tf.keras.utils.set_random_seed(s.seed)
        with c.scope():
            if c.given["init"] is not None:
                init = c.given["init"].path
                model = T5QueryGenerator.from_preset(init, s.dtype, soft_prompt=0)
            else:
                model = T5QueryGenerator(T5Config(**vars(s.t5)), s.dtype)
        tokenizer.require_embeddings(model.config.vocabulary_size)
        curve = _fit(c, backup, model, stores["pairs"], stores["held_out"])
        training.require_finite(model, s)
        checkpoints.save(
            c.out, model.config, model.backbone, dtype=s.stored, vocabulary=tokenizer
        )
        lengths = {n: getattr(s, n) for n in ("document_length", "query_length")}
        own_texts = Preprocessor(tokenizer, **lengths)
        write_json(c.out / PREPROCESSOR_FILE, own_texts.get_config())
        rows = {name: len(store) for name, store in stores.items()}
        write_json(c.out / CURVE_FILE, {"curve": curve, "rows": rows, **c.provenance})
        return curve[-1]


def _documents(c: Context) -> Iterator[Document]:
    return public_documents(c.given["data"].beir())


def _tokenizer(c: Context, own: pathlib.Path) -> Tokenizer:
    """Returns the vocabulary: of `init`, the one given, or one of these documents."""
    if c.given["init"] is not None or c.given["vocabulary"] is not None:
        return training.tokenizer_of(c)
    file = own / VOCABULARY_FILE
    if not file.is_file():
        texts = (document.content for document in _documents(c))
        train_vocabulary(texts, c.settings.t5.vocabulary_size, file)
    return Tokenizer(file)


def _rows(
    c: Context, path: pathlib.Path, tokenizer: Tokenizer, held_out: bool, shares: Any
) -> RowStore:
    """Returns the rows of documents to train on, or of those that are held out."""
    s = c.settings
    if not path.is_dir():
        chunks = pretraining.pair_rows(
            (
                one
                for one in tqdm.tqdm(_documents(c), path.name, unit=" documents")
                if pretraining.is_held_out(one.id, s.held_out_one_in) == held_out
            ),
            tokenizer,
            (s.document_length, s.query_length),
            s.pseudo_queries_per_passage,
            s.seed,
            **shares,
        )
        first = next(chunks, {"document_key": ()})
        if len(first["document_key"]) < 2:  # which the contrastive task needs
            raise InputError(
                f"{s.data} gives no rows of {path.name}. Give hundreds of documents "
                f"with sentences, or lower held_out_one_in, now {s.held_out_one_in}."
            )
        write_rows(path, itertools.chain([first], chunks))
    return RowStore(path)


def _fit(
    c: Context, backup: training.Backup, model: Any, rows: RowStore, held_out: RowStore
) -> list[dict[str, float]]:
    """Trains from the last backup, if there is one; returns the epochs' losses."""
    assert c.devices is not None
    s, replicas = c.settings, c.devices.replicas
    # Spread over the corpus, which may be sorted.
    count = max(min(len(held_out), _MEASURED), replicas)
    measured = held_out.take(np.linspace(0, len(held_out) - 1, count).astype(np.int64))
    size = min(s.batch_size, count - count % replicas)
    curve = backup.folder / "curve.csv"
    rate = training.learning_rate(s.learning_rate, "cosine", s.steps, s.warmup)
    with c.scope():
        optimizer = tf.keras.optimizers.Adafactor(
            rate, relative_step=False, jit_compile=False
        )
        trainer = pretraining.Pretrainer(model, seed=s.seed)
        trainer.compile(optimizer, jit_compile=s.jit_compile)
        batches = pretraining.Batches(rows, s.batch_size, s.seed)
        training.fit(
            c,
            s,
            trainer,
            batches.dataset(backup.done, s.steps),
            backup,
            [tf.keras.callbacks.CSVLogger(str(curve), append=True)],
            validation_data=tf.data.Dataset.from_tensor_slices(measured).batch(
                size, drop_remainder=True
            ),
        )
    return _curve(curve, backup.per_epoch, s.steps)


def _curve(file: pathlib.Path, every: int, steps: int) -> list[dict[str, float]]:
    """Returns each epoch's last step and losses; of a repeated epoch, the last ones."""
    with open(file) as lines:
        epochs = {int(row.pop("epoch")): row for row in csv.DictReader(lines)}
    return [
        {"step": min((epoch + 1) * every, steps)}
        | {name: round(float(value), 4) for name, value in row.items()}
        for epoch, row in sorted(epochs.items())
    ]


STAGE = Pretrain()

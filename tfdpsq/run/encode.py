"""Stage `encode`: embed a corpus with a retriever.

    python -m tfdpsq.run.encode --config=configs/encode.py --workdir=DIR

Writes `documents/`, embeddings and ids in shards that are searched off the disk (see
`retriever.DocumentIndex`): for `evaluate` (`indexes`), or to `index` more documents
with (`base`).

The corpus is cut into shards of `shard_documents`, which several commands can share
(`--num_shards=4 --shard_index=0`, ...), or workers of Apache Beam (`--beam
--runner=...`); see `sharded_stages`. The embeddings are the same, whoever made what.

Documents are public, so their embeddings cost no privacy; but what private queries made
of the retriever shows in them. They carry the retriever's certificate.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import retriever, validation
from tfdpsq.data import Tokenizer
from tfdpsq.data.shards import ShardDirectory, ShardWriter
from tfdpsq.data.unique_ids import SeenTexts
from tfdpsq.privacy import read_certificate
from tfdpsq.run import (
    command,
    corpus_shards,
    pass_progress,
    passes,
    private_training,
    sharded_stages,
    sources,
    train_retriever,
    workdir,
)

DOCUMENTS = "documents"
_VECTORS, _IDS = "npy", "jsonl"


def default_config() -> ml_collections.ConfigDict:
    """The stage's settings."""
    return ml_collections.ConfigDict(
        {
            "retriever": "",
            "vocabulary": "",
            "corpus": sources.PYDOCS,
            "batch_size": 128,
            # Documents of a shard at most: what one process does at a time, and what
            # is in memory.
            "shard_documents": 65_536,
            "jit_compile": False,
        }
    )


def run(
    config: ml_collections.ConfigDict,
    directory: sharded_stages.Place,
    launch: passes.Launch = passes.ALONE,
) -> dict[str, Any] | None:
    """Runs the stage into `directory` unless it is finished there.

    Args:
      config: the settings.
      directory: where the output goes: a local path, or one of another file system.
      launch: which shards this process does.

    Returns:
      As `sharded_stages.run_stage`.

    Raises:
      InputError: bad settings, no retriever, or a vocabulary that is not its own.
      DataError: malformed data.
    """
    inputs = check(config)

    def merge(out: pathlib.Path, shards: ShardDirectory) -> dict[str, Any]:
        model, tokenizer, maker = load(config.retriever, config.vocabulary)
        index = retriever.DocumentIndex.create(
            out / DOCUMENTS, maker, model.config.embedding_dim
        )
        add_shards(index, shards)
        write_certificate(out, config.retriever)
        return {"documents": index.size}

    return run_pass("encode", config, inputs, directory, merge, launch)


def check(config: ml_collections.ConfigDict) -> dict[str, str]:
    """Fingerprints of retriever and vocabulary, which must fit.

    Args:
      config: of this stage, or of `index`.

    Raises:
      InputError: bad settings, no retriever, or a vocabulary that is not its own.
    """
    validation.positive_integer("batch_size", config.batch_size)
    validation.positive_integer("shard_documents", config.shard_documents)
    if not config.retriever or not config.vocabulary:
        raise validation.InputError(
            f"retriever is {config.retriever!r} and vocabulary {config.vocabulary!r}. "
            "Give what train_retriever wrote, and the SentencePiece file it used."
        )
    tokenizer = Tokenizer(sources.fetched(config.vocabulary))
    path = sources.fetched(config.retriever)
    inputs = {
        "retriever": workdir.stage_fingerprint(path),
        "vocabulary": tokenizer.fingerprint,
    }
    used = workdir.read_json(pathlib.Path(path) / workdir.STAGE_FILE)
    if used["inputs"]["vocabulary"] != tokenizer.fingerprint:
        raise validation.InputError(
            f"vocabulary is {config.vocabulary}, which is not what {config.retriever} "
            "was trained with. Give the SentencePiece file that it was."
        )
    return inputs


def run_pass(
    name: str,
    config: ml_collections.ConfigDict,
    inputs: dict[str, str],
    directory: sharded_stages.Place,
    merge: sharded_stages.Merge,
    launch: passes.Launch,
    base: str = "",
) -> dict[str, Any] | None:
    """Embeds a corpus by shards; for this stage and `index`.

    Args:
      name: of the stage.
      config: its settings.
      inputs: fingerprints of all it reads but the corpus.
      directory: as for `run`.
      merge: as for `sharded_stages.run_stage`.
      launch: as for `run`.
      base: what `index` wrote and whose documents are left out, or "".

    Returns:
      As `sharded_stages.run_stage`.
    """
    corpus = corpus_shards.cut(
        config.corpus,
        0,
        config.shard_documents,
        sharded_stages.pass_directory(directory),
    )
    start = functools.partial(
        start_worker,
        config.retriever,
        config.vocabulary,
        config.batch_size,
        config.jit_compile,
        corpus,
        base,
        pass_progress.log_of(sharded_stages.pass_directory(directory)),
    )
    return sharded_stages.run_stage(
        directory,
        config,
        {**inputs, "corpus": corpus.plan.fingerprint},
        passes.Work(name, corpus.count, start),
        merge,
        launch,
        beside={
            corpus_shards.PLAN_FILE: corpus.plan.to_json(),
            **sharded_stages.guarantee(certificate_of(config.retriever)),
        },
    )


def start_worker(
    path: str,
    vocabulary: str,
    batch_size: int,
    jit_compile: bool,
    corpus: corpus_shards.CorpusShards,
    base: str,
    logs: pathlib.Path | None,
) -> passes.MakeShard:
    """Loads the retriever; returns what embeds a shard's documents.

    Args:
      path: the retriever.
      vocabulary: its SentencePiece file.
      batch_size: as in the config.
      jit_compile: as in the config.
      corpus: the documents of every shard.
      base: what `index` wrote and whose documents are left out, or "".
      logs: where rates go.

    Raises:
      InputError: a base made by another retriever.
      DataError: a damaged base.
    """
    model, tokenizer, maker = load(path, vocabulary)
    embedder = retriever.Embedder(model, tokenizer, "document", batch_size, jit_compile)
    known = SeenTexts()
    if base:
        held = pathlib.Path(sources.fetched(base)) / DOCUMENTS
        for identifier in retriever.DocumentIndex(held, maker).ids():
            known.add(identifier)

    def make(index: int, out: ShardWriter) -> None:
        ids: list[str] = []

        def contents() -> Iterator[str]:
            for document in corpus.read(index):
                if document.id not in known:
                    ids.append(document.id)
                    yield document.content

        vectors = np.empty([corpus.size(index), model.config.embedding_dim], np.float32)
        count = 0
        at = index, corpus.count
        with pass_progress.PassProgress(
            logs, "documents", at, corpus.size(index), corpus.first(index)
        ) as progress:
            for window in embedder.windows(contents(), progress.add):
                vectors[count : count + len(window)] = window
                count += len(window)
        _require_finite(ids, vectors[:count])
        with tf.io.gfile.GFile(out.path(_VECTORS), "wb") as file:
            np.save(file, vectors[:count])
        with tf.io.gfile.GFile(out.path(_IDS), "wb") as file:
            file.write("".join(json.dumps(name) + "\n" for name in ids).encode())
        out.count = count

    return make


def add_shards(index: retriever.DocumentIndex, shards: ShardDirectory) -> None:
    """Adds what `start_worker` made to an index, one shard in memory at a time.

    Raises:
      InputError: an id that is there already.
      DamagedShard: a shard is not what it was when it was made.
    """
    for number in range(shards.spec.shards):
        with shards.reading(number) as mark:
            with tf.io.gfile.GFile(shards.path(number, _IDS), "rb") as file:
                ids = [json.loads(line) for line in file.read().splitlines()]
            with tf.io.gfile.GFile(shards.path(number, _VECTORS), "rb") as file:
                vectors = np.load(file)
            if mark.count:
                index.add(ids, vectors)


def load(path: str, vocabulary: str) -> tuple[retriever.TwoTower, Tokenizer, str]:
    """A retriever, its tokenizer, and the fingerprint of its document tower.

    Raises:
      InputError: the vocabulary has pieces that the retriever does not know.
    """
    model = retriever.load(pathlib.Path(sources.fetched(path)) / train_retriever.MODEL)
    tokenizer = Tokenizer(sources.fetched(vocabulary))
    tokenizer.require_embeddings(model.config.t5.vocabulary_size)
    maker = retriever.encoder_fingerprint(model, tokenizer.fingerprint)
    return model, tokenizer, maker


def write_certificate(out: pathlib.Path, path: str) -> None:
    """Puts a retriever's certificate beside what it embedded.

    Args:
      out: where to.
      path: the retriever.
    """
    private_training.write_certificate(out, certificate_of(path))


def certificate_of(path: str) -> dict[str, Any] | None:
    """A retriever's certificate; `None` for one made from public documents alone.

    Args:
      path: the retriever.
    """
    return read_certificate(sources.fetched(path))


def _require_finite(ids: list[str], vectors: np.ndarray) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise validation.InputError(
            f"the embedding of {ids[bad[0]]!r} is not finite: the retriever is broken. "
            "Train it again."
        )


if __name__ == "__main__":
    command.main(run, sharded=True)

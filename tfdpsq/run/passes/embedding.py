"""Embeds a corpus, or queries, by shards, for the stages `encode` and `index`."""

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
from tfdpsq.privacy import read_certificate
from tfdpsq.retriever.store import encoder_fingerprint
from tfdpsq.run.core import layout, releases, settings, sources, workdir
from tfdpsq.run.devices import strategy
from tfdpsq.run.passes import (
    corpus_shards,
    pass_progress,
    passes,
    query_sets,
    sharded_stages,
)
from tfdpsq.run.passes.shards import ShardDirectory, ShardWriter
from tfdpsq.run.training import training_settings

DOCUMENTS = "documents"
QUERIES = "queries"
_KINDS = {DOCUMENTS: "document", QUERIES: "query"}
_VECTORS, _IDS = "npy", "jsonl"


def declared() -> dict[str, settings.Setting]:
    """Settings shared by the stages that embed documents."""
    return {
        "retriever": settings.Text(""),
        "corpus": settings.Text(sources.PYDOCS, required=True),
        # Texts at a time, at most; see `retriever.Embedder`.
        "batch_size": settings.Integer(128),
        # Most documents (or queries) of a shard, which one process holds in memory.
        "shard_documents": settings.Integer(65_536),
        "jit_compile": settings.Flag(False),
        **training_settings.dtype_settings(),
    }


def check(path: str) -> dict[str, str]:
    """Returns the fingerprint of a retriever, as inputs of a stage.

    Raises:
      InputError: no retriever at `path`.
    """
    here = pathlib.Path(sources.fetched(path)) if path else None
    if here is None or not (here / layout.RETRIEVER_MODEL).is_dir():
        raise validation.InputError(
            f"retriever is {path!r}, where there is none. Give what train_retriever "
            "wrote."
        )
    return {"retriever": workdir.stage_fingerprint(here)}


def run_pass(
    name: str,
    config: ml_collections.ConfigDict,
    inputs: dict[str, str],
    output: releases.Output,
    merge: sharded_stages.Merge,
    launch: passes.Launch,
    base: str = "",
    asked: query_sets.QuerySet | None = None,
) -> dict[str, Any] | None:
    """Embeds a corpus, or queries, by shards.

    `inputs` are fingerprints of all it reads except the corpus. `base` is an output of
    `index` whose documents are left out; `asked` are queries to embed instead.

    Returns:
      As `sharded_stages.run_stage`.
    """
    place, keeps = sharded_stages.pass_directory(output.place), True
    if asked is None:
        corpus = corpus_shards.cut(config.corpus, 0, config.shard_documents, place)
        inputs = {**inputs, "corpus": corpus.plan.fingerprint}
        certificate = certificate_of(config.retriever)
    else:
        # The plan holds plain hashes of the whole file. Where one split of it was
        # declared public, the others may be private: every command plans again.
        keeps = asked.private or asked.judged is None
        corpus = corpus_shards.cut_file(asked.file, 0, config.shard_documents, place)
        inputs = {**inputs, "queries": asked.fingerprint}
        certificate = asked.certificate
    start = functools.partial(
        start_worker,
        config.retriever,
        config.batch_size,
        config.jit_compile,
        config.dtype,
        corpus,
        base,
        pass_progress.log_of(place),
        asked,
    )
    return sharded_stages.run_stage(
        output,
        config,
        inputs,
        passes.Work(name, corpus.count, start),
        merge,
        launch,
        also_keeps={
            **({corpus_shards.PLAN_FILE: corpus.plan.to_json()} if keeps else {}),
            **sharded_stages.guarantee(certificate),
        },
    )


def output_of(
    directory: sharded_stages.Place,
    path: str,
    certificate: dict[str, Any] | None,
    *made_from: str,
) -> releases.Output:
    """Returns the output for embeddings of public texts, which `made_from` has."""
    holds = "embeddings by a retriever that private queries had an unprotected part in"
    for texts in made_from:
        if texts and releases.stated(texts) == releases.PRIVATE:
            holds = f"embeddings of texts in {texts}, whose guarantee is 'private'"
    return releases.Output(
        directory,
        releases.guarantee_of(certificate, sources.fetched(path), *made_from),
        holds,
    )


def start_worker(
    path: str,
    batch_size: int,
    jit_compile: bool,
    dtype: str,
    corpus: corpus_shards.CorpusShards,
    base: str,
    logs: pathlib.Path | None,
    asked: query_sets.QuerySet | None = None,
) -> passes.MakeShard:
    """Loads the retriever; returns a function that embeds a shard's texts.

    Leaves out the documents in `base`, an output of `index`. `asked` are the queries in
    the file of `corpus`, `None` for documents; `logs` is the directory for rates.

    Raises:
      InputError: a base made by another retriever.
      DataError: a damaged base.
    """
    texts = DOCUMENTS if asked is None else QUERIES
    with strategy.here():
        model, maker = load(path, texts, dtype)
        kind = _KINDS[texts]
        embedder = retriever.Embedder(model, kind, batch_size, jit_compile)
    judged = None if asked is None else query_sets.judged_in(asked)
    known: set[str] = set()
    if base:
        held = pathlib.Path(sources.fetched(base)) / DOCUMENTS
        for identifier in retriever.VectorStore(held, maker).ids():
            known.add(identifier)

    def make(index: int, out: ShardWriter) -> None:
        ids: list[str] = []

        def contents() -> Iterator[tuple[str, str]]:
            for text in corpus.read(index):
                wanted = judged is None or text.id in judged
                if wanted and text.id not in known:
                    yield text.id, text.content if asked is None else text.text

        parts = [np.zeros([0, model.config.embedding_dim], np.float32)]
        at = index, corpus.count
        with pass_progress.PassProgress(
            logs, texts, at, corpus.size(index), corpus.first(index)
        ) as progress:
            for names, some in embedder.chunks(contents(), done=progress.add):
                ids += names
                parts.append(some)
        vectors = np.concatenate(parts)
        _require_finite(ids, vectors)
        with tf.io.gfile.GFile(out.path(_VECTORS), "wb") as file:
            np.save(file, vectors)
        with tf.io.gfile.GFile(out.path(_IDS), "wb") as file:
            file.write("".join(json.dumps(name) + "\n" for name in ids).encode())
        out.count = len(ids)

    return make


def read(shards: ShardDirectory) -> Iterator[tuple[list[str], np.ndarray]]:
    """Yields ids and embeddings of the finished shards, one in memory at a time.

    Raises:
      DamagedShard: a shard was changed after it was made.
    """
    for number in range(shards.spec.shards):
        with shards.reading(number) as mark:
            with tf.io.gfile.GFile(shards.path(number, _IDS), "rb") as file:
                ids = [json.loads(line) for line in file.read().splitlines()]
            with tf.io.gfile.GFile(shards.path(number, _VECTORS), "rb") as file:
                vectors = np.load(file)
            if mark.count:
                yield ids, vectors


def load(
    path: str, texts: str = DOCUMENTS, dtype: str = settings.FLOAT32
) -> tuple[retriever.TwoTower, str]:
    """Loads a retriever, and returns the fingerprint of one of its towers with it.

    `texts` are those that the tower embeds: "documents" or "queries"; `dtype` is
    described at `training_settings.dtype_settings`, and part of the fingerprint.
    """
    directory = pathlib.Path(sources.fetched(path)) / layout.RETRIEVER_MODEL
    model = retriever.load(directory, dtype)
    return model, encoder_fingerprint(model, _KINDS[texts])


def require_dtype(name: str, path: str, dtype: str) -> None:
    """Refuses embeddings that were computed in another precision.

    `path` is an output of `encode` or `index`, and the value of the setting `name`;
    `dtype` is what the stage embeds further texts in.
    """
    config = workdir.read_json(pathlib.Path(path) / workdir.STAGE_FILE)["config"]
    computed_in = config.get("dtype", settings.FLOAT32)
    if computed_in != dtype:
        raise validation.InputError(
            f"{name} is {path}, whose embeddings were computed in {computed_in!r}, but "
            f"dtype is {dtype!r}: they are not compared with each other. Set dtype to "
            f"{computed_in!r}, or embed the documents again."
        )


def certificate_of(path: str) -> dict[str, Any] | None:
    """Returns a retriever's certificate; `None` for one from public data alone."""
    return read_certificate(sources.fetched(path))


def _require_finite(ids: list[str], vectors: np.ndarray) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise validation.InputError(
            f"the embedding of {ids[bad[0]]!r} is not finite: the retriever is broken. "
            "Train it again."
        )

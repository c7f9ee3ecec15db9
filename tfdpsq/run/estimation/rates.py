"""Throughput of one device at the work of a job: measured here, or from a log.

Measures the code that runs: `synthesize`, `encode_texts`, the retriever's step, a
search; `step` measures fine-tuning. Weights are random, and nothing private is read.
A random generator rarely ends a query before its last token, so the length of queries
is an argument.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence

import ml_collections
import numpy as np

from tfdpsq import retriever, validation
from tfdpsq.data import Document, SyntheticQuery, Tokenizer, write_synthetic
from tfdpsq.generator import (
    QueryLikelihood,
    SamplingConfig,
    SynthesisConfig,
    Synthesizer,
    T5QueryGenerator,
)
from tfdpsq.layers import T5Config
from tfdpsq.run.core import layout, point_log, sources
from tfdpsq.run.estimation.costs import Rates
from tfdpsq.run.estimation.step import in_turns
from tfdpsq.run.training import plain_training, training_settings

# Words of a query, and batches, where pairs are scored.
_QUERY_WORDS, _SCORED_BATCHES = 8, 8
# Documents used in the measurements.
_SAMPLED = 4096
# Fewest batches of queries that are written after the first.
_BATCHES = 2
_DISK = 64 << 20
# Field of a log, prefixes of the stage's name, the rate.
_LOGGED = (
    ("examples_per_second", ("generator", "audited"), "examples"),
    ("queries_per_second", ("",), "queries"),
    ("documents_per_second", ("",), "documents"),
    ("steps_per_second", ("retriever",), "retriever_steps"),
)


def synthesis(
    config: ml_collections.ConfigDict,
    shape: T5Config,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    tokens: tuple[int, int],
    seconds: float,
) -> dict[str, float]:
    """Measures stage synthesize: "queries" a second, and bytes of one in a set.

    `documents` are repeated; `tokens` are the most of a document, and of a query.
    """
    settings = SynthesisConfig(
        samples_per_document=config.samples_per_document,
        document_length=min(config.document_length, tokens[0]),
        query_length=min(config.query_length, tokens[1]),
        batch_size=config.batch_size,
        seed=config.seed,
        sampling=SamplingConfig(config.temperature, config.top_k or None, config.top_p),
    )
    model = T5QueryGenerator(shape, config.dtype)
    writer = Synthesizer(model, tokenizer, settings, config.jit_compile)
    batches: list[tuple[float, int]] = []  # when it was written, how many queries

    def on_batch(queries: int, _: int) -> None:
        batches.append((time.perf_counter(), queries))
        if len(batches) > _BATCHES and batches[-1][0] - batches[0][0] > seconds:
            raise _EnoughError

    with contextlib.suppress(_EnoughError):
        for _ in writer.queries(_again(documents), 0, on_batch):
            pass
    # The first batch includes tracing.
    elapsed = batches[-1][0] - batches[0][0]
    return {
        "queries": sum(queries for _, queries in batches[1:]) / elapsed,
        "query_bytes": _bytes_of_a_query(documents, settings.query_length),
    }


def encoding(
    model: retriever.TwoTower,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    batch: int,
    seconds: float,
) -> dict[str, float]:
    """Measures an encoder: "documents" a second, and seconds to "start" a pass."""

    def took(count: int) -> float:
        began = time.perf_counter()
        retriever.encode_texts(
            model,
            (d.content for d in itertools.islice(_again(documents), count)),
            tokenizer,
            "document",
            batch,
            progress=False,
        )
        return time.perf_counter() - began

    alone = took(batch)  # mostly tracing
    count, more = batch, 0.0
    while more - alone < seconds and count < 1 << 20:
        count *= 2
        more = took(count)
    rate = (count - batch) / max(more - alone, 1e-9)
    return {"documents": rate, "start": max(alone - batch / rate, 0.0)}


def reranking(
    shape: T5Config,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    tokens: tuple[int, int],
    batch: int,
    seconds: float,
) -> dict[str, float]:
    """Measures reranking in `evaluate`: "likelihoods" a second.

    Each pair has a document of its own, as where few queries share one. `tokens` are
    the most of a document, and of a query, which is `_QUERY_WORDS` words of its
    document. Several batches, as pairs are dealt to batches by length.
    """
    scorer = QueryLikelihood(
        T5QueryGenerator(shape), tokenizer, *tokens, batch_size=batch
    )
    pairs = [
        (one.content, " ".join(one.content.split()[:_QUERY_WORDS]))
        for one in itertools.islice(_again(documents), _SCORED_BATCHES * batch)
    ]
    (each,) = in_turns([lambda: list(scorer.scores(pairs))], seconds)
    return {"likelihoods": len(pairs) / each}


def retriever_training(
    config: ml_collections.ConfigDict, model: retriever.TwoTower, seconds: float
) -> dict[str, float]:
    """Measures a retriever's training: "retriever_steps" a second."""
    rows = config.batch_size
    random = np.random.default_rng(0)
    batch: dict[str, np.ndarray] = {
        "weights": np.ones([rows], np.float32),
        "document_key": np.arange(rows, dtype=np.int64),
        "positive_keys": np.arange(rows, dtype=np.int64)[:, np.newaxis],
    }
    for text in ("document", "query"):
        length = config[f"{text}_length"]
        batch[f"{text}_ids"] = random.integers(
            3, model.config.t5.vocabulary_size, [rows, length]
        ).astype(np.int32)
        batch[f"{text}_lengths"] = np.full([rows], length, np.int32)
    step = plain_training.make_step(
        model,
        config.learning_rate,
        config.rows_at_a_time,
        config.jit_compile,
        optimizer=config.optimizer,
        **training_settings.optimizer_options(config),
    )
    (each,) = in_turns([lambda: step(batch)], seconds)
    return {"retriever_steps": 1 / each}


def machine(dimension: int, index: str, seconds: float) -> dict[str, float]:
    """Measures searching, in "products", and writing, in "bytes" a second.

    `dimension` is that of an embedding, `index` a kind of `retriever.search`.
    """
    random = np.random.default_rng(0)
    documents, queries = 50_000, 200
    vectors = random.normal(size=[documents, dimension]).astype(np.float32)
    ids = list(map(str, range(documents)))
    (each,) = in_turns(
        [lambda: retriever.search(vectors[:queries], vectors, ids, 100, index)], seconds
    )
    content = bytes(_DISK)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with open(os.path.join(folder, "written"), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        took = time.perf_counter() - began
    return {"products": documents * queries * dimension / each, "bytes": _DISK / took}


def from_logs(workdir: pathlib.Path) -> dict[str, float]:
    """Reads rates from the logs of a job, from the last point of each kind.

    Stages are recognized by name. A generator's rate is that of whole steps, which
    include `step`.

    Raises:
      InputError: there are no logs.
    """
    found: dict[str, float] = {}
    private = workdir if workdir.name == "private" else workdir / "private"
    paths = sorted((private / layout.LOGS).glob(f"*/{point_log.FILE_NAME}"))
    for path in paths:
        for point in point_log.read_points(path):  # the last one counts
            for field, prefixes, rate in _LOGGED:
                if field in point and path.parent.name.startswith(prefixes):
                    found[rate] = float(point[field])
    if "examples" in found:
        found["step"] = 0.0
    if not found:
        raise validation.InputError(
            f"{private / layout.LOGS} has no log with a rate. Give the workdir of a "
            "job that ran without strict mode, which keeps none."
        )
    return found


def sample(corpus: str) -> list[Document]:
    """Returns some documents of a corpus, evenly spread.

    Raises:
      InputError: it has none.
    """
    found = list(sources.sampled_documents(corpus, _SAMPLED))
    if not found:
        raise validation.InputError(f"{corpus} has no documents. Give another corpus.")
    return found


def known(found: dict[str, float]) -> Rates:
    """Returns rates by name; missing ones are 0, which means unknown.

    Raises:
      InputError: a rate that is negative or not finite.
    """
    for name, rate in found.items():
        validation.in_range(name, rate, 0.0, math.inf, high_open=True)
    return Rates(**found)


def _again(documents: Sequence[Document]) -> Iterator[Document]:
    """Repeats documents without end, under new ids."""
    for turn in itertools.count():
        for document in documents:
            yield dataclasses.replace(document, id=f"{document.id}#{turn}")


def _bytes_of_a_query(documents: Sequence[Document], tokens: int) -> float:
    """Writes a small set, and returns the bytes of a query and its document.

    A query is assumed to have three words for every four tokens.
    """
    words = max(1, 3 * tokens // 4)
    rows = [
        SyntheticQuery(
            query_id=f"genQ{number}",
            query=" ".join(document.content.split()[:words]),
            document_id=document.id,
            document=document.content,
            sample=0,
        )
        for number, document in enumerate(documents)
    ]
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "set"
        write_synthetic(out, iter(rows), provenance={}, certificate=None, shards=1)
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return size / len(rows)


class _EnoughError(Exception):
    """Raised to end a measurement."""

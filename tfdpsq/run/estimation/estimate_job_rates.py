"""How fast one device does the work of a job: measured here, or read off a log.

What is measured is what runs: the step of `privacy.make_logical_step`, `synthesize`,
`encode_texts`, the retriever's step, a search. Weights are random, of the shape that is
meant, and nothing private is read. Such a generator hardly ever ends a query before its
last token, which is why the length of queries is an argument.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import privacy, retriever, validation
from tfdpsq.data import Document, SyntheticQuery, Tokenizer, write_synthetic
from tfdpsq.generator import (
    SamplingConfig,
    SynthesisConfig,
    Synthesizer,
    T5QueryGenerator,
)
from tfdpsq.layers import T5Config
from tfdpsq.run.core import point_log, progress, sources
from tfdpsq.run.estimation.estimate_job_costs import Rates
from tfdpsq.run.training import plain_training, private_training, starting_model

# Documents that are taken for the measurements.
_SAMPLED = 4096
# Microbatches of the two steps whose difference is what a microbatch takes.
_FEW, _MORE = 1, 3
# Batches of queries that are written at least, beside the first.
_BATCHES = 2
_DISK = 64 << 20
# Field of a log, what the stage is called by, the rate that it is.
_LOGGED = (
    ("examples_per_second", ("generator", "audited"), "examples"),
    ("queries_per_second", ("",), "queries"),
    ("documents_per_second", ("",), "documents"),
    ("steps_per_second", ("retriever",), "retriever_steps"),
)


def training(
    config: ml_collections.ConfigDict, shape: T5Config, seconds: float
) -> dict[str, float]:
    """Rates of fine-tuning: "examples" a second, and seconds of a "step" besides.

    One step has a microbatch, another one three; their difference is two microbatches.

    Args:
      config: of stage finetune.
      shape: of the generator.
      seconds: about how long to measure.

    Raises:
      InputError: settings that training would refuse, too.
    """
    size = validation.positive_integer("microbatch_size", config.microbatch_size)
    rows = _MORE * size
    n = max(config.n_bound, 100 * config.batch_size)
    spec = private_training.spec_of(config, private_training.Units(n, None, False))
    # The noise's deviation costs nothing; finding it does.
    plan = privacy.PrivacyPlan(spec, rows, 1.0 if spec.private else 0.0)
    model = T5QueryGenerator(
        shape, config.dtype, config.rematerialize, config.soft_prompt.length
    )
    starting_model.choose_trained(model, config)
    optimizer = privacy.make_optimizer(
        plan, config.learning_rate, config.optimizer, config.engine
    )
    step = tf.function(
        privacy.make_logical_step(
            lambda part: model.per_example_losses(part, training=True),
            model.trainable_variables,
            optimizer,
            size,
            layers=[model],
        ),
        jit_compile=config.jit_compile,
        autograph=False,
    )
    batch = {"weights": tf.ones([rows])}
    random = np.random.default_rng(0)
    for text in ("document", "query"):
        length = config[f"{text}_length"]
        ids = random.integers(3, shape.vocabulary_size, [rows, length])
        batch[f"{text}_ids"] = tf.constant(ids, tf.int32)
        batch[f"{text}_lengths"] = tf.fill([rows], length)

    def run(microbatches: int) -> Callable[[], Any]:
        return lambda: float(step(batch, tf.constant(microbatches * size)))

    few, more = _in_turns([run(_FEW), run(_MORE)], seconds)
    each = max(more - few, 1e-9) / (_MORE - _FEW)
    return {"examples": size / each, "step": max(few - _FEW * each, 0.0)}


def synthesis(
    config: ml_collections.ConfigDict,
    shape: T5Config,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    tokens: tuple[int, int],
    seconds: float,
) -> dict[str, float]:
    """Rates of stage synthesize: "queries" a second, and bytes of one in a set.

    Args:
      config: of stage synthesize.
      shape: of the generator.
      tokenizer: a vocabulary that fits into the shape's.
      documents: to write for, again and again.
      tokens: of a document, at most, and of a query.
      seconds: about how long to measure.
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
    # The first one was traced, too.
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
    """Rates of an encoder: "documents" a second, and seconds until a pass is under way.

    Args:
      model: the retriever.
      tokenizer: its vocabulary.
      documents: to encode, again and again.
      batch: documents at a time.
      seconds: about how long to measure.
    """

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

    alone = took(batch)  # nearly all of it is tracing
    count, more = batch, 0.0
    while more - alone < seconds and count < 1 << 20:
        count *= 2
        more = took(count)
    rate = (count - batch) / max(more - alone, 1e-9)
    return {"documents": rate, "start": max(alone - batch / rate, 0.0)}


def retriever_training(
    config: ml_collections.ConfigDict, model: retriever.TwoTower, seconds: float
) -> dict[str, float]:
    """Rate of a retriever's training: "retriever_steps" a second.

    Args:
      config: of stage train_retriever.
      model: the retriever.
      seconds: about how long to measure.
    """
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
        model, config.learning_rate, config.rows_at_a_time, config.jit_compile
    )
    (each,) = _in_turns([lambda: step(batch)], seconds)
    return {"retriever_steps": 1 / each}


def machine(dimension: int, index: str, seconds: float) -> dict[str, float]:
    """Rates of searching, in "products", and of writing, in "bytes".

    Args:
      dimension: of an embedding.
      index: kind of search, see `retriever.search`.
      seconds: about how long to measure each.
    """
    random = np.random.default_rng(0)
    documents, queries = 50_000, 200
    vectors = random.normal(size=[documents, dimension]).astype(np.float32)
    ids = list(map(str, range(documents)))
    (each,) = _in_turns(
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
    """Rates that the logs of a job tell, by the last point of each kind.

    What stages are follows from what the job calls them. A generator's rate is that of
    whole steps of its batch, which `step` is then a part of.

    Args:
      workdir: of the job, or the directory that holds the stages' `private`.

    Raises:
      InputError: there are no logs.
    """
    found: dict[str, float] = {}
    private = workdir if workdir.name == "private" else workdir / "private"
    paths = sorted((private / progress.LOGS).glob(f"*/{point_log.FILE_NAME}"))
    for path in paths:
        for point in point_log.read_points(path):  # the last one counts
            for field, prefixes, rate in _LOGGED:
                if field in point and path.parent.name.startswith(prefixes):
                    found[rate] = float(point[field])
    if "examples" in found:
        found["step"] = 0.0
    if not found:
        raise validation.InputError(
            f"{private / progress.LOGS} has no log with a rate. Give the workdir of a "
            "job that ran; in strict mode none is kept."
        )
    return found


def sample(corpus: str) -> list[Document]:
    """Some documents of a corpus, evenly spread.

    Raises:
      InputError: it has none.
    """
    found = list(sources.sampled_documents(corpus, _SAMPLED))
    if not found:
        raise validation.InputError(f"{corpus} has no documents. Give another corpus.")
    return found


def known(found: dict[str, float]) -> Rates:
    """Rates by name, each of which must be a finite number that is not negative.

    Raises:
      InputError: one is not.
    """
    for name, rate in found.items():
        validation.in_range(name, rate, 0.0, math.inf, high_open=True)
    return Rates(**{field.name: found.get(field.name, 0.0) for field in _fields()})


def _fields():
    return dataclasses.fields(Rates)


def _again(documents: Sequence[Document]) -> Iterator[Document]:
    """Documents without end, none with the id of another."""
    for turn in itertools.count():
        for document in documents:
            yield dataclasses.replace(document, id=f"{document.id}#{turn}")


def _in_turns(runs: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Mean seconds of each, which take turns, at least twice, until time is up."""
    for run in runs:  # traces, allocates
        run()
    totals = [0.0] * len(runs)
    turns, began = 0, time.perf_counter()
    while turns < 2 or time.perf_counter() - began < seconds:
        for number, run in enumerate(runs):
            start = time.perf_counter()
            run()
            totals[number] += time.perf_counter() - start
        turns += 1
    return [total / turns for total in totals]


def _bytes_of_a_query(documents: Sequence[Document], tokens: int) -> float:
    """What a query and its document take in a set, by a small one that is written.

    A query is taken to have three words for every four tokens.
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

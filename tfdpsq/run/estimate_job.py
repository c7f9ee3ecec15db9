r"""Estimate the hours, memory, disk and money of a whole job, before it starts.

    python -m tfdpsq.run.estimate_job --config=configs/quickstart.py
    python -m tfdpsq.run.estimate_job --config=configs/finetune.py --size=small \
        --pairs=533000 --epochs=30 --documents=10000000 --workers=16 --price=2.5

The config is a pipeline's, or of stage finetune; then all other stages have their
defaults. The estimate covers fine-tuning, synthesis, the retrievers' training,
encoding, indexing, evaluation and reranking. Their rates are measured on this machine,
for some seconds each, with random weights of the given shape; or taken from elsewhere:

    --from_logs=WORKDIR          the logs of a job that ran
    --examples_per_second=X      of fine-tuning, on one device; also
                                 --queries_per_second, --documents_per_second,
                                 --retriever_steps_per_second and
                                 --likelihoods_per_second
    --size, --retriever_size     T5 1.1 of this size, whatever the config says
    --pairs, --epochs            instead of the config's steps
    --documents, --queries       size of the corpus, and number of searches; by default
                                 those of the config's data
    --document_tokens, --query_tokens   maximum lengths; by default as the config cuts
    --replicas, --workers        devices that share a step, and a corpus
    --scaling=0.9                share of a device's speed that each of several reaches
    --price=2.5                  of a device for an hour
    --seconds=5                  duration of each measurement
    --memory=False               without the memory of fine-tuning
    --json=FILE                  the same as JSON

Every assumption is printed. The parts of `configs/quickstart.py`, on the idle machine
of the estimate, took 1.07 to 1.14 times as long; on a busy one, expect a factor of two.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import ml_collections
import tensorflow as tf
from absl import flags

from tfdpsq import retriever, validation
from tfdpsq.data import Tokenizer
from tfdpsq.layers import T5Config
from tfdpsq.layers.t5 import SIZES
from tfdpsq.run import finetune, pipeline, synthesize
from tfdpsq.run.core import (
    command,
    outputs,
    pipeline_checks,
    releases,
    settings,
    sources,
    streams,
)
from tfdpsq.run.estimation import finetuning, rates, step
from tfdpsq.run.estimation.costs import (
    Devices,
    Estimate,
    Work,
    as_json,
    as_text,
    parts_of,
)
from tfdpsq.run.training import private_training

# A vocabulary that fits every published T5, for measurements.
_VOCABULARY = "t5_tiny_pydocs"
_GIVEN = {
    "examples": "examples_per_second",
    "queries": "queries_per_second",
    "documents": "documents_per_second",
    "retriever_steps": "retriever_steps_per_second",
    "likelihoods": "likelihoods_per_second",
}
# Of a rate: below it, a part of a job would take longer than a float can say.
_SLOWEST = 1e-9


@dataclasses.dataclass(frozen=True)
class Options:
    """Flags in addition to the config; see the module. 0 and "" are not given."""

    size: str = ""
    retriever_size: str = ""
    pairs: int = 0
    epochs: float = 0.0
    documents: int = 0
    queries: int = 0
    document_tokens: int = 0
    query_tokens: int = 0
    seconds: float = 5.0
    from_logs: str = ""
    memory: bool = True
    rates: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the values that nothing else checks."""
        if bool(self.pairs) != bool(self.epochs):
            raise validation.InputError(
                f"pairs is {self.pairs} and epochs {self.epochs}: steps follow from "
                "both. Give both, or neither to take the config's steps."
            )
        for name in ("size", "retriever_size"):
            if getattr(self, name):
                validation.one_of(name, getattr(self, name), SIZES)
        for name in ("pairs", "documents", "queries"):
            validation.in_range(name, getattr(self, name), 0, 1e15)
        validation.in_range("epochs", self.epochs, 0, 1e6)
        for name in ("document_tokens", "query_tokens"):
            validation.in_range(name, getattr(self, name), 0, 1e6)
        validation.in_range("seconds", self.seconds, 0, 86_400, low_open=True)
        for rate, value in self.rates.items():
            validation.in_range(_GIVEN[rate], value, _SLOWEST, 1e15)


def job_config(config: Any) -> ml_collections.ConfigDict:
    """Returns the pipeline's config given, or the default one with that finetune stage.

    Raises:
      InputError: it is neither a pipeline's nor one of stage finetune, or a stage
        would refuse a setting.
    """
    stage = finetuning.stage_config(config, finetune.SETTINGS)
    if "finetune" in config:
        if not finetuning.is_of_stage(config, "pipeline", pipeline.SETTINGS):
            raise finetuning.other_stage(config)
        settings.check(config, pipeline.SETTINGS)
        private_training.check_steps(config.retriever, before="retriever.")
        return config.copy_and_resolve_references()
    job = pipeline.default_config()
    job.finetune = stage
    job.init = stage.init
    job.epsilons = (float(stage.epsilon),)
    job.direct_epsilons = ()
    for name in ("synthesize", "retriever"):
        job[name].document_length = stage.document_length
        job[name].query_length = stage.query_length
    return job


def work_of(
    config: ml_collections.ConfigDict, options: Options, dimension: int
) -> Work:
    """Returns the amount of work of a pipeline's config.

    Raises:
      InputError: no data to count the documents of.
    """
    stage = config.finetune
    steps, retriever_steps = stage.steps, config.retriever.steps
    if options.pairs:
        steps = math.ceil(options.pairs * options.epochs / stage.batch_size)
    elif stage.epochs:
        pairs = sources.load_source(config.data, stage.split, stage.unit).count
        steps = math.ceil(pairs * stage.epochs / stage.batch_size)
    validation.in_range("pairs * epochs / batch_size", steps, 0, settings.STEPS)
    documents, queries = options.documents, options.queries
    if not (documents and queries):
        beir = sources.open_beir(config.data)
        documents = documents or sum(1 for _ in beir.documents())
        queries = queries or len(beir.qrels(config.evaluate.split))
    written_for = _documents_written_for(config, options, documents)
    made = written_for * config.synthesize.samples_per_document
    if config.retriever.epochs:  # of a synthetic set, the largest that is trained on
        rows = made * config.retriever.epochs
        retriever_steps = math.ceil(rows / config.retriever.batch_size)
    # Public-only, original pairs, and one for each synthetic set.
    retrievers = 2 + len(config.epsilons)
    return Work(
        generators=len(config.epsilons),
        steps=steps,
        batch=stage.batch_size,
        microbatch=min(stage.microbatch_size, stage.batch_size),
        synthetic_documents=written_for,
        samples=config.synthesize.samples_per_document,
        retrievers=retrievers,
        retriever_steps=retriever_steps,
        documents=documents,
        queries=queries,
        systems=1
        + retrievers
        + len(config.direct_epsilons)
        + bool(config.embeddings)
        + len(config.adapter_epsilons),
        rerankers=len(pipeline_checks.rerankers_of(config)),
        reranked=min(config.evaluate.rerank.depth, documents),
        # At most a public pair for each document.
        fitted=min(config.evaluate.rerank.fit_queries, documents)
        if config.fit_rerank and config.rerank
        else 0,
        dimension=dimension,
    )


def _documents_written_for(
    config: ml_collections.ConfigDict, options: Options, documents: int
) -> int:
    """Returns how many documents a generator writes queries for.

    `documents` are in the corpus. Of "train", those of a positive training pair count;
    where neither corpus nor pairs are at hand, every pair has a document of its own.
    """
    stage = config.synthesize.copy_and_resolve_references()
    if stage.documents == "train" and options.documents and options.pairs:
        documents = min(documents, options.pairs)
    elif stage.documents == "train":
        with stage.unlocked():
            stage.corpus = config.data
        documents = min(documents, len(synthesize.training_documents(stage)))
    return min(documents, stage.max_documents or documents)


def run(
    config: ml_collections.ConfigDict, options: Options, devices: Devices
) -> Estimate:
    """Estimates a job.

    Raises:
      InputError: settings that a stage would refuse, no data, or no log with a rate.
    """
    process = step.resident_bytes()
    job = config.copy_and_resolve_references()
    with job.unlocked():
        job.finetune.init = "" if options.size else job.init
    if options.size:
        shape = T5Config.from_size(options.size, "1.1")
        job.finetune.t5.update(dataclasses.asdict(shape))
    else:
        shape = step.shape_of(job.finetune)
    encoder = job.retriever_init or ("" if options.size else job.init)
    if options.retriever_size:
        tower = T5Config.from_size(options.retriever_size, "1.1")
    else:
        tower = _shape(encoder, job.retriever)
    work = work_of(job, options, job.retriever.embedding_dim)
    found = dict(options.rates)
    origin = dict.fromkeys(found, "given")
    if options.from_logs:
        logged = rates.from_logs(pathlib.Path(options.from_logs))
        found = {**logged, **found}
        origin = {name: origin.get(name, options.from_logs) for name in found}
    memory = None
    if options.memory or "examples" not in found:
        fine = finetuning.estimate(
            job.finetune,
            shape,
            process=process,
            measure="examples" not in found,
            time="examples" not in found,
            seconds=options.seconds,
        )
        memory = fine.peak if options.memory else None
        if fine.measured is not None:
            found.update(examples=fine.measured.examples, step=fine.measured.seconds)
        elif "examples" not in found:
            rows = fine.microbatches * job.finetune.microbatch_size
            found["examples"] = rows / (fine.seconds or math.inf)
            origin["examples"] = "by its operations: too large to measure here"
    _measure(job, shape, tower, options, found)
    known = rates.known(found)
    assumed = _assumed(job, shape, tower, options, devices, known, origin)
    return Estimate(parts_of(work, known, devices), known, memory, assumed)


def _shape(init: str, config: ml_collections.ConfigDict) -> T5Config:
    of = ml_collections.ConfigDict({"init": init, "t5": config.t5})
    of.soft_prompt = {"length": 0}
    return step.shape_of(of)


def _with_pieces(shape: T5Config, tokenizer: Tokenizer) -> T5Config:
    """Enlarges a shape's vocabulary to that of a tokenizer it was not made for."""
    pieces = max(shape.vocabulary_size, tokenizer.vocabulary_size)
    return dataclasses.replace(shape, vocabulary_size=pieces)


def _lengths(config: ml_collections.ConfigDict, options: Options) -> tuple[int, int]:
    """Returns the most tokens of a document and of a query in a stage."""
    return (
        min(options.document_tokens or 1 << 30, config.document_length),
        min(options.query_tokens or 1 << 30, config.query_length),
    )


def _measure(
    job: ml_collections.ConfigDict,
    shape: T5Config,
    tower: T5Config,
    options: Options,
    found: dict[str, float],
) -> None:
    """Adds missing rates by measuring, one model in memory at a time."""
    needed = set(_GIVEN) - set(found)
    if not pipeline_checks.rerankers_of(job):
        needed.discard("likelihoods")
    seconds = options.seconds
    if needed & {"queries", "documents", "likelihoods"}:
        tokenizer = Tokenizer(sources.vocabulary_file("", _VOCABULARY))
        documents = rates.sample(sources.PYDOCS)
        shape, tower = (_with_pieces(one, tokenizer) for one in (shape, tower))
    if "queries" in needed:
        tokens = _lengths(job.synthesize, options)
        found.update(
            rates.synthesis(
                job.synthesize, shape, tokenizer, documents, tokens, seconds
            )
        )
        tf.keras.backend.clear_session()
    if "likelihoods" in needed:
        tokens, batch = _lengths(job.finetune, options), job.evaluate.rerank.batch_size
        found.update(
            rates.reranking(shape, tokenizer, documents, tokens, batch, seconds)
        )
        tf.keras.backend.clear_session()
    if needed & {"documents", "retriever_steps"}:
        own = job.retriever
        cut = _lengths(own, options)
        towers = retriever.RetrieverConfig(
            t5=tower,
            embedding_dim=own.embedding_dim,
            scale=own.scale,
            query_length=cut[1],
            document_length=cut[0],
            shared=own.shared,
            pooling=own.pooling,
        )
        if "documents" in needed:
            model = retriever.TwoTower(towers, dtype=job.evaluate.dtype)
            batch = job.evaluate.batch_size
            found.update(rates.encoding(model, tokenizer, documents, batch, seconds))
        if "retriever_steps" in needed:
            model = retriever.TwoTower(towers, dtype=own.dtype)
            found.update(rates.retriever_training(own, model, seconds))
        tf.keras.backend.clear_session()
    dimension, kind = job.retriever.embedding_dim, job.evaluate.index
    found.update(rates.machine(dimension, kind, min(seconds, 1.0)))


def _assumed(
    job: Any,
    shape: Any,
    tower: Any,
    options: Any,
    devices: Any,
    known: Any,
    origin: Any,
) -> list[str]:
    """Returns every assumption as a sentence."""
    document, query = _lengths(job.synthesize, options)
    of = {
        "examples": f"{known.examples:.3g} pairs a second in fine-tuning, and "
        f"{known.step:.2g} s a step besides",
        "queries": f"{known.queries:.3g} queries written a second",
        "documents": f"{known.documents:.3g} documents encoded a second",
        "retriever_steps": f"{known.retriever_steps:.3g} steps of a retriever a second",
    }
    if pipeline_checks.rerankers_of(job):
        of["likelihoods"] = f"{known.likelihoods:.3g} pairs reranked a second"
    lines = [
        f"One device does {what} ({origin.get(name, 'measured here')})."
        for name, what in of.items()
    ]
    lines += [
        f"It searches {known.products:.2g} products a second and writes "
        f"{known.bytes / 1e6:.3g} MB; tracing takes {known.start:.1f} s a stage "
        "(measured here).",
        f"The generator is a T5 of {shape.num_layers} layers, width "
        f"{shape.hidden_dim}; the retriever of {tower.num_layers}, width "
        f"{tower.hidden_dim}. Weights do not matter to speed.",
    ]
    if job.synthesize.documents == "train":
        lines.append(
            "Queries are written for the documents of training pairs alone"
            + (
                ": at most one for each of the pairs given."
                if options.documents and options.pairs
                else ", counted in the config's data."
            )
        )
    if "queries" not in origin:
        lines.append(
            f"Documents are docstrings, cut to {document} tokens, and every query has "
            f"all of {query} tokens: those that end earlier take less."
        )
    if max(devices.replicas, devices.workers) > 1:
        lines.append(
            f"{devices.replicas} replicas and {devices.workers} workers each reach "
            f"{devices.scaling:.0%} of a device's speed: given, not measured."
        )
    return [
        *lines,
        "A step computes half a microbatch more than its expected batch. Parts run one "
        "after another.",
        "Not counted: starting programs, reading and tokenising pairs, finding the "
        "noise, direct training, adapters, audits, comparing texts, waiting for "
        "machines, moving data.",
    ]


def main() -> None:
    """Parses the flags and prints the estimate."""
    config = command.config_flag("estimate_job")
    holders = {}
    for field in dataclasses.fields(Options):
        if field.name != "rates":
            define = {bool: flags.DEFINE_bool, str: flags.DEFINE_string}.get(
                type(field.default), flags.DEFINE_float
            )
            if type(field.default) is int:
                define = flags.DEFINE_integer
            holders[field.name] = define(field.name, field.default, "See --help.")
    replicas = flags.DEFINE_integer("replicas", 1, "Devices that share a step.")
    workers = flags.DEFINE_integer("workers", 1, "Devices that share a corpus.")
    scaling = flags.DEFINE_float("scaling", 1.0, "Share of speed each of several has.")
    price = flags.DEFINE_float("price", 0.0, "Of a device for an hour.")
    given = {
        rate: flags.DEFINE_float(flag, None, f"Rate of one device: {rate}.")
        for rate, flag in _GIVEN.items()
    }
    file = flags.DEFINE_string("json", None, "JSON file to write the estimate to.")

    def started() -> None:
        paths = {"json": file, "from_logs": holders["from_logs"]}
        for name, holder in paths.items():
            if holder.present:
                validation.given_path(f"--{name}", holder.value)
        options = Options(
            **{name: holder.value for name, holder in holders.items()},
            rates={
                rate: flag.value
                for rate, flag in given.items()
                if flag.value is not None
            },
        )
        devices = Devices(replicas.value, workers.value, scaling.value, price.value)
        found = run(job_config(command.given_config(config)), options, devices)
        streams.say(as_text(found, devices))
        if file.value is not None:
            result = as_json(found, devices)
            text = json.dumps(result, indent=2) + "\n"
            # It may count private queries, or come from private logs.
            holds = "an estimate from the job's own data and logs"
            outputs.write_file(file.value, text, releases.PRIVATE, holds)

    command.program(started)


if __name__ == "__main__":
    main()

"""Costs of a whole job: arithmetic on the amount of work and the rates, as a table.

Measures nothing; rates come from `rates`, or from flags.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdpsq import validation
from tfdpsq.run.core import workdir
from tfdpsq.run.core.progress import duration


@dataclasses.dataclass(frozen=True)
class Work:
    """The amount of work.

    Attributes:
      generators: number of fine-tuned generators, each of which writes a set.
      steps: of one fine-tuning.
      batch: expected pairs of a step.
      microbatch: pairs differentiated at a time.
      synthetic_documents: documents that queries are written for.
      samples: queries per document.
      retrievers: number of trained retrievers.
      retriever_steps: of each.
      documents: of the corpus, to encode, index and search.
      queries: to search for.
      systems: evaluated retrievers, each of which encodes all documents.
      rerankers: generators that order the first documents of each query.
      reranked: those documents.
      fitted: further queries, which the weight of one reranker is fitted on.
      dimension: of an embedding.

    Raises:
      InputError: a number below 0, or below 1 where it is a divisor.
    """

    generators: int = 0
    steps: int = 0
    batch: int = 1
    microbatch: int = 1
    synthetic_documents: int = 0
    samples: int = 1
    retrievers: int = 0
    retriever_steps: int = 0
    documents: int = 0
    queries: int = 0
    systems: int = 0
    rerankers: int = 0
    reranked: int = 0
    fitted: int = 0
    dimension: int = 1

    def __post_init__(self) -> None:
        """Checks every value."""
        for field in dataclasses.fields(self):
            least = 1 if field.name in ("batch", "microbatch", "dimension") else 0
            validation.in_range(field.name, getattr(self, field.name), least, 1e15)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Work of one device (a machine, a GPU, a TPU core) per second; 0 is unknown.

    Attributes:
      examples: pairs of fine-tuning, in full microbatches.
      step: seconds of a fine-tuning step in addition to its microbatches.
      queries: written.
      retriever_steps: of training a retriever.
      documents: encoded.
      likelihoods: of a query, given a document.
      products: of numbers, in a search.
      bytes: written to disk.
      query_bytes: of a query and its document in a synthetic set, on disk.
      start: seconds until a stage runs at full speed, mostly tracing.
    """

    examples: float = 0.0
    step: float = 0.0
    queries: float = 0.0
    retriever_steps: float = 0.0
    documents: float = 0.0
    likelihoods: float = 0.0
    products: float = 0.0
    bytes: float = 0.0
    query_bytes: float = 0.0
    start: float = 0.0


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a job.

    Attributes:
      replicas: devices that share a step.
      workers: devices that share a corpus.
      scaling: share of one device's speed that each of several reaches.
      price: of one device for an hour, in any currency.
    """

    replicas: int = 1
    workers: int = 1
    scaling: float = 1.0
    price: float = 0.0

    def __post_init__(self) -> None:
        """Checks every value."""
        for name in ("replicas", "workers"):
            validation.positive_integer(name, getattr(self, name))
            validation.in_range(name, getattr(self, name), 1, 1e9)
        validation.in_range("scaling", self.scaling, 0.0, 1.0, low_open=True)
        validation.in_range("price", self.price, 0.0, 1e9)

    def speed(self, devices: int) -> float:
        """Returns the speed of several devices together, relative to one."""
        return 1.0 if devices == 1 else devices * self.scaling


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of work of the job.

    Attributes:
      name: of the part.
      work: the amount, in words.
      seconds: wall time; `None` if its rate is unknown.
      devices: number in use.
      bytes: left on disk.
    """

    name: str
    work: str
    seconds: float | None
    devices: int
    bytes: float = 0.0

    @property
    def device_hours(self) -> float | None:
        """Returns the hours of all its devices together."""
        return None if self.seconds is None else self.seconds * self.devices / 3600


def parts_of(work: Work, rates: Rates, devices: Devices) -> list[Part]:
    """Returns the parts of a job, which run one after another.

    | part            | seconds                                                     |
    |-----------------|-------------------------------------------------------------|
    | finetune        | generators · steps · (step + pairs computed / examples)     |
    | synthesize      | generators · documents · samples / queries                  |
    | train_retriever | retrievers · steps / retriever_steps                        |
    | index           | documents / documents a second, and writing embeddings      |
    | evaluate        | systems · (documents + queries) / documents a second,       |
    |                 | systems · documents · queries · dimension / products        |
    | rerank          | (rerankers · queries + fitted) · reranked / likelihoods     |

    each plus `start` for every output. A Poisson batch of K pairs takes ⌈K / m⌉
    microbatches, on average half a microbatch more than B / m. Microbatches are
    divided by the replicas, corpora by the workers, each times `scaling` where there
    are several; the rest of a step is not divided.
    """
    together = devices.speed(devices.replicas)
    shared = devices.speed(devices.workers)
    microbatches = work.batch / work.microbatch + (0.5 if work.microbatch > 1 else 0.0)
    found = []
    if work.generators and work.steps:
        seconds = None
        if rates.examples:
            each = microbatches * work.microbatch / rates.examples / together
            seconds = work.generators * (work.steps * (rates.step + each) + rates.start)
        text = f"{work.steps:,} steps of {work.batch:,}"
        found.append(
            Part("finetune", _times(work.generators, text), seconds, devices.replicas)
        )
    written = work.synthetic_documents * work.samples
    if work.generators and written:
        seconds = _over(written, rates.queries * shared)
        if seconds is not None:
            seconds = work.generators * (seconds + rates.start)
        size = work.generators * written * rates.query_bytes
        text = _times(work.generators, f"{written:,} queries")
        found.append(Part("synthesize", text, seconds, devices.workers, size))
    if work.retrievers and work.retriever_steps:
        seconds = _over(work.retriever_steps, rates.retriever_steps * together)
        if seconds is not None:
            seconds = work.retrievers * (seconds + rates.start)
        text = _times(work.retrievers, f"{work.retriever_steps:,} steps")
        found.append(Part("train_retriever", text, seconds, devices.replicas))
    if work.documents:
        size = 4.0 * work.documents * work.dimension
        seconds = _over(work.documents, rates.documents * shared)
        if seconds is not None:
            seconds += rates.start + (_over(size, rates.bytes * shared) or 0.0)
        text = f"{work.documents:,} documents"
        found.append(Part("index", text, seconds, devices.workers, size))
    if work.systems and work.documents and work.queries:
        texts = work.documents + work.queries
        products = float(work.documents) * work.queries * work.dimension
        seconds = _over(texts, rates.documents * shared)
        if seconds is not None:
            seconds += (_over(products, rates.products * shared) or 0.0) + rates.start
            seconds *= work.systems
        text = f"{work.queries:,} queries among {work.documents:,} documents"
        found.append(
            Part("evaluate", _times(work.systems, text), seconds, devices.workers)
        )
    pairs = (work.rerankers * work.queries + work.fitted) * work.reranked
    if work.rerankers and pairs:
        seconds = _over(pairs, rates.likelihoods * shared)
        if seconds is not None:
            seconds += work.rerankers * rates.start
        found.append(Part("rerank", f"{pairs:,} pairs", seconds, devices.workers))
    return found


def _over(amount: float, rate: float) -> float | None:
    return amount / rate if rate else None


def _times(count: int, text: str) -> str:
    return text if count == 1 else f"{count} × {text}"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The cost of a job.

    Attributes:
      parts: of the job.
      rates: of one device.
      memory: peak bytes of fine-tuning; `None` if not requested.
      assumed: assumptions, in sentences.
    """

    parts: list[Part]
    rates: Rates
    memory: int | None
    assumed: list[str]


def as_text(found: Estimate, devices: Devices) -> str:
    """Formats the estimate as text."""
    head = f"{'part':16} {'time':>10} {'devices':>8} {'device hours':>13} {'disk':>10}"
    lines = [head + (f" {'price':>10}" if devices.price else "") + "  work"]
    hours = seconds = size = 0.0
    for part in found.parts:
        if part.seconds is not None and part.device_hours is not None:
            hours, seconds = hours + part.device_hours, seconds + part.seconds
        size += part.bytes
        lines.append(
            _line(
                part.name,
                part.seconds,
                f"{part.devices}",
                part.device_hours,
                part.bytes,
                devices,
            )
            + f"  {part.work}"
        )
    lines.append(_line("all", seconds, "", hours, size, devices))
    lines.append("")
    if found.memory is not None:
        lines.append(
            f"Fine-tuning takes {found.memory / 2**30:.1f} GiB at its peak; measuring "
            f"everything took {workdir.peak_memory_gib():.1f} GiB here."
        )
    return "\n".join([*lines, *found.assumed]) + "\n"


def _line(
    name: Any, seconds: Any, count: Any, hours: Any, size: Any, devices: Any
) -> str:
    taken = "unknown" if seconds is None else duration(seconds)
    used = "" if hours is None else f"{hours:,.2f}"
    disk = f"{size / 1e9:,.2f} GB" if size else ""
    line = f"{name:16} {taken:>10} {count:>8} {used:>13} {disk:>10}"
    if devices.price:
        line += f" {'' if hours is None else f'{hours * devices.price:,.2f}':>10}"
    return line


def as_json(found: Estimate, devices: Devices) -> dict[str, Any]:
    """Returns the estimate as JSON values."""
    parts = []
    for part in found.parts:
        hours = part.device_hours
        price = None if hours is None else hours * devices.price
        parts.append(
            {**dataclasses.asdict(part), "device_hours": hours, "price": price}
        )
    return {**dataclasses.asdict(found), "parts": parts}

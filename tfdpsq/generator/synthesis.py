"""Documents in, synthetic queries out, independent of the batching.

Every (document, sample) has its own random numbers, derived by a hash from the seed,
the document's id and the sample's number. Documents are batched with others of similar
length, but a document's padding depends on its own length alone. Its queries are
therefore the same at any batch size, in any shard, in any order. On a CPU without XLA
this holds to the last bit of every probability, because there a row is rounded
independently of the other rows (a test checks that); elsewhere it holds except for
draws within rounding of a boundary.

Synthesis reads only the trained model and public documents: by post-processing it costs
no privacy, however many queries are written.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data.records import SyntheticQuery
from tfdpsq.data.texts import Document
from tfdpsq.data.tokenization import PROMPT, Tokenizer
from tfdpsq.generator.decoder import CachedDecoder
from tfdpsq.generator.decoding import (
    ROWS_ROUNDED_ALIKE,
    decodable_logits_mask,
    generate,
)
from tfdpsq.generator.sampling import SamplingConfig
from tfdpsq.layers.replicated import Replicated

# Documents are padded to multiples of this part of `document_length`.
_WIDTHS = 8
# More samples of a document than these are decoded in several parts.
_MOST_SAMPLES = 64
# Documents wait for others of their length while at most this many batches wait.
_BATCHES_WAITING = 32


@dataclasses.dataclass(frozen=True)
class SynthesisConfig:
    """Settings of synthesis.

    Attributes:
      samples_per_document: queries per document, k.
      document_length: tokens of prompt and document that the encoder reads.
      query_length: most tokens of a query, EOS included.
      batch_size: queries decoded at a time, approximately; it changes speed and memory
        only.
      seed: any integer; public, as post-processing needs no secret.
      sampling: sampling of tokens.
      prompt: text before the document.

    Raises:
      InputError: a number below one.
    """

    samples_per_document: int = 1
    document_length: int = 384
    query_length: int = 128
    batch_size: int = 64
    seed: int = 0
    sampling: SamplingConfig = SamplingConfig()
    prompt: str = PROMPT

    def __post_init__(self) -> None:
        """Checks every value."""
        for field in (
            "samples_per_document",
            "document_length",
            "query_length",
            "batch_size",
        ):
            validation.positive_integer(field, getattr(self, field))


def row_uniforms(seed: int, document_id: str, sample: int, length: int) -> np.ndarray:
    """Draws the random numbers of one (document, sample).

    Args:
      seed: the synthesis seed.
      document_id: the document's id.
      sample: number of the sample for this document, from 0.
      length: number of positions.

    Returns:
      [length] float32 in [0, 1).
    """
    digest = hashlib.sha256(f"{seed}\0{sample}\0{document_id}".encode()).digest()
    random = np.random.default_rng(int.from_bytes(digest, "big"))
    return random.random(length, dtype=np.float32)


def synthesize(
    model: tf.keras.Model,
    tokenizer: Tokenizer,
    documents: Iterable[Document],
    config: SynthesisConfig,
    jit_compile: bool = False,
) -> Iterator[SyntheticQuery]:
    """Writes `samples_per_document` queries for each document.

    Args:
      model: a `T5QueryGenerator`; its weights are read when the first query is
        requested.
      tokenizer: the vocabulary that the model was trained with.
      documents: public documents; read as a stream, a bounded number ahead.
      config: settings.
      jit_compile: compile with XLA, once for each of up to eight lengths of document.

    Yields:
      One `SyntheticQuery` for each document and sample, in order, numbered
      `genQ0`, `genQ1`, … Its text may be empty; `write_synthetic` skips and counts
      such rows.

    Raises:
      InputError: the tokenizer does not fit the model.
    """
    yield from Synthesizer(model, tokenizer, config, jit_compile).queries(documents)


class Synthesizer:
    """A generator prepared once, to write queries for any number of parts.

    A part's queries depend on its documents alone, so parts may be written in any
    order, by any number of processes with one `Synthesizer` each.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        tokenizer: Tokenizer,
        config: SynthesisConfig,
        jit_compile: bool = False,
    ):
        """Copies the weights that the model has now.

        In a strategy's scope, which the model was made in, each replica writes the
        queries of batches of its own.

        Args:
          model: a `T5QueryGenerator`.
          tokenizer: the vocabulary that the model was trained with.
          config: settings.
          jit_compile: compile with XLA, once for each of up to eight lengths of
            document.

        Raises:
          InputError: the tokenizer does not fit the model.
        """
        self._tokenizer, self._config = tokenizer, config
        self._write, self._at_a_time = _writer(model, tokenizer, config, jit_compile)

    def queries(
        self,
        documents: Iterable[Document] | Iterable[tuple[Document, int]],
        first: int = 0,
        on_batch: Callable[[int, int], None] = lambda queries, tokens: None,
    ) -> Iterator[SyntheticQuery]:
        """Writes the queries of some documents.

        Args:
          documents: read as a stream, a bounded number ahead; each by itself, or with
            the number of its queries instead of `samples_per_document`.
          first: number of documents of the corpus before these.
          on_batch: called after every batch with its number of queries and of tokens;
            the queries are yielded later, in order.

        Yields:
          As `synthesize`, numbered as in the whole corpus.
        """
        samples, size = _batch_shape(self._config)
        every = self._config.samples_per_document
        counted = (d if isinstance(d, tuple) else (d, every) for d in documents)
        tasks = _tokenized(counted, self._tokenizer, self._config, samples, size)
        number = first * self._config.samples_per_document

        def write(batch: list[_Task]) -> None:
            tokens = self._write(batch)
            on_batch(sum(len(task.samples) for task in batch), tokens)

        for task in _bucketed(tasks, write, size * self._at_a_time):
            for sample, text in zip(task.samples, task.queries):
                yield SyntheticQuery(
                    query_id=f"genQ{number}",
                    query=" ".join(text.decode("utf-8", "replace").split()),
                    document_id=task.document.id,
                    document=task.document.content,
                    sample=sample,
                )
                number += 1


def _batch_shape(config: SynthesisConfig) -> tuple[int, int]:
    """Returns how many samples of a document decode together, and documents per batch.

    Samples share their document's keys and values. Their number depends on the number
    of samples alone, not on the batch size, and rows are filled up to a multiple of
    `ROWS_ROUNDED_ALIKE`, so that rounding is the same at all batch sizes.
    """
    samples = min(config.samples_per_document, _MOST_SAMPLES)
    multiple = ROWS_ROUNDED_ALIKE // math.gcd(ROWS_ROUNDED_ALIKE, samples)
    return samples, _next_multiple(config.batch_size // samples or 1, multiple)


def _next_multiple(number: int, divisor: int) -> int:
    return math.ceil(number / divisor) * divisor


@dataclasses.dataclass
class _Task:
    """Some samples of one document; a batch consists of tasks."""

    document: Document
    samples: range
    ids: np.ndarray  # [width] int32
    length: int
    queries: tuple[bytes, ...] = ()  # one for each sample, once written


def _tokenized(
    documents: Iterable[tuple[Document, int]],
    tokenizer: Tokenizer,
    config: SynthesisConfig,
    samples: int,
    size: int,
) -> Iterator[_Task]:
    """Yields tasks of up to `samples` samples; tokenises `size` documents at a time."""
    written = (each for each in documents if each[1])
    while chunk := list(itertools.islice(written, size)):
        ids, lengths = tokenizer.encode(
            [config.prompt + document.content for document, _ in chunk],
            config.document_length,
        )
        for (document, count), row, length in zip(chunk, ids.numpy(), lengths.numpy()):
            every = range(count)
            width = bucket_width(length, config.document_length)
            padded = np.zeros([width], np.int32)
            padded[:length] = row[:length]
            for start in every[::samples]:
                part = every[start : start + samples]
                yield _Task(document, part, padded, length)


def bucket_width(length: int, document_length: int) -> int:
    """Returns the number of tokens that a document is padded to.

    Args:
      length: its own number of tokens.
      document_length: most tokens a document can have.

    Returns:
      The next multiple of about an eighth of `document_length`, which is a multiple of
      `ROWS_ROUNDED_ALIKE` too and may exceed `document_length`.
    """
    step = _next_multiple(math.ceil(document_length / _WIDTHS), ROWS_ROUNDED_ALIKE)
    return _next_multiple(length, step)


def _bucketed(
    tasks: Iterable[_Task], write: Callable[[list[_Task]], None], size: int
) -> Iterator[_Task]:
    """Runs tasks of one width together; yields the finished tasks in their order.

    Args:
      tasks: the tasks.
      write: fills in the queries of up to `size` tasks of one width.
      size: tasks of the batches that are written at a time.
    """
    waiting: dict[int, list[_Task]] = collections.defaultdict(list)
    order: collections.deque[_Task] = collections.deque()

    def run(width: int) -> None:
        write(waiting.pop(width))

    for task in tasks:
        order.append(task)
        waiting[len(task.ids)].append(task)
        if len(waiting[len(task.ids)]) == size:
            run(len(task.ids))
        if len(order) > _BATCHES_WAITING * size and not order[0].queries:
            run(len(order[0].ids))
        while order and order[0].queries:
            yield order.popleft()
    while order:
        if not order[0].queries:
            run(len(order[0].ids))
        yield order.popleft()


def _writer(
    model: tf.keras.Model,
    tokenizer: Tokenizer,
    config: SynthesisConfig,
    jit_compile: bool,
) -> tuple[Callable[[list[_Task]], int], int]:
    """Makes the function that writes the queries of tasks of one width into them.

    The function returns the number of their tokens, without padding. The other result
    is the number of batches that it writes at a time, one for each replica.
    """
    mask = decodable_logits_mask(
        model.config.vocabulary_size,
        tokenizer.vocabulary_size,
        (tokenizer.pad_id, tokenizer.unk_id),
    )
    samples, size = _batch_shape(config)
    rows = size * samples
    decoder = CachedDecoder(model, config.query_length)
    signature = [
        tf.TensorSpec([size, None], tf.int32),
        tf.TensorSpec([size], tf.int32),
        tf.TensorSpec([rows, config.query_length], tf.float32),
    ]

    def generated(ids: Any, lengths: Any, uniforms: Any) -> Any:
        return generate(
            model,
            ids,
            lengths,
            uniforms,
            config.sampling,
            mask,
            tokenizer.eos_id,
            decoder=decoder,
        )[0]

    # One graph serves documents of any width; XLA needs a static width.
    run = Replicated(
        generated, None if jit_compile else signature, jit_compile, overlapped=True
    )

    def arguments(tasks: list[_Task]) -> tuple[np.ndarray, ...]:
        # Batch and samples are filled up, so that one shape is compiled.
        filled = tasks + tasks[-1:] * (size - len(tasks))
        uniforms = np.zeros([size, samples, config.query_length], np.float32)
        for place, task in enumerate(filled):
            for row, sample in zip(uniforms[place], task.samples):
                row[:] = row_uniforms(
                    config.seed, task.document.id, sample, config.query_length
                )
        return (
            np.stack([task.ids for task in filled]),
            np.array([task.length for task in filled], np.int32),
            uniforms.reshape(rows, -1),
        )

    def write(tasks: list[_Task]) -> int:
        batches = [tasks[at : at + size] for at in range(0, len(tasks), size)]
        tokens = 0
        for batch, ids in zip(batches, run([arguments(batch) for batch in batches])):
            texts = tokenizer.decode(ids).numpy().reshape(size, samples)
            written = ids.numpy().reshape(size, samples, -1) != tokenizer.pad_id
            for task, found, used in zip(batch, texts, written):
                task.queries = tuple(found[: len(task.samples)])
                tokens += int(used[: len(task.samples)].sum())
        return tokens

    return write, run.at_a_time

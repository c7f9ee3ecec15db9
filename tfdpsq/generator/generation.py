"""Documents in, queries out, independent of the batching.

Every (document, sample) has its own random numbers, derived by a hash from the seed,
the document's id and the sample's number. Its query is therefore the same at any batch
size, in any shard, in any order, but for draws within rounding of a boundary.

Generation reads only the trained model and public documents: by post-processing it
costs no privacy, however many queries are written, and its seed need not be secret.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdpsq.data.sets import SyntheticQuery
from tfdpsq.data.texts import Document
from tfdpsq.data.tokenization import CHUNK
from tfdpsq.generator import decoding
from tfdpsq.generator.preprocessing import Preprocessor
from tfdpsq.generator.samplers import Sampler
from tfdpsq.layers.replicated import Replicated

# Documents are padded to multiples of this number of tokens where each width is
# compiled.
_WIDTH = 48
# More samples of a document than these are decoded in several parts.
_MOST_SAMPLES = 64
# Documents are sorted by length among this many batches.
_BATCHES_READ = 32


class Request(NamedTuple):
    """Queries to write for one document.

    Attributes:
      document: it; its id decides about the random numbers.
      ids: [n] int32, its tokens without padding.
      samples: the numbers of the queries.
    """

    document: Document
    ids: np.ndarray
    samples: range


class Writer:
    """A compiled function that writes queries in batches of one shape.

    The model's weights are read at every call. In a strategy's scope, which the model
    was made in, each replica writes the queries of batches of its own.

    Attributes:
      samples: most queries of a request.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        sampler: Sampler,
        length: int,
        samples: int,
        batch_size: int,
        pieces: int,
        jit_compile: bool = False,
    ) -> None:
        """Compiles nothing yet.

        Args:
          model: a `T5QueryGenerator`; the others are arguments of its `generate`.
          sampler: draws tokens.
          length: most tokens of a query, T.
          samples: queries per document.
          batch_size: queries decoded at a time.
          pieces: number of leading ids that the vocabulary can decode.
          jit_compile: compile with XLA.
        """
        self._length = length
        self.samples = min(samples, _MOST_SAMPLES)
        self._documents = max(1, batch_size // self.samples)
        mask = decoding.text_mask(model.config.vocabulary_size, pieces)
        signature = [
            tf.TensorSpec([self._documents, None], tf.int32),
            tf.TensorSpec([self._documents], tf.int32),
            tf.TensorSpec([self._documents * self.samples, length], tf.float32),
        ]
        self._run = Replicated(
            lambda ids, lengths, uniforms: decoding.decode(
                model, ids, lengths, uniforms, sampler, mask
            ),
            # One graph serves documents of any length; XLA needs a static one.
            None if jit_compile else signature,
            jit_compile,
            overlapped=True,
        )
        self._multiple = _WIDTH if jit_compile or self._run.static else 8

    def __call__(
        self,
        requests: Iterable[Request],
        seed: int,
        decode: Callable[[np.ndarray], Sequence[Any]] = list,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Iterator[tuple[Request, Sequence[Any]]]:
        """Writes queries.

        Args:
          requests: read as a stream, `_BATCHES_READ` batches at a time.
          seed: any integer.
          decode: makes queries of a batch's ids [B, T], 0 after the end; by default
            rows of ids.
          on_batch: called after every batch with its numbers of queries and tokens.

        Yields:
          Each request, in order, with its queries.
        """
        stream, size, at_once = iter(requests), self._documents, self._run.at_a_time
        while window := list(itertools.islice(stream, size * at_once * _BATCHES_READ)):
            order = sorted(range(len(window)), key=lambda i: len(window[i].ids))
            batches = [order[at : at + size] for at in range(0, len(order), size)]
            found: dict[int, Sequence[Any]] = {}
            for at in range(0, len(batches), at_once):
                group = batches[at : at + at_once]
                longest = len(window[group[-1][-1]].ids)
                width = -(-longest // self._multiple) * self._multiple
                given = [
                    self._arguments([window[i] for i in batch], seed, width)
                    for batch in group
                ]
                for batch, ids in zip(group, self._run(given)):
                    written = decode(ids.numpy())
                    tokens = (ids.numpy() != decoding.PAD).sum(axis=1)
                    counts = [0, 0]
                    for place, i in enumerate(batch):
                        start = place * self.samples
                        rows = slice(start, start + len(window[i].samples))
                        found[i] = written[rows]
                        counts[0] += len(found[i])
                        counts[1] += int(tokens[rows].sum())
                    if on_batch is not None:
                        on_batch(*counts)
            yield from ((request, found[i]) for i, request in enumerate(window))

    def _arguments(
        self, batch: list[Request], seed: int, width: int
    ) -> tuple[np.ndarray, ...]:
        # The batch is filled up with its last document, so that one shape is compiled.
        filled = batch + batch[-1:] * (self._documents - len(batch))
        ids = np.zeros([self._documents, width], np.int32)
        uniforms = np.zeros([self._documents, self.samples, self._length], np.float32)
        for place, request in enumerate(filled):
            ids[place, : len(request.ids)] = request.ids
        for place, request in enumerate(batch):
            for row, sample in zip(uniforms[place], request.samples):
                row[:] = row_uniforms(seed, request.document.id, sample, self._length)
        lengths = np.array([len(request.ids) for request in filled], np.int32)
        return ids, lengths, uniforms.reshape(-1, self._length)


def requests_of(
    document: Document, ids: np.ndarray, count: int, most: int
) -> Iterator[Request]:
    """Yields the requests, of at most `most` samples each, for `count` queries."""
    for start in range(0, count, most):
        yield Request(document, ids, range(start, min(count, start + most)))


def tokenized(
    documents: Iterable[tuple[Document, int]], preprocessor: Preprocessor, most: int
) -> Iterator[Request]:
    """Yields the requests for documents, streamed, each with its number of queries."""
    stream = iter(documents)
    while chunk := list(itertools.islice(stream, CHUNK)):
        texts = (document.content for document, _ in chunk)
        tokens = zip(*preprocessor.documents(texts))
        for (document, count), (ids, length) in zip(chunk, tokens):
            yield from requests_of(document, ids[:length], count, most)


def numbered(
    written: Iterable[tuple[Request, Sequence[str]]], first: int
) -> Iterator[SyntheticQuery]:
    """Yields a writer's queries, the first one with the number `first`."""
    number = itertools.count(first)
    for request, queries in written:
        document = request.document
        for sample, query in zip(request.samples, queries):
            yield SyntheticQuery(
                query_id=f"genQ{next(number)}",
                query=query,
                document_id=document.id,
                document=document.content,
                sample=sample,
            )


def row_uniforms(seed: int, document_id: str, sample: int, length: int) -> np.ndarray:
    """Draws the random numbers of one (document, sample).

    Args:
      seed: any integer.
      document_id: the document's id.
      sample: number of the sample for this document, from 0.
      length: number of positions.

    Returns:
      [length] float32 in [0, 1).
    """
    digest = hashlib.sha256(f"{seed}\0{sample}\0{document_id}".encode()).digest()
    random = np.random.default_rng(int.from_bytes(digest, "big"))
    return random.random(length, dtype=np.float32)

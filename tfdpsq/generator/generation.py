"""Documents in, queries out, independent of the batching.

Every (document, sample) has its own random numbers, derived by a hash from the seed,
the document's id and the sample's number. Its query is therefore the same at any batch
size, in any shard, in any order, but for draws within rounding of a boundary.
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
from tfdpsq.generator import decoding
from tfdpsq.generator.samplers import Sampler
from tfdpsq.layers.replicated import Replicated

# Where each width is compiled, documents are padded to multiples of these tokens.
_WIDTH = 48
# More samples of a document than these are decoded in several parts.
_MOST_SAMPLES = 64
# Documents are sorted by length among this many batches.
_BATCHES_READ = 32


class Request(NamedTuple):
    """Queries to write for one document."""

    document: Document
    ids: np.ndarray  # [n] int32, its tokens without padding
    samples: range  # the numbers of the queries


class Writer:
    """A compiled function that writes queries in batches of one shape.

    The model's weights are read at every call. In a strategy's scope, which the model
    was made in, each replica writes the queries of batches of its own. Requests have at
    most `samples` queries.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        sampler: Sampler,
        length: int,
        samples: int,
        batch_size: int,
        pieces: tuple[int, tuple[int, ...]],
        jit_compile: bool = False,
    ) -> None:
        """Compiles nothing yet.

        The arguments are those of `T5QueryGenerator.generate`, but for `pieces`, the
        number of ids that the vocabulary can decode, and its sentinels.
        """
        self._length = length
        self.samples = min(samples, _MOST_SAMPLES)
        self._documents = max(1, batch_size // self.samples)
        mask = decoding.text_mask(model.config.vocabulary_size, *pieces)
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
        """Yields each request, in order, with its queries.

        Requests are read as a stream, `_BATCHES_READ` batches at a time. `decode` makes
        queries of a batch's ids [B, T], 0 after the end. `on_batch` is called after
        every batch with its numbers of queries and tokens.
        """
        stream, size, at_once = iter(requests), self._documents, self._run.at_a_time
        while window := list(itertools.islice(stream, size * at_once * _BATCHES_READ)):
            order = sorted(window, key=lambda request: len(request.ids))
            batches = [order[at : at + size] for at in range(0, len(order), size)]
            found: dict[int, Sequence[Any]] = {}
            for at in range(0, len(batches), at_once):
                group = batches[at : at + at_once]
                width = -(-len(group[-1][-1].ids) // self._multiple) * self._multiple
                given = [self._arguments(batch, seed, width) for batch in group]
                for batch, ids in zip(group, self._run(given)):
                    written = decode(ids.numpy())
                    tokens = (ids.numpy() != decoding.PAD).sum(axis=1)
                    counts = [0, 0]
                    for place, request in enumerate(batch):
                        start = place * self.samples
                        rows = slice(start, start + len(request.samples))
                        found[id(request)] = written[rows]
                        counts[0] += len(request.samples)
                        counts[1] += int(tokens[rows].sum())
                    if on_batch is not None:
                        on_batch(*counts)
            yield from ((request, found[id(request)]) for request in window)

    def _arguments(
        self, batch: list[Request], seed: int, width: int
    ) -> tuple[np.ndarray, ...]:
        # The batch is filled up with its last document, so that one shape is compiled.
        filled = batch + batch[-1:] * (self._documents - len(batch))
        ids = np.zeros([self._documents, width], np.int32)
        uniforms = np.zeros([self._documents, self.samples, self._length], np.float32)
        for row, numbers, request in zip(ids, uniforms, filled):
            row[: len(request.ids)] = request.ids
            for place, sample in enumerate(request.samples):
                numbers[place] = row_uniforms(
                    seed, request.document.id, sample, self._length
                )
        lengths = np.array([len(request.ids) for request in filled], np.int32)
        return ids, lengths, uniforms.reshape(-1, self._length)


def requests_of(
    documents: Iterable[tuple[Document, int]], tokens: Iterable[np.ndarray], most: int
) -> Iterator[Request]:
    """Yields the requests, of at most `most` samples, for documents and their tokens.

    Each document comes with its number of queries.
    """
    for (document, count), ids in zip(documents, tokens):
        for start in range(0, count, most):
            yield Request(document, ids, range(start, min(count, start + most)))


def numbered(
    written: Iterable[tuple[Request, Sequence[str]]], first: int
) -> Iterator[SyntheticQuery]:
    """Yields a writer's queries, the first one with the number `first`."""
    number = itertools.count(first)
    for (document, _, samples), queries in written:
        for sample, query in zip(samples, queries):
            yield SyntheticQuery(
                query_id=f"genQ{next(number)}",
                query=query,
                document_id=document.id,
                document=document.content,
                sample=sample,
            )


def row_uniforms(seed: int, document_id: str, sample: int, length: int) -> np.ndarray:
    """Returns the random numbers of one (document, sample), [length] in [0, 1)."""
    digest = hashlib.sha256(f"{seed}\0{sample}\0{document_id}".encode()).digest()
    random = np.random.default_rng(int.from_bytes(digest, "big"))
    return random.random(length, dtype=np.float32)

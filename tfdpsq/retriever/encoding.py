"""Embeds texts, a corpus at a time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from tfdpsq.data.rows import RowStore, write_rows
from tfdpsq.layers.replicated import Replicated
from tfdpsq.retriever.model import TwoTower, embed
from tfdpsq.validation import one_of, positive_integer

# Batches that are sorted by length together, so that padding is little. The
# memory for token ids stays at this many batches.
_WINDOW = 16
# Texts at a time on a processor, where the layers' results then stay in its cache.
CPU_ROWS = 32
# Rows of a frozen model at a time.
_FROZEN = 128
_TOKENS = ("ids", "lengths")


class Embedder:
    """Embeds texts in batches of one size, by a function compiled once.

    Texts of like length share a batch, which is cut to its longest text; padding
    never changes an embedding (beyond rounding, below 1e-6). Under XLA every batch has
    the full length, as each new shape would compile again. In a strategy's scope, which
    the model was made in, each replica embeds batches of its own. On a processor,
    without XLA, a batch is at most 32 texts, which stay in the cache.
    """

    def __init__(
        self,
        model: TwoTower,
        kind: str,
        batch_size: int = 128,
        jit_compile: bool = False,
    ):
        """Makes the function.

        Args:
          model: the retriever, with its tokenizer.
          kind: "query" or "document": the tower, and the length texts are cut to.
          batch_size: texts at a time.
          jit_compile: compile with XLA.
        """
        is_query = one_of("kind", kind, ("query", "document")) == "query"
        self._batch_size = positive_integer("batch_size", batch_size)
        config = model.config
        self._width = config.embedding_dim
        self._length = config.query_length if is_query else config.document_length
        self._tokenizer: Any = model.tokenizer
        tpu = isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)
        cpu = not (jit_compile or tpu or tf.config.list_physical_devices("GPU"))
        self._rows = min(batch_size, CPU_ROWS) if cpu else batch_size
        length = self._length if jit_compile else None
        self._embed = Replicated(
            model.encode_queries if is_query else model.encode_documents,
            [
                tf.TensorSpec([self._rows, length], tf.int32),
                tf.TensorSpec([self._rows], tf.int32),
            ],
            jit_compile,
            overlapped=cpu,
        )
        self._trim = not (jit_compile or self._embed.static)

    def chunks(
        self,
        texts: Iterable[tuple[str, str]],
        rows: int = 1,
        done: Callable[[int], Any] | None = None,
    ) -> Iterator[tuple[list[str], np.ndarray]]:
        """Embeds texts as they stream by.

        Args:
          texts: (id, text).
          rows: yield at least this many at a time, and at most 16 batches more.
          done: called with the number of texts of every batch, for a progress bar.

        Yields:
          n ids, and embeddings [n, D] float32 of unit length, in the order of the
          texts.
        """
        stream = iter(texts)
        ids: list[str] = []
        held: list[np.ndarray] = []
        while window := list(itertools.islice(stream, self._batch_size * _WINDOW)):
            ids += [name for name, _ in window]
            held.append(self._window([text for _, text in window], done))
            if len(ids) >= rows:
                yield ids, np.concatenate(held)
                ids, held = [], []
        if held:
            yield ids, np.concatenate(held)

    def _window(
        self, texts: list[str], done: Callable[[int], Any] | None
    ) -> np.ndarray:
        """Embeds 16 batches of texts, sorted by length."""
        ids, lengths = (
            np.asarray(a) for a in self._tokenizer.encode(texts, self._length)
        )
        vectors = np.empty([len(texts), self._width], np.float32)
        # Longest first: memory is at its peak, and fails if it must, at once.
        order = np.argsort(-lengths, kind="stable")
        batches = [
            order[start : start + self._rows]
            for start in range(0, len(order), self._rows)
        ]
        together = self._embed.at_a_time
        for first in range(0, len(batches), together):
            some = batches[first : first + together]
            found = self._embed([self._padded(ids, lengths, rows) for rows in some])
            for rows, embedded in zip(some, found):
                vectors[rows] = embedded.numpy()[: len(rows)]
                if done is not None:
                    done(len(rows))
        return vectors

    def _padded(
        self, ids: np.ndarray, lengths: np.ndarray, rows: np.ndarray
    ) -> list[tf.Tensor]:
        # A short last batch is filled by repeating its first text.
        filled = np.concatenate([rows, np.repeat(rows[:1], self._rows - len(rows))])
        width = int(lengths[filled].max()) if self._trim else ids.shape[1]
        return [
            tf.constant(ids[filled, :width], tf.int32),
            tf.constant(lengths[filled], tf.int32),
        ]


def encode_texts(
    model: TwoTower,
    texts: Iterable[str],
    kind: str,
    batch_size: int = 128,
    progress: bool = True,
    jit_compile: bool = False,
) -> np.ndarray:
    """Embeds texts, at least one, all in memory, as [N, D]; see `Embedder`."""
    embedder = Embedder(model, kind, batch_size, jit_compile)
    with progress_bar(kind, progress) as bar:
        named = (("", text) for text in texts)
        parts = [vectors for _, vectors in embedder.chunks(named, done=bar.update)]
    return np.concatenate(parts)


def frozen_rows(path: str | os.PathLike, rows: RowStore, model: TwoTower) -> RowStore:
    """Stores rows with what a model with a frozen document tower makes of them.

    Embeddings replace the tokens of documents and negatives; and if training changes
    the projection of queries alone (`queries_pooled`), pooled states those of queries.
    All batches have one shape, so that no row changes another's result by a bit.
    `path` is as private as the rows are; what a killed run left there is used again.
    """
    if os.path.isdir(path):
        store = RowStore(path)
        store.verify()
        return store
    tower = model.query_tower
    pooling = tf.keras.Model(tower.inputs, tower.get_layer("pooling").output)

    @tf.function(autograph=False)
    def made(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        found = model.encode(batch)
        vectors = {"document_vectors": found.documents}
        if found.negatives is not None:
            vectors["negative_vectors"] = found.negatives
        if model.queries_pooled:
            ids, lengths = batch["query_ids"], batch["query_lengths"]
            vectors["query_states"] = embed(pooling, ids, lengths, unit=False)
        return vectors

    def chunks() -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, len(rows), _FROZEN):
            at = np.minimum(np.arange(start, start + _FROZEN), len(rows) - 1)
            batch = rows.take(at)
            found = {name: values.numpy() for name, values in made(batch).items()}
            sides = ("document", "negative", *["query"] * model.queries_pooled)
            for name in (f"{side}_{what}" for side in sides for what in _TOKENS):
                batch.pop(name, None)
            whole = {**batch, **found}
            yield {name: values[: len(rows) - start] for name, values in whole.items()}

    return write_rows(path, chunks())


def progress_bar(kind: str, shown: bool = True) -> tqdm:
    """A progress bar for embeddings of texts of a kind; see `encode_texts`."""
    return tqdm(desc=f"{kind} embeddings", unit="text", disable=not shown)

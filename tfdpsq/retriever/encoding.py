"""Embeds texts, a corpus at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from tfdpsq.layers.replicated import Replicated
from tfdpsq.retriever.model import TwoTower
from tfdpsq.validation import InputError, one_of, positive_integer

# Batches that are sorted by length together, so that padding is little. The
# memory for token ids stays at this many batches.
_WINDOW = 16
# Texts at a time on a processor, where the layers' results then stay in its cache.
CPU_ROWS = 32


class Encodes(Protocol):
    """The tokenizer interface that encoding needs."""

    def encode(self, texts: Sequence[str], length: int) -> tuple[tf.Tensor, tf.Tensor]:
        """[B] strings to ids [B, length] and lengths [B], both int32."""


class Embedder:
    """Embeds texts in batches of one size, by a function compiled once.

    Texts of like length share a batch, which is cut to its longest text; padding
    never changes an embedding (beyond rounding, below 1e-6). Without `trim` every batch
    has the full length, and no text changes another's embedding, to the last bit. So it
    has under XLA, as each new shape would compile again. In a strategy's scope, which
    the model was made in, each replica embeds batches of its own. On a processor,
    without XLA, a batch is at most 32 texts, which stay in the cache.
    """

    def __init__(
        self,
        model: TwoTower,
        tokenizer: Encodes,
        kind: str,
        batch_size: int = 128,
        jit_compile: bool = False,
        trim: bool = True,
    ):
        """Makes the function.

        Args:
          model: the retriever.
          tokenizer: the model's tokenizer.
          kind: "query" or "document": the tower, and the length texts are cut to.
          batch_size: texts at a time.
          jit_compile: compile with XLA.
          trim: cut each batch to its longest text.

        Raises:
          InputError: unknown kind, or batch_size below 1.
        """
        one_of("kind", kind, ("query", "document"))
        self._batch_size = positive_integer("batch_size", batch_size)
        is_query = kind == "query"
        config = model.config
        self._width = config.embedding_dim
        self._length = config.query_length if is_query else config.document_length
        self._tokenizer = tokenizer
        self._rows = _rows_of(batch_size, jit_compile)
        length = self._length if jit_compile else None
        self._embed = Replicated(
            model.encode_queries if is_query else model.encode_documents,
            [
                tf.TensorSpec([self._rows, length], tf.int32),
                tf.TensorSpec([self._rows], tf.int32),
            ],
            jit_compile,
        )
        self._trim = trim and not (jit_compile or self._embed.static)

    def windows(
        self, texts: Iterable[str], done: Callable[[int], Any] | None = None
    ) -> Iterator[np.ndarray]:
        """Embeds texts as they stream by, 16 batches at a time.

        Args:
          texts: N of them.
          done: called with the number of texts of every batch, for a progress bar.

        Yields:
          [at most 16 batches, D] float32 of unit length, in the order of the texts. No
          text is taken from the stream before its window is wanted.
        """
        stream = iter(texts)
        while window := list(itertools.islice(stream, self._batch_size * _WINDOW)):
            ids, lengths = (
                np.asarray(a) for a in self._tokenizer.encode(window, self._length)
            )
            vectors = np.empty([len(window), self._width], np.float32)
            batches = _batches(ids, lengths, self._rows, self._trim)
            while together := list(itertools.islice(batches, self._embed.at_a_time)):
                found = self._embed([given for _, *given in together])
                for (rows, *_), embedded in zip(together, found):
                    vectors[rows] = embedded.numpy()[: len(rows)]
                    if done is not None:
                        done(len(rows))
            yield vectors

    def chunks(
        self,
        documents: Iterable[tuple[str, str]],
        rows: int,
        done: Callable[[int], Any] | None = None,
    ) -> Iterator[tuple[list[str], np.ndarray]]:
        """Embeds documents with their ids, more at a time than `windows`.

        Args:
          documents: (id, text).
          rows: at least so many at a time, and at most 16 batches more; but the last.
          done: as for `windows`.

        Yields:
          n ids and embeddings [n, D].
        """
        positive_integer("rows", rows)
        ids: list[str] = []

        def texts() -> Iterator[str]:
            for identifier, text in documents:
                ids.append(identifier)
                yield text

        held: list[np.ndarray] = []
        for vectors in self.windows(texts(), done):
            held.append(vectors)
            if len(ids) >= rows:
                yield list(ids), np.concatenate(held)
                ids.clear()
                held = []
        if held:
            yield list(ids), np.concatenate(held)


def encode_texts(
    model: TwoTower,
    texts: Iterable[str],
    tokenizer: Encodes,
    kind: str,
    batch_size: int = 128,
    total: int | None = None,
    progress: bool = True,
    jit_compile: bool = False,
) -> np.ndarray:
    """Embeds texts that are few enough for memory; see `Embedder`.

    Args:
      model: the retriever.
      texts: N of them, streamed.
      tokenizer: the model's tokenizer.
      kind: "query" or "document": the tower, and the length texts are cut to.
      batch_size: texts at a time.
      total: N where known, for the remaining time in the progress bar.
      progress: whether to show a progress bar with its rate.
      jit_compile: compile with XLA.

    Returns:
      [N, D] float32 of unit length, in the order of `texts`.

    Raises:
      InputError: unknown kind, batch_size below 1, or no text at all.
    """
    embedder = Embedder(model, tokenizer, kind, batch_size, jit_compile)
    with progress_bar(kind, total, progress) as bar:
        parts = list(embedder.windows(texts, bar.update))
    if not parts:
        raise InputError(f"there is no {kind} to embed; give at least one text.")
    return np.concatenate(parts)


def progress_bar(kind: str, total: int | None = None, shown: bool = True) -> tqdm:
    """A progress bar for embeddings of texts of a kind; see `encode_texts`."""
    return tqdm(total=total, desc=f"{kind} embeddings", unit="text", disable=not shown)


def with_vectors(
    model: TwoTower,
    arrays: Mapping[str, np.ndarray],
    batch_size: int = 128,
    known: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Embeds the documents of training data once, for a tower that trains nothing.

    Args:
      model: the retriever; its document tower has no trainable weights.
      arrays: what `encode_pairs`, `encode_negatives` or `encode_documents` made.
      batch_size: texts at a time.
      known: what this function made of other documents, by the same model; those that
        come again are not embedded again.

    Returns:
      The arrays, but "document_vectors" [n, D] float32 instead of "document_ids" and
      "document_lengths", and the same for "negative_…", [n, H, D]. A vector depends on
      its own text, and by rounding (below 1e-6) on those that shared its batch.

    Raises:
      InputError: the document tower is trained, or is the query tower.
    """
    require_frozen_documents(model)
    found = dict(arrays)
    held = {} if known is None else known
    embedded = np.asarray(held.get("document_key", ()), np.int64)
    vectors = held.get(
        "document_vectors", np.empty([0, model.config.embedding_dim], np.float32)
    )
    for name, keys in (("document", "document_key"), ("negative", "negative_keys")):
        if f"{name}_ids" not in arrays:
            continue
        ids, lengths = found.pop(f"{name}_ids"), found.pop(f"{name}_lengths")
        places, new = distinct(arrays[keys], embedded)
        if len(new):
            flat = ids.reshape([-1, ids.shape[-1]])
            texts = Tokenised(_taking(flat, lengths.ravel()))
            numbers = map(str, new.tolist())
            made = encode_texts(
                model, numbers, texts, "document", batch_size, progress=False
            )
            vectors = np.concatenate([vectors, made])
            embedded = np.concatenate([embedded, arrays[keys].ravel()[new]])
        found[f"{name}_vectors"] = vectors[places]
    return found


def distinct(keys: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers documents by their keys: known ones first, then new ones as they come.

    Args:
      keys: [...] int64, one for each place that a document is in.
      known: [K] int64; its documents have the numbers from 0 to K - 1.

    Returns:
      The documents' numbers, of the shape of `keys`; and [N], ascending, where in
      `keys.ravel()` each new document comes first.
    """
    every = np.concatenate([known, keys.ravel()])
    _, first, places = np.unique(every, return_index=True, return_inverse=True)
    new = np.sort(first[first >= len(known)])
    numbers = np.where(
        first < len(known), first, len(known) + np.searchsorted(new, first)
    )
    return numbers[places.ravel()[len(known) :]].reshape(keys.shape), new - len(known)


def require_frozen_documents(model: TwoTower) -> None:
    """Refuses to embed documents once for a tower that will embed them otherwise.

    Raises:
      InputError: the document tower is trained, or is the query tower.
    """
    if not model.documents_frozen:
        raise InputError(
            f"the document tower has {len(model.document_tower.trainable_weights)} "
            "trainable weights: what it makes of a document does not stay. Train the "
            "query tower alone, with shared=False."
        )


def _taking(ids: np.ndarray, lengths: np.ndarray) -> Any:
    return lambda rows: (ids[rows], lengths[rows])


class Tokenised:
    """Texts that are tokenised already, called by their numbers."""

    def __init__(self, take: Callable[[list[int]], tuple[np.ndarray, np.ndarray]]):
        """Keeps what gives ids [B, length] and lengths [B] of B numbers."""
        self._take = take

    def encode(self, texts: Sequence[str], length: int) -> tuple[Any, Any]:
        """See `Encodes`; they were cut to the length before."""
        return self._take([int(text) for text in texts])


def _rows_of(batch_size: int, jit_compile: bool) -> int:
    """Returns the number of texts in a batch on the devices there are."""
    tpu = isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)
    if jit_compile or tpu or tf.config.list_physical_devices("GPU"):
        return batch_size
    return min(batch_size, CPU_ROWS)


def _batches(
    ids: np.ndarray, lengths: np.ndarray, batch_size: int, trim: bool
) -> Iterator[tuple[np.ndarray, tf.Tensor, tf.Tensor]]:
    # Longest first: memory is at its peak, and fails if it must, at once.
    order = np.argsort(-lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        # A short last batch is filled by repeating its first text.
        filled = np.concatenate([rows, np.repeat(rows[:1], batch_size - len(rows))])
        width = int(lengths[filled].max()) if trim else ids.shape[1]
        yield (
            rows,
            tf.constant(ids[filled, :width], tf.int32),
            tf.constant(lengths[filled], tf.int32),
        )

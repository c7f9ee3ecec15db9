"""Tokenises streamed pairs to disk, and reads them a batch at a time.

It stores in a `RowStore` what `make_batches` holds in memory, so that training can use
sets of millions of pairs. Memory holds two hashes per pair while they are written, and
its place in the epoch while batches are drawn. The batches are the same.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from tfdpsq.data.rows import RowStore, write_rows
from tfdpsq.data.texts import Pair
from tfdpsq.data.tokenization import CHUNK
from tfdpsq.layers.replicated import Replicated
from tfdpsq.retriever.encoding import (
    Embedder,
    Encodes,
    Tokenised,
    distinct,
    require_frozen_documents,
)
from tfdpsq.retriever.known_answers import KnownAnswers
from tfdpsq.retriever.model import TwoTower
from tfdpsq.retriever.training import content_key, encode_rows, shuffled_epochs
from tfdpsq.validation import DataError, InputError

_QUERY = "query_key"
# Texts embedded at a time, as `with_vectors` does, and rows whose keys are read.
_BATCH = 128
_ROWS = 4096


class Rows(Protocol):
    """Rows that are read by number, such as a `RowStore`."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Reads rows by number; field -> [rows, ...]."""


class StoredPairs:
    """The arrays of `encode_pairs`, on disk. `len()` is the number of pairs."""

    def __init__(self, rows: Rows, answers: KnownAnswers):
        """Keeps the parts that `store_pairs` made.

        Args:
          rows: n tokenised pairs, and a key for each row's query.
          answers: known answers of their queries.
        """
        self._rows, self._answers = rows, answers

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return len(self._rows)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Reads rows by number, as `encode_pairs` and `with_vectors` return them.

        Args:
          indices: [R] integers from 0 to below `len(self)`.

        Raises:
          InputError: an index is out of range.
          DataError: a file is missing or truncated.
        """
        found = self._rows.take(indices)
        found["positive_keys"] = self._answers.others(
            found.pop(_QUERY), found["document_key"]
        )
        return found

    def batches(self, batch_size: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
        """Yields the batches that `make_batches` makes of the same pairs.

        Args:
          batch_size: rows of a batch.
          seed: the same seed gives the same batches.

        Raises:
          InputError: the batch is larger than the data; raised at once.
        """
        return shuffled_epochs(self.take, len(self), batch_size, seed)


def store_pairs(
    path: str | os.PathLike,
    pairs: Iterable[Pair],
    tokenizer: Encodes,
    *,
    query_length: int,
    document_length: int,
    model: TwoTower | None = None,
    negatives: Callable[[Sequence[Pair]], Mapping[str, np.ndarray]] | None = None,
) -> StoredPairs:
    """Tokenises pairs to disk, in flat memory.

    Args:
      path: the directory to write to; a private one for private pairs.
      pairs: the pairs, streamed; see `encode_pairs`.
      tokenizer: the model's tokenizer.
      query_length: tokens kept of a query, EOS included.
      document_length: tokens kept of a document, EOS included.
      model: a retriever with a frozen document tower, to embed each document once; see
        `with_vectors`.
      negatives: makes of some pairs what `encode_negatives` returns.

    Raises:
      InputError: no pairs, a length below one, the disk is full, or the model's
        document tower is trained.
    """
    if model is not None:
        require_frozen_documents(model)
    stream = iter(pairs)
    queries: list[np.ndarray] = []
    keys: list[np.ndarray] = []

    def chunks() -> Iterator[dict[str, np.ndarray]]:
        while chunk := list(itertools.islice(stream, CHUNK)):
            arrays = encode_rows(
                chunk,
                tokenizer,
                query_length=query_length,
                document_length=document_length,
            )
            if negatives is not None:
                arrays.update(negatives(chunk))
            hashes = [content_key(pair.query_id) for pair in chunk]
            arrays[_QUERY] = np.array(hashes, np.int64)
            queries.append(arrays[_QUERY])
            keys.append(arrays["document_key"])
            yield arrays

    rows: Rows = write_rows(Path(path) / "pairs", chunks())
    answers = KnownAnswers(np.concatenate(queries), np.concatenate(keys))
    if model is not None:
        rows = WithVectors(Path(path) / "documents", rows, model)
    return StoredPairs(rows, answers)


class WithVectors:
    """Rows whose documents are embedded, as `with_vectors` returns them, on disk.

    Memory holds two hashes for each document of each row.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        rows: Rows,
        model: TwoTower,
        known: Mapping[str, np.ndarray] | None = None,
    ):
        """Embeds each distinct document once, or takes the vectors that are there.

        Args:
          path: the directory of the vectors; one that a killed run of the same rows
            and model left is used again.
          rows: tokenised pairs, with hard negatives or without.
          model: a retriever with a frozen document tower.
          known: see `with_vectors`.

        Raises:
          InputError: the model's document tower is trained, or the disk is full.
          DataError: the vectors that are there are damaged, or of other rows.
        """
        require_frozen_documents(model)
        self._rows = rows
        keys = np.concatenate(
            [
                _document_keys(rows.take(range(start, min(start + _ROWS, len(rows)))))
                for start in range(0, len(rows), _ROWS)
            ]
        )
        held = {} if known is None else known
        earlier = np.asarray(held.get("document_key", ()), np.int64)
        self._known = held.get("document_vectors")
        self._places, new = distinct(keys, earlier)
        self._stored = self._embedded(Path(path), new, keys.ravel()[new], model)

    def _embedded(
        self, path: Path, texts: np.ndarray, keys: np.ndarray, model: TwoTower
    ) -> RowStore | None:
        """Stores the vectors of texts, which are numbered row by row, and their keys.

        Each batch has the same shape, whatever its texts: one document's vector does
        not depend on another's, to the last bit.
        """
        if not len(texts):
            return None
        if path.is_dir():
            store = _reopened(path, len(texts), "documents")
            _require_documents(store, keys)
            return store

        def take(numbers: list[int]) -> tuple[np.ndarray, np.ndarray]:
            rows, columns = np.divmod(numbers, self._places.shape[1])
            found = self._rows.take(rows)
            at = range(len(rows)), columns
            return _together(found, "ids")[at], _together(found, "lengths")[at]

        embedder = Embedder(model, Tokenised(take), "document", _BATCH, trim=False)

        def chunks() -> Iterator[dict[str, np.ndarray]]:
            start = 0
            for vectors in embedder.windows(map(str, texts.tolist())):
                own = keys[start : start + len(vectors)]
                yield {"document_key": own, "document_vectors": vectors}
                start += len(vectors)

        return write_rows(path, chunks())

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._rows)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Reads rows by number; raises as `RowStore.take` does."""
        found = self._rows.take(indices)
        places = self._places[np.asarray(indices, np.int64)]
        vectors = self._vectors(places.ravel()).reshape([*places.shape, -1])
        for name in ("document", "negative"):
            if found.pop(f"{name}_ids", None) is not None:
                del found[f"{name}_lengths"]
        found["document_vectors"] = vectors[:, 0]
        if "negative_keys" in found:
            found["negative_vectors"] = vectors[:, 1:]
        return found

    def _vectors(self, places: np.ndarray) -> np.ndarray:
        """Returns the vectors [P, D] at places among known and stored ones."""
        count = 0 if self._known is None else len(self._known)
        new = places >= count
        parts = []
        if self._known is not None:
            parts.append(self._known[places[~new]])
        if self._stored is not None:
            parts.append(self._stored.take(places[new] - count)["document_vectors"])
        order = np.argsort(np.concatenate([np.flatnonzero(~new), np.flatnonzero(new)]))
        return np.concatenate(parts)[order]


class PooledQueries:
    """Rows with the pooled states of their queries instead of the queries, on disk."""

    def __init__(self, path: str | os.PathLike, rows: Rows, model: TwoTower):
        """Computes the states, or takes those that are there.

        Each batch has the same shape, whatever its texts: one query's states do not
        depend on another's, to the last bit.

        Args:
          path: the directory of the states, as private as the queries are; one that a
            killed run of the same rows and model left is used again.
          rows: tokenised pairs, n of them.
          model: a retriever that trains of its query tower the projection alone.

        Raises:
          InputError: the model trains more than that, or the disk is full.
          DataError: the states that are there are damaged, or of other rows.
        """
        if not model.queries_pooled:
            raise InputError(
                "the states of queries change in training. Freeze all but the query "
                "tower's projection, with shared=False and without dropout."
            )
        self._rows, path = rows, Path(path)
        self._states = (
            _reopened(path, len(rows), "queries")
            if path.is_dir()
            else write_rows(path, _pooled(rows, model))
        )

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._rows)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Reads rows by number; raises as `RowStore.take` does."""
        found = self._rows.take(indices)
        del found["query_ids"], found["query_lengths"]
        return {**found, **self._states.take(indices)}


def _pooled(rows: Rows, model: TwoTower) -> Iterator[dict[str, np.ndarray]]:
    run = Replicated(model.pool_queries)
    starts = iter(range(0, len(rows), _BATCH))
    while together := list(itertools.islice(starts, run.at_a_time)):
        batches = []
        for start in together:
            # The last rows are repeated, so that the shape stays.
            at = np.minimum(np.arange(start, start + _BATCH), len(rows) - 1)
            found = rows.take(at)
            batches.append((found["query_ids"], found["query_lengths"]))
        for start, states in zip(together, run(batches)):
            yield {"query_states": states.numpy()[: len(rows) - start]}


def _reopened(path: Path, count: int, what: str) -> RowStore:
    """Opens and checks the vectors that a killed run has stored."""
    store = RowStore(path)
    store.verify()
    if len(store) != count:
        raise DataError(
            path,
            f"it has {len(store)} vectors for {count} {what}",
            "Move it away: it is made again.",
        )
    return store


def _require_documents(store: RowStore, keys: np.ndarray) -> None:
    """Refuses vectors of other documents than `keys` [N], or in another order.

    Which documents of the rows are stored depends on those that are known, and so on
    the order of the corpus that these were drawn from.
    """
    for start in range(0, len(keys), _ROWS):
        wanted = keys[start : start + _ROWS]
        found = store.take(range(start, start + len(wanted)))
        if not np.array_equal(found.get("document_key", ()), wanted):
            raise DataError(
                store.path,
                "it has the vectors of other documents than the rows need: the corpus, "
                "or its order, is not the one that it was made with",
                "Restore that corpus, or move the directory away: it is made again.",
            )


def _document_keys(rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns [R, 1 + H] keys of the rows' documents and hard negatives."""
    keys = rows["document_key"][:, np.newaxis]
    return np.hstack(
        [keys, *([rows["negative_keys"]] if "negative_keys" in rows else [])]
    )


def _together(rows: Mapping[str, np.ndarray], what: str) -> np.ndarray:
    """Returns [R, 1 + H, ...], the same of documents and of hard negatives."""
    first = rows[f"document_{what}"][:, np.newaxis]
    others = [rows[f"negative_{what}"]] if f"negative_{what}" in rows else []
    return np.concatenate([first, *others], axis=1)

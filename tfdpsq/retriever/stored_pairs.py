"""Tokenises streamed pairs to disk, and reads them a batch at a time.

It stores in a `RowStore` what `make_batches` holds in memory, so that training can use
sets of millions of pairs. Memory holds two hashes per pair while they are written, and
its place in the epoch while batches are drawn. The batches are the same.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tfdpsq.data.rows import RowStore, write_rows
from tfdpsq.data.texts import Pair
from tfdpsq.retriever.encoding import (
    Embedder,
    Encodes,
    Tokenised,
    require_frozen_documents,
)
from tfdpsq.retriever.known_answers import KnownAnswers
from tfdpsq.retriever.model import TwoTower
from tfdpsq.retriever.training import CHUNK, content_key, encode_rows, shuffled_epochs

_QUERY = "query_key"
# Texts embedded at a time, as `with_vectors` does.
_BATCH = 128


class StoredPairs:
    """The arrays of `encode_pairs`, on disk. `len()` is the number of pairs."""

    def __init__(
        self,
        rows: RowStore,
        answers: KnownAnswers,
        vectors: RowStore | None = None,
        places: np.ndarray | None = None,
    ):
        """Keeps the parts that `store_pairs` made.

        Args:
          rows: n tokenised pairs.
          answers: known answers of their queries.
          vectors: embeddings of the distinct documents, for a frozen tower.
          places: [n] index of each row's vector.
        """
        self._rows, self._answers = rows, answers
        self._vectors, self._places = vectors, places

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
        if self._vectors is not None and self._places is not None:
            del found["document_ids"], found["document_lengths"]
            found.update(self._vectors.take(self._places[indices]))
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
            hashes = [content_key(pair.query_id) for pair in chunk]
            arrays[_QUERY] = np.array(hashes, np.int64)
            queries.append(arrays[_QUERY])
            keys.append(arrays["document_key"])
            yield arrays

    store = write_rows(Path(path) / "pairs", chunks())
    contents = np.concatenate(keys)
    keys.clear()
    answers = KnownAnswers(np.concatenate(queries), contents)
    if model is None:
        return StoredPairs(store, answers)
    vectors, places = _embedded(Path(path) / "documents", store, contents, model)
    return StoredPairs(store, answers, vectors, places)


def _embedded(
    path: Path, rows: RowStore, keys: np.ndarray, model: TwoTower
) -> tuple[RowStore, np.ndarray]:
    """Embeds the distinct documents, and returns the index of each row's vector."""
    _, first, places = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))

    def take(numbers: list[int]) -> tuple[np.ndarray, np.ndarray]:
        found = rows.take(numbers)
        return found["document_ids"], found["document_lengths"]

    embedder = Embedder(model, Tokenised(take), "document", _BATCH)
    windows = embedder.windows(map(str, first[order].tolist()))
    store = write_rows(path, ({"document_vectors": vectors} for vectors in windows))
    return store, number[places]

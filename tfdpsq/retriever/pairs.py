"""Pairs as the rows and batches that a retriever trains on, in memory or on disk.

Rows of one query tell of each other's documents, which are then no negatives. Queries
and documents are known by hashes here (`content_key`).
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from tfdpsq import validation
from tfdpsq.data.rows import RowStore, write_rows
from tfdpsq.data.texts import Pair
from tfdpsq.data.tokenization import CHUNK, Tokenizer, encode_all

Arrays = Mapping[str, np.ndarray]

_QUERY = "query_key"


def content_key(text: str) -> int:
    """A 63-bit number that is equal for equal texts, now and in any process."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class KnownAnswers:
    """Documents known to answer queries that have several; others are not kept.

    Of 10 million different queries two share a hash in one of 184,000 sets; their
    documents are then left out as each other's negatives.

    Attributes:
      most: P, the most *other* answers that a row can have; at least 1.
    """

    def __init__(self, queries: np.ndarray, keys: np.ndarray):
        """Groups the answers `keys` [m] int64 by `queries` [m] int64."""
        values, counts = np.unique(queries, return_counts=True)
        several = np.isin(queries, values[counts > 1])
        self._answers: dict[int, set[int]] = collections.defaultdict(set)
        for query, key in zip(queries[several].tolist(), keys[several].tolist()):
            self._answers[query].add(key)
        self.most = max([1, *(len(keys) - 1 for keys in self._answers.values())])

    def others(self, queries: np.ndarray, own: np.ndarray) -> np.ndarray:
        """Returns the answers to `queries` [n] besides rows' `own` documents [n].

        They are [n, P] int64 in ascending order, padded with -1.
        """
        found = np.full([len(own), self.most], -1, np.int64)
        for row, (query, key) in enumerate(zip(queries.tolist(), own.tolist())):
            others = sorted(self._answers.get(query, set()) - {key})
            found[row, : len(others)] = others
        return found


def encode_pairs(
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    *,
    query_length: int,
    document_length: int,
) -> dict[str, np.ndarray]:
    """Tokenises pairs once, up front.

    Args:
      pairs: n objects with `query_id`, `query`, `document_id` and `document`.
      tokenizer: the model's tokenizer.
      query_length: tokens kept of a query, EOS included.
      document_length: those of a document.

    Returns:
      "query_ids" [n, query_length] int32, "query_lengths" [n] int32,
      "document_ids" [n, document_length] int32, "document_lengths" [n] int32,
      "document_key" [n] int64 (see `content_key`), "positive_keys" [n, P] int64:
      contents of the other documents of the row's query, in ascending order, padded
      with -1 to the most that any row has, and at least 1.

    Raises:
      InputError: no pairs, or a length below one.
    """
    arrays = encode_rows(
        pairs, tokenizer, query_length=query_length, document_length=document_length
    )
    queries = np.array([content_key(pair.query_id) for pair in pairs], np.int64)
    keys = arrays["document_key"]
    arrays["positive_keys"] = KnownAnswers(queries, keys).others(queries, keys)
    return arrays


def encode_rows(
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    *,
    query_length: int,
    document_length: int,
) -> dict[str, np.ndarray]:
    """Does the part of `encode_pairs` that reads pairs alone: no "positive_keys"."""
    validation.positive_integer("query_length", query_length)
    if not len(pairs):
        raise validation.InputError("there are no pairs to train on; give at least 1.")
    arrays = encode_documents(
        [pair.document for pair in pairs], tokenizer, document_length
    )
    queries = (pair.query for pair in pairs)
    ids, lengths = encode_all(tokenizer.encode, queries, query_length)
    return {**arrays, "query_ids": ids, "query_lengths": lengths}


def encode_documents(
    documents: Sequence[str], tokenizer: Tokenizer, length: int
) -> dict[str, np.ndarray]:
    """Does the part of `encode_pairs` that reads documents alone."""
    validation.positive_integer("document_length", length)
    ids, lengths = encode_all(tokenizer.encode, documents, length)
    keys = np.array([content_key(document) for document in documents], np.int64)
    return {"document_ids": ids, "document_lengths": lengths, "document_key": keys}


def encode_negatives(
    pairs: Sequence[Pair],
    negatives: Mapping[str, Sequence[str]],
    tokenizer: Tokenizer,
    document_length: int,
    count: int,
) -> dict[str, np.ndarray]:
    """Tokenises hard negatives, to be merged with the result of `encode_pairs`.

    Args:
      pairs: the n pairs.
      negatives: query id -> documents that do not answer it, hardest first; a query
        may have more than H, fewer, or none.
      tokenizer: the model's tokenizer.
      document_length: tokens kept of a document, EOS included.
      count: H, hard negatives of a row, at least 1.

    Returns:
      "negative_ids" [n, H, document_length] int32, "negative_lengths" [n, H] int32 and
      "negative_keys" [n, H] int64. A missing negative has the key -1, and a text that
      nothing depends on.
    """
    numbers: dict[str, int] = {}
    chosen = np.full([len(pairs), count], -1, np.int64)
    for row, pair in enumerate(pairs):
        for place, text in enumerate(negatives.get(pair.query_id, ())[:count]):
            chosen[row, place] = numbers.setdefault(text, len(numbers))
    found = encode_documents(list(numbers) or [""], tokenizer, document_length)
    at, none = np.maximum(chosen, 0), chosen < 0
    return {
        # No row's text gets into another row.
        "negative_ids": np.where(none[..., np.newaxis], 0, found["document_ids"][at]),
        # The mean over no tokens is NaN.
        "negative_lengths": np.where(none, 1, found["document_lengths"][at]).astype(
            np.int32
        ),
        "negative_keys": np.where(none, -1, found["document_key"][at]),
    }


class StoredPairs:
    """The arrays of `encode_pairs`, on disk. `len()` is the number of pairs."""

    def __init__(self, rows: RowStore, answers: KnownAnswers):
        """Keeps the parts that `store_pairs` made."""
        self._rows, self._answers = rows, answers

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return len(self._rows)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Reads rows by number, as `encode_pairs` returns them."""
        found = self._rows.take(indices)
        found["positive_keys"] = self._answers.others(
            found.pop(_QUERY), found["document_key"]
        )
        return found


def store_pairs(
    path: str | os.PathLike,
    pairs: Iterable[Pair],
    tokenizer: Tokenizer,
    *,
    query_length: int,
    document_length: int,
    negatives: Callable[[Sequence[Pair]], Arrays] | None = None,
) -> StoredPairs:
    """Tokenises pairs to disk; memory holds two hashes a pair.

    `path` is a new directory, a private one for private pairs; `negatives` makes of
    pairs what `encode_negatives` returns. See `encode_pairs` for the rest.

    Raises:
      InputError: no pairs, a length below one, or the disk is full.
    """
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

    rows = write_rows(path, chunks())
    return StoredPairs(
        rows, KnownAnswers(np.concatenate(queries), np.concatenate(keys))
    )


def shuffled_batches(
    count: int, batch_size: int, seed: int, start: int = 0
) -> Iterator[np.ndarray]:
    """Yields [B] row numbers of shuffled epochs of `count` rows, without end.

    The last rows of an epoch that do not fill a batch are dropped from it. The first
    `start` batches are left out. DP accounting *cannot* use this sampler.

    Raises:
      InputError: the batch is larger than the data; raised at once.
    """
    validation.positive_integer("batch_size", batch_size)
    if batch_size > count:
        raise validation.InputError(
            f"batch_size is {batch_size} but there are {count} pairs; take at most "
            "as many."
        )
    per_epoch = count // batch_size

    def batches() -> Iterator[np.ndarray]:
        for epoch in itertools.count(start // per_epoch):
            order = np.random.default_rng([seed, epoch]).permutation(count)
            first = start % per_epoch if epoch == start // per_epoch else 0
            for batch in range(first, per_epoch):
                yield order[batch * batch_size : (batch + 1) * batch_size]

    return batches()

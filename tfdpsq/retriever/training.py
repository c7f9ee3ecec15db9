"""Pairs as the arrays and batches that a retriever trains on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from tfdpsq import validation
from tfdpsq.data.texts import Pair
from tfdpsq.data.tokenization import encode_all
from tfdpsq.retriever.encoding import Encodes, with_vectors
from tfdpsq.retriever.known_answers import KnownAnswers
from tfdpsq.retriever.model import TwoTower

Arrays = Mapping[str, np.ndarray]


def content_key(text: str) -> int:
    """A 63-bit number that is equal for equal texts, now and in any process."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def encode_pairs(
    pairs: Sequence[Pair],
    tokenizer: Encodes,
    *,
    query_length: int,
    document_length: int,
    positives: Mapping[str, Set[str]] | None = None,
) -> dict[str, np.ndarray]:
    """Tokenises pairs once, up front.

    Args:
      pairs: n objects with `query_id`, `query`, `document_id` and `document`.
      tokenizer: the model's tokenizer.
      query_length: tokens kept of a query, EOS included.
      document_length: tokens kept of a document, EOS included.
      positives: query id -> ids of further documents known to answer it, in addition
        to the pairs themselves. A document that is in no pair is never a negative, and
        is skipped.

    Returns:
      "query_ids" [n, query_length] int32, "query_lengths" [n] int32,
      "document_ids" [n, document_length] int32, "document_lengths" [n] int32,
      "document_key" [n] int64 (see `content_key`), "positive_keys" [n, P] int64:
      contents of the other known positives of the row's query, in ascending order,
      padded with -1 to the most that any row has, and at least 1.

    Raises:
      InputError: no pairs, or a length below one.
    """
    arrays = encode_rows(
        pairs, tokenizer, query_length=query_length, document_length=document_length
    )
    arrays["positive_keys"] = _positive_keys(
        pairs, arrays["document_key"], positives or {}
    )
    return arrays


def encode_rows(
    pairs: Sequence[Pair],
    tokenizer: Encodes,
    *,
    query_length: int,
    document_length: int,
) -> dict[str, np.ndarray]:
    """Does the part of `encode_pairs` that reads pairs alone: no "positive_keys"."""
    validation.positive_integer("query_length", query_length)
    validation.positive_integer("document_length", document_length)
    if not len(pairs):
        raise validation.InputError("there are no pairs to train on; give at least 1.")
    arrays = encode_documents(
        [pair.document for pair in pairs], tokenizer, document_length
    )
    queries = (pair.query for pair in pairs)
    ids, lengths = encode_all(tokenizer.encode, queries, query_length)
    arrays["query_ids"], arrays["query_lengths"] = ids, lengths
    return arrays


def encode_documents(
    documents: Sequence[str], tokenizer: Encodes, length: int
) -> dict[str, np.ndarray]:
    """Tokenises documents as `encode_pairs` does, without queries.

    Args:
      documents: n texts.
      tokenizer: the model's tokenizer.
      length: tokens kept, EOS included.

    Returns:
      "document_ids" [n, length] int32, "document_lengths" [n] int32 and
      "document_key" [n] int64.

    Raises:
      InputError: no documents, or a length below one.
    """
    validation.positive_integer("document_length", length)
    if not len(documents):
        raise validation.InputError("there are no documents; give at least 1.")
    ids, lengths = encode_all(tokenizer.encode, documents, length)
    keys = np.array([content_key(document) for document in documents], np.int64)
    return {"document_ids": ids, "document_lengths": lengths, "document_key": keys}


def encode_negatives(
    pairs: Sequence[Pair],
    negatives: Mapping[str, Sequence[str]],
    tokenizer: Encodes,
    document_length: int,
    count: int,
) -> dict[str, np.ndarray]:
    """Tokenises hard negatives, to be merged with the result of `encode_pairs`.

    Args:
      pairs: the n pairs.
      negatives: query id -> documents that do not answer it, hardest first; only the
        first `count` are used, and a query may have fewer, or none.
      tokenizer: the model's tokenizer.
      document_length: tokens kept of a document, EOS included.
      count: H, hard negatives of a row.

    Returns:
      "negative_ids" [n, H, document_length] int32, "negative_lengths" [n, H] int32 and
      "negative_keys" [n, H] int64. A missing negative has the key -1, and a text that
      nothing depends on.

    Raises:
      InputError: count or length below 1.
    """
    validation.positive_integer("count", count)
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


def collate(
    arrays: Arrays, indices: np.ndarray, weights: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Collects a batch of the given rows, e.g. chosen by Poisson sampling.

    Args:
      arrays: result of `encode_pairs`.
      indices: [B] row numbers. Those at padding must be valid too, such as 0: their
        content is in the batch, and nothing depends on it.
      weights: [B] 1 for rows and 0 for padding; `None` means no padding.

    Returns:
      A batch for `TwoTower.per_example_losses`.

    Raises:
      InputError: different lengths, or weights other than 0 and 1.
    """
    batch = {name: array[indices] for name, array in arrays.items()}
    if weights is None:
        weights = np.ones(len(indices), np.float32)
    if len(weights) != len(indices) or not np.isin(weights, (0, 1)).all():
        raise validation.InputError(
            f"weights are {weights!r}; give one for each of the {len(indices)} rows, 1 "
            "or, for padding, 0."
        )
    batch["weights"] = np.asarray(weights, np.float32)
    return batch


def make_batches(
    pairs: Sequence[Pair],
    tokenizer: Encodes,
    batch_size: int,
    *,
    query_length: int,
    document_length: int,
    seed: int,
    positives: Mapping[str, Set[str]] | None = None,
    negatives: Arrays | None = None,
    model: TwoTower | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of shuffled epochs without end, all of one shape.

    The last rows of an epoch that do not fill a batch are dropped from it; every epoch
    is shuffled again, so they differ each time. DP accounting *cannot* use this
    sampler.

    Args:
      pairs: the pairs; see `encode_pairs` for these arguments.
      tokenizer: the model's tokenizer.
      batch_size: rows of a batch, B.
      query_length: tokens kept of a query, EOS included.
      document_length: tokens kept of a document, EOS included.
      seed: the same seed gives the same batches.
      positives: query id -> ids of documents known to answer it.
      negatives: result of `encode_negatives` for the pairs.
      model: a retriever with a frozen document tower, to embed documents once; see
        `with_vectors`.

    Returns:
      An iterator over batches for `TwoTower.per_example_losses`.

    Raises:
      InputError: the batch is larger than the data, or as in `encode_pairs`; raised
        at once, not at the first batch.
    """
    require_enough(len(pairs), batch_size)
    arrays = encode_pairs(
        pairs,
        tokenizer,
        query_length=query_length,
        document_length=document_length,
        positives=positives,
    )
    arrays.update(negatives or {})
    if model is not None:
        arrays = with_vectors(model, arrays)
    return shuffled_epochs(
        lambda indices: {name: array[indices] for name, array in arrays.items()},
        len(pairs),
        batch_size,
        seed,
    )


def require_enough(count: int, batch_size: int) -> None:
    """Refuses a batch larger than the data: no epoch would contain one.

    Raises:
      InputError: the batch is larger than the data, or below 1.
    """
    validation.positive_integer("batch_size", batch_size)
    if batch_size > count:
        raise validation.InputError(
            f"batch_size is {batch_size} but there are {count} pairs; take at most "
            "as many."
        )


def shuffled_epochs(
    get_rows: Callable[[np.ndarray], dict[str, np.ndarray]],
    count: int,
    batch_size: int,
    seed: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of shuffled epochs without end, of rows read by number.

    Args:
      get_rows: maps [B] row numbers to their fields.
      count: number of rows n; their order takes 8 bytes per row.
      batch_size: rows of a batch.
      seed: the same seed gives the same batches.

    Returns:
      As `make_batches`.

    Raises:
      InputError: the batch is larger than the data; raised at once.
    """
    require_enough(count, batch_size)
    return _epochs(get_rows, count, batch_size, seed)


def _epochs(get_rows: Any, n: int, batch_size: int, seed: int) -> Iterator[dict]:
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(n)
        for start in range(0, n - batch_size + 1, batch_size):
            batch = get_rows(order[start : start + batch_size])
            batch["weights"] = np.ones(batch_size, np.float32)
            yield batch


def _positive_keys(
    rows: Sequence[Pair], keys: np.ndarray, positives: Mapping[str, Set[str]]
) -> np.ndarray:
    queries = np.array([content_key(row.query_id) for row in rows], np.int64)
    # One id can have several contents: pseudo-pairs cut their sentence out of the
    # document, another one for each pair.
    contents: dict[str, set[int]] = {}
    if positives:
        for row, key in zip(rows, keys.tolist()):
            contents.setdefault(row.document_id, set()).add(key)
    known = {row.query_id for row in rows} & positives.keys()
    more = [
        (content_key(query_id), key)
        for query_id in known
        for document_id in positives[query_id]
        for key in contents.get(document_id, ())
    ]
    added = np.array(more, np.int64).reshape([-1, 2])
    answers = KnownAnswers(
        np.concatenate([queries, added[:, 0]]), np.concatenate([keys, added[:, 1]])
    )
    return answers.others(queries, keys)

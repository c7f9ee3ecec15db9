"""Pairs as the arrays and batches that a retriever trains on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import numpy as np

from tfdpsq import validation
from tfdpsq.data.beir import Pair
from tfdpsq.retriever.encoding import Encodes, with_vectors
from tfdpsq.retriever.known_answers import KnownAnswers
from tfdpsq.retriever.model import TwoTower

# Texts tokenised at a time.
CHUNK = 1024

Arrays = Mapping[str, np.ndarray]


def content_key(text: str) -> int:
    """A 63-bit number that is equal for equal texts, now and in any process."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def encode_pairs(
    rows: Sequence[Pair],
    tokenizer: Encodes,
    query_length: int,
    document_length: int,
    positives: Mapping[str, Set[str]] | None = None,
) -> dict[str, np.ndarray]:
    """Tokenises pairs once, up front.

    Args:
      rows: n objects with `query_id`, `query`, `document_id` and `document`.
      tokenizer: the model's tokenizer.
      query_length: tokens kept of a query, EOS included.
      document_length: tokens kept of a document, EOS included.
      positives: query id -> ids of documents known to answer it, besides those
        that `rows` themselves pair it with. A document that is in no row can be
        no one's negative and is passed over.

    Returns:
      "query_ids" [n, query_length] int32, "query_lengths" [n] int32,
      "document_ids" [n, document_length] int32, "document_lengths" [n] int32,
      "document_key" [n] int64 (see `content_key`), "positive_keys" [n, P] int64:
      contents of the other known positives of the row's query, in ascending order,
      padded with -1 to the most that any row has, and at least 1.

    Raises:
      InputError: no rows, or a length below one.
    """
    arrays = encode_rows(rows, tokenizer, query_length, document_length)
    arrays["positive_keys"] = _positive_keys(
        rows, arrays["document_key"], positives or {}
    )
    return arrays


def encode_rows(
    rows: Sequence[Pair], tokenizer: Encodes, query_length: int, document_length: int
) -> dict[str, np.ndarray]:
    """What of `encode_pairs` looks at each pair alone: all but "positive_keys".

    Args:
      rows: as there.
      tokenizer: as there.
      query_length: as there.
      document_length: as there.

    Raises:
      InputError: as there.
    """
    validation.positive_integer("query_length", query_length)
    validation.positive_integer("document_length", document_length)
    if not len(rows):
        raise validation.InputError("there are no pairs to train on; give at least 1.")
    arrays = encode_documents(
        [row.document for row in rows], tokenizer, document_length
    )
    queries = _encoded([row.query for row in rows], tokenizer, query_length)
    arrays["query_ids"], arrays["query_lengths"] = queries
    return arrays


def encode_documents(
    documents: Sequence[str], tokenizer: Encodes, length: int
) -> dict[str, np.ndarray]:
    """Tokenises documents: what `encode_pairs` makes of them, without queries.

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
    ids, lengths = _encoded(documents, tokenizer, length)
    keys = np.array([content_key(document) for document in documents], np.int64)
    return {"document_ids": ids, "document_lengths": lengths, "document_key": keys}


def encode_negatives(
    rows: Sequence[Pair],
    negatives: Mapping[str, Sequence[str]],
    tokenizer: Encodes,
    document_length: int,
    count: int,
) -> dict[str, np.ndarray]:
    """Tokenises hard negatives, to go with what `encode_pairs` made of the rows.

    Args:
      rows: the n pairs.
      negatives: query id -> documents that do not answer it, hardest first; what is
        beyond `count` is left, and a query may have fewer, or none.
      tokenizer: the model's tokenizer.
      document_length: tokens kept of a document, EOS included.
      count: H, hard negatives of a row.

    Returns:
      "negative_ids" [n, H, document_length] int32, "negative_lengths" [n, H] int32 and
      "negative_keys" [n, H] int64; where there is no negative the key is -1 and the
      text one that nothing depends on.

    Raises:
      InputError: count or length below 1.
    """
    validation.positive_integer("count", count)
    numbers: dict[str, int] = {}
    chosen = np.full([len(rows), count], -1, np.int64)
    for row, pair in enumerate(rows):
        for place, text in enumerate(negatives.get(pair.query_id, ())[:count]):
            chosen[row, place] = numbers.setdefault(text, len(numbers))
    found = encode_documents(list(numbers) or [""], tokenizer, document_length)
    at, none = np.maximum(chosen, 0), chosen < 0
    return {
        # Nothing of another row's.
        "negative_ids": np.where(none[..., np.newaxis], 0, found["document_ids"][at]),
        # A mean over no tokens would be no number.
        "negative_lengths": np.where(none, 1, found["document_lengths"][at]).astype(
            np.int32
        ),
        "negative_keys": np.where(none, -1, found["document_key"][at]),
    }


def _encoded(
    texts: Sequence[str], tokenizer: Encodes, length: int
) -> tuple[np.ndarray, np.ndarray]:
    parts = [
        tokenizer.encode(texts[start : start + CHUNK], length)
        for start in range(0, len(texts), CHUNK)
    ]
    ids, lengths = zip(*parts)
    return np.concatenate([np.asarray(i) for i in ids]), np.concatenate(
        [np.asarray(n) for n in lengths]
    )


def collate(
    arrays: Arrays, indices: np.ndarray, weights: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The batch of the rows that the caller chose, e.g. by Poisson sampling.

    Args:
      arrays: what `encode_pairs` returned.
      indices: [B] row numbers. Those at padding must be valid too (say, 0): their
        content is in the batch, and nothing depends on it.
      weights: [B] 1 for rows and 0 for padding; `None` means no padding.

    Returns:
      A batch for `TwoTower.row_losses`.

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
    rows: Sequence[Pair],
    tokenizer: Encodes,
    batch_size: int,
    query_length: int,
    document_length: int,
    seed: int,
    positives: Mapping[str, Set[str]] | None = None,
    negatives: Arrays | None = None,
    model: TwoTower | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Shuffled epochs without end, all batches of one shape.

    An epoch's last rows that fill no batch are left out of it; each epoch is
    shuffled anew, so that they are others every time. This is *not* a sampler that
    DP accounting could use.

    Args:
      rows: the pairs; see `encode_pairs` for these arguments.
      tokenizer: the model's tokenizer.
      batch_size: rows of a batch, B.
      query_length: tokens kept of a query, EOS included.
      document_length: tokens kept of a document, EOS included.
      seed: the same seed gives the same batches.
      positives: query id -> ids of documents known to answer it.
      negatives: what `encode_negatives` made of the rows.
      model: one whose document tower trains nothing, to embed documents once; see
        `with_vectors`.

    Returns:
      An iterator over batches for `TwoTower.row_losses`.

    Raises:
      InputError: at once, not at the first batch: batch larger than the data, and
        as in `encode_pairs`.
    """
    require_enough(len(rows), batch_size)
    arrays = encode_pairs(rows, tokenizer, query_length, document_length, positives)
    arrays.update(negatives or {})
    if model is not None:
        arrays = with_vectors(model, arrays)
    return shuffled_epochs(
        lambda indices: {name: array[indices] for name, array in arrays.items()},
        len(rows),
        batch_size,
        seed,
    )


def require_enough(count: int, batch_size: int) -> None:
    """Refuses a batch larger than the data, which no epoch would hold.

    Raises:
      InputError: it is, or is below 1.
    """
    validation.positive_integer("batch_size", batch_size)
    if batch_size > count:
        raise validation.InputError(
            f"batch_size is {batch_size} but there are {count} pairs; take at most "
            "as many."
        )


def shuffled_epochs(
    take: Callable[[np.ndarray], dict[str, np.ndarray]],
    count: int,
    batch_size: int,
    seed: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Shuffled epochs without end, of rows that are given by number.

    Args:
      take: [B] row numbers to their fields.
      count: n, how many rows there are; their order takes 8 bytes of each.
      batch_size: rows of a batch.
      seed: the same seed gives the same batches.

    Returns:
      As `make_batches`.

    Raises:
      InputError: at once: batch larger than the data.
    """
    require_enough(count, batch_size)
    return _epochs(take, count, batch_size, seed)


def _epochs(take, n: int, batch_size: int, seed: int) -> Iterator[dict]:
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(n)
        for start in range(0, n - batch_size + 1, batch_size):
            batch = take(order[start : start + batch_size])
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

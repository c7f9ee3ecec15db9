"""Tokenises pairs into the arrays that a generator trains on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdpsq import validation
from tfdpsq.data.texts import Pair
from tfdpsq.data.tokenization import PROMPT, Tokenizer

_CHUNK = 1024


def encode_pairs(
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    *,
    query_length: int,
    document_length: int,
    prompt: str = PROMPT,
) -> dict[str, np.ndarray]:
    """Tokenises queries, and documents with the prompt before them.

    Args:
      pairs: n pairs.
      tokenizer: the model's tokenizer.
      query_length: tokens kept of the query, EOS included.
      document_length: tokens kept of prompt and document, EOS included.
      prompt: text before the document.

    Returns:
      "document_ids" [n, document_length] int32, "document_lengths" [n] int32,
      "query_ids" [n, query_length] int32, "query_lengths" [n] int32.

    Raises:
      InputError: a length below one.
    """
    validation.positive_integer("query_length", query_length)
    validation.positive_integer("document_length", document_length)
    parts: dict[str, list[np.ndarray]] = {}
    for start in range(0, len(pairs), _CHUNK):
        chunk = pairs[start : start + _CHUNK]
        for name, texts, length in (
            ("document", [prompt + pair.document for pair in chunk], document_length),
            ("query", [pair.query for pair in chunk], query_length),
        ):
            ids, lengths = tokenizer.encode(texts, length)
            parts.setdefault(f"{name}_ids", []).append(np.asarray(ids))
            parts.setdefault(f"{name}_lengths", []).append(np.asarray(lengths))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}

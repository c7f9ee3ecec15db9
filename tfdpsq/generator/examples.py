"""Tokenises pairs into the arrays that a generator trains on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdpsq import validation
from tfdpsq.data.texts import Pair
from tfdpsq.data.tokenization import PROMPT, Tokenizer, encode_all


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
    documents = (prompt + pair.document for pair in pairs)
    queries = (pair.query for pair in pairs)
    ids, lengths = encode_all(tokenizer.encode, documents, document_length)
    arrays = {"document_ids": ids, "document_lengths": lengths}
    ids, lengths = encode_all(tokenizer.encode, queries, query_length)
    return {**arrays, "query_ids": ids, "query_lengths": lengths}

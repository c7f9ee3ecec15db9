"""From texts to what a generator reads: prompt, tokens, lengths."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data.texts import Pair
from tfdpsq.data.tokenization import CHUNK, PROMPT, Tokenizer, encode_all

# Texts longer than these are cut (paper, section 4.1).
DOCUMENT_LENGTH, QUERY_LENGTH = 384, 128


class Preprocessor:
    """Tokenises documents, with a prompt before them, and queries.

    Called with pairs it returns a `tf.data.Dataset` for `T5QueryGenerator.fit`.

    Attributes:
      tokenizer: the model's vocabulary.
      prompt: text before every document.
      document_length: tokens kept of prompt and document, L, EOS included.
      query_length: tokens kept of a query, T, EOS included.
    """

    CONFIG = ("prompt", "document_length", "query_length")

    def __init__(
        self,
        tokenizer: Tokenizer | str | os.PathLike,
        prompt: str = PROMPT,
        document_length: int = DOCUMENT_LENGTH,
        query_length: int = QUERY_LENGTH,
    ) -> None:
        """Stores the attributes; `tokenizer` may be a SentencePiece model's path."""
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer(tokenizer)
        self.tokenizer, self.prompt = tokenizer, prompt
        self.document_length = validation.positive_integer(
            "document_length", document_length
        )
        self.query_length = validation.positive_integer("query_length", query_length)

    def __call__(self, pairs: Iterable[Pair]) -> tf.data.Dataset:
        """Returns the examples of n pairs, in order, not batched.

        Their tokens are held in memory. The n elements are (inputs, labels): rows of
        `arrays`, and the query's ids again.
        """
        arrays = self.arrays(pairs)
        return tf.data.Dataset.from_tensor_slices((arrays, arrays["query_ids"]))

    def arrays(self, pairs: Iterable[Pair]) -> dict[str, np.ndarray]:
        """Tokenises n pairs.

        Returns:
          "document_ids" [n, L] and "query_ids" [n, T], padded with 0, and their
          "document_lengths" and "query_lengths" [n]; all int32.
        """
        pairs = list(pairs)
        ids, lengths = self.documents(pair.document for pair in pairs)
        found = {"document_ids": ids, "document_lengths": lengths}
        ids, lengths = self.queries(pair.query for pair in pairs)
        return {**found, "query_ids": ids, "query_lengths": lengths}

    def documents(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids [n, L] and lengths [n] of documents, the prompt before each."""
        texts = (self.prompt + text for text in texts)
        return encode_all(self.tokenizer.encode, texts, self.document_length)

    def stream(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yields the ids of each document, without padding, `CHUNK` read at a time."""
        left = iter(texts)
        while chunk := list(itertools.islice(left, CHUNK)):
            ids, lengths = self.documents(chunk)
            yield from (row[:length] for row, length in zip(ids, lengths))

    def queries(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids [n, T] and lengths [n] of queries."""
        return encode_all(self.tokenizer.encode, texts, self.query_length)

    def decode(self, ids: Any) -> list[str]:
        """Returns the texts of token ids [n, T], with single spaces."""
        texts: Sequence[bytes] = self.tokenizer.decode(ids).numpy()
        return [" ".join(text.decode("utf-8", "replace").split()) for text in texts]

    def get_config(self) -> dict[str, Any]:
        """Returns prompt and lengths, without the vocabulary."""
        return {name: getattr(self, name) for name in self.CONFIG}

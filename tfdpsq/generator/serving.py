"""Words and a generator as one SavedModel: text in, documents out.

import tensorflow_text  # its ops
model = tf.saved_model.load(directory)
found = model.search(tf.constant(["how to sort"]), tf.constant(5))
found["ids"], found["scores"]                       # [1, 5]
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq.data.files import atomic_directory
from tfdpsq.data.tokenization import PROMPT, Tokenizer, encode_all
from tfdpsq.generator.likelihood import log_likelihoods
from tfdpsq.layers import word_search
from tfdpsq.validation import InputError, in_range, positive_integer


class RerankedSearch(tf.Module):
    """A search by BM25 whose best documents a generator orders again.

    Each of the best `depth` documents of a query gets the score

        (1 - weight) * BM25 + weight * log p(query | document)

    and the others keep their order below, as in stage `evaluate`. Its one signature,
    for any number of texts:

    | name | takes | gives |
    |---|---|---|
    | `search` | texts [Q] string, k [] int32 | ids [Q, k] string, scores [Q, k] |

    A k above the number of documents gives all of them. Documents without a word of the
    query are not found: such places hold the id "" and the score -inf.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        tokenizer: Tokenizer,
        ids: Sequence[str],
        documents: Iterable[str],
        postings: Any,
        depth: int = 20,
        weight: float = 0.25,
        document_length: int = 384,
        query_length: int = 128,
        prompt: str = PROMPT,
    ):
        """Tokenises the documents.

        Args:
          model: a `T5QueryGenerator`.
          tokenizer: its vocabulary.
          ids: N document ids.
          documents: their texts, in the same order, read as a stream.
          postings: of the same documents: what `evaluation.BM25.postings` returns.
          depth: documents of each query that the generator orders.
          weight: of the likelihood, in [0, 1].
          document_length: tokens kept of prompt and document, L, EOS included. Memory
            holds N·L of them.
          query_length: tokens kept of a query, EOS included.
          prompt: text before every document.

        Raises:
          InputError: a setting out of range, or documents, ids and postings that do not
            fit each other.
        """
        super().__init__(name="reranked_search")
        self._weight = in_range("weight", weight, 0, 1)
        self._depth = min(positive_integer("depth", depth), len(ids))
        self._query_length = positive_integer("query_length", query_length)
        length = positive_integer("document_length", document_length)
        order = word_search.by_id(ids)
        self._words = word_search.WordSearch.from_postings(
            postings, [ids[row] for row in order]
        )
        # Tokens of two bytes where that is enough.
        dtype = np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.int32
        texts = (prompt + text for text in documents)
        tokens, lengths = encode_all(tokenizer.encode, texts, length, dtype)
        if len(tokens) != len(ids):
            raise InputError(
                f"there are {len(ids)} ids and {len(tokens)} documents. Give one id "
                "for each document."
            )
        self._ids = tf.Variable([ids[row] for row in order], trainable=False)
        self._documents = tf.Variable(tokens[order], trainable=False)
        self._lengths = tf.Variable(lengths[order], trainable=False)
        self._tokenizer = tokenizer
        # A Keras model would be saved with functions of its own.
        self._weights = model.variables

        @tf.autograph.experimental.do_not_convert
        def nats_of(given: tuple[tf.Tensor, tf.Tensor, tf.Tensor]) -> tf.Tensor:
            """Returns one query's likelihoods, [depth], from (rows, ids, length)."""
            rows, query, real = given
            count = self._depth * real
            return log_likelihoods(
                model,
                tf.cast(tf.gather(self._documents, rows), tf.int32),
                tf.gather(self._lengths, rows),
                tf.range(self._depth),
                tf.repeat(query[tf.newaxis, :real], self._depth, axis=0),
                tf.fill([self._depth], real),
                tf.range(count),
                count,
            )

        self._nats_of = nats_of

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.string), tf.TensorSpec([], tf.int32)],
        autograph=False,
    )
    def search(self, texts: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        """Texts [Q] to the k best documents of each; see the class."""
        k = tf.clip_by_value(k, 1, tf.shape(self._ids)[0])
        words = word_search.best_of(
            self._words.scores(texts), tf.maximum(k, self._depth)
        )
        rows, there = words.rows[:, : self._depth], words.there[:, : self._depth]
        # One query at a time: memory is that of `depth` documents.
        nats = tf.map_fn(
            self._nats_of,
            (rows, *self._tokenizer.encode(texts, self._query_length)),
            fn_output_signature=tf.TensorSpec([self._depth], tf.float32),
            parallel_iterations=1,
        )
        scores = tf.cast(words.scores, tf.float64)
        first = (1 - self._weight) * scores[:, : self._depth]
        first += self._weight * tf.cast(nats, tf.float64)
        infinite = tf.constant(np.inf, tf.float64)
        least = tf.reduce_min(tf.where(there, first, infinite), axis=1, keepdims=True)
        first = tf.where(there, first, -infinite)
        order = tf.argsort(first, axis=1, direction="DESCENDING", stable=True)
        # The best of the rest is one below the last of the first.
        rest = scores[:, self._depth :]
        rest += least - 1 - rest[:, :1]
        found = word_search.Found(
            tf.concat(
                [tf.gather(rows, order, batch_dims=1), words.rows[:, self._depth :]],
                axis=1,
            )[:, :k],
            tf.concat([tf.gather(first, order, batch_dims=1), rest], axis=1)[:, :k],
            words.there[:, :k],
        )
        return word_search.named(found, self._ids)

    def export(self, directory: str | os.PathLike) -> None:
        """Writes a SavedModel, whole or not at all.

        Args:
          directory: it must not exist, or be empty.

        Raises:
          InputError: it is taken or cannot be written.
        """
        with atomic_directory(directory) as partial:
            tf.saved_model.save(
                self, os.fspath(partial), signatures={"search": self.search}
            )

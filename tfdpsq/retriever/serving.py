"""Retriever and index as one SavedModel: text in, documents out.

import scann, tensorflow_text  # their ops; scann only where the kind needs it
model = tf.saved_model.load(directory)
found = model.search(tf.constant(["how to sort"]), tf.constant(5))
found["ids"], found["scores"]                       # [1, 5]
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq.data import Tokenizer
from tfdpsq.data.files import atomic_directory
from tfdpsq.layers import word_search
from tfdpsq.retriever.index import ScannBruteForce, ScannTree
from tfdpsq.retriever.model import TwoTower
from tfdpsq.validation import InputError, in_range, one_of, positive_integer

_TEXTS_AND_K = (tf.TensorSpec([None], tf.string), tf.TensorSpec([], tf.int32))
KINDS = ("exact", "scann_brute_force", "scann")


class SearchModel(tf.Module):
    """Tokenizer, both towers and an index of documents.

    Signatures, all for any number of texts:

    | name | takes | gives |
    |---|---|---|
    | `search` | texts [Q] string, k [] int32 | ids [Q, k] string, scores [Q, k] |
    | `search_hybrid` | the same; only with `postings` | the same, fused with BM25 |
    | `encode_queries` | texts [Q] string | embeddings [Q, D] float32 |
    | `encode_documents` | texts [N] string | embeddings [N, D] float32 |

    A k above the number of documents gives all of them. Kind "scann" alone may find
    fewer than k: such places hold the id "" and the score -inf. Kind "exact" is a
    matrix product and needs no other library's ops than tensorflow-text's.
    """

    def __init__(
        self,
        model: TwoTower,
        tokenizer: Tokenizer,
        ids: Sequence[str],
        embeddings: np.ndarray,
        kind: str = "exact",
        postings: Any = None,
        weight: float = 0.3,
        depth: int = 100,
    ):
        """Builds the index.

        Args:
          model: the retriever.
          tokenizer: its tokenizer.
          ids: N document ids.
          embeddings: [N, D] float32, by the model's document tower.
          kind: "exact", "scann_brute_force" (exact) or "scann" (`ScannTree`).
          postings: of the same documents, such as `evaluation.BM25.postings` returns;
            `None` has no `search_hybrid`.
          weight: of the retriever in `search_hybrid`, in [0, 1]; BM25 has 1 - weight.
          depth: documents of each ranking that are fused, so that at most twice as
            many are found; see `evaluation.fuse`.

        Raises:
          InputError: an unknown kind, shapes that do not fit, postings of other
            documents, a weight or depth out of range, no document, or too few for
            "scann".
          ImportError: scann is needed and not installed.
        """
        super().__init__(name="search_model")
        one_of("kind", kind, KINDS)
        vectors = np.ascontiguousarray(embeddings, np.float32)
        if vectors.shape != (len(ids), model.config.embedding_dim) or not len(ids):
            raise InputError(
                f"embeddings have shape {vectors.shape} for {len(ids)} ids; they must "
                f"be [{len(ids)}, {model.config.embedding_dim}], of one document at "
                "least."
            )
        self._words: word_search.WordSearch | None = None
        self._hybrid: Any = None
        self._weight = in_range("weight", weight, 0, 1)
        self._depth = min(positive_integer("depth", depth), len(ids))
        if postings is not None:
            order = word_search.by_id(ids)
            ids, vectors = [ids[row] for row in order], vectors[order]
            self._words = word_search.WordSearch.from_postings(postings, ids)
            # Not a decorated method: saving would trace it without words, too.
            self._hybrid = tf.function(
                self._search_both, input_signature=_TEXTS_AND_K, autograph=False
            )
        self._config, self._tokenizer = model.config, tokenizer
        self._query_tower, self._document_tower = (
            model.query_tower,
            model.document_tower,
        )
        self._encoders = model.encode_queries, model.encode_documents
        self._ids = tf.Variable(list(ids), trainable=False)
        self._layer: Any = None
        self._documents = None
        if kind == "exact":
            self._documents = tf.Variable(vectors, trainable=False)
        else:
            layer = ScannTree if kind == "scann" else ScannBruteForce
            self._layer = layer(k=min(100, len(ids))).index(vectors)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)], autograph=False)
    def encode_queries(self, texts: tf.Tensor) -> dict[str, tf.Tensor]:
        """Texts [Q] to embeddings [Q, D] of unit length."""
        return {"embeddings": self._embedded(texts, 0, self._config.query_length)}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)], autograph=False)
    def encode_documents(self, texts: tf.Tensor) -> dict[str, tf.Tensor]:
        """Texts [N] to embeddings [N, D] of unit length."""
        return {"embeddings": self._embedded(texts, 1, self._config.document_length)}

    @tf.function(input_signature=_TEXTS_AND_K, autograph=False)
    def search(self, texts: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        """Texts [Q] to the k best documents of each; see the class."""
        return word_search.named(self._nearest(texts, k), self._ids)

    def search_hybrid(self, texts: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        """Texts [Q] to the k best documents of each by BM25 and the retriever.

        Raises:
          InputError: there are no postings.
        """
        if self._hybrid is None:
            raise InputError(
                "this SearchModel has no words to search by. Give it `postings`, such "
                "as evaluation.BM25(documents).postings()."
            )
        return self._hybrid(texts, k)

    def _search_both(self, texts: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns what `search_hybrid` does, inside a graph."""
        assert self._words is not None
        words = word_search.best_of(self._words.scores(texts), self._depth)
        k = tf.clip_by_value(k, 1, tf.minimum(2 * self._depth, tf.shape(self._ids)[0]))
        found = self._nearest(texts, self._depth)
        return word_search.named(
            word_search.fused_rows(words, found, self._weight, k), self._ids
        )

    def export(self, directory: str | os.PathLike) -> None:
        """Writes a SavedModel, whole or not at all.

        Args:
          directory: it must not exist, or be empty.

        Raises:
          InputError: it is taken or cannot be written.
        """
        signatures = {
            "search": self.search,
            "encode_queries": self.encode_queries,
            "encode_documents": self.encode_documents,
        }
        if self._hybrid is not None:
            signatures["search_hybrid"] = self._hybrid
        with atomic_directory(directory) as partial:
            tf.saved_model.save(
                self,
                os.fspath(partial),
                signatures=signatures,
                options=tf.saved_model.SaveOptions(namespace_whitelist=["Scann"]),
            )

    def _nearest(self, texts: tf.Tensor, k: tf.Tensor | int) -> word_search.Found:
        """Returns the k documents nearest to texts [Q]."""
        queries = self._embedded(texts, 0, self._config.query_length)
        k = tf.clip_by_value(k, 1, tf.shape(self._ids)[0])
        if self._documents is not None:
            product = tf.matmul(queries, self._documents, transpose_b=True)
            scores, rows = tf.math.top_k(product, k)
        else:
            scores, rows = self._layer.nearest(queries, k)
            # It has no column for places that it could fill for no query.
            lacking = [[0, 0], [0, k - tf.shape(scores)[1]]]
            scores = tf.pad(scores, lacking, constant_values=np.nan)
            rows = tf.pad(rows, lacking)
        # ScaNN marks a place that it could not fill by NaN.
        return word_search.Found(rows, scores, tf.math.is_finite(scores))

    def _embedded(self, texts: tf.Tensor, side: int, length: int) -> tf.Tensor:
        return self._encoders[side](*self._tokenizer.encode(texts, length))

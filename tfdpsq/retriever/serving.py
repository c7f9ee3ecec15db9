"""Retriever and index as one SavedModel: text in, documents out.

import scann, tensorflow_text  # their ops; scann only where the kind needs it
model = tf.saved_model.load(directory)
found = model.search(tf.constant(["how to sort"]), tf.constant(5))
found["ids"], found["scores"]                       # [1, 5]
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpsq.data.io import atomic_directory
from tfdpsq.retriever.index import top_k_layer
from tfdpsq.retriever.model import TwoTower

_TEXTS = tf.TensorSpec([None], tf.string)


class SearchModel(tf.Module):
    """Tokenizer, both towers and an index of documents.

    Signatures, all for any number of texts:

    | name | takes | gives |
    |---|---|---|
    | `search` | texts [Q] string, k [] int32 | ids [Q, k] string, scores [Q, k] |
    | `encode_queries` | texts [Q] string | embeddings [Q, D] float32 |
    | `encode_documents` | texts [N] string | embeddings [N, D] float32 |

    A k above the number of documents gives all of them. Kind "scann" alone may find
    fewer than k: such places hold the id "" and the score -inf. Kind "brute_force"
    needs no other library's ops than tensorflow-text's.
    """

    def __init__(
        self,
        model: TwoTower,
        ids: Sequence[str],
        embeddings: np.ndarray,
        kind: str = "brute_force",
    ):
        """Builds the index.

        Args:
          model: the retriever, with its tokenizer.
          ids: N document ids, at least one.
          embeddings: [N, D] float32, by the model's document tower.
          kind: see `index.top_k_layer`.

        Raises:
          InputError: no tokenizer.
        """
        super().__init__(name="search_model")
        self._tokenizer = model.tokenizer  # its resources are exported from here
        self._queries, self._documents = model.query_model, model.document_model
        self._size = len(ids)
        self._index = top_k_layer(kind, len(ids), 100).index(
            tf.constant(embeddings), tf.constant(list(map(tf.compat.as_str_any, ids)))
        )

    @tf.function(input_signature=[_TEXTS], autograph=False)
    def encode_queries(self, texts: tf.Tensor) -> dict[str, tf.Tensor]:
        """Texts [Q] to embeddings [Q, D] of unit length."""
        return {"embeddings": self._queries(texts)}

    @tf.function(input_signature=[_TEXTS], autograph=False)
    def encode_documents(self, texts: tf.Tensor) -> dict[str, tf.Tensor]:
        """Texts [N] to embeddings [N, D] of unit length."""
        return {"embeddings": self._documents(texts)}

    @tf.function(input_signature=[_TEXTS, tf.TensorSpec([], tf.int32)], autograph=False)
    def search(self, texts: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        """Texts [Q] to the k best documents of each; see the class."""
        k = tf.clip_by_value(k, 1, self._size)
        scores, ids = self._index(self._queries(texts), k=k)
        # ScaNN marks a place that it could not fill by NaN, or has no column for it.
        lacking = [[0, 0], [0, k - tf.shape(scores)[1]]]
        scores = tf.pad(scores, lacking, constant_values=np.nan)
        found = tf.math.is_finite(scores)
        return {
            "ids": tf.where(found, tf.pad(ids, lacking, constant_values=""), ""),
            "scores": tf.where(found, scores, -np.inf),
        }

    def export(self, directory: str | os.PathLike) -> None:
        """Writes a SavedModel to a new or empty directory, whole or not at all."""
        with atomic_directory(directory) as partial:
            tf.saved_model.save(
                self,
                os.fspath(partial),
                signatures={
                    "search": self.search,
                    "encode_queries": self.encode_queries,
                    "encode_documents": self.encode_documents,
                },
                options=tf.saved_model.SaveOptions(namespace_whitelist=["Scann"]),
            )

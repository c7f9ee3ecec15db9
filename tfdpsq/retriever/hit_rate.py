"""Validation of a retriever while it is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

_BATCH = 128  # texts embedded at a time


class HitRate(tf.keras.callbacks.Callback):
    """Measures `tfrs.metrics.FactorizedTopK` on held-out pairs after every epoch.

    Adds `val_factorized_top_k/top_K_categorical_accuracy` to the logs: the share of
    queries whose document is among the K nearest of the held-out documents (a hit rate,
    not Recall@k); on private pairs a private read.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], ks: Sequence[int] = (1, 10)):
        """Takes `encode_pairs` of held-out pairs; leaves K above the documents out."""
        super().__init__()
        self._arrays = arrays
        self._keys, self._first = np.unique(arrays["document_key"], return_index=True)
        self._ks = [k for k in ks if k <= len(self._keys)]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Measures, and adds to the logs."""
        model, own = self.model, self._arrays["document_key"]
        documents = self._embedded(model.encode_documents, "document", self._first)
        layer = tfrs.layers.factorized_top_k.BruteForce(k=max(self._ks))
        index = layer.index(documents, tf.constant(self._keys))
        metric = tfrs.metrics.FactorizedTopK(index, self._ks)
        queries = self._embedded(model.encode_queries, "query", np.arange(len(own)))
        pairs = queries, tf.gather(documents, np.searchsorted(self._keys, own))
        # Without ids TFRS compares scores, which rounding can reorder.
        ids = {"true_candidate_ids": tf.constant(own)}

        def update() -> None:  # metrics of a scope count in replicas, the same in each
            tf.distribute.get_strategy().run(metric.update_state, pairs, ids)

        tf.function(update)()
        for measured in metric.metrics:
            logs[f"val_{measured.name}"] = float(measured.result())

    def _embedded(self, encode: Any, side: str, rows: np.ndarray) -> tf.Tensor:
        ids, lengths = self._arrays[f"{side}_ids"], self._arrays[f"{side}_lengths"]
        parts = np.split(rows, list(range(_BATCH, len(rows), _BATCH)))
        return tf.concat([encode(ids[part], lengths[part]) for part in parts], axis=0)

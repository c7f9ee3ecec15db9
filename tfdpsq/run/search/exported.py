"""Shared by the stages that export a search as a SavedModel."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.framework import ops

from tfdpsq import evaluation
from tfdpsq.run.core import sources

SEARCH = "search"
# More names than a process creates before it exports.
_ROUND = 1_000_000


def postings(corpus: str, ids: Sequence[str]) -> evaluation.Postings:
    """Returns BM25's index of the documents `ids`, by the texts of the corpus."""
    wanted = set(ids)
    texts = ((d.id, d.content) for d in sources.open_beir(corpus).documents())
    return evaluation.BM25(each for each in texts if each[0] in wanted).postings()


def start_numbering() -> None:
    """Makes TensorFlow's generated names independent of the process's earlier work.

    An exported model holds names of functions and variables with numbers that count
    what the process did before, such as the shards it made. Keras's counters restart
    (existing models keep their names); TensorFlow's cannot, and go on from the next
    million.
    """
    tf.keras.backend.clear_session()
    while ops.uid() % _ROUND:
        pass

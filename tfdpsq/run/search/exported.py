"""Shared by the stages that export a search as a SavedModel."""

from __future__ import annotations

import pathlib

import tensorflow as tf
from tensorflow.python.framework import ops

from tfdpsq.data.io import write_json

SEARCH = "search"
# More names than a process creates before it exports.
_ROUND = 1_000_000


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


def add_config(model: pathlib.Path) -> None:
    """Adds the file that is marked with the certificate, to a search in `out`.

    A search is deployed without the rest of its stage's output, and holds the weights.
    """
    write_json(model / "config.json", {"format": "tensorflow_saved_model"})

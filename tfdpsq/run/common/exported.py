"""Shared by stages that export a SavedModel."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops

from tfdpsq.data import io

# More names than a process creates before it exports.
_ROUND = 1_000_000


def start_numbering() -> None:
    """Makes TensorFlow's generated names independent of the process's earlier work.

    An exported model holds numbers that count what the process did before, such as the
    batches of private queries that a job evaluated. Keras's counters restart (existing
    models keep their names); TensorFlow's cannot, and goes on from the next million.
    """
    tf.keras.backend.clear_session()
    while ops.uid() % _ROUND:
        pass


def export(model: Any, directory: pathlib.Path) -> None:
    """Exports a model next to a config that is marked with the certificate.

    It is deployed without the rest of its stage's output, and holds the weights.
    """
    model.export(os.fspath(directory))
    io.write_json(directory / "config.json", {"format": "tensorflow_saved_model"})

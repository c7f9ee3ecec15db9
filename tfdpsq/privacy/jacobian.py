"""Checks that make tensorflow-privacy's per-example Jacobians safe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpsq.privacy.fast import products


class FiniteTape:
    """A gradient tape whose Jacobians hold no NaN and no infinity.

    Clipping by norm turns one infinite entry into NaN for the whole sum. A row
    whose gradient has no finite norm contributes zero instead, which is within
    every clip norm.

    Attributes:
      all_finite: scalar bool, whether every row's gradient had a finite norm; set
        by `jacobian`. Where it is false, zeroed rows may be innocent: inside one
        batched product 0 · NaN is NaN, so a bad row spoils its neighbours.
    """

    def __init__(self, tape: tf.GradientTape):
        """Wraps the tape that recorded the losses."""
        self._tape = tape
        self.all_finite = tf.constant(True)

    def __enter__(self) -> FiniteTape:
        """Goes on recording."""
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> Any:
        """Stops recording."""
        return self._tape.__exit__(*exception)

    def watch(self, tensors: tf.Tensor) -> None:
        """Watches as the tape does."""
        self._tape.watch(tensors)

    def jacobian(
        self, target: tf.Tensor, sources: Sequence[tf.Variable], **options: Any
    ) -> list[tf.Tensor]:
        """Returns the tape's Jacobian, with zeros for rows whose norm is not finite."""
        options["unconnected_gradients"] = tf.UnconnectedGradients.ZERO
        jacobians = [
            tf.convert_to_tensor(j)
            for j in self._tape.jacobian(target, sources, **options)
        ]
        squared = tf.add_n(
            [
                tf.reduce_sum(tf.square(tf.cast(j, tf.float32)), range(1, j.shape.rank))
                for j in jacobians
            ]
        )
        finite = tf.math.is_finite(squared)
        self.all_finite = tf.reduce_all(finite)
        columns = [
            tf.reshape(finite, [-1] + [1] * (j.shape.rank - 1)) for j in jacobians
        ]
        return [
            products.pinned(tf.where(column, j, 0))
            for column, j in zip(columns, jacobians)
        ]

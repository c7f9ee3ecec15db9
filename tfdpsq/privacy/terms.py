"""What a loss function returns: one loss per row, or coupled losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Union

import tensorflow as tf

from tfdpsq import validation


class Coupled(NamedTuple):
    """Losses of rows that read each other, which know how to differentiate themselves.

    Attributes:
      losses: [rows] float, rows static.
      gradient: maps coefficients [rows], constants, and variables to the gradient of
        Σ_r coefficients[r] · losses[r] by each of them, dense.
    """

    losses: tf.Tensor
    gradient: Callable[[tf.Tensor, Sequence[tf.Variable]], Sequence[tf.Tensor]]


# What `per_example_losses` functions return.
Losses = Union[tf.Tensor, Coupled]


def require_rows(losses: tf.Tensor) -> tf.Tensor:
    """The losses, if they are one per row.

    Args:
      losses: [rows] float, rows static.

    Raises:
      InputError: anything else, such as a loss already reduced to a scalar.
    """
    if losses.shape.rank != 1 or losses.shape[0] is None:
        raise validation.InputError(
            f"losses have shape {losses.shape}; per-example clipping needs a vector "
            "of static length, one loss per row. Use reduction=NONE and a fixed "
            "batch size."
        )
    return losses


def require_losses(found: Losses) -> tf.Tensor:
    """Returns a loss function's result, if it is one loss per row.

    Raises:
      InputError: a vector of no static length, or coupled losses.
    """
    if isinstance(found, Coupled):
        raise validation.InputError(
            "the loss is coupled and differentiates itself, but was not declared to. "
            "Set coupled to True, in train or make_logical_step."
        )
    return require_rows(found)

"""Return types of loss functions: losses by row, terms of them, or coupled losses.

DP-SGD clips one gradient per row. A loss that reads several rows at once may be
taken apart otherwise: into values v_r whose gradients are clipped one by one, and
coefficients c_r that say how much each counts (`Terms`),

    Σ_r c_r · clip(∇v_r, C).

Or it differentiates itself, a row at a time (`Coupled`; see `coupled`). What one row
can move in such a sum is for those who choose the loss to derive, and to declare as
`sensitivity_multiplier`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Union

import tensorflow as tf

from tfdpsq import validation


class Terms(NamedTuple):
    """Values that a loss function returns in place of losses.

    Attributes:
      values: [R] float, R static; value r runs layers on inputs of its own alone. Or,
        where all at once would not fit in memory, a function of a part's number, an
        int32 scalar, to [R] of them. It computes what the coefficients were made of:
        dropout, if any, must follow from the part's number (`layers.dropout_seed`). Of
        up to four rows, which `train` tries, all are wanted at once.
      coefficients: [R] float, or [parts, R], constants to the gradient; where one is 0
        or no finite number the term contributes exactly zero, whatever its gradient.
      losses: [rows] float, one per row of the batch, for reporting alone.
    """

    values: Any
    coefficients: tf.Tensor
    losses: tf.Tensor


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
Losses = Union[tf.Tensor, Terms, Coupled]


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


def require_losses(found: Losses) -> tf.Tensor | Terms:
    """Returns a loss function's result, if it has the shapes that are needed.

    Raises:
      InputError: losses or values that are no vector of static length, or
        coefficients of another.
    """
    if isinstance(found, Coupled):
        raise validation.InputError(
            "the loss is coupled and differentiates itself, but was not declared to. "
            "Set coupled to True, in train or make_logical_step."
        )
    if not isinstance(found, Terms):
        return require_rows(found)
    values, coefficients, losses = found
    require_rows(losses)
    if callable(values):
        raise validation.InputError(
            "the loss is made of terms in parts, which are added up only where rows "
            "are declared to read each other: set microbatch_size to None and "
            "sensitivity_multiplier above 1, or return all values at once."
        )
    if coefficients.shape != require_rows(values).shape:
        raise validation.InputError(
            f"there are coefficients of shape {coefficients.shape} for values of "
            f"shape {values.shape}; give one for each."
        )
    return found


def is_in_parts(found: Losses) -> bool:
    """Returns whether a loss function returned terms a part at a time."""
    return isinstance(found, Terms) and callable(found.values)


def sum_of_parts(
    found: Terms,
    clipped_sum: Callable[[Callable[[], Terms]], Sequence[tf.Tensor]],
    zeros: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Adds up terms in parts, of which one is in memory at a time.

    Args:
      found: terms in parts.
      clipped_sum: maps a function that returns one part's terms to their sum, one
        tensor per variable.
      zeros: where each sum begins.

    Returns:
      The sums; parts after the last coefficient other than 0 are not computed.
    """
    parts = found.coefficients.shape[0]
    wanted = tf.reduce_any(found.coefficients != 0, axis=1)
    end = tf.reduce_max(tf.where(wanted, tf.range(parts) + 1, 0))

    def add(part: tf.Tensor, *sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
        coefficients = found.coefficients[part]

        def terms() -> Terms:
            values = found.values(part)
            return Terms(values, coefficients, tf.zeros_like(coefficients))

        added = clipped_sum(terms)
        return part + 1, *(t + tf.cast(one, t.dtype) for t, one in zip(sums, added))

    _, *sums = tf.while_loop(
        lambda part, *_: part < end,
        add,
        (tf.constant(0), *zeros),
        maximum_iterations=parts,
        parallel_iterations=1,
    )
    return sums


def total_of(found: Losses, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The scalar whose plain gradient is the sum without clipping, and the losses.

    Args:
      found: what a loss function returned.
      weights: [rows], 0 for padding.
    """
    if isinstance(found, Terms):
        coefficients = _finite(found.coefficients)
        # `where` and not a product alone, as 0 · NaN would not be 0.
        values = tf.where(coefficients != 0, found.values, 0.0)
        return tf.reduce_sum(coefficients * values), found.losses
    losses = tf.where(weights > 0, found, 0.0)
    return tf.reduce_sum(losses), losses


def _finite(coefficients: tf.Tensor) -> tf.Tensor:
    constants = tf.stop_gradient(coefficients)
    return tf.where(tf.math.is_finite(constants), constants, 0.0)


def factors_of(found: Losses, weights: tf.Tensor | None) -> tf.Tensor | None:
    """Returns the factor of each clipped gradient; `None` for 1 throughout.

    Args:
      found: what a loss function returned.
      weights: [rows], not above 0 for padding; `None` if there is none.
    """
    if isinstance(found, Terms):
        return _finite(found.coefficients)
    return None if weights is None else tf.where(weights > 0, 1.0, 0.0)

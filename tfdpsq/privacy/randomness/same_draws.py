"""The same random numbers for all units of a batch, for trials.

Layers' random numbers are by place. Where all units have the same, only a loss or a
gradient that reads its place can tell one from another.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import tensorflow as tf


@dataclasses.dataclass
class SameDraws:
    """Units that have the same random numbers.

    Attributes:
      units: of the batch; 1 leaves all numbers as they are.
      complete: False once a layer draws from a seed by itself, or has no numbers by
        unit.
    """

    units: int
    complete: bool = True


_OPEN: contextvars.ContextVar[SameDraws | None] = contextvars.ContextVar(
    "same_draws", default=None
)


@contextlib.contextmanager
def same_draws(units: int) -> Iterator[SameDraws]:
    """While inside, `replay.replayable` gives all units the numbers of the first."""
    found = SameDraws(units)
    token = _OPEN.set(found)
    try:
        yield found
    finally:
        _OPEN.reset(token)


def of_first_unit(drawn: tf.Tensor) -> tf.Tensor:
    """Returns random numbers [units * any, ...], those of the first unit for each."""
    found = _OPEN.get()
    if found is None:
        return drawn
    size = drawn.shape[0] if drawn.shape.rank else None
    if size is None or size % found.units:
        found.complete = False
        return drawn
    times = [found.units] + [1] * (drawn.shape.rank - 1)
    return tf.tile(drawn[: size // found.units], times)


def not_by_unit() -> None:
    """Notes that a layer draws numbers that units cannot be given one by one."""
    found = _OPEN.get()
    if found is not None:
        found.complete = False

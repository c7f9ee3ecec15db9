"""From a draw of row numbers to the padded batch that a logical step takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.randomness.sampling import Draw


def rows_at_once(plan: PrivacyPlan, microbatch_size: int) -> int:
    """Rows of a microbatch, at most those of the largest draw: the rest is padding."""
    return min(microbatch_size, plan.max_rows)


def require_microbatches(max_rows: int, microbatch_size: int, replicas: int) -> int:
    """Returns the microbatches of the largest batch; an InputError below `replicas`."""
    microbatches = -(-max_rows // microbatch_size)
    if replicas > microbatches:
        raise validation.InputError(
            f"microbatch_size {microbatch_size} makes {microbatches} microbatches of "
            f"{max_rows} rows, too few for {replicas} replicas. Lower it, or use fewer "
            "replicas."
        )
    return microbatches


def padded_rows(plan: PrivacyPlan, microbatch_size: int) -> int:
    """The number of rows that every batch is padded to.

    Always the same, as a loss can read it: the most that can be drawn, rounded up to
    whole microbatches, the same number for every replica in sync.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    microbatches = require_microbatches(plan.max_rows, microbatch_size, replicas)
    each = rows_at_once(plan, microbatch_size)
    return -(-microbatches // replicas) * replicas * each


def batch_of(
    take: Callable[[np.ndarray], Mapping[str, np.ndarray]],
    draw: Draw,
    rows: int,
    private: bool = True,
) -> dict[str, np.ndarray]:
    """The rows drawn, then padding rows, and "weights" that tell them apart.

    Args:
      take: maps row numbers [rows] int64 to a dict of arrays with `rows` rows.
      draw: what the sampler drew.
      rows: static number of rows, at least `draw.count`.
      private: fill padding, which is row 0, with zeros. Without privacy it stays: some
        models make NaN of zeros, which only clipping keeps apart from other rows.

    Raises:
      InputError: `take` returns another number of rows, or a text that is not UTF-8.
    """
    indices, weights = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
    indices[: draw.count] = draw.indices[: draw.count]
    weights[: draw.count] = draw.weights[: draw.count]
    batch = {}
    for name, values in take(indices).items():
        if len(values) != rows:
            raise validation.InputError(
                f"take returned {len(values)} rows of {name!r} for {rows} row numbers; "
                "it must return one row for each."
            )
        batch[name] = np.array(values)
        if private:
            batch[name][weights == 0] = 0
        if batch[name].dtype.kind == "U":
            batch[name] = as_bytes(name, batch[name])
    batch["weights"] = weights
    return batch


def as_bytes(name: str, texts: np.ndarray) -> np.ndarray:
    """Encodes texts; an InputError, before a step is paid, does not quote them."""
    try:
        return np.char.encode(texts, "utf-8")
    except UnicodeEncodeError:
        raise validation.InputError(
            f"{name!r} has a text that is not UTF-8, such as half of a surrogate pair. "
            "Replace it, as by text.encode('utf-8', 'replace').decode()."
        ) from None


def content(values: np.ndarray) -> bytes:
    """Returns an array as bytes: its type, its shape and its values."""
    held = values.tobytes()
    if values.dtype == object:  # addresses
        held = repr(values.tolist()).encode()
    return f"{values.dtype} {values.shape} {len(held)} ".encode() + held


def split_over_replicas(
    batch: Mapping[str, np.ndarray], count: int, replicas: int, microbatch_size: int
) -> tuple[Callable[[int], dict[str, np.ndarray]], Callable[[int], int]]:
    """Deals the microbatches of a batch to the replicas like cards.

    Microbatch j goes to replica j mod `replicas` whole: what is clipped together stays
    together, and which rows those are does not depend on how many replicas there are.

    Args:
      batch: arrays of a multiple of `replicas` times `microbatch_size` leading rows.
      count: leading rows in use.
      replicas: how many.
      microbatch_size: rows of one.

    Returns:
      Two functions of a replica's number: its rows, and how many of them are in use.
    """

    def rows_of(replica: int) -> dict[str, np.ndarray]:
        dealt = {}
        for name, values in batch.items():
            microbatches = values.reshape(-1, microbatch_size, *values.shape[1:])
            own = microbatches[replica::replicas]
            dealt[name] = own.reshape(-1, *values.shape[1:])
        return dealt

    def count_of(replica: int) -> int:
        # All of its microbatches are full but perhaps the last one in use.
        starts = range(replica * microbatch_size, count, replicas * microbatch_size)
        return sum(min(microbatch_size, count - start) for start in starts)

    return rows_of, count_of

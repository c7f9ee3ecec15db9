"""From a draw of row numbers to the padded batch that a logical step takes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy import workers
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.randomness.sampling import Draw

# Maps row numbers [rows] int64 to a dict of arrays with `rows` rows.
Take = Callable[[np.ndarray], Mapping[str, np.ndarray]]


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


def batch_of(
    take: Take, draw: Draw, rows: int, private: bool = True
) -> dict[str, np.ndarray]:
    """The rows drawn, then padding rows, and "weights" that tell them apart.

    Args:
      take: the data.
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


def require_same_rows(batch: Mapping[str, np.ndarray]) -> None:
    """Ends all workers where one is about to take a step on other rows.

    Were their rows not the same, one row could be in two workers' shares.
    """
    if workers.several():
        digest = hashlib.sha256()
        for name, values in sorted(batch.items()):
            digest.update(f"{name} ".encode() + content(values))
        workers.require_same(digest.digest(), "the rows of a step")


def share_of(
    batch: Mapping[str, np.ndarray],
    count: int,
    replica: int,
    replicas: int,
    microbatch_size: int,
) -> tuple[dict[str, np.ndarray], int]:
    """Returns a replica's rows, and how many of them are in use.

    Microbatch j goes to replica j mod `replicas` whole: what is clipped together stays
    together, and which rows those are does not depend on how many replicas there are.

    Args:
      batch: arrays of a multiple of `replicas` times `microbatch_size` leading rows.
      count: leading rows in use.
      replica: its number.
      replicas: how many there are.
      microbatch_size: rows of one.
    """
    dealt = {}
    for name, values in batch.items():
        microbatches = values.reshape(-1, microbatch_size, *values.shape[1:])
        dealt[name] = microbatches[replica::replicas].reshape(-1, *values.shape[1:])
    # All of its microbatches are full but perhaps the last one in use.
    starts = range(replica * microbatch_size, count, replicas * microbatch_size)
    return dealt, sum(min(microbatch_size, count - start) for start in starts)


@contextlib.contextmanager
def unquoted_values(
    problem: str, remedy: str, memory: str | None = None
) -> Iterator[None]:
    """Drops TensorFlow's message where an operation fails: it may quote a row.

    Args:
      problem: what could not be done, and where.
      remedy: sentences that say what to do.
      memory: the remedy for too little memory; `None` names the usual one.

    Raises:
      InputError: an operation refused a value, or found too little memory.
      OpError: without its message, where another worker may have ended.
    """
    try:
        yield
    except (tf.errors.ResourceExhaustedError, MemoryError):
        memory = memory or f"Lower microbatch_size or batch_size. {remedy}"
        raise validation.InputError(
            f"{problem}: there was too little memory. {memory}"
        ) from None
    except tf.errors.OpError as error:
        if isinstance(error, workers.lost()) and workers.several():
            raise type(error)(None, None, "a worker or an operation failed") from None
        raise validation.InputError(
            f"{problem} ({type(error).__name__}): an operation of the model refused a "
            "value of the rows, such as an id that an embedding does not have, or a "
            f"label beyond the number of classes. {remedy}"
        ) from None

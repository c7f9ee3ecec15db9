"""From a draw of row numbers to the padded batch that a logical step takes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy import workers
from tfdpsq.privacy.randomness.sampling import Draw

# Maps row numbers [rows] int64 to a dict of arrays with `rows` rows.
Take = Callable[[np.ndarray], Mapping[str, np.ndarray]]


def batch_of(
    take: Take, draw: Draw, rows: int, private: bool = True
) -> dict[str, np.ndarray]:
    """The rows drawn, then padding up to `rows`, and "weights" that tell them apart.

    If `private`, padding is zeros. Else it is row 0: some models make NaN of zeros,
    which only clipping keeps apart from other rows.

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
                f"take returned {len(values)} rows of {name!r} for {rows} row numbers."
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
            f"{name!r} has a text that is not UTF-8. Replace it, as by "
            "text.encode('utf-8', 'replace').decode()."
        ) from None


def digest_of(arrays: Iterable[Any]) -> str:
    """Returns the SHA-256, in hex, of the types, shapes and values of arrays."""
    digest = hashlib.sha256()
    for values in map(np.asarray, arrays):
        digest.update(f"{values.dtype} {values.shape} ".encode() + values.tobytes())
    return digest.hexdigest()


def require_same_rows(batch: Mapping[str, np.ndarray]) -> None:
    """Ends all workers if their rows differ: one row could be in two shares."""
    if workers.several():
        rows = [part for item in sorted(batch.items()) for part in item]
        workers.require_same(digest_of(rows).encode(), "the rows of a step")


@contextlib.contextmanager
def unquoted_values(
    problem: str, remedy: str, memory: str | None = None
) -> Iterator[None]:
    """Replaces TensorFlow's message where an operation fails: it may quote a row.

    Args:
      problem: what could not be done, and where.
      remedy: sentences that say what to do.
      memory: the remedy for too little memory; `None` names the usual one.
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
            f"{problem} ({type(error).__name__}): an operation refused a value, such "
            f"as an id beyond an embedding, or a label beyond the classes. {remedy}"
        ) from None

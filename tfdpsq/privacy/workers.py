"""Several worker processes: all take every step, one of them keeps the books.

Under `tf.distribute.MultiWorkerMirroredStrategy` each process runs the same program.
The first, the *chief*, alone has the run's directory. The others get seeds, weights and
the step to go on from over the strategy's collectives. So all draw the same global
batch and noise, and each differentiates its replicas' share.

A step's noised gradient comes into being in an all-reduce, which the chief joins only
once the step is paid for. Until then another worker holds its share of a clipped sum,
in memory alone. Seeds and sums without noise go over the network, which has to be as
private as the disk that holds the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpsq import validation

_CHUNK = 1 << 20  # bytes sent at a time
_LOST = (
    "Aborted Cancelled DeadlineExceeded FailedPrecondition Internal Unavailable Unknown"
)


def lost() -> tuple[type[Exception], ...]:
    """Returns the errors of a collective when another worker is gone."""
    return tuple(getattr(tf.errors, f"{name}Error") for name in _LOST.split())


def several() -> bool:
    """Returns whether the strategy of the current scope has several processes."""
    extended = tf.distribute.get_strategy().extended
    return bool(getattr(extended, "_in_multi_worker_mode", bool)())


def is_chief() -> bool:
    """Returns whether this process keeps the ledger; true of the only one."""
    return bool(tf.distribute.get_strategy().extended.should_checkpoint)


def copy_from_chief(variables: Sequence[tf.Variable]) -> None:
    """Sets the variables, in the same order on all workers, to the chief's values."""
    if not several():
        return
    for variable in variables:
        own = variable.numpy()
        sent = own.tobytes()
        parts = [sent[at : at + _CHUNK] for at in range(0, len(sent), _CHUNK)]
        received = b"".join(gathered(part)[0] for part in parts)
        variable.assign(np.frombuffer(received, own.dtype).reshape(own.shape))


def chiefs_number(number: int) -> int:
    """The chief's number, from 0 and below 2^256."""
    return int.from_bytes(gathered(int(number).to_bytes(32, "big"))[0], "big")


def gathered(message: bytes) -> list[bytes]:
    """Gathers messages of equal length of all replicas' workers, the chief's first."""
    if not several():
        return [message]
    own, strategy = np.frombuffer(message, np.uint8), tf.distribute.get_strategy()

    def placed(context: tf.distribute.InputContext) -> tf.Tensor:
        at = np.arange(context.num_replicas_in_sync) == context.replica_id_in_sync_group
        return tf.constant(own * at[:, np.newaxis], tf.float32)  # not all add integers

    values = strategy.experimental_distribute_values_from_function(placed)
    total = strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None)
    return [row.tobytes() for row in total.numpy().astype(np.uint8)]


def any_of(*flags: bool) -> list[bool]:
    """Returns, for each flag, whether it is set on any worker."""
    said = gathered(bytes(map(bool, flags)))
    return [any(word[place] for word in said) for place in range(len(flags))]


def require_same(digest: bytes, what: str) -> None:
    """Ends all workers where one has something else than the others."""
    if len(set(gathered(digest))) > 1:
        raise validation.InputError(
            f"{what} are not the same on all workers. Start all with one command, code "
            "and data. Nothing was paid for this."
        )

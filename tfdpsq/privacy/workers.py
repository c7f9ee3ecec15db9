"""Several worker processes: all take every step, one of them keeps the books.

Under `tf.distribute.MultiWorkerMirroredStrategy` each process runs the same program.
The first, the *chief*, alone has the run's directory: ledger, seeds and states. The
others get from it what they need, over the strategy's own collectives: seeds, weights,
the step to go on from. All therefore draw the same global batch and the same noise,
and each differentiates its replicas' share.

A step's noised gradient comes into being in an all-reduce of all workers, which the
chief joins only once the step is paid for. What another worker has computed until then
is its share of a clipped sum, in its memory alone.

What goes over the network is as secret as the data (seeds, sums without noise): the
workers' network has to be as private as the disk that holds the data.

With one process every function here returns what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdpsq import validation

_CHUNK = 1 << 23  # bytes sent at a time


def lost() -> tuple[type[Exception], ...]:
    """Returns the errors of a collective when another worker is gone."""
    return (
        tf.errors.AbortedError,
        tf.errors.CancelledError,
        tf.errors.DeadlineExceededError,
        tf.errors.FailedPreconditionError,
        tf.errors.InternalError,
        tf.errors.UnavailableError,
        tf.errors.UnknownError,
    )


def several() -> bool:
    """Returns whether the strategy of the current scope has several processes."""
    extended = tf.distribute.get_strategy().extended
    return bool(getattr(extended, "_in_multi_worker_mode", bool)())


def is_chief() -> bool:
    """Returns whether this process keeps the ledger; true of the only one."""
    return bool(tf.distribute.get_strategy().extended.should_checkpoint)


def copy_from_chief(variables: Sequence[tf.Variable]) -> None:
    """Sets the variables to the chief's values, to the last bit.

    Args:
      variables: made in the strategy's scope, in the same order on all workers.
    """
    if not several():
        return
    for variable in variables:
        own = variable.numpy()
        sent = own.tobytes()
        received = b"".join(
            _from_chief(sent[at : at + _CHUNK]) for at in range(0, len(sent), _CHUNK)
        )
        variable.assign(np.frombuffer(received, own.dtype).reshape(own.shape))


def chiefs_number(number: int) -> int:
    """The chief's number, from 0 and below 2^256."""
    return int.from_bytes(_from_chief(int(number).to_bytes(32, "big")), "big")


def gathered(message: bytes) -> list[bytes]:
    """Gathers what each replica's worker says, the chief's first.

    All workers must call it, so it is a place where they wait for each other.

    Args:
      message: of the same length on all workers.
    """
    if not several():
        return [message]
    own = np.frombuffer(message, np.uint8)
    rows = _summed(
        lambda at, replicas: own * (np.arange(replicas) == at)[:, np.newaxis]
    )
    return [row.tobytes() for row in rows]


def any_of(*flags: bool) -> list[bool]:
    """Returns, for each flag, whether it is set on any worker."""
    said = gathered(bytes(map(bool, flags)))
    return [any(word[place] for word in said) for place in range(len(flags))]


def require_same(digest: bytes, what: str) -> None:
    """Ends all workers where one has something else than the others."""
    if len(set(gathered(digest))) > 1:
        raise validation.InputError(
            f"{what} are not the same on all workers. Start all of them with the same "
            "command, code and data. Nothing was paid for this."
        )


def _from_chief(message: bytes) -> bytes:
    if not several():
        return message
    own = np.frombuffer(message, np.uint8)
    # The chief's first replica is the first of all.
    return _summed(lambda replica, _: own * (replica == 0)).tobytes()


def _summed(of: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """The sum over all replicas of `of(replica, replicas)`, bytes of which one counts.

    In float32, where it is exact: not every device adds up integers.
    """
    strategy = tf.distribute.get_strategy()
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(
            of(context.replica_id_in_sync_group, context.num_replicas_in_sync),
            tf.float32,
        )
    )
    total = strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None)
    return total.numpy().astype(np.uint8)

"""A TPU: found within a minute or refused, and shut down when done."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.run.devices.clusters import first_line

# The look-up asks servers that may not exist, without a limit of its own.
_LOOK_UP_SECONDS = 60
_CONNECT_SECONDS = 10


@contextlib.contextmanager
def opened(name: str) -> Iterator[tf.distribute.Strategy]:
    """Connects to a TPU and initialises it; shuts it down at the end.

    `name` is a name, an address (grpc://HOST:PORT), or "local" on a TPU VM.

    Raises:
      InputError: there is none.
    """
    if not name:
        raise validation.InputError(
            'strategy is "tpu", but tpu is not set. Set --tpu to the name or the '
            'address (grpc://HOST:8470) of a TPU, or to "local" on a TPU VM.'
        )
    local = name == "local"
    try:
        resolver = _within(
            _LOOK_UP_SECONDS,
            lambda: tf.distribute.cluster_resolver.TPUClusterResolver(name),
        )
        if not local:
            spec = _within(_LOOK_UP_SECONDS, lambda: resolver.cluster_spec().as_dict())
            for address in (address for at in spec.values() for address in at):
                host, port = str(address).rsplit(":", 1)
                socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    # The look-up raises many types, `Exception` itself included.
    except Exception as error:
        where = (
            "on this machine (tpu is 'local')"
            if local
            else f"by the name or address {name!r}"
        )
        raise validation.InputError(
            f"there is no TPU {where}: {type(error).__name__}: {first_line(error)}. "
            + (
                "Run this on a TPU VM, or name a TPU, or use another strategy."
                if local
                else "Check the name, that the TPU is running and can be reached from "
                'here, or give "local" on a TPU VM, or use another strategy.'
            )
        ) from error
    try:
        yield tf.distribute.TPUStrategy(resolver)
    finally:
        tf.tpu.experimental.shutdown_tpu_system(resolver)


def _within(seconds: float, find: Callable[[], Any]) -> Any:
    """Calls `find` with a time limit, as look-ups have none of their own.

    Raises:
      TimeoutError: it took longer; its thread goes on and ends with the process.
    """
    found: list[Any] = []
    failed: list[BaseException] = []

    def look() -> None:
        try:
            found.append(find())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"nothing was found in {seconds:.0f} seconds")
    return found[0]

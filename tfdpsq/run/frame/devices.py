"""Devices that a stage runs on: `--strategy` and the flags that go with it.

| --strategy  | replicas                                                             |
|-------------|----------------------------------------------------------------------|
| default     | one: the first GPU, or the CPU                                       |
| mirrored    | all GPUs of this machine, or the first `--replicas`; without GPUs    |
|             | the CPU, split into `--replicas` logical devices                     |
| multiworker | several machines, one process each, as TF_CONFIG names them; start   |
|             | the same command on all                                              |
| tpu         | the TPU named by `--tpu`: a name, an address, or "local"             |

None of these is a setting of the stage. What only runs a model gives each device whole
batches, and has the same result. Training has it except for the order of floating-point
sums, and may resume under another. Once steps are paid for it may not resume where they
would be compiled differently (`jit_compile`, a TPU), as XLA can change random draws.

Of several workers the first, the chief, writes the output; one that fails ends all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from tfdpsq.privacy import workers
from tfdpsq.run.process import Notice
from tfdpsq.validation import InputError

_TF_CONFIG = "TF_CONFIG"
_WAIT_SECONDS = 600  # longest wait for all workers
_LOST_SECONDS = 20  # a worker without a sign of life for as long is lost


class LostWorker(Exception):
    """Another worker ended, so this one cannot go on."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that a stage runs on."""

    strategy: tf.distribute.Strategy | None = None  # gives the scope
    notice: Notice = dataclasses.field(default_factory=Notice)  # of signals to end

    def scope(self) -> contextlib.AbstractContextManager:
        """Returns the scope in which models and optimizers are made and trained."""
        if self.strategy is None:
            return contextlib.nullcontext()
        return self.strategy.scope()

    @property
    def replicas(self) -> int:
        """Number of replicas that share a batch."""
        return 1 if self.strategy is None else self.strategy.num_replicas_in_sync

    @property
    def chief(self) -> bool:
        """Whether this process writes the output."""
        with self.scope():
            return workers.is_chief()

    @property
    def several_workers(self) -> bool:
        """Whether there are other processes."""
        if self.strategy is None:  # TensorFlow takes seconds to load
            return False
        with self.scope():
            return workers.several()

    def require_share(self, rows: int, name: str = "batch_size") -> None:
        """Refuses `rows`, the setting `name`, that the replicas do not divide."""
        if rows % self.replicas:
            raise InputError(
                f"{name} is {rows}, which {self.replicas} replicas cannot share. Make "
                "it a multiple of them."
            )

    @property
    def worker(self) -> str:
        """Name of this process among several."""
        assert self.strategy is not None
        resolver = self.strategy.cluster_resolver
        return f"{resolver.task_type}{resolver.task_id}"

    def chiefs(self, flag: bool) -> bool:
        """Returns the chief's flag; all workers wait for each other."""
        with self.scope():
            return bool(workers.chiefs_number(flag))


@contextlib.contextmanager
def opened(
    kind: str = "default", tpu: str = "", replicas: int = 0
) -> Iterator[Devices]:
    """Opens the devices of the flags before TensorFlow runs anything.

    Raises:
      InputError: flags of another strategy, missing devices, a bad TF_CONFIG.
    """
    for name, value, whose in (("tpu", tpu, "tpu"), ("replicas", replicas, "mirrored")):
        if value and kind != whose:
            raise InputError(
                f"{name} is {value!r}, which applies to strategy {whose!r} only. Leave "
                "it out."
            )
    if kind == "tpu":
        resolver = _initialized_tpu(tpu)
        try:
            yield Devices(tf.distribute.TPUStrategy(resolver))
        finally:
            tf.tpu.experimental.shutdown_tpu_system(resolver)
    elif kind == "mirrored":
        yield Devices(_mirrored(replicas))
    elif kind == "multiworker":
        yield Devices(_several_workers())
    else:
        yield Devices()


@contextlib.contextmanager
def worker_errors() -> Iterator[None]:
    """Turns the errors of collectives into LostWorker."""
    try:
        yield
    except workers.lost() as error:
        raise LostWorker(
            f"another worker ended or cannot be reached ({_first_line(error)}); look "
            "for its own error"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def _mirrored(replicas: int) -> tf.distribute.Strategy:
    # Otherwise TensorFlow would read it and wait for other workers.
    os.environ.pop(_TF_CONFIG, None)
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        if replicas > len(gpus):
            raise InputError(
                f"replicas is {replicas}; this machine has {len(gpus)} GPUs. Lower it."
            )
        names = [f"GPU:{number}" for number in range(replicas or len(gpus))]
        return tf.distribute.MirroredStrategy(names)
    count = replicas or 1
    logging.warning("no GPU was found: the CPU serves as %d devices", count)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )
    # Added up on one device: these devices share memory, so collectives gain nothing.
    names = [f"CPU:{number}" for number in range(count)]
    return tf.distribute.MirroredStrategy(names, tf.distribute.ReductionToOneDevice())


def _initialized_tpu(name: str) -> Any:
    if not name:
        raise InputError(
            'strategy is "tpu", but tpu is not set. Set --tpu to a name or "local".'
        )
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(name)
        if name != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return resolver
    except Exception as error:  # many types, `Exception` itself included
        raise InputError(
            f"there is no TPU {name!r} ({_first_line(error)}). Check --tpu, or use "
            "another strategy."
        ) from error


def _several_workers() -> tf.distribute.Strategy:
    text = os.environ.get(_TF_CONFIG, "")
    try:
        cluster = json.loads(text)["cluster"]
        _watch_each_other({name: len(tasks) for name, tasks in cluster.items()})
        return tf.distribute.MultiWorkerMirroredStrategy()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"TF_CONFIG is {text[:200]!r}, which names no cluster and task: {error!r}. "
            'Set it to {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": '
            '{"type": "worker", "index": 0}}, with each worker\'s own index.'
        ) from None
    except (tf.errors.OpError, RuntimeError) as error:
        raise InputError(
            f"the workers of TF_CONFIG did not meet in {_WAIT_SECONDS} seconds "
            f"({_first_line(error)}). Start all, each with its own index."
        ) from error


def _watch_each_other(cluster: dict[str, int]) -> None:
    """Makes TensorFlow end all workers soon after one is lost."""
    from tensorflow.python.eager import context
    from tensorflow.tsl.protobuf import coordination_config_pb2

    first = "chief" if "chief" in cluster else "worker"
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{first}/replica:0/task:0",
        cluster_register_timeout_in_ms=_WAIT_SECONDS * 1000,
        heartbeat_timeout_in_ms=_LOST_SECONDS * 1000,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=name, num_tasks=tasks)
            for name, tasks in sorted(cluster.items())
        ],
    )

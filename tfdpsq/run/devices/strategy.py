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
sums, and may resume under another. Once steps
are paid for it may not resume where they would be compiled differently (`jit_compile`,
a TPU), since XLA can change random draws.

With several workers only the first, the chief, writes into the workdir. Each other
worker has its own temporary directory, which it removes at its end; if it was killed,
the next worker on its machine does. A worker that fails ends all of them; start them
again to resume.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import fcntl
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from absl import flags, logging

from tfdpsq import validation
from tfdpsq.privacy import workers
from tfdpsq.run.core import workdir
from tfdpsq.run.devices import clusters, tpus
from tfdpsq.run.devices.preemption import Notice

STRATEGIES = ("default", "mirrored", "multiworker", "tpu")
# For stages that also do other work between trainings, on one machine.
ONE_PROCESS = ("default", "mirrored", "tpu")
_SCRATCH = "tfdpsq-worker-"
_SETTLED_SECONDS = 60


class LostWorker(Exception):
    """Another worker ended, so this one cannot go on."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that a stage trains on.

    Attributes:
      strategy: gives the scope; `None` for none.
      notice: notes signals to end.
    """

    strategy: tf.distribute.Strategy | None = None
    notice: Notice = dataclasses.field(default_factory=Notice)

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
        """True if this process writes the output."""
        with self.scope():
            return workers.is_chief()

    @property
    def several_workers(self) -> bool:
        """True if there are other processes."""
        with self.scope():
            return workers.several()

    def require_share(self, rows: int, name: str = "batch_size") -> None:
        """Refuses `rows`, the setting `name`, that the replicas do not divide."""
        if rows % self.replicas:
            raise validation.InputError(
                f"{name} is {rows}, which {self.replicas} replicas cannot "
                "share. Make it a multiple of them, or use fewer."
            )


DEFAULT = Devices()
_OPENED: contextvars.ContextVar[Devices] = contextvars.ContextVar(
    "opened_devices", default=DEFAULT
)


@contextlib.contextmanager
def using(devices: Devices) -> Iterator[None]:
    """Makes these the devices that models embed, write and score on; see `here`."""
    token = _OPENED.set(devices)
    try:
        yield
    finally:
        _OPENED.reset(token)


def here() -> contextlib.AbstractContextManager:
    """Returns the scope to load a model in that only runs: that of `using`.

    Training is given its devices. What runs a model without training it is in many
    places, some of them in other processes, which have one device.
    """
    return _OPENED.get().scope()


def this_one() -> Devices:
    """Returns one device of this process, with its notice of signals to end."""
    return Devices(notice=_OPENED.get().notice)


def define_flags() -> Callable[[], dict[str, Any]]:
    """Defines the flags; returns a function that reads their values."""
    defined = {
        "kind": flags.DEFINE_string(
            "strategy",
            "default",
            f"What a stage trains on, one of {', '.join(STRATEGIES)}: one device, the "
            "GPUs of this machine (or its CPU, split), several workers by TF_CONFIG, "
            "or a TPU. Results are the same.",
        ),
        "tpu": flags.DEFINE_string(
            "tpu", "", 'For --strategy=tpu: its name or address, or "local".'
        ),
        "replicas": flags.DEFINE_integer(
            "replicas", 0, "For --strategy=mirrored: number of devices; 0 for all GPUs."
        ),
    }

    def values() -> dict[str, Any]:
        if flags.FLAGS["replicas"].present and defined["replicas"].value < 1:
            raise validation.InputError(
                f"replicas is {defined['replicas'].value}. Give the number of devices "
                "to train on, or leave it out for all GPUs."
            )
        return {name: flag.value for name, flag in defined.items()}

    return values


@contextlib.contextmanager
def opened(
    kind: str = "default",
    tpu: str = "",
    replicas: int = 0,
    offered: tuple[str, ...] = STRATEGIES,
) -> Iterator[Devices]:
    """Opens devices before TensorFlow runs anything, and shuts them down at the end.

    Takes the values of the flags; `offered` are the kinds that the stage can train
    under.

    Raises:
      InputError: a strategy that the stage cannot use, flags of another strategy,
        missing devices, or an unusable TF_CONFIG.
    """
    if validation.one_of("strategy", kind, STRATEGIES) not in offered:
        raise validation.InputError(
            f"strategy is {kind!r}, but this command can do no more than "
            f"{' or '.join(offered)} with it: "
            + (
                "it does more than train, in one process. Start the stages that train "
                "(pretrain, finetune, train_retriever) by themselves; other stages "
                "share a corpus by --num_shards."
                if len(offered) > 1
                else "it trains nothing under a strategy. Leave the flag out."
            )
        )
    for name, value, whose in (("tpu", tpu, "tpu"), ("replicas", replicas, "mirrored")):
        if value and kind != whose:
            raise validation.InputError(
                f"{name} is {value!r}, which applies to strategy {whose!r} only, but "
                f"strategy is {kind!r}. Leave it out, or set strategy to {whose!r}."
            )
    if kind == "tpu":
        with tpus.opened(tpu) as strategy:
            yield Devices(strategy)
        return
    strategy = None
    if kind == "mirrored":
        strategy = _mirrored(replicas)
    elif kind == "multiworker":
        strategy = clusters.opened()
    yield Devices(strategy)


def run(
    stage: Callable[[Any, pathlib.Path, Devices], Any],
    config: Any,
    directory: pathlib.Path,
    devices: Devices,
) -> None:
    """Runs a stage; with several workers only the chief writes into its directory.

    Workers end only when the chief's output is there, so that the failure of one is
    noticed by all. Where the stage is already finished, all end.

    Raises:
      LostWorker: another worker ended.
      InputError: what the stage raises.
    """
    if not devices.several_workers:
        stage(config, directory, devices)
        return
    try:
        _run_with_others(stage, config, directory, devices)
    except workers.lost() as error:
        raise LostWorker(
            "another worker ended, or cannot be reached any more "
            f"({clusters.first_line(error)}). Look for its own error"
        ) from error


def _run_with_others(
    stage: Any, config: Any, directory: pathlib.Path, devices: Devices
) -> None:
    with devices.scope():
        found = (directory / workdir.STAGE_FILE).is_file()
        finished = bool(workers.chiefs_number(found))
    if devices.chief:
        stage(config, directory, devices)
    elif not finished:
        with scratch_directory() as scratch:
            private = scratch / "private"
            if "private_directory" in config:
                config.private_directory = str(private)
            stage(config, private / directory.name, devices)
            _wait_for_all(devices)
        return
    if not finished:
        _wait_for_all(devices)


@contextlib.contextmanager
def scratch_directory() -> Iterator[pathlib.Path]:
    """Yields a directory for this worker's temporary files, removed at the end.

    It holds private rows. Directories that killed workers of this user left on this
    machine are therefore removed as well.
    """
    for left in pathlib.Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # another user's, or already gone
            # The lock of a new one may not be taken yet.
            if time.time() - left.stat().st_mtime > _SETTLED_SECONDS:
                with _held(left):
                    shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH) as made, _held(made):
        yield pathlib.Path(made)


@contextlib.contextmanager
def _held(path: str | os.PathLike) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _wait_for_all(devices: Devices) -> None:
    with devices.scope():
        workers.any_of(False)


def _mirrored(replicas: int) -> tf.distribute.Strategy:
    if replicas < 0:
        raise validation.InputError(
            f"replicas is {replicas}. Give the number of devices to train on."
        )
    # Otherwise TensorFlow would read it and wait for other workers.
    if os.environ.pop(clusters.TF_CONFIG, None) is not None:
        logging.warning("TF_CONFIG is set, and ignored under --strategy=mirrored")
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        if replicas > len(gpus):
            raise validation.InputError(
                f"replicas is {replicas}, but this machine has {len(gpus)} GPUs. Use "
                "at most that many, or leave it out."
            )
        names = [f"GPU:{number}" for number in range(replicas or len(gpus))]
        return tf.distribute.MirroredStrategy(names)
    count = replicas or 1
    if count == 1:
        logging.warning("no GPU was found: training on the CPU, as one device")
    cpu = tf.config.list_physical_devices("CPU")[0]
    if count > 1:
        try:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * count
            )
        except RuntimeError as error:
            raise validation.InputError(
                f"the CPU cannot be split into {count} devices any more ({error}). "
                "Open the strategy before TensorFlow runs anything."
            ) from error
    # Added up on one device: these devices share memory, so collectives gain nothing.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{number}" for number in range(count)],
        tf.distribute.ReductionToOneDevice(),
    )

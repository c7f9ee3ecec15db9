"""What every test runs under: no GPU, quiet logs, four logical CPU devices."""

import gc
import os
import sys

# TensorFlow reads these when it is imported, and child processes inherit them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from absl import logging
from helpers import forking

LOGICAL_CPUS = 4


def pytest_configure() -> None:
    """Pins each xdist worker to its own cores, before it imports TensorFlow.

    Two TensorFlows that share all cores are slower than two that split them. Child
    processes inherit the cores.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker:
        count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        cores = sorted(os.sched_getaffinity(0))[int(worker.removeprefix("gw")) :: count]
        if cores:
            os.sched_setaffinity(0, cores)


@pytest.hookimpl(tryfirst=True)  # xdist's own hook reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps a file's tests on one worker, and starts the slowest packages first."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    order = ("job", "tests/run", "tests/privacy", "tests")

    def rank(item: pytest.Item) -> int:
        group = item.get_closest_marker("xdist_group")
        name = group.args[0] if group.args else group.kwargs["name"]
        return next((n for n, key in enumerate(order) if name.startswith(key)), 0)

    items.sort(key=rank)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Splits the CPU when a collected test module has imported TensorFlow.

    Devices can only be set before the first operation, and importing TensorFlow
    takes seconds, which tests that do not use it should not wait for.
    """
    gc.collect()
    forking.spare_the_collector()
    if "tensorflow" in sys.modules:
        _split_the_cpu()


def _split_the_cpu() -> None:
    """Makes LOGICAL_CPUS devices of one, unless TensorFlow has already started."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS
        )
    except RuntimeError:  # Too late; `logical_cpus` fails with the reason.
        pass


@pytest.fixture(autouse=True)
def _log_verbosity():
    """Restores the log level after a test that runs a command."""
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)


@pytest.fixture(scope="session")
def logical_cpus() -> list[str]:
    """Names of the logical CPU devices, for tests that run on several replicas."""
    import tensorflow as tf

    _split_the_cpu()
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    if len(names) < LOGICAL_CPUS:
        pytest.fail(
            f"Found {len(names)} logical CPU devices, expected {LOGICAL_CPUS}: "
            "TensorFlow ran an operation first. Import tensorflow at the top of the "
            "test module, and run operations inside tests and fixtures only."
        )
    return names


@pytest.fixture(scope="session")
def strategy_of(logical_cpus):
    """A function from a number of replicas to a strategy."""
    import tensorflow as tf

    def make(replicas):
        if replicas == 1:
            return tf.distribute.get_strategy()
        # Collectives of two and of four devices cannot live in one process.
        return tf.distribute.MirroredStrategy(
            logical_cpus[:replicas], tf.distribute.ReductionToOneDevice()
        )

    return make

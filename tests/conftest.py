"""What every test runs under: no GPU, quiet logs, four logical CPU devices."""

import gc
import os
import sys

# Read by TensorFlow when it is imported, so set before any test imports it, and
# handed on to the processes that tests start.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from absl import logging
from helpers import forking

LOGICAL_CPUS = 4
# They share one finished job, which takes a minute to make.
_OF_ONE_JOB = (
    "tests/run/test_pipeline.py",
    "tests/run/test_release_secrets.py",
    "tests/run/test_release_walk.py",
    "tests/run/test_run_directory.py",
    "tests/run/test_status.py",
)
# What takes longest, to be begun first: at the end a worker would wait for the other.
_LONG = (
    "job",
    "tests/data/test_pydocs.py",
    "tests/run/test_lineage.py",
    "tests/privacy/test_replicas.py",
    "tests/privacy/test_fast_layers.py",
    "tests/run/test_kept_budget.py",
    "tests/run/test_compile.py",
    "tests/privacy/test_budget.py",
    "tests/retriever/test_model.py",
    "tests/privacy/test_fast_t5.py",
    "tests/run/test_finetune_soft_prompt.py",
    "tests/run/test_direct_training.py",
    "tests/generator/test_synthesis.py",
    "tests/run/test_audit_stage.py",
    "tests/run/test_pair_unit.py",
    "tests/privacy/test_model.py",
    "tests/retriever/test_serving.py",
    "tests/run/test_replicas.py",
    "tests/generator/test_pretraining_losses.py",
    "tests/run/test_retriever_init.py",
)


def pytest_configure() -> None:
    """Gives every worker of `pytest -n` cores of its own, before it imports TensorFlow.

    Two TensorFlows that each take all cores are slower together than each on its part.
    What a worker starts inherits its cores.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker:
        count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        own = sorted(os.sched_getaffinity(0))[int(worker.removeprefix("gw")) :: count]
        if own:
            os.sched_setaffinity(0, own)


def _split_the_cpu() -> None:
    """Makes LOGICAL_CPUS devices of one; leaves a TensorFlow in use as it is."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS
        )
    except RuntimeError:  # Too late: the fixture below tells who needs to know.
        pass


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `pytest -n`, a file's tests stay together, and those of one job."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        """Whole files, but for those that share more than a file's fixtures."""

        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "job" if file.endswith(_OF_ONE_JOB) else file

        def _assign_work_unit(self, node) -> None:
            for scope in reversed(_LONG):
                if scope in self.workqueue:
                    self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Splits the CPU when a collected test module has imported TensorFlow.

    Devices can only be set before the first operation, and importing TensorFlow
    takes seconds, which tests that need none of it should not wait for.
    """
    gc.collect()
    forking.spare_the_collector()
    if "tensorflow" in sys.modules:
        _split_the_cpu()


@pytest.fixture(autouse=True)
def _logs_as_before():
    """Undoes what a command that is run inside a test does to the logs of others."""
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
            f"There are {len(names)} logical CPU devices and this test needs "
            f"{LOGICAL_CPUS}: TensorFlow ran operations before they were made. "
            "Import tensorflow at the top of the test module, and run operations "
            "inside tests and fixtures only."
        )
    return names


@pytest.fixture(scope="session")
def strategy_of(logical_cpus):
    """Returns a function that returns the strategy of a number of replicas."""
    import tensorflow as tf

    def made(replicas):
        if replicas == 1:
            return tf.distribute.get_strategy()
        # Collectives of two and of four devices cannot live in one process.
        return tf.distribute.MirroredStrategy(
            logical_cpus[:replicas], tf.distribute.ReductionToOneDevice()
        )

    return made

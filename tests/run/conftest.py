"""What several tests of the runs share: one finished job."""

import contextlib
import os

import pytest
from helpers import tiny_job as _tiny_job


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    """A workdir made through the command line, killed on the way and restarted.

    It is made once for all workers of `pytest -n`.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return _tiny_job.shared(folder)


@pytest.fixture
def on_two_devices(strategy_of, monkeypatch):
    """Runs what is inside as under `--strategy=mirrored --replicas=2`."""
    from tfdpsq.layers import replicated
    from tfdpsq.run.frame.devices import Devices

    call, sizes = replicated.Replicated.__call__, []

    def counted(self, batches):
        sizes.append(len(batches))
        return call(self, batches)

    @contextlib.contextmanager
    def opened():
        monkeypatch.setattr(replicated.Replicated, "__call__", counted)
        yield Devices(strategy_of(2))
        assert max(sizes) == 2  # both had a batch

    return opened

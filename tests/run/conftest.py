"""What several tests of the runs share: one finished job."""

import importlib.util
import pathlib

import pytest

_HERE = pathlib.Path(__file__).parent
_spec = importlib.util.spec_from_file_location("tiny_job", _HERE / "tiny_job.py")
_tiny_job = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tiny_job)


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    """A workdir made through the command line, killed on the way and restarted."""
    return _tiny_job.make(tmp_path_factory.mktemp("pipeline"))

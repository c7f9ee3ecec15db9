"""What several tests of the runs share: one finished job."""

import pytest
import tiny_job as _tiny_job


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    """A workdir made through the command line, killed on the way and restarted."""
    return _tiny_job.make(tmp_path_factory.mktemp("pipeline"))

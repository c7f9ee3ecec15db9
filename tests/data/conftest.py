"""What several tests of the data package share."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import forking

# The limit ends with the code: the error that it ends in is written to a file as well.
_LIMITED = """
import resource
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, before[1]))
try:
    exec({code!r})
finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
"""


@pytest.fixture
def run_limited(tmp_path_factory):
    """Returns a function that runs code where no file may grow beyond a limit.

    The nearest thing to a full disk that needs no rights: a write beyond the limit
    fails in the operating system, whichever library makes it.
    """

    def run(code: str, limit: int, folder: Path) -> subprocess.CompletedProcess:
        script = tmp_path_factory.mktemp("limited") / "limited.py"
        script.write_text(_LIMITED.format(limit=limit, code=code))
        return forking.run([sys.executable, script], cwd=folder)

    return run

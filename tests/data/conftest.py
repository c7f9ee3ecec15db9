"""What several tests of the data package share."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_limited():
    """Returns a function that runs code where no file may grow beyond a limit.

    The nearest thing to a full disk that needs no rights: a write beyond the limit
    fails in the operating system, whichever library makes it.
    """

    def run(code: str, limit: int, folder: Path) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_FSIZE, (limit, limit)
            ),
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run

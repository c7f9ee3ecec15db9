"""Runs pytest many times in processes forked from one that has imported TensorFlow.

The import takes longer than most tests. A fork happens before any operation runs, so
no thread of TensorFlow's is lost by it.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

_SECONDS = 900


class Server:
    """The process that has imported the libraries; one run at a time.

    Attributes:
      process: reads requests from its input and answers on its output, by lines.
    """

    def __init__(self):
        """Starts the process; the import goes on behind the call."""
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, directory, arguments):
        """Runs pytest in a directory; returns its status and what it printed."""
        request = json.dumps({"directory": str(directory), "arguments": arguments})
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        said = pathlib.Path(directory, "said.txt").read_text("utf-8", "replace")
        return status, said

    def close(self):
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait()


def _child(directory, arguments):
    """Runs pytest on the code in `directory`, and never returns."""
    os.setsid()
    said = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["PYTHONPATH"] = directory
    # In place of the folder of this file, as for `python -m pytest`.
    sys.path[0] = directory
    status = 70
    try:
        import pytest

        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)


def _wait(child):
    """Status of a child, which ends with its own children after `_SECONDS`."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def _serve():
    """Forks a child for each request until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import keras_nlp  # noqa: F401
    import tensorflow  # noqa: F401
    import tensorflow_text  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(request["directory"])
            _child(request["directory"], request["arguments"])
        answers.write(f"{_wait(child)}\n")
        answers.flush()


if __name__ == "__main__":
    _serve()

"""Runs Python commands in processes forked from one that has imported TensorFlow.

The import takes seconds, more than most commands that tests run. A fork happens before
any operation runs, so no thread of TensorFlow's is lost by it. Tests of the start
itself, of what is imported, or of memory use `subprocess`.
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile

# One server for each process that runs tests, started by its first command.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "tensorflow",
        "tensorflow_text",
        "tfdpsq.generator",
        "tfdpsq.privacy",
        "tfdpsq.retriever",
    ]
)


def spare_the_collector():
    """Leaves what is imported out of garbage collection, and collects less often.

    A traced step makes 100,000s of objects; looking through all modules for each few
    hundred of them is a sixth of the time of building a graph.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


class Command:
    """A command that runs, with the part of `subprocess.Popen` that tests use.

    Attributes:
      pid: its process.
      returncode: its exit status, `-N` if signal N ended it; `None` while it runs.
    """

    def __init__(self, words, cwd=None, env=None, stderr=None):
        """Starts it.

        Args:
          words: `sys.executable`, then a script or `-m` and a module, and arguments.
          cwd: its directory; `None` for this one.
          env: its whole environment; `None` for this one.
          stderr: a file for its errors; `None` keeps them for `communicate`.
        """
        self.args = [str(word) for word in words]
        self._out = tempfile.TemporaryFile()
        self._errors = tempfile.TemporaryFile() if stderr is None else stderr
        where = [f"/proc/{os.getpid()}/fd/{f.fileno()}" for f in self._files()]
        self._process = _SERVER.Process(
            target=_run, args=(self.args[1:], cwd or os.getcwd(), env, *where)
        )
        self._process.start()
        self.pid = self._process.pid
        self._ended = None

    @property
    def returncode(self):
        """Its exit status; see the class."""
        return self._process.exitcode

    def poll(self):
        """Returns its exit status, `None` while it runs."""
        return self.returncode

    def wait(self, timeout=None):
        """Waits for its end; returns its exit status."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number):
        """Sends it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        """Kills it (-9)."""
        self._process.kill()

    def said(self):
        """Returns what it wrote so far: (output, errors)."""
        # It writes at the position of the file that it opened itself.
        return tuple(
            os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0).decode()
            for f in self._files()
        )

    def communicate(self, timeout=None):
        """Waits for its end; returns its output and its errors."""
        self.wait(timeout)
        return self.said()

    def _files(self):
        return self._out, self._errors


def run(words, cwd=None, env=None):
    """Runs a command to its end; see `Command`."""
    command = Command(words, cwd, env)
    out, errors = command.communicate()
    return subprocess.CompletedProcess(words, command.returncode, out, errors)


def _run(words, directory, environment, out, errors):
    """Runs a command in a process that was forked for it, and ends as it does."""
    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    spare_the_collector()
    os.chdir(directory)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    try:
        if words[0] == "-m":
            module, sys.argv = words[1], words[1:]
            sys.path.insert(0, directory)  # as `python -m` does
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # `multiprocessing` ends without them

"""Passes over shards in processes of their own: started, stopped, killed, compared."""

import json
import os
import pathlib
import signal
import subprocess
import time

from helpers import forking
from helpers import killing as _killing
from tfdpsq.run.core import locks
from tfdpsq.run.passes import sharded_stages

_SECONDS = 100


class Command:
    """A stage that runs in a forked process; what it says can be read while it does.

    Attributes:
      process: it.
    """

    def __init__(self, stage, directory, settings, *flags):
        """Starts it: into `directory`, with `--config.NAME=VALUE` for the settings."""
        self._stage, self._directory = stage, str(directory)
        words = [*_killing.command(stage, directory, settings), *flags]
        environment = {**os.environ, "PYTHONPATH": str(_killing.ROOT)}
        self.process = forking.Command(words, str(_killing.ROOT), environment)

    def said(self):
        """Returns all that it wrote so far."""
        return "".join(self.process.said())

    def ends(self, status=0):
        """Waits for its end and checks its exit status; returns what it wrote."""
        try:
            self.process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert self.process.returncode == status, self.said()[-3000:]
        return self.said()

    def waits_for(self, happens):
        """Returns the first answer that is true."""
        deadline = time.monotonic() + _SECONDS
        while not (answer := happens()):
            ended = self.process.poll() is not None
            assert not ended and time.monotonic() < deadline, self.said()[-3000:]
            time.sleep(0.001)
        return answer

    def stops_in_a_shard(self, marks):
        """Stops it (SIGSTOP) while it makes a shard; returns the shard's name.

        Args:
          marks: this many others must be made before.
        """

        def stopped():
            if len(marks_in(self._directory)) < marks or not self._makes():
                return None
            self.process.send_signal(signal.SIGSTOP)
            stat = pathlib.Path(f"/proc/{self.process.pid}/stat")
            while stat.read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.001)
            made = self._makes()  # or it was just finished
            if made is None:
                self.goes_on()
            return made

        return self.waits_for(stopped)

    def goes_on(self):
        """Lets it go on after a stop."""
        self.process.send_signal(signal.SIGCONT)

    def is_killed_in_a_shard(self, marks):
        """Kills it (-9) while it makes a shard; returns how many it made before.

        Args:
          marks: as for `stops_in_a_shard`.
        """
        self.stops_in_a_shard(marks)
        self.process.kill()
        self.ends(-signal.SIGKILL)
        assert not os.path.exists(self._directory)
        return len(marks_in(self._directory))

    def _makes(self):
        """The shard that it is making: whose lock it holds, and that has no mark."""
        shards = pathlib.Path(sharded_stages.pass_directory(self._directory))
        for lock in shards.glob(f".{self._stage}-*.lock"):
            name = lock.name[1 : -len(".lock")]
            marked = (shards / f"{name}.json").exists()
            if not marked and self.process.pid in locks.holders([lock]):
                return name
        return None


def marks_in(directory):
    """Returns the marks of the shards beside a stage's output."""
    shards = pathlib.Path(sharded_stages.pass_directory(directory))
    return sorted(shards.glob("*-of-*.json"))


def files(directory):
    """Returns what a directory holds: name -> bytes."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(pathlib.Path(directory).rglob("*"))
        if path.is_file()
    }


def output(directory):
    """Returns what a stage wrote, without what differs by run and by private key."""
    found = files(directory)
    stage = json.loads(found.pop("stage.json"))
    return found, stage["config"], stage["result"]

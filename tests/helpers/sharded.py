"""Passes over shards in processes of their own: started, stopped, killed, compared."""

import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

from helpers import killing as _killing
from tfdpsq.run.core import locks
from tfdpsq.run.passes import sharded_stages

BEAM = (
    "--beam",
    "--runner=DirectRunner",
    "--direct_num_workers=2",
    "--direct_running_mode=multi_processing",
)
_SECONDS = 300


class Command:
    """A stage that runs; what it says can be read while it does.

    Attributes:
      process: it.
    """

    def __init__(self, stage, directory, settings, *flags):
        """Starts it: into `directory`, with `--config.NAME=VALUE` for the settings."""
        self._stage, self._directory = stage, str(directory)
        self._log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [*_killing.command(stage, directory, settings), *flags],
            cwd=_killing.ROOT,
            env={**os.environ, "PYTHONPATH": str(_killing.ROOT)},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def said(self):
        """All that it wrote so far."""
        log = self._log.fileno()  # the process writes at its position, which stays
        return os.pread(log, os.fstat(log).st_size, 0).decode()

    def ends(self, status=0):
        """What it said, when it has ended as it is to."""
        self.process.wait(_SECONDS)
        said = self.said()
        self._log.close()
        assert self.process.returncode == status, said[-3000:]
        return said

    def waits_for(self, happens):
        """Returns the first answer that is true."""
        deadline = time.monotonic() + _SECONDS
        while not (answer := happens()):
            ended = self.process.poll() is not None
            assert not ended and time.monotonic() < deadline, self.said()[-3000:]
            time.sleep(0.001)
        return answer

    def stops_in_a_shard(self, marks, partial=False):
        """Stops it (SIGSTOP) while it makes a shard; returns the shard's name.

        Args:
          marks: so many others must be made before.
          partial: whether a file of the shard must be half written.
        """

        def stopped():
            if len(marks_in(self._directory)) < marks or not self._makes(partial):
                return None
            self.process.send_signal(signal.SIGSTOP)
            stat = pathlib.Path(f"/proc/{self.process.pid}/stat")
            while stat.read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.001)
            made = self._makes(partial)  # or it was just finished
            if made is None:
                self.goes_on()
            return made

        return self.waits_for(stopped)

    def goes_on(self):
        """Lets it go on after a stop."""
        self.process.send_signal(signal.SIGCONT)

    def is_killed_in_a_shard(self, marks, partial=False):
        """Kills it (-9) while it makes a shard; returns how many it made before.

        Args:
          marks: as for `stops_in_a_shard`.
          partial: as there.
        """
        self.stops_in_a_shard(marks, partial)
        self.process.kill()
        self.ends(-signal.SIGKILL)
        assert not os.path.exists(self._directory)
        return len(marks_in(self._directory))

    def _makes(self, partial):
        """The shard that it is making: whose lock it holds, and that has no mark."""
        shards = pathlib.Path(sharded_stages.pass_directory(self._directory))
        for lock in shards.glob(f".{self._stage}-*.lock"):
            name = lock.name[1 : -len(".lock")]
            if (shards / f"{name}.json").exists():
                continue
            if partial and not list(shards.glob(f".{name}.*.partial")):
                continue
            if self.process.pid in locks.holders([lock]):
                return name
        return None


def marks_in(directory):
    """The marks of the shards beside a stage's output."""
    shards = pathlib.Path(sharded_stages.pass_directory(directory))
    return sorted(shards.glob("*-of-*.json"))


def files(directory):
    """What a directory holds: name -> bytes."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(pathlib.Path(directory).rglob("*"))
        if path.is_file()
    }


def output(directory):
    """What a stage wrote, without what differs by run and by private key."""
    found = files(directory)
    stage = json.loads(found.pop("stage.json"))
    return found, stage["config"], stage["result"]

"""Runs a stage through its command line, to kill it with SIGKILL and go on."""

import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import time

from helpers import forking

ROOT = pathlib.Path(__file__).resolve().parents[2]


def command(stage, directory, settings, configured=True):
    """Returns the command for a stage, `configured` with its config file if any."""
    config = ROOT / "configs" / f"{stage}.py"
    return [
        sys.executable,
        "-m",
        "tfdpsq.run",
        stage,
        *([f"--config={config}"] if configured and config.is_file() else []),
        f"--workdir={directory}",
        *(f"--config.{key}={value}" for key, value in settings.items()),
    ]


class Run:
    """One workdir: `name` is what the stage writes, beside `private/`."""

    def __init__(self, stage, base, name, settings):
        """Starts nothing."""
        self._stage, self._settings = stage, settings
        self.base, self.out, self._name = base, base / name, name

    def start(self, *flags, environment=None, **options):
        """Starts the stage in a process of its own; returns a `forking.Command`."""
        return forking.Command(
            [*command(self._stage, self.out, {**self._settings, **options}), *flags],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        )

    def paid(self):
        """The steps in the ledger."""
        path = self.base / "private" / "runs" / self._name / "ledger.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[1:-1]  # a torn last line is not yet one
        return [json.loads(line)["step"] for line in lines]

    def wait_for(self, steps, child):
        """Returns when this many steps are paid for."""
        while len(self.paid()) < steps:
            assert child.poll() is None, child.said()[1]
            time.sleep(0.002)

    def kill_after(self, steps, *flags):
        """Starts it, or goes on, and kills it when this many steps are paid for."""
        child = self.start(*flags)
        self.wait_for(steps, child)
        child.kill()
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        assert not self.out.exists()  # nothing half-finished is released

    def finish_undisturbed(self, copy):
        """Runs it to its end; `copy` gets its seeds and its state after one step.

        The process is stopped while its private directory is copied, so the copy is
        what a kill at that moment would have left.
        """
        child = self.start()
        self.wait_for(1, child)
        child.send_signal(signal.SIGSTOP)
        shutil.copytree(self.base / "private", copy.base / "private")
        child.send_signal(signal.SIGCONT)
        _, errors = child.communicate()
        assert child.returncode == 0, errors[-3000:]

    def finish(self, *flags, status=0, **options):
        """Lets it run to its end; what it wrote to stderr."""
        child = self.start(*flags, **options)
        _, errors = child.communicate()
        assert child.returncode == status, errors[-3000:]
        return errors


def addresses(count):
    """Returns addresses of free ports of this machine."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("localhost", 0))
    found = [f"localhost:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    return found


def cluster(size):
    """TF_CONFIG of each worker, on free ports of this machine."""
    workers = addresses(size)
    return [
        {
            "TF_CONFIG": json.dumps(
                {
                    "cluster": {"worker": workers},
                    "task": {"type": "worker", "index": index},
                }
            )
        }
        for index in range(size)
    ]

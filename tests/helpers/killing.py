"""A stage run through its command line, to be killed with SIGKILL and gone on with."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def command(stage, directory, settings):
    """Returns the command for a stage, with its config file if it has one."""
    config = ROOT / "configs" / f"{stage}.py"
    return [
        sys.executable,
        "-m",
        f"tfdpsq.run.{stage}",
        *([f"--config={config}"] if config.is_file() else []),
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
        """The stage in a process of its own, errors piped."""
        return subprocess.Popen(
            [*command(self._stage, self.out, {**self._settings, **options}), *flags],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def paid(self):
        """The steps in the ledger."""
        path = self.base / "private" / "runs" / self._name / "ledger.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[1:-1]  # a torn last line is not yet one
        return [json.loads(line)["step"] for line in lines]

    def wait_for(self, steps, child):
        """Returns when so many steps are paid for."""
        while len(self.paid()) < steps:
            assert child.poll() is None, child.stderr.read()
            time.sleep(0.002)

    def kill_after(self, steps, *flags):
        """Starts it, or goes on, and kills it when so many steps are paid for."""
        child = self.start(*flags)
        self.wait_for(steps, child)
        child.kill()
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        assert not self.out.exists()  # nothing half-finished is released

    def finish(self, *flags, status=0, environment=None, **options):
        """Lets it run to its end; what it wrote to stderr."""
        child = self.start(*flags, environment=environment, **options)
        _, errors = child.communicate()
        assert child.returncode == status, errors[-3000:]
        return errors


def cluster(size):
    """TF_CONFIG of each worker, on ports of this machine that nobody listens at."""
    probes = [socket.socket() for _ in range(size)]
    for probe in probes:
        probe.bind(("localhost", 0))
    workers = [f"localhost:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
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

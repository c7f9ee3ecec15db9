"""A stage run through its command line, to be killed with SIGKILL and gone on with."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def command(stage, directory, settings):
    """What runs a stage into a directory."""
    return [
        sys.executable,
        "-m",
        f"tfdpsq.run.{stage}",
        f"--config=configs/{stage}.py",
        f"--workdir={directory}",
        *(f"--config.{key}={value}" for key, value in settings.items()),
    ]


class Run:
    """One workdir: `name` is what the stage writes, beside `private/`."""

    def __init__(self, stage, base, name, settings):
        """Starts nothing."""
        self._stage, self._settings = stage, settings
        self.base, self.out, self._name = base, base / name, name

    def start(self, **options):
        """The stage in a process of its own, errors piped."""
        return subprocess.Popen(
            command(self._stage, self.out, {**self._settings, **options}),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
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

    def kill_after(self, steps):
        """Starts it, or goes on, and kills it when so many steps are paid for."""
        child = self.start()
        while len(self.paid()) < steps:
            assert child.poll() is None, child.stderr.read()
            time.sleep(0.002)
        child.kill()
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        assert not self.out.exists()  # nothing half-finished is released

    def finish(self, status=0, **options):
        """Lets it run to its end; what it wrote to stderr."""
        child = self.start(**options)
        _, errors = child.communicate()
        assert child.returncode == status, errors[-3000:]
        return errors

"""Runs the stages of a job in one process, each in its directory of the workdir.

What derives from public documents alone, or carries a certificate of finite ε, goes
under `release/`; everything else under `private/`.
"""

from __future__ import annotations

import gc
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.run.core import layout, outputs, releases, used_parts, workdir
from tfdpsq.run.devices import strategy

SECONDS_FILE = "seconds.json"
MEMORY_FILE = "peak_memory.json"
# Seconds that no stage takes: a damaged file.
LONGEST = 1e12


def measured(path: pathlib.Path) -> dict[str, float]:
    """Reads a file of `Stages`; empty where there is none.

    Raises:
      DataError: it is damaged.
    """
    found = workdir.read_json(path) if path.is_file() else {}
    for name, value in found.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < LONGEST:
            raise validation.DataError(
                path,
                f"it is damaged: {validation.shown(name)} is {validation.shown(value)}",
                "Restore it, or move it away: it only says what stages took.",
            )
    return found


class Stages:
    """The stages of one job, and the time each took.

    Attributes:
      private: directory of what must not be released.
      release: directory of what may be released.
      seconds: name of the output -> seconds that its stage took, earlier runs included.
      peak_memory_gib: the largest of all processes that ran a part of the job.
    """

    def __init__(self, directory: pathlib.Path):
        """Opens the private and release directories of an existing workdir."""
        self.private = directory / "private"
        self.release = directory / "release"
        outputs.open_private(self.private)
        self.seconds = measured(self.private / SECONDS_FILE)
        self.peak_memory_gib = measured(self.private / MEMORY_FILE).get("gib", 0.0)

    def imported(
        self, module: Any, config: ml_collections.ConfigDict, logs: Mapping[str, str]
    ) -> pathlib.Path:
        """Imports a log, unless it was and a run has paid for steps since.

        Then the log is not read again: it may have grown, or be deleted.

        Returns:
          The directory of the pairs.

        Raises:
          InputError: what `import` raises.
        """
        made = self.private / layout.IMPORTED
        paid = used_parts.holds_paid_runs(self.private)
        if paid and (made / workdir.STAGE_FILE).is_file():
            return made
        return self.run(module, config, layout.IMPORTED, False, logs=dict(logs))

    def run(
        self,
        module: Any,
        config: ml_collections.ConfigDict,
        name: str,
        free: bool,
        *devices: strategy.Devices,
        **settings: Any,
    ) -> pathlib.Path:
        """Runs one stage unless it is finished.

        `free` outputs carry a finite ε or derive from public data alone. `devices` are
        for stages that train; `settings` override those of the stage's config.

        Returns:
          The output directory.

        Raises:
          InputError: what the stage raises.
        """
        config = config.copy_and_resolve_references()
        if "private_directory" in config:
            config.private_directory = str(self.private)
        with config.unlocked():
            for field, value in settings.items():
                config[field] = value  # `update` would keep a mapping's old entries
        out = (self.release if free else self.private) / name
        stage = module.run(config, out, *devices)
        # Keras keeps every graph; those of a dozen stages would add up.
        tf.keras.backend.clear_session()
        gc.collect()
        if "seconds" in stage:  # it ran now
            self.seconds[name] = stage["seconds"]
            peak = max(self.peak_memory_gib, workdir.peak_memory_gib())
            self.peak_memory_gib = peak
            for file, value in (
                (SECONDS_FILE, self.seconds),
                (MEMORY_FILE, {"gib": peak}),
            ):
                outputs.write_file(
                    self.private / file,
                    json.dumps(value, indent=2) + "\n",
                    releases.PRIVATE,
                    "how long private stages took",
                )
        for each in devices:
            each.notice.end_if_asked()
        return out

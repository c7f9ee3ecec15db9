"""Runs stages of one job in one process, each into its place in the job's workdir.

What is made from public documents alone, or carries a certificate of finite ε, goes
under `release/`; everything else under `private/`.
"""

from __future__ import annotations

import gc
import json
import pathlib
from typing import Any

import ml_collections
import tensorflow as tf

from tfdpsq.run.core import outputs, releases, workdir
from tfdpsq.run.devices import strategy

SECONDS_FILE = "seconds.json"
MEMORY_FILE = "peak_memory.json"


class Stages:
    """One job's stages, and how long each took.

    Attributes:
      private: where what must not be released lies.
      release: where what may be released lies.
      seconds: output's name -> seconds that its stage took, runs before included.
      peak_memory_gib: the most of all processes that ran a part of the job.
    """

    def __init__(self, directory: pathlib.Path):
        """Takes up a workdir, which exists.

        Args:
          directory: the workdir.
        """
        self.private = directory / "private"
        self.release = directory / "release"
        outputs.open_private(self.private)
        path = self.private / SECONDS_FILE
        self.seconds: dict[str, float] = (
            json.loads(path.read_text("utf-8")) if path.is_file() else {}
        )
        path = self.private / MEMORY_FILE
        self.peak_memory_gib: float = (
            json.loads(path.read_text("utf-8"))["gib"] if path.is_file() else 0.0
        )

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

        Args:
          module: the stage's.
          config: its settings, which are copied.
          name: of its output directory.
          free: whether the output carries a finite ε or touches nothing private.
          *devices: what a stage that trains is trained on, unless the default.
          **settings: what the job sets in the stage's config.

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
                config[field] = value  # `update` would keep what a mapping held before
        out = (self.release if free else self.private) / name
        stage = module.run(config, out, *devices)
        # Keras keeps every graph it ever built; a dozen stages would add up.
        tf.keras.backend.clear_session()
        gc.collect()
        if "seconds" in stage:  # it was run now
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
        return out

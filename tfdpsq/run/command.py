"""The command line that every stage shares: `--config`, `--workdir`, clear errors."""

from __future__ import annotations

import logging as standard_logging
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from tfdpsq import validation


def main(run: Callable[[Any, pathlib.Path], Any]) -> None:
    """Parses the flags and calls `run(config, workdir)`.

    Bad input ends the program with one line on standard error and exit status 2:
    what is wrong, where, and what to do; a traceback would only hide it.

    Args:
      run: the stage.
    """
    config = config_flags.DEFINE_config_file(
        "config", None, "Python file whose get_config() returns the settings."
    )
    directory = flags.DEFINE_string("workdir", None, "Where all output goes.")
    flags.mark_flags_as_required(["config", "workdir"])

    def started(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        logging.set_verbosity(logging.INFO)
        # Advice on how to write TensorFlow programs is of no use to those who run one.
        standard_logging.getLogger("tensorflow").setLevel(standard_logging.ERROR)
        try:
            run(config.value, pathlib.Path(directory.value))
        except (validation.InputError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            sys.exit(2)

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    app.run(started)

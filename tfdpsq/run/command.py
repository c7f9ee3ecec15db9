"""Command lines: `--config` and `--workdir` for stages, own flags for scripts.

Either way, bad input ends the program with one line on standard error and exit status
2: what is wrong, where, and what to do; a traceback would only hide it. Status 75 says
that the same command, started again, goes on; see `preemption`.
"""

from __future__ import annotations

import logging as standard_logging
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

from tfdpsq import privacy, validation
from tfdpsq.run import preemption, strategy


def main(run: Callable[..., Any], strategies: tuple[str, ...] = ()) -> None:
    """Parses the flags and calls `run(config, workdir)`.

    Args:
      run: the stage.
      strategies: those that it can train under; it is then called with the
        `strategy.Devices` as well. A stage that has none refuses all but the default.
    """
    config = config_flags.DEFINE_config_file(
        "config", None, "Python file whose get_config() returns the settings."
    )
    directory = flags.DEFINE_string("workdir", None, "Where all output goes.")
    flags.mark_flags_as_required(["config", "workdir"])
    chosen = strategy.define_flags()

    def started(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        logging.set_verbosity(logging.INFO)
        # Advice on how to write TensorFlow programs is of no use to those who run one.
        standard_logging.getLogger("tensorflow").setLevel(standard_logging.ERROR)
        try:
            into = pathlib.Path(directory.value)
            offered = strategies or ("default",)
            with strategy.opened(**chosen(), offered=offered) as devices:
                if strategies:
                    devices.notice.listen()
                    strategy.run(run, config.value, into, devices)
                else:
                    run(config.value, into)
        except (validation.InputError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            sys.exit(2)
        except (privacy.Preempted, strategy.LostWorker) as stopped:
            sys.stderr.write(f"{stopped}. Start the same command again to go on.\n")
            sys.exit(preemption.RESTART)

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    app.run(started)


def script(
    run: Callable[[Sequence[str]], tuple[int, str]],
    own: flags.FlagValues,
    argv: Sequence[str] | None,
    help_text: str | None,
    usage: str,
) -> NoReturn:
    """Parses flags of a script's own, calls `run` and exits.

    Not absl's global flags: those that other modules define mean nothing here, and a
    wrong one would exit with 1, which may have another meaning.

    Args:
      run: takes the words that are no flags, and returns the exit status and what to
        print; raises `app.UsageError` where the command is wrong.
      own: the flags, which `run` then finds parsed.
      argv: the command line, program first; `None` takes the process's.
      help_text: what `--help` prints.
      usage: a line that a wrong command is answered by.
    """
    words = list(sys.argv if argv is None else argv)
    logging.set_verbosity(logging.ERROR)
    if "--help" in words:
        sys.stdout.write(help_text or usage)
        sys.exit(0)
    try:
        status, text = run(own(words)[1:])
    except (flags.Error, app.UsageError) as error:
        reason = f"error: {error}\n" if str(error) else ""
        sys.stderr.write(reason + usage)
        sys.exit(2)
    except (validation.InputError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    sys.stdout.write(text)
    sys.exit(status)

"""Command lines: `--config` and `--workdir` for stages, own flags for scripts.

Either way, bad input ends the program with one line on standard error and exit status
2: what is wrong, where, and what to do; a traceback would only hide it. Status 75 says
that the same command, started again, goes on; see `preemption`.
"""

from __future__ import annotations

import importlib
import logging as standard_logging
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

from tfdpsq import privacy, validation
from tfdpsq.run.devices import preemption, strategy, tpus


def main(
    run: Callable[..., Any],
    strategies: tuple[str, ...] = (),
    sharded: bool = False,
) -> None:
    """Parses the flags and calls `run(config, workdir)`.

    Args:
      run: the stage.
      strategies: those that it can train under; it is then called with the
        `strategy.Devices` as well. A stage that has none refuses all but the default.
      sharded: whether its work is a pass over shards: then flags say which of them
        this command does, and `run` takes a `passes.Launch` besides.
    """
    config = config_flags.DEFINE_config_file(
        "config", None, "Python file whose get_config() returns the settings."
    )
    directory = flags.DEFINE_string("workdir", None, "Where all output goes.")
    flags.mark_flags_as_required(["config", "workdir"])
    chosen = strategy.define_flags()
    if sharded:
        run = _under_its_name(run)
        _define_launch()

    def started(argv: list[str]) -> None:
        by_beam = sharded and flags.FLAGS.beam
        if len(argv) > 1 and not by_beam:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        logging.set_verbosity(logging.INFO)
        # Advice on how to write TensorFlow programs is of no use to those who run one.
        standard_logging.getLogger("tensorflow").setLevel(standard_logging.ERROR)
        try:
            into = place_of(directory.value, sharded)
            offered = strategies or ("default",)
            where = chosen()
            with strategy.opened(**where, offered=offered) as devices:
                for line in tpus.advice(config.value) if where["kind"] == "tpu" else ():
                    logging.warning("%s", line)
                if strategies:
                    devices.notice.listen()
                    strategy.run(run, config.value, pathlib.Path(into), devices)
                else:
                    run(config.value, into, *([_launch(argv[1:])] if sharded else []))
        except (validation.InputError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            sys.exit(2)
        except (privacy.Preempted, strategy.LostWorker) as stopped:
            sys.stderr.write(f"{stopped}. Start the same command again to go on.\n")
            sys.exit(preemption.RESTART)

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    app.run(started, flags_parser=_parse if sharded else app.parse_flags_with_usage)


def place_of(workdir: str, anywhere: bool) -> str | pathlib.Path:
    """Where a stage's output goes.

    Args:
      workdir: as it is given.
      anywhere: whether the stage writes to other file systems, too, such as `gs://`.

    Returns:
      A local path, or `workdir` itself if it is none: as a `pathlib.Path` it would be
      that of a local directory called "gs:".

    Raises:
      InputError: it is not local, and the stage writes to local paths alone.
    """
    if "://" not in workdir:
        return pathlib.Path(workdir)
    if anywhere:
        return workdir
    raise validation.InputError(
        f"workdir is {workdir}; this stage writes to local paths, or to what is "
        "mounted as one."
    )


def _define_launch() -> None:
    flags.DEFINE_integer("num_shards", 1, "How many commands share the work.")
    flags.DEFINE_integer("shard_index", 0, "Which of them this is, from 0.")
    flags.DEFINE_boolean(
        "beam", False, "Let Apache Beam's workers do it; flags unknown here are Beam's."
    )


def _launch(words: Sequence[str]) -> Any:
    """The `passes.Launch` that the flags say."""
    # It loads TensorFlow, which scripts need not do.
    from tfdpsq.run.passes import passes

    own = flags.FLAGS
    if own.shard_index and own.num_shards == 1 and not own["num_shards"].present:
        raise validation.InputError(
            f"shard_index is {own.shard_index}, but num_shards was not given. Say how "
            "many commands share the work."
        )
    return passes.Launch(
        own.num_shards, own.shard_index, tuple(words) if own.beam else None
    )


def _parse(argv: list[str]) -> list[str]:
    """As absl does; with --beam, words that are no flag of ours are left over."""
    if not any(word in ("--beam", "-beam", "--beam=true") for word in argv):
        return app.parse_flags_with_usage(argv)
    try:
        return flags.FLAGS(argv, known_only=True)
    except flags.Error as error:
        sys.stderr.write(f"FATAL Flags parsing error:\n  {error}\n")
        sys.exit(1)


def _under_its_name(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the script that is run, as its module has it when imported.

    Workers of Beam import what they are sent by the name of its module, and there is
    no `__main__` of ours in them.
    """
    spec = getattr(sys.modules[run.__module__], "__spec__", None)
    if run.__module__ != "__main__" or spec is None:
        return run
    return getattr(importlib.import_module(spec.name), run.__name__)


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

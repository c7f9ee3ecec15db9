"""Command lines: `--config` and `--workdir` for stages, own flags for scripts.

Either way, bad input ends the program with one line on standard error and exit status
2: what is wrong, where, and what to do; a traceback would only hide it. Status 75 says
that the same command, started again, goes on; see `preemption`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import logging as standard_logging
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from tfdpsq import privacy, validation
from tfdpsq.run.core import config_file
from tfdpsq.run.devices import preemption, strategy, tpus

_AGAIN = "Start the same command again to go on."
_NO_DIRECTORY = (
    "There is a file where a directory is needed: move it, or use another directory."
)


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
    module = sys.modules[run.__module__]
    config = config_file.define_flag(
        _name_of(module), getattr(module, "SETTINGS", None)
    )
    directory = flags.DEFINE_string("workdir", None, "Where all output goes.")
    chosen = strategy.define_flags()
    if sharded:
        run = _under_its_name(run)
        _define_launch()

    def started(argv: list[str]) -> None:
        logging.set_verbosity(logging.INFO)
        # Advice on how to write TensorFlow programs is of no use to those who run one.
        standard_logging.getLogger("tensorflow").setLevel(standard_logging.ERROR)
        with _told():
            if config.value is None:
                raise validation.InputError(
                    "no config was given. Pass --config=FILE, such as "
                    "configs/finetune.py."
                )
            into = place_of(directory.value, sharded)
            offered = strategies or ("default",)
            where = chosen()
            with strategy.opened(**where, offered=offered) as devices:
                for line in tpus.advice(config.value) if where["kind"] == "tpu" else ():
                    logging.warning("%s", line)
                devices.notice.listen()
                if strategies:
                    strategy.run(run, config.value, pathlib.Path(into), devices)
                else:
                    run(config.value, into, *([_launch(argv[1:])] if sharded else []))

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    app.run(started, flags_parser=functools.partial(_parse, sharded=sharded))


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Ends the program with one line and a status where what is inside fails."""
    try:
        yield
    except (validation.InputError, OSError) as error:
        _refuse(_of_system(error))
    except (privacy.Preempted, strategy.LostWorker) as stopped:
        sys.stderr.write(f"{stopped}. {_AGAIN}\n")
        sys.exit(preemption.RESTART)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nthe command was asked to end. {_AGAIN}\n")
        sys.exit(preemption.RESTART)
    except SystemExit as ended:
        if ended.code == preemption.RESTART:
            sys.stderr.write(f"\nthe command was asked to end. {_AGAIN}\n")
        raise


def _refuse(message: object) -> NoReturn:
    sys.stderr.write(f"error: {validation.one_line(message)}\n")
    sys.exit(2)


def _of_system(error: Exception) -> str:
    """What an error says; of the operating system's, with what to do about it."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    remedies = {
        errno.ENOENT: "Correct the path.",
        errno.EEXIST: _NO_DIRECTORY,
        errno.ENOTDIR: _NO_DIRECTORY,
        errno.EISDIR: "Give a file instead.",
        errno.EACCES: "Change its permissions, or use another path.",
        errno.EROFS: "Use another path.",
        errno.ENOSPC: "Make room there, and start the same command again.",
        errno.ENAMETOOLONG: "Use a shorter path.",
    }
    remedy = remedies.get(error.errno or 0, "Correct the path, or use another.")
    return f"{os.fspath(error.filename)!s}: {error.strerror}. {remedy}"


def _name_of(module: types.ModuleType) -> str:
    """The command's name, also of a script that is run."""
    spec = getattr(module, "__spec__", None)
    return (spec.name if spec else module.__name__).rpartition(".")[2]


def place_of(workdir: str | None, anywhere: bool) -> str | pathlib.Path:
    """Where a stage's output goes.

    Args:
      workdir: as it is given.
      anywhere: whether the stage writes to other file systems, too, such as `gs://`.

    Returns:
      A local path, or `workdir` itself if it is none: as a `pathlib.Path` it would be
      that of a local directory called "gs:".

    Raises:
      InputError: it is empty or a file; it is not local, and the stage writes to local
        paths alone.
    """
    if not workdir or not workdir.strip():
        raise validation.InputError(
            "no workdir was given. Pass --workdir=DIRECTORY for the output."
        )
    if "\0" in workdir:
        raise validation.InputError("workdir holds a NUL character. Leave it out.")
    if "://" not in workdir:
        place = pathlib.Path(workdir)
        for above in (place, *place.parents):
            if os.path.lexists(above):
                if not above.is_dir():
                    raise validation.InputError(
                        f"workdir is {workdir}, but {above} is not a directory. Give a "
                        "directory, or a path where there is nothing yet."
                    )
                break
        return place
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


def _parse(argv: list[str], sharded: bool) -> list[str]:
    """Parses the flags; with --beam, words that are not flags of ours are left over."""
    by_beam = any(word in ("--beam", "-beam", "--beam=true") for word in argv)
    try:
        rest = flags.FLAGS(argv, known_only=sharded and by_beam)
    except Exception as error:  # ml_collections raises what it meets
        _refuse(config_file.explained(error))
    if len(rest) > 1 and not by_beam:
        _refuse(
            f"unexpected arguments: {validation.cut(' '.join(rest[1:]))}. Flags begin "
            "with --, such as --config=FILE."
        )
    return rest


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
        reason = f"error: {validation.one_line(error)}\n" if str(error) else ""
        sys.stderr.write(reason + usage)
        sys.exit(2)
    except (validation.InputError, OSError) as error:
        _refuse(_of_system(error))
    sys.stdout.write(text)
    sys.exit(status)

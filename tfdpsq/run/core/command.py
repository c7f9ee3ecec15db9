"""Command lines: `--config` and `--workdir` for stages, flags of their own for scripts.

Bad input ends the program with one line on standard error and exit status 2: what is
wrong, where, and what to do. Status 75 means that the same command, started again, goes
on; see `preemption`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import logging as standard_logging
import os
import pathlib
import re
import resource
import sqlite3
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from tfdpsq import privacy, validation
from tfdpsq.data import io
from tfdpsq.run.core import config_file, settings, streams
from tfdpsq.run.devices import dtypes, preemption, strategy

_NO_MEMORY = "ResourceExhaustedError"
_NO_DIRECTORY = (
    "There is a file where a directory is needed: move it, or use another directory."
)

# A setting that is a tuple, with its flag or by itself; and ∞ in one, as in a config.
_TUPLE = re.compile(r"(--?config[\w.]*=)?\(")
_INFINITY = re.compile(
    r"""(?<=[(,\s])(inf|math\.inf|float\((["'])inf\2\))(?=\s*[,)])"""
)
# TensorFlow's, wherever such a path is first used. Compared by text: scripts do not
# import TensorFlow.
_UNKNOWN_SYSTEM = re.compile(
    r"File system scheme '([^']*)' not implemented \(file: '([^']*)'\)"
)


def main(
    run: Callable[..., Any],
    strategies: tuple[str, ...] = (),
    sharded: bool = False,
    spends: bool = False,
    runs_models: bool = False,
) -> None:
    """Parses the flags and calls `run(config, workdir)`.

    `strategies` are those that `run` can train under; it then takes `strategy.Devices`
    as well. `runs_models` says that it trains nothing, but that its models run on the
    devices of a strategy of one process (`strategy.here`). `sharded` says that the
    stage is a pass over shards: flags then choose the shards of this command, and `run`
    takes a `passes.Launch` as well. `spends` says that the stage can train on private
    pairs with a guarantee: a flag then limits the ε of all releases from them.
    """
    streams.prepare()
    _disable_core_dumps()
    module = sys.modules[run.__module__]
    declaration = getattr(module, "SETTINGS", None)
    config = config_flag(_name_of(module), declaration)
    directory = flags.DEFINE_string("workdir", None, "Where all output goes.")
    chosen = strategy.define_flags()
    limit = _define_limit() if spends else lambda place: contextlib.nullcontext()
    if sharded:
        run = _under_its_name(run)
        _define_launch()

    def started(argv: list[str]) -> None:
        logging.set_verbosity(logging.INFO)
        # TensorFlow's advice is meant for those who write programs.
        standard_logging.getLogger("tensorflow").setLevel(standard_logging.ERROR)
        with _reported_errors():
            given_config(config)
            into = place_of(directory.value, sharded)
            offered = strategies or (
                strategy.ONE_PROCESS if runs_models else ("default",)
            )
            where = chosen()
            if sharded and flags.FLAGS.beam and where["kind"] != "default":
                raise validation.InputError(
                    f"strategy is {where['kind']!r} with --beam, whose workers have "
                    "one device each. Leave out one of the two."
                )
            with (
                limit(into),
                strategy.opened(**where, offered=offered) as devices,
                strategy.using(devices),
            ):
                for line in dtypes.advice(config.value, where["kind"]):
                    logging.warning("%s", line)
                devices.notice.listen()
                if strategies:
                    strategy.run(run, config.value, pathlib.Path(into), devices)
                else:
                    run(config.value, into, *([_launch(argv[1:])] if sharded else []))
            preemption.finished()

    if "--help" in sys.argv[1:]:
        said = _help(module.__doc__ or "", declaration or {})
        sys.exit(0 if streams.say(said) else 2)
    parse = functools.partial(
        _parse, sharded=sharded, has_default=declaration is not None
    )
    app.run(started, flags_parser=parse)


def _help(about: str, declaration: settings.Declaration) -> str:
    """Says what a stage does, its flags, and its settings with their defaults."""
    own = [m for m in flags.FLAGS.flags_by_module_dict() if m.startswith("tfdpsq.")]
    parts = [
        about.strip(),
        "Flags:\n" + "\n".join(flags.FLAGS.module_help(name) for name in own),
        "Settings, with their defaults:\n\n"
        + "\n".join(f"  --config.{line}" for line in settings.listed(declaration)),
    ]
    return "\n\n".join(parts) + "\n"


def _disable_core_dumps() -> None:
    """A crash would write memory, private queries and seeds included, to a file."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def program(started: Callable[[], None]) -> None:
    """Parses the flags and calls `started`, for a command that has no workdir."""
    streams.prepare()

    def run(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        standard_logging.getLogger("tensorflow").setLevel(standard_logging.ERROR)
        with _reported_errors():
            started()

    app.run(
        run, flags_parser=functools.partial(_parse, sharded=False, has_default=False)
    )


def config_flag(stage: str, declaration: settings.Declaration | None = None) -> Any:
    """`config_file.define_flag`, which reads the command line; ends where it cannot."""
    with refused_flags():
        return config_file.define_flag(stage, declaration)


@contextlib.contextmanager
def refused_flags() -> Iterator[None]:
    """Ends the program with one line where the block cannot read the command line.

    Such as a flag without its value, or a --flagfile that is not there.
    """
    try:
        yield
    except (flags.Error, validation.InputError, OSError) as error:
        _refuse(_of_system(error))
    except UnicodeDecodeError as error:
        _refuse(f"a --flagfile is not in UTF-8 ({error.reason}). Convert it.")


def given_config(holder: Any) -> Any:
    """The config that was given.

    Raises:
      InputError: there is none, or a placeholder in it has no value.
    """
    if holder.value is None:
        raise validation.InputError(
            "no config was given. Pass --config=FILE, such as configs/finetune.py."
        )
    settings.require_values(holder.value)
    return holder.value


@contextlib.contextmanager
def _reported_errors() -> Iterator[None]:
    """Ends the program with one line and an exit status when the block fails."""
    try:
        preemption.imported()
        with io.full_disk_as_os_error():
            yield
    except (validation.InputError, OSError) as error:
        _refuse(_of_system(error))
    except sqlite3.OperationalError as error:
        _refuse(
            f"a temporary database of pairs failed: {error}. Make room in its folder, "
            "or set SQLITE_TMPDIR to another one, and start the same command again."
        )
    except (privacy.Preempted, strategy.LostWorker) as stopped:
        sys.stderr.write(f"{stopped}. {preemption.AGAIN}\n")
        sys.exit(preemption.RESTART)
    except KeyboardInterrupt:
        sys.stderr.write(preemption.ASKED)
        sys.exit(preemption.RESTART)
    except SystemExit as ended:
        if ended.code == preemption.RESTART:
            sys.stderr.write(preemption.ASKED)
        raise
    except Exception as error:
        # TensorFlow's by its name: scripts do not import TensorFlow.
        if isinstance(error, MemoryError) or type(error).__name__ == _NO_MEMORY:
            _refuse(
                "there is not enough memory. Lower batch_size, microbatch_size, or the "
                "lengths of texts, and start the command again: what is finished is "
                "kept."
            )
        found = _UNKNOWN_SYSTEM.match(str(getattr(error, "message", "")))
        if not found:
            raise
        _refuse(
            f"{found[2]} is of a file system {found[1]!r}, which TensorFlow does not "
            "know here. Copy it to this machine or give what is mounted; some schemes "
            "need a package of their own, such as tensorflow-io."
        )


def _one_line(message: object) -> str:
    """Puts a message on one line, long words (values, paths) cut."""
    words = str(message).split()
    return " ".join(w if len(w) <= 300 else validation.cut(w) for w in words)


def _refuse(message: object) -> NoReturn:
    sys.stderr.write(f"error: {_one_line(message)}\n")
    sys.exit(2)


def _of_system(error: Exception) -> str:
    """Returns an error's message; adds the remedy to the operating system's errors."""
    if isinstance(error, OSError) and error.errno in io.FULL:
        of = f"{os.fspath(error.filename)!s}: " if error.filename else ""
        return (
            f"{of}{error.strerror}. Make room there (or lift the quota), and start the "
            "same command again."
        )
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return "the current directory was deleted. Change to one that exists."
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    remedies = {
        errno.ENOENT: "Correct the path.",
        errno.EEXIST: _NO_DIRECTORY,
        errno.ENOTDIR: _NO_DIRECTORY,
        errno.EISDIR: "Give a file instead.",
        errno.EACCES: "Change its permissions, or use another path.",
        errno.EROFS: "Use another path.",
        errno.ENAMETOOLONG: "Use a shorter path.",
    }
    remedy = remedies.get(error.errno or 0, "Correct the path, or use another.")
    return f"{os.fspath(error.filename)!s}: {error.strerror}. {remedy}"


def _name_of(module: types.ModuleType) -> str:
    """Returns the command's name; also for a module that is run as a script."""
    spec = getattr(module, "__spec__", None)
    return (spec.name if spec else module.__name__).rpartition(".")[2]


def place_of(workdir: str | None, anywhere: bool) -> str | pathlib.Path:
    """Checks where a stage's output goes.

    `anywhere` says that the stage also writes to other file systems, such as `gs://`.

    Returns:
      An absolute local path, also of a `file://` URL: "." has no name, and no parent
      for private things. Or `workdir` itself if it is not local: `pathlib.Path` would
      turn it into a local directory called "gs:".

    Raises:
      InputError: it is empty, a file, or not local where the stage needs a local one.
    """
    if not workdir or not workdir.strip():
        raise validation.InputError(
            "no workdir was given. Pass --workdir=DIRECTORY for the output."
        )
    if "\0" in workdir:
        raise validation.InputError("workdir holds a NUL character. Leave it out.")
    if "://" not in workdir:
        place = pathlib.Path(os.path.abspath(workdir))
        if os.path.realpath(place) != os.path.realpath(workdir):
            # With ".." after a link, which leads to the parent of what is linked.
            place = pathlib.Path.cwd() / workdir
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
        f"workdir is {workdir}; this stage writes to local paths only. Give a local "
        "path, or a directory where that file system is mounted."
    )


def _define_limit() -> Callable[[Any], contextlib.AbstractContextManager]:
    """Defines --budget and --released; returns what enters the limit they set."""
    epsilon = flags.DEFINE_float(
        "budget",
        0.0,
        "Refuse to spend if epsilon of all releases together would exceed this: of "
        "those in the workdir's release/ and in each --released. 0 checks nothing.",
    )
    released = flags.DEFINE_multi_string(
        "released", [], "A directory of earlier releases from the same pairs."
    )

    def limited(place: Any) -> contextlib.AbstractContextManager:
        # Imported here: it loads TensorFlow, which scripts do not need.
        from tfdpsq.run.core import spending

        if flags.FLAGS["budget"].present:
            validation.positive("budget", epsilon.value)
        return spending.limited(epsilon.value, released.value, place)

    return limited


def _define_launch() -> None:
    flags.DEFINE_integer("num_shards", 1, "Number of commands that share the work.")
    flags.DEFINE_integer("shard_index", 0, "Index of this command, from 0.")
    flags.DEFINE_boolean(
        "beam", False, "Run on Apache Beam's workers; unknown flags go to Beam."
    )


def _launch(words: Sequence[str]) -> Any:
    """Returns the `passes.Launch` of the flags."""
    # Imported here: it loads TensorFlow, which scripts do not need.
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


def _parse(argv: list[str], sharded: bool, has_default: bool) -> list[str]:
    """Parses the flags; with --beam, returns the words that are not our flags."""
    by_beam = any(word in ("--beam", "-beam", "--beam=true") for word in argv)
    try:
        _require_text(argv[1:])
        words = config_file.with_config(argv) if has_default else argv
        words = [_with_infinity(word) for word in words]
        rest = flags.FLAGS(words, known_only=sharded and by_beam)
    except SystemExit:  # --help was given, and answered
        sys.exit(0)
    except Exception as error:  # ml_collections re-raises any error of a config
        _refuse(config_file.explained(error))
    if len(rest) > 1 and not by_beam:
        _refuse(
            f"unexpected arguments: {validation.cut(' '.join(rest[1:]))}. Flags begin "
            "with --, such as --config=FILE."
        )
    return rest


def _with_infinity(word: str) -> str:
    """Returns a word in which a tuple holds ∞ as a literal, which is what is parsed."""
    if _TUPLE.match(word) is None:
        return word
    return _INFINITY.sub("1e999", word)


def _require_text(words: Sequence[str]) -> None:
    """Refuses bytes that are not UTF-8, which no record of a setting can hold."""
    before = ""
    for word in words:
        flag, _, value = word.partition("=") if word[:1] == "-" else (before, "", word)
        flag = flag or "the command line"
        # Of a flag without a value, the next word is the value.
        before = word if word[:1] == "-" and "=" not in word else ""
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise validation.InputError(
                f"{flag} is given {validation.shown(value)}, which holds bytes that "
                "are not UTF-8. Give a text or path in UTF-8; rename the file if need "
                "be."
            ) from error


def _under_its_name(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function from its module as imported, not from `__main__`.

    Beam's workers import functions by module name and have no such `__main__`.
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
    """Parses a script's own flags, calls `run` and exits.

    absl's global flags are not used: those of other modules mean nothing here, and a
    wrong one would exit with status 1, which a script may use for something else.

    `run` takes the positional words and returns the exit status and the text to print;
    it raises `app.UsageError` for a wrong command. `argv` has the program first; `None`
    takes the process's. `usage` is printed for a wrong command.
    """
    streams.prepare()
    words = list(sys.argv if argv is None else argv)
    logging.set_verbosity(logging.ERROR)
    if "--help" in words:
        sys.exit(0 if streams.say(help_text or usage) else 2)
    try:
        preemption.imported()
        status, text = run(own(words)[1:])
    except (flags.Error, app.UsageError) as error:
        reason = f"error: {_one_line(error)}\n" if str(error) else ""
        sys.stderr.write(reason + usage)
        sys.exit(2)
    except (validation.InputError, OSError) as error:
        _refuse(_of_system(error))
    except KeyboardInterrupt:
        sys.stderr.write(preemption.ASKED)
        sys.exit(preemption.RESTART)
    # Nobody has read the answer, so the status must not say that it is a good one.
    sys.exit(status if streams.say(text) else 2)

"""The command line: `tfdpsq STAGE --workdir=DIR [--config=FILE] [--config.KEY=VALUE]`.

| exit status | meaning                                                     |
|-------------|-------------------------------------------------------------|
| 0           | the output is there                                         |
| 2           | bad input, in one sentence on standard error                |
| 75          | stopped (a signal, a lost worker): the same command goes on |

Anything else is a bug of ours, with Python's own traceback.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import inspect
import logging as standard_logging
import os
import pathlib
import re
import resource
import runpy
import sqlite3
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import ml_collections
from absl import flags, logging
from ml_collections import config_flags

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.run.frame import pipeline, places, process, runner, settings
from tfdpsq.validation import InputError

_STAGES = pathlib.Path(__file__).parents[1] / "stages"
_PACKAGE = "tfdpsq.run.stages"
_USAGE = """usage: tfdpsq STAGE [--config=FILE] --workdir=DIR [--config.KEY=VALUE ...]

`tfdpsq STAGE --help` shows a stage's flags and settings. Stages:

"""
_OVERRIDE = re.compile(r"--?config\.([^=]*)(=.*)?")
# ∞ in a tuple, which flags read as a literal.
_INFINITY = re.compile(r"(?<=[(,\s])(inf|math\.inf|float\(([\"'])inf\2\))(?=\s*[,)])")


# -- Stages ----------------------------------------------------------------------------


def names() -> dict[str, str]:
    """Returns all commands, with the first line of their docstrings.

    Files are parsed, not imported: TensorFlow takes seconds to load.
    """
    found = {}
    for file in sorted(_STAGES.glob("[!_]*.py")):
        said = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
        found[file.stem] = said.partition("\n")[0].rstrip(".")
    return found


def stage(name: str) -> Any:
    """Returns the `Stage` or the `Job` of a command."""
    return importlib.import_module(f"{_PACKAGE}.{name}").STAGE


def main() -> None:
    """Runs the command that the first word names, with the other words."""
    process.prepare_streams()
    known, words = names(), sys.argv[1:]
    if not words or words[0] in ("--help", "-h", "help"):
        width = max(map(len, known))
        rows = "".join(f"  {name:{width}}  {line}\n" for name, line in known.items())
        if words:
            _end(0, _USAGE + rows)
        sys.stderr.write(_USAGE + rows)
        sys.exit(2)
    if words[0] not in known:
        near = difflib.get_close_matches(words[0][:80], known, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        _refuse(
            f"there is no stage {words[0][:80]!r}.{hint} `tfdpsq --help` lists them."
        )
    with reported():
        module = importlib.import_module(f"{_PACKAGE}.{words[0]}")
        about = inspect.getdoc(module) or ""
        if not hasattr(module, "main"):
            run(module.STAGE, words[1:], about)
            return
        logging.set_verbosity(logging.ERROR)  # a tool that makes no output
        _end(*((0, f"{about}\n") if "--help" in words else module.main(words[1:])))


def _end(status: int, text: str) -> NoReturn:
    sys.exit(status if process.say(text) else 2)


def run(made: Any, words: Sequence[str], about: str) -> None:
    """Parses the flags of a stage or a job, and runs it.

    `about` is what `--help` says of it.
    """
    # A crash would write memory, private queries and seeds included, to a file.
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))
    logging.set_verbosity(logging.INFO)
    # TensorFlow's advice is meant for those who write programs.
    standard_logging.getLogger("tensorflow").setLevel(standard_logging.ERROR)
    own = flags.FlagValues()
    _define_flags(own, made)
    if "--help" in words:
        shown = "\n".join(f"  --{n}={own[n].default or ''}  {own[n].help}" for n in own)
        lines = settings.help_lines(made.Settings())
        listed = "\n".join(f"  --config.{line}" for line in lines)
        text = f"{about}\n\nFlags:\n\n{shown}\n\nSettings, with their defaults:\n\n"
        _end(0, f"{text}{listed}\n")
    file, words = _without_config(words)
    given = load(file) if file else settings.config_of(made.Settings)
    _require_known(given, made, words)
    words = [made.name, *map(_with_infinity, words)]
    holder = config_flags.DEFINE_config_dict(
        "config", given, flag_values=own, sys_argv=words
    )
    rest = _parse(own, words)
    s = settings.from_config(made.Settings, holder.value)
    place = places.Place.of(own["workdir"].value)
    with _devices(own) as devices:
        if isinstance(made, pipeline.Job):
            said = pipeline.run(made, s, pathlib.Path(place.path), devices)
        else:
            beam = tuple(rest) if "beam" in own and own["beam"].value else None
            record = runner.execute(made, s, place, devices, beam)
            said = f"{place.path}: {record.get('line') or 'finished'}"
        process.finished()
        process.say(f"{said}\n" if said else "")


def _define_flags(own: flags.FlagValues, made: Any) -> None:
    """Defines the flags that a stage takes."""
    define = {"flag_values": own}
    flags.DEFINE_string("workdir", None, "Where the output goes.", **define)
    if len(made.strategies) > 1:
        text = f"What models run on, one of {', '.join(made.strategies)}."
        flags.DEFINE_enum("strategy", "default", made.strategies, text, **define)
        text = 'For --strategy=tpu: its name or address, or "local".'
        flags.DEFINE_string("tpu", "", text, **define)
        text = "For --strategy=mirrored: number of devices; 0 for all GPUs."
        flags.DEFINE_integer("replicas", 0, text, 0, **define)
    if made.sharded:
        text = "Run on Apache Beam's workers; other flags go to Beam."
        flags.DEFINE_boolean("beam", False, text, **define)


def _parse(own: flags.FlagValues, words: Sequence[str]) -> list[str]:
    """Parses the flags; with --beam, returns the words that are not ours."""
    by_beam = "beam" in own and any(re.match("--?beam(=true)?$", w) for w in words)
    try:
        rest = own(words, known_only=by_beam)[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(own), 1)
        hint = f" Did you mean --{near[0]}?" if near else " See --help."
        raise InputError(f"there is no flag --{error.flagname}.{hint}") from error
    except (flags.Error, TypeError, ValueError) as error:
        raise InputError(str(error)) from error
    if rest and not by_beam:
        said = validation.cut(" ".join(rest))
        raise InputError(f"unexpected arguments: {said}. Flags begin with --.")
    return rest


def _with_infinity(word: str) -> str:
    """Returns a word in which a tuple holds ∞ as a literal, which is what is read."""
    is_tuple = re.match(r"(--?config[\w.]*=)?\(", word)
    return _INFINITY.sub("1e999", word) if is_tuple else word


def _without_config(words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the value of `--config`, or "", and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-config", nargs="?", default="", const="")
    found, others = parser.parse_known_args(list(words))
    return found.config, others


def _require_known(given: Any, made: Any, words: Sequence[str]) -> None:
    """Refuses flags of settings that are not there."""
    known = settings.all_names(made.Settings)
    for name in (m[1] for m in map(_OVERRIDE.match, words) if m):
        node: Any = given
        for part in name.split("."):
            if not isinstance(node, ml_collections.ConfigDict) or part not in node:
                near = settings.nearest(name, known)
                hint = f"Did you mean --config.{near}?" if near else "See --help."
                raise InputError(f"there is no setting --config.{name}. {hint}")
            node = node[part]


def load(path: str) -> ml_collections.ConfigDict:
    """Calls `get_config` of `FILE`, or of `FILE:ARGUMENT` with the argument.

    Raises:
      InputError: names file and line.
    """
    file, *arguments = path.split(":", 1)
    if not os.path.isfile(file):
        raise InputError(
            f"--config is {path!r}, where there is no file. Give a Python file with "
            "get_config(), such as configs/finetune.py."
        )
    try:
        found = runpy.run_path(file).get("get_config")
        if not callable(found):
            raise InputError("it has no function get_config()")
        inspect.signature(found).bind(*arguments)
        config = found(*arguments)
        if not isinstance(config, ml_collections.ConfigDict):
            raise InputError("get_config() must return a ConfigDict")
        config.to_dict()  # fails at a placeholder
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
        where = f"{file}:{line}" if line else file
        raise InputError(f"{where}: the config fails: {error}") from error
    return config


@contextlib.contextmanager
def _devices(own: flags.FlagValues) -> Iterator[Any]:
    """Yields the devices of the flags; `None` for a stage that takes none."""
    if "strategy" not in own:
        yield None
        return
    from tfdpsq.run.frame import devices

    with devices.opened(*(own[n].value for n in ("strategy", "tpu", "replicas"))) as of:
        of.notice.listen()
        yield of


# -- Errors ----------------------------------------------------------------------------


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Ends the program with one sentence and an exit status when the block fails."""
    try:
        process.imported()
        with io.full_disk_as_os_error():
            yield
    except (InputError, OSError) as error:
        _refuse(_in_words(error))
    except sqlite3.OperationalError as error:
        _refuse(
            f"a temporary database failed: {error}. Make room, or set SQLITE_TMPDIR."
        )
    except KeyboardInterrupt:
        _stop("the command was asked to end")
    except SystemExit as ended:
        if ended.code == process.RESTART:
            sys.stderr.write(process.ASKED)
        raise
    except Exception as error:
        kind, text = type(error).__name__, str(getattr(error, "message", error))
        if kind in ("Preempted", "LostWorker"):
            _stop(str(error))
        if isinstance(error, MemoryError) or kind == "ResourceExhaustedError":
            _refuse(
                "there is not enough memory. Lower batch_size, microbatch_size or the "
                "lengths of texts, and start again: what is finished is kept."
            )
        if "File system scheme" in text:  # TensorFlow, wherever a path is first used
            _refuse(f"{text}. Use a path of another kind.")
        raise


def _in_words(error: Exception) -> str:
    """Returns an error's message, with a remedy for those of the operating system."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    remedy = "Correct the path, or use another."
    if error.errno in io.FULL:
        remedy = "Make room there, and start the same command again."
    return f"{os.fspath(error.filename)!s}: {error.strerror}. {remedy}"


def _stop(message: str) -> NoReturn:
    sys.stderr.write(f"\n{message}. {process.AGAIN}\n")
    sys.exit(process.RESTART)


def _refuse(message: str) -> NoReturn:
    words = (w if len(w) <= 300 else validation.cut(w) for w in message.split())
    sys.stderr.write(f"error: {' '.join(words)}\n")
    sys.exit(2)

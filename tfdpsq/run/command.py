"""The command line: `tfdpsq STAGE --workdir=DIR [--config=FILE] [--config.KEY=VALUE]`.

| exit status | meaning                                                     |
|-------------|-------------------------------------------------------------|
| 0           | the output is there                                         |
| 2           | bad input, in one sentence on standard error                |
| 75          | stopped (a signal, a lost worker): the same command goes on |

Anything else is a bug of ours, with Python's own traceback.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import gc
import importlib
import inspect
import logging as standard_logging
import os
import pathlib
import re
import resource
import runpy
import signal
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import ml_collections
from absl import flags, logging
from ml_collections import config_flags

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.run import jobs, process
from tfdpsq.run.frame import places, runner, settings
from tfdpsq.validation import InputError

_STAGES = pathlib.Path(__file__).parent / "stages"
_PACKAGE = "tfdpsq.run.stages"
_USAGE = """usage: tfdpsq STAGE [--config=FILE] --workdir=DIR [--config.KEY=VALUE ...]

`tfdpsq STAGE --help` shows a stage's flags and settings. Stages:

"""


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
    signal.signal(signal.SIGTERM, process.end_at_once)
    known, words = names(), sys.argv[1:]
    if not words or words[0] in ("--help", "-h", "help"):
        width = max(map(len, known))
        rows = "".join(f"  {name:{width}}  {line}\n" for name, line in known.items())
        _end(0 if words else 2, _USAGE + rows)
    if words[0] not in known:
        near = difflib.get_close_matches(words[0], known, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        _refuse(f"there is no stage {words[0]!r}.{hint} `tfdpsq --help` lists them.")
    with reported():
        gc.disable()  # a quarter of the time that imports take
        module = importlib.import_module(f"{_PACKAGE}.{words[0]}")
        gc.freeze()
        gc.enable()
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
    config, rest, fit = _parse(own, made, [made.name, *words])
    s = settings.from_config(made.Settings, config)
    place = places.Place.of(own["workdir"].value)
    with _devices(own) as devices:
        if isinstance(made, jobs.Job):
            said = jobs.run(made, s, pathlib.Path(place.path), devices, fit)
        else:
            beam = tuple(rest) if "beam" in own and own["beam"].value else None
            record = runner.execute(made, s, place, devices, beam)
            said = f"{place.path}: {record.get('line') or 'finished'}"
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


def _parse(
    own: flags.FlagValues, made: Any, words: list[str]
) -> tuple[Any, list[str], jobs.Fit | None]:
    """Parses all flags; returns config, words for Beam, and the config file's fit."""
    first = flags.FlagValues()
    first.set_gnu_getopt()
    flags.DEFINE_string("config", "", "", flag_values=first)
    by_beam = "beam" in own and any(re.match("--?beam(=true)?$", w) for w in words)
    words = first(words, known_only=True)
    file = first["config"].value
    found: Any = load(file) if file else (settings.config_of(made.Settings), None)
    given, fit = found
    try:
        holder = config_flags.DEFINE_config_dict(
            "config", given, flag_values=own, sys_argv=words
        )
        rest = own(words, known_only=by_beam)[1:]
    except (AttributeError, KeyError) as error:
        name = re.findall(r"\w+", str(error))[0]  # ahead of ml_collections' own hint
        raise settings.unknown(name, settings.all_names(made.Settings)) from error
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from error
    if rest and not by_beam:
        raise InputError(
            f"unexpected arguments: {' '.join(rest)}. Flags begin with --."
        )

    def fitted(*counts: int) -> tuple[settings.Settings, dict[str, float]]:
        seconds = fit(holder.value, *counts)
        holder.value.update_from_flattened_dict(own["config"].override_values)
        return settings.from_config(made.Settings, holder.value), seconds

    return holder.value, rest, fitted if fit else None


def load(path: str) -> tuple[ml_collections.ConfigDict, Any]:
    """Returns the config of `FILE`, or `FILE:ARGUMENT`, and the file's `fit` or `None`.

    Raises:
      InputError: there is no such file or function.
    """
    file, *arguments = path.split(":", 1)
    if not os.path.isfile(file):
        raise InputError(
            f"--config is {path!r}, where there is no file. Give a Python file with "
            "get_config(), such as configs/finetune.py."
        )
    found = runpy.run_path(file)
    if "get_config" not in found:
        raise InputError(f"{file} has no function get_config(). Define one.")
    return found["get_config"](*arguments), found.get("fit")


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
        with io.full_disk_as_os_error():
            yield
    except (InputError, OSError, flags.Error) as error:
        _refuse(_in_words(error))
    except sqlite3.OperationalError as error:
        _refuse(
            f"a temporary database failed: {error}. Make room, or set SQLITE_TMPDIR."
        )
    except KeyboardInterrupt:
        _stop("the command was asked to end")
    except Exception as error:
        kind = type(error).__name__
        if kind in ("Preempted", "LostWorker"):
            _stop(str(error))
        if isinstance(error, MemoryError) or kind == "ResourceExhaustedError":
            _refuse(
                "there is not enough memory. Lower batch_size, microbatch_size or the "
                "lengths of texts, and start again: what is finished is kept."
            )
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

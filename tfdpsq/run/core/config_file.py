"""Reads `--config`: a Python file, an argument for it, and overrides of its settings.

A missing or broken file, a config of another stage and an unknown setting are all
`InputError`s of one line.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from tfdpsq import run as commands
from tfdpsq import validation
from tfdpsq.run.core import settings

_FLAG = "config"
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)")
_EXAMPLE = "such as configs/finetune.py"
# Most characters of a message that a config fails with.
_LONGEST = 1000
# Value of `--config` that stands for the stage's default config.
_DEFAULTS = "<defaults>"

# How Python begins to say that a flag's value is not a number.
_NOT_PARSED = {
    "invalid literal for int()": "an integer",
    "could not convert string to float": "a number",
}


def define_flag(stage: str, declaration: settings.Declaration | None) -> Any:
    """Defines `--config`; returns the flag's holder.

    Without a declaration any config is accepted, and none is the default.
    """
    holder = config_flags.DEFINE_config_file(
        _FLAG, None, "Python file whose get_config() returns the settings."
    )
    flags.FLAGS[_FLAG].parser = _Parser(stage, declaration)
    return holder


class _Parser(flags.ArgumentParser):
    """Loads a config, and checks which settings the command line overrides."""

    def __init__(self, stage: str, declaration: settings.Declaration | None):
        self._stage, self._declaration = stage, declaration

    def parse(self, path: str) -> ml_collections.ConfigDict:
        """Returns the config of `FILE` or `FILE:ARGUMENT`.

        Raises:
          InputError: there is none, or it belongs to another stage.
        """
        if self._declaration is not None and path == _DEFAULTS:
            config = settings.default_config(self._declaration)
        else:
            config = load(path)
        if self._declaration is not None:
            _require_stage(path, config, self._stage, self._declaration)
        for word in sys.argv[1:]:
            override = _OVERRIDE.fullmatch(word.split("=", 1)[0])
            if override:
                _require_setting(config, override[1])
        # A placeholder gets its value from the command line, after this.
        with contextlib.suppress(ml_collections.config_dict.RequiredValueError):
            config.lock()
        return config

    def flag_type(self) -> str:
        """Names the type of the value in `--help`."""
        return "config object"


def with_config(argv: list[str]) -> list[str]:
    """Returns a command line with the stage's default config where it names none."""
    given = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
    if any(re.match(rf"--?{_FLAG}(=|$)", word) for word in given):
        return argv
    return [argv[0], f"--{_FLAG}={_DEFAULTS}", *argv[1:]]


def load(path: str) -> ml_collections.ConfigDict:
    """Calls `get_config` of `FILE`, or of `FILE:ARGUMENT` with the argument.

    Raises:
      InputError: names file and line.
    """
    file, *arguments = path.split(":", 1)
    if not os.path.isfile(file):
        raise validation.InputError(
            f"--config is {validation.shown(path)}, where there is no file. Give a "
            f"Python file whose get_config() returns the settings, {_EXAMPLE}."
        )
    # Through a loader: the file may have any name.
    loader = importlib.machinery.SourceFileLoader(f"{_FLAG}_config", file)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    _attempted(file, lambda: loader.exec_module(module))
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise validation.InputError(
            f"{file} has no function get_config(). Give a config, {_EXAMPLE}."
        )
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError as error:
        raise validation.InputError(
            f"{file}: get_config takes no argument, but --config is {path!r}. Remove "
            "the colon and what follows it."
            if arguments
            else f"{file}: get_config needs an argument. Give it after a colon: "
            f"--config={file}:NAME; the file lists the names."
        ) from error
    config = _attempted(file, lambda: get_config(*arguments))
    if not isinstance(config, ml_collections.ConfigDict):
        raise validation.InputError(
            f"{file}: get_config() returned {validation.shown(config)}; it must return "
            "an ml_collections.ConfigDict. Start from the stage's default_config()."
        )
    if isinstance(config, ml_collections.FrozenConfigDict):
        config = ml_collections.ConfigDict(config)
    _require_tree(file, config)
    return config


def stage_of(config: ml_collections.ConfigDict) -> str:
    """Returns the stage that shares most settings with a config, or ""."""
    names = set(config)
    found = {
        name: len(names & declared) / len(names | declared)
        for name, declared in _all_stages().items()
    }
    best = max(found, key=lambda name: found[name])
    return best if found[best] > 0.5 else ""


def _all_stages() -> dict[str, set[str]]:
    """Returns the names of the settings of every stage."""
    found = {}
    for entry in pkgutil.iter_modules(commands.__path__):
        if not entry.ispkg and not entry.name.startswith("_"):
            module = importlib.import_module(f"{commands.__name__}.{entry.name}")
            if hasattr(module, "SETTINGS"):
                found[entry.name] = set(module.SETTINGS)
    return found


def _require_stage(path: Any, config: Any, stage: str, declaration: Any) -> None:
    if set(config) == set(declaration):
        return
    other = stage_of(config)
    if other and other != stage:
        raise validation.InputError(
            f"{path} is a config of the stage {other}, but this is {stage}. Run "
            f"python -m {commands.__name__}.{other}, or give a config of {stage}."
        )
    # `settings.check` reports missing and unknown settings.


def _require_tree(
    file: str, config: ml_collections.ConfigDict, above: tuple[int, ...] = ()
) -> None:
    """Refuses a config that holds itself, or names that are not texts."""
    if id(config) in above:
        raise validation.InputError(
            f"{file}: get_config() returned a config that holds itself. Copy what is "
            "in it twice, by copy_and_resolve_references()."
        )
    try:
        inside = config.items(preserve_field_references=True)
        texts = all(isinstance(name, str) for name, _ in inside)
    except TypeError:  # names of several types cannot be sorted
        inside, texts = [], False
    if not texts:
        raise validation.InputError(
            f"{file}: get_config() returned a config with a name that is not a text. "
            "Settings have texts as names; correct it."
        )
    for _, value in inside:
        if isinstance(value, ml_collections.FieldReference):
            try:
                value = value.get()
            except ml_collections.config_dict.RequiredValueError:
                continue
        if isinstance(value, ml_collections.ConfigDict):
            _require_tree(file, value, (*above, id(config)))


def _require_setting(config: ml_collections.ConfigDict, name: str) -> None:
    whole, bracket, _ = name.partition("[")
    if bracket and whole:
        raise validation.InputError(
            f"--config.{validation.cut(name)} would set a part of a value. Give the "
            f'whole: --config.{whole}=VALUE, such as "(1, 2)".'
        )
    node: Any = config
    for part in name.split("."):
        if not isinstance(node, ml_collections.ConfigDict) or part not in node:
            names = settings.all_names(config)
            near = settings.nearest(name, names)
            raise validation.InputError(
                f"there is no setting --config.{validation.cut(name)}. "
                + (f"Did you mean --config.{near}?" if near else "")
                + ("" if near else f"There are {', '.join(sorted(config))}.")
            )
        # No flag can set a required placeholder: ml_collections reads it before.
        node = settings.value_of(node, part, name[: -len(part)])


def _attempted(file: str, call: Callable[[], Any]) -> Any:
    """Returns what a call into the config file returns; errors name the line there."""
    try:
        return call()
    except SyntaxError as error:
        place = f"{error.filename or file}:{error.lineno or 1}"
        raise validation.InputError(
            f"{place}: it is not Python ({error.msg}). Give a config, {_EXAMPLE}."
        ) from error
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if os.path.realpath(frame.filename) == os.path.realpath(file)
        ]
        place = f"{file}:{lines[-1]}" if lines else file
        own = isinstance(error, validation.InputError)
        text = str(error) if own else f"{type(error).__name__}: {error}"
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]}... ({len(text):,} characters)"
        raise validation.InputError(f"{place}: the config fails: {text}") from error


def explained(error: Exception) -> str:
    """Returns the message for an error raised while flags were parsed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, validation.InputError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, flags.UnrecognizedFlagError):
        near = difflib.get_close_matches(error.flagname, list(flags.FLAGS), 1)
        hint = f" Did you mean --{near[0]}?" if near else " See --help."
        return f"there is no flag --{error.flagname}.{hint}"
    if isinstance(error, flags.Error):
        said, _, by_python = str(error).partition(": ")
        for start, kind in _NOT_PARSED.items():
            if by_python.startswith(start):
                return f"{said}: it must be {kind}."
        return str(error)
    return f"the command line cannot be read: {type(error).__name__}: {error}"

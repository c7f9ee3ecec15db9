"""Reads `--config`: a Python file, an argument for it, and overrides of its settings.

Everything that can be wrong with them is an `InputError` of one line: a file that is
not there, is not Python or fails, a config of another stage, a setting that does not
exist.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
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
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]+)")
_EXAMPLE = "such as configs/finetune.py"


def define_flag(stage: str, declaration: settings.Declaration | None) -> Any:
    """Defines `--config`; returns the flag's holder.

    Args:
      stage: the command's name.
      declaration: of its settings; `None` takes any config.
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
        """The config of `FILE` or `FILE:ARGUMENT`.

        Raises:
          InputError: there is none, or not of this stage.
        """
        config = load(path)
        if self._declaration is not None:
            _require_stage(path, config, self._stage, self._declaration)
        for word in sys.argv[1:]:
            override = _OVERRIDE.fullmatch(word.split("=", 1)[0])
            if override and "[" not in override[1]:
                _require_setting(config, override[1])
        config.lock()
        return config

    def flag_type(self) -> str:
        """What `--help` calls a value."""
        return "config object"


def load(path: str) -> ml_collections.ConfigDict:
    """What the file's `get_config` returns.

    Args:
      path: `FILE`, or `FILE:ARGUMENT` for a `get_config` that takes one.

    Raises:
      InputError: names file and line.
    """
    file, *arguments = path.split(":", 1)
    if not os.path.isfile(file):
        raise validation.InputError(
            f"--config is {validation.shown(path)}, where there is no file. Give a "
            f"Python file whose get_config() returns the settings, {_EXAMPLE}."
        )
    loader = importlib.machinery.SourceFileLoader(f"{_FLAG}_config", file)
    module = _attempted(file, loader.load_module)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise validation.InputError(
            f"{file} has no function get_config(). Give a config, {_EXAMPLE}."
        )
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError as error:
        raise validation.InputError(
            f"{file}: get_config takes no argument, but --config is {path!r}. Leave "
            "out what follows the colon."
            if arguments
            else f"{file}: get_config needs an argument. Give it after a colon: "
            f"--config={file}:NAME; the file says which there are."
        ) from error
    config = _attempted(file, lambda: get_config(*arguments))
    if not isinstance(config, ml_collections.ConfigDict):
        raise validation.InputError(
            f"{file}: get_config() returned {validation.shown(config)}; it must return "
            "an ml_collections.ConfigDict. Start from the stage's default_config()."
        )
    return config


def stage_of(config: ml_collections.ConfigDict) -> str:
    """Name of the stage whose settings a config has most in common with, or ""."""
    names = set(config)
    found = {
        name: len(names & declared) / len(names | declared)
        for name, declared in _all_stages().items()
    }
    best = max(found, key=lambda name: found[name])
    return best if found[best] > 0.5 else ""


def _all_stages() -> dict[str, set[str]]:
    """The names of the settings of every stage."""
    found = {}
    for entry in pkgutil.iter_modules(commands.__path__):
        if not entry.ispkg and not entry.name.startswith("_"):
            module = importlib.import_module(f"{commands.__name__}.{entry.name}")
            if hasattr(module, "SETTINGS"):
                found[entry.name] = set(module.SETTINGS)
    return found


def _require_stage(path, config, stage: str, declaration) -> None:
    if set(config) == set(declaration):
        return
    other = stage_of(config)
    if other and other != stage:
        raise validation.InputError(
            f"{path} is a config of the stage {other}, but this is {stage}. Run "
            f"python -m {commands.__name__}.{other}, or give a config of {stage}."
        )
    # The stage itself says which settings are missing or unknown.


def _require_setting(config: ml_collections.ConfigDict, name: str) -> None:
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
        node = node[part]


def _attempted(file: str, call: Callable[[], Any]) -> Any:
    """What a call of the config file returns; its errors with their place in it."""
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
        raise validation.InputError(f"{place}: the config fails: {text}") from error


def explained(error: Exception) -> str:
    """The message of what parsing flags raised."""
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
        return str(error)
    return f"the command line cannot be read: {type(error).__name__}: {error}"

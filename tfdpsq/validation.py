"""Errors for bad input, and checks that raise them before any work.

Each check returns the value that it was given, or raises an `InputError`.
"""

from __future__ import annotations

import importlib
import json
import numbers
import os
import sys
from collections.abc import Collection
from typing import Any

# Largest relevance of a document: trec_eval counts in a table of all values up to it.
MOST_RELEVANT = 1_000_000


class InputError(ValueError):
    """A value or a file from the user that is not usable."""

    # Otherwise autograph wraps this in an error of its own, inside tf.function.
    ag_pass_through = True


class DataError(InputError):
    """Bad content in a file: names the file, the line (from 1) and the remedy."""

    def __init__(
        self,
        path: str | os.PathLike,
        problem: str,
        remedy: str,
        line: int | None = None,
    ):
        """Makes the message; `problem` is without its full stop."""
        where = f"{os.fspath(path)}:{line}" if line is not None else os.fspath(path)
        super().__init__(f"{where}: {problem}. {remedy}")
        self.path, self.line = os.fspath(path), line


def shown(value: Any) -> str:
    """Returns the `repr` of a value for a message, cut to about 80 characters."""
    return cut(" ".join(repr(value).splitlines()))


def cut(text: str) -> str:
    """Cuts a text for a message to about 80 characters."""
    return text if len(text) <= 80 else f"{text[:55]}... ({len(text):,} characters)"


def parse_json(text: str | bytes) -> Any:
    """Parses JSON from any source; raises ValueError, also if it is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def id_text(value: Any) -> Any:
    """Returns an id that is an integer, as data frames hold it, as text."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return str(value) if whole else value


def library(module: str, remedy: str) -> Any:
    """Imports a package that only some users need; `remedy` is the error's text."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(remedy) from error


def positive(name: str, value: float) -> float:
    """Requires a finite number above zero."""
    if not _is_number(value) or not 0 < value <= sys.float_info.max:
        raise InputError(f"{name} is {shown(value)}; it must be finite and above 0.")
    return value


def positive_integer(name: str, value: int) -> int:
    """Requires an integer of at least one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise InputError(f"{name} is {shown(value)}; it must be an integer above 0.")
    return value


def in_range(
    name: str,
    value: float,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    high_open: bool = False,
) -> float:
    """Requires a number between `low` and `high`, both included unless open."""
    above = _is_number(value) and (low < value or low == value and not low_open)
    if not above or not (value < high or value == high and not high_open):
        interval = f"{'(' if low_open else '['}{low}, {high}{')' if high_open else ']'}"
        raise InputError(f"{name} is {shown(value)}; it must lie in {interval}.")
    return value


def one_of(name: str, value: Any, choices: Collection) -> Any:
    """Requires one of `choices`."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise InputError(f"{name} is {shown(value)}; choose one of {listed}.")
    return value


def local_path(name: str, path: str | os.PathLike) -> str:
    """Returns an absolute path; a URL would become a local directory "gs:"."""
    text = os.fspath(path)
    if not text.strip() or "://" in text:
        raise InputError(f"{name} is {shown(path)}; give a path of this machine.")
    return os.path.abspath(text)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)

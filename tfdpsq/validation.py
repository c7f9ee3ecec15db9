"""Checks shared by every package, which refuse bad values before any work.

Each check returns the value it was given, for use in ``__post_init__`` and in argument
handling, or raises an error that names the value, its setting and the remedy.
"""

from __future__ import annotations

import importlib
import json
import numbers
import os
import sys
from collections.abc import Collection
from typing import Any

# Largest relevance of a document for a query. trec_eval counts in a table of all values
# up to it: a time in seconds takes gigabytes, and from 2^32 on it is wrong.
MOST_RELEVANT = 1_000_000
# Longest value that a message repeats, in characters.
_SHOWN = 80


class InputError(ValueError):
    """A value or a file from the user that is not usable."""

    # Otherwise autograph, inside tf.function, wraps this in an error of its own, with
    # a page of generated code around the message.
    ag_pass_through = True


class DataError(InputError):
    """Bad content in a file: names the file, the line, the value, the remedy."""

    def __init__(
        self,
        path: str | os.PathLike,
        problem: str,
        remedy: str,
        line: int | None = None,
    ):
        """Makes the message.

        Args:
          path: the file.
          problem: what is wrong in it, with the value.
          remedy: what to do about it.
          line: where in the file, from 1.
        """
        where = f"{os.fspath(path)}:{line}" if line is not None else os.fspath(path)
        super().__init__(f"{where}: {problem}. {remedy}")
        self.path = os.fspath(path)
        self.line = line


def shown(value: Any) -> str:
    """Returns the `repr` of a value for a message, cut to about 80 characters."""
    try:
        text = " ".join(repr(value).splitlines())
    except ValueError:  # an integer of more digits than Python writes out
        text = f"an integer of {value.bit_length()} bits"
    return cut(text)


def cut(text: str) -> str:
    """Cuts a text for a message to about 80 characters."""
    if len(text) <= _SHOWN:
        return text
    return f"{text[: _SHOWN - 25]}... ({len(text):,} characters)"


def one_line(message: object) -> str:
    """Formats a message as a command prints it: on one line, long words cut.

    Line breaks become spaces; words of more than 300 characters (values and overlong
    paths) are cut.
    """
    words = str(message).split()
    return " ".join(word if len(word) <= 300 else cut(word) for word in words)


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parses JSON from any source; options are those of `json.loads`.

    Raises:
      ValueError: it is not JSON, is nested too deeply, or holds an integer of more
        digits than Python reads.
    """
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        if "digits" in str(error):
            raise ValueError("it holds an integer of thousands of digits") from error
        raise


def parse_integer(text: str) -> int:
    """Parses an integer of 64 bits, as `parse_int` of `parse_json`.

    Raises:
      ValueError: it has more, for which neither a float nor a table has room.
    """
    if abs(value := int(text)) >= 1 << 63:
        raise ValueError(f"the integer {cut(text)} has more than 64 bits")
    return value


def library(module: str, remedy: str) -> Any:
    """Returns a module of a package that only some users need.

    Args:
      module: its name.
      remedy: the error's text: what needs the package, and its pip line.

    Raises:
      InputError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(remedy) from error


def positive(name: str, value: float) -> float:
    """Returns `value` if it is a finite number above zero.

    Raises:
      InputError: it is not.
    """
    # An integer above the largest float is not a finite number to compute with.
    if not _is_number(value) or not 0 < value <= sys.float_info.max:
        raise InputError(
            f"{name} is {shown(value)}; it must be a finite number above 0."
        )
    return value


def positive_integer(name: str, value: int) -> int:
    """Returns `value` if it is an integer of at least one.

    Raises:
      InputError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise InputError(
            f"{name} is {shown(value)}; it must be an integer of at least 1."
        )
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
    """Returns `value` if it is between `low` and `high`.

    Args:
      name: name of the value where the user set it.
      value: the number to check.
      low: lower end of the interval.
      high: upper end of the interval.
      low_open: whether `low` itself is refused.
      high_open: whether `high` itself is refused.

    Raises:
      InputError: it is outside, or not a number.
    """
    inside = _is_number(value) and (
        (low < value if low_open else low <= value)
        and (value < high if high_open else value <= high)
    )
    if not inside:
        interval = f"{'(' if low_open else '['}{low}, {high}{')' if high_open else ']'}"
        raise InputError(f"{name} is {shown(value)}; it must lie in {interval}.")
    return value


def one_of(name: str, value: Any, choices: Collection) -> Any:
    """Returns `value` if it is one of `choices`.

    Raises:
      InputError: it is not; the message lists the choices.
    """
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise InputError(f"{name} is {shown(value)}; choose one of {listed}.")
    return value


def local_path(name: str, path: Any) -> str:
    """Returns an absolute path of this machine, of a directory or a file to be.

    Raises:
      InputError: it is empty, no path, or a URL: a local directory "gs:" would be made
        of one.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        text = ""
    if not text.strip() or "\0" in text or "://" in text:
        raise InputError(
            f"{name} is {shown(path)}, which is not a path of this machine. Give one, "
            "as a text or a pathlib.Path."
        )
    return os.path.abspath(text)


def given_path(name: str, path: str | os.PathLike) -> str | os.PathLike:
    """Returns `path` unless it is empty, which `pathlib` takes for ".".

    Raises:
      InputError: it is empty or blank.
    """
    if not os.fspath(path).strip():
        raise InputError(
            f"{name} is given as an empty value. Give its path; '.' is the current "
            "directory."
        )
    return path


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Lists up to five paths at which two JSON values differ, each with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            path = f"{where}.{key}" if where else key
            found += differences(old.get(key), new.get(key), path)
        return found[:5]
    # Compared as JSON: a tuple equals the list it was written as.
    if json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True):
        return []
    return [f"{where}: {shown(old)} there, {shown(new)} now"]


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)

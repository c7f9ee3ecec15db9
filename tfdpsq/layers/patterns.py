"""Selects parts of a model by patterns of their paths."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from tfdpsq import validation


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Returns whether a path matches a pattern, as in `fnmatch`, case-sensitively."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def require_matches(
    name: str, patterns: Sequence[str], paths: Sequence[str], what: str, example: str
) -> None:
    """Checks that there are patterns and that each matches a path.

    Args:
      name: name of the setting that holds them, for the message.
      patterns: the setting's value.
      paths: all paths.
      what: what a path leads to, such as "trainable weight", for the message.
      example: a valid value, for the message.

    Raises:
      InputError: no patterns, text instead of a list, or a pattern without a match;
        the message lists some paths.
    """
    if isinstance(patterns, str) or not patterns:
        raise validation.InputError(
            f"{name} is {patterns!r}; give a list of patterns, such as {example}."
        )
    for pattern in patterns:
        if not any(matches(path, [pattern]) for path in paths):
            shown = ", ".join(paths[:8]) + (", …" if len(paths) > 8 else "")
            raise validation.InputError(
                f"{name} holds {pattern!r}, which matches no {what}. There are "
                f"{len(paths)}: {shown or 'none'}."
            )

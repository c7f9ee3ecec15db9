"""Standard output that cannot end a command: a stage may print after it has paid."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO


class _Guarded:
    """Standard output that libraries write to: what they say may be lost."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except (OSError, ValueError):
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError):
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def guard() -> None:
    """Lets imports print where standard output is closed, full, or read by nobody."""
    stream = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stdout = _Guarded(stream)


def prepare() -> None:
    """Makes both streams take any text, also where they are closed or know ASCII only.

    What a stream cannot encode is written as the escape of its code.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> bool:
    """Writes a text to standard output; returns whether it got there.

    It does not where the reader has gone (`| head`), the disk is full or the stream
    is closed. Nothing more is written to such a stream.
    """
    stream = getattr(sys.stdout, "stream", sys.stdout)
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        return False
    return True

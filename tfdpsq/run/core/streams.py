"""Standard output that cannot end a command: a stage may print after it has paid."""

from __future__ import annotations

import os
import sys


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
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        return False
    return True
